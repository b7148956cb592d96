"""Hedged requests: request the missing bytes of a part a second time when it takes much longer than its peers ("The
Tail at Scale", Dean and Barroso, 2013), within a token bucket per origin. When a part is late, and what it may cost:
``docs/design.md``, section 3.

**A slab has one writer.** The hedge writes nothing before its head has come and was judged as any other; then the first
connection is aborted, and the hedge goes on with the bytes of the same object. Should it fail too, the part goes on by
the ordinary retries, from the furthest byte.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from wds_async.config import HEDGE_START_BYTES, TransferConfig
from wds_async.redact import redact
from wds_async.transfer.connection import Connection, ConnectionBroken, Head, Origin
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.part_request import PartRequest
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import OriginTraffic
from wds_async.transfer.window import Part, Shard

__all__ = ["Hedge", "HedgingController", "OriginHistory", "history_of"]

logger = logging.getLogger("wds_async")

_CHECK_EVERY_S = (0.005, 0.1)
"""Between two checks of the requests in flight, at least and at most."""
_SAMPLES = 128
_MIN_SAMPLES = 16
"""Good parts from which a tail is measured; with fewer of them the limits are wider."""
_PERCENTILE = 0.95
_DELAY_FACTOR, _HURRIED_FACTOR = 2.0, 1.2
_MIN_DELAY_S = 0.02
_MEDIAN_FACTOR, _MIN_FIRST_DELAY_S = 4.0, 0.25
_SILENT_S = 1.5
"""Silence that is too long at any origin: the limit without samples, and worth one hedge at a time also where the
bucket is empty."""
_PACED_BYTES = 256 << 10
"""Fewer bytes do not show a connection's pace."""
_MIN_HEDGES, _HEDGED_SHARE = 4, 8
"""Hedges at once: four, or an eighth of the parts in flight. Where more are late, it is the store that is slow."""
_MAX_TOKENS = 32 << 20
_MIN_COST_SHARE = 8
"""A hedge costs at least this part of the bytes it requests: that bounds the requests too."""
_MAX_FAILURES = 3
"""Hedges that fail in a row before only one at a time is tried, each after a pause; a refusal counts as so many."""
_PAUSE_S = 0.5
_PUSHBACK = frozenset({429, 503})
_MAX_ORIGINS = 256


class _HedgeUnneeded(Exception):
    """The primary request does well by now, or has ended."""


class _HedgeRefused(Exception):
    """The answer to the hedge is not the range."""


class TypicalLatency(NamedTuple):
    """Seconds that all but the slowest good answers of an origin take; infinite where too little is measured."""

    head_s: float
    """From the request to the head."""
    gap_s: float
    """The longest silence within the body."""
    s_per_byte: float
    """Pace of the body."""

    def whole_s(self, size_bytes: int) -> float:
        """Return the seconds for a part of so many bytes."""
        return self.head_s + max(size_bytes, _PACED_BYTES) * self.s_per_byte

    def late_at(self, request: PartRequest, connection: Connection, factor: float) -> float:
        """Return when ``request`` has taken ``factor`` times the typical time, if nothing more comes."""
        if request.waits:
            return math.inf
        whole_s = max(_MIN_DELAY_S, factor * self.whole_s(request.missing_bytes))
        return min(self.silent_at(request, connection, factor), request.sent_at + whole_s)

    def silent_at(self, request: PartRequest, connection: Connection, factor: float) -> float:
        """Return the same for the silence alone."""
        return connection.moved_at + max(_MIN_DELAY_S, factor * (self.gap_s if request.headed_at else self.head_s))

    def ends_soon(self, request: PartRequest, received_bytes: int, now: float) -> bool:
        """Return whether ``request``, at its pace until now, brings the rest sooner than a new one would. One that has
        taken three times as long as is typical has lost that pace."""
        took_s, missing_bytes = now - request.sent_at, request.missing_bytes - received_bytes
        rest_s = missing_bytes * took_s / received_bytes if received_bytes else math.inf
        return rest_s < self.whole_s(missing_bytes) and took_s < 3 * self.whole_s(request.missing_bytes)


