"""Objects that are open in memory, and the comparison of all objects on disk with their checksums."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from wds_async.redact import redact
from wds_async.service.cache.disk import OpenFolder
from wds_async.service.cache.entries import ObjectEntry, facts_from, resident
from wds_async.service.cache.fetching import ChunkFetcher
from wds_async.service.cache.index import Chunks, Index, IndexRow
from wds_async.transfer.ranges import Facts

__all__ = ["OpenEntries", "Scrub", "Verified"]


logger = logging.getLogger("wds_async")


class OpenEntries:
    """Entries in memory; at most ``most_idle`` without readers stay open. The index has the others."""

    def __init__(
        self,
        fetching: ChunkFetcher,
        opened: OpenFolder | None,
        chunk_bytes: int,
        most_idle: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._fetching = fetching
        self._opened = opened
        self._chunk_bytes = chunk_bytes
        self._most_idle = most_idle
        self._clock = clock
        self._wall = wall
        self._entries: OrderedDict[str, ObjectEntry] = OrderedDict()
        fetching.settle, fetching.remove = self.settle, self.evict

    @property
    def readers(self) -> int:
        """How many read now."""
        return sum(len(entry.readers) for entry in self._fetching.entries.values())

    def get(self, key: str) -> ObjectEntry | None:
        """Return the entry if it is in memory."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def new(self, key: str, url: str, facts: Facts, tenant: str) -> ObjectEntry:
        """Return a new entry with facts that have just come from its origin."""
        entry = ObjectEntry(self._fetching.journal.new_id(), key, url, facts, tenant, self._chunk_bytes)
        entry.checked = self._clock()
        self._fetching.entries[entry.id] = entry
        return entry

    def put(self, entry: ObjectEntry) -> ObjectEntry:
        """Make ``entry`` the one of its key."""
        if entry.gone:
            return entry
        old = self._entries.get(entry.key)
        if old is not None and old is not entry:
            self.discard(old)
        self._entries[entry.key] = entry
        self._put_away()
        return entry

    async def load(self, key: str, url: str) -> ObjectEntry | None:
        """Open the entry that the index has; None if it has none, or its file is gone."""
        journal = self._fetching.journal
        if self._opened is None:
            return None
        if journal.pending(key):
            await journal.flush()
        try:
            loaded = await self._fetching.disk.call(self._opened.index.load, key)
        except sqlite3.Error as exn:
            self.index_failed(exn)
            return None
        if loaded is None or journal.is_removed(loaded[0].id):
            return None
        row, pages = loaded
        entry = None
        if pages is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                entry = ObjectEntry(row.id, key, url, facts_from(row), row.tenant, self._chunk_bytes)
        if entry is None:
            self.evict_rows([row])
            return None
        entry.chunks.load(pages)
        entry.file = await self._fetching.disk.open(row.id)
        if entry.file is None or journal.is_removed(row.id):
            self._close(entry)
            self.evict_rows([row])
            return None
        with contextlib.suppress(OSError):
            await self._fetching.disk.trim(entry)
        entry.before = resident(row)
        age_s = self._wall() - row.checked
        entry.checked = self._clock() - age_s if age_s >= 0 else float("-inf")
        self._fetching.entries[entry.id] = entry
        return self.put(entry)

    def discard(self, entry: ObjectEntry) -> None:
        """Remove the entry from the cache, with its file; those that have it open read on."""
        if entry.gone:
            return
        entry.gone = True
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self._fetching.entries.pop(entry.id, None)
        if entry.before is not None:  # the policy counts its bytes, and does not know whose they are
            self._fetching.policy.add_older([(entry.id, entry.before)])
        self._fetching.policy.forget(entry.id)
        self._remove_file(entry)
        if not entry.busy:
            self._close(entry)

    def evict(self, numbers: Iterable[int]) -> None:
        """Remove entries to make room."""
        for number in numbers:
            entry = self._fetching.entries.get(number)
            if entry is not None:
                self.discard(entry)
            else:
                self._fetching.policy.forget(number)
                self._begin_removal(number)

    def evict_rows(self, rows: Iterable[IndexRow]) -> None:
        """Remove objects by their rows of the index, also if the policy does not know them yet."""
        rows = [row for row in rows if not self._fetching.journal.is_removed(row.id)]
        self._fetching.policy.add_older((row.id, resident(row)) for row in rows)
        self.evict(row.id for row in rows)

    def settle(self, entry: ObjectEntry) -> None:
        """Close or remove an entry that has become idle, if it should be."""
        if entry.busy or entry.closed:
            return
        if entry.gone:
            self._remove_file(entry)  # where it was made just when the entry went
            self._close(entry)
        elif entry.file is not None and (not entry.chunks.numbers() or (entry.in_order and not entry.chunks.whole)):
            self.discard(entry)
        else:
            self._put_away()

    def close(self) -> None:
        """Close all files."""
        for entry in [*self._entries.values(), *self._fetching.entries.values()]:
            self._close(entry)
        self._entries.clear()

    def index_failed(self, exn: sqlite3.Error) -> None:
        """Log that the index cannot be read, and have the next start replace it."""
        logger.warning("cache: the index cannot be read: %s; it is replaced at the next start", exn)
        self._fetching.stats.disk_errors += 1
        if self._opened is not None and not isinstance(exn, sqlite3.OperationalError):
            self._opened.mark_broken()

    def _put_away(self) -> None:
        """Close the least recently used idle entries above the limit."""
        over = len(self._entries) - self._most_idle
        if over <= 0:
            return
        for entry in [*self._entries.values()][: over + self._most_idle // 2]:
            if over > 0 and not entry.busy and not entry.chunks.on_probation:
                del self._entries[entry.key]
                self._fetching.entries.pop(entry.id, None)
                self._close(entry)
                over -= 1

    def _close(self, entry: ObjectEntry) -> None:
        entry.closed = True
        if entry.file is None:
            self._fetching.journal.unmade(entry.id)
        else:
            entry.file.close()

    def _remove_file(self, entry: ObjectEntry) -> None:
        if entry.file is not None and not entry.removed:
            entry.removed = True
            self._begin_removal(entry.id)

    def _begin_removal(self, number: int) -> None:
        self._fetching.journal.removing(number)
        self._fetching.finish(self._remove(number))

    async def _remove(self, number: int) -> None:
        if await self._fetching.disk.remove(number):
            self._fetching.journal.removed(number)


_PASS_EVERY_S = 86400.0
"""From the beginning of one pass over the cache to that of the next."""
_ROWS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Verified:
    """One object, compared: its ``key``, how many chunks were good, and how many were bad and dropped."""

    key: str
    good: int
    bad: int


class Scrub:
    """Reads the objects of the index from the disk itself. A chunk that is not what was written, or cannot be read, is
    dropped, so that the next reader has it fetched again."""

    def __init__(self, index: Index, open_entries: OpenEntries, fetching: ChunkFetcher, chunk_bytes: int) -> None:
        self._index = index
        self._open_entries = open_entries
        self._fetching = fetching
        self._chunk_bytes = chunk_bytes

    async def forever(self, bytes_per_s: float) -> None:
        """Verify all objects once a day, or as often as the rate allows."""
        loop = asyncio.get_running_loop()
        while True:
            began, bad = loop.time(), 0
            try:
                async for result in self.all("", bytes_per_s):
                    bad += result.bad
                    if result.bad:
                        logger.warning(
                            "cache: %s: %d chunks on disk were not what was written; they are fetched again",
                            redact(result.key), result.bad,
                        )  # fmt: skip
            except sqlite3.Error as exn:
                self._open_entries.index_failed(exn)
            await asyncio.sleep(max(1.0, began + _PASS_EVERY_S - loop.time()))

    async def all(self, prefix: str = "", bytes_per_s: float = float("inf")) -> AsyncIterator[Verified]:
        """Yield the result for every object whose key begins with ``prefix``, by key, at no more than ``bytes_per_s``.
        sqlite3.Error if the index cannot be read."""
        last = ""
        await self._fetching.journal.flush()
        while rows := await self._fetching.disk.call(self._index.following, prefix, last, _ROWS_AT_ONCE):
            for row in rows:
                if not self._fetching.journal.is_removed(row.id):
                    yield await self._one(row, bytes_per_s)
            last = rows[-1].key

    async def _one(self, row: IndexRow, bytes_per_s: float) -> Verified:
        chunks = await self._chunks(row)
        good = bad = 0
        for number in chunks.numbers():
            if number not in chunks or number in chunks.on_probation:
                continue  # it has gone meanwhile, or will soon
            crc, (start, stop) = chunks.crc(number), chunks.bounds(number)
            try:
                stored = await self._read(row, start, stop - start)
            except FileNotFoundError:
                self._open_entries.evict_rows([row])
                return Verified(row.key, good, len(chunks.numbers()))
            self._fetching.stats.scrubbed_bytes += stop - start
            if stored == crc:
                good += 1
            else:
                bad += await self._dropped(row, number, crc)
            await asyncio.sleep((stop - start) / bytes_per_s)
        return Verified(row.key, good, bad)

    async def _chunks(self, row: IndexRow) -> Chunks:
        """Return the chunks of the entry in memory, else those of the index."""
        entry = self._fetching.entries.get(row.id)
        if entry is not None:
            return entry.chunks
        chunks = Chunks(row.size, self._chunk_bytes)
        loaded = await self._fetching.disk.call(self._index.load, row.key)
        if loaded is not None and loaded[0].id == row.id:
            chunks.load(loaded[1] or ())
        return chunks

    async def _read(self, row: IndexRow, start: int, count: int) -> int | None:
        """Return the CRC-32C of the bytes on disk; None if there are fewer or they cannot be read."""
        files = self._fetching.disk.files
        assert files is not None
        try:
            stored: int | None = await self._fetching.disk.call(files.stored_crc, row.id, start, count)
        except FileNotFoundError:
            raise
        except OSError as exn:
            logger.warning("cache: %s at byte %d cannot be read from disk: %s", redact(row.key), start, exn)
            self._fetching.stats.disk_errors += 1
            return None
        return stored

    async def _dropped(self, row: IndexRow, number: int, crc: int) -> int:
        """Drop a bad chunk and return 1; 0 if it has changed meanwhile."""
        entry = self._open_entries.get(row.key) or await self._open_entries.load(row.key, row.key)
        if entry is None or entry.id != row.id or number not in entry.chunks or entry.chunks.crc(number) != crc:
            return 0
        self._fetching.stats.bad_chunks += 1
        self._fetching.drop(entry, number)
        self._fetching.settle(entry)
        return 1
