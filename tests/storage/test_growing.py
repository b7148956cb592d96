"""PartialReader a file that another process is writing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.storage.locations import location_of
from tests.transfer.reading import data, quick
from wds_async.shardcache.cache import DiskCache
from wds_async.shardcache.partial import PartialReader, PartialWriter
from wds_async.storage.base import Answer, CopiedFile, Verdict
from wds_async.storage.growing import CachedBackend, GrowingStream, StoodStill
from wds_async.storage.http.backend import HttpBackend
from wds_async.transfer.reader import open_shards

Call = Callable[..., Awaitable[Any]]


@contextmanager
def threads() -> Iterator[Call]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

        yield call


async def _all(stream: GrowingStream) -> bytes:
    assert await stream.open() == ""
    got, into = bytearray(), memoryview(bytearray(1000))
    try:
        while count := await stream.readinto(into):
            got += into[:count]
        assert await stream.readinto(into) == 0  # the end is the end
    finally:
        await stream.close()
    return bytes(got)


def _begun(folder: Path) -> PartialWriter:
    filling = PartialWriter.begin(folder, "x.tar")
    assert filling is not None
    return filling


def _awaited(folder: Path, patience_s: float) -> PartialReader:
    following = PartialReader(folder, "x.tar", patience_s)
    following.awaited = True
    return following


def test_up_to_the_end(tmp_path: Path) -> None:
    content, filling = data(50_000), _begun(tmp_path)

    def write() -> None:
        for at in range(0, len(content), 5_000):
            filling.write(memoryview(content)[at : at + 5_000])
        filling.publish()

    with threads() as call:
        stream = GrowingStream(call, PartialReader(tmp_path, "x.tar"))
        writer = threading.Timer(0.02, write)
        writer.start()
        assert asyncio.run(_all(stream)) == content
        writer.join()


def test_patience_ends(tmp_path: Path) -> None:
    filling = _begun(tmp_path)
    filling.write(memoryview(b"half"))
    with threads() as call, pytest.raises(StoodStill, match=r"no byte more came in 0\.05 s"):
        asyncio.run(_all(GrowingStream(call, _awaited(tmp_path, 0.05))))
    filling.drop()


def test_nobody_is_impatient_with_what_nobody_awaits(tmp_path: Path) -> None:
    filling = _begun(tmp_path)
    following = PartialReader(tmp_path, "x.tar", patience_s=0.01)

    def late() -> None:
        filling.write(memoryview(b"late"))
        filling.publish()

    with threads() as call:
        threading.Timer(0.5, late).start()
        assert asyncio.run(_all(GrowingStream(call, following))) == b"late"
    assert not following.patience_lost


def test_a_writer_that_left_is_noticed_at_once(tmp_path: Path) -> None:
    filling = _begun(tmp_path)
    filling.write(memoryview(b"half"))
    with threads() as call:
        threading.Timer(0.05, filling.drop).start()
        with pytest.raises(StoodStill, match="its writer is gone"):
            asyncio.run(_all(GrowingStream(call, _awaited(tmp_path, 60))))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with threads() as call, pytest.raises(StoodStill):
        asyncio.run(_all(GrowingStream(call, PartialReader(tmp_path, "x.tar"))))


def test_cancelled_while_it_waits(tmp_path: Path) -> None:
    filling = _begun(tmp_path)

    async def cancelled(call: Call) -> None:
        reading = asyncio.create_task(_all(GrowingStream(call, _awaited(tmp_path, 60))))
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    with threads() as call:
        asyncio.run(cancelled(call))
    filling.drop()


def test_the_backend_asks_the_cache_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)

    class Entry:
        """An entry that says what it is told to."""

        check = False

        def __init__(self, found: Any) -> None:
            self.found = found

        def begin(self) -> Any:
            return self.found

        def lose(self) -> None:
            raise AssertionError

    async def access(call: Call, found: Any) -> Any:
        store = HttpBackend(direct=True, connect_timeout_s=1, stall_timeout_s=1)
        backend = CachedBackend(call, Entry(found), store)
        assert backend.classify(Answer(404, {}), location_of("https://h/x.tar")).verdict is Verdict.MISSING
        await backend.close()
        return await backend.access(location_of("http://h/x.tar"))

    copy = CopiedFile("x", 1, "")
    with threads() as call:
        assert asyncio.run(access(call, copy)) is copy
        assert isinstance(asyncio.run(access(call, PartialReader(cache.folder, "x"))), GrowingStream)
        assert asyncio.run(access(call, None)).url == "http://h/x.tar"


@pytest.mark.parametrize("ranges", [True, False])
def test_the_engine_goes_on_from_the_byte(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    monkeypatch.setattr("wds_async.shardcache.cache.PATIENCE_S", 0.1)
    content = data(3_000_000)
    url, following = origin.add("x.tar", content), origin.add("y.tar", b"next")
    if not ranges:
        origin.behave(chunked=True, ignore_range=True)
    cache = DiskCache(tmp_path)
    filling = PartialWriter.begin(tmp_path, cache.name(url))
    assert filling is not None
    filling.write(memoryview(content)[:1_234_567])
    found = []
    with open_shards([url, following], config=quick(), cache=cache) as shards:
        for shard in shards:
            got = bytearray()
            while (piece := shard.read()) is not None:
                got += piece
            found.append(bytes(got))
    assert found == [content, b"next"]
    if ranges:
        asked = [
            int(r.range.partition("=")[2].partition("-")[0]) for r in origin.requests if r.path == "/x.tar" and r.range
        ]
        assert min(asked) == 1_234_567
    filling.drop()


def test_a_file_that_ended_unnoticed(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer died between its last byte and the publishing: nothing is missing, and nothing is asked twice."""
    monkeypatch.setattr("wds_async.shardcache.cache.PATIENCE_S", 0.1)
    for size in (3_000_000, 256 << 10, 64 << 10, 5):
        content = data(size)
        url = origin.add(f"{size}.tar", content)
        cache = DiskCache(tmp_path)
        filling = PartialWriter.begin(tmp_path, cache.name(url))
        assert filling is not None
        filling.write(memoryview(content))
        with open_shards([url], config=quick(), cache=cache) as shards:
            shard, got = next(shards), bytearray()
            while (piece := shard.read()) is not None:
                got += piece
        assert bytes(got) == content
        filling.drop()
