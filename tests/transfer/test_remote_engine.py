"""The engine in another process: it delivers what the thread does, and its end loses nothing.

``make test-process`` runs the tests of reading with this engine; here is what only it can get wrong.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.transfer.reading import KIB, MIB, bytes_of, data, outcomes, quick, snapshot
from wds_async.errors import WdsError
from wds_async.transfer import engine as thread_engine
from wds_async.transfer.reader import InterleavedReader, ShardReader, open_shards
from wds_async.transfer.remote_engine import RemotePump, _EngineProcess
from wds_async.transfer.stats import Counters, idle_s

PART = 256 * KIB


@pytest.fixture(autouse=True)
def engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_ENGINE", "process")


def _pid() -> int:
    """The process that reads now."""
    process = _EngineProcess.current
    assert process is not None
    return process.pid


def _wait_for_end(pid: int) -> None:
    """Wait until there is no such process, or it is a zombie."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} goes on")


def _mixed(origin: Origin, folder: Path, rng: random.Random) -> list[Any]:
    """URLs and spans of every way to be read, some of them broken."""
    urls: list[Any] = []
    for number in range(24):
        content = data(rng.choice([0, 10, 70_000, 600_000]), number)
        path = folder / f"{number}.tar"
        path.write_bytes(content)
        url = origin.add(f"{number}.tar", content)
        span = {"url": url, "start": 5, "stop": 60_000}
        urls.append(rng.choice([url, url, url, str(path), f"pipe:cat {path}", origin.url("none.tar"), span]))
    return [*urls, str(folder / "none.tar"), "pipe:exit 3", "nonsense://x"]


