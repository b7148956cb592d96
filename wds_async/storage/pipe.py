"""Commands (``pipe:``) and standard input: bytes in order, read by blocking calls on threads.

The only room that starts processes. A pipe is read ahead like any shard, so the next shard's command runs while
this one is consumed; leaving early kills the command and whatever it started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from wds_async.errors import UrlError
from wds_async.storage.base import Access, Answer, Fault, Request, Stream, Verdict

__all__ = ["CommandFailed", "FdStream", "PipeBackend", "StdinBackend"]

Call = Callable[..., Awaitable[Any]]

# A pipe of this size wakes the reading thread once a megabyte (Linux; the default is 64 KiB).
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


class CommandFailed(Exception):
    """A ``pipe:`` command ended with a status that is not 0."""


class FdStream:
    """Anything with a file descriptor: ``opener`` opens it, on a thread; it is closed in the end."""

    restartable = False

    def __init__(self, call: Call, opener: Callable[[], int]) -> None:
        self._call = call
        self._opener = opener
        self._fd = -1

    async def open(self) -> str:
        self._fd = await self._call(self._opener)
        return ""

    async def readinto(self, into: memoryview) -> int:
        return int(await self._call(_read_fd, self._fd, into))

    async def close(self) -> None:
        if self._fd > 2:  # standard input stays open: it is not ours
            os.close(self._fd)
        self._fd = -1


def _read_fd(fd: int, into: memoryview) -> int:
    if hasattr(os, "readv"):
        return os.readv(fd, [into])
    data = os.read(fd, len(into))
    into[: len(data)] = data
    return len(data)


class _CommandStream:
    restartable = False

    def __init__(self, call: Call, command: str) -> None:
        self._call = call
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    async def open(self) -> str:
        self._process = await self._call(_start, self._command)
        return ""

    async def readinto(self, into: memoryview) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        count = int(await self._call(_read_fd, self._process.stdout.fileno(), into))
        if count == 0:
            status = await self._call(self._process.wait)
            if status:
                raise CommandFailed(_describe(status))
        return count

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            await self._call(_reap, process)


def _start(command: str) -> subprocess.Popen[bytes]:
    # A session of its own, so that the whole pipeline of commands can be killed when the reader leaves.
    process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
    if sys.platform == "linux":
        import fcntl  # noqa: PLC0415 - POSIX only

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


def _reap(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    process.wait()


def _describe(status: int) -> str:
    if status < 0:
        return f"the command was ended by signal {signal.Signals(-status).name}"
    return f"the command ended with status {status}"


class PipeBackend:
    """``pipe:command``, given to the shell as it stands."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def access(self, url: str) -> Access:
        command = url.removeprefix("pipe:").strip()
        if not command:
            raise UrlError("pipe: has no command; write pipe:COMMAND, for instance pipe:cat x.tar")
        return _CommandStream(self._call, command)

    def streamed(self, request: Request) -> Stream:
        raise TypeError("a pipe is not requested")

    def classify(self, outcome: Answer | BaseException) -> Fault:
        if isinstance(outcome, CommandFailed):
            return Fault(Verdict.COMMAND, str(outcome), "Run it in a shell to see what it says.")
        return Fault(Verdict.FATAL, f"{type(outcome).__name__}: {outcome}")

    async def close(self) -> None:
        return None


class StdinBackend(PipeBackend):
    """``-``: standard input, once."""

    async def access(self, url: str) -> Access:
        return FdStream(self._call, sys.stdin.fileno)
