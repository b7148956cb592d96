"""The number of requests in flight: additive increase, multiplicative decrease, within a bound from the latency. Each
decision is a line of the logger ``wds_async.control``, with its reason."""

from __future__ import annotations

import logging
import math
from collections import deque

__all__ = ["Concurrency"]

logger = logging.getLogger("wds_async.control")

_CEILING_BYTES_S = 4e9
"""More than one process was ever seen to take in (``benchmarks --run http``), so the bound slows no process down."""
_LEAST = 8
_LEAST_SHARED = 2
_EPOCH_S = 5.0
_LOGGED_CHANGE = 0.2
_ROUGH_PARTS = 512

_FULL = 0.75
"""Share of the limit that must be in flight; below it the consumer sets the pace, and times say nothing of the link."""
_CROWDED = 1.6
"""Time of a part as a multiple of its best, where other processes fill the link."""
_GROUP_PARTS = 8
"""The fastest of so many parts is compared with the best time: the mean shows the slow moments of a store as well."""
_STEP = 0.25
_HOLD_S = 0.75
"""Time without increase after a cut; doubled while the same number is refused again, up to ``_HOLD_MOST_S``."""
_HOLD_MOST_S = 20.0

_TOLERATED = 0.08
"""Share of refused requests below which nothing is cut: each of them waits by itself before it is repeated."""
_STORM = 0.5
_OUTAGE = 0.9
_CUT_TO, _CUT_TO_IN_OUTAGE = 0.85, 0.5
_GROUP_S = 1.0
_GROUP_ANSWERS = 20
_LEAST_REFUSALS = 2
_BY_CHANCE_MOST = 0.25
_BY_CHANCE_S = 30.0


class _RefusedShare:
    """The share of requests that the store refuses (429, 503), in groups of a second.

    A store that refuses as large a share of fewer requests refuses by chance; that share is tolerated for 30 s.
    """

    def __init__(self) -> None:
        self._landed = self._refused = 0
        self._began = 0.0
        self._first: tuple[int, float] | None = None
        self._chance, self._chance_until = 0.0, -math.inf

    def add(self, now: float, limit: int, *, refused: bool) -> float:
        """Count one answer. Return the share refused where it is too large, once a group is complete; else 0."""
        if self._landed + self._refused == 0:
            self._began = now
        self._refused += refused
        self._landed += not refused
        answers = self._landed + self._refused
        share, refusals = self._refused / answers, self._refused
        full, late = answers >= max(_GROUP_ANSWERS, limit), now - self._began >= _GROUP_S
        if not ((full and (late or share >= _STORM)) or (late and refusals >= _LEAST_REFUSALS)):
            return 0.0
        self._landed = self._refused = 0
        if refusals < _LEAST_REFUSALS or share <= (self._chance if now < self._chance_until else _TOLERATED):
            return 0.0
        self._first = self._first or (limit, share)
        limit_then, share_then = self._first
        if share <= _BY_CHANCE_MOST and limit <= 0.75 * limit_then and share >= 0.7 * share_then:
            self._chance, self._chance_until = 1.5 * share, now + _BY_CHANCE_S
            return 0.0
        return share

    def forget(self) -> None:
        """Begin anew: the limit has recovered from the last cut."""
        self._first = None


