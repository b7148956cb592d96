"""What is known of each store's state, so that an outage is waited out by all of its parts together.

A part that fails sleeps for a time of its own (back-off with full jitter) as long as others of the same store do well.
Once three attempts in a row have failed, whoever made them, the store is **down**: every part that would ask it waits
here, and a few probes a second go out for all of them, whatever their number. The first good answer wakes the others,
spread over a few hundred milliseconds, so that nobody sleeps on for seconds after an outage or a storm of 503; only a
``Retry-After`` is waited for to its end. Eight good answers in a row wake those that sleep since a partial storm.

The clock of a part that makes no progress is its own: an object that always fails ends after ``timeout_s``, however
well the rest is read. It starts anew when its store is back from an outage of ten seconds or more, so that no part ends
for having met two misfortunes.

No I/O, no logging of its own accord but the one line that somebody has to read: that nothing comes, and that it does
again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from wds_async.redact import redact

__all__ = ["History", "Sky", "Weather"]

logger = logging.getLogger("wds_async")

_FAULTS_OF_AN_OUTAGE = 3
_GOOD_AGAIN = 8
_WAKE_WITHIN_S = 0.3
_WAKE_EACH_S = 0.02
_FLOOR_S = 1.0  # a part whose own way stays broken, while others do well, asks no oftener than that
_PROBE_S = (0.3, 3.0)  # between two probes: at first, and at most
_PROBE_GROWTH = 0.1  # of the outage's time until now
_LONG_S = 10.0
_TELL_AGAIN_S = 60.0
_MEMORY = 0.95  # of the share of answers that throttle: the last twenty or so count
_MANY = 0.2
_FEW = 0.1
_REASONS_KEPT = 8


class Clock(Protocol):
    """What is used of an event loop."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> asyncio.TimerHandle: ...


@dataclass(slots=True)
class History:
    """Failed attempts by reason, in few words: eight reasons at most, the rest counted together."""

    since: float
    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        """One more attempt has failed."""
        self.count += 1
        known = reason in self.reasons or len(self.reasons) < _REASONS_KEPT
        reason = reason if known else "something else"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def told(self, now: float) -> str:
        """ " after 37 attempts in 300 s (31 times the server answered 503, 6 times …)"; "" for a single attempt."""
        if self.count <= 1:
            return ""
        idle_s = now - self.since
        within = f" in {idle_s:.0f} s" if idle_s >= 1 else ""
        if len(self.reasons) < 2:
            return f" after {self.count} attempts{within}"
        counted = ", ".join(f"{_times(count)} {reason}" for reason, count in self.reasons.items())
        return f" after {self.count} attempts{within} ({counted})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@dataclass(slots=True, eq=False)
class _Sleeper:
    """A part that waits: until ``at`` on a good day, for its turn as a probe otherwise; never before ``earliest`` (what
    the server told it), and no longer than ``deadline``."""

    woken: asyncio.Future[bool]
    at: float
    floor: float
    earliest: float
    deadline: float
    cap_s: float


