"""Hedged requests: ask a second time for the missing bytes of a part that takes much longer than its peers.

Only the slow tail is worth that ("The Tail at Scale", Dean and Barroso, 2013). A part is late once its connection has
been silent for longer than is usual (before the head of its answer, or between two arrivals of its body), or once the
whole takes longer: 1.2 times the 95th percentile while the consumer waits or faults came lately, 2 times otherwise.
What is usual is learned per origin and kept for the life of the process (`OriginHistory`), so a new epoch starts with
what the last one learned. Of an origin of which nothing is known, 1.5 s without a byte are late.

What hedges may cost is a token bucket per origin: `TransferConfig.hedge_share` of the bytes that are read, and 16 MiB
to start with. A silent connection brings nothing, so replacing it costs next to nothing. Hedges that fail are followed
by one at a time (a circuit breaker), and few are made at once, so an overloaded store is not asked for more.

**A slab has one writer.** The hedge writes nothing before its head has come and was judged as any other; then the first
connection is aborted, after which it writes no byte, and the hedge goes on. What both have written are the same bytes,
since the head named the same object. The first attempt waits for its successor; should that fail too, the part goes on
by the ordinary retries, from the furthest byte.
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

from wds_async.config import TransferConfig
from wds_async.redact import redact
from wds_async.transfer.connection import Connection, ConnectionBroken, Head, Origin
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.part_request import PartAnswer
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import OriginTraffic
from wds_async.transfer.window import Part, Shard

__all__ = ["Hedge", "Hedges", "OriginHistory", "history_of"]

logger = logging.getLogger("wds_async")

_LOOK_S = (0.005, 0.1)
"""Between two looks at the parts in flight, at least and at most."""
_SAMPLES = 128
_ENOUGH = 16
"""Good parts from which a tail can be told; with fewer of them the limits are wider."""
_TAIL = 0.95
_TIMES_THE_TAIL = 2.0
_TIMES_IF_HURRIED = 1.2
_LEAST_S = 0.02
_TIMES_THE_MEDIAN = 4.0
_LEAST_AT_FIRST_S = 0.25
_SILENT_S = 1.5
"""Silence that is too long whatever is usual: the limit while nothing is known, and worth one hedge at a time also
where the bucket is empty."""
_PACED_BYTES = 256 << 10
"""What comes in fewer bytes says nothing of a connection's pace."""
_AT_ONCE = (4, 8)
"""Hedges at once: four, or an eighth of the parts in flight. Where more are late, it is the store that is slow."""
_CREDIT_BYTES = 16 << 20
_MOST_CREDIT_BYTES = 32 << 20
_REQUEST_SHARE = 8
"""A hedge costs at least this part of the bytes it asks for: that bounds the requests too."""
_FAILURES = 3
"""Hedges that fail in a row before only one at a time is tried, each after a pause; a refusal counts as so many."""
_PAUSE_S = 0.5
_TOO_MUCH = frozenset({429, 503})
_MOST_ORIGINS = 256


class _GaveWay(Exception):
    """The hedge is not needed any more."""


class _Refused(Exception):
    """The server answered the hedge with something else than the range."""


class Usual(NamedTuple):
    """How long all but the slowest good answers of an origin take, in seconds; infinite where too little is known."""

    head_s: float
    """From the request to the head."""
    gap_s: float
    """The longest silence within the body."""
    s_per_byte: float
    """Of the body."""

    def whole_s(self, size_bytes: int) -> float:
        """A part of so many bytes."""
        return self.head_s + max(size_bytes, _PACED_BYTES) * self.s_per_byte

    def late_at(self, answer: PartAnswer, connection: Connection, times: float) -> float:
        """When ``answer`` has taken so many ``times`` the usual, if nothing more comes over ``connection``."""
        if answer.waits:
            return math.inf
        whole_s = max(_LEAST_S, times * self.whole_s(answer.missing_bytes))
        return min(self.silent_at(answer, connection, times), answer.asked_at + whole_s)

    def silent_at(self, answer: PartAnswer, connection: Connection, times: float) -> float:
        """The same for the silence alone."""
        return connection.moved_at + max(_LEAST_S, times * (self.gap_s if answer.headed_at else self.head_s))

    def ends_soon(self, answer: PartAnswer, come_bytes: int, now: float) -> bool:
        """Whether ``answer``, at its pace until now, brings the rest sooner than a new request would. One that has
        taken three times as long as usual has lost that pace."""
        took_s, missing_bytes = now - answer.asked_at, answer.missing_bytes - come_bytes
        rest_s = missing_bytes * took_s / come_bytes if come_bytes else math.inf
        return rest_s < self.whole_s(missing_bytes) and took_s < 3 * self.whole_s(answer.missing_bytes)


