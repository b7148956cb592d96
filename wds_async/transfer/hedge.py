"""Asking a second time for a part that takes much longer than its peers, for the bytes that are missing still.

Only the slow tail is worth that: a part is late once it has taken a quarter of a second and twice the 95th percentile
of the last good ones ("The Tail at Scale", Dean and Barroso, 2013), and what is asked for twice is bounded by
`TransferConfig.hedge_share` of all bytes. On the normal path it costs an entry in a dict for each part, and a look
every 100 ms while parts fly.

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
from wds_async.transfer.window import Part, Shard

__all__ = ["Hedge", "Hedges"]

logger = logging.getLogger("wds_async")

_LOOK_EVERY_S = 0.1
_LEAST_S = 0.25
_TIMES_THE_TAIL = 2.0
_TAIL = 0.95
_REMEMBERED = 128
_ENOUGH = 16  # good parts, before any is called late
_AT_ONCE = 4
_PAUSE_S = 2.0  # after a hedge that was refused


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
        self._first = first
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
        return self._first.successor is self

    async def run(self, pool: ConnectionPool) -> None:
        """Ask, and receive into the slab. Raises what went wrong, with or without having taken over."""
        raw = self.judge.request_bytes()
        for fresh in (False, True):
            async with pool.connection(self.judge.origin, fresh=fresh) as connection:
                self._connection = connection
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

    def abort(self) -> None:
        """See `Successor`."""
        self.over = True
        if self.task is None or self.task.done():  # the connection may have another part by now
            return
        if self._connection is not None:
            self._connection.abort()
        self.task.cancel()

    def _accept(self, head: Head) -> memoryview:
        first, part = self._first, self.judge.part
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


class Hedges:
    """The flying parts of one reader, and the second attempts at those that are late. ``calm(shard)`` says whether its
    store may be asked for more than is needed."""

    def __init__(
        self, pool: ConnectionPool, config: TransferConfig, counters: Counters, calm: Callable[[Shard], bool]
    ) -> None:
        self._pool = pool
        self._config = config
        self._counters = counters
        self._calm = calm
        self._flying: dict[PartAnswer, tuple[Connection, float]] = {}  # oldest first
        self._hedges: dict[PartAnswer, Hedge] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._read_bytes = 0
        self._spent_bytes = 0
        self._paused_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # What `get_part` tells

    def began(self, answer: PartAnswer, connection: Connection, now: float) -> None:
        """An attempt is under way over ``connection``."""
        self._flying[answer] = connection, now
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def ended(self, answer: PartAnswer) -> None:
        """The attempt has ended, well or not: its hedge is of no use any more, unless it is its successor."""
        self._flying.pop(answer, None)
        hedge = self._hedges.pop(answer, None) if self._hedges else None
        if hedge is not None and not hedge.leads:
            hedge.abort()

    def observe(self, received_bytes: int, took_s: float) -> None:
        """A good answer took so long."""
        self._read_bytes += received_bytes
        self._took_s.append(took_s)

    async def end(self) -> None:
        """Return when no hedge is under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # Every 100 ms

    def _look(self) -> None:
        self._timer = None
        if not self._flying:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_EVERY_S, self._look)
        now, late_s = loop.time(), 0.0
        for answer, (connection, began) in list(self._flying.items()):
            if now - began < _LEAST_S:
                return
            late_s = late_s or self._late_s()
            if now - began < late_s:
                return
            if answer in self._hedges or not self._wanted(answer.part, now):
                continue
            # What lies in the kernel counts: it is looked at closely first, and asked for again at the next look.
            if connection.look_closely():
                continue
            come = connection.received if answer.into_slab else 0
            missing = answer.part.stop - answer.part.start - answer.part.filled - come
            soon = come > 0 and missing * (now - began) / come < late_s / 2
            if missing > 0 and not soon and self._affordable(missing):
                self._launch(answer, connection, answer.part.filled + come)

    def _late_s(self) -> float:
        if len(self._took_s) < _ENOUGH:
            return math.inf
        ordered = sorted(self._took_s)
        return max(_LEAST_S, _TIMES_THE_TAIL * ordered[int(_TAIL * (len(ordered) - 1))])

    def _wanted(self, part: Part, now: float) -> bool:
        shard = part.shard
        if part.dropped or shard.streamed or shard.size is None or part.start >= shard.size:
            return False
        room = len(self._tasks) < _AT_ONCE and self._pool.busy < self._config.connections
        return room and now >= self._paused_until and self._calm(shard)

    def _affordable(self, missing_bytes: int) -> bool:
        return self._spent_bytes + missing_bytes <= self._config.hedge_share * self._read_bytes

    def _launch(self, answer: PartAnswer, connection: Connection, offset: int) -> None:
        hedge = Hedge(answer, connection, offset)
        self._hedges[answer] = hedge
        self._spent_bytes += hedge.missing_bytes
        self._counters.add("hedges")
        self._counters.add("requests")
        hedge.task = asyncio.get_running_loop().create_task(hedge.run(self._pool))
        self._tasks.add(hedge.task)
        hedge.task.add_done_callback(lambda task: self._landed(hedge, task))
        url, at = redact(answer.part.shard.url), answer.part.start + offset
        logger.debug("%s at byte %d: late; asked for it a second time", url, at)

    def _landed(self, hedge: Hedge, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failed = not task.cancelled() and task.exception() is not None
        if hedge.leads:
            self._spent_bytes -= hedge.missing_bytes - hedge.doubled_bytes
            self._counters.add("hedged_bytes", hedge.doubled_bytes)
            self._counters.add("wire_bytes", hedge.doubled_bytes)
        elif not hedge.asked:  # one that was asked may have sent all of it, for what we know
            self._spent_bytes -= hedge.missing_bytes
        elif failed:
            self._paused_until = asyncio.get_running_loop().time() + _PAUSE_S
