"""Byte ranges of any object, with the backends, connections, retries and hedges of a reader, on a loop that runs
already, for a process that lives long.

::

    fetcher = RangeFetcher(config, memory_bytes=64 << 20, traffic=Traffic())
    facts = await fetcher.facts("s3://bucket/x.tar")
    async with fetcher.part("s3://bucket/x.tar", 0, 2 << 20, facts) as part:
        ...  # part.view

State of an object (its request, its redirect, its open file) serves all parts of it that are read at about the same
time, and is then forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from wds_async.config import TransferConfig
from wds_async.errors import FetchTimeout, ReaderClosed, TransferError, TruncatedShard, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Checksum, Entry, Guard, Location
from wds_async.storage.listing.folders import Folder
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.transfer.concurrency import Concurrency
from wds_async.transfer.fetch import Fetcher, Unranged
from wds_async.transfer.options import ReadOptions
from wds_async.transfer.rate_limits import OriginLimits, Permit
from wds_async.transfer.resources import Resources, why_unread
from wds_async.transfer.shard_state import ShardState, ignore_result
from wds_async.transfer.slabs import LARGEST_BYTES, Slab, SlabBudget
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import Traffic, origin_of
from wds_async.transfer.window import Part, Shard

__all__ = [
    "LARGEST_PART_BYTES",
    "LEAST_RANGES",
    "Facts",
    "OpenObject",
    "OpenObjects",
    "RangeFetcher",
    "RangePart",
    "Unranged",
    "facts_of",
]

LARGEST_PART_BYTES = LARGEST_BYTES
"""No part may be longer, whatever the memory."""

LEAST_RANGES = 16
"""Ranges of a batch; AIStore's documents advise against fewer."""

_PIECE_BYTES = 1 << 20
_BATCH_BYTES, _BATCHES_AT_ONCE = 32 << 20, 4
_END_WITHIN_S = 1.5
_TURN_S = 0.001
_KEPT_S = 10.0
_KEPT = 256
_FIELDS = frozenset({"etag", "last-modified", "content-type", "ais-version", "x-goog-hash", "repr-digest", "digest",
                     "x-ms-blob-content-md5", "x-linked-etag"})  # fmt: skip
