"""The cache as its users see it: processes that share it, die in it, and find their own files in it."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, make_shards
from tests.shardcache.processes import Child, bytes_asked_for, digests, held, leftovers, wait_for
from tests.transfer.reading import data, quick, snapshot
from wds_async.config import TransferConfig
from wds_async.errors import ConfigError
from wds_async.shardcache.cache import DiskCache, shard_cache
from wds_async.storage.base import Location
from wds_async.storage.options import StorageOptions
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters, Stats

SIZE = 700_000
CONTENTS = [data(SIZE + i, i) for i in range(3)]


def read(urls: list[str], cache: DiskCache | None, config: TransferConfig | None = None) -> tuple[list[bytes], Stats]:
    """The shards' bytes and what was counted."""
    counters, found = Counters(), []
    with open_shards(urls, config=config or quick(), stats=counters, cache=cache) as shards:
        for shard in shards:
            got = bytearray()
            while (piece := shard.read()) is not None:
                got += piece
            found.append(bytes(got))
    return found, snapshot(counters)


def serve(origin: Origin, contents: list[bytes] = CONTENTS, folder: str = "train") -> list[str]:
    return [origin.add(f"{folder}/{i:06d}.tar", content) for i, content in enumerate(contents)]


def cache_at(folder: Path, **options: object) -> DiskCache:
    return DiskCache(folder, **options)  # type: ignore[arg-type]


def kept(folder: Path) -> list[str]:
    """The names of what the cache holds."""
    return sorted(
        p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.parent.name[0] != "."
    )


def test_one_shard_is_fetched_whole(origin: Origin, tmp_path: Path) -> None:
    (url, larger, _), cache = serve(origin), cache_at(tmp_path, limit_bytes=SIZE)
    found = cache.fetch(url)
    assert found == cache.find(url)
    assert found is not None
    assert found.read_bytes() == CONTENTS[0]
    assert cache.fetch(larger) is None  # than the cache, by a byte


def test_it_streams_while_it_fills(origin: Origin, tmp_path: Path) -> None:
    content = data(4_000_000)
    url = origin.add("x.tar", content)
    origin.behave(when=lambda request: (request.range or "").startswith("bytes=3"), stall_after=0)
    with open_shards([url], config=quick(), cache=cache_at(tmp_path)) as shards:
        piece = next(shards).read()
        assert piece is not None
        assert content.startswith(bytes(piece))
        origin.release()


def test_leaving_in_the_middle_keeps_nothing(origin: Origin, tmp_path: Path) -> None:
    urls, cache = serve(origin), cache_at(tmp_path)
    with open_shards(urls, config=quick(), cache=cache) as shards:
        next(shards).read()
    assert (kept(tmp_path), leftovers(tmp_path)) == ([], [])
    with open_shards(urls, config=quick(), cache=cache) as shards:
        for shard in shards:  # each is left after its first piece
            shard.read()
    assert (kept(tmp_path), leftovers(tmp_path)) == ([], [])
    shards = open_shards(urls, config=quick(), cache=cache)
    next(shards).read()
    assert leftovers(tmp_path) != []
    del shards, shard
    gc.collect()
    assert leftovers(tmp_path) == []


def test_a_broken_transfer_keeps_nothing(origin: Origin, tmp_path: Path) -> None:
    urls = serve(origin)
    origin.behave(path="*/000001.tar", when=lambda request: "bytes=0-" not in (request.range or ""), status=404)
    found = []
    with open_shards(urls, config=quick(), cache=cache_at(tmp_path)) as shards:
        for shard in shards:
            try:
                while shard.read() is not None:
                    pass
            except OSError as exn:
                found.append(exn)
    assert len(found) == 1
    assert [Path(name).name for name in kept(tmp_path)] == ["000000.tar", "000002.tar"]
    assert leftovers(tmp_path) == []


