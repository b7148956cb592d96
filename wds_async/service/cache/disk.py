"""A cache's folder: the lock that makes it one process's own, the index, the files. All blocks.

::

    folder/lock             held while a service (or the command) works on it
    folder/index.sqlite     what is there
    folder/data/0a/10a      the object with number 0x10a
"""

from __future__ import annotations

import asyncio
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
from typing import Any

from crc32c import crc32c
from filelock import FileLock, Timeout

from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.service.cache.cache import CacheStats
from wds_async.service.cache.entries import Entry
from wds_async.service.cache.index import Batch, Index, Totals
from wds_async.storage.base import Call
from wds_async.storage.filewriting import write_all

__all__ = [
    "INDEX",
    "DataFile",
    "DataFolder",
    "Disk",
    "OpenFolder",
    "crc_of",
    "free_bytes",
    "open_folder",
    "open_index",
    "stored_crc",
    "take_out_trash",
]

logger = logging.getLogger("wds_async")


INDEX = "index.sqlite"


_DATA = "data"


_TRASH = "trash-"


_BROKEN = "index.broken"


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder that is this process's own until `close`."""

    path: Path
    files: DataFolder
    index: Index
    totals: Totals
    lock: FileLock

    def mark_broken(self) -> None:
        """What the index says cannot be read everywhere: the next one who opens the folder begins anew."""
        with contextlib.suppress(OSError):
            self.files.touch(_BROKEN)

    def close(self) -> None:
        """Idempotent."""
        self.index.close()
        self.files.close()
        self.lock.release()


def open_folder(path: Path) -> OpenFolder:
    """Lock the folder, and make it where it is not there. ConfigError where another process has it; OSError where it
    cannot be written. An index that is none is moved away, and the cache begins empty: that is warned of."""
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
    """The index of a folder, to look at, also while a service works on it. ConfigError where there is none."""
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
    index, broken = path / INDEX, path / _BROKEN
    if broken.exists():
        _begin_anew(path, "it could not be read everywhere")
    elif not index.exists():
        _put_aside(path)  # files that no index tells of
    try:
        return _opened(files)
    except sqlite3.OperationalError as exn:
        if "no such" not in str(exn):
            raise
        _begin_anew(path, str(exn))
    except sqlite3.DatabaseError as exn:
        _begin_anew(path, str(exn))
    return _opened(files)


def _opened(files: DataFolder) -> tuple[Index, Totals]:
    """The index, where all that is read of it at a start can be read."""
    index = Index(files.root / INDEX)
    try:
        totals = index.totals()
        _tidy(files, index, totals)
    except BaseException:
        index.close()
        raise
    return index, totals


def _begin_anew(path: Path, why: str) -> None:
    index = path / INDEX
    bad = path / f"{INDEX}.bad"
    logger.warning("cache: %s is no good index: %s; it was moved to %s, and the cache begins empty", index, why, bad)
    if index.exists():
        os.replace(index, bad)
    for name in (f"{INDEX}-wal", f"{INDEX}-shm", _BROKEN):
        (path / name).unlink(missing_ok=True)
    _put_aside(path)


def _put_aside(path: Path) -> None:
    data = path / _DATA
    if data.exists():
        number = 0
        while (trash := path / f"{_TRASH}{number}").exists():
            number += 1
        data.rename(trash)


def _tidy(files: DataFolder, index: Index, totals: Totals) -> None:
    """Files of a process that was killed: in transit, or so new that the index does not know them."""
    empty = index.empty()
    for number in empty:
        files.remove(number)
    if empty:
        index.write(Batch(gone=set(empty)), totals.next_id, totals.state)
    files.sweep(totals.sweep_from, index.numbers(totals.sweep_from))


_FOLDERS = 256


_BLOCK = 4096


_READ_BYTES = 256 << 10


_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # linux/falloc.h


