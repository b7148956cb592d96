"""Shards on their way into the cache: one writer each, any number of readers behind it.

All of it happens in one hidden folder of the cache, so that a file under a shard's name is whole:

    <folder>/.partial/<key>.lock             locked by the process that writes this shard, as long as it lives
    <folder>/.partial/<key>-<random>.part    its bytes so far; renamed when they are complete

A lock is held on an open file, so the operating system frees it when its process dies. Files with a free lock are
therefore leftovers. A part file is never taken over, and no two have the same name: so even where a file system's locks
do not work (two writers then fetch the same shard) every file holds the bytes of one writer, and every rename publishes
a whole one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from wds_async.storage.filewriting import write_all

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["PARTIAL", "PartialReader", "PartialWriter", "lock_file", "sweep"]

PARTIAL = ".partial"  # the folder, within the cache's own, of unfinished shards

CAN_FOLLOW = os.name == "posix"  # elsewhere an open file cannot be renamed

_OF_A_SHARD = re.compile(r"([0-9a-f]{24})(?:\.lock|-\w+\.part)")
_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_open_fds: set[int] = set()
_inherited: list[BaseFileLock] = []


def lock_file(path: Path, timeout_s: float = 0.0) -> BaseFileLock | None:
    """Lock ``path``; None if another holds it (a thread of this process counts as another)."""
    from filelock import FileLock, Timeout  # noqa: PLC0415 (as slow to import as half of this package)

    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=0.005)
    except Timeout:
        return None
    return lock


class _Paths:
    """The files of one unfinished shard; ``name`` is its relative name in the cache."""

    def __init__(self, folder: Path, name: str) -> None:
        self._key = hashlib.sha256(os.fsencode(name)).hexdigest()[:24]
        self.target = folder / name
        self.lock = folder / PARTIAL / f"{self._key}.lock"

    def new_part(self) -> Path:
        return self.lock.with_name(f"{self._key}-{uuid.uuid4().hex}.part")

    def parts(self) -> list[Path]:
        """Return the part files of this shard: of its writer, and of any that died."""
        return list(self.lock.parent.glob(f"{self._key}-*.part"))


class PartialWriter:
    """The right to write one shard, and the file it goes to. Made by `begin`; ends by `publish` or `drop`, by garbage
    collection, or with the process. Not for two threads at once."""

    def __init__(self, paths: _Paths, lock: BaseFileLock) -> None:
        self.size = 0
        self._paths = paths
        self._part = paths.new_part()
        for leftover in paths.parts():
            leftover.unlink(missing_ok=True)
        self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
        _open_fds.add(self._fd)
        self._finalizer = weakref.finalize(self, _end, self._part, paths.lock, self._fd, lock, os.getpid())

    @staticmethod
    def begin(folder: Path, name: str, timeout_s: float = 0.0) -> PartialWriter | None:
        """Return the right to write ``name``; None if another has it. OSError if nothing can be written."""
        paths = _Paths(folder, name)
        paths.lock.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(paths.lock, timeout_s)
        if lock is None:
            return None
        try:
            return PartialWriter(paths, lock)
        except BaseException:
            _remove_lock(paths.lock, lock)
            raise

    def write(self, piece: memoryview) -> None:
        """Append ``piece``; OSError if the disk is full."""
        write_all(self._fd, piece)
        self.size += len(piece)

    def publish(self, modified: float | None = None) -> Path:
        """Give the whole file its name, at once. If that fails, drop it and raise OSError.

        ``modified``: its time of change (seconds since 1970; None: of its last write). The file has it before it has
        its name, because a reader that finds the file takes a later change for another file.

        The data is not forced to the disk: a shard costs less to fetch again than every shard costs to wait for. An
        empty file, which a crash of the machine may leave, is recognised by its size.
        """
        target = self._paths.target
        try:
            size = os.fstat(self._fd).st_size
            if size != self.size:
                raise OSError(errno.EIO, f"{self.size} bytes were written and {size} are there", str(self._part))
            target.parent.mkdir(parents=True, exist_ok=True)
            if not CAN_FOLLOW:
                _close(self._fd)
            if modified is not None:
                os.utime(self._part, ns=(time.time_ns(), int(modified) * 10**9))
            os.replace(self._part, target)
        finally:
            self.drop()
        return target

    def drop(self) -> None:
        """Remove everything that was not published; idempotent."""
        self._finalizer()


class PartialReader:
    """The file that another process is writing, for reading as it grows (see `storage.base.Growing`). Blocking
    calls, one at a time."""

    def __init__(self, folder: Path, name: str, patience_s: float = math.inf) -> None:
        self.awaited = False
        self.patience_s = patience_s
        self.patience_lost = False
        self._paths = _Paths(folder, name)
        self._fd = -1

    def exists(self) -> bool:
        """Return whether there is a file to follow."""
        return CAN_FOLLOW and bool(self._paths.parts())

    def open(self) -> None:
        """Open the file; FileNotFoundError if it was published or dropped."""
        newest = max(self._paths.parts(), key=lambda path: path.stat().st_mtime_ns, default=self._paths.new_part())
        self._fd = os.open(newest, os.O_RDONLY | _FLAGS)
        _open_fds.add(self._fd)

    def read(self, into: memoryview, offset: int) -> int:
        """Read the bytes at ``offset`` that are there and return their number, 0 if there is none yet."""
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [into], offset)
        data = os.pread(self._fd, len(into), offset)
        into[: len(data)] = data
        return len(data)

    def ended(self, offset: int) -> bool | None:
        """Return True if the shard was published and ends at ``offset``, False if its writer is gone, else None."""
        alive = not self._lock_is_free()  # first: the name is given before the lock is freed
        own = os.fstat(self._fd)
        with contextlib.suppress(OSError):
            published = os.stat(self._paths.target)
            if (published.st_dev, published.st_ino) == (own.st_dev, own.st_ino):
                return True if offset >= own.st_size else None
        return None if alive or offset < own.st_size else False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        _close(fd)

    def _lock_is_free(self) -> bool:
        if not self._paths.lock.exists():
            return True
        lock = lock_file(self._paths.lock)
        if lock is None:
            return False
        _remove_lock(self._paths.lock, lock)  # its writer may have removed it just now, and locking made it anew
        return True


def sweep(folder: Path) -> int:
    """Remove what dead writers left in the cache at ``folder``; return the number of unfinished shards among it."""
    removed = 0
    try:
        names = os.listdir(folder / PARTIAL)
    except OSError:  # there is no such cache yet
        return 0
    for key in {match[1] for name in names if (match := _OF_A_SHARD.fullmatch(name))}:
        path = folder / PARTIAL / f"{key}.lock"
        with contextlib.suppress(OSError):
            lock = lock_file(path)
            if lock is None:
                continue
            try:
                for leftover in path.parent.glob(f"{key}-*.part"):
                    leftover.unlink(missing_ok=True)
                    removed += 1
            finally:
                _remove_lock(path, lock)
    return removed


def _end(part: Path, lock_path: Path, fd: int, lock: BaseFileLock, pid: int) -> None:
    """Remove everything of a writer; in a forked child close the descriptor only, as file and lock are the parent's."""
    if os.getpid() != pid:
        _inherited.append(lock)  # older versions of filelock free the parent's lock with this object
        return
    _close(fd)  # before the file goes: elsewhere than on POSIX an open one stays
    with contextlib.suppress(OSError):
        part.unlink()  # gone already if it was published
    _remove_lock(lock_path, lock)


def _remove_lock(path: Path, lock: BaseFileLock) -> None:
    # While it is held, so that no other process gets a lock on a file without a name.
    with contextlib.suppress(OSError):
        path.unlink()
    lock.release()
    if not CAN_FOLLOW:
        with contextlib.suppress(OSError):
            path.unlink()


def _close(fd: int) -> None:
    if fd in _open_fds:
        _open_fds.discard(fd)
        with contextlib.suppress(OSError):
            os.close(fd)


def _close_in_child() -> None:
    """Close the parent's files: a DataLoader worker has no use for them. Its locks stay the parent's (see filelock)."""
    for fd in list(_open_fds):
        _close(fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
