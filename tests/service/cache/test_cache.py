"""The cache as a service uses it: freshness, restarts, faults of disk and origin, counters, commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.cache.doubles import (
    CHUNK,
    URL,
    Bytes,
    Clock,
    content,
    damage,
    data_files,
    disk_bytes,
    get,
    origin_of,
    origin_of_many,
    run,
    running,
    serving,
    stored,
    taken,
    until,
)
from wds_async.errors import ShardNotFound, TransferError
from wds_async.service.cache import upkeep
from wds_async.service.cache.cache import CachedObject
from wds_async.service.cache.fetching import DiskPiece
from wds_async.service.cache.index import CHUNK_BYTES
from wds_async.service.cache.origin import Client, Urgency
from wds_async.service.cache.upkeep import Warmed, warm
from wds_async.transfer.ranges import Facts

DATA = content(10 * CHUNK + 123)


@pytest.mark.parametrize("bounds", [(0, 1), (5, 5), (CHUNK - 1, CHUNK + 1), (3 * CHUNK, None), (len(DATA) - 1, None)])
async def test_ranges(tmp_path: Path, bounds: tuple[int, int | None]) -> None:
    async with running(tmp_path, origin_of(DATA)) as cache:
        for _ in range(2):
            assert await get(cache, URL, *bounds) == DATA[slice(*bounds)]


async def test_many_readers_one_fetch(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        got = await asyncio.gather(*(get(cache, URL, client=Client("", str(number))) for number in range(16)))
        assert set(got) == {DATA}
        assert origin.bytes == len(DATA)
        assert cache.statistics().coalesced > 0


async def test_what_is_whole_is_ready_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, origin_of(DATA)) as cache:
        assert cache.peek(URL) is None
        await get(cache, URL)
        found = cache.peek(URL)
        assert found is not None
        with found:
            assert found.whole
            assert found.ready(5, 100) == 100
            assert found.ready(5, 1 << 60) == len(DATA)
            assert found.ready(len(DATA) + 7, 1 << 60) == len(DATA) + 7
            assert os.pread(found.fd, len(DATA), 0) == DATA
            found.served(100)
            pieces = [piece async for piece in found.pieces(7)]
            assert pieces == [DiskPiece(found.fd, 7, len(DATA) - 7)]
        assert cache.statistics().hits == 2


async def test_chunks_are_readable_as_they_arrive(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        with await cache.open(URL) as found:
            await stored(cache)
            origin.gate.clear()
            pieces = found.pieces()
            first = await anext(pieces)
            assert isinstance(first, DiskPiece)
            assert os.pread(first.fd, first.count, first.offset) == DATA[:CHUNK]
            assert not found.whole
            assert found.ready(0, len(DATA)) == CHUNK
            origin.gate.set()
            rest = [piece.count if isinstance(piece, DiskPiece) else len(piece) async for piece in pieces]
            assert sum(rest) == len(DATA) - CHUNK


async def test_a_reader_that_leaves_takes_nothing_from_others(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        origin.gate.clear()
        readers = [asyncio.create_task(get(cache, URL, CHUNK)) for _ in range(3)]
        await until(lambda: origin.under_way >= 9)
        readers[0].cancel()
        await asyncio.wait([readers[0]])
        origin.gate.set()
        assert await asyncio.gather(*readers[1:]) == [DATA[CHUNK:]] * 2
        assert origin.bytes == len(DATA) - CHUNK


async def test_freshness(tmp_path: Path) -> None:
    origin, clock = origin_of(DATA), Clock()
    async with running(tmp_path, origin, clock=clock, freshness_s=60) as cache:
        await get(cache, URL)
        clock.now += 59
        await get(cache, URL)
        assert origin.count("facts") == 0
        clock.now += 2
        stale = cache.peek(URL)
        assert stale is not None
        with stale:
            assert stale.stale
        await cache.fetching.quiet()
        assert origin.count("facts") == 1
        fresh = cache.peek(URL)
        assert fresh is not None
        with fresh:
            assert not fresh.stale
        clock.now += 60 + 3601
        assert cache.peek(URL) is None
        await get(cache, URL)
        assert origin.count("facts") == 2
        assert origin.bytes == len(DATA)
        assert cache.peek(URL) is not None


async def test_a_replaced_object_is_another_and_old_readers_finish(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA), freshness_s=0) as (origin, cache):
        await get(cache, URL)
        old = await cache.open(URL)
        new = content(3 * CHUNK, 9)
        origin.put(URL, new, identity="v2")
        assert await get(cache, URL) == new
        assert await taken(old) == DATA
        old.release()
        await cache.fetching.quiet()
        await cache.flush()
        assert len(data_files(tmp_path)) == 1


async def test_an_object_that_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA), freshness_s=0) as (origin, cache):
        await get(cache, URL)
        del origin.things[URL]
        with pytest.raises(ShardNotFound):
            await cache.open(URL)
        assert cache.statistics().entries == 0
        await cache.fetching.quiet()
        assert data_files(tmp_path) == []
        with pytest.raises(ShardNotFound):
            await cache.open("s3://bucket/never.tar")


async def test_an_origin_out_of_reach(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    origin, clock = origin_of(DATA), Clock()
    origin.put("s3://bucket/half.tar", DATA)
    async with running(tmp_path, origin, freshness_s=60, clock=clock) as cache:
        await get(cache, URL)
        await get(cache, "s3://bucket/half.tar", 0, 10)
        origin.broken = True
        clock.now += 100
        assert await get(cache, URL) == DATA
        await cache.fetching.quiet()
        assert cache.statistics().stale == 1
        assert "does not answer" in caplog.text
        asked = len(origin.asked)
        await get(cache, URL)
        assert len(origin.asked) == asked  # not with every reader
        clock.now += 1_000_000
        assert await get(cache, URL) == DATA
        assert len(origin.asked) == asked + 1
        assert cache.statistics().unanswered == 2
        origin.down = True  # then no request waits for it: one probe is sent
        clock.now += 1_000_000
        assert cache.peek(URL) is not None
        await cache.fetching.quiet()
        assert len(origin.asked) == asked + 2
        with pytest.raises(TransferError):
            await get(cache, "s3://bucket/half.tar", 0, 10)


async def test_freshness_zero_serves_nothing_unasked(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA), freshness_s=0) as (origin, cache):
        await get(cache, URL)
        await get(cache, URL)
        assert origin.count("facts") == 1
        origin.broken = True
        with pytest.raises(TransferError):
            await get(cache, URL)


async def test_errors_come_in_place_and_heal(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        with await cache.open(URL) as found:
            await stored(cache)
            origin.broken = True
            pieces = found.pieces()
            assert isinstance(await anext(pieces), DiskPiece)
            with pytest.raises(TransferError):
                await anext(pieces)
            origin.broken = False
            assert await taken(found) == DATA


async def test_a_restart_finds_what_was_there(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        await get(cache, URL, 0, 3 * CHUNK)
    at_first = origin.bytes
    async with running(tmp_path, origin) as cache:
        assert cache.statistics().entries == 1
        assert cache.statistics().bytes == cache.fetching.policy.resident_bytes > 0
        with await cache.open(URL) as found:
            assert found.ready(0, CHUNK) == 0  # not compared yet
            assert await taken(found) == DATA
            await stored(cache)
            assert found.whole
        assert origin.bytes == len(DATA)
        assert at_first < len(DATA)
        assert origin.count("facts") == 0
        assert cache.statistics().verified >= 3


@pytest.mark.parametrize("how", ["flip", "cut", "gone", "zeros"])
async def test_bad_files_are_noticed(tmp_path: Path, how: str) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        await get(cache, URL)
    (path,) = data_files(tmp_path)
    damage(path, how)
    async with running(tmp_path, origin) as cache:
        assert await get(cache, URL) == DATA
        again = origin.bytes - len(DATA)
        assert again == {"flip": CHUNK, "cut": len(DATA) - 3 * CHUNK, "gone": len(DATA), "zeros": len(DATA)}[how]
        assert (cache.statistics().bad_chunks > 0) == (how != "gone")


async def test_without_a_folder(caplog: pytest.LogCaptureFixture) -> None:
    origin = origin_of(DATA)
    async with running(None, origin) as cache:
        got = await asyncio.gather(*(get(cache, URL, number) for number in range(4)))
        assert got == [DATA[number:] for number in range(4)]
        assert origin.most <= 1 + 4 * 2
        stats = cache.statistics()
        assert stats.passed_bytes == sum(len(one) for one in got)
        with await cache.open(URL) as found:
            assert (found.fd, found.whole, found.ready(0, 10)) == (-1, False, 0)
            assert await found.fetch() == 0


@pytest.mark.parametrize(
    "how", [{"ranged": False}, {"sized": False}, {"identity": ""}, {"ranged": False, "identity": ""}]
)
async def test_objects_that_are_read_in_order(tmp_path: Path, how: dict[str, object]) -> None:
    async with serving(tmp_path, origin_of(DATA, **how)) as (origin, cache):
        got = await asyncio.gather(*(get(cache, URL, number * 1000) for number in range(8)))
        assert got == [DATA[number * 1000 :] for number in range(8)]
        assert origin.count("stream") == 1
        assert await get(cache, URL, 5, 10) == DATA[5:10]
        assert origin.count("stream") == 1
        with await cache.open(URL) as found:
            assert found.whole
            assert found.size == len(DATA)


async def test_a_stream_that_breaks(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA, ranged=False)) as (origin, cache):
        with await cache.open(URL) as found:
            pieces = found.pieces()
            await anext(pieces)
            origin.broken = True
            with pytest.raises(TransferError):
                async for _ in pieces:
                    pass
        origin.broken = False
        assert await get(cache, URL) == DATA


async def test_a_stream_without_readers_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(content(CHUNK * 40), ranged=False)) as (origin, cache):
        with await cache.open(URL) as found:
            pieces = found.pieces()
            await anext(pieces)
            origin.gate.clear()
            await pieces.aclose()
        await cache.fetching.quiet()
        assert data_files(tmp_path) == []
        origin.gate.set()
        assert len(await get(cache, URL)) == CHUNK * 40


@pytest.mark.parametrize("how", [{}, {"ranged": False}, {"sized": False}])
async def test_an_object_of_no_bytes(tmp_path: Path, how: dict[str, object]) -> None:
    async with running(tmp_path, origin_of(b"", **how)) as cache:
        for _ in range(2):
            assert await get(cache, URL) == b""


@pytest.mark.parametrize("how", [{}, {"ranged": False}, {"sized": False}])
async def test_an_object_larger_than_the_cache(tmp_path: Path, how: dict[str, object]) -> None:
    data = content(60 * CHUNK, 3)
    async with running(tmp_path, origin_of(data, **how), 20 * CHUNK) as cache:
        for _ in range(2):
            assert await get(cache, URL) == data
            assert disk_bytes(tmp_path) <= 21 * CHUNK
        found = await asyncio.gather(*(get(cache, URL) for _ in range(4)))
        assert set(found) == {data}
        stats = cache.statistics()
        assert stats.bytes <= 20 * CHUNK


async def test_readers_share_what_does_not_stay(tmp_path: Path) -> None:
    origin = origin_of_many(40, 8)
    urls = list(origin.things)
    async with running(tmp_path, origin, 80 * CHUNK) as cache:  # a quarter of them
        for _ in range(2):
            for url in urls:
                got = await asyncio.gather(*(get(cache, url) for _ in range(4)))
                assert set(got) == {origin.things[url].data}
        once = 40 * 8 * CHUNK
        assert origin.bytes <= once * 1.95  # of the second epoch a part was there
        assert disk_bytes(tmp_path) <= 81 * CHUNK


async def test_epochs_over_twice_the_cache(tmp_path: Path) -> None:
    origin = origin_of_many(60, 4)
    urls = list(origin.things)
    rng, hits = random.Random(5), []
    async with running(tmp_path, origin, 120 * CHUNK) as cache:
        for _ in range(4):
            rng.shuffle(urls)
            before = origin.bytes
            for url in urls:
                assert await get(cache, url) == origin.things[url].data
            hits.append(1 - (origin.bytes - before) / (240 * CHUNK))
            assert cache.statistics().bytes <= 120 * CHUNK
    assert sum(hits[1:]) / 3 >= 0.45, hits


async def test_fetch_brings_a_range_onto_the_disk(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        with await cache.open(URL, start=None) as found:
            assert origin.bytes == 0
            assert await found.fetch(CHUNK, 3 * CHUNK + 1, Urgency.PLAN) == 2 * CHUNK + 1
            assert sorted(origin.parts_of(URL)) == [CHUNK, 2 * CHUNK, 3 * CHUNK]
            assert await found.fetch() == len(DATA)
            assert found.whole
            assert await taken(found) == DATA
        assert origin.bytes == len(DATA)
        assert cache.statistics().hits == 1


async def test_a_quota(tmp_path: Path) -> None:
    origin = origin_of_many(20, 4)
    async with running(tmp_path, origin, 100 * CHUNK, quotas={"small": 0.25}) as cache:
        for number in range(20):
            await get(cache, f"s3://bucket/{number}", client=Client("small"))
        assert cache.statistics().bytes <= 30 * CHUNK
        assert cache.statistics().entries == 6
        for number in range(10, 20):
            await get(cache, f"s3://bucket/{number}", client=Client("other"))
        assert cache.statistics().bytes > 40 * CHUNK


async def test_a_key_that_is_not_the_url(tmp_path: Path) -> None:
    origin = Bytes()
    for signature in "ab":
        origin.put(f"https://host/a?sig={signature}", DATA)
    async with running(tmp_path, origin) as cache:
        for signature in "ab":
            assert await get(cache, f"https://host/a?sig={signature}", key="https://host/a") == DATA
        assert origin.bytes == len(DATA)
        assert cache.peek("https://host/a?sig=b", key="https://host/a") is not None


async def test_a_smaller_cache_is_kept(tmp_path: Path) -> None:
    origin = origin_of_many(20, 4)
    async with running(tmp_path, origin, 100 * CHUNK) as cache:
        for number in range(20):
            await get(cache, f"s3://bucket/{number}")
    async with running(tmp_path, origin, 40 * CHUNK) as cache:
        await until(lambda: cache.statistics().bytes <= 40 * CHUNK)
        await cache.fetching.quiet()
        assert disk_bytes(tmp_path) <= 40 * CHUNK
        assert await get(cache, "s3://bucket/19") == origin.things["s3://bucket/19"].data
        assert origin.bytes == 20 * 4 * CHUNK  # the ones used last have stayed


async def test_an_open_just_when_a_lookup_ends_with_a_closed_entry(tmp_path: Path) -> None:
    """The entry is removed in the very turn of the loop in which its lookup ends: no caller waits for ever."""

    origin = origin_of(DATA)
    found = asyncio.Event()

    async def facts(url: str) -> Facts:
        await found.wait()
        return origin.things[url].facts

    async def late() -> CachedObject:
        await found.wait()  # goes on behind the one that asks the origin, before that one's waiters
        assert cache.remove(URL)
        return await cache.open(URL, start=None)

    async with running(tmp_path, origin, freshness_s=0) as cache:
        origin.facts = facts  # type: ignore[method-assign]
        first = asyncio.create_task(cache.open(URL, start=None))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(late())
        await asyncio.sleep(0.05)
        found.set()
        for task in (first, second):
            with await asyncio.wait_for(task, 10) as opened:
                assert opened.size == len(DATA)


@pytest.mark.parametrize("start", [0, None])
async def test_a_lookup_without_waiters_is_cancelled(tmp_path: Path, start: int | None) -> None:
    origin, asked, left = origin_of(DATA), asyncio.Event(), asyncio.Event()

    async def never(*given: object) -> Facts:
        asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            left.set()

    @contextlib.asynccontextmanager
    async def part(*given: object) -> AsyncIterator[object]:
        yield await never()

    async with running(tmp_path, origin) as cache:
        real = origin.facts, origin.part
        origin.facts, origin.part = never, part  # type: ignore[method-assign, assignment]
        two = [asyncio.create_task(cache.open(URL, start=start)) for _ in range(2)]
        await asked.wait()
        two[0].cancel()
        await asyncio.sleep(0.01)
        assert not left.is_set()  # another one waits still
        two[1].cancel()
        await asyncio.wait_for(left.wait(), 10)
        origin.facts, origin.part = real  # type: ignore[method-assign]
        assert await get(cache, URL) == DATA


async def test_files_hold_no_secret_and_are_private(tmp_path: Path) -> None:
    origin, url = Bytes(), "https://host/a.tar?X-Amz-Signature=TOPSECRET"
    origin.put(url, DATA)
    async with running(tmp_path, origin) as cache:
        assert await get(cache, url) == DATA
    async with running(tmp_path, origin) as cache:
        fetched = origin.bytes
        assert await get(cache, url) == DATA
        assert origin.bytes == fetched  # it is found again
        await cache.flush()
        indexes = list(tmp_path.glob("index*"))  # noqa: ASYNC240 (a test)
        assert indexes
        assert all(b"TOPSECRET" not in path.read_bytes() for path in indexes)
        assert {stat.S_IMODE(path.stat().st_mode) for path in indexes} == {0o600}


async def test_it_ends_though_another_program_keeps_the_index_locked(tmp_path: Path) -> None:
    async with running(tmp_path, origin_of(DATA)) as cache:
        other = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        assert await get(cache, URL) == DATA
    other.close()


async def test_what_is_read_is_not_put_away(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of_many(20, 2, ""), most_idle=2) as (origin, cache):
        held = [await cache.open(str(number)) for number in range(5)]
        for number in [*range(20), *range(20)]:
            assert await get(cache, str(number)) == origin.things[str(number)].data
        for number, found in enumerate(held):
            assert await taken(found) == origin.things[str(number)].data
            assert found.whole
            found.release()
            found.release()
        assert len(cache.fetching.entries) <= 3
        assert origin.bytes == 20 * 2 * CHUNK


async def test_readers_of_a_removed_object_read_on(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of_many(1, 2, "")) as (origin, cache):
        found = await cache.open("0")
        pieces = found.pieces()
        await anext(pieces)
        assert cache.remove("0")
        assert not cache.remove("0")
        rest = [bytes(piece) async for piece in pieces if isinstance(piece, memoryview)]
        assert b"".join(rest) in (b"", origin.things["0"].data[CHUNK:])
        assert await get(cache, "0") == origin.things["0"].data  # another, while the old one is open
        found.release()
        await cache.fetching.quiet()
        assert len(data_files(tmp_path)) == 1


async def test_an_index_that_cannot_be_read_is_replaced_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, origin_of_many(3, 2, "")) as (origin, cache):
        await get(cache, "0")
        await cache.flush()
        database = sqlite3.connect(tmp_path / "index.sqlite")
        page = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'chunks'").fetchone()[0]
        size = database.execute("PRAGMA page_size").fetchone()[0]
        database.close()
    damaged = bytearray((tmp_path / "index.sqlite").read_bytes())
    damaged[(page - 1) * size : page * size] = b"\xee" * size
    (tmp_path / "index.sqlite").write_bytes(damaged)
    async with running(tmp_path, origin) as cache:
        for number in range(3):
            assert await get(cache, str(number)) == origin.things[str(number)].data
        assert "replaced at the next start" in caplog.text
    async with running(tmp_path, origin) as cache:
        await get(cache, "0")
        await cache.flush()
    async with running(tmp_path, origin) as cache:
        before = origin.bytes
        assert await get(cache, "0") == origin.things["0"].data
        assert origin.bytes == before


async def test_a_damaged_row_is_fetched_anew_and_leaves_no_file(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of_many(1, 2, "")) as (origin, cache):
        await get(cache, "0")
    database = sqlite3.connect(tmp_path / "index.sqlite")
    database.execute("UPDATE entries SET size = size - 5")
    database.commit()
    database.close()
    async with running(tmp_path, origin) as cache:
        assert await get(cache, "0") == origin.things["0"].data
        await cache.fetching.quiet()
        assert len(data_files(tmp_path)) == 1
        assert cache.statistics().bytes == 2 * CHUNK


async def test_what_was_given_is_hit_or_miss(tmp_path: Path) -> None:
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


async def test_prefetched_bytes_are_counted_once(tmp_path: Path) -> None:
    origin = Bytes()
    origin.put("a", content(4 * CHUNK + 10))
    async with running(tmp_path, origin) as cache:
        with await cache.open("a", start=0) as found:
            assert await found.fetch(0, None, Urgency.PLAN) == 4 * CHUNK + 10
        assert cache.statistics().ahead_bytes == 0  # not read yet
        await get(cache, "a", 0, CHUNK)
        assert cache.statistics().ahead_bytes == CHUNK
        for _ in range(2):
            await get(cache, "a", CHUNK, None)
        stats = cache.statistics()
        assert (stats.ahead_bytes, stats.miss_bytes) == (4 * CHUNK + 10, 0)
        assert stats.hit_bytes == stats.ahead_bytes + 3 * CHUNK + 10  # the second time it was there
        assert sum(ahead for *_, ahead in stats.by_tenant.values()) == stats.ahead_bytes


def test_what_is_warm_is_there(tmp_path: Path) -> None:
    origin, results = Bytes(), list[Warmed]()
    for number in range(3):
        origin.put(f"s3://b/{number}", content(CHUNK_BYTES + number, number))
    origin.put("s3://b/pipe", content(1000), ranged=False, sized=False)
    urls = [*origin.things, "s3://b/none"]
    asyncio.run(warm(tmp_path, 64 << 20, urls, origin, results.append, at_once=2))
    assert {one.url for one in results if one.whole} == set(origin.things)
    (missing,) = (one for one in results if one.error)
    assert "not there" in missing.error
    assert not missing.whole
    assert {row.key: row.size for row in upkeep.listed(tmp_path)} == {u: len(t.data) for u, t in origin.things.items()}
    fetched = origin.bytes
    asyncio.run(warm(tmp_path, 64 << 20, urls[:3], origin, results.append))
    assert origin.bytes == fetched


NAMES = ["gs://a/1", "s3://b/1", "s3://b/2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    async def main() -> None:
        origin = Bytes()
        for number, name in enumerate(NAMES):
            origin.put(name, content(4 * CHUNK + number, number))
        async with running(tmp_path, origin) as cache:
            for name in NAMES:
                await get(cache, name)

    run(main())
    return tmp_path


def test_listed(folder: Path) -> None:
    assert [row.key for row in upkeep.listed(folder)] == NAMES
    assert [row.key for row in upkeep.listed(folder, "s3://")] == NAMES[1:]


def test_removed(folder: Path) -> None:
    assert [row.key for row in upkeep.remove(folder, lambda key: key.endswith("/1"))] == NAMES[:2]
    assert [row.key for row in upkeep.listed(folder)] == NAMES[2:]
    assert len(data_files(folder)) == 1


def test_bad_chunks_are_dropped_and_fetched_again(folder: Path) -> None:
    damage(data_files(folder)[0], "flip")
    found = list(upkeep.verify(folder, chunk_bytes=CHUNK))
    assert [(one.key, one.good, one.bad) for one in found] == [(NAMES[0], 3, 1), (NAMES[1], 5, 0), (NAMES[2], 5, 0)]
    assert next(upkeep.listed(folder)).held == 3 * CHUNK
    assert all(one.bad == 0 for one in upkeep.verify(folder, chunk_bytes=CHUNK))

    async def again() -> None:
        origin = origin_of(content(4 * CHUNK, 0), NAMES[0])
        async with running(folder, origin) as cache:
            assert await get(cache, NAMES[0]) == content(4 * CHUNK, 0)
            assert origin.bytes == CHUNK
            assert cache.statistics().bad_chunks == 0

    run(again())


def test_a_damaged_row_is_a_bad_object(folder: Path) -> None:
    database = sqlite3.connect(folder / "index.sqlite")
    database.execute("UPDATE entries SET size = size - 5 WHERE key = ?", (NAMES[0],))
    database.commit()
    database.close()
    assert [one.bad for one in upkeep.verify(folder, chunk_bytes=CHUNK)] == [1, 0, 0]
    assert [row.key for row in upkeep.listed(folder)] == NAMES[1:]


def test_what_is_gone_is_forgotten(folder: Path) -> None:
    for path in data_files(folder):
        path.unlink()
    assert {(one.good, one.bad > 0) for one in upkeep.verify(folder, "s3://", chunk_bytes=CHUNK)} == {(0, True)}
    assert [row.key for row in upkeep.listed(folder)] == NAMES[:1]