class DataFile:
    """One object's file, open. OSError from every method where the disk fails."""

    def __init__(self, path: Path, *, create: bool = False, dir_fd: int | None = None) -> None:
        """Open ``path``, relative to the folder that ``dir_fd`` is. ``create``: a new file, also where there is one."""
        self.path = path
        self.broken = False
        """Whether a write has failed for what is wrong with this file, or its place on the disk."""
        flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        if create:
            # Never over another's bytes, which may be served from there; and what a link leads to is none of ours.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path, dir_fd=dir_fd)
            flags |= os.O_CREAT | os.O_EXCL
        self.fd = os.open(path, flags, 0o600, dir_fd=dir_fd)

    def write(self, offset: int, data: memoryview) -> int:
        """Write all of ``data``; its CRC-32C."""
        crc = crc32c(data)
        write_all(self.fd, data, offset)
        return crc

    def crc(self, offset: int, count: int) -> int | None:
        """The CRC-32C of so many bytes there; None where the file ends before."""
        return crc_of(self.fd, offset, count)

    def punch(self, offset: int, count: int) -> bool:
        """Give the disk's blocks of a range back, up to the end of its last page. False if this system cannot, or a
        reader has the file open that was handed over (its lock is shared, see `service.send_fd.hand`): also one that an
        earlier process has handed over, of chunks that the index does not know.

        ``sendfile`` leaves the file's own pages in a socket's queue. A page that a hole covers is dropped, and lives on
        there; one that it covers in part is written to, and would arrive as zeros."""
        stop = -(-(offset + count) // mmap.PAGESIZE) * mmap.PAGESIZE
        if _punch is None:
            return False
        import fcntl  # noqa: PLC0415 (POSIX only)

        locked = False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: no file of it was handed over
            pass
        try:
            return _punch(self.fd, _KEEP_SIZE_PUNCH_HOLE, offset, stop - offset) == 0
        finally:
            if locked:
                fcntl.flock(self.fd, fcntl.LOCK_UN)

    def trim(self, kept: Iterable[tuple[int, int]]) -> None:
        """Give back the blocks of all but the ranges ``kept``, which are in order, where there are any."""
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
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class DataFolder:
    """The files of a cache's folder: by number, in 256 folders below ``data``. It is that folder until `close`, also
    where its path leads to another disk, or to another service's folder, meanwhile."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def path(self, number: int) -> Path:
        """The file of an entry, below `root`."""
        return Path(_DATA, f"{number % _FOLDERS:02x}", f"{number:x}")

    def create(self, number: int) -> DataFile:
        """A new, empty file."""
        path = self.path(number)
        for one in (path.parent.parent, path.parent):
            with contextlib.suppress(FileExistsError):
                os.mkdir(one, dir_fd=self._fd)
        return DataFile(path, create=True, dir_fd=self._fd)

    def open(self, number: int) -> DataFile:
        """FileNotFoundError where it is gone."""
        return DataFile(self.path(number), dir_fd=self._fd)

    def stored_crc(self, number: int, offset: int, count: int) -> int | None:
        """As of `stored_crc`. FileNotFoundError where the file is gone."""
        return stored_crc(self.path(number), offset, count, dir_fd=self._fd)

    def touch(self, name: str) -> None:
        """Make an empty file ``name`` in `root`."""
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._fd))

    def remove(self, number: int) -> None:
        """Remove a file that nobody has open here; nothing where there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(number), dir_fd=self._fd)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def sweep(self, first: int, known: Container[int] = (), most: int = 4096) -> int:
        """Remove the files from number ``first`` on that are not ``known``, which a process made that ended before it
        could say so; how many there were. It looks until ``most`` numbers in a row have none."""
        found = missing = 0
        number = first
        while missing < most:
            missing += 1
            if number in known:
                missing = 0
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path(number), dir_fd=self._fd)
                    found, missing = found + 1, 0
            number += 1
        return found


def free_bytes(folder: Path) -> int:
    """What the file system of ``folder`` has left for this process."""
    return shutil.disk_usage(folder).free


def crc_of(fd: int, offset: int, count: int, buffer: memoryview | None = None) -> int | None:
    """The CRC-32C of ``count`` bytes at ``offset``; None where there are fewer. ``buffer``: where to read them."""
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
    """The CRC-32C of ``count`` bytes as the disk has them; None where there are fewer. ``offset`` is that of a block.

    They are read past the page cache (O_DIRECT) where the file system allows that: what lies in memory proves nothing
    about the disk, and what is in use there is not pushed out."""
    direct = getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0) if direct else (0,):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=dir_fd)
            try:
                with (
                    mmap.mmap(-1, -(-min(_READ_BYTES, max(count, 1)) // _BLOCK) * _BLOCK) as pages,
                    memoryview(pages) as buffer,
                ):
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
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    found: Callable[[int, int, int, int], int] = function
    return found


_punch = _libc_fallocate()


_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))


"""Refusals that say nothing of the file itself."""


_PAUSE_S = 10.0


"""How long nothing is written after the disk refused."""


_STUCK_S = 5.0


"""After so long a write that has not returned makes the disk unusable, until it returns."""


_PATIENCE_S = 1.0


"""How long a chunk waits for its turn to be written while others wait for its memory."""


_LOOK_EVERY_S = 0.1


