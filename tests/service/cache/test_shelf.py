"""Objects in memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.service.cache.doubles import CHUNK, Bytes, content, get, run, running, taken


def origin_of(count: int) -> Bytes:
    origin = Bytes()
    for number in range(count):
        origin.put(str(number), content(2 * CHUNK, number))
    return origin


def test_what_is_read_is_not_put_away(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of(20)
        async with running(tmp_path, origin, most_idle=2) as cache:
            held = [await cache.open(str(number)) for number in range(5)]
            for number in range(20):
                await get(cache, str(number))
            for number, found in enumerate(held):
                assert await taken(found) == origin.things[str(number)].data
                assert found.whole
                found.release()
                found.release()
            assert len(cache.fetching.entries) <= 3
            assert origin.bytes == 20 * 2 * CHUNK

    run(main())


def test_who_reads_what_is_removed_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of(1)
        async with running(tmp_path, origin) as cache:
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
            assert len([path for path in (tmp_path / "data").rglob("*") if path.is_file()]) == 1

    run(main())


def test_an_index_that_cannot_be_read_is_replaced_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        origin = origin_of(3)
        async with running(tmp_path, origin) as cache:
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

    run(main())


def test_a_damaged_row_is_fetched_anew_and_leaves_no_file(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of(1)
        async with running(tmp_path, origin) as cache:
            await get(cache, "0")
        database = sqlite3.connect(tmp_path / "index.sqlite")
        database.execute("UPDATE entries SET size = size - 5")
        database.commit()
        database.close()
        async with running(tmp_path, origin) as cache:
            assert await get(cache, "0") == origin.things["0"].data
            await cache.fetching.quiet()
            assert len([path for path in (tmp_path / "data").rglob("*") if path.is_file()]) == 1
            assert cache.statistics().bytes == 2 * CHUNK

    run(main())
