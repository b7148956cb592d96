"""How many connections a process opens to an origin: growth, throttling, and the share among its readers."""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass

__all__ = ["Concurrency", "Decision", "Growth", "Share", "Throttle"]

_TOLERATED = 0.08


"""Refused requests of all that are worth no cut: each of them waits by itself before it is made again."""


_STORM = 0.5


_ALL = 0.9


_DEEPEST = 0.7


_DEEPEST_IN_A_STORM = 0.5


_CHANCE = 1.5


_CHANCE_MOST = 0.25


_CHANCE_S = 30.0


_WINDOW_S = 1.0


_WINDOW_ANSWERS = 20


_LEAST_REFUSALS = 2


_DEAF_S = (0.1, 1.0)


_PATIENCE_S = 2.0


_PATIENCE_MOST_S = 20.0


_PATIENCE_GROWTH = 2.0


_BEYOND = 1.5


class Throttle:
    """A cap on parts in flight; infinite while the store refuses nothing, never under 1.

    Answers are judged in groups of a second: one refused request among hundreds is no reason to halve anything.
    """

    def __init__(self) -> None:
        self.cap = math.inf
        self._landed = self._refused = 0
        self._began = -math.inf
        self._deaf_until = -math.inf
        self._took_s = 0.0
        self._low = self._last = 1.0
        self._since: float | None = None
        self._patience_s = _PATIENCE_S
        self._first: tuple[int, float] | None = None
        """The number and share of the first cut since all was well."""
        self._chance, self._chance_until = 0.0, -math.inf

    @property
    def active(self) -> bool:
        """Whether there is a cap now."""
        return self.cap < math.inf

    def landed(self, took_s: float, now: float, limit: int, target: int) -> str:
        """A part came in ``took_s`` while ``limit`` might be in flight; without a cap ``target`` might. Returns what
        was decided, "" for nothing."""
        self._took_s += (took_s - self._took_s) / 8
        self._landed += 1
        self._begin(now)
        decided = self._judge(now, limit)
        return decided or self._recover(now, target)

    def refused(self, now: float, limit: int) -> str:
        """The store refused a request. Returns what was decided, "" for nothing."""
        if now < self._deaf_until:  # it was asked before the last cut
            return ""
        self._refused += 1
        self._begin(now)
        return self._judge(now, limit)

    def _begin(self, now: float) -> None:
        if self._landed + self._refused == 1:
            self._began = now

    def _judge(self, now: float, limit: int) -> str:
        """Cut by what was refused of the last group of answers, once there are enough of them."""
        answers = self._landed + self._refused
        share = self._refused / answers
        full, late = answers >= max(_WINDOW_ANSWERS, limit), now - self._began >= _WINDOW_S
        over = (full and (late or share >= _STORM)) or (late and self._refused >= _LEAST_REFUSALS)
        if not over:
            if late and full:
                self._landed = self._refused = 0
            return ""
        refused = self._refused
        self._landed = self._refused = 0
        if refused < _LEAST_REFUSALS or share <= (self._chance if now < self._chance_until else _TOLERATED):
            return ""
        if self._in_vain(share, limit):
            self._chance, self._chance_until = _CHANCE * share, now + _CHANCE_S
            return ""
        return self._cut(share, now, limit)

    def _in_vain(self, share: float, limit: int) -> bool:
        """Whether the store refuses as large a share of fewer: then it is chance, and cutting does not help."""
        if self._first is None:
            self._first = limit, share
        at, then = self._first
        return share <= _CHANCE_MOST and limit <= 0.75 * at and share >= 0.7 * then

    def _cut(self, share: float, now: float, limit: int) -> str:
        came_back = self._since is not None and now - self._since >= self._patience_s
        if share >= _ALL:
            self._patience_s = _PATIENCE_S
        elif came_back:  # the same number is too many again: it is the store's own, and asking sooner is rude
            self._patience_s = min(_PATIENCE_MOST_S, _PATIENCE_GROWTH * self._patience_s)
        # Each part that is too many is refused several times over while the others come, so the share says too much.
        deepest = _DEEPEST_IN_A_STORM if share >= _ALL else _DEEPEST
        self.cap = self._low = max(1.0, min(limit - 1, limit * max(deepest, 1 - share)))
        self._last = (limit + self._low) / 2  # what it allows lies between the two
        self._since = None
        self._deaf_until = now + min(_DEAF_S[1], max(_DEAF_S[0], self._took_s))
        return f"the store refused {share:.0%} of the requests"

    def _recover(self, now: float, target: int) -> str:
        if not self.active:
            return ""
        if self._since is None:  # while nothing comes, time heals nothing
            self._since = now
        passed, patience = now - self._since, self._patience_s
        if passed < patience:
            self.cap = self._last - (self._last - self._low) * (1 - passed / patience) ** 3
        else:
            beyond = (passed - patience) / (_BEYOND * patience)
            self.cap = self._last + max(0.0, target - self._last) * beyond**3
        if self.cap < target:
            return ""
        self.cap, self._first = math.inf, None
        if passed >= 2 * _PATIENCE_S:
            self._patience_s = _PATIENCE_S
        return f"the store has refused little for {passed:.1f} s"


