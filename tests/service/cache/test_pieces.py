"""What readers are given."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.cache.doubles import CHUNK, Bytes, content, get, run, running, stored, taken, until
from wds_async.service.cache.fetching import AHEAD_CHUNKS, DiskPiece

URL = "s3://bucket/a.tar"
DATA = content(40 * CHUNK + 5)


def origin_of(**how: object) -> Bytes:
    origin = Bytes()
    origin.put(URL, DATA, **how)
    return origin


def test_pieces_are_in_order_and_as_large_as_can_be(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, origin_of(), 4 << 20) as cache:
            await get(cache, URL)
            with await cache.open(URL) as found:
                pieces = [piece async for piece in found.pieces(3, 30 * CHUNK)]
                assert pieces == [DiskPiece(found.fd, 3, 30 * CHUNK - 3)]
                assert [piece async for piece in found.pieces(len(DATA))] == []
                assert [piece async for piece in found.pieces(9, 4)] == []

    run(main())


def test_a_slow_reader_has_no_more_asked_for_than_its_window(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin, 4 << 20) as cache:
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

    run(main())


def test_slow_readers_hold_little_memory(tmp_path: Path) -> None:
    """Of what finds no place on disk two chunks a reader are in memory, and they are given back as it goes on."""

    async def main() -> None:
        origin = origin_of()
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

    run(main())


def test_what_passes_in_memory_is_shared_while_it_is_there() -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(None, origin) as cache:
            with await cache.open(URL) as one, await cache.open(URL) as other:
                origin.gate.clear()
                reading = [asyncio.create_task(taken(found, 0, 2 * CHUNK)) for found in (one, other)]
                await until(lambda: origin.under_way == 2)
                origin.gate.set()
                assert await asyncio.gather(*reading) == [DATA[: 2 * CHUNK]] * 2
                assert origin.bytes == 2 * CHUNK

    run(main())


def test_a_reader_in_the_middle_of_what_was_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin, 4 << 20) as cache:
            await get(cache, URL, 5 * CHUNK, 9 * CHUNK)
            assert await get(cache, URL, 4 * CHUNK + 1, 10 * CHUNK + 1) == DATA[4 * CHUNK + 1 : 10 * CHUNK + 1]
            assert sorted(origin.parts_of(URL)) == [number * CHUNK for number in range(4, 11)]

    run(main())
