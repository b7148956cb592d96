"""A link to a store as a handful of events, to see in milliseconds what a controller does in a minute."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from wds_async.config import RetryPolicy
from wds_async.transfer.concurrency import Concurrency

__all__ = ["MIB", "Link", "Process"]

MIB = 1 << 20
_BUDGET_PARTS = 64
_DOWN_AFTER = 3
_SOFTLY = 2  # as `attempts` asks who was refused to wait longer
_ASLEEP_MOST_S = 3.0


class Link:
    """A store ``latency_s`` away that gives each connection ``one`` bytes a second, all together ``total``.

    ``noise`` is the spread of its latency (the deviation of a log-normal). It refuses with 503 what exceeds ``cap``
    requests at once, and what ``refuses(now, rng)``.
    """

    def __init__(
        self,
        latency_s: float = 0.05,
        one: float = 50e6,
        total: float = 1e12,
        *,
        cap: int | None = None,
        refuses: Callable[[float, random.Random], bool] = lambda now, rng: False,
        noise: float = 0.2,
        seed: int = 0,
    ) -> None:
        self.latency_s, self.one, self.total, self.cap, self.refuses, self.noise = (
            latency_s, one, total, cap, refuses, noise,
        )  # fmt: skip
        self.rng = random.Random(seed)
        self.now = 0.0
        self.requests = self.refused = 0
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._moving: list[tuple[float, int, Callable[[], Any]]] = []
        self._each = 0.0  # bytes that every transfer has moved since the beginning
        self._order = 0
        self._inside = 0

    def at(self, when: float, call: Callable[[], Any]) -> None:
        """Call ``call`` then."""
        self._order += 1
        heapq.heappush(self._events, (when, self._order, call))

    def ask(self, size: int, done: Callable[[], Any], refused: Callable[[], Any]) -> None:
        """Ask for ``size`` bytes."""
        self.requests += 1
        late_s = self.latency_s * self.rng.lognormvariate(-(self.noise**2) / 2, self.noise)
        if self.refuses(self.now, self.rng) or (self.cap is not None and self._inside >= self.cap):
            self.refused += 1
            self.at(self.now + late_s, refused)
            return
        self._inside += 1
        self._order += 1
        order = self._order
        self.at(self.now + late_s, lambda: heapq.heappush(self._moving, (self._each + size, order, done)))

    def run(self, until: float) -> None:
        """Let the time pass."""
        while True:
            rate = min(self.one, self.total / max(1, len(self._moving)))
            end = self.now + (self._moving[0][0] - self._each) / rate if self._moving else float("inf")
            event = self._events[0][0] if self._events else float("inf")
            now = min(event, end, until)
            self._each += rate * (now - self.now)
            self.now = now
            if now >= until:
                return
            if end <= event:
                self._inside -= 1
                heapq.heappop(self._moving)[2]()
            else:
                heapq.heappop(self._events)[2]()


class Process:
    """One reader on a `Link`: starts parts like the window and waits after faults like `CircuitBreaker`. ``consumer``:
    bytes it takes a second; None: all that there is."""

    def __init__(
        self,
        link: Link,
        *,
        most: int = 64,
        processes: int = 1,
        sizes: Callable[[random.Random], int] = lambda rng: 2 * MIB,
        consumer: float | None = None,
        seed: int = 0,
    ) -> None:
        self.link, self.sizes, self.consumer = link, sizes, consumer
        self.control = Concurrency(most, processes)
        self.landed: list[tuple[float, int, int]] = []
        """Time, bytes, and the limit then."""
        self._rng = random.Random(seed)
        self._flying = self._held = self._faults = 0
        self._taken_at = 0.0
        self._asleep: list[tuple[int, int]] = []
        self._retry = RetryPolicy(cap_s=_ASLEEP_MOST_S)
        self._plan()

    def speed(self, start: float, stop: float) -> float:
        """Bytes a second between the two."""
        return sum(size for at, size, _ in self.landed if start <= at < stop) / (stop - start)

    def limits(self, start: float, stop: float) -> list[int]:
        """The limit at each part that landed between the two."""
        return [limit for at, _, limit in self.landed if start <= at < stop]

    def _plan(self) -> None:
        first = 3 if not self.landed else _BUDGET_PARTS  # the window's slow start
        while self._held < min(first, _BUDGET_PARTS) and self._flying < self.control.limit:
            self._flying += 1
            self._held += 1
            self._ask(self.sizes(self._rng), 1)
        self.control.in_flight(self._flying)

    def _ask(self, size: int, attempt: int) -> None:
        began = self.link.now

        def done() -> None:
            now = self.link.now
            self.control.observe(size, now - began, now)
            self.landed.append((now, size, self.control.limit))
            self._flying -= 1
            if self._faults >= _DOWN_AFTER:
                for sleeper in self._asleep:
                    self.link.at(now + self._rng.uniform(0, 0.3), lambda s=sleeper: self._wake(s))
            self._faults = 0
            self._take(now, size)
            self._plan()

        def refused() -> None:
            now = self.link.now
            self.control.throttled(now)
            self._faults += 1
            sleeper = (size, attempt + 1)
            self._asleep.append(sleeper)
            self.link.at(now + self._retry.delay_s(attempt + _SOFTLY, self._rng), lambda: self._wake(sleeper))

        self.link.ask(size, done, refused)

    def _wake(self, sleeper: tuple[int, int]) -> None:
        if any(known is sleeper for known in self._asleep):
            self._asleep = [known for known in self._asleep if known is not sleeper]
            self._ask(*sleeper)

    def _take(self, now: float, size: int) -> None:
        if self.consumer is None:
            self._held -= 1
            return
        self._taken_at = max(now, self._taken_at) + size / self.consumer

        def taken() -> None:
            self._held -= 1
            self._plan()

        self.link.at(self._taken_at, taken)
