"""The folder of the cache: its files and lock, disks that are full, read-only or shared, and the scrub."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.servers.process import ServerMissing, required
from tests.service.cache.doubles import (
    CHUNK,
    Clock,
    content,
    damage,
    data_files,
    disk_bytes,
    full_disk,
    get,
    origin_of,
    origin_of_many,
    running,
    serving,
    until,
)
from tests.service.cache.test_index import row
from wds_async.errors import ConfigError
from wds_async.service.cache.disk import (
    INDEX,
    DataFile,
    DataFolder,
    crc_of,
    open_folder,
    open_index,
    stored_crc,
    take_out_trash,
)
from wds_async.service.cache.index import IndexBatch
from wds_async.service.cache.open_entries import Verified

CONTENT = content(300_000)


def test_write_anywhere_and_compare(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "b", create=True)
    assert file.write(1 << 20, memoryview(CONTENT)) == crc32c(CONTENT)
    assert file.crc(1 << 20, len(CONTENT)) == crc32c(CONTENT)
    assert file.crc(1 << 20, len(CONTENT) + 1) is None
    assert crc_of(file.fd, 0, 0) == 0
    assert os.stat(tmp_path / "b").st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "b").st_blocks * 512 < 1 << 20  # sparse
    file.close()
    file.close()


def test_punching_gives_blocks_back(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "a", create=True)
    file.write(0, memoryview(bytes(10 * 8192)))
    assert file.punch(8192, 4 * 8192)
    assert os.fstat(file.fd).st_blocks * 512 == 6 * 8192
    file.trim([(0, 8192), (9 * 8192, 10 * 8192)])
    assert os.fstat(file.fd).st_blocks * 512 == 2 * 8192
    file.trim([(0, 8192), (9 * 8192, 10 * 8192)])
    assert os.fstat(file.fd).st_size == 10 * 8192
    file.close()


def test_no_hole_under_a_reader_that_was_handed_the_file(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "a", create=True)
    file.write(0, memoryview(CONTENT))
    handed = os.open(tmp_path / "a", os.O_RDONLY)
    fcntl.flock(handed, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert not file.punch(0, 8192)
    file.trim([])
    assert os.pread(handed, len(CONTENT), 0) == CONTENT
    os.close(handed)
    assert file.punch(0, 8192)
    with (tmp_path / "a").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for no longer than it takes
    file.close()


def test_a_hole_writes_to_no_page_that_is_in_a_socket(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "a", create=True)
    file.write(0, memoryview(CONTENT[:10_001]))
    ours, theirs = socket.socketpair()
    assert os.sendfile(ours.fileno(), file.fd, 0, 10_001) == 10_001
    assert file.punch(0, 10_001)
    got = b""
    while len(got) < 10_001:
        got += theirs.recv(1 << 16)
    assert got == CONTENT[:10_001]
    for one in (ours, theirs, file):
        one.close()


def test_a_new_file_is_never_anothers(tmp_path: Path) -> None:
    """Where the folder was replaced, two processes may give the same number: none writes into what the other serves."""
    files = DataFolder(tmp_path)
    first = files.create(7)
    first.write(0, memoryview(CONTENT))
    second = files.create(7)
    second.write(0, memoryview(b"other"))
    assert first.crc(0, len(CONTENT)) == crc32c(CONTENT)
    assert (tmp_path / files.path(7)).read_bytes() == b"other"
    files.close()
    first.close()
    second.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    files = DataFolder(tmp_path)
    link = tmp_path / files.path(7)
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        files.open(7)
    made = files.create(7)
    made.write(0, memoryview(b"mine"))
    made.close()
    assert victim.read_bytes() == b"precious"
    assert not link.is_symlink()
    files.close()


def test_a_folder_that_was_replaced_is_left_alone(tmp_path: Path) -> None:
    """Another disk, or another service, may be where the path leads now."""
    cache, moved = tmp_path / "cache", tmp_path / "moved"
    cache.mkdir()
    files = DataFolder(cache)
    files.create(7).close()
    cache.rename(moved)
    (cache / "data" / "07").mkdir(parents=True)
    (cache / files.path(7)).write_bytes(b"another's")
    files.create(8).close()
    files.touch("note")
    assert files.stored_crc(7, 0, 1) is None
    files.remove(7)
    assert files.sweep(0) == 1
    files.close()
    files.close()
    assert (cache / files.path(7)).read_bytes() == b"another's"
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["7"]
    assert [path.name for path in moved.rglob("*") if path.is_file()] == ["note"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    opened = open_folder(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another process works on this cache"):
        open_folder(tmp_path / "new" / "cache")
    opened.close()
    opened.close()
    open_folder(tmp_path / "new" / "cache").close()


def test_what_a_killed_process_left_is_tidied(tmp_path: Path) -> None:
    opened = open_folder(tmp_path)
    files = opened.files
    opened.index.write(IndexBatch({5: row(5), 6: row(6, held=0), 9: row(9)}), 10, {}, sweep_from=7)
    for number in (5, 6, 7, 9, 11):
        files.create(number).close()
    opened.close()
    opened = open_folder(tmp_path)
    assert {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()} == {"5", "9"}
    assert opened.index.totals().entries == 2
    opened.close()


@pytest.mark.parametrize("damage", ["garbage", "deleted", "marked", "cut", "stranger", "pages"])
def test_an_index_that_is_none(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_folder(tmp_path)
    opened.index.write(IndexBatch({number: row(number) for number in range(1, 500)}), 500, {})
    opened.files.create(1).close()
    if damage == "marked":
        opened.mark_broken()
    opened.close()
    index = tmp_path / INDEX
    if damage == "garbage":
        index.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    elif damage == "deleted":
        index.unlink()
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:5000])
    elif damage == "pages":  # its head is good, and says that all is well
        index.write_bytes(index.read_bytes()[:4096] + b"\xa5" * (index.stat().st_size - 4096))
    elif damage == "stranger":
        database = sqlite3.connect(index)
        database.execute("DROP TABLE entries")
        database.close()
    for _ in range(2):
        again = open_folder(tmp_path)
        assert again.totals.entries == 0
        again.close()
    assert not (tmp_path / "data").exists()
    assert (damage == "deleted") == ("was moved to" not in caplog.text)
    assert (tmp_path / f"{INDEX}.bad").exists() == (damage != "deleted")
    take_out_trash(tmp_path)
    assert not list(tmp_path.glob("trash-*"))


def test_looking_needs_a_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cache"):
        open_index(tmp_path)
    assert list(tmp_path.iterdir()) == []


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


async def test_a_full_file_system(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The cache has a larger limit than the disk has room."""

    origin, clock = origin_of_many(30, 10), Clock()
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


