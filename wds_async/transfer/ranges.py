"""Byte ranges of any object, by the engine's way: the same backends, connections, attempts, judgement and second
attempts as a reader's, on a loop that runs already, for a process that lives long.

::

    fetcher = RangeFetcher(config, memory_bytes=64 << 20, traffic=Traffic())
    facts = await fetcher.facts("s3://bucket/x.tar")
    async with fetcher.part("s3://bucket/x.tar", 0, 2 << 20, facts) as part:
        ...  # part.view

What is learnt of an object (its request, where it was redirected to, its open file) serves all parts of it that are
read at about the same time, and is then forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

from wds_async.config import TransferConfig
from wds_async.errors import FetchTimeout, ReaderClosed, TransferError, TruncatedShard, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Entry, Guard
from wds_async.storage.listing.folders import Folder
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.transfer import window
from wds_async.transfer.concurrency import Concurrency
from wds_async.transfer.fetch import Fetcher, Unranged
from wds_async.transfer.open_objects import Facts, OpenObject, OpenObjects, facts_of
from wds_async.transfer.options import ReadOptions
from wds_async.transfer.rate_limits import OriginLimits, Permit
from wds_async.transfer.resources import Resources, why_unread
from wds_async.transfer.shard_state import ignore_result
from wds_async.transfer.slabs import LARGEST_BYTES, Lender, Slab
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import OriginTraffic, Traffic, origin_of

__all__ = ["LARGEST_PART_BYTES", "Facts", "RangeFetcher", "RangePart", "Unranged"]

LARGEST_PART_BYTES = LARGEST_BYTES
"""No part may be longer, whatever the memory."""

_PIECE_BYTES = 1 << 20
_END_WITHIN_S = 1.5
_TURN_S = 0.001


@dataclass(frozen=True, slots=True)
class RangePart:
    """Bytes of an object, valid within the ``async with``."""

    view: memoryview
    facts: Facts


class _OriginPlan:
    """Plan of one origin's parts in flight; each has its own waiter."""

    def __init__(self, config: TransferConfig) -> None:
        self.concurrency = Concurrency(config.connections, config.processes)

    def learn(self, shard: window.Shard, size: int) -> None:
        """See `Plan`. Parts behind the end are dropped without an error: their own answers say so too."""
        if shard.size is None and not shard.streamed:
            shard.size = size
        for part in shard.parts:
            part.stop = min(part.stop, size)
            part.dropped = part.dropped or part.start >= size

    def turn_streamed(self, part: window.Part) -> bool:
        """See `Plan`."""
        shard = cast(OpenObject, part.shard)
        if not shard.in_order:
            raise Unranged(f"{redact(shard.url)} can be read in order only")
        shard.streamed, shard.size = True, None
        return True

    def turn_ranged(self, part: window.Part) -> None:
        """See `Plan`; only copies in a disk cache of the reader's do that."""
        part.shard.streamed = False


class _Origin:
    """One origin, with its measured speed."""

    def __init__(self, traffic: OriginTraffic, resources: Resources, options: ReadOptions) -> None:
        self.traffic = traffic
        self.flying = 0
        self.plan = _OriginPlan(options.config)
        self.fetcher = Fetcher(self.plan, resources, options, hurried=lambda: True)

    def room(self) -> int:
        """Number of parts that may be in flight."""
        return self.plan.concurrency.room

    async def fetch(self, part: window.Part, *, once: bool = False) -> bool:
        """See `Fetcher.fetch`."""
        self.flying += 1
        self.plan.concurrency.in_flight(self.flying)
        part.shard.parts.append(part)
        try:
            return await self.fetcher.fetch(part, once=once)
        finally:
            part.shard.parts.remove(part)
            self.flying -= 1


