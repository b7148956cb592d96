"""Servers that are programs: a child process with a free port, stopped by its handle, and by the kernel where this
process dies without stopping it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ServerMissing", "accepts", "free_port", "launch", "required", "stop", "until"]

_END_S = 5.0


class ServerMissing(RuntimeError):
    """A program that tests stand on is not installed on this machine; the message says how to install it."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def launch(
    command: Sequence[str],
    output: Path | None = None,
    *,
    before: Sequence[str] = (),
    cwd: str | Path | None = None,
    death: str = "TERM",
) -> subprocess.Popen[bytes]:
    """Start ``command`` without input; what it says goes to the file ``output``, or nowhere. ``before`` runs it (``ip
    netns exec name``), and ``death`` is the signal that the kernel sends it when this process has died."""
    guard = ["setpriv", "--pdeathsig", death] if shutil.which("setpriv") else []
    with open(output or os.devnull, "wb") as said:
        return subprocess.Popen(
            [*before, *guard, *command], stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=cwd
        )


def until(process: subprocess.Popen[bytes], ready: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until ``ready()``; False where the process ended before, or the time was over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if ready():
            return process.poll() is None
        time.sleep(0.005)
    return False


def stop(process: subprocess.Popen[bytes] | None, how: signal.Signals = signal.SIGTERM) -> None:
    """End it and wait for that; one that does not obey within 5 s is killed. Harmless for one that has ended."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(how)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def required() -> Iterator[None]:
    """Where a server is missing: skip the test, or with ``WDS_REQUIRE_SERVERS=1`` fail."""
    try:
        yield
    except ServerMissing as exn:
        import pytest  # benchmarks start servers without it

        if os.environ.get("WDS_REQUIRE_SERVERS") == "1":
            raise
        pytest.skip(str(exn))
