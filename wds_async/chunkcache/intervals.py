"""How long it takes until an object is used again, learned from those that were."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["Intervals"]

_STEPS = 4  # to each doubling
_TAIL = 0.02  # of the weight may lie above what is called usual
_MARGIN = 1.25
_FEWEST = 16


class Intervals:
    """The intervals between two uses of one object, in bytes served meanwhile, weighted by the object's bytes; older
    observations fade by half with each ``half_life_bytes``."""

    def __init__(self, half_life_bytes: float, state: Mapping[str, object] | None = None) -> None:
        self._half_life = max(1.0, half_life_bytes)
        self._weights: dict[int, float] = {}
        self._count = 0
        self._at = 0
        if state:
            self._restore(state)

    def observe(self, interval: int, weight: int, now: int) -> None:
        """An object of ``weight`` bytes was used again after ``interval``."""
        fading = 0.5 ** (max(0, now - self._at) / self._half_life)
        self._at = max(now, self._at)
        self._weights = {step: faded for step, w in self._weights.items() if (faded := w * fading) >= 1}
        step = math.floor(_STEPS * math.log2(max(1, interval)))
        self._weights[step] = self._weights.get(step, 0.0) + max(1, weight)
        self._count += 1

    def patience(self, least_weight: float) -> int | None:
        """After how long an object is surely not awaited any more; None where too little is known: fewer than 16 uses,
        or objects of fewer bytes than ``least_weight`` together."""
        total = sum(self._weights.values())
        if self._count < _FEWEST or total < least_weight:
            return None
        above = 0.0
        for step in sorted(self._weights, reverse=True):
            above += self._weights[step]
            if above > _TAIL * total:
                return int(_MARGIN * 2 ** ((step + 1) / _STEPS))
        raise AssertionError("weights add up to their sum")

    def state(self) -> dict[str, object]:
        """What `__init__` takes, for JSON."""
        return {"weights": {str(k): v for k, v in self._weights.items()}, "count": self._count, "at": self._at}

    def _restore(self, state: Mapping[str, object]) -> None:
        weights = state.get("weights")
        if isinstance(weights, Mapping):
            self._weights = {int(step): float(weight) for step, weight in weights.items()}
        self._count, self._at = int(str(state.get("count", 0))), int(str(state.get("at", 0)))