_CHECKSUMS = ("content-md5", "ais-checksum-", "x-amz-checksum-")
"""Checksums that an answer to a range may give of that range."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of an object, from its first answer."""

    size: int | None
    """Bytes; None: unknown before its end (a pipe, a server without ranges and length)."""
    version: str
    """Version that pins it; "" where its origin gives none."""
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Head of that answer, in lower case: ``etag``, ``last-modified``, ``content-type``, ``ais-version`` and the
    checksums of the whole object, as far as they were there."""
    checksum: Checksum | None = None
    """Checksum of the whole object, if the answer brought one."""
    ranged: bool = True
    """False: it can be read in order only."""


@dataclass(slots=True, eq=False)
class OpenObject(Shard):
    """One version of an object, pinned by its first answer, with the number of its readers."""

    users: int = 0
    in_order: bool = False
    """True if it may be read in order where it has to be."""
    pinned: tuple[str, int | None] | None = None
    """Version and size of the facts that it has to have; None: those of its first answer."""
    facts: Facts | None = None
    """Set once something of it has come."""
    idle_since: float = 0.0


@dataclass(frozen=True, slots=True)
class RangePart:
    """Bytes of an object, valid within the ``async with``."""

    view: memoryview
    facts: Facts


def facts_of(obj: OpenObject) -> Facts:
    """Return the facts of an object of which some bytes have come."""
    state: ShardState = obj.state
    fields, size, version = state.fields, obj.size, state.version
    if obj.streamed:
        length = fields.get("content-length", "")
        plain = "transfer-encoding" not in fields and fields.get("content-encoding", "identity") in ("", "identity")
        size = int(length) if plain and length.isascii() and length.isdigit() else None
        version = state.stream.version if state.stream is not None else ""
    whole = "content-range" not in fields
    kept = {n: text for n, text in fields.items() if n in _FIELDS or (whole and n.startswith(_CHECKSUMS))}
    return Facts(size, version, MappingProxyType(kept), state.checksum, not obj.streamed or size == 0)


class OpenObjects:
    """Objects that are read now, or were a moment ago: at most a few hundred without readers. ``locate`` is called once
    for each."""

    def __init__(self, locate: Callable[[str], Location]) -> None:
        self._locate = locate
        self._current: dict[str, OpenObject] = {}
        self._idle: dict[OpenObject, None] = {}  # the longest idle first

    def __len__(self) -> int:
        return len(self._current)

    def take(self, url: str, facts: Facts | None = None) -> OpenObject:
        """Return the object at ``url`` that ``facts`` are of, for one more reader; without them the one that is read
        now, as one without readers may be out of date. `leave` it."""
        obj = self._current.get(url)
        wanted = None if facts is None else (facts.version, facts.size)
        if obj is None or not (obj.users if wanted is None else obj.pinned == wanted):
            obj = self.fresh(url, facts)
            obj.users = 1
            self.install(obj)
            return obj
        obj.users += 1
        self._idle.pop(obj, None)
        return obj

    def fresh(self, url: str, facts: Facts | None = None) -> OpenObject:
        """Return a fresh object: nothing of it has come, and no other reader gets it."""
        if facts is None:
            return OpenObject(0, url, state=ShardState(self._locate(url)))
        state = ShardState(self._locate(url), version=facts.version, etag=facts.fields.get("etag", ""))
        return OpenObject(0, url, size=facts.size, state=state, facts=facts, pinned=(facts.version, facts.size))

    def install(self, obj: OpenObject) -> None:
        """Give this object to later readers."""
        former = self._current.get(obj.url)
        self._current[obj.url] = obj
        if former is not None and not former.users:
            self._retire(former)
        if not obj.users:
            self._rest(obj)

    def leave(self, obj: OpenObject, *, failed: bool = False) -> None:
        """Count one reader less. After a failure no later reader gets it."""
        obj.users -= 1
        if failed and self._current.get(obj.url) is obj:
            del self._current[obj.url]
        if obj.users:
            return
        if self._current.get(obj.url) is obj:
            self._rest(obj)
        else:
            self._retire(obj)

    def expire(self, now: float) -> None:
        """Forget objects without a reader for some seconds."""
        while self._idle and (obj := next(iter(self._idle))).idle_since < now - _KEPT_S:
            self._forget(obj)

    def close(self) -> None:
        """Forget all objects without readers."""
        while self._idle:
            self._forget(next(iter(self._idle)))

    def _rest(self, obj: OpenObject) -> None:
        obj.idle_since = asyncio.get_running_loop().time()
        self._idle[obj] = None
        if len(self._idle) > _KEPT:
            self._forget(next(iter(self._idle)))

    def _forget(self, obj: OpenObject) -> None:
        if self._current.get(obj.url) is obj:
            del self._current[obj.url]
        self._retire(obj)

    def _retire(self, obj: OpenObject) -> None:
        self._idle.pop(obj, None)
        obj.state.release()


class _OriginFetcher:
    """Fetcher of one origin's parts, and their plan (see `fetch.FetchPlan`): each part has its own waiter."""

    def __init__(self, name: str, resources: Resources, options: ReadOptions) -> None:
        self.name = name
        self.concurrency = Concurrency(options.config.connections, options.config.processes)
        self.fetcher = Fetcher(self, resources, options, hurried=lambda: True)
        self._flying = 0

    def room(self) -> int:
        """Return the number of parts that may be in flight."""
        return self.concurrency.room

    async def fetch(self, part: Part, *, once: bool = False) -> bool:
        """See `Fetcher.fetch`."""
        self._flying += 1
        self.concurrency.in_flight(self._flying)
        part.shard.parts.append(part)
        try:
            return await self.fetcher.fetch(part, once=once)
        finally:
            part.shard.parts.remove(part)
            self._flying -= 1

    def learn(self, shard: Shard, size: int) -> None:
        """Parts behind the end are dropped without an error: their own answers say so too."""
        if shard.size is None and not shard.streamed:
            shard.size = size
        for part in shard.parts:
            part.stop = min(part.stop, size)
            part.dropped = part.dropped or part.start >= size

    def turn_streamed(self, part: Part) -> bool:
        shard = cast(OpenObject, part.shard)
        if not shard.in_order:
            raise Unranged(f"{redact(shard.url)} can be read in order only")
        shard.streamed, shard.size = True, None
        return True

    def turn_ranged(self, part: Part) -> None:
        """Only copies in a disk cache of the reader's do that."""
        part.shard.streamed = False