class Disk:
    """The cache's ``files``; None: no disk. What blocks runs on a thread, at most ``writers`` writes at once: more
    would wait for each other in the file system, and each holds its chunk's memory for as long as the disk takes."""

    def __init__(
        self, files: DataFolder | None, call: Call, stats: CacheStats, clock: Callable[[], float], writers: int = 4
    ) -> None:
        self.files = files
        self._call = call
        self._stats = stats
        self._clock = clock
        self.crowded = False
        """Whether its file system has too little space left: then nothing is written."""
        self.vanished = False
        """Whether its folder is not there any more: then nothing is written."""
        self._paused_until = 0.0
        self._said = self._said_slow = False
        self._writers = asyncio.Semaphore(writers)
        self._writing: dict[object, float] = {}

    @property
    def usable(self) -> bool:
        """Whether it is worth trying to write."""
        if self.files is None or self.crowded or self.vanished:
            return False
        now = self._clock()
        stuck = any(now - began >= _STUCK_S for began in self._writing.values())
        return now >= self._paused_until and not stuck

    def failed(self, exn: BaseException, doing: str) -> None:
        """It refused: count that, say it once, and leave it alone for a while."""
        self._stats.disk_errors += 1
        self._paused_until = self._clock() + _PAUSE_S
        where = "" if self.files is None else f" in {self.files.root}"
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        logger.log(
            level, "cache: %s failed%s: %s; objects are passed through from their origins, and the disk is tried again "
            "after %g s", doing, where, exn, _PAUSE_S,
        )  # fmt: skip

    async def write(
        self, entry: Entry, number: int, data: memoryview, memory_wanted: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Write a chunk; its CRC-32C. None where the disk refused, or is far behind while others wait for memory."""
        if not await self._turn(memory_wanted):
            return None
        write = object()
        self._writing[write] = self._clock()
        try:
            async with entry.creating:
                if entry.file is None:
                    assert self.files is not None
                    entry.file = await self.call(self.files.create, entry.id)
            crc: int = await self.call(entry.file.write, entry.chunks.bounds(number)[0], data)
        except OSError as exn:
            self.failed(exn, "writing")
            if entry.file is not None and exn.errno not in _FULL:
                entry.file.broken = True
            return None
        finally:
            del self._writing[write]
            self._writers.release()
        self._said = False
        return crc

    async def _turn(self, memory_wanted: Callable[[], bool]) -> bool:
        """Wait until another write may begin; False where the chunk's memory is wanted first, or the disk is stuck."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while self._writers.locked():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    return await self._writers.acquire()
            if not self.usable or (memory_wanted() and clock() - began >= _PATIENCE_S):
                level = logging.DEBUG if self._said_slow else logging.WARNING
                self._said_slow = True
                logger.log(level, "cache: the disk is slower than what is read; what it cannot take is passed through")
                return False
        return await self._writers.acquire()

    async def compare(self, entry: Entry, number: int) -> bool:
        """Whether what lies on disk is what the index says."""
        start, stop = entry.chunks.bounds(number)
        try:
            assert entry.file is not None
            found: int | None = await self.call(entry.file.crc, start, stop - start)
        except OSError as exn:
            self._stats.disk_errors += 1
            logger.warning("cache: %s at byte %d cannot be read from disk: %s", redact(entry.url), start, exn)
            return False
        return found == entry.chunks.crc(number)

    async def punch(self, entry: Entry, number: int) -> None:
        """Give a chunk's blocks back: of the last one too as if it were full, so that the hole covers whole pages,
        however large the system makes them."""
        size = entry.chunks.chunk_bytes
        if entry.file is not None:
            await self.call(entry.file.punch, number * size, size)

    async def trim(self, entry: Entry) -> None:
        """Give back what a process that was killed had written without being able to say so."""
        if entry.file is not None:
            await self.call(entry.file.trim, [entry.chunks.bounds(number) for number in entry.chunks.numbers()])

    async def open(self, number: int) -> DataFile | None:
        """The file of an entry from before; None where it is gone, or cannot be read."""
        try:
            assert self.files is not None
            found: DataFile = await self.call(self.files.open, number)
        except FileNotFoundError:
            return None
        except OSError as exn:
            self.failed(exn, "opening a file")
            return None
        return found

    async def remove(self, number: int) -> bool:
        """Whether the entry's file is gone now."""
        try:
            if self.files is not None:
                await self.call(self.files.remove, number)
        except OSError as exn:
            self.failed(exn, "removing a file")
            return False
        return True

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call on a thread; a cancelled call is waited for, because its file and memory are in use until it returns."""
        running = asyncio.ensure_future(self._call(function, *args))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
