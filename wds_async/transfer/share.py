"""How many parts in flight are one process's share of a link that the others of its host use too.

Throughput tells a process nothing here: on a full link it moves more with more connections, by what the others lose,
and so would each of them. What all of them see alike is that parts take longer than they would alone, that is: wait.
So each keeps about as many parts waiting as the others do, and no more (Wei, Jin, Low and Hegde, "FAST TCP", 2006,
equation 4): whoever has more in flight has more that wait, and gives way.
"""

from __future__ import annotations

import math

__all__ = ["Share"]

_BEGIN_SHARE = 2
_CROWDED = 1.5
_GROUP_PARTS = 8
"""The fastest of so many is looked at, however many are in flight: of more it would be faster by chance, and the mean
is that of a store's bad moments."""
_FULL = 0.75
_TOLD = 0.25


class Share:
    """The number of one of several ``processes``, at most a ``bound`` that is given with each part.

    Before a part has come it is ``most``. Then ``begin``, its part of half the connections, is also how many of its
    parts may wait, so that it never has fewer: a store that became slow looks like a link that others fill.
    """

    def __init__(self, least: int, most: int, processes: int) -> None:
        self.limit = most
        self._begin = max(least, most // (_BEGIN_SHARE * processes))
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