class OriginHistory:
    """What this process knows of one origin: how long its good answers took lately, and what hedges may cost."""

    def __init__(self) -> None:
        self.credit_bytes = float(_CREDIT_BYTES)
        """What hedges may still bring twice; never more than 32 MiB."""
        self.paused_until = -math.inf
        self._failures = 0
        self._head_s: deque[float] = deque(maxlen=_SAMPLES)
        self._gap_s: deque[float] = deque(maxlen=_SAMPLES)
        self._s_per_byte: deque[float] = deque(maxlen=_SAMPLES)
        self._usual: Usual | None = None

    def add(self, received_bytes: int, head_s: float, body_s: float, gap_s: float) -> None:
        """Count a good answer: the time to its head, then to its last byte, and the longest silence in its body."""
        self._head_s.append(head_s)
        self._gap_s.append(gap_s)
        self._s_per_byte.append(body_s / max(received_bytes, _PACED_BYTES))
        self._usual = None

    def earn(self, count: float) -> None:
        """Raise the credit."""
        self.credit_bytes = min(_MOST_CREDIT_BYTES, self.credit_bytes + count)

    @property
    def usual(self) -> Usual:
        """What the last good answers took."""
        if self._usual is None:
            self._usual = self._measure()
        return self._usual

    @property
    def doubtful(self) -> bool:
        """Whether hedges have failed lately, and none has succeeded since: one at a time, until one does."""
        return self._failures >= _FAILURES

    def succeeded(self) -> None:
        """A hedge took its part over."""
        self._failures = 0

    def failed(self, now: float, *, refused: bool) -> None:
        """A hedge failed; ``refused``: the store asked for fewer requests."""
        self._failures += _FAILURES if refused else 1
        if self.doubtful:
            self.paused_until = now + _PAUSE_S

    def _measure(self) -> Usual:
        if not self._head_s:
            return Usual(_SILENT_S, _SILENT_S, math.inf)
        if len(self._head_s) < _ENOUGH:
            silent_s = max(_LEAST_AT_FIRST_S, _TIMES_THE_MEDIAN * statistics.median(self._head_s))
            return Usual(silent_s, silent_s, math.inf)
        return Usual(_tail(self._head_s), _tail(self._gap_s), _tail(self._s_per_byte))


def _tail(values: deque[float]) -> float:
    return sorted(values)[int(_TAIL * (len(values) - 1))]


_histories: dict[Origin, OriginHistory] = {}


def history_of(origin: Origin) -> OriginHistory:
    """The history of ``origin`` in this process; those of the last 256 origins are kept. A forked child starts anew."""
    history = _histories.get(origin)
    if history is None:
        for oldest in list(_histories)[: len(_histories) + 1 - _MOST_ORIGINS]:
            _histories.pop(oldest, None)
        history = _histories.setdefault(origin, OriginHistory())
    return history


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_histories.clear)