class OriginHistory:
    """Recent latencies of one origin, and the token bucket of its hedges; one for the life of the process."""

    def __init__(self, tokens: int = HEDGE_START_BYTES) -> None:
        self.tokens = float(tokens)
        """Bytes that hedges may still bring twice; never more than 32 MiB."""
        self.paused_until = -math.inf
        self._failures = 0
        self._head_s: deque[float] = deque(maxlen=_SAMPLES)
        self._gap_s: deque[float] = deque(maxlen=_SAMPLES)
        self._s_per_byte: deque[float] = deque(maxlen=_SAMPLES)
        self._typical: TypicalLatency | None = None

    def add(self, received_bytes: int, head_s: float, body_s: float, gap_s: float) -> None:
        """Count a good answer: the time to its head, then to its last byte, and the longest silence in its body."""
        self._head_s.append(head_s)
        self._gap_s.append(gap_s)
        self._s_per_byte.append(body_s / max(received_bytes, _PACED_BYTES))
        self._typical = None

    def add_tokens(self, count: float) -> None:
        """Put tokens into the bucket."""
        self.tokens = min(_MAX_TOKENS, self.tokens + count)

    @property
    def typical(self) -> TypicalLatency:
        """Latency of the last good answers."""
        if self._typical is None:
            if not self._head_s:
                self._typical = TypicalLatency(_SILENT_S, _SILENT_S, math.inf)
            elif len(self._head_s) < _MIN_SAMPLES:
                silent_s = max(_MIN_FIRST_DELAY_S, _MEDIAN_FACTOR * statistics.median(self._head_s))
                self._typical = TypicalLatency(silent_s, silent_s, math.inf)
            else:
                index, samples = (
                    int(_PERCENTILE * (len(self._head_s) - 1)),
                    (self._head_s, self._gap_s, self._s_per_byte),
                )
                self._typical = TypicalLatency(*(sorted(values)[index] for values in samples))
        return self._typical

    @property
    def is_open(self) -> bool:
        """True if hedges have failed lately and none has succeeded since: until one does, only one at a time is
        allowed.
        """
        return self._failures >= _MAX_FAILURES

    def record_success(self) -> None:
        """Record that a hedge has replaced its primary request."""
        self._failures = 0

    def record_failure(self, now: float, *, pushback: bool) -> None:
        """Record that a hedge failed; ``pushback``: the store asks for fewer requests."""
        self._failures += _MAX_FAILURES if pushback else 1
        if self.is_open:
            self.paused_until = now + _PAUSE_S


_histories: dict[Origin, OriginHistory] = {}


def history_of(origin: Origin, tokens: int = HEDGE_START_BYTES) -> OriginHistory:
    """Return the history of ``origin`` in this process, a new one with ``tokens``; those of the last 256 origins are
    kept. A forked child starts anew."""
    history = _histories.get(origin)
    if history is None:
        for oldest in list(_histories)[: len(_histories) + 1 - _MAX_ORIGINS]:
            _histories.pop(oldest, None)
        history = _histories.setdefault(origin, OriginHistory(tokens))
    return history


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_histories.clear)


