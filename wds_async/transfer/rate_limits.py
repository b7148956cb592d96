"""Limits on the requests to origins: connections and bytes a second, of all together and of each; the token bucket."""

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
        """Whether nothing was taken lately."""
        self._fill()
        return self._level >= self._burst

    def _fill(self) -> None:
        now = self._clock()
        if self._rate < math.inf:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now


@dataclass(slots=True, eq=False)
class _PermitWaiter:
    wanted_bytes: int
    woken: asyncio.Future[None]
    connects: bool
    """Whether it wants a connection too, and not only bytes over its own."""


@dataclass(slots=True, eq=False)
class _OriginQueue:
    """Waiters for one origin; those that hold a connection and want more bytes come first, or none would be free."""

    bucket: TokenBucket
    room: Callable[[], int]
    flying: int = 0
    parts: deque[_PermitWaiter] = field(default_factory=deque)
    pieces: deque[_PermitWaiter] = field(default_factory=deque)

    @property
    def first(self) -> _PermitWaiter | None:
        queue = self.pieces or self.parts
        return queue[0] if queue else None


class Permit:
    """Leave for one request; ``received`` is what it brought, which whoever has it sets where it is not what was
    expected."""

    __slots__ = ("received",)

    def __init__(self, expected_bytes: int) -> None:
        self.received = expected_bytes


class OriginLimits:
    """Lets requests go: first come, first served within one origin, and the origins in turn. On the loop only.

    ``connections`` and ``origin_connections``: requests under way, of all origins and of one. ``bytes_per_s`` and
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
        """Requests under way now."""
        self._origin_bytes_per_s = origin_bytes_per_s
        self._clock: LoopClock = clock or asyncio.get_running_loop()
        self._bucket = TokenBucket(bytes_per_s, self._clock.time)
        self._lines: dict[str, _OriginQueue] = {}
        self._turns: deque[_OriginQueue] = deque()  # those where somebody waits
        self._timer: Any = None

    @property
    def waiting(self) -> int:
        """Requests that wait for their permit."""
        return sum(len(line.parts) for line in self._turns)

    @contextlib.asynccontextmanager
    async def permit(
        self, origin: str, expected_bytes: int, room: Callable[[], int] | None = None
    ) -> AsyncIterator[Permit]:
        """One request to ``origin``, once it may be made. ``expected_bytes`` are taken from the limits at once, and
        what `Permit.received` differs by at its end. ``room()``: how many requests that origin bears now."""
        line = self._line(origin)
        line.room = room or line.room
        await self._wait(line, line.parts, expected_bytes)
        permit = Permit(expected_bytes)
        try:
            yield permit
        finally:
            self._landed(line, permit.received - expected_bytes)

    async def more(self, origin: str, count: int) -> None:
        """Return once ``count`` bytes more may be read by a request that has its permit."""
        line = self._line(origin)
        await self._wait(line, line.pieces, count)

    def _line(self, origin: str) -> _OriginQueue:
        if origin not in self._lines:
            bucket = TokenBucket(self._origin_bytes_per_s, self._clock.time)
            self._lines[origin] = _OriginQueue(bucket, lambda: self.origin_connections)
        return self._lines[origin]

    async def _wait(self, line: _OriginQueue, queue: deque[_PermitWaiter], count: int) -> None:
        waiter = _PermitWaiter(count, asyncio.get_running_loop().create_future(), queue is line.parts)
        if line.first is None:
            self._turns.append(line)
        queue.append(waiter)
        self._look()
        try:
            await waiter.woken
        except asyncio.CancelledError:
            if waiter in queue:
                queue.remove(waiter)
                self._look()
            else:  # it was given leave in this very turn
                self._landed(line, -count, connected=waiter.connects)
            raise

    def _landed(self, line: _OriginQueue, more_bytes: int, *, connected: bool = True) -> None:
        self.flying -= connected
        line.flying -= connected
        self._bucket.take(more_bytes)
        line.bucket.take(more_bytes)
        self._look()

    def _look(self) -> None:
        """Give leave to all who may have it, the origins in turn, and come back when bytes allow the next."""
        now, refused, soonest = self._clock.time(), 0, math.inf
        while refused < len(self._turns):
            line = self._turns.popleft()
            waiter = line.first
            if waiter is None:  # whoever waited was cancelled
                continue
            ready_at = now + max(self._bucket.wait_s(), line.bucket.wait_s())
            if ready_at > now or not self._has_room(line, waiter):
                soonest = min(soonest, ready_at) if ready_at > now else soonest
                self._turns.append(line)
                refused += 1
                continue
            self._let_go(line, waiter)
            refused = 0
            if line.first is not None:
                self._turns.append(line)
        self._look_again(soonest)

    def _has_room(self, line: _OriginQueue, waiter: _PermitWaiter) -> bool:
        if not waiter.connects:
            return True
        free = self.connections - self.flying
        return free > 0 and line.flying < min(self.origin_connections, line.room(), _SHARE * free)

    def _let_go(self, line: _OriginQueue, waiter: _PermitWaiter) -> None:
        (line.parts if waiter.connects else line.pieces).popleft()
        self.flying += waiter.connects
        line.flying += waiter.connects
        self._bucket.take(waiter.wanted_bytes)
        line.bucket.take(waiter.wanted_bytes)
        if not waiter.woken.done():
            waiter.woken.set_result(None)

    def _look_again(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when == math.inf else self._clock.call_at(when, self._look)