class Hedge:
    """The second attempt at one part: at its bytes from ``judge.offset`` on, once it has a head in the place of
    ``first``."""

    def __init__(self, first: PartAnswer, connection: Connection, offset: int, history: OriginHistory) -> None:
        self.judge = PartAnswer(first.request, first.part, first.learn, offset)
        self.missing_bytes = self.judge.missing_bytes
        self.doubled_bytes = 0
        """What the first one had brought of them when it was replaced."""
        self.over = False
        """Its result is not needed any more."""
        self.task: asyncio.Task[None] | None = None
        self.first = first
        self.history = history
        self.connection: Connection | None = None
        """Over which it was sent, None before that."""
        self.traffic: OriginTraffic | None = first.part.shard.state.traffic
        self._slow = connection
        self._received = 0

    @property
    def leads(self) -> bool:
        """Whether it has taken the part over."""
        return self.first.successor is self

    async def run(self, pool: ConnectionPool) -> None:
        """Ask, and receive into the slab. Raises what went wrong, with or without having taken over."""
        raw = self.judge.request_bytes()
        for fresh in (False, True):
            async with pool.connection(self.judge.origin, fresh=fresh) as connection:
                self.connection, self.judge.asked_at = connection, asyncio.get_running_loop().time()
                try:
                    head = await connection.exchange(raw, self._accept)
                    if self.judge.waits:
                        await self.judge.receive(connection)
                    else:
                        self._learn(connection)
                    if not head.keep_alive:
                        connection.abort()
                except ConnectionBroken:
                    if self.judge.status or connection.exchanges == 1:
                        raise
                    connection.abort()
                    continue
                finally:
                    self._received = connection.received if self.leads else 0
            return

    async def result(self) -> None:
        """See `Successor`."""
        part = self.judge.part
        assert self.task is not None
        try:
            await self.task  # who is cancelled here cancels it, and comes to himself when it has ended
        finally:
            part.filled = max(part.filled, self.judge.offset + self._received)

    def give_up(self) -> None:
        """End it, late as it is: another may do better."""
        assert self.connection is not None
        if not self.connection.look_closely():
            self.connection.stall("a second attempt was late too")

    def abort(self) -> None:
        """See `Successor`."""
        self.over = True
        if self.task is None or self.task.done():  # the connection may have another part by now
            return
        if self.connection is not None:
            self.connection.abort()
        self.task.cancel()

    def settle(self, now: float, *, failed: bool) -> None:
        """Charge what it has cost in the place of what was reserved."""
        cost = 0 if self.connection is None else max(self.doubled_bytes, self.missing_bytes // _REQUEST_SHARE)
        self.history.earn(self.missing_bytes - cost)
        if self.leads:
            self.history.succeeded()
        elif failed:
            self.history.failed(now, refused=self.judge.status in _TOO_MUCH)

    def _learn(self, connection: Connection) -> None:
        judge, now = self.judge, asyncio.get_running_loop().time()
        head_s, body_s = judge.headed_at - judge.asked_at, now - judge.headed_at
        self.history.add(connection.received, head_s, body_s, connection.gap_s)

    def _accept(self, head: Head) -> memoryview:
        first, part = self.first, self.judge.part
        if self.over or part.dropped or first.waits:
            raise _GaveWay("it is not needed any more")
        if head.status != 206:
            self.judge.status = head.status
            raise _Refused(f"the server answered {head.status}")
        into = self.judge.accept(head)
        doubled = part.filled - self.judge.offset + (self._slow.received if first.into_slab else 0)
        if 2 * doubled > self.missing_bytes:
            raise _GaveWay("the first attempt goes well by now")
        self.doubled_bytes = max(0, doubled)
        first.successor = self
        self._slow.abort()
        return into


class Hedges:
    """The flying parts of one reader, and the second attempts at those that are late. ``calm(shard)`` says whether its
    store may be asked for more than is needed; ``stumbled()`` is called for each hedge that took its part over. While
    ``hurried()``, parts are late sooner: the consumer waits, or faults came lately."""

    def __init__(
        self,
        pool: ConnectionPool,
        config: TransferConfig,
        counters: Counters,
        calm: Callable[[Shard], bool],
        stumbled: Callable[[], None],
        hurried: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._config = config
        self._counters = counters
        self._calm = calm
        self._stumbled = stumbled
        self._hurried = hurried
        self._flying: dict[PartAnswer, tuple[Connection, OriginHistory]] = {}
        self._hedges: dict[PartAnswer, Hedge] = {}
        self._tasks: dict[asyncio.Task[None], Hedge] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0

    # Called by `get_part`

    def began(self, answer: PartAnswer, connection: Connection, now: float) -> None:
        """An attempt is under way over ``connection``."""
        self._flying[answer] = connection, history_of(answer.origin)
        if self._timer is None:
            self._look_again(now + _LEAST_S)

    def ended(self, answer: PartAnswer) -> None:
        """The attempt has ended, well or not: its hedge is of no use any more, unless it is its successor."""
        self._flying.pop(answer, None)
        hedge = self._hedges.pop(answer, None) if self._hedges else None
        if hedge is not None and not hedge.leads:
            hedge.abort()

    def good(self, answer: PartAnswer, connection: Connection, now: float) -> None:
        """It was answered well, and whole."""
        head_s, body_s = answer.headed_at - answer.asked_at, now - answer.headed_at
        history = history_of(answer.origin)
        history.earn(self._config.hedge_share * connection.received)
        if answer.waited:  # for memory, which says nothing of the server
            return
        history.add(connection.received, head_s, body_s, connection.gap_s)
        self._counters.add("head_s", head_s)
        self._counters.add("body_s", body_s)

    async def end(self) -> None:
        """Return when no hedge is under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # Every now and then

    def _look_again(self, at: float) -> None:
        self._look_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        """Look at each attempt that is late by now, and come back when the next one will be."""
        self._timer = None
        if not self._flying and not self._tasks:
            return
        now, (least, most) = asyncio.get_running_loop().time(), _LOOK_S
        held_up = now - self._look_at >= 2 * least  # this thread was: then all seems late
        following = now + most
        times = _TIMES_IF_HURRIED if self._hurried() else _TIMES_THE_TAIL
        for answer, (connection, history) in list(self._flying.items()):
            late_at = history.usual.late_at(answer, connection, times)
            following = min(following, late_at)
            if late_at <= now and not held_up:
                self._consider(answer, connection, history, now, times)
        for task, hedge in list(self._tasks.items()):
            if hedge.connection is None or task.done():  # then the connection may have another part by now
                continue
            late_at = hedge.history.usual.late_at(hedge.judge, hedge.connection, times)
            following = min(following, late_at)
            if late_at <= now and not held_up:
                hedge.give_up()
        self._look_again(max(now + least, following))

    def _consider(
        self, answer: PartAnswer, connection: Connection, history: OriginHistory, now: float, times: float
    ) -> None:
        if answer in self._hedges or not self._wanted(answer.part, history, now):
            return
        # What lies in the kernel counts: it is looked at closely first, and asked for again at the next look.
        if connection.look_closely():
            return
        come, usual = connection.received if answer.into_slab else 0, history.usual
        silent = now >= usual.silent_at(answer, connection, times)
        missing = answer.missing_bytes - come
        if missing <= 0 or (not silent and usual.ends_soon(answer, come, now)):
            return
        if self._affordable(missing, connection, history, now):
            self._launch(Hedge(answer, connection, answer.offset + come, history))

    def _wanted(self, part: Part, history: OriginHistory, now: float) -> bool:
        shard = part.shard
        behind = part.start >= (1 if shard.size is None else shard.size)  # or it may be, for what is known
        if part.dropped or shard.streamed or behind:
            return False
        least, share = _AT_ONCE
        if len(self._tasks) >= max(least, len(self._flying) // share) or self._pool.busy >= self._config.connections:
            self._stumbled()  # the window leaves some of the connections for this, from now on
            return False
        return now >= history.paused_until and self._calm(shard)

    def _affordable(self, missing_bytes: int, connection: Connection, history: OriginHistory, now: float) -> bool:
        """Whether the bucket has enough. One at a time, a connection may be replaced that is silent beyond doubt."""
        enough = missing_bytes <= history.credit_bytes
        if enough and not history.doubtful:
            return True
        alone = not any(hedge.history is history for hedge in self._tasks.values())
        return alone and (enough or now - connection.moved_at >= _SILENT_S)

    def _launch(self, hedge: Hedge) -> None:
        answer = hedge.first
        self._hedges[answer] = hedge
        hedge.history.credit_bytes -= hedge.missing_bytes
        self._counters.add("hedges")
        self._counters.add("requests")
        if hedge.traffic is not None:
            hedge.traffic.hedges += 1
            hedge.traffic.requests += 1
            hedge.traffic.connections += 1
        hedge.task = asyncio.get_running_loop().create_task(hedge.run(self._pool))
        self._tasks[hedge.task] = hedge
        hedge.task.add_done_callback(lambda task: self._landed(hedge, task))
        url, at = redact(answer.part.shard.url), answer.part.start + hedge.judge.offset
        logger.debug("%s at byte %d: late; asked for it a second time", url, at)

    def _landed(self, hedge: Hedge, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not hedge.leads and self._hedges.get(hedge.first) is hedge:
            del self._hedges[hedge.first]  # another may be asked
        exn = None if task.cancelled() else task.exception()
        failed = exn is not None and not isinstance(exn, _GaveWay)
        if hedge.traffic is not None:
            self._count(hedge, hedge.traffic, ended_well=hedge.leads and exn is None and not task.cancelled())
        hedge.settle(asyncio.get_running_loop().time(), failed=failed)
        if hedge.leads:
            self._stumbled()
            self._counters.add("hedged_bytes", hedge.doubled_bytes)
            self._counters.add("wire_bytes", hedge.doubled_bytes)

    def _count(self, hedge: Hedge, traffic: OriginTraffic, *, ended_well: bool) -> None:
        traffic.connections -= 1
        if hedge.leads:
            traffic.hedged_bytes += hedge.doubled_bytes
            traffic.bytes += hedge.doubled_bytes
        if ended_well and not hedge.judge.waited:
            traffic.seconds.add(asyncio.get_running_loop().time() - hedge.first.asked_at)
