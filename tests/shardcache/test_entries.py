"""What one reader does with one shard: find, fill, follow, or leave it alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.shardcache.processes import leftovers
from wds_async.shardcache.cache import DiskCache, ShardEntry
from wds_async.shardcache.partial import PartialReader
from wds_async.storage.base import CopiedFile

URL = "s3://bucket/a/x.tar"


def entry(folder: Path, **options: object) -> ShardEntry:
    cache = DiskCache(folder, **options)  # type: ignore[arg-type]
    return ShardEntry(cache, URL, cache.name(URL))


def filled(folder: Path, content: bytes = b"hello") -> None:
    one = entry(folder)
    assert one.begin() is None
    one.write(memoryview(content))
    one.over(whole=True)


def test_fill_then_find(tmp_path: Path) -> None:
    one = entry(tmp_path)
    target = str(tmp_path / "s3@bucket/a/x.tar")
    assert (one.role, one.hit, one.local_path) == ("new", False, target)
    assert one.begin() is None
    assert (one.role, one.hit, one.local_path) == ("filling", False, target)
    one.write(memoryview(b"hel"))
    one.write(memoryview(b"lo"))
    one.over(whole=True)
    two = entry(tmp_path)
    found = two.begin()
    assert isinstance(found, CopiedFile)
    assert (found.path, found.size, two.role, two.hit, two.local_path) == (target, 5, "found", True, target)
    assert Path(target).read_bytes() == b"hello"
    two.write(memoryview(b"is not written"))
    two.over(whole=True)
    assert Path(target).read_bytes() == b"hello"


def test_follow_then_leave(tmp_path: Path) -> None:
    one, two = entry(tmp_path), entry(tmp_path)
    one.begin()
    assert isinstance(two.begin(), PartialReader)
    assert (two.role, two.hit) == ("following", False)
    assert two.begin() is None  # it stood still: the store, this time
    assert two.local_path is None
    one.over(whole=True)


def test_patience(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    one, two, three = (ShardEntry(cache, URL, cache.name(URL)) for _ in range(3))
    one.begin()
    two.want()
    three.want()
    second = two.begin()
    assert isinstance(second, PartialReader)
    assert (second.awaited, second.patience_s) == (True, 3.0)
    second.patience_lost = True
    two.begin()
    third = three.begin()
    assert isinstance(third, PartialReader)
    assert third.patience_s == 0.1
    one.over()


def test_wanted_after_it_began(tmp_path: Path) -> None:
    one, two = entry(tmp_path), entry(tmp_path)
    one.begin()
    following = two.begin()
    assert isinstance(following, PartialReader)
    assert not following.awaited
    two.want()
    assert following.awaited
    one.over()


def test_follow_then_find(tmp_path: Path) -> None:
    one, two = entry(tmp_path), entry(tmp_path)
    one.begin()
    assert isinstance(two.begin(), PartialReader)
    one.write(memoryview(b"hello"))
    one.over(whole=True)
    assert isinstance(two.begin(), CopiedFile)


def test_a_lost_copy(tmp_path: Path) -> None:
    filled(tmp_path)
    one = entry(tmp_path)
    assert isinstance(one.begin(), CopiedFile)
    one.lose()
    assert one.begin() is None
    assert (one.hit, one.local_path) == (False, None)
    one.over(whole=True)


def test_over_before_it_began(tmp_path: Path) -> None:
    one = entry(tmp_path)
    one.over()
    assert one.begin() is None
    assert leftovers(tmp_path) == []


def test_over_while_it_begins(tmp_path: Path) -> None:
    """Whichever comes first, nothing is left."""
    for _ in range(50):
        one = entry(tmp_path)
        thread = threading.Thread(target=one.begin)
        thread.start()
        one.over()
        thread.join()
        assert leftovers(tmp_path) == []


def test_left_in_the_middle(tmp_path: Path) -> None:
    one = entry(tmp_path)
    one.begin()
    one.write(memoryview(b"half"))
    one.over()
    one.over(whole=True)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "s3@bucket/a/x.tar").exists()


def test_larger_than_the_cache(tmp_path: Path) -> None:
    one = entry(tmp_path, limit_bytes=8)
    one.begin()
    one.write(memoryview(b"12345678"))
    assert one.role == "filling"
    one.write(memoryview(b"9"))
    assert one.local_path is None
    assert leftovers(tmp_path) == []
    one.over(whole=True)
    assert not (tmp_path / "s3@bucket/a/x.tar").exists()


def test_rejected(tmp_path: Path) -> None:
    path = tmp_path / "s3@bucket/a/x.tar"
    filled(tmp_path)
    one = entry(tmp_path)
    one.begin()
    one.reject()
    assert not path.exists()
    two = entry(tmp_path)
    two.begin()
    two.write(memoryview(b"half"))
    two.reject()
    assert not path.exists()
    assert leftovers(tmp_path) == []


def test_a_copy_of_the_user_is_rejected_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "bucket/a/x.tar"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x1f\x8b\x08 looks like gzip")
    cache = DiskCache(tmp_path)
    one = ShardEntry(cache, URL, cache.name(URL))
    assert isinstance(one.begin(), CopiedFile)
    one.reject()
    assert path.exists()
    assert cache.find(URL) is None


def test_an_empty_file_is_what_a_crash_left(tmp_path: Path) -> None:
    filled(tmp_path, b"")
    one = entry(tmp_path)
    assert one.begin() is None
    assert one.role == "filling"
    one.over()


class _Full(DiskCache):
    """A cache that another process keeps small: what is found there is gone a moment later."""

    def find(self, url: str, name: str | None = None) -> Path | None:
        path = super().find(url, name)
        if path is not None:
            path.unlink()
        return path


def test_removed_as_it_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    cache = _Full(tmp_path)
    one = ShardEntry(cache, URL, cache.name(URL))
    assert one.begin() is None
    assert (one.role, caplog.text) == ("filling", "")
    one.over()