@pytest.mark.parametrize("seed", range(3))
def test_both_engines_deliver_the_same(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    urls = _mixed(origin, tmp_path, random.Random(seed))
    origin.behave(path="/1*.tar", ignore_range=True)
    origin.behave(path="/2*.tar", times=2, cut_after=50_000)
    seen = []
    for engine in ("process", "thread"):
        monkeypatch.setenv("WDS_ENGINE", engine)
        counters = Counters()
        read = outcomes(urls, quick(budget_bytes=1 * MIB), counters)
        stats, traffic = snapshot(counters), counters.traffic.as_dict()
        seen.append([(content, type(error), str(error), vars(error or object)) for content, error in read])
        assert stats.bytes == sum(len(content) for content, _ in read)
        assert sum(one["bytes"] for one in traffic.values()) >= stats.bytes
        assert stats.requests > 0
        assert stats.window_bytes == 0
    for (content, *error), (other, *same) in zip(*seen, strict=True):
        assert content == other, (error, same)
        assert error[0] is same[0]
        # How long it was tried differs.
        assert error[1].split(":")[:2] == same[1].split(":")[:2]


def _read_in_turn(reader: InterleavedReader, rng: random.Random) -> dict[int, bytes]:
    """Read up to four shards at once, by chance."""
    got: dict[int, bytes] = {}
    lanes = [shard for _, shard in zip(range(4), reader, strict=False)]
    while lanes:
        shard = rng.choice(lanes)
        piece = shard.read()
        got[shard.number] = got.get(shard.number, b"") + bytes(piece or b"")
        if piece is None:
            lanes.remove(shard)
            lanes += [another for _, another in zip(range(1), reader, strict=False)]
    return got


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_its_death_loses_nothing(origin: Origin, seed: int, interleave: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is killed after a random number of pieces; streams and spans among the shards, two of them skipped."""
    rng = random.Random(seed)
    contents = [data(rng.choice([10, 70_000, 3 * PART]), i) for i in range(16)]
    urls: list[Any] = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(path="/?.tar", ignore_range=True)
    urls[12] = {"url": urls[12], "start": 7, "stop": 60_000}
    contents[12] = contents[12][7:60_000]
    left = rng.randrange(30)
    reads = ShardReader._next_event

    class Killed(type(open_shards([], interleave=interleave))):  # type: ignore[misc]
        def _next_event(self, stream: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(_pid(), signal.SIGKILL)
            return reads(self, stream)

    made = open_shards(urls, config=quick(budget_bytes=1 * MIB), interleave=interleave)
    reader = Killed(urls, made.options)
    with reader, caplog.at_level(logging.WARNING, "wds_async"):
        if interleave > 1:
            got = _read_in_turn(reader, rng)
            assert [got[number] for number in range(16)] == contents
        else:
            for shard, content in zip(reader, contents, strict=True):
                read = bytearray()
                left_at = min(100, len(content)) if shard.number in (3, 9) else len(content)
                while len(read) < left_at:
                    piece = shard.read()
                    assert piece is not None
                    read += piece
                assert read == content[: len(read)]
                assert shard.number in (3, 9) or shard.read() is None
    assert left > 0 or "a thread of this process reads in its place" in caplog.text
    assert bytes_of(urls[:3]) == contents[:3]  # by a new process


def test_an_object_that_is_replaced_while_the_process_dies_is_no_longer_read(origin: Origin) -> None:
    url = origin.add("x.tar", data(8 * MIB))
    with open_shards([url], config=quick(budget_bytes=1 * MIB)) as reader:
        shard = next(reader)
        shard.read()
        os.kill(_pid(), signal.SIGKILL)
        origin.add("x.tar", data(8 * MIB, 1))
        with pytest.raises(WdsError, match=r"x\.tar"):
            list(iter(shard.read, None))


def test_an_automatic_engine_moves_once_the_thread_is_crowded(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_ENGINE", "auto")
    contents = [data(2 * PART, i) for i in range(200)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    with open_shards(urls, config=quick(), lookahead=2) as reader:
        for shard, content in zip(reader, contents, strict=True):
            got = b""
            while (piece := shard.read()) is not None:
                got += bytes(piece)
            assert got == content
            if shard.number == 3:
                assert not reader._started or isinstance(reader._started[1], RemotePump)
                assert reader._started[1]._socket is None
                monkeypatch.setattr(thread_engine, "_crowding", "both threads compute")
            if shard.number == 10:  # the next shards go to the process as soon as it is there
                process = _EngineProcess.current
                while process is None or not process.started:
                    time.sleep(0.01)
        assert reader._started[1]._memory is not None
        assert len(reader._started[1]._local) == 1
    with open_shards(urls, config=quick()) as reader:  # and all of the next reader at once
        assert bytes(next(reader).read() or b"")
        assert isinstance(reader._started[1], RemotePump)
        assert not reader._started[1]._local


def test_a_changed_environment_gets_a_process_of_its_own(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    url = origin.add("x.tar", b"x")
    with open_shards([url]) as reader:
        before = _pid()
        assert bytes(next(reader).read() or b"") == b"x"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
        assert bytes_of([url]) == [b"x"]
        assert _pid() != before
    _wait_for_end(before)


@pytest.mark.parametrize("loader", [False, True])
def test_it_starts_before_the_first_reader(tmp_path: Path, loader: bool) -> None:
    program = [
        *("import sys", "import torch.utils.data" if loader else "", "import wds_async as wds"),
        *(
            "from wds_async.transfer.remote_engine import _EngineProcess",
            "dataset = wds.WebDataset('x.tar', shardshuffle=False)",
        ),
        "wds.WebLoader(dataset, batch_size=None).start()" if loader else "",
        "sys.exit(_EngineProcess.current is None)",
    ]
    if loader:
        pytest.importorskip("torch")
    command = [sys.executable, "-c", "\n".join(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")  # the process writes there too


def test_time_in_which_the_own_core_computes_is_not_idle() -> None:
    usable = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(usable)})
        assert idle_s() > 0
        before, until = idle_s(), time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        assert idle_s() - before < 0.1  # half a core would be 0.15 s
    finally:
        os.sched_setaffinity(0, usable)


PROGRAM = """
import os, signal, sys, time
from wds_async.transfer.reader import open_shards
from wds_async.transfer.remote_engine import _EngineProcess
reader = open_shards(sys.argv[2:])
shard = next(reader)
shard.read()
print(_EngineProcess.current.pid, flush=True)
match sys.argv[1]:
    case "exit": sys.exit()
    case "raise": raise ValueError
    case "kill": os.kill(os.getpid(), signal.SIGKILL)
    case "interrupt":
        for _ in range(1_000_000): shard.read()
        time.sleep(60)
    case "fork":
        if os.fork() == 0:
            print(next(open_shards(sys.argv[2:])).read()[:5].hex(), flush=True)
            time.sleep(1.5)  # the parent's process ends before this one
            os._exit(0)
        print(bytes(shard.read()[:0]), flush=True)
"""


@pytest.mark.parametrize("end", ["exit", "raise", "kill", "interrupt", "fork"])
def test_it_ends_with_its_program(origin: Origin, end: str) -> None:
    urls = [origin.add(f"{i}.tar", data(4 * MIB, i)) for i in range(8)]
    origin.behave(rate_bytes_s=4e6)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, end, *urls], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        if end == "interrupt":
            program.send_signal(signal.SIGINT)
        _wait_for_end(pid)
        output = program.communicate(timeout=20)
        if end == "fork":
            assert data(4 * MIB, 0)[:5].hex().encode() in output[0]
        assert program.returncode == {"raise": 1, "kill": -9, "interrupt": -2}.get(end, 0), output
        # Standard error is the process's too: it ends quietly, though the program has not read all.
        assert output[1].count(b"Traceback") == (end in ("raise", "interrupt")), output


def test_it_logs_where_the_program_logs(origin: Origin, caplog: pytest.LogCaptureFixture) -> None:
    origin.behave(times=2, status=503)
    with caplog.at_level(logging.DEBUG, "wds_async"):
        assert bytes_of([origin.add("x.tar", b"x")]) == [b"x"]
    assert any("503" in record.message and record.process != os.getpid() for record in caplog.records)
