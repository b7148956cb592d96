"""Scripts that must end by themselves, soon, and without a word: each in a fresh interpreter in development mode."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# What the interpreter, pytest's absence and our imports cost on a busy machine.
_LIMIT_S = 50.0


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(name, *arguments)`` runs a script; what is left of it is killed with the test."""
    running: list[subprocess.Popen[str]] = []

    def run(name: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore:This process:DeprecationWarning"]
        process = subprocess.Popen(
            [*command, str(HERE / name), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait until it ends; what it said since, without what asyncio's debug mode says on a busy machine."""
    try:
        out, err = process.communicate(timeout=_LIMIT_S)
        return out, "".join(line for line in err.splitlines(True) if not line.startswith("Executing <"))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"it hangs; it said {out!r} {err[-2000:]!r}") from None


def soon(attempt: Callable[[], float]) -> bool:
    """Whether one of three ended sooner than five interpreters start here: nothing is waited for."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-X", "dev", "-c", "import asyncio, wds_async.transfer.reader"], check=True)
    start_s = time.monotonic() - began
    return any(attempt() < 5 * start_s for _ in range(3))


@pytest.mark.parametrize("name", ["leave.py", "no_memory.py", "read_all.py", "secondary_thread.py"])
def test_scripts_end_silently(start: Start, name: str) -> None:
    process = start(name)
    _, err = end(process)
    assert (err, process.returncode) == ("", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_fork(start: Start, tmp_path: Path) -> None:
    process = start("fork_child.py", str(tmp_path / "urls"))
    _, err = end(process)
    assert (err, process.returncode) == ("", 0)


def test_exit_with_open_readers(start: Start) -> None:
    def attempt() -> float:
        process = start("exit_open.py")
        assert process.stdout is not None
        line = process.stdout.readline()
        ended = time.monotonic()
        _, err = end(process)
        took_s = time.monotonic() - ended
        assert line.startswith("end of the script")
        assert (err, process.returncode) == ("", 0)
        listed = ["ps", "-o", "args=", "--sid", str(process.pid)]
        assert "yes" not in subprocess.run(listed, capture_output=True, text=True, check=False).stdout
        return took_s

    assert soon(attempt)


def test_an_uncaught_exception(start: Start) -> None:
    process = start("exit_uncaught.py")
    _, err = end(process)
    assert process.returncode == 1
    assert err.rstrip().endswith("LookupError: expected, at 65536")
    assert "ResourceWarning" not in err
    assert "Exception ignored" not in err


def test_interrupt(start: Start) -> None:
    def attempt() -> float:
        process = start("interrupt.py")
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.1)  # either in the wait or just before it: both have to work
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = end(process)
        took_s = time.monotonic() - began
        assert out == "interrupted\n"
        assert process.returncode in (-signal.SIGINT, 130)
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert "ResourceWarning" not in err
        return took_s

    assert soon(attempt)
