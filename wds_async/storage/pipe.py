"""Commands (``pipe:``) and standard input: bytes in order, read by blocking calls on threads.

The only room that starts processes. A pipe is read ahead like any shard, so the next shard's command runs while
this one is consumed; leaving early kills the command and whatever it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from subprocess import TimeoutExpired
from typing import Any

from wds_async.errors import UrlError
from wds_async.storage.base import Access, Answer, Backend, Call, Description, Fault, Location, Verdict

__all__ = [
    "NOTHING",
    "CommandFailed",
    "FdStream",
    "PipeBackend",
    "StdinBackend",
    "TimeoutExpired",
    "describe_status",
    "finish_writing",
    "start",
    "stop",
    "wait",
]

NOTHING = subprocess.DEVNULL
"""For the input of a command that gets none."""

# A pipe of this size wakes the reading thread once a megabyte (Linux; the default is 64 KiB).
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_LOOK_EVERY_MS = 500
# The status of a shell with `pipefail` where a command of its pipeline did not read all (`zcat x | head -c 1M`).
# WebDataset takes it for a good end too.
_BROKEN_PIPE = 128 + 13


class CommandFailed(Exception):
    """Error: a ``pipe:`` command ended with a status other than 0."""


class FdStream:
    """A stream over a file descriptor, which ``opener`` opens on a thread and `close` closes."""

    restartable = False

    def __init__(self, call: Call, opener: Callable[[], int]) -> None:
        self._call, self._opener = call, opener
        self._opening: asyncio.Future[int] | None = None
        self._fd = -1

    async def open(self) -> str:
        self._opening = asyncio.ensure_future(self._call(self._opener))
        self._fd = await asyncio.shield(self._opening)
        return ""

    async def readinto(self, into: memoryview) -> int:
        return await _read_fd(self._call, self._fd, into)

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            with contextlib.suppress(Exception):  # `open` raised it
                fd = await opening
                if fd > 2:  # standard input stays open: it is not ours
                    os.close(fd)
        self._fd = -1


async def _read_fd(call: Call, fd: int, into: memoryview) -> int:
    """Read on a thread. A cancelled read no longer writes to the memory, and soon ends: a thread that is blocked in
    ``read`` could write at any later time, when the slab has another owner."""
    lock, cancelled = threading.Lock(), False

    def run() -> int:
        while not cancelled:
            data = None
            if not hasattr(select, "poll"):  # Windows: read first, and see then whether it is still wanted
                data = os.read(fd, len(into))
            elif not _readable(fd):
                continue
            with lock, contextlib.suppress(BlockingIOError):
                if cancelled:
                    break
                if data is None:
                    return os.readv(fd, [into])
                into[: len(data)] = data
                return len(data)
        return 0

    try:
        return int(await call(run))
    except asyncio.CancelledError:
        with lock:
            cancelled = True
        raise


def _readable(fd: int) -> bool:
    """Wait a while for input, and return whether there is some."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_LOOK_EVERY_MS))


class _CommandStream:
    restartable = False

    def __init__(self, call: Call, command: str) -> None:
        self._call, self._command = call, command
        self._starting: asyncio.Future[subprocess.Popen[bytes]] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def open(self) -> str:
        self._starting = asyncio.ensure_future(self._call(_start, self._command))
        self._process = await asyncio.shield(self._starting)
        return ""

    async def readinto(self, into: memoryview) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        count = await _read_fd(self._call, self._process.stdout.fileno(), into)
        if count == 0:
            status = await self._call(self._process.wait)
            if status not in (0, _BROKEN_PIPE):
                raise CommandFailed(describe_status(status))
        return count

    async def close(self) -> None:
        starting, self._starting, self._process = self._starting, None, None
        if starting is not None:
            with contextlib.suppress(Exception):  # `open` raised it
                process = await starting
                _kill(process)
                await self._call(stop, process)


def _start(command: str) -> subprocess.Popen[bytes]:
    process = start(command, writes=False, shell=True, bufsize=0)
    if sys.platform == "linux":
        import fcntl  # noqa: PLC0415 (POSIX only)

        assert process.stdout is not None
        with contextlib.suppress(OSError):
            fcntl.fcntl(process.stdout.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()


def start(*args: Any, writes: bool, **kw: Any) -> subprocess.Popen[bytes]:
    """Start ``subprocess.Popen(*args, **kw)`` with a pipe to read from or write to.

    In a session of its own, so that a whole pipeline of commands can be killed (`stop`) when its reader leaves.
    """
    ours = {"stdin" if writes else "stdout": subprocess.PIPE, "start_new_session": True}
    return subprocess.Popen(*args, **{**ours, **kw})


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process from `start` and whatever it started, where it still runs, and reap it; one that is written to
    does not see the end of its input before."""
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def finish_writing(process: subprocess.Popen[bytes]) -> int:
    """End the input of a command, wait for it, and return its status."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it may end without reading everything; its status says if that is bad
        process.stdin.close()
    return process.wait()


def wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return the status of a command when it has ended, None if it has not within ``timeout_s`` seconds."""
    try:
        return process.wait(timeout_s)
    except TimeoutExpired:
        return None


def describe_status(status: int) -> str:
    """Describe an exit status (negative for a signal)."""
    if status < 0:
        return f"the command was ended by signal {signal.Signals(-status).name}"
    return f"the command ended with status {status}"


class PipeBackend(Backend):
    """Backend of ``pipe:command``, which the shell runs as it stands."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def access(self, location: Location) -> Access:
        command = location.target.removeprefix("pipe:").strip()
        if not command:
            raise UrlError("pipe: has no command; write pipe:COMMAND, for instance pipe:cat x.tar")
        return _CommandStream(self._call, command)

    async def describe(self, location: Location) -> Description:
        return Description("a command", "", "whatever the command is", False, "a command's output comes in order only")

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        if isinstance(outcome, CommandFailed):
            return Fault(Verdict.COMMAND, str(outcome), "Run it in a shell to see its output.")
        return Fault(Verdict.FATAL, f"{type(outcome).__name__}: {outcome}")


class StdinBackend(PipeBackend):
    """Backend of ``-``, standard input, once."""

    async def access(self, location: Location) -> Access:
        return FdStream(self._call, sys.stdin.fileno)
