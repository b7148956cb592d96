"""Positioned reads of local files into slabs, on threads."""

from __future__ import annotations

import os
import threading

from wds_async.storage.base import LocalFile, ObjectReplaced
from wds_async.storage.handed_files import HandedFile
from wds_async.storage.local import file_version

__all__ = ["FileReader", "FileReplaced"]


class FileReplaced(ObjectReplaced):
    """The file changed, or became shorter, while it was being read."""


class FileReader:
    """One open file for all parts of a shard; `read` may run on several threads at once. A handed file is read by its
    descriptor, and its version is not checked: the cache that handed it over may write beside its bytes."""

    def __init__(self, file: LocalFile) -> None:
        self._file = file
        self._handed = file.descriptor if isinstance(file, HandedFile) else None
        self._fd = -1 if self._handed is None else self._handed.fd
        self._lock = threading.Lock()

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` with the bytes at ``offset``; blocks."""
        fd = self._open()
        while len(into):
            count = self._read_at(fd, into, offset)
            if count == 0:
                raise FileReplaced(f"it ended at byte {offset}; it had {self._file.size} bytes when it was opened")
            into, offset = into[count:], offset + count
        self._check(fd)  # after reading, so that no byte of what was written over it meanwhile is believed

    def close(self) -> None:
        """Close the file; no `read` may be under way."""
        if self._handed is not None:
            self._handed.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        with self._lock:
            if self._fd < 0:
                fd = os.open(self._file.path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
                try:
                    self._check(fd)
                except BaseException:
                    os.close(fd)
                    raise
                self._fd = fd
            return self._fd

    def _check(self, fd: int) -> None:
        if self._handed is not None:
            return
        version = file_version(os.fstat(fd))
        if version != self._file.version:
            raise FileReplaced(f"it was {self._file.version} and is now {version}")

    def _read_at(self, fd: int, into: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(fd, [into], offset)
        with self._lock:  # Windows: seek and read are two calls
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(into))
        into[: len(data)] = data
        return len(data)