def test_threads_share_one_download(origin: Origin, tmp_path: Path) -> None:
    urls, cache, found = serve(origin), cache_at(tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(read(urls, cache)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENTS] * 3
    assert bytes_asked_for(origin) == sum(map(len, CONTENTS))


def test_followers_of_a_killed_writer_go_on(origin: Origin, tmp_path: Path) -> None:
    content = data(4_000_000)
    url = origin.add("x.tar", content)
    alive = True
    origin.behave(when=lambda request: alive and not (request.range or "").startswith("bytes=0-"), stall_after=0)
    with Child(tmp_path, [url]) as writer, Child(tmp_path, [url]) as reader:
        writer.go()
        wait_for(lambda: any(p.stat().st_size for p in tmp_path.glob(".partial/*.part")))
        asked = len(origin.requests)
        reader.go()
        wait_for(lambda: any(name.endswith(".part") for name in held(tmp_path, reader.process.pid)))
        assert [r for r in origin.requests[asked:] if (r.range or "").startswith("bytes=0-")] == []
        alive = False
        writer.process.kill()
        assert reader.rest()[:1] == digests([content])
    assert kept(tmp_path) == []
    wait_for(lambda: leftovers(tmp_path) != [])  # of the dead writer
    assert read([url], cache_at(tmp_path))[0] == [content]
    assert leftovers(tmp_path) == []
    assert len(kept(tmp_path)) == 1


def test_followers_of_a_paused_writer_do_not_wait_long(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wds_async.shardcache.cache.PATIENCE_S", 0.2)
    content = data(4_000_000)
    url = origin.add("x.tar", content)
    with Child(tmp_path, [url], pause_at=3) as writer:
        assert writer.go().line() == "paused"
        assert read([url], cache_at(tmp_path))[0] == [content]
        writer.go()
        assert writer.rest()[:1] == digests([content])
    assert len(kept(tmp_path)) == 1


def test_leftovers_of_the_dead_are_swept(origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = origin.add("x.tar", data(4_000_000))
    with Child(tmp_path, [url], pause_at=3) as writer:
        assert writer.go().line() == "paused"
        assert cache_at(tmp_path).find(origin.add("y.tar", b"")) is None  # sweeps, and spares the living
        assert len(leftovers(tmp_path)) == 2
        writer.process.kill()
        writer.process.wait()
    caplog.set_level(logging.WARNING, "wds_async")
    assert cache_at(tmp_path).find(url) is None
    assert leftovers(tmp_path) == []
    assert "removed 1 unfinished shards" in caplog.text


def test_equal_names_of_two_buckets_do_not_meet(origin: Origin, tmp_path: Path) -> None:
    urls = serve(origin, [b"one"], "a/x") + serve(origin, [b"another"], "b/x")
    urls += [urls[0] + "?versionId=1", f"pipe:printf two # {urls[0]}", f"pipe:printf three # {urls[0]}"]
    for _ in range(2):
        assert read(urls, cache_at(tmp_path))[0] == [b"one", b"another", b"one", b"two", b"three"]
    assert len(kept(tmp_path)) == 5


def test_the_least_recently_used_go(origin: Origin, tmp_path: Path) -> None:
    urls = serve(origin, [data(100_000, i) for i in range(6)])
    cache = cache_at(tmp_path, limit_bytes=350_000)
    read(urls[:3], cache)
    read(urls[:1], cache)  # used again
    read(urls[3:4], cache)
    assert [Path(name).name for name in kept(tmp_path)] == ["000000.tar", "000002.tar", "000003.tar"]
    read(urls, cache)
    assert sum((tmp_path / name).stat().st_size for name in kept(tmp_path)) <= 350_000
    assert {Path(name).name for name in kept(tmp_path)} > {"000004.tar", "000005.tar"}


@pytest.mark.parametrize("lost", [os.remove, lambda path: os.truncate(path, 1_000_000)], ids=["removed", "cut"])
def test_a_file_that_is_lost_while_it_is_read_harms_none(origin: Origin, tmp_path: Path, lost: Any) -> None:
    urls, cache = serve(origin, [data(3_000_000)]), cache_at(tmp_path)
    read(urls, cache)
    with open_shards(urls, config=quick(part_bytes=64 << 10), cache=cache) as shards:
        shard = next(shards)
        got = bytearray(shard.read() or b"")
        lost(tmp_path / cache.name(urls[0]))
        while (piece := shard.read()) is not None:
            got += piece
    assert got == data(3_000_000)


def test_copies_of_the_user_are_used(origin: Origin, tmp_path: Path) -> None:
    ours = make_shards(tmp_path / "made", 3)
    urls = ["s3://bucket/train/a.tar", "pipe:aws s3 cp s3://bucket/train/b.tar -", "gs://other/deep/c.tar"]
    folder = tmp_path / "cache"
    (folder / "bucket/train").mkdir(parents=True)
    ours[0].rename(folder / "bucket/train/a.tar")
    ours[1].rename(folder / "bucket/train/b.tar")
    ours[2].rename(folder / "c.tar")
    cache = cache_at(folder)
    assert [cache.find(url) for url in urls] == [folder / "bucket/train/a.tar", folder / "bucket/train/b.tar", None]
    assert cache.expect([*urls, *urls]).find(urls[2]) == folder / "c.tar"
    assert cache.expect([*urls, "gs://other/elsewhere/c.tar"]).find(urls[2]) is None
    with open_shards(urls[:1], cache=cache) as shards:
        shard = next(shards)
        assert shard.local_path == str(folder / "bucket/train/a.tar")
        assert bytes(shard.read() or b"").startswith(b"000000.png")


def test_a_copy_that_is_no_shard_is_not_used(origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (url,) = serve(origin, CONTENTS[:1])
    cache = cache_at(tmp_path).expect([url])
    (tmp_path / "000000.tar").write_bytes(b"<html>404</html>" * 100)
    for _ in range(2):
        assert read([url], cache)[0] == CONTENTS[:1]
    assert caplog.text.count("is no shard") == 1
    assert (tmp_path / "000000.tar").exists()


def test_a_bad_shard_does_not_stay(origin: Origin, tmp_path: Path) -> None:
    (url,) = serve(origin, CONTENTS[:1])
    cache = cache_at(tmp_path)
    for _ in range(2):  # when it was fetched, and when it was found
        with open_shards([url], config=quick(), cache=cache) as shards:
            for shard in shards:
                while shard.read() is not None:
                    pass
                if kept(tmp_path):
                    shard.reject()
        assert kept(tmp_path) == []
        read([url], cache)


def test_the_users_names(origin: Origin, tmp_path: Path) -> None:
    urls = serve(origin)
    cache = cache_at(tmp_path, url_to_name=lambda url: "mine/" + url[-10:])
    for _ in range(2):
        assert read(urls, cache)[0] == CONTENTS
    assert kept(tmp_path) == ["mine/000000.tar", "mine/000001.tar", "mine/000002.tar"]
    with pytest.raises(ConfigError, match=r"url_to_name gave '\.\./x'"):
        read(urls, cache_at(tmp_path, url_to_name=lambda url: "../x"))


def test_what_is_cached(tmp_path: Path) -> None:
    def cached(kind: str, target: str, **options: object) -> bool:
        return cache_at(tmp_path, **options).entry(Location(target, target, kind)) is not None

    assert cached("http", "http://h/x.tar")
    assert cached("generic", "s3://b/x.tar")
    assert cached("pipe", "pipe:cat x.tar")
    assert not cached("stdin", "-", local=True)
    assert not cached("local", "/mnt/x.tar")
    assert cached("local", "/mnt/x.tar", local=True)
    assert not cached("generic", "simplecache::file:///mnt/x.tar")


def test_local_files_on_request(tmp_path: Path) -> None:
    (path,) = make_shards(tmp_path / "mounted", 1)
    cache = cache_at(tmp_path / "cache", local=True)
    content = path.read_bytes()
    assert read([str(path)], cache)[0] == [content]
    path.unlink()
    assert read([str(path)], cache)[0] == [content]


def test_pipes_are_kept(tmp_path: Path) -> None:
    url, cache = f"pipe:echo x >>{tmp_path}/log; printf hello", cache_at(tmp_path / "cache")
    for _ in range(2):
        assert read([url], cache)[0] == [b"hello"]
    assert (tmp_path / "log").read_text() == "x\n"
    assert read(["pipe:printf half; exit 1", url][1:], cache)[0] == [b"hello"]
    with pytest.raises(OSError, match="status 1"):
        read(["pipe:printf half; exit 1"], cache)
    assert len(kept(tmp_path / "cache")) == 1


def test_verbose_logs_what_happens_to_each_shard(
    origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = serve(origin, CONTENTS[:2])
    cache = cache_at(tmp_path, verbose=True, limit_bytes=SIZE + 10)
    read(urls[:1], cache)
    read(urls, cache)
    logged = [record.getMessage().split(": ", 1)[1] for record in caplog.records]
    assert logged == [f"kept {urls[0]}", f"found {urls[0]}", f"kept {urls[1]}", f"removed {cache.name(urls[0])}"]


def test_it_pickles_and_opens_nothing(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "none", limit_bytes=5).expect(["s3://b/x.tar"])
    again = pickle.loads(pickle.dumps(cache))
    assert (again.folder, again.limit_bytes) == (tmp_path / "none", 5)
    assert not (tmp_path / "none").exists()


def replaced(origin: Origin, *, size: int = SIZE, date: str = "Sun, 06 Nov 2033 08:49:37 GMT") -> bytes:
    """Another object in the first one's place, and what it holds."""
    other = data(size, 99)
    origin.add("train/000000.tar", other)
    origin.behave(path="/train/000000.tar", headers={"last-modified": date})
    return other


@pytest.mark.parametrize("direct", [True, False])
def test_copies_are_compared_with_their_objects_where_that_is_asked_for(
    origin: Origin, tmp_path: Path, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    urls, cache, config = serve(origin), cache_at(tmp_path, check=True), quick(direct=direct)
    assert read(urls, cache, config)[0] == CONTENTS
    asked = len(origin.requests)
    assert read(urls, cache, config)[0] == CONTENTS
    assert [request.range for request in origin.requests[asked:]] == ["bytes=0-0"] * 3  # a shard and epoch

    other = replaced(origin)
    found, stats = read(urls, cache, config)
    assert found == [other, *CONTENTS[1:]]
    assert (stats.cache_hits, stats.cache_misses) == (2, 1)
    assert "is not its object as it is now: removed" in caplog.text
    assert read(urls, cache_at(tmp_path), config)[0] == [other, *CONTENTS[1:]]  # kept in the old one's place


def test_another_size_is_another_object_where_that_is_asked_for(origin: Origin, tmp_path: Path) -> None:
    origin.behave(headers={"last-modified": None})
    urls = serve(origin)
    read(urls, cache_at(tmp_path))
    origin.forget()
    other = replaced(origin, size=SIZE + 10)
    assert read(urls, cache_at(tmp_path))[0] == CONTENTS  # used for ever
    assert read(urls, cache_at(tmp_path, check=True))[0] == [other, *CONTENTS[1:]]


def test_copies_are_used_unchecked_where_their_store_is_away(
    origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls, cache = serve(origin), cache_at(tmp_path, check=True)
    read(urls, cache)
    origin.stop()
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert read(urls, cache)[0] == CONTENTS
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "its copy in the cache is used unchecked" in warnings[0]


def test_a_local_shard_is_compared_by_its_own_date(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(CONTENTS[0])
    os.utime(path, (1_600_000_000, 1_600_000_000))
    cache = cache_at(tmp_path / "cache", check=True, local=True)
    assert read([str(path)], cache)[1].cache_misses == 1
    assert read([str(path)], cache)[1].cache_hits == 1
    path.write_bytes(CONTENTS[0][::-1])
    found, stats = read([str(path)], cache)
    assert (found, stats.cache_misses) == ([CONTENTS[0][::-1]], 1)


def test_the_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("WDS_CACHE", "WDS_CACHE_SIZE", "WDS_VERBOSE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert shard_cache() is None
    assert shard_cache(tmp_path, 0) is None
    cache = shard_cache(tmp_path / "new/folder", -1)
    assert cache is not None
    assert (cache.folder, cache.limit_bytes, cache.verbose) == (tmp_path / "new/folder", None, False)
    assert cache.folder.is_dir()
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "env"))
    monkeypatch.setenv("WDS_CACHE_SIZE", "1K")
    monkeypatch.setenv("WDS_VERBOSE_CACHE", "1")
    cache = shard_cache()
    assert cache is not None
    assert (cache.folder, cache.limit_bytes, cache.verbose, cache.check) == (tmp_path / "env", 1024, True, False)
    monkeypatch.setenv("WDS_CACHE_CHECK", "1")
    assert [getattr(shard_cache(check=given), "check", None) for given in (None, False)] == [True, False]
    cache = shard_cache(tmp_path, 5)
    assert cache is not None
    assert (cache.folder, cache.limit_bytes, cache.verbose) == (tmp_path, 5, True)
    assert shard_cache(tmp_path, 0) is None
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        assert shard_cache(tmp_path / "file") is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"cannot have the folder '{tmp_path}/file'" in warnings[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX only")
def test_a_forked_child_leaves_the_parents_shard_alone(origin: Origin, tmp_path: Path) -> None:
    (url,) = serve(origin, [data(4_000_000)])
    with open_shards([url], config=quick(), cache=cache_at(tmp_path)) as shards:
        shard = next(shards)
        got = bytearray(shard.read() or b"")
        pid = os.fork()
        if pid == 0:
            try:
                mine = held(tmp_path)
                second, _ = read([url], cache_at(tmp_path))
                os._exit(0 if not mine and second == [data(4_000_000)] else 1)
            finally:
                os._exit(2)
        while (piece := shard.read()) is not None:
            got += piece
        assert os.waitpid(pid, 0)[1] == 0
    assert got == data(4_000_000)
    assert len(kept(tmp_path)) == 1


def test_two_shards_of_one_name_are_refused(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, url_to_name=os.path.basename)
    with pytest.raises(ConfigError, match=r"http://h/a/x\.tar and http://h/b/x\.tar the same name 'x\.tar'"):
        cache.expect(["http://h/a/x.tar", "http://h/b/x.tar"])
    assert cache.expect(["http://h/a/x.tar", "http://h/b/y.tar", "http://h/a/x.tar"]) is cache


def test_the_same_url_at_two_endpoints_is_two_shards(tmp_path: Path) -> None:
    """``storage_options`` lead one URL to two stores: none gets the other's bytes."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Two(MemoryFileSystem):
        """Another file for each endpoint."""

        protocol = "two"
        cachable = False

        def __init__(self, endpoint_url: str, **kw: object) -> None:
            super().__init__(**kw)
            self.endpoint_url = endpoint_url

        def info(self, path: str, **kw: object) -> dict[str, object]:
            return {"name": path, "size": len(self.endpoint_url), "type": "file"}

        def cat_file(self, path: str, start: int = 0, end: int | None = None, **kw: object) -> bytes:
            return self.endpoint_url.encode()[start:end]

    fsspec.register_implementation("two", Two, clobber=True)
    cache = DiskCache(tmp_path / "cache", validator=lambda _: True)
    for endpoint in ("http://a", "http://other", "http://a"):
        options = StorageOptions({"two": {"endpoint_url": endpoint}})
        with open_shards(["two://bucket/x.tar"], cache=cache, options=options) as shards:
            got = b"".join(bytes(piece) for shard in shards for piece in iter(shard.read, None))
        assert got == endpoint.encode()
