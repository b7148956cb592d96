"""Comparing what lies on disk with its checksums while the cache is in use: slowly, in the background, or on demand."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass

from wds_async.chunkcache.chunks import Chunks
from wds_async.chunkcache.fetching import Fetching
from wds_async.chunkcache.index import Index, Row
from wds_async.chunkcache.shelf import Shelf
from wds_async.redact import redact

__all__ = ["Scrub", "Verified"]

logger = logging.getLogger("wds_async")

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

    def __init__(self, index: Index, shelf: Shelf, fetching: Fetching, chunk_bytes: int) -> None:
        self._index = index
        self._shelf = shelf
        self._fetching = fetching
        self._chunk_bytes = chunk_bytes

    async def forever(self, bytes_per_s: float) -> None:
        """One pass a day, or as often as the rate allows."""
        loop = asyncio.get_running_loop()
        while True:
            began, bad = loop.time(), 0
            try:
                async for found in self.all("", bytes_per_s):
                    bad += found.bad
                    if found.bad:
                        logger.warning(
                            "cache: %s: %d chunks on disk were not what was written; they are fetched again",
                            redact(found.key), found.bad,
                        )  # fmt: skip
            except sqlite3.Error as exn:
                self._shelf.index_failed(exn)
            await asyncio.sleep(max(1.0, began + _PASS_EVERY_S - loop.time()))

    async def all(self, prefix: str = "", bytes_per_s: float = float("inf")) -> AsyncIterator[Verified]:
        """Every object whose key begins so, in the order of keys, at no more than ``bytes_per_s``. sqlite3.Error where
        the index cannot be read."""
        last = ""
        await self._fetching.journal.flush()
        while rows := await self._fetching.disk.call(self._index.following, prefix, last, _ROWS_AT_ONCE):
            for row in rows:
                if not self._fetching.journal.is_removed(row.id):
                    yield await self._one(row, bytes_per_s)
            last = rows[-1].key

    async def _one(self, row: Row, bytes_per_s: float) -> Verified:
        chunks = await self._chunks(row)
        good = bad = 0
        for number in chunks.numbers():
            if number not in chunks or number in chunks.passing:
                continue  # it has gone meanwhile, or will soon
            crc, (start, stop) = chunks.crc(number), chunks.bounds(number)
            try:
                found = await self._read(row, start, stop - start)
            except FileNotFoundError:
                self._shelf.evict_rows([row])
                return Verified(row.key, good, len(chunks.numbers()))
            self._fetching.stats.scrubbed_bytes += stop - start
            if found == crc:
                good += 1
            else:
                bad += await self._dropped(row, number, crc)
            await asyncio.sleep((stop - start) / bytes_per_s)
        return Verified(row.key, good, bad)

    async def _chunks(self, row: Row) -> Chunks:
        """Those in use where the object is in memory, else what the index says."""
        entry = self._fetching.entries.get(row.id)
        if entry is not None:
            return entry.chunks
        chunks = Chunks(row.size, self._chunk_bytes)
        found = await self._fetching.disk.call(self._index.load, row.key)
        if found is not None and found[0].id == row.id:
            chunks.load(found[1] or ())
        return chunks

    async def _read(self, row: Row, start: int, count: int) -> int | None:
        """The CRC-32C of what the disk has; None where that is less, or cannot be read."""
        files = self._fetching.disk.files
        assert files is not None
        try:
            found: int | None = await self._fetching.disk.call(files.stored_crc, row.id, start, count)
        except FileNotFoundError:
            raise
        except OSError as exn:
            logger.warning("cache: %s at byte %d cannot be read from disk: %s", redact(row.key), start, exn)
            self._fetching.stats.disk_errors += 1
            return None
        return found

    async def _dropped(self, row: Row, number: int, crc: int) -> int:
        """Drop a bad chunk; 0 where it has gone meanwhile."""
        entry = self._shelf.get(row.key) or await self._shelf.load(row.key, row.key)
        if entry is None or entry.id != row.id or number not in entry.chunks or entry.chunks.crc(number) != crc:
            return 0
        self._fetching.stats.bad_chunks += 1
        self._fetching.drop(entry, number)
        self._fetching.settle(entry)
        return 1
