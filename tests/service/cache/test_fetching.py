"""Chunks on their way."""

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
    Bytes,
    Clock,
    content,
    get,
    run,
    running,
    stored,
    taken,
    threaded,
    until,
)
from wds_async.errors import ReaderClosed, TransferError
from wds_async.service.cache.disk import DataFile
from wds_async.service.cache.fetching import DiskPiece
from wds_async.service.cache.origin import Client, Urgency

URL = "s3://bucket/a.tar"
DATA = content(20 * CHUNK)


class OneAtATime:
    """Turns that are given by hand, and say who asked."""

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


def origin_of(data: bytes = DATA) -> Bytes:
    origin = Bytes()
    origin.put(URL, data)
    return origin


def test_a_turn_for_each_chunk_and_how_urgent(tmp_path: Path) -> None:
    async def main() -> None:
        scheduler = OneAtATime()
        async with running(tmp_path, origin_of(), scheduler=scheduler) as cache:
            assert await get(cache, URL, CHUNK, 4 * CHUNK, client=Client("", "me")) == DATA[CHUNK : 4 * CHUNK]
        assert scheduler.asked[:2] == [(Client("", "me"), Urgency.DEMAND)] * 2  # its facts, and the chunk
        assert set(scheduler.asked[2:]) == {(Client("", "me"), Urgency.AHEAD)}
        assert len(scheduler.asked) == 4

    run(main())


def test_what_only_one_wanted_and_has_not_begun_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        origin, scheduler = origin_of(), OneAtATime(2)
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

    run(main())


def test_what_is_under_way_for_nobody_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wds_async.service.cache.fetching._UNWANTED_S", 0.05)

    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            with await cache.open(URL) as found:
                origin.gate.clear()  # it will never answer
                pieces = found.pieces()
                await anext(pieces)
                await until(lambda: origin.under_way > 5)
                await pieces.aclose()
                await until(lambda: origin.under_way == 0)
                origin.gate.set()
                assert await taken(found) == DATA

    run(main())


def test_a_failed_fetch_is_told_to_all_and_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            objects = [await cache.open(URL) for _ in range(3)]
            origin.broken = True
            got = await asyncio.gather(*(taken(found) for found in objects), return_exceptions=True)
            assert [type(one) for one in got] == [TransferError] * 3
            origin.broken = False
            assert await taken(objects[0]) == DATA
            for found in objects:
                found.release()

    run(main())


def test_a_short_answer_is_no_chunk(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            with await cache.open(URL) as found:
                origin.things[URL].data = DATA[: 5 * CHUNK + 3]  # of the same identity, as it says
                with pytest.raises(TransferError, match="3 bytes came of 8192 at byte 40960"):
                    await taken(found)

    run(main())


def test_closing_ends_readers_with_words(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            found = await cache.open(URL)
            origin.gate.clear()
            reading = asyncio.create_task(taken(found))
            await until(lambda: origin.under_way > 2)
        with pytest.raises(ReaderClosed):
            await reading
        found.release()

    run(main())


def test_what_a_reader_has_in_hand_is_not_punched(tmp_path: Path) -> None:
    """It lies in the probation segment, others need that, and the reader takes its time."""

    async def main() -> None:
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

    run(main())


def test_nothing_is_written_where_blocks_are_just_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
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

    run(main())


def test_memory_that_is_held_for_later_is_given_back_where_others_wait_for_it() -> None:
    async def main() -> None:
        origin = origin_of()
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

    run(main())


def test_who_joins_while_the_last_reader_leaves_gets_the_right_bytes() -> None:
    async def main() -> None:
        origin = origin_of()
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

    run(main())


def test_no_reader_waits_for_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        origin, disk = origin_of(), HeldWrites()
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

    run(main())


def test_a_disk_that_breaks_behind_the_readers_harms_none(tmp_path: Path) -> None:
    async def main() -> None:
        origin, disk = origin_of(), HeldWrites(broken=True)
        async with running(tmp_path, origin, call=disk.call) as cache:
            with await cache.open(URL) as found:
                assert await taken(found) == DATA
                disk.gate.set()
                await until(lambda: origin.under_way == 0)
                assert not found.ready(0, 1)
                assert await taken(found) == DATA
            stats = cache.statistics()
            assert (stats.bytes, stats.passed_bytes) == (0, 2 * len(DATA))

    run(main())


def test_what_waits_for_a_slow_disk_gives_up_its_memory_where_others_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wds_async.service.cache.writeback._PATIENCE_S", 0.05)
    monkeypatch.setattr("wds_async.service.cache.writeback._LOOK_EVERY_S", 0.01)

    async def main() -> None:
        origin, disk = origin_of(), HeldWrites()
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

    run(main())


def test_a_disk_that_hangs_is_let_be_until_it_answers(tmp_path: Path) -> None:
    async def main() -> None:
        origin, disk, clock = origin_of(), HeldWrites(), Clock()
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

    run(main())
