"""Filling a cache's folder where no service runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wds_async.chunkcache.cache import CachedObject, ChunkCache
from wds_async.chunkcache.origin import Origin, Urgency
from wds_async.config import TransferConfig
from wds_async.errors import WdsError
from wds_async.storage.base import Call
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.threads import BlockingThreads
from wds_async.transfer.traffic import Traffic

__all__ = ["Warmed", "warm", "warm_folder"]

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
