"""Commands on a cache's folder: list, warm, pin, remove, verify."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from wds_async.background import BlockingThreads
from wds_async.config import TransferConfig
from wds_async.errors import WdsError
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.cache.disk import open_index
from wds_async.service.cache.index import IndexRow
from wds_async.service.cache.open_entries import Verified
from wds_async.service.cache.origin import ObjectOrigin, Urgency
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.traffic import Traffic

__all__ = ["Warmed", "listed", "pin", "pins", "remove", "verify", "warm", "warm_folder"]

_MEMORY_BYTES = 128 << 20
_NO_LIMIT = 1 << 62
_TO_THE_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Warmed:
    """Result for one object: bytes of it in the cache (of ``size``), or an error."""

    url: str
    there: int = 0
    size: int | None = None
    error: str = ""

    @property
    def whole(self) -> bool:
        return not self.error and self.there == self.size


async def warm_folder(
    folder: Path,
    limit_bytes: int,
    urls: Sequence[str],
    config: TransferConfig,
    report: Callable[[Warmed], None],
    *,
    at_once: int = 8,
) -> None:
    """Fetch missing objects into the cache in ``folder``, calling ``report`` with each result. ConfigError if a service
    runs on the folder."""
    fetcher = RangeFetcher(config, memory_bytes=_MEMORY_BYTES, traffic=Traffic())
    try:
        await warm(folder, limit_bytes, urls, fetcher, report, at_once=at_once)
    finally:
        await fetcher.close()


async def warm(
    folder: Path,
    limit_bytes: int,
    urls: Sequence[str],
    origin: ObjectOrigin,
    report: Callable[[Warmed], None],
    *,
    at_once: int = 8,
) -> None:
    """Fetch the objects from ``origin``; see `warm_folder`."""
    waiting = iter(urls)

    async def work(cache: ChunkCache) -> None:
        for url in waiting:
            try:
                with await cache.open(url) as cached:
                    await cached.fetch(urgency=Urgency.DEMAND)
                    report(Warmed(url, cached.ready(0, _TO_THE_END) if cached.size else 0, cached.size))
            except WdsError as exn:
                report(Warmed(url, error=str(exn)))

    async with _cache(folder, limit_bytes, origin) as cache, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work(cache))


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

    async def change() -> list[str]:
        async with _cache(folder) as cache:
            return await cache.pin(names, pinned=pinned)

    return asyncio.run(change())


def remove(folder: Path, chosen: Callable[[str], bool]) -> list[IndexRow]:
    """Remove the objects whose key is ``chosen`` and return them. ConfigError while a service runs on the folder."""

    async def evict() -> list[IndexRow]:
        async with _cache(folder) as cache:
            return await cache.evict(chosen)

    return asyncio.run(evict())


def verify(folder: Path, prefix: str = "", **options: Any) -> Iterator[Verified]:
    """Compare every chunk of every object with its checksum and drop bad ones. ``options``: see `ChunkCache`.
    ConfigError while a service runs on the folder: that verifies each chunk before it is first served anyway."""

    async def results() -> AsyncIterator[Verified]:
        async with _cache(folder, **options) as cache:
            async for result in cache.verify(prefix):
                yield result

    async def following() -> Verified | None:
        return await anext(comparing, None)

    comparing = results()
    with asyncio.Runner() as runner:
        while (result := runner.run(following())) is not None:
            yield result


@contextlib.asynccontextmanager
async def _cache(
    folder: Path, limit_bytes: int = _NO_LIMIT, origin: ObjectOrigin | None = None, **options: Any
) -> AsyncIterator[ChunkCache]:
    threads = BlockingThreads(asyncio.get_running_loop())
    cache = ChunkCache(folder, limit_bytes, cast("ObjectOrigin", origin), call=threads.call, **options)
    try:
        await cache.start()
        yield cache
    finally:
        await cache.close()
        threads.stop()
