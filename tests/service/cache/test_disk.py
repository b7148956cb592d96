"""Disks that are full, read-only, or broken."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import ServerMissing, required
from tests.service.cache.doubles import CHUNK, Bytes, Clock, content, get, run, running, threaded
from tests.service.cache.test_machine import full_disk
from wds_async.service.cache.disk import DataFolder
from wds_async.service.cache.entries import CacheStats
from wds_async.service.cache.writeback import Disk

URL = "s3://bucket/a.tar"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    with required():
        if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
            raise ServerMissing("only root can mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def origin_of(count: int, chunks: int = 10) -> Bytes:
    origin = Bytes()
    for number in range(count):
        origin.put(f"s3://bucket/{number}", content(chunks * CHUNK, number))
    return origin


def test_a_full_file_system(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The cache was told of more room than there is."""

    async def main() -> None:
        origin, clock = origin_of(30), Clock()
        async with running(small / "cache", origin, 100 << 20, clock=clock) as cache:
            for _ in range(2):
                for name, thing in origin.things.items():
                    assert await get(cache, name) == thing.data
                    clock.now += 20
            stats = cache.statistics()
            assert stats.disk_errors > 0
            assert stats.passed_bytes > 0
            assert stats.hit_bytes > 5 * 10 * CHUNK  # what had found a place is there
        assert "No space left" in caplog.text
        async with running(small / "cache", origin, 100 << 20) as cache:
            for name, thing in origin.things.items():
                assert await get(cache, name) == thing.data
            assert cache.statistics().bad_chunks == 0

    run(main())


def test_a_file_system_that_becomes_read_only(small: Path) -> None:
    async def main() -> None:
        origin = origin_of(3)
        async with running(small / "cache", origin) as cache:
            await get(cache, "s3://bucket/0")
            await cache.flush()
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(small)], check=True)
        async with running(small / "cache", origin) as cache:
            for name, thing in origin.things.items():
                assert await get(cache, name) == thing.data
            assert cache.statistics().disk_errors == 1
            assert cache.statistics().passed_bytes == 3 * 10 * CHUNK

    run(main())


def test_the_disk_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        origin, clock = origin_of(4), Clock()
        async with running(tmp_path, origin, clock=clock) as cache:
            with full_disk():
                got = await asyncio.gather(*(get(cache, "s3://bucket/0") for _ in range(3)))
                assert set(got) == {origin.things["s3://bucket/0"].data}
                await get(cache, "s3://bucket/1")
            errors = cache.statistics().disk_errors
            assert 0 < errors < 20  # not with every chunk: it is left alone for a while
            await get(cache, "s3://bucket/2")
            assert cache.statistics().bytes == 0
            clock.now += 11
            await get(cache, "s3://bucket/3")
            assert cache.statistics().bytes == 10 * CHUNK
        assert caplog.text.count("passed through") == 1

    run(main())


def test_it_says_so_once_and_waits(tmp_path: Path) -> None:
    clock, stats = Clock(), CacheStats()
    files = DataFolder(tmp_path)
    disk = Disk(files, threaded, stats, clock)
    assert disk.usable
    disk.failed(OSError("full"), "writing")
    assert not disk.usable
    clock.now += 10
    assert disk.usable
    assert stats.disk_errors == 1
    assert not Disk(None, threaded, stats, clock).usable
    files.close()
