"""What every cache promises, whatever it keeps: the service's chunks, a host's shards, files, and samples."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.cache.doubles import CHUNK, Bytes, damage, data_files, full_disk, get, make
from tests.shardcache.processes import bytes_asked_for
from tests.transfer.reading import quick
from wds_async.cache import FileCache
from wds_async.errors import ConfigError, TransferError
from wds_async.samplecache import LMDBCached, SQLiteCache
from wds_async.shardcache.cache import DiskCache
from wds_async.transfer.reader import open_shards

SIZE = 40 * CHUNK


def content(seed: int = 0) -> bytes:
    """Bytes that begin like a shard."""
    return b"\x1f\x8b\x08" + random.Random(seed).randbytes(SIZE - 3)


class Service:
    """The service's cache of chunks. It belongs to one process."""

    def __init__(self, folder: Path, origin: Any, *, limit: int = 1 << 30, check: bool = False) -> None:
        self.folder, self.limit, self.how = folder, limit, {"freshness_s": 0.0 if check else 300.0}
        self.origin = Bytes()
        self.runner = asyncio.Runner()
        self.open()

    def open(self) -> None:
        self.cache = make(self.folder, self.origin, self.limit, **self.how)
        self.runner.run(self.cache.start())

    def put(self, name: str, data: bytes, version: str = "v1") -> None:
        self.origin.put(name, data, identity=version)

    def read(self, name: str) -> bytes:
        return self.runner.run(asyncio.wait_for(get(self.cache, name), 30))

    def leave(self, name: str) -> None:
        async def begin() -> None:
            with await self.cache.open(name) as opened:
                async with contextlib.aclosing(opened.pieces()) as pieces:
                    await anext(pieces)

        self.runner.run(begin())

    @property
    def fetched(self) -> int:
        return self.origin.bytes

    def cut_off(self) -> None:
        self.origin.broken = self.origin.down = True

    def restart(self) -> None:
        self.runner.run(self.cache.close())
        self.open()

    def files(self) -> list[Path]:
        return data_files(self.folder)

    def close(self) -> None:
        self.runner.run(self.cache.close())
        self.runner.close()


class Shards:
    """The shard cache, filled by readers that stream."""

    def __init__(self, folder: Path, origin: Origin, *, limit: int | None = None, check: bool = False) -> None:
        self.folder, self.origin, self.limit, self.how = folder, origin, limit, {"check": check}
        self.restart()

    def restart(self) -> None:
        self.cache = DiskCache(self.folder, self.limit, **self.how)

    def put(self, name: str, data: bytes, version: str = "v1") -> None:
        self.origin.add(name, data)
        if version != "v1":
            self.origin.behave(path=f"/{name}", headers={"last-modified": "Sun, 06 Nov 2033 08:49:37 GMT"})

    def read(self, name: str) -> bytes:
        with open_shards([self.origin.url(name)], config=quick(), cache=self.cache) as shards:
            return b"".join(bytes(piece) for shard in shards for piece in iter(shard.read, None))

    def leave(self, name: str) -> None:
        with open_shards([self.origin.url(name)], config=quick(part_bytes=64 << 10), cache=self.cache) as shards:
            next(shards).read()

    @property
    def fetched(self) -> int:
        return bytes_asked_for(self.origin)

    def cut_off(self) -> None:
        self.origin.stop()

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.parent.name != ".partial"]

    def close(self) -> None:
        pass


class Files(Shards):
    """WebDataset's FileCache."""

    def restart(self) -> None:
        self.files_cache = FileCache(
            self.folder, cache_size=self.limit or -1, cache_cleanup_interval=None, validator=None
        )

    def read(self, name: str) -> bytes:
        return Path(self.files_cache.get_file(self.origin.url(name))).read_bytes()

    def leave(self, name: str) -> None:
        self.origin.behave(path=f"/{name}", when=lambda request: "bytes=0-" not in (request.range or ""), status=404)
        with pytest.raises(OSError):
            self.read(name)
        self.origin.forget()


class Samples:
    """A cache of samples; what is read is the stream of them."""

    def __init__(self, folder: Path, origin: Any) -> None:
        self.folder = folder
        self.samples: dict[str, list[dict[str, Any]]] = {}
        self.fetched = 0

    def put(self, name: str, data: bytes) -> None:
        self.samples[name] = [{"__key__": f"{at:09}", "data": data[at : at + CHUNK]} for at in range(0, SIZE, CHUNK)]

    def source(self, name: str) -> Iterator[dict[str, Any]]:
        for sample in self.samples[name]:
            self.fetched += CHUNK
            yield dict(sample)

    def stream(self, name: str) -> Iterator[Any]:
        return LMDBCached(self.folder / name, chunksize=3).run(self.source(name))

    def read(self, name: str) -> bytes:
        return b"".join(sample["data"] for sample in self.stream(name))

    def leave(self, name: str) -> None:
        stream = self.stream(name)
        for _ in range(7):
            next(stream)
        stream.close()

    def restart(self) -> None:
        pass

    def cut_off(self) -> None:
        self.samples = {name: [] for name in self.samples}

    def close(self) -> None:
        pass