class RangeFetcher:
    """Reads parts of objects at once, by many tasks of one loop, within ``memory_bytes`` of slabs.

    Made within a running loop, asyncio's or uvloop's. Requests are counted in ``traffic`` and bounded by ``limits``
    (default: ``config.connections``, and no rates). ``options``: see `registry.locate`. URLs are rewritten as
    everywhere. ``guard`` judges where requests go. ``before_request`` is called before each part, facts, stream and
    folder; what it raises is raised there. Errors are those of the tree; `ReaderClosed` after and during `close`.
    """

    def __init__(
        self,
        config: TransferConfig,
        *,
        memory_bytes: int,
        traffic: Traffic,
        limits: OriginLimits | None = None,
        options: StorageOptions = NOTHING_GIVEN,
        guard: Guard | None = None,
        before_request: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._before_request = before_request
        self._config = config = config.taking_refusals()
        self._options = options
        self._read = ReadOptions(config=config, counters=Counters(traffic=traffic))
        self._limits = limits or OriginLimits(config.connections, config.connections)
        self._memory = SlabBudget(memory_bytes)
        self._resources = Resources(config, self._loop, guard)
        self._objects = OpenObjects(functools.partial(locate, options=options))
        self._origins: dict[str, _OriginFetcher] = {}
        self._reading: set[asyncio.Task[Any] | None] = set()
        self._closed = False
        self._watch = self._loop.create_task(self._resources.watch(self._tidy))

    @property
    def held_bytes(self) -> int:
        """Memory that parts hold now, of ``memory_bytes``."""
        return self._memory.held_bytes

    @property
    def crowded(self) -> bool:
        """True if parts wait for memory that others hold."""
        return self._memory.crowded

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return self._resources.connections.open

    def reachable(self, url: str) -> bool:
        """Return whether the store of ``url`` may answer: False after three failed requests in a row, until a good
        answer (the circuit breaker is open). It does no I/O.
        """
        obj = self._objects.fresh(url)
        breaker = self._origin(obj).fetcher.breaker(obj)
        return breaker is None or not breaker.is_open

    async def facts(self, url: str, *, deadline_s: float | None = None) -> Facts:
        """Return the present facts of an object, by one ranged GET of its first byte. What can be read only once is
        not touched.

        With ``deadline_s`` one attempt is made, and FetchTimeout raised after that many seconds; while the store is
        down (see `reachable`) only the next probe goes out, and others raise TransferError at once.
        """
        self._before_request()
        obj = self._objects.fresh(url)
        if deadline_s is None:
            return await self._facts(obj, once=False)
        breaker, shown = self._origin(obj).fetcher.breaker(obj), redact(url)
        if breaker is not None and not breaker.allow_request():
            raise TransferError(f"{shown}: {breaker.name} does not answer; it is probed again within seconds").at(
                shown, 0
            )
        began = self._loop.time()
        asking = self._loop.create_task(self._facts(obj, once=True))
        asking.add_done_callback(ignore_result)
        try:
            # Not `asyncio.timeout`: a thread that reads from a hanging file system keeps its task waiting.
            await asyncio.wait((asking,), timeout=deadline_s)
        finally:
            asking.cancel()
        if asking.done():
            return asking.result()
        reason = f"no answer within {deadline_s:g} s"
        if breaker is not None and obj.state.access is not None:  # else its turn had not come: no fault of the store
            breaker.record_failure(reason, began)
        raise FetchTimeout(f"{shown}: {reason}").at(shown, 0)

    async def _facts(self, obj: OpenObject, *, once: bool) -> Facts:
        async with self._at_work():
            if await why_unread(self._resources.threads, obj.state.location):
                return Facts(None, "", ranged=False)
            obj.in_order = True
            origin, state = self._origin(obj), obj.state
            part = Part(obj, 0, 1, Slab(0, 1, memoryview(bytearray(1))))
            try:
                if not once:
                    await origin.fetcher.ready(obj)
                async with self._limits.permit(origin.name, 1, origin.room) as permit:
                    await origin.fetch(part, once=once)
                    permit.settle(part.filled)
                obj.facts = facts_of(obj)
            except BaseException:
                await state.close()
                raise
        if obj.streamed:
            await state.close()
            return obj.facts
        obj.in_order, obj.pinned = False, (obj.facts.version, obj.facts.size)
        self._objects.install(obj)
        return obj.facts

    @contextlib.asynccontextmanager
    async def part(self, url: str, start: int, stop: int, facts: Facts | None = None) -> AsyncIterator[RangePart]:
        """Yield bytes ``[start, stop)`` of an object; fewer only at its end. Waits for memory, first come, first
        served.

        With ``facts`` (of `facts`, or of another part) the bytes are of that very object, or `ObjectChanged` is raised;
        without, its parts that are read at the same time are of one object. `Unranged` where only `stream` can read it.
        ValueError for no bytes, for more than `LARGEST_PART_BYTES`, or than all the memory.
        """
        if not 0 <= start < stop:
            raise ValueError(f"bytes {start} to {stop}: no range")
        self._before_request()
        obj = self._objects.take(url, facts)
        slab, view = None, memoryview(b"")
        try:
            async with self._at_work():
                if obj.state.location.in_order or (facts is not None and not facts.ranged):
                    raise Unranged(f"{redact(url)} can be read in order only")
                if obj.facts is None or obj.size is None or start < obj.size:
                    slab, filled = await self._filled(obj, start, stop)
                    view = slab.view[:filled]
            if obj.facts is None:
                obj.facts = facts_of(obj)
        except BaseException as exn:
            self._objects.leave(obj, failed=isinstance(exn, WdsError))
            raise
        try:
            yield RangePart(view, obj.facts)
        finally:
            if slab is not None:
                self._memory.give_back(slab, view)
            self._objects.leave(obj)

    def batches(self, url: str) -> bool:
        """Return whether the store of ``url`` may send ranges of many objects by one request (`batch`)."""
        return locate(url, options=self._options).spec.batches

    async def batch(self, wanted: Sequence[tuple[str, int, bytearray]]) -> set[int]:
        """Fill buffers with bytes of objects (URL, start, buffer) that their stores send by few requests. Return the
        numbers of those that are filled: each of the others has to be read as a `part`.

        There are no retries, and the versions of the objects are not compared.
        """
        chunks: dict[str, list[list[tuple[int, Location]]]] = {}
        sizes: dict[str, int] = {}
        for i, (url, _, buffer) in enumerate(wanted):
            location = locate(url, options=self._options)
            if not location.spec.batches or not 0 < len(buffer) <= _BATCH_BYTES:
                continue
            origin = origin_of(location)
            sizes[origin] = sizes.get(origin, _BATCH_BYTES) + len(buffer)
            if sizes[origin] > _BATCH_BYTES:
                chunks.setdefault(origin, []).append([])
                sizes[origin] = len(buffer)
            chunks[origin][-1].append((i, location))
        filled: set[int] = set()
        at_once = asyncio.Semaphore(_BATCHES_AT_ONCE)
        async with self._at_work(), asyncio.TaskGroup() as tasks:
            for origin, several in chunks.items():
                for places in several:
                    if len(places) >= LEAST_RANGES:
                        tasks.create_task(self._batch(origin, places, wanted, filled, at_once))
        return filled

    async def _batch(
        self,
        origin: str,
        places: Sequence[tuple[int, Location]],
        wanted: Sequence[tuple[str, int, bytearray]],
        filled: set[int],
        at_once: asyncio.Semaphore,
    ) -> None:
        """Fill those buffers of ``wanted`` that are at ``places`` (numbers and locations), by one request."""
        self._before_request()
        ranges = [(location, wanted[i][1], wanted[i][1] + len(wanted[i][2])) for i, location in places]
        async with at_once, self._limits.permit(origin, sum(stop - start for _, start, stop in ranges)) as permit:
            began, backend = self._loop.time(), self._resources.backends.of(places[0][1])
            read = await backend.batch(ranges)
            permit.settle(sum(len(view) for view in read or () if view is not None))
            if read is None:
                return
            for (i, _), view in zip(places, read, strict=True):
                if view is not None:
                    wanted[i][2][:] = view
                    filled.add(i)
        traffic = self._read.counters.traffic.of(origin)
        traffic.requests += 1
        traffic.bytes += permit.received_bytes or 0
        traffic.seconds.add(self._loop.time() - began)

    @contextlib.asynccontextmanager
    async def stream(self, url: str) -> AsyncIterator[tuple[Facts, AsyncIterator[memoryview]]]:
        """Read an object in order, also one that cannot be read otherwise. A piece is valid until the next one is
        requested; the first has come when this gives the facts."""
        self._before_request()
        obj = self._objects.fresh(url)
        obj.in_order, obj.streamed = True, obj.state.location.in_order
        origin = self._origin(obj)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(obj.state.close)
            async with self._at_work():
                await origin.fetcher.ready(obj)
                permit = await stack.enter_async_context(self._limits.permit(origin.name, 0, origin.room))
            pieces = await stack.enter_async_context(contextlib.aclosing(self._pieces(obj, origin, permit)))
            first = await anext(pieces, None)
            yield facts_of(obj), _beginning(first, pieces)

    async def entries(self, url: str) -> AsyncIterator[Entry]:
        """Yield the entries of the folder ``url``, which ends with "/": objects, and folders one level down, with
        retries. UrlError where its store lists nothing."""
        self._before_request()
        folder, seen = Folder(url, self._resources.backends, self._options, self._config.retry), set[str]()
        while not self._closed:
            try:
                async for name, entry in folder.names():
                    if name not in seen:
                        seen.add(name)
                        yield entry
                return
            except WdsError:
                raise
            except Exception as exn:
                await folder.again(exn)

    async def close(self) -> None:
        """End what is read with `ReaderClosed`, and let go of everything; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watch.cancel()
        own = asyncio.current_task()
        for task in self._reading - {own, None}:
            cast("asyncio.Task[Any]", task).cancel()
        while self._reading - {own}:  # noqa: ASYNC110 (turns of the loop; a thread that reads a file is waited for)
            await asyncio.sleep(_TURN_S)
        self._objects.close()
        for origin in self._origins.values():
            await origin.fetcher.end()
        await self._resources.close_backends(_END_WITHIN_S)
        await self._resources.close()
        self._memory.close()

    @contextlib.asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        """Have `close` cancel what runs within."""
        task = asyncio.current_task()
        assert task is not None
        if self._closed:
            raise ReaderClosed("the fetcher of ranges was closed")
        self._reading.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._closed and task.uncancel() == 0:  # else it was cancelled by others too
                raise ReaderClosed("the fetcher of ranges was closed") from None
            raise
        finally:
            self._reading.discard(task)

    async def _filled(self, obj: OpenObject, start: int, stop: int) -> tuple[Slab, int]:
        """Return the bytes in a slab of their own, and their number."""
        if obj.facts is not None and obj.size is not None:
            stop = min(stop, obj.size)
        origin = self._origin(obj)
        await origin.fetcher.ready(obj)
        async with self._limits.permit(origin.name, max(0, stop - start), origin.room) as permit:
            slab = await self._memory.take(stop - start)
            part = Part(obj, start, stop, slab)
            try:
                await origin.fetch(part)
            except BaseException:
                self._memory.give_back(slab)
                raise
            finally:
                permit.settle(part.filled)
        return slab, part.filled

    async def _pieces(self, obj: OpenObject, origin: _OriginFetcher, permit: Permit) -> AsyncGenerator[memoryview]:
        """Yield the object from its start to its end; each piece has memory of its own as long as it is in use."""
        position, last = 0, False
        while not last and (obj.streamed or obj.size is None or position < obj.size):
            async with self._at_work():
                slab = await self._memory.take(min(_PIECE_BYTES, self._memory.largest_bytes))
            view = memoryview(b"")
            try:
                stop = position + slab.size if obj.size is None else min(position + slab.size, obj.size)
                part = Part(obj, position, stop, slab)
                async with self._at_work():
                    last = await origin.fetch(part)
                    await self._limits.more(origin.name, part.filled)
                position += part.filled
                view = slab.view[: part.filled]
                if part.filled or not position:
                    yield view
            finally:
                self._memory.give_back(slab, view)
        if obj.state.end_in_doubt:  # who gets all of it, with its length, would take it for whole
            shown = redact(obj.url)
            raise TruncatedShard(
                f"{shown} at byte {position}: the body has no length, and ended without the end of its archive at each "
                "attempt. Have it sent with a Content-Length, or write it with its end (two blocks of zeros)."
            ).at(shown, position)

    def _origin(self, obj: OpenObject) -> _OriginFetcher:
        name = self._read.counters.traffic.of(origin_of(obj.state.location)).name
        if name not in self._origins:
            self._origins[name] = _OriginFetcher(name, self._resources, self._read)
        return self._origins[name]

    def _tidy(self) -> None:
        """Forget objects without readers, and lend memory that came back late."""
        self._objects.expire(self._loop.time())
        self._memory.lend()


async def _beginning(first: memoryview | None, rest: AsyncIterator[memoryview]) -> AsyncIterator[memoryview]:
    if first is not None and len(first):
        yield first
    async for piece in rest:
        yield piece