class RangeFetcher:
    """Reads parts of objects at once, by many tasks of one loop, within ``memory_bytes`` of slabs.

    Made within a running loop, asyncio's or uvloop's. What is asked of origins is counted in ``traffic`` and bounded by
    ``limits`` (default: ``config.connections``, and no rates). ``options``: see `registry.locate`. URLs are rewritten
    as everywhere. ``guard`` judges where requests go. ``before_request`` is called before each part, facts, stream and
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
        self._memory = Lender(memory_bytes)
        self._resources = Resources(config, self._loop, guard)
        self._objects = OpenObjects(functools.partial(locate, options=options))
        self._origins: dict[str, _Origin] = {}
        self._reading: set[asyncio.Task[Any] | None] = set()
        self._closed = False
        self._watch = self._loop.create_task(self._resources.watch(self._tidy))

    @property
    def held_bytes(self) -> int:
        """Memory that parts hold now, of ``memory_bytes``."""
        return self._memory.held_bytes

    @property
    def crowded(self) -> bool:
        """Whether parts wait for the memory of others."""
        return self._memory.crowded

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return self._resources.connections.open

    def reachable(self, url: str) -> bool:
        """Whether the store of ``url`` may answer: False after three failed requests in a row, until a good answer
        (the circuit breaker is open). It does no I/O."""
        obj = self._objects.fresh(url)
        breaker = self._origin(obj).fetcher.breaker(obj)
        return breaker is None or not breaker.is_open

    async def facts(self, url: str, *, deadline_s: float | None = None) -> Facts:
        """What an object is like now: one ranged GET of its first byte. What can be read once only is not touched.

        With ``deadline_s`` one attempt is made, and FetchTimeout raised after that many seconds; while the store is
        down (see `reachable`) only the next probe goes out, and others raise TransferError at once.
        """
        self._before_request()
        obj = self._objects.fresh(url)
        if deadline_s is None:
            return await self._facts(obj, once=False)
        breaker, shown = self._origin(obj).fetcher.breaker(obj), redact(url)
        if breaker is not None and not breaker.allow_request():
            raise TransferError(f"{shown}: {breaker.name} does not answer; it is asked again within seconds").at(
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
            part = window.Part(obj, 0, 1, Slab(0, 1, memoryview(bytearray(1))))
            try:
                if not once:
                    await origin.fetcher.ready(obj)
                async with self._limits.permit(origin.traffic.name, 1, origin.room) as permit:
                    await origin.fetch(part, once=once)
                    permit.received = part.filled
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
        """Bytes ``[start, stop)`` of an object; fewer only at its end. Waits for memory, first come, first served.

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

    @contextlib.asynccontextmanager
    async def stream(self, url: str) -> AsyncIterator[tuple[Facts, AsyncIterator[memoryview]]]:
        """An object in order, also one that cannot be read otherwise. A piece is valid until the next one is asked for;
        the first has come when this gives the facts."""
        self._before_request()
        obj = self._objects.fresh(url)
        obj.in_order, obj.streamed = True, obj.state.location.in_order
        origin = self._origin(obj)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(obj.state.close)
            async with self._at_work():
                await origin.fetcher.ready(obj)
                permit = await stack.enter_async_context(self._limits.permit(origin.traffic.name, 0, origin.room))
            pieces = await stack.enter_async_context(contextlib.aclosing(self._pieces(obj, origin, permit)))
            first = await anext(pieces, None)
            yield facts_of(obj), _beginning(first, pieces)

    async def entries(self, url: str) -> AsyncIterator[Entry]:
        """What is in the folder ``url``, which ends with "/": objects, and folders one level down, tried again where
        that fails. UrlError where its store lists nothing."""
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
        async with self._limits.permit(origin.traffic.name, max(0, stop - start), origin.room) as permit:
            slab = await self._memory.take(stop - start)
            part = window.Part(obj, start, stop, slab)
            try:
                await origin.fetch(part)
            except BaseException:
                self._memory.give_back(slab)
                raise
            finally:
                permit.received = part.filled
        return slab, part.filled

    async def _pieces(self, obj: OpenObject, origin: _Origin, permit: Permit) -> AsyncGenerator[memoryview]:
        """The object from its start to its end, each piece in memory of its own as long as it is looked at."""
        position, last = 0, False
        while not last and (obj.streamed or obj.size is None or position < obj.size):
            async with self._at_work():
                slab = await self._memory.take(min(_PIECE_BYTES, self._memory.largest_bytes))
            view = memoryview(b"")
            try:
                stop = position + slab.size if obj.size is None else min(position + slab.size, obj.size)
                part = window.Part(obj, position, stop, slab)
                async with self._at_work():
                    last = await origin.fetch(part)
                    await self._limits.more(origin.traffic.name, part.filled)
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

    def _origin(self, obj: OpenObject) -> _Origin:
        if obj.origin is None:
            traffic = self._read.counters.traffic.of(origin_of(obj.state.location))
            if traffic.name not in self._origins:
                self._origins[traffic.name] = _Origin(
                    traffic, self._resources, ReadOptions(config=self._config, counters=self._read.counters)
                )
            obj.origin = self._origins[traffic.name]
        return cast(_Origin, obj.origin)

    def _tidy(self) -> None:
        """Forget objects without readers, and lend memory that came back late."""
        self._objects.look(self._loop.time())
        self._memory.look()


async def _beginning(first: memoryview | None, rest: AsyncIterator[memoryview]) -> AsyncIterator[memoryview]:
    if first is not None and len(first):
        yield first
    async for piece in rest:
        yield piece
