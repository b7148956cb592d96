"""Objects that are open in memory, and the comparison of all objects on disk with their checksums."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from wds_async.redact import redact
from wds_async.service.cache.disk import OpenFolder
from wds_async.service.cache.entries import ObjectEntry, facts_of_row, resident
from wds_async.service.cache.fetching import ChunkFetcher
from wds_async.service.cache.index import Chunks, Index, IndexRow
from wds_async.transfer.ranges import Facts

__all__ = ["OpenEntries", "Scrub", "Verified"]

logger = logging.getLogger("wds_async")
_PASS_EVERY_S = 86400.0  # from the beginning of one pass over the cache to that of the next
_ROWS_AT_ONCE = 100


@dataclass(eq=False)
class OpenEntries:
    """Entries in memory; at most ``most_idle`` without readers stay open. The index has the others."""

    fetching: ChunkFetcher
    opened: OpenFolder | None
    chunk_bytes: int
    most_idle: int
    clock: Callable[[], float]
    wall: Callable[[], float]
    _entries: OrderedDict[str, ObjectEntry] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.fetching.settle, self.fetching.remove = self.settle, self.evict
        self._journal, self._policy = self.fetching.journal, self.fetching.policy

    @property
    def readers(self) -> int:
        return sum(len(entry.readers) for entry in self.fetching.entries.values())

    def get(self, key: str) -> ObjectEntry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def new(self, key: str, url: str, facts: Facts, tenant: str) -> ObjectEntry:
        """Return a new entry with facts that have just come from its origin."""
        entry = ObjectEntry(self._journal.new_id(), key, url, facts, tenant, Chunks(facts.size, self.chunk_bytes))
        entry.checked = self.clock()
        self.fetching.entries[entry.id] = entry
        return entry

    def put(self, entry: ObjectEntry) -> ObjectEntry:
        """Make ``entry`` the one of its key."""
        if not entry.gone:
            old = self._entries.get(entry.key)
            if old is not None and old is not entry:
                self.discard(old)
            self._entries[entry.key] = entry
            self._close_idle()
        return entry

    async def load(self, key: str, url: str) -> ObjectEntry | None:
        """Open the entry that the index has; None if it has none, or its file is gone. If another lookup has opened it
        meanwhile, that one is returned."""
        journal = self._journal
        if self.opened is None:
            return None
        if journal.pending(key):
            await journal.flush()
        try:
            loaded = await self.fetching.disk.call(self.opened.index.load, key)
        except sqlite3.Error as exn:
            self.index_failed(exn)
            return None
        if loaded is None or key in self._entries or journal.is_removed(loaded[0].id):
            return self._entries.get(key)
        row, pages = loaded
        entry = None
        if pages is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                chunks = Chunks(row.size, self.chunk_bytes)
                entry = ObjectEntry(row.id, key, url, facts_of_row(row), row.tenant, chunks)
        if entry is not None:
            entry.chunks.load(pages)
            entry.file = await self.fetching.disk.open(entry)
            if (present := self._entries.get(key)) is not None:
                if entry.file is not None:
                    entry.file.close()
                return present
        if entry is None or entry.file is None or journal.is_removed(row.id):
            if entry is not None:
                self._close(entry)
            self.evict_rows([row])
            return None
        entry.indexed = resident(row)
        age_s = self.wall() - row.checked
        entry.checked = self.clock() - age_s if age_s >= 0 else float("-inf")
        self.fetching.entries[entry.id] = entry
        return self.put(entry)

    def discard(self, entry: ObjectEntry) -> None:
        """Remove the entry from the cache, with its file; those that have it open read on."""
        if entry.gone:
            return
        entry.gone = True
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self.fetching.entries.pop(entry.id, None)
        if entry.indexed is not None:  # the policy counts its bytes, but does not know the entry
            self._policy.add_older([(entry.id, entry.indexed)])
        self._policy.forget(entry.id)
        self._remove_file(entry)
        if not entry.busy:
            self._close(entry)

    def evict(self, numbers: Iterable[int]) -> None:
        """Remove entries to make room."""
        for number in numbers:
            entry = self.fetching.entries.get(number)
            if entry is not None:
                self.discard(entry)
            else:
                self._policy.forget(number)
                self._begin_removal(number)

    def evict_rows(self, rows: Iterable[IndexRow]) -> None:
        """Remove objects by their rows of the index, also if the policy does not know them yet."""
        rows = [row for row in rows if not self._journal.is_removed(row.id)]
        self._policy.add_older((row.id, resident(row)) for row in rows)
        self.evict(row.id for row in rows)

    def settle(self, entry: ObjectEntry) -> None:
        """Close or remove an entry that has become idle, if it should be."""
        if entry.busy or entry.closed:
            return
        if entry.gone:
            self._remove_file(entry)  # if it was made just when the entry went
            self._close(entry)
        elif entry.file is not None and (not entry.chunks.numbers() or (entry.in_order and not entry.chunks.whole)):
            self.discard(entry)
        else:
            self._close_idle()

    def close(self) -> None:
        for entry in [*self._entries.values(), *self.fetching.entries.values()]:
            self._close(entry)
        self._entries.clear()

    def index_failed(self, exn: sqlite3.Error) -> None:
        """Log that the index cannot be read, and have the next start replace it."""
        logger.warning("cache: the index cannot be read: %s; it is replaced at the next start", exn)
        self.fetching.stats.disk_errors += 1
        if self.opened is not None and not isinstance(exn, sqlite3.OperationalError):
            self.opened.mark_broken()

    def _close_idle(self) -> None:
        """Close the least recently used idle entries above the limit."""
        over = len(self._entries) - self.most_idle
        if over <= 0:
            return
        for entry in [*self._entries.values()][: over + self.most_idle // 2]:
            if over > 0 and not entry.busy and not entry.chunks.on_probation:
                del self._entries[entry.key]
                self.fetching.entries.pop(entry.id, None)
                self._close(entry)
                over -= 1

    def _close(self, entry: ObjectEntry) -> None:
        entry.closed = True
        if entry.file is None:
            self._journal.without_file(entry.id)
        else:
            entry.file.close()

    def _remove_file(self, entry: ObjectEntry) -> None:
        if entry.file is not None and not entry.removed:
            entry.removed = True
            self._begin_removal(entry.id)

    def _begin_removal(self, number: int) -> None:
        async def remove() -> None:
            if await self.fetching.disk.remove(number):
                self._journal.removed(number)

        self._journal.removing(number)
        self.fetching.finish(remove())


@dataclass(frozen=True, slots=True)
class Verified:
    """The comparison of one object: its ``key``, how many chunks were good, and how many were bad and dropped."""

    key: str
    good: int
    bad: int


@dataclass(eq=False)
class Scrub:
    """Reads the objects of the index from the disk itself. A chunk that does not match its checksum, or cannot be read,
    is dropped, so that the next reader fetches it again."""

    index: Index
    open_entries: OpenEntries

    def __post_init__(self) -> None:
        self._fetching = self.open_entries.fetching

    async def forever(self, bytes_per_s: float) -> None:
        """Verify all objects once a day, or as often as the rate allows."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                async for result in self.all("", bytes_per_s):
                    if result.bad:
                        logger.warning(
                            "cache: %s: %d chunks on disk did not match their checksums; they are fetched again",
                            redact(result.key), result.bad,
                        )  # fmt: skip
            except sqlite3.Error as exn:
                self.open_entries.index_failed(exn)
            await asyncio.sleep(max(1.0, began + _PASS_EVERY_S - loop.time()))

    async def all(self, prefix: str = "", bytes_per_s: float = float("inf")) -> AsyncIterator[Verified]:
        """Yield the result for every object whose key begins with ``prefix``, by key, at no more than ``bytes_per_s``.
        sqlite3.Error if the index cannot be read."""
        last = ""
        await self._fetching.journal.flush()
        while rows := await self._fetching.disk.call(self.index.following, prefix, last, _ROWS_AT_ONCE):
            for row in rows:
                if not self._fetching.journal.is_removed(row.id):
                    yield await self._compare(row, bytes_per_s)
            last = rows[-1].key

    async def _compare(self, row: IndexRow, bytes_per_s: float) -> Verified:
        chunks = await self._chunks(row)
        if chunks is None:
            self.open_entries.evict_rows([row])
            return Verified(row.key, 0, 1)
        good = bad = 0
        for number in chunks.numbers():
            if number not in chunks or number in chunks.on_probation:
                continue  # it has gone meanwhile, or will soon
            crc, (start, stop) = chunks.crcs[number], chunks.bounds(number)
            try:
                stored = await self._stored_crc(row, start, stop - start)
            except FileNotFoundError:
                self.open_entries.evict_rows([row])
                return Verified(row.key, good, len(chunks.numbers()))
            self._fetching.stats.scrubbed_bytes += stop - start
            if stored == crc:
                good += 1
            else:
                bad += await self._drop(row, number, crc)
            await asyncio.sleep((stop - start) / bytes_per_s)
        return Verified(row.key, good, bad)

    async def _chunks(self, row: IndexRow) -> Chunks | None:
        """Return the chunks of the entry in memory, else those of the index; None if its row is damaged."""
        entry = self._fetching.entries.get(row.id)
        if entry is not None:
            return entry.chunks
        chunks = Chunks(row.size, self.open_entries.chunk_bytes)
        loaded = await self._fetching.disk.call(self.index.load, row.key)
        if loaded is not None and loaded[0].id == row.id:
            if loaded[1] is None:
                return None
            chunks.load(loaded[1])
        return chunks

    async def _stored_crc(self, row: IndexRow, start: int, count: int) -> int | None:
        """Return the CRC-32C of the bytes on disk; None if there are fewer or they cannot be read."""
        disk = self._fetching.disk
        assert disk.files is not None
        try:
            stored: int | None = await disk.call(disk.files.stored_crc, row.id, start, count)
        except FileNotFoundError:
            raise
        except OSError as exn:
            disk.unreadable(exn, row.key, start)
            return None
        return stored

    async def _drop(self, row: IndexRow, number: int, crc: int) -> bool:
        """Drop a bad chunk, and return whether it was still there."""
        entry = self.open_entries.get(row.key) or await self.open_entries.load(row.key, row.key)
        if entry is None or entry.id != row.id or number not in entry.chunks or entry.chunks.crcs[number] != crc:
            return False
        self._fetching.drop_bad(entry, number)
        self._fetching.settle(entry)
        return True