class Concurrency:
    """The limit on parts in flight of one reader. It begins at ``most`` and never exceeds it.

    Little's law bounds it: as many parts as move 4 GB/s at the best time of the last seconds, of all ``processes`` of
    the host together. A process alone uses that bound. One of several begins with its share of ``most`` and grows while
    parts take less than 1.6 times their best time; it is halved, but not below its share, when they take longer.
    Refused requests cut the limit by their share, and it grows again by a quarter a round after a pause.
    """

    def __init__(self, most: int, processes: int = 1) -> None:
        self.most = most
        self.limit = most
        """Parts that may be in flight now."""
        self.flying = 0
        """Parts that are in flight, of all readers of the process."""
        self.slowdown = 1.0
        """Time of the fastest of eight parts as a multiple of the best: more than 2 where the link is full."""
        self.rough = 0
        """Parts still to be started as over a line that fails now and then: the window reads as far ahead as its memory
        allows, so that the consumer does not wait for one part to heal."""
        self._ceiling = _CEILING_BYTES_S / processes
        self._least = min(most, max(_LEAST_SHARED, _LEAST // processes))
        self._share = max(self._least, most // processes)
        self._exact = float(most)
        self._logged = most
        self._best: dict[int, float] = {}
        """Best seconds a byte by size of the part, in powers of two."""
        self._lately: deque[float] = deque([math.inf], maxlen=2)
        """Best seconds a byte of these five seconds and of the five before."""
        self._epoch_began = 0.0
        self._refusals = _RefusedShare()
        self._begun = self._crowded = False
        self._mean_s = 0.0
        self._changed_at = self._hold_until = self._deaf_until = -math.inf
        self._hold_s = _HOLD_S
        self._parts = self._parts_flying = 0
        self._slowdown, self._fastest = 0.0, math.inf

    @property
    def room(self) -> int:
        """Parts that the window may have in flight; over a line that fails now and then a sixteenth of the connections
        is left to second attempts."""
        return min(self.limit, self.most - self.most // 16) if self.rough else self.limit

    def stumbled(self) -> None:
        """Note that a part had to be requested again, or twice."""
        self.rough = _ROUGH_PARTS

    def started(self) -> None:
        """Note that a part was started."""
        self.rough -= self.rough > 0

    def in_flight(self, parts: int) -> None:
        """Note how many parts are in flight now; far below the limit something else limits."""
        self.flying = parts

    def observe(self, received_bytes: int, took_s: float, now: float) -> None:
        """Note that a part of ``received_bytes`` took ``took_s`` from its request to its last byte."""
        if received_bytes <= 0 or took_s <= 0:
            return
        slowdown = self._compare(received_bytes, took_s, now)
        self._mean_s += (took_s - self._mean_s) / 8
        bound = self._bound()
        if not self._begun:
            self._begun = True
            reason = _latency_bound(took_s) if bound < self.most else "the latency asks for all of them"
            if bound > self._share:
                reason = "this process's share of the connections to begin with"
            self._set(min(bound, self._share), now, reason, always=True)
        elif share := self._refusals.add(now, self.limit, refused=False):
            self._cut(share, now)
        elif self._exact > bound:
            self._set(bound, now, _latency_bound(took_s))
        elif now - took_s >= self._changed_at:  # it was requested under this limit
            self._count(slowdown, now, bound)

    def throttled(self, now: float) -> None:
        """Note that the store refused a request. What was requested before the last cut is ignored, and so is what
        comes before the first answer, when little is in flight."""
        if self._begun and now >= self._deaf_until:
            share = self._refusals.add(now, self.limit, refused=True)
            if share:
                self._cut(share, now)

    def _compare(self, received_bytes: int, took_s: float, now: float) -> float:
        """Return how many times the best time of such parts this one took."""
        if now - self._epoch_began > _EPOCH_S:
            self._epoch_began = now
            self._lately.append(math.inf)
        size, pace = received_bytes.bit_length(), took_s / received_bytes
        self._lately[-1] = min(pace, self._lately[-1])
        best = self._best[size] = min(pace, self._best.get(size, pace))
        return pace / best

    def _bound(self) -> int:
        """Return what keeps the process busy at the best time of a part."""
        wanted = self._ceiling * min(self._lately)
        return self.most if wanted >= self.most else max(self._least, int(wanted) + 1)

    def _count(self, slowdown: float, now: float, bound: int) -> None:
        """Change the limit after each round, which is as many parts as may be in flight."""
        self._parts += 1
        self._parts_flying += self.flying
        self._fastest = min(self._fastest, slowdown)
        if self._parts % _GROUP_PARTS == 0:
            self._slowdown += self._fastest
            self.slowdown += (self._fastest - self.slowdown) / 2
            self._fastest = math.inf
        if self._parts < max(_GROUP_PARTS, self.limit):
            return
        full = self._parts_flying >= _FULL * self.limit * self._parts
        slowdown = self._slowdown / (self._parts // _GROUP_PARTS)
        self._restart()
        if not full or now < self._hold_until:
            return
        share = min(bound, self._share)
        if self._exact >= bound:
            self._refusals.forget()
            if now >= self._hold_until + _HOLD_MOST_S / 4:
                self._hold_s = _HOLD_S
        if self._exact > share and slowdown >= _CROWDED:
            self._crowded = True
            self._set(max(share, self._exact / 2), now, f"parts take {slowdown:.1f} times their best")
        elif self._exact < bound and (slowdown < _CROWDED or self._exact < share):
            more = 1.0 if self._crowded and self._exact >= share else max(1.0, _STEP * self._exact)
            self._set(min(bound, self._exact + more), now, f"parts take {slowdown:.1f} times their best only")

    def _cut(self, share: float, now: float) -> None:
        """Leave out what was refused. Each part too many is refused several times over while others come, so that the
        share alone would cut too deep."""
        if share >= _OUTAGE:
            self._hold_s = _HOLD_S
        elif now >= self._hold_until:  # the same number is too many again
            self._hold_s = min(_HOLD_MOST_S, 2 * self._hold_s)
        self._hold_until = now + self._hold_s
        self._deaf_until = now + min(1.0, max(0.1, self._mean_s))
        kept = max(_CUT_TO_IN_OUTAGE if share >= _OUTAGE else _CUT_TO, 1 - share)
        self._set(
            max(1.0, min(self.limit - 1, kept * self.limit)), now, f"the store refused {share:.0%} of the requests"
        )

    def _set(self, limit: float, now: float, reason: str, *, always: bool = False) -> None:
        self._exact, self._changed_at = float(limit), now
        self._restart()
        self.limit = int(limit)
        change = abs(self.limit - self._logged)
        if always or change > _LOGGED_CHANGE * min(self.limit, self._logged):
            logger.info("connections %d → %d: %s", self._logged, self.limit, reason)
            self._logged = self.limit

    def _restart(self) -> None:
        self._parts = self._parts_flying = 0
        self._slowdown, self._fastest = 0.0, math.inf


def _latency_bound(took_s: float) -> str:
    return f"parts take {1e3 * took_s:.0f} ms: more would only wait"
