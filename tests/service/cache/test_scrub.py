"""Disks that lose what was written, while the cache is in use: it is found, dropped, counted and fetched again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.service.cache.doubles import CHUNK, Bytes, Clock, content, get, run, running, until
from wds_async.service.cache.disk import stored_crc
from wds_async.service.cache.open_entries import Verified

DATA = content(5 * CHUNK + 123)
URLS = [f"s3://bucket/{number}.tar" for number in range(4)]


def origin_of() -> Bytes:
    origin = Bytes()
    for url in URLS:
        origin.put(url, DATA)
    return origin


def files(folder: Path) -> list[Path]:
    """In the order in which their objects came."""
    return sorted(
        (path for path in (folder / "data").rglob("*") if path.is_file()), key=lambda path: int(path.name, 16)
    )


def spoil(path: Path, how: str) -> None:
    if how == "flipped":
        with path.open("r+b") as file:
            file.seek(2 * CHUNK + 7)
            (byte,) = file.read(1)
            file.seek(2 * CHUNK + 7)
            file.write(bytes([byte ^ 1]))
    elif how == "truncated":
        os.truncate(path, 3 * CHUNK + 5)
    else:
        path.unlink()


BAD = {"flipped": 1, "truncated": 3, "gone": 6}


@pytest.mark.parametrize("how", list(BAD))
@pytest.mark.parametrize("open_files", [256, 1], ids=["in memory", "idle"])
def test_what_the_disk_has_lost_is_found_and_fetched_again(tmp_path: Path, how: str, open_files: int) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin, most_idle=open_files) as cache:
            for url in URLS:
                assert await get(cache, url) == DATA
            await cache.fetching.quiet()
            await cache.flush()
            assert [found async for found in cache.verify()] == [Verified(url, 6, 0) for url in URLS]
            spoil(files(tmp_path)[0], how)
            found = [one async for one in cache.verify()]
            assert [one.bad for one in found] == [BAD[how], 0, 0, 0]
            assert [one.good for one in found[1:]] == [6, 6, 6]
            before = origin.bytes
            assert await get(cache, URLS[0]) == DATA
            assert origin.bytes > before
            await cache.fetching.quiet()
            assert sum([one.bad async for one in cache.verify()]) == 0
            stats = cache.statistics()
            assert stats.bytes == 4 * (5 * CHUNK + 4096)
            assert stats.bad_chunks == (0 if how == "gone" else BAD[how])

    run(main())


def test_in_the_background_it_finds_what_no_reader_has_met(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            for url in URLS:
                await get(cache, url)
        spoil(files(tmp_path)[1], "flipped")
        async with running(tmp_path, origin, scrub_bytes_per_s=50_000_000) as cache:
            await until(lambda: cache.statistics().scrubbed_bytes >= 4 * len(DATA))
            assert cache.statistics().bad_chunks == 1
            assert await get(cache, URLS[1]) == DATA

    run(main())


def test_it_reads_no_faster_than_it_may(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, origin_of()) as cache:
            await get(cache, URLS[0])
        async with running(tmp_path, origin_of(), scrub_bytes_per_s=1) as cache:
            await until(lambda: cache.statistics().scrubbed_bytes > 0)
            assert await get(cache, URLS[0]) == DATA
            assert cache.statistics().scrubbed_bytes == CHUNK  # the next one in more than two hours

    run(main())


def test_a_copy_that_is_distrusted_is_compared_again(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        async with running(tmp_path, origin) as cache:
            assert await get(cache, URLS[0]) == DATA
            await cache.fetching.quiet()
            spoil(files(tmp_path)[0], "truncated")
            with await cache.open(URLS[0]) as found:
                assert found.whole
                found.distrust()
                assert not found.whole
            before = origin.bytes
            assert await get(cache, URLS[0]) == DATA
            await cache.fetching.quiet()
            assert origin.bytes - before == len(DATA) - 3 * CHUNK
            assert (cache.statistics().distrusted, cache.statistics().bad_chunks) == (1, 3)
            with await cache.open(URLS[0]) as found:
                assert found.whole

    run(main())


def test_an_object_from_before_that_was_replaced_frees_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the policy does not know it yet: it learns of a thousand at once."""
    monkeypatch.setattr("wds_async.service.cache.cache._ROWS_AT_ONCE", 1)

    async def main() -> None:
        origin, clock = origin_of(), Clock()
        async with running(tmp_path, origin, clock=clock, wall=clock) as cache:
            for url in URLS:
                await get(cache, url)
        clock.now += 1_000_000
        for url in URLS:
            origin.put(url, DATA[:CHUNK], identity="v2")
        async with running(tmp_path, origin, clock=clock, wall=clock) as cache:
            for url in URLS:
                assert await get(cache, url) == DATA[:CHUNK]
            assert (cache.statistics().bytes, cache.statistics().entries) == (4 * CHUNK, 4)

    run(main())


def test_what_the_disk_itself_has(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    whole, first = stored_crc(path, 0, len(DATA)), stored_crc(path, 0, CHUNK)
    assert whole is not None
    assert first is not None
    assert stored_crc(path, 0, len(DATA) + 1) is None
    os.truncate(path, 2 * CHUNK - 1000)
    assert stored_crc(path, 0, CHUNK) == first
    assert stored_crc(path, CHUNK, CHUNK) is None
    with pytest.raises(FileNotFoundError):
        stored_crc(tmp_path / "none", 0, 1)
