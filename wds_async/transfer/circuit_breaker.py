"""Circuit breakers of stores: all parts of a store wait out its outage together.

After three failed attempts in a row, of any parts, the circuit is **open**: every part waits here, and a few probes a
second go out for all of them. The first good answer wakes the others, spread over some hundred milliseconds; only a
``Retry-After`` is waited for to its end. The time of a part without progress is its own, but starts again when the
store is back from an outage of ten seconds or more, so that no part ends because of two misfortunes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import Any

from wds_async.redact import redact
from wds_async.transfer.rate_limits import LoopClock

__all__ = ["CircuitBreaker", "FailureLog"]

logger = logging.getLogger("wds_async")

_FAULTS_OF_AN_OUTAGE = 3
_GOOD_AGAIN = 8
_WAKE_WITHIN_S = 0.3
_WAKE_EACH_S = 0.02
_FLOOR_S = 1.0  # a part whose own way stays broken, while others do well, asks no oftener than that
_PROBE_S = (0.3, 3.0)  # between two probes: at first, and at most
_PROBE_GROWTH = 0.1  # of the outage's time until now
_LONG_S = 10.0
_WARN_EVERY_S = 60.0
_MEMORY = 0.95  # of the share of answers that throttle: the last twenty or so count
_MANY = 0.2
_FEW = 0.1
_REASONS_KEPT = 8


@dataclass(slots=True)
class FailureLog:
    """Failed attempts by reason, in few words: eight reasons at most, the rest counted together."""

    since: float
    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        """Count a failed attempt."""
        self.count += 1
        known = reason in self.reasons or len(self.reasons) < _REASONS_KEPT
        reason = reason if known else "something else"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def summary(self, now: float) -> str:
        """Return " after 37 attempts in 300 s (31 times the server answered 503, …)"; "" for a single attempt."""
        if self.count <= 1:
            return ""
        idle_s = now - self.since
        within = f" in {idle_s:.0f} s" if idle_s >= 1 else ""
        if len(self.reasons) < 2:
            return f" after {self.count} attempts{within}"
        times = {reason: "once" if count == 1 else f"{count} times" for reason, count in self.reasons.items()}
        counted = ", ".join(f"{count} {reason}" for reason, count in times.items())
        return f" after {self.count} attempts{within} ({counted})"


@dataclass(slots=True, eq=False)
class _Waiter:
    """A waiting part: until ``at`` while the circuit is closed, until its turn as a probe otherwise; never before
    ``earliest`` (the server's ``Retry-After``), and no longer than ``deadline``."""

    woken: asyncio.Future[bool]
    at: float
    floor: float
    earliest: float
    deadline: float
    cap_s: float


class CircuitBreaker:
    """Circuit breaker of one store. Only `wait` is a coroutine; all of it runs on the loop."""

    def __init__(self, name: str, clock: LoopClock, rng: random.Random | None = None) -> None:
        self.name = redact(name)
        """Scheme and host, redacted."""
        self.recovered_at = float("-inf")
        """End of the last outage of ten seconds or more."""
        self.failures: FailureLog | None = None
        """Failures since the last good answer; None without any."""
        self._clock = clock
        self._rng = rng or random.Random()
        self._success_at = float("-inf")
        self._streak = 0
        self._throttling = 0.0
        self._waiters: list[_Waiter] = []
        self._next_probe_at = 0.0
        self._timer: Any = None
        self._warn_at: float | None = None

    @property
    def is_open(self) -> bool:
        """True if the last three attempts or more have failed."""
        return self.failures is not None and self.failures.count >= _FAULTS_OF_AN_OUTAGE

    @property
    def healthy(self) -> bool:
        """True if the store may get hedges too: it is neither down nor throttling."""
        return not self.is_open and self._throttling < _MANY

    def allow_request(self) -> bool:
        """Return whether one request may go out now: always while the store is up; while it is down only as its next
        probe, which the caller's request then is."""
        if not self.is_open:
            return True
        now = self._clock.time()
        if now < self._next_probe_at:
            return False
        self._next_probe_at = now + self._interval_s(now, _PROBE_S[1])
        return True

    @property
    def failure_is_isolated(self) -> bool:
        """True if good answers came before the last failure, and failures are few."""
        return self.failures is not None and self.healthy and self._success_at > float("-inf")

    @property
    def waiting(self) -> int:
        """Number of waiting parts."""
        return len(self._waiters)

    def record_success(self) -> None:
        """Record a good answer. Called for each part; costs one reading of the clock while all is well."""
        self._success_at = now = self._clock.time()
        self._throttling *= _MEMORY
        if self.failures is None and not self._waiters:
            return
        was_down, history, self.failures = self.is_open, self.failures, None
        if history is not None and now - history.since >= _LONG_S:
            self.recovered_at = now
        if self._warn_at is not None and history is not None:
            logger.warning("%s: it answers again, after %.0f s", self.name, now - history.since)
        self._warn_at = None
        self._streak += 1
        if was_down or self._streak >= _GOOD_AGAIN:
            many, self._streak = self._streak >= _GOOD_AGAIN, 0
            self._wake_early(now, keep_retry_after=not many or self._throttling >= _FEW)

    def record_failure(self, reason: str, began: float, *, throttled: bool = False) -> None:
        """Record the failure, which time may heal, of an attempt that ``began`` then."""
        now = self._clock.time()
        if self.failures is None:
            self.failures = FailureLog(max(began, self._success_at))
        self.failures.add(reason)
        self._streak = 0
        self._throttling = _MEMORY * self._throttling + (1 - _MEMORY) * throttled
        if self.failures.count == _FAULTS_OF_AN_OUTAGE:
            self._next_probe_at = now  # the first one needs no other wait than its own

    def probe_soon(self) -> None:
        """Allow a probe at once: a part was given up, and the next may be of another object."""
        self._next_probe_at = min(self._next_probe_at, self._clock.time())
        self._schedule()

    def warn_of_outage(self, url: str, reason: str, timeout_s: float) -> None:
        """Warn, once a minute, that nothing has come for ten seconds; ``url`` is already redacted."""
        now = self._clock.time()
        if self.failures is None or timeout_s <= _LONG_S or now - self.failures.since < _LONG_S:
            return
        if self._warn_at is None or now >= self._warn_at:
            self._warn_at = now + _WARN_EVERY_S
            logger.warning(
                "%s: nothing was read from there for %.0f s: %s (attempt %d). Trying on until nothing has come for "
                "%.0f s (WDS_TIMEOUT).",
                url,
                now - self.failures.since,
                reason,
                self.failures.count,
                timeout_s,
            )

    async def wait(self, delay_s: float, deadline: float, *, retry_after_s: float = 0.0, cap_s: float = 20.0) -> bool:
        """Return when the next attempt may begin: after ``delay_s`` seconds while the circuit is closed, sooner once
        other parts succeed; in turn, as a probe, while it is open; never before ``retry_after_s``, as the server asked.
        False: the ``deadline`` has come and the circuit is open."""
        now = self._clock.time()
        waiter = _Waiter(
            asyncio.get_running_loop().create_future(),
            at=now + max(delay_s, retry_after_s),
            floor=now + min(delay_s, _FLOOR_S),
            earliest=now + retry_after_s,
            deadline=deadline,
            cap_s=cap_s,
        )
        self._waiters.append(waiter)
        self._schedule()
        try:
            return await waiter.woken
        finally:
            if waiter in self._waiters:  # it was cancelled
                self._waiters.remove(waiter)
                self._schedule()

    def _wake_early(self, now: float, *, keep_retry_after: bool) -> None:
        """Wake the waiting parts soon, each after its ``Retry-After`` or, with False, without it: others were answered
        many times since, so the store takes requests."""
        within_s = min(_WAKE_WITHIN_S, _WAKE_EACH_S * len(self._waiters))
        for waiter in self._waiters:
            soon = now + self._rng.uniform(0.0, min(within_s, waiter.cap_s))
            waiter.at = min(waiter.at, max(waiter.earliest if keep_retry_after else now, waiter.floor, soon))
        self._schedule()

    def _schedule(self) -> None:
        """Wake the parts whose time has come, and set the timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.time()
        for waiter in list(self._waiters):
            if now >= waiter.deadline:
                self._wake(waiter, may_try=not self.is_open)
            elif now >= self._due(waiter):
                self._wake(waiter, may_try=True)
                if self.is_open:
                    self._next_probe_at = now + self._interval_s(now, waiter.cap_s)
        if self._waiters:
            when = min(min(self._due(waiter), waiter.deadline) for waiter in self._waiters)
            self._timer = self._clock.call_at(max(when, now), self._schedule)

    def _due(self, waiter: _Waiter) -> float:
        return max(self._next_probe_at, waiter.earliest, waiter.floor) if self.is_open else waiter.at

    def _wake(self, waiter: _Waiter, *, may_try: bool) -> None:
        self._waiters.remove(waiter)
        if not waiter.woken.done():
            waiter.woken.set_result(may_try)

    def _interval_s(self, now: float, cap_s: float) -> float:
        assert self.failures is not None
        least, most = _PROBE_S
        bound = min(most, max(least, _PROBE_GROWTH * (now - self.failures.since)))
        return min(cap_s, bound * self._rng.uniform(0.75, 1.25))