async def test_a_file_system_that_becomes_read_only(small: Path) -> None:
    origin = origin_of_many(3, 10)
    async with running(small / "cache", origin) as cache:
        await get(cache, "s3://bucket/0")
        await cache.flush()
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(small)], check=True)
    async with running(small / "cache", origin) as cache:
        for name, thing in origin.things.items():
            assert await get(cache, name) == thing.data
        assert cache.statistics().disk_errors == 1
        assert cache.statistics().passed_bytes == 3 * 10 * CHUNK


async def test_the_disk_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    origin, clock = origin_of_many(4, 10), Clock()
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


SHARD = content(4 * CHUNK)


SHARDS = [f"s3://bucket/{number}.tar" for number in range(12)]


class FileSystem:
    """One of ``total`` bytes, in which ``others`` lie beside the cache."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total, self.others = folder, total, 0

    def free(self, folder: Path) -> int:
        assert folder == self.folder
        return self.total - self.others - disk_bytes(folder)


async def test_it_gives_way_to_whatever_uses_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wds_async.service.cache.cache._SPACE_EVERY_S", 0.01)
    caplog.set_level(logging.INFO, "wds_async")
    file_system = FileSystem(tmp_path, 64 * CHUNK)

    origin = origin_of(SHARD, *SHARDS)
    how = {"keep_free_bytes": 20 * CHUNK, "free": file_system.free}
    async with running(tmp_path, origin, 1 << 20, **how) as cache:
        for url in SHARDS[:8]:
            assert await get(cache, url) == SHARD
        assert cache.statistics().bytes == 32 * CHUNK
        file_system.others = 28 * CHUNK  # 4 are left: 16 too few
        await until(lambda: file_system.free(tmp_path) >= 20 * CHUNK)
        assert "are to be kept free: too little" in caplog.text
        held = [url for url in SHARDS[:8] if (found := cache.peek(url)) is not None and not found.release()]
        assert 1 <= len(held) <= 4
        assert held == SHARDS[8 - len(held) : 8]  # those that were used last
        # More does not come onto the disk than there is room for.
        await until(lambda: cache.statistics().free_bytes >= 20 * CHUNK)
        for url in SHARDS:
            assert await get(cache, url) == SHARD
            assert file_system.free(tmp_path) >= 15 * CHUNK  # what one object displaces is removed a moment later
            await until(lambda: file_system.free(tmp_path) >= 20 * CHUNK)
        file_system.others = 0
        await until(lambda: cache.statistics().free_bytes > 40 * CHUNK)
        assert "enough again" in caplog.text
        for url in SHARDS:
            await get(cache, url)
        await cache.fetching.quiet()
        assert cache.statistics().bytes > 30 * CHUNK
        await until(lambda: file_system.free(tmp_path) >= 20 * CHUNK)


async def test_a_disk_that_is_full_at_the_start_is_written_to_by_others_alone(tmp_path: Path) -> None:
    origin = origin_of(SHARD, *SHARDS)
    how = {"keep_free_bytes": 20 * CHUNK, "free": lambda folder: 19 * CHUNK}
    async with running(tmp_path, origin, 1 << 20, **how) as cache:
        for _ in range(2):
            assert await get(cache, SHARDS[0]) == SHARD
        assert origin.bytes == 2 * len(SHARD)
        assert disk_bytes(tmp_path) == 0
        assert cache.statistics().passed_bytes == 2 * len(SHARD)


async def test_unknown_free_space_harms_nothing(tmp_path: Path) -> None:
    def free(folder: Path) -> int:
        raise OSError("gone")

    async with running(tmp_path, origin_of(SHARD, *SHARDS), 1 << 20, keep_free_bytes=CHUNK, free=free) as cache:
        assert await get(cache, SHARDS[0]) == SHARD
        assert disk_bytes(tmp_path) == len(SHARD)


DATA = content(5 * CHUNK + 123)


URLS = [f"s3://bucket/{number}.tar" for number in range(4)]


BAD = {"flip": 1, "cut": 3, "gone": 6}


@pytest.mark.parametrize("how", list(BAD))
@pytest.mark.parametrize("open_files", [256, 1], ids=["in memory", "idle"])
async def test_what_the_disk_has_lost_is_found_and_fetched_again(tmp_path: Path, how: str, open_files: int) -> None:
    async with serving(tmp_path, origin_of(DATA, *URLS), most_idle=open_files) as (origin, cache):
        for url in URLS:
            assert await get(cache, url) == DATA
        await cache.fetching.quiet()
        await cache.flush()
        assert [found async for found in cache.verify()] == [Verified(url, 6, 0) for url in URLS]
        damage(data_files(tmp_path)[0], how)
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


async def test_in_the_background_it_finds_what_no_reader_has_met(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA, *URLS)) as (origin, cache):
        for url in URLS:
            await get(cache, url)
    damage(data_files(tmp_path)[1], "flip")
    async with running(tmp_path, origin, scrub_bytes_per_s=50_000_000) as cache:
        await until(lambda: cache.statistics().scrubbed_bytes >= 4 * len(DATA))
        assert cache.statistics().bad_chunks == 1
        assert await get(cache, URLS[1]) == DATA


async def test_it_reads_no_faster_than_it_may(tmp_path: Path) -> None:
    async with running(tmp_path, origin_of(DATA, *URLS)) as cache:
        await get(cache, URLS[0])
    async with running(tmp_path, origin_of(DATA, *URLS), scrub_bytes_per_s=1) as cache:
        await until(lambda: cache.statistics().scrubbed_bytes > 0)
        assert await get(cache, URLS[0]) == DATA
        assert cache.statistics().scrubbed_bytes == CHUNK  # the next one in more than two hours


async def test_a_copy_that_is_distrusted_is_compared_again(tmp_path: Path) -> None:
    async with serving(tmp_path, origin_of(DATA, *URLS)) as (origin, cache):
        assert await get(cache, URLS[0]) == DATA
        await cache.fetching.quiet()
        damage(data_files(tmp_path)[0], "cut")
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


async def test_an_object_from_before_that_was_replaced_frees_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the policy does not know it yet: it learns of a thousand at once."""
    monkeypatch.setattr("wds_async.service.cache.cache._ROWS_AT_ONCE", 1)

    origin, clock = origin_of(DATA, *URLS), Clock()
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
