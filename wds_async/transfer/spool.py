"""Bytes of one shard that are held back: in memory up to a bound, the rest in a file without a name."""

from __future__ import annotations

import contextlib
import tempfile
from typing import IO

from wds_async.storage.filewriting import write_all

__all__ = ["Spool"]

_PIECE_BYTES = 1 << 20


class Spool:
    """Takes pieces by `write`, and gives them back by `read` once all are there; `clear` makes it empty again.

    ``memory_bytes`` bounds what it holds in memory, which is kept for the next shard; ``folder`` is where the rest goes
    (None: the system's for temporary files). OSError where that has no room. One thread uses it.
    """

    def __init__(self, memory_bytes: int, folder: str | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._buffer = memoryview(b"")
        self.size = 0
        """Bytes that were written."""
        self._given = 0

    def write(self, piece: memoryview) -> None:
        """The next bytes; copied."""
        if not self._memory:
            self._memory = bytearray(self._memory_bytes)  # pages that nobody writes to cost nothing
        kept = max(0, min(len(piece), self._memory_bytes - self.size))
        if kept:
            self._memory[self.size : self.size + kept] = piece[:kept]
        if kept < len(piece):
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (see `clear`)
            write_all(self._file.fileno(), piece[kept:])
        self.size += len(piece)

    def read(self) -> memoryview | None:
        """The next piece of what was written, in order; None at the end. Valid until the next call."""
        in_memory = min(self.size, self._memory_bytes)
        start = self._given
        if start < in_memory:
            self._given = min(in_memory, start + _PIECE_BYTES)
            return memoryview(self._memory)[start : self._given]
        if start >= self.size or self._file is None:
            return None
        if start == in_memory:
            self._file.seek(0)
            self._buffer = self._buffer or memoryview(bytearray(_PIECE_BYTES))
        count = self._file.readinto(self._buffer)  # type: ignore[attr-defined]  # raw, for want of buffering
        if not count:
            raise OSError(f"the file of what was held back ended {self.size - start} bytes early")
        self._given += count
        return self._buffer[:count]

    def clear(self) -> None:
        """Forget what was written; the memory stays. Idempotent."""
        self.size = self._given = 0
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
