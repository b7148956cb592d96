"""Objects that are read in order only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.cache.doubles import CHUNK, Bytes, Clock, content, get, run, running, taken, until
from wds_async.errors import ObjectChanged

URL = "https://host/a.tar"
DATA = content(30 * CHUNK + 7)


def origin_of(data: bytes = DATA, **how: object) -> Bytes:
    origin = Bytes()
    origin.put(URL, data, **{"ranged": False, **how})
    return origin


def test_followers_read_behind(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            first = await cache.open(URL)
            pieces = first.pieces()
            await anext(pieces)
            later = asyncio.create_task(get(cache, URL))
            rest = [piece async for piece in pieces]
            assert rest
            assert await later == DATA
            first.release()
            assert origin.count("stream") == 1

    run(main())


def test_larger_than_the_cache_with_a_slow_reader(tmp_path: Path) -> None:
    """The stream waits for who reads it: nothing is dropped before it was read, and nothing is fetched twice."""

    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin, 12 * CHUNK) as cache:
            with await cache.open(URL) as found:
                got, pieces = 0, found.pieces()
                async for piece in pieces:
                    await asyncio.sleep(0.001)
                    got += piece.count if not isinstance(piece, memoryview) else len(piece)
                    assert cache.statistics().bytes <= 12 * CHUNK
                assert got == len(DATA)
            assert origin.bytes <= 2 * len(DATA)

    run(main())


def test_a_late_follower_of_what_has_passed_reads_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin, 12 * CHUNK) as cache:
            with await cache.open(URL) as found, await cache.open(URL) as late:
                pieces = found.pieces(25 * CHUNK)
                await anext(pieces)
                assert await taken(late) == DATA
                await pieces.aclose()
            assert cache.statistics().passed_bytes > 0

    run(main())


def test_without_an_identity_it_is_fresh_as_long_as_that(tmp_path: Path) -> None:
    async def main() -> None:
        origin, clock = origin_of(identity=""), Clock()
        async with running(tmp_path, origin, clock=clock, freshness_s=60) as cache:
            for _ in range(2):
                await get(cache, URL)
            assert origin.count("stream") == 1
            clock.now += 61
            assert await get(cache, URL) == DATA
            assert origin.count("stream") == 2

    run(main())


def test_another_object_than_was_opened(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            with await cache.open(URL) as found:
                origin.put(URL, DATA[:CHUNK], identity="v2", ranged=False)
                with pytest.raises(ObjectChanged, match="'v1' was opened, 'v2'"):
                    await taken(found)
            assert await get(cache, URL) == DATA[:CHUNK]

    run(main())


def test_one_of_two_readers_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            origin.gate.clear()
            tasks = [asyncio.create_task(get(cache, URL)) for _ in range(2)]
            await until(lambda: origin.count("stream") == 1 and cache.statistics().readers == 2)
            tasks[0].cancel()
            await asyncio.wait([tasks[0]])
            origin.gate.set()
            assert await tasks[1] == DATA
            assert origin.count("stream") == 1

    run(main())


def test_after_a_restart_it_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of(told=False)
        async with running(tmp_path, origin) as cache:
            await get(cache, URL)
        async with running(tmp_path, origin) as cache:
            assert await get(cache, URL, 5, 9 * CHUNK) == DATA[5 : 9 * CHUNK]
            assert await get(cache, URL) == DATA
            assert origin.count("stream") == 1

    run(main())
