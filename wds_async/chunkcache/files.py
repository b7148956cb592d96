"""The files that hold objects: sparse, one each, written at any place, read by whoever has them open. It all blocks."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from crc32c import crc32c

__all__ = ["DataFile", "DataFolder", "crc_of"]

_FOLDERS = 256
_BLOCK = 4096
_READ_BYTES = 256 << 10
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # linux/falloc.h


class DataFile:
    """One object's file, open. OSError from every method where the disk fails."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Never over another's bytes: where the folder was replaced, and is another process's now, that one may
            # be serving them; and what a link leads to is none of ours.
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            flags |= os.O_CREAT | os.O_EXCL
        self.fd = os.open(path, flags, 0o600)

    def write(self, offset: int, data: memoryview) -> int:
        """Write all of ``data``; its CRC-32C."""
        crc = crc32c(data)
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], offset + written)
        return crc

    def crc(self, offset: int, count: int) -> int | None:
        """The CRC-32C of so many bytes there; None where the file ends before."""
        return crc_of(self.fd, offset, count)

    def punch(self, offset: int, count: int) -> bool:
        """Give the disk's blocks of a range back, up to the end of its last page; False where this system cannot.

        ``sendfile`` leaves the file's own pages in a socket's queue. A page that a hole covers is dropped, and lives on
        there; one that it covers in part is written to, and would arrive as zeros."""
        stop = -(-(offset + count) // mmap.PAGESIZE) * mmap.PAGESIZE
        return _punch is not None and _punch(self.fd, _KEEP_SIZE_PUNCH_HOLE, offset, stop - offset) == 0

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
    """Where files lie: by number, in 256 folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        """The file of an entry."""
        return self.folder / f"{number % _FOLDERS:02x}" / f"{number:x}"

    def create(self, number: int) -> DataFile:
        """A new, empty file."""
        return DataFile(self.path(number), create=True)

    def open(self, number: int) -> DataFile:
        """FileNotFoundError where it is gone."""
        return DataFile(self.path(number))

    def remove(self, number: int) -> None:
        """Remove a file that nobody has open here; nothing where there is none."""
        with contextlib.suppress(FileNotFoundError):
            self.path(number).unlink()

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
                    self.path(number).unlink()
                    found, missing = found + 1, 0
            number += 1
        return found

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


def crc_of(fd: int, offset: int, count: int) -> int | None:
    """The CRC-32C of ``count`` bytes at ``offset``; None where there are fewer."""
    buffer = memoryview(bytearray(min(_READ_BYTES, max(count, 1))))
    crc, stop = 0, offset + count
    while offset < stop:
        got = os.preadv(fd, [buffer[: min(len(buffer), stop - offset)]], offset)
        if got == 0:
            return None
        crc = crc32c(buffer[:got], crc)
        offset += got
    return crc


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
