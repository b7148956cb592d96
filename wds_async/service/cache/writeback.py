"""Writes of the cache: chunks to their files (`Disk`), and changes to the index (`Journal`)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wds_async.redact import redact
from wds_async.service.cache.disk import DataFile, DataFolder
from wds_async.service.cache.entries import CacheStats, ObjectEntry
from wds_async.service.cache.index import PAGE, Index, IndexBatch
from wds_async.service.cache.policy import Policy
from wds_async.storage.base import Call

__all__ = ["Disk", "Journal"]

logger = logging.getLogger("wds_async")
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))  # refusals for a reason outside of the file
_PAUSE_S = 10.0  # how long nothing is written after the disk refused
_STUCK_S = 5.0  # after so long a write that has not returned makes the disk unusable, until it returns
_PATIENCE_S = 1.0  # how long a chunk waits for its turn to be written while others wait for its memory
_LOOK_EVERY_S = 0.1


class Disk:
    """The cache's ``files`` (None: no disk). Blocking calls run on a thread, at most ``writers`` writes at once: more
    would wait for each other in the file system, each holding its chunk's memory. Nothing is written while its file
    system is ``crowded`` (has too little space left)."""

    def __init__(
        self, files: DataFolder | None, call: Call, stats: CacheStats, clock: Callable[[], float], writers: int = 4
    ) -> None:
        self.files = files
        self.crowded = self._vanished = False
        self._call = call
        self._stats = stats
        self._clock = clock
        self._paused_until = 0.0
        self._warned = self._warned_slow = False
        self._writers = asyncio.Semaphore(writers)
        self._writing: dict[object, float] = {}

    def set_vanished(self, vanished: bool) -> None:
        """Write nothing while the folder is gone: its path may lead to another disk."""
        self._vanished = vanished

    @property
    def usable(self) -> bool:
        """True if a write is worth trying."""
        if self.files is None or self.crowded or self._vanished:
            return False
        now = self._clock()
        return now >= self._paused_until and not any(now - began >= _STUCK_S for began in self._writing.values())

    def failed(self, exn: BaseException, doing: str) -> None:
        self._stats.disk_errors += 1
        self._paused_until = self._clock() + _PAUSE_S
        where = "" if self.files is None else f" in {self.files.root}"
        logger.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "cache: %s failed%s: %s; objects are passed through from their origins, and the disk is tried again "
            "after %g s", doing, where, exn, _PAUSE_S,
        )  # fmt: skip
        self._warned = True

    async def write(
        self, entry: ObjectEntry, number: int, data: memoryview, memory_wanted: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Write a chunk and return its CRC-32C; None if the disk refused, or lags while memory is short."""
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
        self._warned = False
        return crc

    async def _turn(self, memory_wanted: Callable[[], bool]) -> bool:
        """Wait until another write may begin; False if the chunk's memory is wanted first, or the disk is stuck."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while self._writers.locked():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    return await self._writers.acquire()
            if not self.usable or (memory_wanted() and clock() - began >= _PATIENCE_S):
                level = logging.DEBUG if self._warned_slow else logging.WARNING
                self._warned_slow = True
                logger.log(level, "cache: the disk is slower than what is read; what it cannot take is passed through")
                return False
        return await self._writers.acquire()

    async def compare(self, entry: ObjectEntry, number: int) -> bool:
        start, stop = entry.chunks.bounds(number)
        try:
            assert entry.file is not None
            stored: int | None = await self.call(entry.file.crc, start, stop - start)
        except OSError as exn:
            self.unreadable(exn, entry.url, start)
            return False
        return stored == entry.chunks.crcs[number]

    def unreadable(self, exn: OSError, url: str, start: int) -> None:
        self._stats.disk_errors += 1
        logger.warning("cache: %s at byte %d cannot be read from disk: %s", redact(url), start, exn)

    async def punch(self, entry: ObjectEntry, number: int) -> None:
        """Free the blocks of a chunk; of the last one as if it were full, so that the hole covers whole pages."""
        size = entry.chunks.chunk_bytes
        if entry.file is not None:
            await self.call(entry.file.punch, number * size, size)

    async def open(self, entry: ObjectEntry) -> DataFile | None:
        """Open the file of an entry; None if it is gone or cannot be read. Blocks that a killed process wrote and the
        index does not know are freed."""
        try:
            assert self.files is not None
            file: DataFile = await self.call(self.files.open, entry.id)
        except FileNotFoundError:
            return None
        except OSError as exn:
            self.failed(exn, "opening a file")
            return None
        with contextlib.suppress(OSError):
            await self.call(file.trim, [entry.chunks.bounds(number) for number in entry.chunks.numbers()])
        return file

    async def remove(self, number: int) -> bool:
        """Remove the file of an entry; False if that failed."""
        try:
            if self.files is not None:
                await self.call(self.files.remove, number)
        except OSError as exn:
            self.failed(exn, "removing a file")
            return False
        return True

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a thread. A cancelled call is waited for, because its file and memory are in use until it
        returns."""
        running = asyncio.ensure_future(self._call(function, *args))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