class Hedge:
    """Second request for the missing bytes of ``primary``, from ``offset`` on, which replaces it once its head has
    come."""

    def __init__(self, primary: PartRequest, connection: Connection, offset: int, history: OriginHistory) -> None:
        self.request = PartRequest(primary.request, primary.part, primary.learn, offset)
        self.reserved_bytes = self.request.missing_bytes
        self.doubled_bytes = 0
        """Bytes of them that the primary request had brought when it was replaced."""
        self.cancelled = False
        self.task: asyncio.Task[None] | None = None
        self.primary = primary
        self.history = history
        self.connection: Connection | None = None
        """Set once it is sent."""
        self.traffic: OriginTraffic | None = primary.part.shard.state.traffic
        self._primary_connection = connection
        self._received = 0

    @property
    def won(self) -> bool:
        """True if it has replaced the primary request."""
        return self.primary.successor is self

    async def run(self, pool: ConnectionPool) -> None:
        """Send the request, and receive into the slab. Raises what went wrong, also after it has won."""
        request, clock = self.request, asyncio.get_running_loop().time
        raw = request.encode()
        for fresh in (False, True):
            async with pool.connection(request.origin, fresh=fresh) as connection:
                self.connection, request.sent_at = connection, clock()
                try:
                    head = await connection.exchange(raw, self._accept)
                    if request.waits:
                        await request.receive(connection)
                    else:
                        head_s, body_s = request.headed_at - request.sent_at, clock() - request.headed_at
                        self.history.add(connection.received, head_s, body_s, connection.gap_s)
                    if not head.keep_alive:
                        connection.abort()
                except ConnectionBroken:
                    if request.status or connection.exchanges == 1:
                        raise
                    connection.abort()
                    continue
                finally:
                    self._received = connection.received if self.won else 0
            return

    async def result(self) -> None:
        """Return once it has ended, and the part counts its bytes; raise what went wrong."""
        part = self.request.part
        assert self.task is not None
        try:
            await self.task  # a cancelled waiter cancels it, and goes on when it has ended
        finally:
            part.filled = max(part.filled, self.request.offset + self._received)

    def abort(self) -> None:
        """End it now; after this no byte is written."""
        self.cancelled = True
        if self.task is None or self.task.done():  # the connection may have another part by now
            return
        if self.connection is not None:
            self.connection.abort()
        self.task.cancel()

    def _accept(self, head: Head) -> memoryview:
        primary, part = self.primary, self.request.part
        if self.cancelled or part.dropped or primary.waits:
            raise _HedgeUnneeded("the primary request has ended")
        if head.status != 206:
            self.request.status = head.status
            raise _HedgeRefused(f"the server answered {head.status}")
        into = self.request.accept(head)
        doubled = part.filled - self.request.offset + (self._primary_connection.received if primary.into_slab else 0)
        if 2 * doubled > self.reserved_bytes:
            raise _HedgeUnneeded("the primary request does well by now")
        self.doubled_bytes = max(0, doubled)
        primary.replace(self)
        self._primary_connection.abort()
        return into


