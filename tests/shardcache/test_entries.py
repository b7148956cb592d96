"""One shard of one reader: it finds a copy, fills the cache, follows another process, or leaves the cache alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.shardcache.processes import leftovers
from wds_async.shardcache.cache import DiskCache, ShardEntry
from wds_async.shardcache.partial import PartialReader
from wds_async.storage.growing import CopiedFile

URL = "s3://bucket/a/x.tar"
NAME = "s3@bucket/a/x.tar"


def entries(folder: Path, count: int, **options: object) -> list[ShardEntry]:
    cache = DiskCache(folder, **options)  # type: ignore[arg-type]
    return [ShardEntry(cache, URL, cache.name(URL)) for _ in range(count)]


def fill(folder: Path, content: bytes = b"hello") -> None:
    (entry,) = entries(folder, 1)
    assert entry.begin() is None
    entry.write(memoryview(content))
    entry.over(whole=True)


def test_fill_then_find(tmp_path: Path) -> None:
    one, two = entries(tmp_path, 2)
    target = str(tmp_path / NAME)
    assert (one.role, one.hit, one.local_path) == ("new", False, target)
    assert one.begin() is None
    assert (one.role, one.hit, one.local_path) == ("filling", False, target)
    for piece in (b"hel", b"lo"):
        one.write(memoryview(piece))
    one.over(whole=True)
    found = two.begin()
    assert isinstance(found, CopiedFile)
    assert (found.path, found.size, two.role, two.hit, two.local_path) == (target, 5, "found", True, target)
    two.write(memoryview(b"is not written"))
    two.over(whole=True)
    assert Path(target).read_bytes() == b"hello"
    two.lose()
    assert two.begin() is None
    assert (two.hit, two.local_path) == (False, None)


@pytest.mark.parametrize("whole", [True, False])
def test_follow_then_find_or_leave(tmp_path: Path, whole: bool) -> None:
    one, two = entries(tmp_path, 2)
    one.begin()
    following = two.begin()
    assert isinstance(following, PartialReader)
    assert (two.role, two.hit, following.awaited) == ("following", False, False)
    two.want()
    assert following.awaited
    one.write(memoryview(b"hello"))
    if whole:
        one.over(whole=True)
        assert isinstance(two.begin(), CopiedFile)
    else:
        assert two.begin() is None  # it stood still: the store, this time
        assert two.local_path is None
        one.over()


def test_patience_is_lost_for_a_while(tmp_path: Path) -> None:
    one, two, three = entries(tmp_path, 3)
    one.begin()
    patience = []
    for entry in (two, three):
        entry.want()
        following = entry.begin()
        assert isinstance(following, PartialReader)
        patience.append((following.awaited, following.patience_s))
        following.patience_lost = True
        entry.begin()
    assert patience == [(True, 3.0), (True, 0.1)]
    one.over()


@pytest.mark.parametrize("how", ["before", "middle", "rejected", "too large"])
def test_an_entry_that_ends_early_leaves_nothing(tmp_path: Path, how: str) -> None:
    (one,) = entries(tmp_path, 1, limit_bytes=8)
    if how == "before":
        one.over()
    assert one.begin() is None
    if how != "before":
        one.write(memoryview(b"12345678"))
        assert one.role == "filling"
    if how == "too large":
        one.write(memoryview(b"9"))
        assert one.local_path is None
    elif how == "rejected":
        one.reject()
    one.over()
    one.over(whole=True)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / NAME).exists()


def test_over_while_it_begins(tmp_path: Path) -> None:
    """Whichever comes first, nothing is left."""
    for _ in range(50):
        (one,) = entries(tmp_path, 1)
        thread = threading.Thread(target=one.begin)
        thread.start()
        one.over()
        thread.join()
        assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", [NAME, "bucket/a/x.tar"])
def test_a_rejected_copy_is_removed_or_if_it_is_the_users_not_used(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x1f\x8b\x08 looks like gzip")
    cache = DiskCache(tmp_path)
    one = ShardEntry(cache, URL, cache.name(URL))
    assert isinstance(one.begin(), CopiedFile)
    one.reject()
    assert path.exists() == (name != NAME)
    assert cache.find(URL) is None


class _Full(DiskCache):
    """A cache that another process keeps small: what is found there is gone a moment later."""

    def find(self, url: str, name: str | None = None) -> Path | None:
        path = super().find(url, name)
        if path is not None:
            path.unlink()
        return path


def test_removed_as_it_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    cache = _Full(tmp_path)
    one = ShardEntry(cache, URL, cache.name(URL))
    assert one.begin() is None
    assert (one.role, caplog.text) == ("filling", "")
    one.over()