class Database(Samples):
    """`SQLiteCache`: it goes on where an interrupted stream ended."""

    def stream(self, name: str) -> Iterator[Any]:
        self.folder.mkdir(exist_ok=True)
        return SQLiteCache(self.folder / name, SIZE // CHUNK, None).run(self.source(name))


KINDS: dict[str, Any] = {"service": Service, "shards": Shards, "files": Files, "lmdb": Samples, "sqlite": Database}
BYTES = ("service", "shards", "files")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """A function that opens a cache of a kind on a folder, with an origin of its own."""
    with contextlib.ExitStack() as stack:

        def open_cache(kind: str, folder: str = "cache", **how: Any) -> Any:
            cache = KINDS[kind](tmp_path / folder, stack.enter_context(Origin()), **how)
            stack.callback(cache.close)
            return cache

        yield open_cache


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_the_miss_again_also_after_a_restart_and_without_the_source(kind: str, opened: Any) -> None:
    cache = opened(kind)
    for name in ("a", "b"):
        cache.put(name, content(ord(name)))
        assert cache.read(name) == content(ord(name))
    fetched = cache.fetched
    assert fetched == 2 * SIZE
    for _ in range(2):
        assert [cache.read(name) for name in ("a", "b")] == [content(ord("a")), content(ord("b"))]
        assert cache.fetched == fetched
        cache.restart()
        cache.cut_off()


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_fill_is_never_served(kind: str, opened: Any) -> None:
    cache = opened(kind)
    cache.put("a", content())
    cache.leave("a")
    cache.restart()
    assert cache.read("a") == content()
    fetched = cache.fetched
    assert cache.read("a") == content()
    assert cache.fetched == fetched


@pytest.mark.parametrize("kind", BYTES)
def test_it_keeps_within_its_size(kind: str, opened: Any) -> None:
    cache = opened(kind, limit=4 * SIZE)
    for _ in range(2):
        for number in range(8):
            cache.put(f"{number}", content(number))
            assert cache.read(f"{number}") == content(number)
            # FileCache makes room before it fetches.
            assert sum(path.stat().st_blocks * 512 for path in cache.files()) <= (4 + (kind == "files")) * SIZE
    assert cache.files()


def _read_in_child(kind: str, folder: Path, base: str, data: bytes) -> tuple[bytes, bytes]:
    cache = KINDS[kind](folder, SimpleNamespace(url=lambda name: f"{base}/{name}"))
    if isinstance(cache, Samples):
        cache.put("a", data)
    return cache.read("a"), cache.read("a")


@pytest.mark.parametrize("kind", ["shards", "files", "lmdb", "sqlite"])
def test_two_processes_share_it(kind: str, opened: Any) -> None:
    cache = opened(kind)
    cache.put("a", content())
    base = cache.origin.base if isinstance(cache, Shards) else ""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        reads = [pool.submit(_read_in_child, kind, cache.folder, base, content()) for _ in range(2)]
        assert [read.result(60) for read in reads] == [(content(), content())] * 2
    if base:
        assert cache.fetched == SIZE  # one download
    fetched = cache.fetched
    assert cache.read("a") == content()
    assert cache.fetched == fetched


def test_one_service_at_a_time_has_a_folder(opened: Any) -> None:
    cache = opened("service")
    with pytest.raises(ConfigError, match="another process works on this cache"):
        asyncio.run(make(cache.folder, cache.origin).start())
    cache.put("a", content())
    assert cache.read("a") == content()


@pytest.mark.parametrize("kind", ["service", "shards"])
@pytest.mark.parametrize("fault", ["no folder", "full"])
def test_a_disk_that_fails_is_one_warning(
    kind: str, fault: str, opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no folder":
        (tmp_path / "file").write_bytes(b"")
    cache = opened(kind, "file/cache" if fault == "no folder" else "cache")
    for name in "ab":
        cache.put(name, content(ord(name)))
    with full_disk(1000 if fault == "full" else SIZE * 9):
        for name in "abab":
            assert cache.read(name) == content(ord(name))
    assert cache.fetched > 3 * SIZE
    words = "passed through" if kind == "service" else "is read without it"
    (warning,) = [text for record in caplog.records if words in (text := record.getMessage())]
    assert str(tmp_path) in warning
    cache.restart()
    assert [cache.read(name) for name in "ab"] == [content(ord("a")), content(ord("b"))]


@pytest.mark.parametrize("kind", ["service", "shards"])
def test_a_changed_object_is_fetched_anew(kind: str, opened: Any) -> None:
    cache = opened(kind, check=True)
    cache.put("a", content(1))
    assert cache.read("a") == content(1)
    cache.put("a", content(2), "v2")
    fetched = cache.fetched
    for _ in range(2):
        assert cache.read("a") == content(2)
    assert SIZE <= cache.fetched - fetched < 2 * SIZE
    cache.restart()
    assert cache.read("a") == content(2)
    assert len(cache.files()) == 1
    cache.cut_off()
    with contextlib.suppress(TransferError):  # nothing unconfirmed is served without freshness
        assert cache.read("a") == content(2)


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("how", ["empty", "gone"])
def test_a_lost_copy_is_fetched_anew(kind: str, how: str, opened: Any) -> None:
    """An empty file is what a crash of the machine may leave."""
    cache = opened(kind)
    cache.put("a", content())
    cache.read("a")
    cache.restart()
    (path,) = cache.files()
    os.truncate(path, 0) if how == "empty" else path.unlink()
    assert cache.read("a") == content()
    fetched = cache.fetched
    assert cache.read("a") == content()
    assert cache.fetched == fetched == 2 * SIZE


def test_a_bit_that_flipped_is_fetched_anew_with_its_chunk(opened: Any) -> None:
    cache = opened("service")
    cache.put("a", content())
    cache.read("a")
    cache.restart()
    damage(cache.files()[0], "flip")
    assert cache.read("a") == content()
    assert cache.fetched == SIZE + CHUNK


@pytest.mark.parametrize(("kind", "name"), [("lmdb", "a/data.mdb"), ("sqlite", "a")])
def test_a_file_that_is_no_database_is_an_error(kind: str, name: str, opened: Any) -> None:
    cache = opened(kind)
    cache.put("a", content())
    path = cache.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"garbage" * 10_000)
    with pytest.raises(Exception, match=f"cache/{name.partition('/')[0]}"):
        cache.read("a")
