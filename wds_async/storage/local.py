"""Local and mounted files, and the meaning of an ``OSError``."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from wds_async.storage.base import Access, Answer, Backend, Description, Entry, Fault, LocalFile, Location, Verdict
from wds_async.storage.pipe import FdStream

__all__ = ["LocalBackend", "explain_os_error", "file_version", "version_without_inode"]

_AGAIN = frozenset({errno.EAGAIN, errno.EINTR, errno.EIO, errno.ETIMEDOUT, getattr(errno, "ESTALE", errno.EIO)})


def file_version(status: os.stat_result) -> str:
    """Return the version of a file: inode, size and time of change."""
    return f"inode {status.st_ino}, {version_without_inode(status.st_size, status.st_mtime_ns)}"


def version_without_inode(size: int, modified_ns: int) -> str:
    """Return the version of a file without its inode, which differs where another machine has mounted the folder."""
    return f"{size} bytes, modified {modified_ns}"


def explain_os_error(exn: BaseException) -> Fault:
    """Explain an ``OSError`` of a file system. Errors that network file systems recover from are transient."""
    text = getattr(exn, "strerror", None) or str(exn) or type(exn).__name__
    if isinstance(exn, FileNotFoundError):
        braces = " These braces are taken literally; a range is written {000..999}." if "{" in str(exn.filename) else ""
        return Fault(Verdict.MISSING, "there is no such file", "Check the path and the working directory." + braces)
    if isinstance(exn, PermissionError):
        return Fault(Verdict.DENIED, text, "Check the file's permissions.")
    if isinstance(exn, IsADirectoryError):
        return Fault(Verdict.FATAL, "this is a directory, not a shard", "End its name with / to read the shards in it.")
    if isinstance(exn, OSError) and exn.errno in _AGAIN:
        return Fault(Verdict.TRANSIENT, text, "Check the disk or the file server.")
    return Fault(Verdict.FATAL, f"{type(exn).__name__}: {text}")


class LocalBackend(Backend):
    """Backend of paths and ``file:`` URLs. ``call`` runs a blocking function on a thread."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def access(self, location: Location) -> Access:
        path = location.path
        assert path is not None, location.target
        status: os.stat_result = await self._call(os.stat, path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):  # a FIFO, /dev/stdin, a process substitution
            # Without O_NONBLOCK the open of a FIFO would hold a thread until there is a writer.
            flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
            return FdStream(self._call, lambda: os.open(path, flags))
        return LocalFile(path, status.st_size, file_version(status))

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        path = location.path
        assert path is not None, location.target
        for name, size, modified in await self._call(_scan, path):
            if size is None:
                yield Entry(f"{location.target}{name}/", None, modified / 1e9)
            else:
                yield Entry(location.target + name, size, modified / 1e9, version_without_inode(size, modified))

    async def remove(self, location: Location) -> None:
        assert location.path is not None, location.target
        with contextlib.suppress(FileNotFoundError):
            await self._call(os.remove, location.path)

    async def describe(self, location: Location) -> Description:
        return Description("local files", "", f"user {getpass.getuser()}", True)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        assert isinstance(outcome, BaseException)
        return explain_os_error(outcome)


def _scan(path: str) -> list[tuple[str, int | None, int]]:
    """List a folder, sorted: names, sizes (None for a folder) and times of change in nanoseconds, without broken
    links."""
    listing = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                size = None if stat.S_ISDIR(status.st_mode) else status.st_size
                listing.append((entry.name, size, status.st_mtime_ns))
    return sorted(listing)
