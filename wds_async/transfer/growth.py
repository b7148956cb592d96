"""How many parts in flight pay: twice as many as long as they move more, half as many again now and then to see.

The pace of ``n`` parts in flight is ``n * bytes / seconds`` of those that came (Little's law). Told by how long parts
took and not by how many came in a second, it needs no clock of its own, and a consumer that paused, or had its memory
full, does not look like a slow link. A link that is full shows as parts that take twice as long when there are twice
as many.
"""

from __future__ import annotations

__all__ = ["Growth"]

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
