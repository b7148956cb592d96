"""Datasets among processes and signals: each script in a fresh interpreter in development mode, and what it leaves."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.isolated.test_isolated import Start, end, start
from tests.servers import Origin, make_shards
from wds_async.transfer.stats import Board

__all__ = ["start"]

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

_ORPHANS_END_S = 20.0


def left(session: int) -> list[str]:
    """The commands of what is still alive of a script that was started with a session of its own. One that is shown in
    brackets has no command any more: it is defunct, and waits until somebody takes note. Some kernels show such a one
    as running for a while, with its only thread a zombie."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,pid=,args=", "--sid", str(session)], capture_output=True, text=True, check=False
    )
    found = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [" ".join(one) for one in found if not one[0].startswith("Z") and not one[2].startswith("[")]


def left_in_the_end(session: int) -> list[str]:
    """What is still alive of it after a while: Python's fork server and its tracker end when they hear nothing more,
    some moments behind the script."""
    deadline = time.monotonic() + _ORPHANS_END_S
    while (alive := left(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


@linux
@pytest.mark.parametrize("name", ["at_once.py", "epochs.py", "leave_dataset.py"])
def test_scripts_end_silently(start: Start, name: str) -> None:
    process = start(name)
    _, err = end(process)
    assert (err, process.returncode) == ("", 0)


@linux
def test_workers(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = start("workers.py", str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "end of the script\n"
    _, err = end(process)
    assert (err, process.returncode) == ("", 0)
    assert not left_in_the_end(process.pid)
    assert not list(tmp_path.glob("wds-async-*/*"))


@linux
def test_with_a_fork_server_by_default(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = start("forkserver.py", str(tmp_path))
    assert (*end(process), process.returncode) == ("", "", 0)
    assert not left_in_the_end(process.pid)


@posix
def test_a_worker_that_counts_while_its_program_exits(start: Start, tmp_path: Path) -> None:
    process = start("counts_late.py", str(tmp_path))
    out, err = end(process)
    assert (out, err, process.returncode) == ("counted\n", "", 0)
    assert not list(tmp_path.glob("wds-async-*/*"))


@posix
@pytest.mark.parametrize("workers", [0, 2])
def test_signals(start: Start, workers: int) -> None:
    if workers:
        pytest.importorskip("torch")
    process = start("signals.py", str(workers))
    assert process.stdout is not None
    for _ in range(2 if workers else 3):
        while (line := process.stdout.readline()) != "phase\n":
            assert line, end(process)
        time.sleep(0.1)  # either in the wait or just before it: both have to work
        process.send_signal(signal.SIGINT)
        while (line := process.stdout.readline()) == "phase\n":
            pass
        assert line == "interrupted\n", end(process)
    assert process.stdout.readline() == "phase\n"
    process.send_signal(signal.SIGTERM)
    _, err = end(process)
    assert (err, process.returncode) == ("", 7)
    assert not left_in_the_end(process.pid)


@linux
@pytest.mark.parametrize(("how", "engine", "processes"), [
    (signal.SIGKILL, "thread", 5), (signal.SIGKILL, "process", 9),
], ids=str)  # fmt: skip
def test_workers_of_a_killed_program(
    start: Start,
    tmp_path: Path,
    origin: Origin,
    how: signal.Signals,
    engine: str,
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("WDS_ENGINE", engine)
    for number, path in enumerate(make_shards(tmp_path / "shards", 2, 50)):
        origin.add(f"{number}.tar", path.read_bytes())
        origin.add(f"stalls-{number}.tar", bytes(10_000))
    origin.behave(path="/stalls-*", stall_after=512)
    process = start("orphaned.py", origin.base, str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    origin.wait_until(lambda server: server.in_flight >= 2)
    assert len(left(process.pid)) == processes
    process.send_signal(how)
    assert not left_in_the_end(process.pid)  # a second and a half, where nobody else wants the processor
    assert process.wait() == -how
    # Its folders of counters stay for a day, and go when another program's workers make theirs.
    folders = list(tmp_path.glob("wds-async-*/*"))
    assert folders
    for folder in folders:
        os.utime(folder, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = pickle.loads(pickle.dumps(Board()))
    board._pid = 1  # as in a worker
    board.counters()
    assert not [folder for folder in folders if folder.exists()]
