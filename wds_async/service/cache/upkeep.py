"""Commands on a cache's folder: list, warm, pin, remove, verify."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wds_async.background import BlockingThreads
from wds_async.config import TransferConfig
from wds_async.errors import WdsError
from wds_async.service.cache.cache import CachedObject, ChunkCache
from wds_async.service.cache.disk import DataFile, DataFolder, open_folder, open_index, take_out_trash
from wds_async.service.cache.entries import cost
from wds_async.service.cache.index import CHUNK_BYTES, PAGE, Chunks, Index, IndexBatch, IndexRow
from wds_async.service.cache.open_entries import Verified
from wds_async.service.cache.origin import ObjectOrigin, Urgency
from wds_async.storage.base import Call
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.traffic import Traffic

__all__ = ["Warmed", "listed", "pin", "pins", "remove", "verify", "warm", "warm_folder"]


_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Warmed:
    """Result for one object: bytes of it in the cache (of ``size``), or an error."""

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
    """Fetch missing objects into the cache in ``folder``, calling ``told`` with each result. ConfigError if a service
    runs on the folder."""
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
    origin: ObjectOrigin,
    call: Call,
    told: Callable[[Warmed], None],
    *,
    at_once: int = 8,
) -> None:
    """Fetch the objects from ``origin``; see `warm_folder`."""
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
        with await cache.open(url) as held:
            await held.fetch(urgency=Urgency.DEMAND)
            return Warmed(url, _there(held), held.size)
    except WdsError as exn:
        return Warmed(url, error=str(exn))


def _there(held: CachedObject) -> int:
    return held.ready(0, 1 << 62) if held.size else 0


_AT_ONCE = 1000


def listed(folder: Path, prefix: str = "") -> Iterator[IndexRow]:
    """Yield the objects whose key begins with ``prefix``, also while a service runs on the folder: as the index has
    them, which may lag by half a second. ConfigError without a cache."""
    with contextlib.closing(open_index(folder)) as index:
        yield from index.rows(prefix)


def pins(folder: Path) -> list[str]:
    """Return the pins, also while a service runs on the folder. ConfigError without a cache."""
    with contextlib.closing(open_index(folder)) as index:
        return index.pins()


def pin(folder: Path, names: Iterable[str], *, pinned: bool) -> list[str]:
    """Pin objects by their keys, or by prefixes that end with "/", or (``pinned`` False) no longer; return all pins.
    ConfigError while a service runs on the folder."""
    with contextlib.closing(open_folder(folder)) as opened:
        return opened.index.pin(names, pinned=pinned)


def remove(folder: Path, chosen: Callable[[str], bool]) -> list[IndexRow]:
    """Remove the objects whose key is ``chosen`` and return them. ConfigError while a service runs on the folder."""
    with contextlib.closing(open_folder(folder)) as opened:
        take_out_trash(folder)
        gone = [row for row in opened.index.rows() if chosen(row.key)]
        for start in range(0, len(gone), _AT_ONCE):
            some = gone[start : start + _AT_ONCE]
            for row in some:
                opened.files.remove(row.id)
            opened.index.write(IndexBatch(gone={row.id for row in some}), opened.totals.next_id, opened.totals.state)
    return gone


def verify(folder: Path, prefix: str = "", *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Verified]:
    """Compare every chunk of every object with its checksum and drop bad ones. ConfigError while a service runs on the
    folder: that verifies each chunk before it is first served anyway."""
    with contextlib.closing(open_folder(folder)) as opened:
        for row in list(opened.index.rows(prefix)):
            batch, result = _compared(row, opened.index, opened.files, chunk_bytes)
            if result.bad:
                opened.index.write(batch, opened.totals.next_id, opened.totals.state)
            yield result


def _compared(row: IndexRow, index: Index, files: DataFolder, chunk_bytes: int) -> tuple[IndexBatch, Verified]:
    loaded = index.load(row.key)
    pages = loaded[1] if loaded is not None else None
    chunks = Chunks(row.size, chunk_bytes)
    chunks.load(pages or ())
    numbers = chunks.numbers()
    bad = _bad(row, chunks, files)
    for number in bad:
        chunks.drop(number)
    batch = IndexBatch()
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


def _bad(row: IndexRow, chunks: Chunks, files: DataFolder) -> list[int]:
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
