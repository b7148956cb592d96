"""The files that hold objects: sparse, one each, written at any place, read by whoever has them open. It all blocks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from crc32c import crc32c

from wds_async.storage.filewriting import write_all

__all__ = ["DataFile", "DataFolder", "crc_of", "free_bytes", "stored_crc"]

_DATA = "data"
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
        reader has the file open that was handed over (its lock is shared, see `service.handing.hand`): also one that an
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
