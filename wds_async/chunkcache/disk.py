"""The cache's disk, which may be full, read-only, broken or not there: then bytes pass by it, and that is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wds_async.chunkcache.entries import Entry
from wds_async.chunkcache.files import DataFile, DataFolder
from wds_async.chunkcache.stats import CacheStats
from wds_async.storage.base import Call

__all__ = ["Disk"]

logger = logging.getLogger("wds_async")

_PAUSE_S = 10.0
"""How long nothing is written after the disk refused."""


class Disk:
    """Files in ``folder``; None: no disk. What blocks runs on a thread."""

    def __init__(self, folder: Path | None, call: Call, stats: CacheStats, clock: Callable[[], float]) -> None:
        self.files = None if folder is None else DataFolder(folder)
        self._call = call
        self._stats = stats
        self._clock = clock
        self._paused_until = 0.0
        self._said = False

    @property
    def usable(self) -> bool:
        """Whether it is worth trying to write."""
        return self.files is not None and self._clock() >= self._paused_until

    def failed(self, exn: BaseException, doing: str) -> None:
        """It refused: count that, say it once, and leave it alone for a while."""
        self._stats.disk_errors += 1
        self._paused_until = self._clock() + _PAUSE_S
        where = "" if self.files is None else f" in {self.files.folder.parent}"
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        logger.log(
            level, "cache: %s failed%s: %s; objects are passed through from their origins, and the disk is tried again "
            "after %g s", doing, where, exn, _PAUSE_S,
        )  # fmt: skip

    async def write(self, entry: Entry, number: int, data: memoryview) -> int | None:
        """Write a chunk; its CRC-32C, None where the disk refused."""
        try:
            async with entry.creating:
                if entry.file is None:
                    assert self.files is not None
                    entry.file = await self.call(self.files.create, entry.id)
            crc: int = await self.call(entry.file.write, entry.chunks.bounds(number)[0], data)
        except OSError as exn:
            self.failed(exn, "writing")
            return None
        self._said = False
        return crc

    async def compare(self, entry: Entry, number: int) -> bool:
        """Whether what lies on disk is what the index says."""
        start, stop = entry.chunks.bounds(number)
        try:
            assert entry.file is not None
            found: int | None = await self.call(entry.file.crc, start, stop - start)
        except OSError as exn:
            self.failed(exn, "reading")
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
