"""Fetching of one part: its attempts, each by the access that the backend gives (see `retry` for what lies between)."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.storage.base import (
    Access,
    Backend,
    Contradiction,
    CopiedFile,
    LocalFile,
    Location,
    Ranges,
    RefusedAnswer,
    Request,
    Stream,
)
from wds_async.storage.growing import GrowingStream, StoodStill
from wds_async.storage.handed_files import HandedFile
from wds_async.transfer.circuit_breaker import CircuitBreaker
from wds_async.transfer.concurrency import Concurrency
from wds_async.transfer.connection import Origin
from wds_async.transfer.files import FileReplaced
from wds_async.transfer.hedging import HedgingController
from wds_async.transfer.options import ReadOptions
from wds_async.transfer.part_request import (
    NoSuchRange,
    RangesIgnored,
    Redirected,
    follow,
    get_part,
    wait_for_memory,
)
from wds_async.transfer.resources import Resources
from wds_async.transfer.retry import Attempts, RetryController
from wds_async.transfer.shard_state import ShardState, ignore_result
from wds_async.transfer.streams import DirectStream, span_behind_end
from wds_async.transfer.traffic import FILES
from wds_async.transfer.window import Part, Shard

__all__ = ["FetchPlan", "Fetcher", "Unranged"]

logger = logging.getLogger("wds_async")

_ANSWERS_AT_MOST = 20
_DOUBTS = 2  # answers without a range from a server that gives ranges, before its word is taken for it
_UNREADY_WAIT_S = 0.02
_MOVED_AWAY = frozenset({401, 403, 404, 410})


class _Unready(Exception):
    """The part must wait for an earlier one of its shard."""


class Unranged(Exception):
    """The object was requested in ranges and can be read in order only, which its plan does not allow."""


class FetchPlan(Protocol):
    """Protocol: planner of the parts, which takes what the answers say of their shards (see `Window`)."""

    @property
    def concurrency(self) -> Concurrency: ...

    def learn(self, shard: Shard, size: int) -> None: ...

    def turn_streamed(self, part: Part) -> bool:
        """May raise `Unranged`, which ends the part."""
        ...

    def turn_ranged(self, part: Part) -> None: ...


class Fetcher:
    """Fetches the parts of one plan. ``hurried()``: the consumer is waiting right now."""

    def __init__(
        self, window: FetchPlan, resources: Resources, options: ReadOptions, *, hurried: Callable[[], bool]
    ) -> None:
        self.answering: Part | None = None
        self._window = window
        self._pool = pool = resources.connections
        self._threads = resources.threads
        self._counters = counters = options.counters
        self._hurried = hurried
        self._retry = RetryController(resources, options, window.concurrency)
        healthy, concurrency = self._retry.healthy, window.concurrency
        self._hedges = None
        if options.config.hedge_share:
            hurry = lambda: hurried() or concurrency.rough > 0  # noqa: E731
            self._hedges = HedgingController(pool, options.config, counters, healthy, concurrency.stumbled, hurry)

    async def fetch(self, part: Part, *, once: bool = False) -> bool:
        """Fill ``part``; True where a streamed shard ends behind it. Raise one error of the tree: with ``once`` that of
        the first fault; then the circuit breaker has allowed the request already."""
        if not once:
            await self.ready(part.shard)
        attempts, clock = Attempts.of(part, once=once), asyncio.get_running_loop().time
        while True:
            backed, backend = part.backed, self._retry.backend(part.shard)
            try:
                return await self._once(attempts, backend)
            except WdsError:
                self._retry.bind(part.shard.state).errors += 1
                raise
            except Unranged:
                raise
            except _Unready:  # no fault: the part before it lands some time, or ends the shard
                await asyncio.sleep(_UNREADY_WAIT_S)
            except Exception as exn:
                if part.backed and not backed:  # the wait for memory is none for the store
                    attempts.reset(clock())
                await self._retry.recover(attempts, backend, exn)

    async def ready(self, shard: Shard) -> None:
        """Return when ``shard`` may be requested: at once, unless its store is down."""
        await self._retry.wait_until_up(shard)

    def breaker(self, shard: Shard) -> CircuitBreaker | None:
        """Return the circuit breaker of the store of ``shard``; None without a server."""
        return self._retry.breaker(shard.state.location)

    async def end(self) -> None:
        """Return when no hedge is in flight; the parts have landed already."""
        if self._hedges is not None:
            await self._hedges.end()

    async def _once(self, attempts: Attempts, backend: Backend) -> bool:
        """Make one attempt, by the backend's access."""
        part, state = attempts.part, attempts.state
        attempts.begin(self._retry.bind(state))
        access = attempts.access = await state.request_access(backend)
        if part.dropped:
            return False
        match access:
            case CopiedFile() | GrowingStream() | HandedFile():
                return await self._read_copy(attempts, backend, access)
            case _ if part.shard.streamed:
                pass
            case Request():
                return await self._get(attempts, backend, access)
            case LocalFile():
                self._learn(part, access.size, access.version, {})
                return await self._read_file(part, access)
            case Ranges():
                self._retry.record_contact(attempts.location)  # the server gave the size
                return await self._read_ranges(attempts, backend, access)
        return await self._stream(backend, part, access)

    async def _read_copy(
        self, attempts: Attempts, backend: Backend, copy: CopiedFile | GrowingStream | HandedFile
    ) -> bool:
        """Read the shard from a disk cache; where that fails, the rest from the store."""
        part, state, location = attempts.part, attempts.state, attempts.location
        try:
            match copy:
                case GrowingStream():
                    return await self._stream(backend, part, copy)
                case HandedFile():
                    state.use_handed_file(copy.lose)
                    self._retry.record_contact(location)
                    self._learn(part, copy.size, copy.version, copy.fields, backend, location)
                case CopiedFile():  # its own version says nothing of the object's
                    self._learn(part, copy.size, f"{copy.size} bytes", {})
            return await self._read_file(part, copy)
        except (StoodStill, FileReplaced, OSError) as exn:
            logger.info("%s at byte %d: left its copy on disk: %s", redact(part.shard.url), attempts.position, exn)
        state.leave_copy(forget_version=isinstance(copy, CopiedFile))
        match copy:
            case GrowingStream():
                await state.close_stream()
                self._window.turn_ranged(part)
            case HandedFile():
                copy.lose()
            case CopiedFile():
                assert state.location.entry is not None
                state.location.entry.lose()
        return await self._once(attempts, backend)

    async def _read_file(self, part: Part, file: LocalFile) -> bool:
        await wait_for_memory(part)
        if part.dropped or part.start >= part.stop:
            return False
        reader = part.shard.state.file(file)
        view = part.slab.view[part.filled : part.stop - part.start]
        job = asyncio.ensure_future(self._threads.call(reader.read, view, part.start + part.filled))
        job.add_done_callback(ignore_result)
        traffic, clock = self._counters.traffic.of(FILES), asyncio.get_running_loop().time
        began = clock()
        traffic.requests += 1
        traffic.connections += 1
        try:
            await asyncio.shield(job)
        except asyncio.CancelledError:
            # The thread goes on writing to the slab: it may be given back only after that.
            await asyncio.wait([job])
            raise
        finally:
            traffic.connections -= 1
        part.filled += len(view)
        self._counters.add("wire_bytes", len(view))
        traffic.bytes += len(view)
        traffic.seconds.add(clock() - began)
        return False

    async def _read_ranges(self, attempts: Attempts, backend: Backend, ranges: Ranges) -> bool:
        part = attempts.part
        fields = getattr(ranges, "fields", {})
        self._learn(part, ranges.size, ranges.version, fields, backend, attempts.location)
        clock, traffic = asyncio.get_running_loop().time, self._retry.bind(attempts.state)
        await wait_for_memory(part)
        while not part.dropped and part.start + part.filled < part.stop:
            start, began = part.start + part.filled, clock()
            traffic.requests += 1
            traffic.connections += 1
            try:
                data = await ranges.read(start, part.stop)
            finally:
                traffic.connections -= 1
            if not 0 < len(data) <= part.stop - start:
                raise Contradiction(f"requested {part.stop - start} bytes, the filesystem gave {len(data)}")
            part.slab.view[part.filled : part.filled + len(data)] = data
            part.filled += len(data)
            self._window.concurrency.observe(len(data), clock() - began, clock())
            self._retry.record_success(part.shard)
            self._counters.add("requests")
            self._counters.add("wire_bytes", len(data))
            traffic.bytes += len(data)
            traffic.seconds.add(clock() - began)
        return False

    async def _get(self, attempts: Attempts, backend: Backend, access: Request) -> bool:
        part, state = attempts.part, attempts.state
        if part.start + part.filled >= part.stop:
            return False  # all had come when the last attempt broke
        origin = Origin.of(access.url, access.tls, access.socket)
        if state.rangeless or self._pool.rangeless(origin):
            return await self._turn_streamed(backend, part, access)
        kept, learn = state.redirected, functools.partial(self._learn, backend=backend, at=attempts.location)
        traffic, observe = self._retry.bind(state), state.observe
        assert observe is not None
        request = kept or access
        original_retried = False
        for _ in range(_ANSWERS_AT_MOST):
            before = part.filled
            self._counters.add("requests")
            traffic.requests += 1
            traffic.connections += 1
            try:
                await get_part(self._pool, request, part, learn, observe, self._hedges)
                self._retry.record_success(part.shard)
                if part.start:
                    self._pool.mark_ranged(origin)
            except Redirected as moved:
                request = follow(request, moved.location)
                state.keep_redirect(access, request)
                continue
            except RefusedAnswer as refused:
                if request is access or original_retried or refused.answer.status not in _MOVED_AWAY:
                    raise
                # The redirect's target may have expired, for all parts in flight: request the original place once.
                state.forget_redirect(kept, request)
                request, original_retried = access, True
                continue
            except NoSuchRange:
                if part.start > part.shard.start:
                    await self._size_of(part)
                    raise _Unready("it may lie behind the end") from None
                state.stream_whole()
                break
            except RangesIgnored:
                # Where ranges were given before (not only a 416), this is more likely a server's bad moment.
                gives = state.version != "" or (state.location.kind == "http" and self._pool.ranged(origin))
                if gives and attempts.history.count < _DOUBTS:
                    raise Contradiction("requested a range, the server's answer is not one") from None
                state.stream_whole()
                if part.filled == 0 and not gives and state.location.kind == "http":
                    self._pool.mark_rangeless(origin)  # a cloud's endpoint has objects of all kinds
                break
            finally:
                self._counters.add("wire_bytes", part.filled - before)
                traffic.bytes += part.filled - before
                traffic.connections -= 1
            if part.dropped or part.start + part.filled >= part.stop:
                return False
            request = replace(request, hops=()) if request.hops else request
        else:
            raise Contradiction(f"redirected or cut short more than {_ANSWERS_AT_MOST} times")
        return await self._turn_streamed(backend, part, access)

    async def _size_of(self, part: Part) -> None:
        """Wait until an earlier part has learned the size of its shard: this one may lie behind the end."""
        while part.shard.size is None and not part.dropped and not part.shard.streamed:  # noqa: ASYNC110 (it is rare)
            await asyncio.sleep(_UNREADY_WAIT_S)

    async def _turn_streamed(self, backend: Backend, part: Part, access: Access) -> bool:
        if not self._window.turn_streamed(part):
            raise _Unready("an earlier part of the shard is in flight")
        return await self._stream(backend, part, access)

    async def _stream(self, backend: Backend, part: Part, access: Access) -> bool:
        shard = part.shard
        state: ShardState = shard.state
        if not shard.streamed:
            return await self._turn_streamed(backend, part, access)
        await wait_for_memory(part)
        stream, before = state.open_stream(), part.filled
        own = isinstance(access, GrowingStream)  # another process's file, on this host
        traffic = self._counters.traffic.of(FILES) if own else self._retry.bind(state)

        def make() -> Stream:
            traffic.requests += 1
            match access:
                case Request():
                    return backend.streamed(access) if state.unframed else DirectStream(self._pool, access)
                case Stream():
                    return access
            raise TypeError(f"{type(access).__name__} cannot be read in order")

        fill = functools.partial(
            stream.fill, part, make, self._hurried, functools.partial(state.learn_of_stream, backend)
        )
        traffic.connections += 1
        try:
            return await fill()
        except RangesIgnored:  # not framed either: aiohttp reads it
            state.stream_whole(unframed=True)
            await stream.close()
            return await fill()
        finally:
            self._counters.add("wire_bytes", part.filled - before)
            traffic.bytes += part.filled - before
            traffic.connections -= 1
            if part.filled > before and not own:
                self._retry.record_contact(state.location)
                self._retry.record_success(shard)

    def _learn(
        self,
        part: Part,
        size: int,
        version: str,
        fields: Mapping[str, str],
        backend: Backend | None = None,
        at: Location | None = None,
    ) -> None:
        """Take an answer's facts of the object: see `ShardState.learn`."""
        shard = part.shard
        shard.state.learn(shard.size, size, version, fields, backend, at)
        if size <= shard.start and (size < shard.start or shard.stop is not None):
            raise span_behind_end(shard, size)
        self.answering = part
        try:
            self._window.learn(shard, size)
        finally:
            self.answering = None