_BEGIN_SHARE = 4


_WORTH = 0.2


"""Of what more connections would bring if each had a pace of its own: with less they do not pay."""


_NOISE = 0.02


_SOME = 0.04


"""What half of a look's more connections are kept for."""


_KEPT = 0.97


"""What fewer connections must move of what more did, to stay fewer."""


_FULL = 0.75


"""Parts in flight, of those that may be, below which the consumer sets the pace."""


_PROBE_S = 3.0


"""Until the first look; each that fails is waited for twice as long as the last, up to ``_PROBE_MOST_S``."""


_PROBE_MOST_S = 24.0


_LOOK_PARTS = 48


class Growth:
    """The number that pays, between ``least`` and a ``bound`` that is given with each part.

    Before a part has come it is ``most``: until then the window's own slow start holds back. ``eager``: it begins with
    all that the latency asks for, and not with a quarter.
    """

    def __init__(self, least: int, most: int, *, eager: bool = False) -> None:
        self.limit = most
        self._least = least
        self._begun = False
        self._begin_share = 1 if eager else _BEGIN_SHARE
        self._growing = True
        self._home: int | None = None
        """What a probe goes back to; None between probes."""
        self._pace = 0.0
        """Bytes a second at the number that is kept; 0: not known."""
        self._kept = most
        self._probe_at = 0.0
        self._wait_s = _PROBE_S
        self._up = True
        self._changed_at = 0.0
        self._wanted = 1
        self._parts = self._flying = self._bytes = 0
        self._seconds = 0.0

    def observe(self, received_bytes: int, took_s: float, now: float, bound: int, flying: int) -> str:
        """A part came, one of ``flying``. Returns what was decided, "" for nothing."""
        if not self._begun:
            self._begun = True
            how = "all" if self._begin_share == 1 else "a quarter of"
            return self._set(max(self._least, bound // self._begin_share), now, f"{how} what the latency asks for")
        if self.limit > bound:
            self._settle(now)
            return self._set(bound, now, f"parts take {1e3 * took_s:.0f} ms: more would only wait")
        if now - took_s < self._changed_at:  # it was asked for under another limit
            return ""
        self._parts += 1
        self._flying += flying
        self._bytes += received_bytes
        self._seconds += took_s
        if self._parts < self._wanted:
            return ""
        flew = self._flying / self._parts
        pace = flew * self._bytes / self._seconds if flew >= _FULL * self.limit else 0.0
        return self._judge(pace, now, bound)

    def rest(self, now: float) -> None:
        """Something else limits now: what comes says nothing, and a probe is over."""
        if self._home is not None:
            self.limit, self._home = self._home, None
        self._restart(now)

    def _judge(self, pace: float, now: float, bound: int) -> str:
        """``pace`` of the rounds that are over; 0 where the consumer set it."""
        if self._home is not None:
            return self._judge_probe(pace, self._home, now, bound)
        if pace == 0.0:
            self._restart(self._changed_at)
            return ""
        if self._growing:
            return self._grow(pace, now, bound)
        self._restart(self._changed_at)
        self._pace = pace if self._pace == 0.0 else 0.7 * self._pace + 0.3 * pace
        return self._probe(now, bound) if now >= self._probe_at else ""

    def _grow(self, pace: float, now: float, bound: int) -> str:
        if self._pace == 0.0:
            return self._go_on(pace, now, bound, f"{pace / 1e6:.0f} MB/s so far")
        gain = self._gain(pace)
        if gain >= self._worth(self._kept):
            return self._go_on(pace, now, bound, f"throughput grew {1 + gain:.1f} times")
        if self._wanted <= self.limit:  # what came so far counts in a second look
            self._wanted = _look(self.limit)
            return ""
        kept = self._kept if gain < _NOISE else (self._kept + self.limit) // 2
        self._settle(now)
        self._up = gain >= _NOISE
        return self._set(kept, now, f"throughput grew {max(0.0, gain):.0%} only")

    def _go_on(self, pace: float, now: float, bound: int, reason: str) -> str:
        """What was tried last pays, and is kept: try twice as many."""
        self._growing, self._pace, self._kept = True, pace, self.limit
        if self.limit >= bound:
            self._settle(now)
            self._pace = pace
            self._restart(self._changed_at)
            return ""
        return self._set(min(2 * self.limit, bound), now, reason)

    def _probe(self, now: float, bound: int) -> str:
        up = min(bound, max(self.limit + 1, self.limit * 3 // 2))
        down = max(self._least, self.limit * 3 // 4)
        self._up = up > self.limit and (self._up or down == self.limit)
        to = up if self._up else down
        if to == self.limit:
            return ""
        self._home, self._kept = self.limit, self.limit
        return self._set(to, now, "a look whether " + ("more pay" if self._up else "fewer do as well"), _look(to))

    def _judge_probe(self, pace: float, home: int, now: float, bound: int) -> str:
        """Keep what was tried, or go back and wait longer for the next look."""
        gain, up = self._gain(pace), self._up
        if pace and not up and 1 + gain >= _KEPT and self.limit > self._least:
            # Still fewer, at once, against the same pace: step by step, each against the last, much would be lost.
            self._home = self.limit
            fewer = max(self._least, self.limit * 3 // 4)
            return self._set(fewer, now, f"throughput changed by {gain:+.0%} with fewer", _look(fewer))
        self._home, self._up = None, not up
        self._wait_s = min(_PROBE_MOST_S, 2 * self._wait_s)
        self._probe_at = now + self._wait_s
        if pace and up and gain >= self._worth(home):
            return self._go_on(pace, now, bound, f"throughput grew {1 + gain:.1f} times")
        if pace and not up and 1 + gain >= _KEPT:
            home = self.limit
        elif up and gain >= _SOME:
            home = (home + self.limit) // 2
        elif (
            not up and home < self._kept
        ):  # the last of several steps down was too far: the one before it may be, a bit
            home = min(self._kept, home + max(1, home // 6))
        return self._set(home, now, f"throughput changed by {gain:+.0%}" if pace else "the consumer sets the pace")

    def _gain(self, pace: float) -> float:
        return pace / self._pace - 1 if self._pace and pace else 0.0

    def _worth(self, before: int) -> float:
        return _WORTH * (self.limit / before - 1)

    def _settle(self, now: float) -> None:
        self._growing, self._home, self._up, self._pace = False, None, True, 0.0
        self._wait_s, self._probe_at = _PROBE_S, now + _PROBE_S

    def _set(self, limit: int, now: float, reason: str, wanted: int = 0) -> str:
        self.limit, self._wanted = limit, wanted or limit
        self._restart(now)
        return reason

    def _restart(self, changed_at: float) -> None:
        self._changed_at = changed_at
        self._parts = self._flying = self._bytes = 0
        self._seconds = 0.0


def _look(limit: int) -> int:
    """How many parts tell a few per cent from chance."""
    return max(2 * limit, _LOOK_PARTS)


_FIRST_SHARE = 2


_CROWDED = 1.5


_GROUP_PARTS = 8


"""The fastest of so many is looked at, however many are in flight: of more it would be faster by chance, and the mean
is that of a store's bad moments."""


_TOLD = 0.25


class Share:
    """The number of one of several ``processes``, at most a ``bound`` that is given with each part.

    Before a part has come it is ``most``. Then ``begin``, its part of half the connections, is also how many of its
    parts may wait, so that it never has fewer: a store that became slow looks like a link that others fill.
    """

    def __init__(self, least: int, most: int, processes: int) -> None:
        self.limit = most
        self._begin = max(least, most // (_FIRST_SHARE * processes))
        self._begun = False
        self._doubling = True
        self._exact = float(most)
        self._told = most
        self._best_s: dict[int, float] = {}  # by the size of the part, in powers of two
        self._changed_at = 0.0
        self._parts = self._flying = 0
        self._waited, self._fastest = 0.0, math.inf

    def observe(self, received_bytes: int, took_s: float, now: float, bound: int, flying: int) -> str:
        """A part came, one of ``flying``. Returns what was decided, "" for nothing worth telling."""
        size = received_bytes.bit_length()
        best = self._best_s[size] = min(took_s, self._best_s.get(size, took_s))
        if not self._begun:
            self._begun = True
            return self._set(min(bound, self._begin), now, "this process's share to begin with")
        if self.limit > bound:
            return self._set(bound, now, f"parts take {1e3 * took_s:.0f} ms: more would only wait")
        if now - took_s < self._changed_at:  # it was asked for under another limit
            return ""
        self._parts += 1
        self._flying += flying
        self._fastest = min(self._fastest, took_s / best)
        if self._parts % _GROUP_PARTS:
            return ""
        self._waited += self._fastest
        self._fastest = math.inf
        if self._parts < self.limit:
            return ""
        full = self._flying >= _FULL * self.limit * self._parts
        waited = self._waited / (self._parts // _GROUP_PARTS)
        self._restart()
        return self._judge(waited, now, bound) if full else ""

    def rest(self, now: float) -> None:
        """Something else limits now: what comes says nothing."""
        self._changed_at = now
        self._restart()

    def _judge(self, waited: float, now: float, bound: int) -> str:
        """``waited``: how many times its best a part took."""
        self._doubling = self._doubling and waited < _CROWDED
        exact = self._exact
        wanted = 2 * exact if self._doubling else (exact + exact / waited + self._begin) / 2
        return self._set(min(bound, wanted), now, f"parts take {waited:.1f} times their best")

    def _set(self, limit: float, now: float, reason: str) -> str:
        self._exact = limit
        self._restart()
        if int(limit) == self.limit:
            return ""
        self.limit, self._changed_at = int(limit), now
        if abs(self.limit - self._told) < _TOLD * self._told:
            return ""
        self._told = self.limit
        return reason

    def _restart(self) -> None:
        self._parts = self._flying = 0
        self._waited, self._fastest = 0.0, math.inf


logger = logging.getLogger("wds_async.control")


_CEILING_BYTES_S = 4e9


"""More than one process was ever seen to take in (``benchmarks/http.py``): the limit never holds a faster one back."""


_LEAST = 8


_LEAST_SHARED = 2


_EPOCH_S = 5.0


_EPOCHS_REMEMBERED = 2


_DECISIONS_KEPT = 64


_ROUGH_PARTS = 512


@dataclass(frozen=True, slots=True)
class Decision:
    """At ``at_s`` (the loop's clock) the limit became ``limit``, for this ``reason``."""

    at_s: float
    limit: int
    reason: str


class Concurrency:
    """The limit on parts in flight of one reader. It begins at ``most`` and never exceeds it.

    The best time of the last seconds bounds it, not the mean: a part that took long may have waited behind ours.
    ``processes`` of the host read at the same time, so that each needs its share of the pace only. ``eager``: see
    `Growth`; for who asks on behalf of others that hold back themselves.
    """

    def __init__(self, most: int, processes: int = 1, *, eager: bool = False) -> None:
        self.most = most
        self.limit = most
        """Parts that may be in flight now."""
        self.flying = 0
        """Parts that are in flight, told by the window; where it is far below the limit, something else limits."""
        self.rough = 0
        """How many more parts are begun as over a line that fails now and then: the window reads as far ahead as its
        memory allows, so that what waits for one part to heal is not the consumer."""
        self.decisions: deque[Decision] = deque(maxlen=_DECISIONS_KEPT)
        """The last ones, each also a line of the logger ``wds_async.control``."""
        self._ceiling = _CEILING_BYTES_S / processes
        self._least = min(most, max(_LEAST_SHARED, _LEAST // processes))
        self._wanted: deque[float] = deque([float("inf")], maxlen=_EPOCHS_REMEMBERED)
        self._epoch_began = 0.0
        self._growth = Growth(self._least, most, eager=eager) if processes == 1 else Share(self._least, most, processes)
        self._throttle = Throttle()
        self._answered = False

    @property
    def room(self) -> int:
        """Parts that the window may have in flight: over a line that fails now and then a few connections are left for
        what has to be asked for twice."""
        return min(self.limit, self.most - self.most // 16) if self.rough else self.limit

    def stumbled(self) -> None:
        """A part had to be asked for again, or twice."""
        self.rough = _ROUGH_PARTS

    def observe(self, received_bytes: int, took_s: float, now: float) -> None:
        """A part of ``received_bytes`` took ``took_s`` from its request to its last byte."""
        if received_bytes <= 0 or took_s <= 0:
            return
        if now - self._epoch_began > _EPOCH_S:
            self._epoch_began = now
            self._wanted.append(float("inf"))
        self._wanted[-1] = min(self._wanted[-1], self._ceiling * took_s / received_bytes)
        self._answered = True
        reason = self._throttle.landed(took_s, now, self.limit, self._growth.limit)
        if self._throttle.active:
            self._growth.rest(now)
        else:
            reason = reason or self._growth.observe(received_bytes, took_s, now, self._bound(), self.flying)
        self._decide(now, reason)

    def throttled(self, now: float) -> None:
        """The store asked for fewer requests."""
        if self._answered:  # before a first answer there is nothing to go back to, and little in flight
            self._decide(now, self._throttle.refused(now, self.limit))

    def _bound(self) -> int:
        """What keeps the process busy at the best time of a part."""
        wanted = min(self._wanted)
        return self.most if wanted >= self.most else max(self._least, int(wanted) + 1)

    def _decide(self, now: float, reason: str) -> None:
        """Take over what the two have found; what comes back along the curve is told at its end only."""
        before, self.limit = self.limit, int(min(self._growth.limit, self._throttle.cap))
        if reason and self.limit != before:
            self.decisions.append(Decision(now, self.limit, reason))
            logger.info("connections %d → %d: %s", before, self.limit, reason)
