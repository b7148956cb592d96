"""Asking a second time for a part that takes much longer than its peers, for the bytes that are missing still.

Only the slow tail is worth that ("The Tail at Scale", Dean and Barroso, 2013). A part is late once it has taken twice
the 95th percentile of the last good ones, or nothing has come of it for twice as long as their answers took to begin;
never within 30 ms. What is asked for twice is bounded by `TransferConfig.hedge_share` of all bytes. On the normal path
it costs an entry in a dict for each part, and a look every 10 to 100 ms while parts fly.

**A slab has one writer.** The second attempt, the hedge, writes nothing before its head has come and was judged as any
other; then the first connection is aborted, after which it writes no byte, and the hedge goes on. What both have
written are the same bytes, since the head named the same object. The first attempt, whichever it was that failed it,
waits for its successor; should that fail too, the part goes on by the ordinary attempts, from the furthest byte.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

from wds_async.config import TransferConfig
from wds_async.redact import redact
from wds_async.transfer.connection import Connection, ConnectionBroken, Head
from wds_async.transfer.direct import PartAnswer
from wds_async.transfer.origins import ConnectionPool
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import OriginTraffic
from wds_async.transfer.window import Part, Shard

__all__ = ["Hedge", "Hedges"]

logger = logging.getLogger("wds_async")

_LOOK_S = (0.01, 0.1)  # between two looks, at least and at most
_LEAST_S = 0.03
_TIMES_THE_TAIL = 2.0
_TAIL = 0.95
_REMEMBERED = 128
_ENOUGH = 16  # good parts, before any is called late
_AT_ONCE = 4
_PAUSE_S = 0.5  # after a hedge that the store refused because it has too much to do
_TOO_MUCH = frozenset({429, 503})


class _GaveWay(Exception):
    """The hedge is not wanted any more, or is no better than what it was to replace."""


class Hedge:
    """The second attempt at one part: at its bytes from ``judge.offset`` on, once it has a head in the place of
    ``first``."""

    def __init__(self, first: PartAnswer, connection: Connection, offset: int) -> None:
        self.judge = PartAnswer(first.request, first.part, first.learn, offset)
        self.missing_bytes = first.part.stop - first.part.start - offset
        self.doubled_bytes = 0
        """What the first one had brought of them when it was replaced."""
        self.over = False
        """Nobody waits for it any more."""
        self.task: asyncio.Task[None] | None = None
        self.first = first
        self.traffic: OriginTraffic | None = first.part.shard.notes.traffic
        self._slow = connection
        self._connection: Connection | None = None
        self._received = 0

    @property
    def asked(self) -> bool:
        """Whether its request was sent, and the bytes may have been."""
        return self._connection is not None

    @property
    def leads(self) -> bool:
        """Whether it has taken the part over."""
        return self.first.successor is self

    async def run(self, pool: ConnectionPool) -> None:
        """Ask, and receive into the slab. Raises what went wrong, with or without having taken over."""
        raw = self.judge.request_bytes()
        for fresh in (False, True):
            async with pool.connection(self.judge.origin, fresh=fresh) as connection:
                self._connection, self.judge.asked_at = connection, asyncio.get_running_loop().time()
                try:
                    head = await connection.exchange(raw, self._accept)
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

    def give_up(self, now: float, late_s: float, silent_s: float) -> None:
        """End it where it is late as well, or nothing comes of it: another may do better."""
        connection = self._connection
        if connection is None or max(now - connection.moved_at - silent_s, now - self.judge.asked_at - late_s) < 0:
            return
        if not connection.look_closely():
            connection.stall("a second attempt was late too")

    def abort(self) -> None:
        """See `Successor`."""
        self.over = True
        if self.task is None or self.task.done():  # the connection may have another part by now
            return
        if self._connection is not None:
            self._connection.abort()
        self.task.cancel()

    def _accept(self, head: Head) -> memoryview:
        first, part = self.first, self.judge.part
        if self.over or part.dropped:
            raise _GaveWay("it is not wanted any more")
        if head.status != 206:
            self.judge.status = head.status
            raise _GaveWay(f"the server answered {head.status}")
        into = self.judge.accept(head)
        doubled = part.filled - self.judge.offset + (self._slow.received if first.into_slab else 0)
        if 2 * doubled > self.missing_bytes:
            raise _GaveWay("the first attempt goes well by now")
        self.doubled_bytes = max(0, doubled)
        first.successor = self
        self._slow.abort()
        return into


class Usual:
    """How long good parts took lately."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._head_s: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, took_s: float, head_s: float) -> None:
        """A good part took ``took_s``, the head of its answer ``head_s`` of it."""
        self._took_s.append(took_s)
        self._head_s.append(head_s)

    def limits_s(self) -> tuple[float, float]:
        """From when on a part is late as a whole, and how long nothing may come of it; infinite while too little is
        known. What is received in few large steps is silent between them for a good part of its time."""
        if len(self._took_s) < _ENOUGH:
            return math.inf, math.inf
        took_s, head_s = _tail(self._took_s), _tail(self._head_s)
        silent_s = max(_LEAST_S, _TIMES_THE_TAIL * head_s, 0.75 * took_s)
        return max(_LEAST_S, _TIMES_THE_TAIL * took_s), silent_s


