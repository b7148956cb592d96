"""The cache's disk, which may be full, read-only, broken or not there: then bytes pass by it, and that is said."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from typing import Any

from wds_async.chunkcache.entries import Entry
from wds_async.chunkcache.files import DataFile, DataFolder
from wds_async.chunkcache.stats import CacheStats
from wds_async.redact import redact
from wds_async.storage.base import Call

__all__ = ["Disk"]

logger = logging.getLogger("wds_async")

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
