"""An origin over bytes, with faults, and a cache on a folder, for the tests of the cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wds_async.errors import ObjectChanged, ShardNotFound, TransferError
from wds_async.service.cache.cache import CachedObject, ChunkCache
from wds_async.service.cache.fetching import DiskPiece
from wds_async.transfer.ranges import Facts, Unranged

CHUNK = 8192
URL = "s3://bucket/a.tar"


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass
class Thing:
    """An object at the origin."""

    data: bytes
    identity: str = "v1"
    ranged: bool = True
    sized: bool = True
    """Its size is known before its end."""

    @property
    def facts(self) -> Facts:
        size = len(self.data) if self.sized else None
        return Facts(size, self.identity, {"etag": self.identity}, None, self.ranged)


@dataclass
class Part:
    view: memoryview
    facts: Facts


@dataclass
class Bytes:
    """The origin. ``asked``: its requests; ``gate``: parts wait while it is not set."""

    things: dict[str, Thing] = field(default_factory=dict)
    asked: list[tuple[str, str, int, int]] = field(default_factory=list)
    bytes: int = 0
    broken: bool = False
    down: bool = False
    under_way: int = 0
    most: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    piece: int = 3000
    crowded: bool = False

    def __post_init__(self) -> None:
        self.gate.set()

    def put(self, url: str, data: bytes, **how: Any) -> None:
        self.things[url] = Thing(data, **how)

    def parts_of(self, url: str) -> list[int]:
        return [start for kind, name, start, _ in self.asked if kind == "part" and name == url]

    def count(self, kind: str) -> int:
        return sum(1 for what, *_ in self.asked if what == kind)

    def _thing(self, kind: str, url: str, start: int = 0, stop: int = 0) -> Thing:
        self.asked.append((kind, url, start, stop))
        if self.broken:
            raise TransferError(f"{url} at byte {start}: refused")
        if url not in self.things:
            raise ShardNotFound(f"{url}: not there")
        return self.things[url]

    def reachable(self, url: str) -> bool:
        return not self.down

    async def facts(self, url: str, *, deadline_s: float | None = None) -> Facts:
        await asyncio.sleep(0)
        return self._thing("facts", url).facts

    @contextlib.asynccontextmanager
    async def part(self, url: str, start: int, stop: int, facts: Facts | None = None) -> AsyncIterator[Part]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0)
            thing = self._thing("part", url, start, stop)
            if not thing.ranged or not thing.sized:
                raise Unranged(url)
            await self.gate.wait()
            if facts is not None and facts.version != thing.identity:
                raise ObjectChanged(f"{url}: {facts.version} is {thing.identity} now")
            data = bytearray(thing.data[start:stop])
            self.bytes += len(data)
            yield Part(memoryview(data), thing.facts)
            data[:] = b"?" * len(data)  # the memory is another part's now
        finally:
            self.under_way -= 1

    @contextlib.asynccontextmanager
    async def stream(self, url: str) -> AsyncIterator[tuple[Facts, AsyncIterator[memoryview]]]:
        thing = self._thing("stream", url)

        async def views() -> AsyncIterator[memoryview]:
            for start in range(0, len(thing.data), self.piece):
                await asyncio.sleep(0)
                await self.gate.wait()
                if self.broken:
                    raise TransferError(f"{url} at byte {start}: broke")
                data = bytearray(thing.data[start : start + self.piece])
                self.bytes += len(data)
                yield memoryview(data)
                data[:] = b"?" * len(data)

        yield thing.facts, views()


def origin_of(data: bytes, *urls: str, **how: Any) -> Bytes:
    """An origin of the same object at each URL."""
    origin = Bytes()
    for url in urls or (URL,):
        origin.put(url, data, **how)
    return origin


def origin_of_many(count: int, chunks: int = 4, prefix: str = "s3://bucket/") -> Bytes:
    """An origin of ``prefix0`` and so on, each of so many chunks."""
    origin = Bytes()
    for number in range(count):
        origin.put(f"{prefix}{number}", content(chunks * CHUNK, number))
    return origin


def data_files(folder: Path) -> list[Path]:
    """The cache's files, in the order in which their objects came."""
    paths = [path for path in (folder / "data").rglob("*") if path.is_file()]
    return sorted(paths, key=lambda path: int(path.name, 16))


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in data_files(folder))


def damage(path: Path, how: str) -> None:
    """Change a file as disks do: ``flip`` a bit of the third chunk, ``cut`` in the fourth, all ``zeros``, ``gone``."""
    if how == "flip":
        data = bytearray(path.read_bytes())
        data[2 * CHUNK + 5] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        os.truncate(path, 3 * CHUNK + 5)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))


@contextlib.contextmanager
def full_disk(most: int = 1000) -> Iterator[None]:
    """Files may not grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


async def threaded(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


def make(folder: Path | None, origin: Any, limit: int = 1 << 20, **how: Any) -> ChunkCache:
    how = {"chunk_bytes": CHUNK, "call": threaded, **how}
    return ChunkCache(folder, limit, origin, **how)


@contextlib.asynccontextmanager
async def running(folder: Path | None, origin: Any, limit: int = 1 << 20, **how: Any) -> AsyncIterator[ChunkCache]:
    cache = make(folder, origin, limit, **how)
    await cache.start()
    try:
        yield cache
    finally:
        await cache.close()


@contextlib.asynccontextmanager
async def serving(
    folder: Path | None, origin: Bytes, limit: int = 1 << 20, **how: Any
) -> AsyncIterator[tuple[Bytes, ChunkCache]]:
    """`running`, with the origin."""
    async with running(folder, origin, limit, **how) as cache:
        yield origin, cache


async def taken(found: CachedObject, start: int = 0, stop: int | None = None, **how: Any) -> bytes:
    """What `pieces` gives."""
    got = bytearray()
    async with contextlib.aclosing(found.pieces(start, stop, **how)) as pieces:
        async for piece in pieces:
            await asyncio.sleep(0)
            got += os.pread(piece.fd, piece.count, piece.offset) if isinstance(piece, DiskPiece) else piece
    return bytes(got)


async def get(cache: ChunkCache, url: str, start: int = 0, stop: int | None = None, **how: Any) -> bytes:
    """Open and read; what was fetched for that is stored then."""
    with await cache.open(url, start=start, **how) as found:
        got = await taken(found, start, stop)
    await stored(cache)
    return got


async def stored(cache: ChunkCache) -> None:
    """Wait until each chunk that has arrived lies on disk, or has found no place there."""

    def pending() -> bool:
        flights = [flight for entry in cache.fetching.entries.values() for flight in entry.fetches.values()]
        return any(flight.arrived and not flight.stored.done() for flight in flights)

    await until(lambda: not pending())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens by itself; `run` bounds it."""
    while not condition():  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.001)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))