def _tail(values: deque[float]) -> float:
    return sorted(values)[int(_TAIL * (len(values) - 1))]


class Hedges:
    """The flying parts of one reader, and the second attempts at those that are late. ``calm(shard)`` says whether its
    store may be asked for more than is needed; ``stumbled()`` is told of each hedge."""

    def __init__(
        self,
        pool: ConnectionPool,
        config: TransferConfig,
        counters: Counters,
        calm: Callable[[Shard], bool],
        stumbled: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._config = config
        self._counters = counters
        self._calm = calm
        self._stumbled = stumbled
        self._flying: dict[PartAnswer, tuple[Connection, float]] = {}  # oldest first
        self._hedges: dict[PartAnswer, Hedge] = {}
        self._tasks: dict[asyncio.Task[None], Hedge] = {}
        self._usual = Usual()
        self._read_bytes = 0
        self._spent_bytes = 0
        self._paused_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0

    # What `get_part` tells

    def began(self, answer: PartAnswer, connection: Connection, now: float) -> None:
        """An attempt is under way over ``connection``."""
        self._flying[answer] = connection, now
        if self._timer is None:
            self._look_again(now, _LOOK_S[1])

    def ended(self, answer: PartAnswer) -> None:
        """The attempt has ended, well or not: its hedge is of no use any more, unless it is its successor."""
        self._flying.pop(answer, None)
        hedge = self._hedges.pop(answer, None) if self._hedges else None
        if hedge is not None and not hedge.leads:
            hedge.abort()

    def good(self, answer: PartAnswer, received_bytes: int, now: float) -> None:
        """It was answered well, and whole."""
        self._read_bytes += received_bytes
        head_s = answer.headed_at - answer.asked_at
        self._usual.add(now - answer.asked_at, head_s)
        self._counters.add("head_s", head_s)
        self._counters.add("body_s", now - answer.headed_at)

    async def end(self) -> None:
        """Return when no hedge is under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # Every now and then

    def _look_again(self, now: float, in_s: float) -> None:
        self._look_at = now + in_s
        self._timer = asyncio.get_running_loop().call_at(self._look_at, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._flying and not self._tasks:
            return
        now, (least, most) = asyncio.get_running_loop().time(), _LOOK_S
        oldest = next(iter(self._flying.values()), None)
        fresh = oldest is not None and now - oldest[1] < _LEAST_S
        if self._tasks or not fresh:
            late_s, silent_s = self._usual.limits_s()
            if now - self._look_at < least:  # else this thread was held up, and all seems late
                self._look_at_each(now, late_s, silent_s)
            most = min(most, max(least, silent_s / 4))
        else:
            most = _LEAST_S
        self._look_again(now, most)

    def _look_at_each(self, now: float, late_s: float, silent_s: float) -> None:
        for answer, (connection, began) in list(self._flying.items()):
            if now - began < _LEAST_S:
                break  # the oldest come first
            if now - began > late_s or now - connection.moved_at > silent_s:
                self._consider(answer, connection, now, late_s)
        for hedge in list(self._tasks.values()):
            hedge.give_up(now, late_s, silent_s)

    def _consider(self, answer: PartAnswer, connection: Connection, now: float, late_s: float) -> None:
        if answer in self._hedges or not self._wanted(answer.part, now):
            return
        # What lies in the kernel counts: it is looked at closely first, and asked for again at the next look.
        if connection.look_closely():
            return
        come, took_s = connection.received if answer.into_slab else 0, now - answer.asked_at
        missing = answer.part.stop - answer.part.start - answer.part.filled - come
        # At its pace until now; one that takes twice too long has lost it.
        soon = come > 0 and missing * took_s / come < late_s / 2 and late_s < took_s < 1.5 * late_s
        if missing > 0 and not soon and self._affordable(missing):
            self._launch(answer, connection, answer.part.filled + come)

    def _wanted(self, part: Part, now: float) -> bool:
        shard = part.shard
        behind = part.start >= (1 if shard.size is None else shard.size)  # or it may be, for what is known
        if part.dropped or shard.streamed or behind:
            return False
        if len(self._tasks) >= _AT_ONCE or self._pool.busy >= self._config.connections:
            self._stumbled()  # the window leaves some of the connections for this, from now on
            return False
        return now >= self._paused_until and self._calm(shard)

    def _affordable(self, missing_bytes: int) -> bool:
        return self._spent_bytes + missing_bytes <= self._config.hedge_share * self._read_bytes

    def _launch(self, answer: PartAnswer, connection: Connection, offset: int) -> None:
        hedge = Hedge(answer, connection, offset)
        self._hedges[answer] = hedge
        self._spent_bytes += hedge.missing_bytes
        self._counters.add("hedges")
        self._stumbled()
        self._counters.add("requests")
        if hedge.traffic is not None:
            hedge.traffic.hedges += 1
            hedge.traffic.requests += 1
            hedge.traffic.connections += 1
        hedge.task = asyncio.get_running_loop().create_task(hedge.run(self._pool))
        self._tasks[hedge.task] = hedge
        hedge.task.add_done_callback(lambda task: self._landed(hedge, task))
        url, at = redact(answer.part.shard.url), answer.part.start + offset
        logger.debug("%s at byte %d: late; asked for it a second time", url, at)

    def _landed(self, hedge: Hedge, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not hedge.leads and self._hedges.get(hedge.first) is hedge:
            del self._hedges[hedge.first]  # another may be asked
        failed = not task.cancelled() and task.exception() is not None
        if hedge.traffic is not None:
            self._count(hedge, hedge.traffic, ended_well=hedge.leads and not failed and not task.cancelled())
        if hedge.leads:
            self._spent_bytes -= hedge.missing_bytes - hedge.doubled_bytes
            self._counters.add("hedged_bytes", hedge.doubled_bytes)
            self._counters.add("wire_bytes", hedge.doubled_bytes)
        elif not hedge.asked:  # one that was asked may have sent all of it, for what we know
            self._spent_bytes -= hedge.missing_bytes
        elif failed and hedge.judge.status in _TOO_MUCH:
            self._paused_until = asyncio.get_running_loop().time() + _PAUSE_S

    def _count(self, hedge: Hedge, traffic: OriginTraffic, *, ended_well: bool) -> None:
        traffic.connections -= 1
        if hedge.leads:
            traffic.hedged_bytes += hedge.doubled_bytes
            traffic.bytes += hedge.doubled_bytes
        if ended_well:
            traffic.seconds.add(asyncio.get_running_loop().time() - hedge.first.asked_at)
