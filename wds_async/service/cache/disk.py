"""A cache's folder: the lock that makes it one process's own, the index, the files. Everything here blocks.

::

    folder/lock             held while a service (or the command) works on it
    folder/index.sqlite     what is there
    folder/data/0a/10a      the object with number 0x10a
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c
from filelock import FileLock, Timeout

from wds_async.errors import ConfigError
from wds_async.service.cache.index import Index, IndexBatch, Totals
from wds_async.storage.filewriting import write_all

__all__ = ["INDEX", "DataFile", "DataFolder", "OpenFolder", "crc_of", "free_bytes", "open_folder", "open_index",
           "stored_crc", "take_out_trash"]  # fmt: skip

logger = logging.getLogger("wds_async")
INDEX = "index.sqlite"
_DATA = "data"
_TRASH = "trash-"
_BROKEN = "index.broken"
_FOLDERS = 256
_BLOCK = 4096
_READ_BYTES = 256 << 10
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # linux/falloc.h


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder that is locked by this process until `close`."""

    path: Path
    files: DataFolder
    index: Index
    totals: Totals
    lock: FileLock

    def mark_broken(self) -> None:
        """Have the next start replace the index, because parts of it cannot be read."""
        with contextlib.suppress(OSError):
            self.files.touch(_BROKEN)

    def close(self) -> None:
        self.index.close()
        self.files.close()
        self.lock.release()


