"""How many connections: as many as keep a process busy at the best pace that this store was seen to answer, no more.

Little's law says that ``n`` parts of ``b`` bytes in flight, each taking ``t`` seconds, move ``n * b / t`` bytes a
second. A store that takes 50 ms for the first byte needs every connection it can get; a server in the same rack, a
millisecond away, saturates a process with a handful, and more of them only make each answer slower and cost CPU (with
64 connections instead of 8 a reader on loopback moved two thirds of the bytes for a quarter more CPU).
"""

from __future__ import annotations

from collections import deque

__all__ = ["Concurrency"]

_CEILING_BYTES_S = 4e9
"""More than one process was ever seen to take in (``benchmarks/http.py``): the limit never holds a faster one back."""
_LEAST = 8
_LEAST_SHARED = 2
_EPOCH_S = 5.0
_EPOCHS_REMEMBERED = 2


class Concurrency:
    """The limit on parts in flight, learnt from how long parts take. It begins at ``most`` and never exceeds it.

    The best time of the last seconds counts, not the mean: a part that took long may have waited behind ours.
    ``processes`` of the host read at the same time, so that each needs its share of the pace only.
    """

    def __init__(self, most: int, processes: int = 1) -> None:
        self.most = most
        self._ceiling = _CEILING_BYTES_S / processes
        self._least = min(most, max(_LEAST_SHARED, _LEAST // processes))
        self._wanted: deque[float] = deque([float("inf")], maxlen=_EPOCHS_REMEMBERED)
        self._epoch_began = 0.0

    @property
    def limit(self) -> int:
        """Parts that may be in flight now."""
        wanted = min(self._wanted)
        return self.most if wanted >= self.most else max(self._least, int(wanted) + 1)

    def observe(self, received_bytes: int, took_s: float, now: float) -> None:
        """A part of ``received_bytes`` took ``took_s`` from its request to its last byte."""
        if received_bytes <= 0 or took_s <= 0:
            return
        if now - self._epoch_began > _EPOCH_S:
            self._epoch_began = now
            self._wanted.append(float("inf"))
        self._wanted[-1] = min(self._wanted[-1], self._ceiling * took_s / received_bytes)

    def throttled(self, now: float) -> None:
        """The store asked for fewer requests."""