class HedgingController:
    """The requests in flight of one reader, and hedges of those that are late. ``healthy(shard)``: its store may get
    more requests than are needed. ``on_late()`` is called for each hedge that wins. While ``hurried()``, parts are late
    sooner: the consumer waits, or faults came lately."""

    def __init__(
        self,
        pool: ConnectionPool,
        config: TransferConfig,
        counters: Counters,
        healthy: Callable[[Shard], bool],
        on_late: Callable[[], None],
        hurried: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._config = config
        self._counters = counters
        self._healthy = healthy
        self._on_late = on_late
        self._hurried = hurried
        self._in_flight: dict[PartRequest, tuple[Connection, OriginHistory]] = {}
        self._hedges: dict[PartRequest, Hedge] = {}
        self._tasks: dict[asyncio.Task[None], Hedge] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._check_at = 0.0

    def started(self, request: PartRequest, connection: Connection, now: float) -> None:
        """Watch a request that is sent over ``connection``."""
        self._in_flight[request] = connection, history_of(request.origin, self._config.hedge_start_bytes)
        if self._timer is None:
            self._schedule(now + _MIN_DELAY_S)

    def ended(self, request: PartRequest) -> None:
        """Forget a request that has ended, well or not, and abort its hedge unless that has won."""
        self._in_flight.pop(request, None)
        hedge = self._hedges.pop(request, None) if self._hedges else None
        if hedge is not None and not hedge.won:
            hedge.abort()

    def succeeded(self, request: PartRequest, connection: Connection, now: float) -> None:
        """Count the latency of a request that was answered well, and whole."""
        head_s, body_s = request.headed_at - request.sent_at, now - request.headed_at
        history = history_of(request.origin, self._config.hedge_start_bytes)
        history.add_tokens(self._config.hedge_share * connection.received)
        if request.waited:  # for memory, which says nothing of the server
            return
        history.add(connection.received, head_s, body_s, connection.gap_s)
        self._counters.add("head_s", head_s)
        self._counters.add("body_s", body_s)

    async def end(self) -> None:
        """Return when no hedge is in flight."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _schedule(self, at: float) -> None:
        self._check_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._check)

    def _check(self) -> None:
        """Hedge requests that are late by now, end hedges that are, and come back when the next one will be."""
        self._timer = None
        if not self._in_flight and not self._tasks:
            return
        now, (least, most) = asyncio.get_running_loop().time(), _CHECK_EVERY_S
        delayed = now - self._check_at >= 2 * least  # this thread was held up: then all seems late
        following = now + most
        factor = _HURRIED_FACTOR if self._hurried() else _DELAY_FACTOR
        for request, (connection, history) in list(self._in_flight.items()):
            late_at = history.typical.late_at(request, connection, factor)
            following = min(following, late_at)
            if late_at <= now and not delayed and self._should_hedge(request, connection, history, now, factor):
                self._start(request, connection, history)
        for task, hedge in list(self._tasks.items()):
            if hedge.connection is None or task.done():  # then the connection may have another part by now
                continue
            late_at = hedge.history.typical.late_at(hedge.request, hedge.connection, factor)
            following = min(following, late_at)
            if late_at <= now and not delayed and not hedge.connection.look_closely():
                hedge.connection.stall("a second attempt was late too")
        self._schedule(max(now + least, following))

    def _should_hedge(
        self, request: PartRequest, connection: Connection, history: OriginHistory, now: float, factor: float
    ) -> bool:
        """Return whether a hedge is allowed, pays, and has its tokens."""
        if request in self._hedges or not self._allowed(request.part, history, now):
            return False
        # What lies in the kernel counts: it is looked at closely first, and decided at the next check.
        if connection.look_closely():
            return False
        received, typical = connection.received if request.into_slab else 0, history.typical
        missing = request.missing_bytes - received
        silent = now >= typical.silent_at(request, connection, factor)
        if missing <= 0 or (not silent and typical.ends_soon(request, received, now)):
            return False
        enough = missing <= history.tokens
        if enough and not history.is_open:
            return True
        # One at a time, also without tokens, a connection may be replaced that is silent beyond doubt.
        alone = not any(hedge.history is history for hedge in self._tasks.values())
        return alone and (enough or now - connection.moved_at >= _SILENT_S)

    def _allowed(self, part: Part, history: OriginHistory, now: float) -> bool:
        shard = part.shard
        # Or it may be, before the size is known.
        behind = part.start >= (shard.start + 1 if shard.size is None else shard.size)
        if part.dropped or shard.streamed or behind:
            return False
        most = max(_MIN_HEDGES, len(self._in_flight) // _HEDGED_SHARE)
        if len(self._tasks) >= most or self._pool.busy >= self._config.connections:
            self._on_late()  # the window leaves some of the connections for this, from now on
            return False
        return now >= history.paused_until and self._healthy(shard)

    def _start(self, request: PartRequest, connection: Connection, history: OriginHistory) -> None:
        received = connection.received if request.into_slab else 0
        hedge = self._hedges[request] = Hedge(request, connection, request.offset + received, history)
        history.add_tokens(-hedge.reserved_bytes)
        self._counters.add("hedges")
        self._counters.add("requests")
        if hedge.traffic is not None:
            hedge.traffic.hedges += 1
            hedge.traffic.requests += 1
            hedge.traffic.connections += 1
        hedge.task = asyncio.get_running_loop().create_task(hedge.run(self._pool))
        self._tasks[hedge.task] = hedge
        hedge.task.add_done_callback(lambda task: self._finish(hedge, task))
        url, at = redact(request.part.shard.url), request.part.start + hedge.request.offset
        logger.debug("%s at byte %d: late; requested a second time", url, at)

    def _finish(self, hedge: Hedge, task: asyncio.Task[None]) -> None:
        """Count a hedge, and charge what it has cost in the place of what was reserved."""
        del self._tasks[task]
        now, history, traffic, won = asyncio.get_running_loop().time(), hedge.history, hedge.traffic, hedge.won
        exn = None if task.cancelled() else task.exception()
        sent = hedge.connection is not None
        cost = max(hedge.doubled_bytes, hedge.reserved_bytes // _MIN_COST_SHARE) if sent else 0
        history.add_tokens(hedge.reserved_bytes - cost)
        if traffic is not None:
            traffic.connections -= 1
            if won and exn is None and not task.cancelled() and not hedge.request.waited:
                traffic.seconds.add(now - hedge.primary.sent_at)
        if won:
            history.record_success()
            self._on_late()
            self._counters.add("hedged_bytes", hedge.doubled_bytes)
            self._counters.add("wire_bytes", hedge.doubled_bytes)
            if traffic is not None:
                traffic.hedged_bytes += hedge.doubled_bytes
                traffic.bytes += hedge.doubled_bytes
            return
        if self._hedges.get(hedge.primary) is hedge:
            del self._hedges[hedge.primary]  # another may follow
        if exn is not None and not isinstance(exn, _HedgeUnneeded):
            history.record_failure(now, pushback=hedge.request.status in _PUSHBACK)
