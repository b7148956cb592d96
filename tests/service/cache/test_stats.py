"""The counters."""

from __future__ import annotations

from pathlib import Path

from tests.service.cache.doubles import CHUNK, Bytes, content, get, run, running
from wds_async.service.cache.origin import Urgency


def test_what_was_given_is_hit_or_miss(tmp_path: Path) -> None:
    async def main() -> None:
        origin = Bytes()
        origin.put("a", content(5 * CHUNK))
        origin.put("b", content(4 * CHUNK), ranged=False)
        async with running(tmp_path, origin) as cache:
            given = 0
            for name, start, stop in (("a", 0, 10), ("b", 0, None), ("a", 5, None), ("b", 7, 9), ("a", 0, None)):
                given += len(await get(cache, name, start, stop))
            stats = cache.statistics()
            assert stats.hit_bytes + stats.miss_bytes == given
            assert (stats.hits, stats.misses) == (2, 3)
            assert stats.miss_bytes == 10 + 4 * CHUNK + 4 * CHUNK
            assert stats.bytes == 9 * CHUNK
            assert (stats.entries, stats.readers, stats.probation_bytes) == (2, 0, 0)
            assert stats.limit_bytes == 1 << 20

    run(main())


def test_what_was_fetched_ahead_is_told_from_what_was_there(tmp_path: Path) -> None:
    async def main() -> None:
        origin = Bytes()
        origin.put("a", content(4 * CHUNK + 10))
        async with running(tmp_path, origin) as cache:
            with await cache.open("a", start=0) as found:
                assert await found.fetch(0, None, Urgency.PLAN) == 4 * CHUNK + 10
            assert cache.statistics().ahead_bytes == 0  # nobody has read it yet
            await get(cache, "a", 0, CHUNK)
            assert cache.statistics().ahead_bytes == CHUNK
            for _ in range(2):
                await get(cache, "a", CHUNK, None)
            stats = cache.statistics()
            assert (stats.ahead_bytes, stats.miss_bytes) == (4 * CHUNK + 10, 0)
            assert stats.hit_bytes == stats.ahead_bytes + 3 * CHUNK + 10  # the second time it was there
            assert sum(ahead for *_, ahead in stats.by_tenant.values()) == stats.ahead_bytes

    run(main())
