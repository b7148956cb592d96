"""Limits on the requests to origins: connections and bytes a second, of all together and of each."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["LoopClock", "OriginLimits", "Permit", "TokenBucket"]

_SHARE = 7
"""One origin may have this many times the connections that are free, so that one whose requests all hang leaves some to
the others (Choudhury and Hahne, "Dynamic queue length thresholds", 1998): of 64 it has 56 where it is alone."""
_BURST_S = 1.0


class LoopClock(Protocol):
    """Protocol: the clock and timers of a loop."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Any: ...


class TokenBucket:
    """Tokens for bytes: ``rate`` a second, at most ``burst`` (default: those of one second); without a rate no limit.

    It may be overdrawn by what is taken at once, so that large pieces wait no longer for their turn than small ones;
    then nothing may be taken until the debt is paid. ``clock`` gives seconds. ValueError for a rate of 0 or less.
    """

    def __init__(self, rate: float | None, clock: Callable[[], float], burst: float | None = None) -> None:
        if rate is not None and not rate > 0:
            raise ValueError(f"rate={rate}: more than 0 bytes a second")
        self._rate = rate or math.inf
        self._clock = clock
        self._burst = self._rate * _BURST_S if burst is None else burst
        self._level = self._burst
        self._at = clock()

    def wait_s(self) -> float:
        """Return the seconds until something may be taken; 0: now. A debt of less than a byte is ignored."""
        self._fill()
        return 0.0 if self._level > -1.0 else -self._level / self._rate

    def take(self, count: float) -> None:
        """Take tokens; a negative ``count`` gives back what was not needed."""
        self._fill()
        self._level -= count

    @property
    def full(self) -> bool:
        """True if nothing was taken lately."""
        self._fill()
        return self._level >= self._burst

    def _fill(self) -> None:
        now = self._clock()
        if self._rate < math.inf:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now


@dataclass(slots=True, eq=False)
class Permit:
    """Permit for one request, or (``connects`` False) for more bytes of one that has its own."""

    expected_bytes: int
    connects: bool
    granted: asyncio.Future[None]
    received_bytes: int | None = None

    def settle(self, received_bytes: int) -> None:
        """Set what the request has brought, where that is not what was expected."""
        self.received_bytes = received_bytes


@dataclass(slots=True, eq=False)
class _OriginQueue:
    """Waiters for one origin; those that hold a connection and want more bytes come first, or none would be free."""

    bucket: TokenBucket
    room: Callable[[], int]
    flying: int = 0
    requests: deque[Permit] = field(default_factory=deque)
    pieces: deque[Permit] = field(default_factory=deque)

    @property
    def first(self) -> Permit | None:
        queue = self.pieces or self.requests
        return queue[0] if queue else None


class OriginLimits:
    """Admission of requests: first come, first served within one origin, and the origins in turn. On the loop only.

    ``connections`` and ``origin_connections``: requests in flight, of all origins and of one. ``bytes_per_s`` and
    ``origin_bytes_per_s``: likewise, with a burst of one second; None: no limit. ``clock``: the running loop.
    """

    def __init__(
        self,
        connections: int = 64,
        origin_connections: int = 64,
        bytes_per_s: float | None = None,
        origin_bytes_per_s: float | None = None,
        clock: LoopClock | None = None,
    ) -> None:
        self.connections = connections
        self.origin_connections = origin_connections
        self.flying = 0
        """Requests in flight now."""
        self._origin_bytes_per_s = origin_bytes_per_s
        self._clock: LoopClock = clock or asyncio.get_running_loop()
        self._bucket = TokenBucket(bytes_per_s, self._clock.time)
        self._queues: dict[str, _OriginQueue] = {}
        self._turns: deque[_OriginQueue] = deque()
        """Queues with waiters."""
        self._timer: Any = None

    @property
    def waiting(self) -> int:
        """Requests that wait for their permit."""
        return sum(len(queue.requests) for queue in self._turns)

    @contextlib.asynccontextmanager
    async def permit(
        self, origin: str, expected_bytes: int, room: Callable[[], int] | None = None
    ) -> AsyncIterator[Permit]:
        """Grant one request to ``origin``, once it may be made. ``expected_bytes`` are taken from the limits at once,
        and the difference to what `Permit.settle` gives at its end. ``room()``: how many requests that origin bears
        now.
        """
        queue = self._queue(origin)
        queue.room = room or queue.room
        permit = await self._wait(queue, expected_bytes, connects=True)
        try:
            yield permit
        finally:
            received = expected_bytes if permit.received_bytes is None else permit.received_bytes
            self._settle(queue, received - expected_bytes, connected=True)

    async def more(self, origin: str, count: int) -> None:
        """Return once ``count`` bytes more may be read by a request that has its permit."""
        await self._wait(self._queue(origin), count, connects=False)

    def _queue(self, origin: str) -> _OriginQueue:
        if origin not in self._queues:
            bucket = TokenBucket(self._origin_bytes_per_s, self._clock.time)
            self._queues[origin] = _OriginQueue(bucket, lambda: self.origin_connections)
        return self._queues[origin]

    async def _wait(self, queue: _OriginQueue, count: int, *, connects: bool) -> Permit:
        permit = Permit(count, connects, asyncio.get_running_loop().create_future())
        waiters = queue.requests if connects else queue.pieces
        if queue.first is None:
            self._turns.append(queue)
        waiters.append(permit)
        self._admit()
        try:
            await permit.granted
        except asyncio.CancelledError:
            if permit in waiters:
                waiters.remove(permit)
                self._admit()
            else:  # it was granted in this very turn
                self._settle(queue, -count, connected=connects)
            raise
        return permit

    def _settle(self, queue: _OriginQueue, more_bytes: int, *, connected: bool) -> None:
        self.flying -= connected
        queue.flying -= connected
        self._bucket.take(more_bytes)
        queue.bucket.take(more_bytes)
        self._admit()

    def _admit(self) -> None:
        """Grant all permits that may be granted, the origins in turn, and come back when bytes allow the next."""
        now, refused, soonest = self._clock.time(), 0, math.inf
        while refused < len(self._turns):
            queue = self._turns.popleft()
            permit = queue.first
            if permit is None:  # the waiter was cancelled
                continue
            ready_at = now + max(self._bucket.wait_s(), queue.bucket.wait_s())
            if ready_at > now or not self._has_room(queue, permit):
                soonest = min(soonest, ready_at) if ready_at > now else soonest
                self._turns.append(queue)
                refused += 1
                continue
            self._grant(queue, permit)
            refused = 0
            if queue.first is not None:
                self._turns.append(queue)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if soonest == math.inf else self._clock.call_at(soonest, self._admit)

    def _has_room(self, queue: _OriginQueue, permit: Permit) -> bool:
        if not permit.connects:
            return True
        free = self.connections - self.flying
        return free > 0 and queue.flying < min(self.origin_connections, queue.room(), _SHARE * free)

    def _grant(self, queue: _OriginQueue, permit: Permit) -> None:
        (queue.requests if permit.connects else queue.pieces).popleft()
        self.flying += permit.connects
        queue.flying += permit.connects
        self._bucket.take(permit.expected_bytes)
        queue.bucket.take(permit.expected_bytes)
        if not permit.granted.done():
            permit.granted.set_result(None)
