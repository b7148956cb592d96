"""Reading through the cache: one fetch of each chunk, read-ahead, streams, slow disks and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.cache.doubles import (
    CHUNK,
    URL,
    Bytes,
    Clock,
    content,
    get,
    origin_of,
    running,
    serving,
    stored,
    taken,
    threaded,
    until,
)
from wds_async.errors import ObjectChanged, ReaderClosed, TransferError
from wds_async.service.cache.disk import DataFile
from wds_async.service.cache.entries import ChunkFetch, ObjectReader
from wds_async.service.cache.fetching import AHEAD_CHUNKS, DiskPiece
from wds_async.service.cache.origin import Client, Urgency

DATA = content(20 * CHUNK)


class OneAtATime:
    """Slots, and the requests for them."""

    def __init__(self, most: int = 1) -> None:
        self.slots = asyncio.Semaphore(most)
        self.asked: list[tuple[str, Urgency]] = []

    @contextlib.asynccontextmanager
    async def slot(self, client: Client, urgency: Urgency, url: str = "") -> AsyncIterator[None]:
        self.asked.append((client, urgency))
        async with self.slots:
            yield


class HeldWrites:
    """Threads for a cache whose writes to the disk wait until ``gate`` is set, and then fail if ``broken``."""

    def __init__(self, broken: bool = False) -> None:
        self.gate = asyncio.Event()
        self.broken = broken

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        if getattr(function, "__func__", None) is DataFile.write:
            await self.gate.wait()
            if self.broken:
                raise OSError(errno.EIO, "it broke")
        return await threaded(function, *args)


async def test_a_turn_for_each_chunk_and_how_urgent(tmp_path: Path) -> None:
    scheduler = OneAtATime()
    async with running(tmp_path, origin_of(DATA), scheduler=scheduler) as cache:
        assert await get(cache, URL, CHUNK, 4 * CHUNK, client=Client("", "me")) == DATA[CHUNK : 4 * CHUNK]
    assert scheduler.asked[:2] == [(Client("", "me"), Urgency.DEMAND)] * 2  # its facts, and the chunk
    assert set(scheduler.asked[2:]) == {(Client("", "me"), Urgency.AHEAD)}
    assert len(scheduler.asked) == 4


async def test_a_fetch_that_has_not_begun_ends_with_its_last_reader(tmp_path: Path) -> None:
    origin, scheduler = origin_of(DATA), OneAtATime(2)
    async with running(tmp_path, origin, scheduler=scheduler) as cache:
        with await cache.open(URL) as found:
            await stored(cache)
            origin.gate.clear()
            pieces = found.pieces()
            await anext(pieces)
            await until(lambda: origin.under_way == 2)
            await pieces.aclose()
            origin.gate.set()
            await cache.fetching.quiet()
        assert origin.bytes == 3 * CHUNK  # the first, and the two under way, which are kept
        assert cache.statistics().bytes == 3 * CHUNK
        assert await get(cache, URL) == DATA
        assert origin.bytes == len(DATA)


async def test_a_running_fetch_without_readers_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wds_async.service.cache.fetching._UNWANTED_S", 0.05)

    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        with await cache.open(URL) as found:
            origin.gate.clear()  # it will never answer
            pieces = found.pieces()
            await anext(pieces)
            await until(lambda: origin.under_way > 5)
            await pieces.aclose()
            await until(lambda: origin.under_way == 0)
            origin.gate.set()
            assert await taken(found) == DATA


async def test_a_failed_fetch_fails_all_its_readers_and_is_repeated(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        objects = [await cache.open(URL) for _ in range(3)]
        origin.broken = True
        got = await asyncio.gather(*(taken(found) for found in objects), return_exceptions=True)
        assert [type(one) for one in got] == [TransferError] * 3
        origin.broken = False
        assert await taken(objects[0]) == DATA
        for found in objects:
            found.release()


async def test_a_short_answer_is_no_chunk(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        with await cache.open(URL) as found:
            origin.things[URL].data = DATA[: 5 * CHUNK + 3]  # of the same identity, as it says
            with pytest.raises(TransferError, match="3 bytes came of 8192 at byte 40960"):
                await taken(found)


async def test_closing_ends_readers_with_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        found = await cache.open(URL)
        origin.gate.clear()
        reading = asyncio.create_task(taken(found))
        await until(lambda: origin.under_way > 2)
    with pytest.raises(ReaderClosed):
        await reading
    found.release()


async def test_what_a_reader_has_in_hand_is_not_punched(tmp_path: Path) -> None:
    """It lies in the probation segment, others need that, and the reader takes its time."""

    origin = Bytes()
    for number in range(12):
        origin.put(str(number), content(30 * CHUNK, number))
    async with running(tmp_path, origin, 25 * CHUNK) as cache:
        for number in range(3):
            await get(cache, str(number))  # the room for what stays is taken
        with await cache.open("5") as found:
            await stored(cache)
            pieces = found.pieces()
            piece = await anext(pieces)
            assert isinstance(piece, DiskPiece)
            assert cache.statistics().probation_bytes
            for number in range(6, 12):
                assert await get(cache, str(number)) == origin.things[str(number)].data
            assert os.pread(piece.fd, piece.count, piece.offset) == origin.things["5"].data[: piece.count]
            await pieces.aclose()


async def test_nothing_is_written_where_blocks_are_just_given_back(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA)) as (origin, cache):
        await get(cache, URL, 0, 1)
        (entry,) = cache.fetching.entries.values()
        cache.fetching.drop_bad(entry, 0)
        entry.punching[0] = punching = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(get(cache, URL, 0, 1))
        await until(lambda: origin.bytes == 2 * CHUNK)
        await asyncio.sleep(0.02)  # it would be written now
        assert 0 not in entry.chunks
        del entry.punching[0]
        punching.set_result(None)
        assert await reading == DATA[:1]


async def test_memory_that_is_held_for_later_is_given_back_where_others_wait_for_it() -> None:
    origin = origin_of(DATA)
    async with running(None, origin) as cache:
        with await cache.open(URL) as found:
            pieces, got = found.pieces(), bytearray()
            first = await anext(pieces)
            await until(lambda: origin.under_way == 2)  # the chunk in hand, and the one ahead of it
            await asyncio.sleep(0.3)
            assert origin.under_way == 2
            origin.crowded = True
            await until(lambda: origin.under_way == 1)
            assert isinstance(first, memoryview)
            got += first
            async for piece in pieces:
                assert isinstance(piece, memoryview)
                assert origin.under_way == 1  # nothing ahead of what is read
                got += piece
        assert got == DATA


async def test_a_reader_that_joins_as_the_last_one_leaves_gets_right_bytes() -> None:
    origin = origin_of(DATA)
    async with running(None, origin) as cache:
        with await cache.open(URL) as one, await cache.open(URL) as two:
            left, joined = one.pieces(0, CHUNK), two.pieces(0, CHUNK)
            assert await anext(left) == DATA[:CHUNK]
            closing = asyncio.ensure_future(left.aclose())  # its fetch wakes in the turn behind the next one's
            joining = asyncio.ensure_future(anext(joined))
            piece = await joining
            await closing
            for _ in range(5):
                await asyncio.sleep(0)
            assert piece == DATA[:CHUNK]
            await joined.aclose()


async def test_no_reader_waits_for_the_disk(tmp_path: Path) -> None:
    origin, disk = origin_of(DATA), HeldWrites()
    async with running(tmp_path, origin, call=disk.call) as cache:
        with await cache.open(URL) as found:
            both = await asyncio.gather(taken(found), taken(found))
            assert both == [DATA] * 2
            assert not found.ready(0, 1)
            disk.gate.set()
            await stored(cache)
            assert found.whole
            assert await taken(found) == DATA
        await cache.fetching.quiet()
        assert origin.bytes == len(DATA)  # each chunk came once
        assert origin.under_way == 0
        assert cache.statistics().passed_bytes == 0


async def test_a_disk_that_breaks_behind_the_readers_harms_none(tmp_path: Path) -> None:
    origin, disk = origin_of(DATA), HeldWrites(broken=True)
    async with running(tmp_path, origin, call=disk.call) as cache:
        with await cache.open(URL) as found:
            assert await taken(found) == DATA
            disk.gate.set()
            await until(lambda: origin.under_way == 0)
            assert not found.ready(0, 1)
            assert await taken(found) == DATA
        stats = cache.statistics()
        assert (stats.bytes, stats.passed_bytes) == (0, 2 * len(DATA))


async def test_what_waits_for_a_slow_disk_gives_up_its_memory_where_others_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wds_async.service.cache.writeback._PATIENCE_S", 0.05)
    monkeypatch.setattr("wds_async.service.cache.writeback._LOOK_EVERY_S", 0.01)

    origin, disk = origin_of(DATA), HeldWrites()
    async with running(tmp_path, origin, call=disk.call, writers=2) as cache:
        with await cache.open(URL) as found:
            assert await taken(found) == DATA
            assert origin.under_way == 20  # there is memory enough, and the disk may be quicker soon
            origin.crowded = True
            await until(lambda: origin.under_way == 2)  # those that are being written
            assert await taken(found) == DATA
            await until(lambda: origin.under_way == 2)
            disk.gate.set()
            await until(lambda: origin.under_way == 0)
            assert cache.statistics().bytes == 2 * CHUNK
            assert found.ready(0, 2 * CHUNK) == 2 * CHUNK
            assert await taken(found) == DATA
    assert caplog.text.count("slower than what is read") == 1


async def test_a_disk_that_hangs_is_let_be_until_it_answers(tmp_path: Path) -> None:
    origin, disk, clock = origin_of(DATA), HeldWrites(), Clock()
    origin.put("s3://bucket/b.tar", DATA)
    async with running(tmp_path, origin, call=disk.call, clock=clock) as cache:
        assert await taken(await cache.open(URL)) == DATA
        assert cache.fetching.disk.usable
        clock.now += 6
        assert not cache.fetching.disk.usable
        with await cache.open("s3://bucket/b.tar") as found:
            assert await taken(found) == DATA
        disk.gate.set()
        await until(lambda: cache.fetching.disk.usable)
        assert await get(cache, "s3://bucket/b.tar") == DATA
        assert cache.statistics().bytes >= len(DATA)


LONG = content(40 * CHUNK + 5)


async def test_pieces_are_in_order_and_as_large_as_can_be(tmp_path: Path) -> None:
    async with running(tmp_path, origin_of(LONG), 4 << 20) as cache:
        await get(cache, URL)
        with await cache.open(URL) as found:
            pieces = [piece async for piece in found.pieces(3, 30 * CHUNK)]
            assert pieces == [DiskPiece(found.fd, 3, 30 * CHUNK - 3)]
            assert [piece async for piece in found.pieces(len(LONG))] == []
            assert [piece async for piece in found.pieces(9, 4)] == []


async def test_a_slow_reader_has_no_more_asked_for_than_its_window(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(LONG), 4 << 20) as (origin, cache):
        with await cache.open(URL) as found:
            pieces, read = found.pieces(), 0
            while read < 10 * CHUNK:
                await stored(cache)
                piece = await anext(pieces)
                assert isinstance(piece, DiskPiece)
                await cache.fetching.quiet()
                assert max(origin.parts_of(URL)) <= (read // CHUNK + AHEAD_CHUNKS) * CHUNK
                read += piece.count
            await pieces.aclose()


async def test_slow_readers_hold_little_memory(tmp_path: Path) -> None:
    """Of what finds no place on disk two chunks a reader are in memory, and they are given back as it goes on."""

    origin = origin_of(LONG)
    async with running(None, origin) as cache:
        objects = [await cache.open(URL) for _ in range(5)]
        readers = [found.pieces(number * 7 * CHUNK) for number, found in enumerate(objects)]
        for reader in readers:
            assert isinstance(await anext(reader), memoryview)
        await asyncio.sleep(0.02)  # whatever would be fetched more, would be on its way
        assert origin.under_way <= 5 * 2
        for reader, found in zip(readers, objects, strict=True):
            await reader.aclose()
            found.release()
        await until(lambda: origin.under_way == 0)


async def test_what_passes_in_memory_is_shared_while_it_is_there() -> None:
    origin = origin_of(LONG)
    async with running(None, origin) as cache:
        with await cache.open(URL) as one, await cache.open(URL) as other:
            origin.gate.clear()
            reading = [asyncio.create_task(taken(found, 0, 2 * CHUNK)) for found in (one, other)]
            await until(lambda: origin.under_way == 2)
            origin.gate.set()
            assert await asyncio.gather(*reading) == [LONG[: 2 * CHUNK]] * 2
            assert origin.bytes == 2 * CHUNK


async def test_a_reader_in_the_middle_of_what_was_fetched(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(LONG), 4 << 20) as (origin, cache):
        await get(cache, URL, 5 * CHUNK, 9 * CHUNK)
        assert await get(cache, URL, 4 * CHUNK + 1, 10 * CHUNK + 1) == LONG[4 * CHUNK + 1 : 10 * CHUNK + 1]
        assert sorted(origin.parts_of(URL)) == [number * CHUNK for number in range(4, 11)]


PLAIN = "https://host/a.tar"


STREAM = content(30 * CHUNK + 7)


async def test_followers_read_behind(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(STREAM, PLAIN, ranged=False)) as (origin, cache):
        first = await cache.open(PLAIN)
        pieces = first.pieces()
        await anext(pieces)
        later = asyncio.create_task(get(cache, PLAIN))
        rest = [piece async for piece in pieces]
        assert rest
        assert await later == STREAM
        first.release()
        assert origin.count("stream") == 1


async def test_larger_than_the_cache_with_a_slow_reader(tmp_path: Path) -> None:
    """The stream waits for who reads it: nothing is dropped before it was read, and nothing is fetched twice."""

    async with serving(tmp_path, origin_of(STREAM, PLAIN, ranged=False), 12 * CHUNK) as (origin, cache):
        with await cache.open(PLAIN) as found:
            got, pieces = 0, found.pieces()
            async for piece in pieces:
                await asyncio.sleep(0.001)
                got += piece.count if not isinstance(piece, memoryview) else len(piece)
                assert cache.statistics().bytes <= 12 * CHUNK
            assert got == len(STREAM)
        assert origin.bytes <= 2 * len(STREAM)


async def test_a_late_follower_of_what_has_passed_reads_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path, origin_of(STREAM, PLAIN, ranged=False), 12 * CHUNK) as cache:
        with await cache.open(PLAIN) as found, await cache.open(PLAIN) as late:
            pieces = found.pieces(25 * CHUNK)
            await anext(pieces)
            assert await taken(late) == STREAM
            await pieces.aclose()
        assert cache.statistics().passed_bytes > 0


async def test_without_an_identity_it_is_fresh_as_long_as_that(tmp_path: Path) -> None:
    origin, clock = origin_of(STREAM, PLAIN, ranged=False, identity=""), Clock()
    async with running(tmp_path, origin, clock=clock, freshness_s=60) as cache:
        for _ in range(2):
            await get(cache, PLAIN)
        assert origin.count("stream") == 1
        clock.now += 61
        assert await get(cache, PLAIN) == STREAM
        assert origin.count("stream") == 2


@pytest.mark.parametrize("ranged", [True, False])
async def test_another_object_than_was_opened(tmp_path: Path, ranged: bool) -> None:
    async with serving(tmp_path, origin_of(STREAM, PLAIN, ranged=ranged)) as (origin, cache):
        with await cache.open(PLAIN) as found:
            origin.put(PLAIN, STREAM[:CHUNK], identity="v2", ranged=ranged)
            with pytest.raises(ObjectChanged, match=r"v1.*v2"):
                await taken(found)
        assert await get(cache, PLAIN) == STREAM[:CHUNK]  # though it was fresh


async def test_one_of_two_readers_leaves(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(STREAM, PLAIN, ranged=False)) as (origin, cache):
        origin.gate.clear()
        tasks = [asyncio.create_task(get(cache, PLAIN)) for _ in range(2)]
        await until(lambda: origin.count("stream") == 1 and cache.statistics().readers == 2)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        origin.gate.set()
        assert await tasks[1] == STREAM
        assert origin.count("stream") == 1


async def test_after_a_restart_it_is_there(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(STREAM, PLAIN, ranged=False, sized=False)) as (origin, cache):
        await get(cache, PLAIN)
    async with running(tmp_path, origin) as cache:
        assert await get(cache, PLAIN, 5, 9 * CHUNK) == STREAM[5 : 9 * CHUNK]
        assert await get(cache, PLAIN) == STREAM
        assert origin.count("stream") == 1


async def test_a_more_urgent_reader_hastens_a_fetch() -> None:
    class Turn:
        asked: tuple[object, ...] = ()

        def hasten(self, urgency: Urgency, client: str = "") -> None:
            self.asked = (urgency, client)

    flight, turn = ChunkFetch(0, Urgency.PLAN, "plan"), Turn()
    flight.slot = turn
    flight.join(ObjectReader("later", Urgency.DEMAND), Urgency.PLAN)
    assert turn.asked == ()
    flight.join(ObjectReader("now", Urgency.DEMAND), Urgency.DEMAND)
    assert turn.asked == (Urgency.DEMAND, "now")