class Sky:
    """The state of one store. Everything but `wait` is a plain function; all of it runs on the loop."""

    def __init__(self, name: str, clock: Clock, rng: random.Random) -> None:
        self.name = name
        """Scheme and host, redacted."""
        self.back_at = float("-inf")
        """When the last outage of ten seconds or more ended."""
        self.history: History | None = None
        """The faults since the last good answer; None on a good day."""
        self._clock = clock
        self._rng = rng
        self._good_at = float("-inf")
        self._run = 0
        self._throttling = 0.0
        self._sleepers: list[_Sleeper] = []
        self._next_probe_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tell_at: float | None = None

    @property
    def down(self) -> bool:
        """Whether nothing but faults has come lately."""
        return self.history is not None and self.history.count >= _FAULTS_OF_AN_OUTAGE

    @property
    def calm(self) -> bool:
        """Whether the store may be asked for more than is needed: neither down nor throttling."""
        return not self.down and self._throttling < _MANY

    def may_ask(self) -> bool:
        """Return whether one request may go out now: always while the store is up; while it is down only as its next
        probe, which the caller's request then is."""
        if not self.down:
            return True
        now = self._clock.time()
        if now < self._next_probe_at:
            return False
        self._next_probe_at = now + self._interval_s(now, _PROBE_S[1])
        return True

    @property
    def isolated(self) -> bool:
        """Whether the last fault says nothing of the store: good answers came before, and faults are few."""
        return self.history is not None and self.calm and self._good_at > float("-inf")

    @property
    def waiting(self) -> int:
        """Parts that wait here."""
        return len(self._sleepers)

    def good(self) -> None:
        """The store gave what it was asked for. Called for each part: a clock is all that it costs on a good day."""
        self._good_at = now = self._clock.time()
        self._throttling *= _MEMORY
        if self.history is None and not self._sleepers:
            return
        was_down, history, self.history = self.down, self.history, None
        if history is not None and now - history.since >= _LONG_S:
            self.back_at = now
        if self._tell_at is not None and history is not None:
            logger.warning("%s: it answers again, after %.0f s", self.name, now - history.since)
        self._tell_at = None
        self._run += 1
        if was_down or self._run >= _GOOD_AGAIN:
            many, self._run = self._run >= _GOOD_AGAIN, 0
            self._hasten(now, told=not many or self._throttling >= _FEW)

    def fault(self, reason: str, began: float, *, throttled: bool = False) -> None:
        """An attempt that ``began`` then has failed, in a way that may heal."""
        now = self._clock.time()
        if self.history is None:
            self.history = History(max(began, self._good_at))
        self.history.add(reason)
        self._run = 0
        self._throttling = _MEMORY * self._throttling + (1 - _MEMORY) * throttled
        if self.history.count == _FAULTS_OF_AN_OUTAGE:
            self._next_probe_at = now  # the first one needs no other wait than its own

    def ended(self) -> None:
        """A part was given up: what comes next may be another object, and is asked for at once."""
        self._next_probe_at = min(self._next_probe_at, self._clock.time())
        self._look()

    def tell(self, url: str, reason: str, timeout_s: float) -> None:
        """Say aloud, and rarely, that nothing has come for ten seconds; ``url`` is already redacted."""
        now = self._clock.time()
        if self.history is None or timeout_s <= _LONG_S or now - self.history.since < _LONG_S:
            return
        if self._tell_at is None or now >= self._tell_at:
            self._tell_at = now + _TELL_AGAIN_S
            logger.warning(
                "%s: nothing was read from there for %.0f s: %s (attempt %d). Trying on until nothing has come for "
                "%.0f s (WDS_TIMEOUT).",
                url,
                now - self.history.since,
                reason,
                self.history.count,
                timeout_s,
            )

    async def wait(self, delay_s: float, deadline: float, *, told_s: float = 0.0, cap_s: float = 20.0) -> bool:
        """Return when the next attempt may begin: after ``delay_s`` seconds on a good day, sooner where others show
        that the store is back, in its turn while it is down; not before the ``told_s`` seconds that the server asked
        for. False: the ``deadline`` has come, and the store is down."""
        now = self._clock.time()
        sleeper = _Sleeper(
            asyncio.get_running_loop().create_future(),
            at=now + max(delay_s, told_s),
            floor=now + min(delay_s, _FLOOR_S),
            earliest=now + told_s,
            deadline=deadline,
            cap_s=cap_s,
        )
        self._sleepers.append(sleeper)
        self._look()
        try:
            return await sleeper.woken
        finally:
            if sleeper in self._sleepers:  # it was cancelled
                self._sleepers.remove(sleeper)
                self._look()

    def _hasten(self, now: float, *, told: bool) -> None:
        """The store gives again. Who was told a time to wait keeps to it, but where ``told`` is False: other parts were
        answered many times since, so the store takes requests, and this one is as good as any."""
        within_s = min(_WAKE_WITHIN_S, _WAKE_EACH_S * len(self._sleepers))
        for sleeper in self._sleepers:
            soon = now + self._rng.uniform(0.0, min(within_s, sleeper.cap_s))
            sleeper.at = min(sleeper.at, max(sleeper.earliest if told else now, sleeper.floor, soon))
        self._look()

    def _look(self) -> None:
        """Wake who may go, and come back when the next one may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.time()
        for sleeper in list(self._sleepers):
            if now >= sleeper.deadline:
                self._wake(sleeper, may_try=not self.down)
            elif now >= self._due(sleeper):
                self._wake(sleeper, may_try=True)
                if self.down:
                    self._next_probe_at = now + self._interval_s(now, sleeper.cap_s)
        if self._sleepers:
            when = min(min(self._due(sleeper), sleeper.deadline) for sleeper in self._sleepers)
            self._timer = self._clock.call_at(max(when, now), self._look)

    def _due(self, sleeper: _Sleeper) -> float:
        return max(self._next_probe_at, sleeper.earliest, sleeper.floor) if self.down else sleeper.at

    def _wake(self, sleeper: _Sleeper, *, may_try: bool) -> None:
        self._sleepers.remove(sleeper)
        if not sleeper.woken.done():
            sleeper.woken.set_result(may_try)

    def _interval_s(self, now: float, cap_s: float) -> float:
        assert self.history is not None
        least, most = _PROBE_S
        bound = min(most, max(least, _PROBE_GROWTH * (now - self.history.since)))
        return min(cap_s, bound * self._rng.uniform(0.75, 1.25))


class Weather:
    """The stores of one process, by scheme and host."""

    def __init__(self, clock: Clock, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._skies: dict[str, Sky] = {}

    def of(self, name: str) -> Sky:
        """The state of the store ``name``."""
        if name not in self._skies:
            self._skies[name] = Sky(redact(name), self._clock, self._rng)
        return self._skies[name]
