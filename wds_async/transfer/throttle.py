"""What a store that refuses requests (429, 503) is left with: a cut by as much as it refused, then back along a cubic.

The curve is that of CUBIC (RFC 9438 §4.2): steep from where the cut led to, flat near the number at which the store
refused, and steeper again behind it. A store that really allows so many only is then met by a few requests too many
now and then; one that had a bad minute gets all of them back within seconds.
"""

from __future__ import annotations

import math

__all__ = ["Throttle"]

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
