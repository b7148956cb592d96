"""Comparing what lies on disk with its checksums while the cache is in use: slowly, in the background, or on demand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wds_async.config import TransferConfig
from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.service.cache.cache import CachedObject, ChunkCache
from wds_async.service.cache.chunks import CHUNK_BYTES, PAGE, Chunks
from wds_async.service.cache.disk import DataFile, DataFolder, open_folder, open_index, take_out_trash
from wds_async.service.cache.entries import Shelf, cost
from wds_async.service.cache.fetching import Fetching
from wds_async.service.cache.index import Batch, Index, Row
from wds_async.service.cache.origin import Origin, Urgency
from wds_async.storage.base import Call
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.threads import BlockingThreads
from wds_async.transfer.traffic import Traffic

__all__ = ["Scrub", "Verified", "Warmed", "listed", "pin", "pins", "remove", "verify", "warm", "warm_folder"]

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


_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Warmed:
    """One object: how many bytes of it are in the cache now (``size``: of how many), or why not."""

    url: str
    there: int = 0
    size: int | None = None
    error: str = ""

    @property
    def whole(self) -> bool:
        """Whether all of it is there."""
        return not self.error and self.there == self.size


async def warm_folder(
    folder: Path,
    limit_bytes: int,
    urls: Sequence[str],
    config: TransferConfig,
    told: Callable[[Warmed], None],
    *,
    at_once: int = 8,
) -> None:
    """Fetch the objects into the cache in ``folder``, where they are not there yet; ``told`` of each. ConfigError where
    a service works on the folder."""
    threads = BlockingThreads(asyncio.get_running_loop())
    fetcher = RangeFetcher(config, memory_bytes=_MEMORY_BYTES, traffic=Traffic())
    try:
        await warm(folder, limit_bytes, urls, fetcher, threads.call, told, at_once=at_once)
    finally:
        await fetcher.close()
        threads.stop()


async def warm(
    folder: Path,
    limit_bytes: int,
    urls: Sequence[str],
    origin: Origin,
    call: Call,
    told: Callable[[Warmed], None],
    *,
    at_once: int = 8,
) -> None:
    """The same, from any origin."""
    cache = ChunkCache(folder, limit_bytes, origin, call=call)
    await cache.start()
    waiting = iter(urls)

    async def work() -> None:
        for url in waiting:
            told(await _one(cache, url))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    finally:
        await cache.close()


async def _one(cache: ChunkCache, url: str) -> Warmed:
    try:
        with await cache.open(url) as found:
            await found.fetch(urgency=Urgency.DEMAND)
            return Warmed(url, _there(found), found.size)
    except WdsError as exn:
        return Warmed(url, error=str(exn))


def _there(found: CachedObject) -> int:
    return found.ready(0, 1 << 62) if found.size else 0


_AT_ONCE = 1000


def listed(folder: Path, prefix: str = "") -> Iterator[Row]:
    """The objects whose key begins so, also while a service works on the folder: as the index has them, which may be
    half a second behind. ConfigError where there is no cache."""
    with contextlib.closing(open_index(folder)) as index:
        yield from index.rows(prefix)


def pins(folder: Path) -> list[str]:
    """What is pinned, also while a service works on the folder. ConfigError where there is no cache."""
    with contextlib.closing(open_index(folder)) as index:
        return index.pins()


def pin(folder: Path, names: Iterable[str], *, pinned: bool) -> list[str]:
    """Pin objects by their keys, or prefixes that end with "/", or (``pinned`` False) no longer; all that is pinned
    then. ConfigError where a service works on the folder."""
    with contextlib.closing(open_folder(folder)) as opened:
        return opened.index.pin(names, pinned=pinned)


def remove(folder: Path, chosen: Callable[[str], bool]) -> list[Row]:
    """Remove the objects whose key is ``chosen``; they. ConfigError where a service works on the folder."""
    with contextlib.closing(open_folder(folder)) as opened:
        take_out_trash(folder)
        gone = [row for row in opened.index.rows() if chosen(row.key)]
        for start in range(0, len(gone), _AT_ONCE):
            some = gone[start : start + _AT_ONCE]
            for row in some:
                opened.files.remove(row.id)
            opened.index.write(Batch(gone={row.id for row in some}), opened.totals.next_id, opened.totals.state)
    return gone


def verify(folder: Path, prefix: str = "", *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Verified]:
    """Compare every chunk of every object with its checksum, and drop what is bad, so that it is fetched again.
    ConfigError where a service works on the folder: that compares each chunk before it is first served anyway."""
    with contextlib.closing(open_folder(folder)) as opened:
        for row in list(opened.index.rows(prefix)):
            batch, found = _compared(row, opened.index, opened.files, chunk_bytes)
            if found.bad:
                opened.index.write(batch, opened.totals.next_id, opened.totals.state)
            yield found


def _compared(row: Row, index: Index, files: DataFolder, chunk_bytes: int) -> tuple[Batch, Verified]:
    loaded = index.load(row.key)
    pages = loaded[1] if loaded is not None else None
    chunks = Chunks(row.size, chunk_bytes)
    chunks.load(pages or ())
    numbers = chunks.numbers()
    bad = _bad(row, chunks, files)
    for number in bad:
        chunks.drop(number)
    batch = Batch()
    left = chunks.numbers()
    if pages is None or not left:
        files.remove(row.id)
        batch.gone.add(row.id)
        bad = bad or [-1]  # a damaged row, or one of nothing
    else:
        held = sum(cost(chunks.length(number)) for number in left)
        batch.rows[row.id] = replace(row, held=held)
        batch.pages = {(row.id, number // PAGE): chunks.page(number // PAGE) for number in bad}
    return batch, Verified(row.key, len(numbers) - len(bad) if pages is not None else 0, len(bad))


def _bad(row: Row, chunks: Chunks, files: DataFolder) -> list[int]:
    try:
        file = files.open(row.id)
    except OSError:
        return chunks.numbers()
    with contextlib.closing(file):
        return [number for number in chunks.numbers() if not _good(file, chunks, number)]


def _good(file: DataFile, chunks: Chunks, number: int) -> bool:
    start, stop = chunks.bounds(number)
    try:
        return file.crc(start, stop - start) == chunks.crc(number)
    except OSError:
        return False
