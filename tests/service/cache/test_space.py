"""A file system that others use too: so much of it stays free, and the cache makes room for that."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.service.cache.doubles import CHUNK, Bytes, content, get, run, running, until
from tests.service.cache.test_machine import disk_bytes

DATA = content(4 * CHUNK)
URLS = [f"s3://bucket/{number}.tar" for number in range(12)]


class FileSystem:
    """One of ``total`` bytes, in which ``others`` lie beside the cache."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total, self.others = folder, total, 0

    def free(self, folder: Path) -> int:
        assert folder == self.folder
        return self.total - self.others - disk_bytes(folder)


def origin_of() -> Bytes:
    origin = Bytes()
    for url in URLS:
        origin.put(url, DATA)
    return origin


def test_it_gives_way_to_whatever_uses_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wds_async.service.cache.cache._SPACE_EVERY_S", 0.01)
    caplog.set_level(logging.INFO, "wds_async")
    file_system = FileSystem(tmp_path, 64 * CHUNK)

    async def main() -> None:
        origin = origin_of()
        how = {"keep_free_bytes": 20 * CHUNK, "free": file_system.free}
        async with running(tmp_path, origin, 1 << 20, **how) as cache:
            for url in URLS[:8]:
                assert await get(cache, url) == DATA
            assert cache.statistics().bytes == 32 * CHUNK
            file_system.others = 28 * CHUNK  # 4 are left: 16 too few
            await until(lambda: file_system.free(tmp_path) >= 20 * CHUNK)
            assert "are to be kept free: too little" in caplog.text
            held = [url for url in URLS[:8] if (found := cache.peek(url)) is not None and not found.release()]
            assert 1 <= len(held) <= 4
            assert held == URLS[8 - len(held) : 8]  # those that were used last
            # More does not come onto the disk than there is room for.
            await until(lambda: cache.statistics().free_bytes >= 20 * CHUNK)
            for url in URLS:
                assert await get(cache, url) == DATA
                assert file_system.free(tmp_path) >= 15 * CHUNK  # what one object displaces is removed a moment later
                await until(lambda: file_system.free(tmp_path) >= 20 * CHUNK)
            file_system.others = 0
            await until(lambda: cache.statistics().free_bytes > 40 * CHUNK)
            assert "enough again" in caplog.text
            for url in URLS:
                await get(cache, url)
            await cache.fetching.quiet()
            assert cache.statistics().bytes > 30 * CHUNK
            await until(lambda: file_system.free(tmp_path) >= 20 * CHUNK)

    run(main())


def test_a_disk_that_is_full_at_the_start_is_written_to_by_others_alone(tmp_path: Path) -> None:
    async def main() -> None:
        origin = origin_of()
        how = {"keep_free_bytes": 20 * CHUNK, "free": lambda folder: 19 * CHUNK}
        async with running(tmp_path, origin, 1 << 20, **how) as cache:
            for _ in range(2):
                assert await get(cache, URLS[0]) == DATA
            assert origin.bytes == 2 * len(DATA)
            assert disk_bytes(tmp_path) == 0
            assert cache.statistics().passed_bytes == 2 * len(DATA)

    run(main())


def test_a_file_system_that_does_not_tell_is_no_reason_to_end(tmp_path: Path) -> None:
    def free(folder: Path) -> int:
        raise OSError("gone")

    async def main() -> None:
        async with running(tmp_path, origin_of(), 1 << 20, keep_free_bytes=CHUNK, free=free) as cache:
            assert await get(cache, URLS[0]) == DATA
            assert disk_bytes(tmp_path) == len(DATA)

    run(main())