@dataclass
class Journal:
    """Notes changes and writes them to ``index`` on `flush` (None: nowhere). ``broken`` is called if its content
    prevents writing."""

    index: Index | None
    call: Call
    policy: Policy
    clock: Callable[[], float]
    wall: Callable[[], float]
    next_id: int
    broken: Callable[[], None] = lambda: None
    _dirty: dict[int, ObjectEntry] = field(default_factory=dict)
    _pages: dict[tuple[int, int], ObjectEntry] = field(default_factory=dict)
    _new: set[int] = field(default_factory=set)  # entries that may have a file, but no row yet
    _lagging: set[str] = field(default_factory=set)  # keys whose row may lag, the batch that is being written included
    _going: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _warned: bool = False

    def new_id(self) -> int:
        number, self.next_id = self.next_id, self.next_id + 1
        self._new.add(number)
        return number

    def without_file(self, number: int) -> None:
        """Note that an entry has no file."""
        self._new.discard(number)

    @property
    def behind(self) -> bool:
        return bool(self._dirty or self._gone)

    def pending(self, key: str) -> bool:
        """Return whether the index may lag for this key."""
        return key in self._lagging

    def used(self, entry: ObjectEntry) -> None:
        if entry.file is not None and not entry.gone:
            self._dirty[entry.id] = entry
            self._lagging.add(entry.key)

    def changed(self, entry: ObjectEntry, number: int) -> None:
        self.used(entry)
        if entry.id in self._dirty:
            self._pages[entry.id, number // PAGE] = entry

    def removing(self, number: int) -> None:
        """Note that an entry's file is about to be removed."""
        self._going.add(number)
        self._dirty.pop(number, None)

    def removed(self, number: int) -> None:
        """Note that an entry's file was removed."""
        self._gone.add(number)
        self._new.discard(number)

    def is_removed(self, number: int) -> bool:
        """Return whether an entry's file was or is being removed, though the index may still have it."""
        return number in self._going

    async def flush(self) -> bool:
        """Write all changes; False if the index refused them, and they stay noted."""
        async with self._writing:
            if self.index is None or not self.behind:
                return True
            entries, pages, gone = self._dirty, self._pages, set(self._gone)
            self._dirty, self._pages = {}, {}
            batch = self._batch(entries, pages, gone)
            sweep_from = min(self._new - batch.rows.keys(), default=self.next_id)
            try:
                await self.call(self.index.write, batch, self.next_id, self.policy.state(), sweep_from)
            except sqlite3.Error as exn:
                self._dirty, self._pages = {**entries, **self._dirty}, {**pages, **self._pages}
                self._failed(exn)
                return False
            self._lagging = {entry.key for entry in self._dirty.values()}
            self._new -= batch.rows.keys()
            self._gone -= gone
            self._going -= gone
            self._warned = False
            return True

    def _batch(
        self, entries: dict[int, ObjectEntry], pages: dict[tuple[int, int], ObjectEntry], gone: set[int]
    ) -> IndexBatch:
        clock, wall = self.clock(), self.wall()
        rows = {
            number: entry.row(wall - (clock - entry.checked), wall, self.policy.last_use(number))
            for number, entry in entries.items()
            if not entry.gone
        }
        packed = {key: entry.chunks.page(key[1]) for key, entry in pages.items() if not entry.gone}
        return IndexBatch(rows, packed, gone)

    def _failed(self, exn: sqlite3.Error) -> None:
        if not isinstance(exn, sqlite3.OperationalError):
            self.broken()
        if not self._warned:
            logger.warning(
                "cache: the index cannot be written: %s; what is cached from now on is forgotten at a restart until it "
                "can", exn,
            )  # fmt: skip
        self._warned = True