def open_folder(path: Path) -> OpenFolder:
    """Lock the folder, creating it if necessary. ConfigError if another process has it; OSError if it cannot be
    written. A broken index is moved away, and the cache begins empty, with a warning."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as undo:
        lock = FileLock(path / "lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{path}: another process works on this cache (a service, or `wds-async cache`). One service a folder: "
                "give this one another folder, or end the other first"
            ) from None
        undo.callback(lock.release)
        files = DataFolder(path)
        undo.callback(files.close)
        try:
            index, totals = _open_or_replace(files)
        except sqlite3.Error as exn:
            raise OSError(f"{path / INDEX}: {exn}") from exn
        undo.pop_all()
    return OpenFolder(path, files, index, totals, lock)


def open_index(path: Path) -> Index:
    """Open the index of a folder for reading, also while a service runs on it. ConfigError without one."""
    try:
        return Index(path / INDEX, read_only=True)
    except sqlite3.Error as exn:
        raise ConfigError(f"{path}: no cache of the service, or its index cannot be read: {exn}") from exn


def take_out_trash(path: Path) -> None:
    """Remove what `open_folder` put aside. It may take a while."""
    for trash in path.glob(f"{_TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)


def _open_or_replace(files: DataFolder) -> tuple[Index, Totals]:
    path = files.root
    if (path / _BROKEN).exists():
        _begin_anew(path, "parts of it could not be read")
    elif not (path / INDEX).exists():
        _put_aside(path)  # files without an index
    try:
        return _open_tidy(files)
    except sqlite3.DatabaseError as exn:
        if isinstance(exn, sqlite3.OperationalError) and "no such" not in str(exn):
            raise
        _begin_anew(path, str(exn))
    return _open_tidy(files)


def _open_tidy(files: DataFolder) -> tuple[Index, Totals]:
    """Open the index, and remove files that a killed process left: on probation, or unknown to the index."""
    index = Index(files.root / INDEX)
    try:
        totals = index.totals()
        empty = index.empty()
        for number in empty:
            files.remove(number)
        if empty:
            index.write(IndexBatch(gone=empty), totals.next_id, totals.state)
        files.sweep(totals.sweep_from, index.numbers(totals.sweep_from))
    except BaseException:
        index.close()
        raise
    return index, totals


def _begin_anew(path: Path, why: str) -> None:
    index, bad = path / INDEX, path / f"{INDEX}.bad"
    logger.warning("cache: %s is no good index: %s; it was moved to %s, and the cache begins empty", index, why, bad)
    if index.exists():
        os.replace(index, bad)
    for name in (f"{INDEX}-wal", f"{INDEX}-shm", _BROKEN):
        (path / name).unlink(missing_ok=True)
    _put_aside(path)


def _put_aside(path: Path) -> None:
    if (path / _DATA).exists():
        number = 0
        while (trash := path / f"{_TRASH}{number}").exists():
            number += 1
        (path / _DATA).rename(trash)


class DataFile:
    """One object's file, open. ``broken``: a write failed for a reason that lies in this file, or its place on the
    disk. OSError from every method where the disk fails."""

    def __init__(self, path: Path, *, create: bool = False, dir_fd: int | None = None) -> None:
        """Open ``path``, relative to the folder that ``dir_fd`` is. ``create``: a new file, also where there is one."""
        self.path = path
        self.broken = False
        flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        if create:
            # Never over the bytes of another file, which may be served from there; and never through a link.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path, dir_fd=dir_fd)
            flags |= os.O_CREAT | os.O_EXCL
        self.fd = os.open(path, flags, 0o600, dir_fd=dir_fd)

    def write(self, offset: int, data: memoryview) -> int:
        crc = crc32c(data)
        write_all(self.fd, data, offset)
        return crc

    def crc(self, offset: int, count: int) -> int | None:
        """Return the CRC-32C of ``count`` bytes at ``offset``; None if the file ends before."""
        return crc_of(self.fd, offset, count)

    def punch(self, offset: int, count: int) -> bool:
        """Free the disk's blocks of a range, up to the end of its last page. False if this system cannot, or a client
        has the file open (with a shared lock, see `service.send_fd.hand`), which may be of an earlier service.

        ``sendfile`` leaves the file's own pages in a socket's queue. A page that a hole covers is dropped, and lives on
        there; one that it covers in part is written to, and would arrive as zeros."""
        if _fallocate is None:
            return False
        import fcntl  # noqa: PLC0415 (POSIX only)

        stop = -(-(offset + count) // mmap.PAGESIZE) * mmap.PAGESIZE
        with contextlib.ExitStack() as unlock:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unlock.callback(fcntl.flock, self.fd, fcntl.LOCK_UN)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks: no client was given a file of it
                pass
            return _fallocate(self.fd, _KEEP_SIZE_PUNCH_HOLE, offset, stop - offset) == 0

    def trim(self, kept: Iterable[tuple[int, int]]) -> None:
        """Free the blocks outside of the ranges ``kept``, which are in order."""
        status = os.fstat(self.fd)
        kept = list(kept)
        if status.st_blocks * 512 <= sum(-(-(stop - start) // _BLOCK) * _BLOCK for start, stop in kept):
            return
        at = 0
        for start, stop in [*kept, (status.st_size, status.st_size)]:
            if start > at:
                self.punch(at, start - at)
            at = max(at, stop)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class DataFolder:
    """The files of a cache's folder: by number, in 256 folders below ``data``. It stays that folder until `close`, also
    if its path leads to another disk, or to another service's folder, meanwhile."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def path(self, number: int) -> Path:
        return Path(_DATA, f"{number % _FOLDERS:02x}", f"{number:x}")

    def create(self, number: int) -> DataFile:
        path = self.path(number)
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self._fd)
        return DataFile(path, create=True, dir_fd=self._fd)

    def open(self, number: int) -> DataFile:
        """Open the file of an entry. FileNotFoundError without one."""
        return DataFile(self.path(number), dir_fd=self._fd)

    def stored_crc(self, number: int, offset: int, count: int) -> int | None:
        """Return `stored_crc` of an entry's file. FileNotFoundError without one."""
        return stored_crc(self.path(number), offset, count, dir_fd=self._fd)

    def touch(self, name: str) -> None:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._fd))

    def remove(self, number: int) -> bool:
        """Remove the file of an entry, and return whether there was one."""
        try:
            os.unlink(self.path(number), dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def sweep(self, first: int, known: Container[int] = (), most: int = 4096) -> int:
        """Remove the files from number ``first`` on that are not ``known``, and return how many. Ends when ``most``
        numbers in a row have none."""
        removed = missing = 0
        number = first
        while missing < most:
            gone = number not in known and self.remove(number)
            removed += gone
            missing = 0 if gone or number in known else missing + 1
            number += 1
        return removed


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def crc_of(fd: int, offset: int, count: int, buffer: memoryview | None = None) -> int | None:
    """Return the CRC-32C of ``count`` bytes at ``offset``, read into ``buffer``; None if there are fewer."""
    if buffer is None:
        buffer = memoryview(bytearray(min(_READ_BYTES, max(count, 1))))
    crc, stop = 0, offset + count
    while offset < stop:
        got = min(os.preadv(fd, [buffer], offset), stop - offset)
        if got == 0:
            return None
        crc = crc32c(buffer[:got], crc)
        offset += got
    return crc


def stored_crc(path: Path, offset: int, count: int, *, dir_fd: int | None = None) -> int | None:
    """Return the CRC-32C of ``count`` bytes as the disk has them; None if there are fewer. ``offset`` is that of a
    block.

    They are read past the page cache (O_DIRECT) if the file system allows that: pages in memory prove nothing about the
    disk, and those in use are not pushed out."""
    room = -(-min(_READ_BYTES, max(count, 1)) // _BLOCK) * _BLOCK
    direct = getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0) if direct else (0,):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=dir_fd)
            try:
                with mmap.mmap(-1, room) as pages, memoryview(pages) as buffer:
                    return crc_of(fd, offset, count, buffer)
            finally:
                os.close(fd)
        except OSError as exn:
            if not flags or exn.errno != errno.EINVAL:
                raise
    raise AssertionError("unreachable")


def _libc_fallocate() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function: Callable[[int, int, int, int], int] = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]  # type: ignore[attr-defined]
    return function


_fallocate = _libc_fallocate()
