"""How many connections: what pays, no more than keep a process busy, and fewer where a store refuses requests.

Little's law says that ``n`` parts of ``b`` bytes in flight, each taking ``t`` seconds, move ``n * b / t`` bytes a
second. A store that takes 50 ms for the first byte needs every connection it can get; a server in the same rack, a
millisecond away, saturates a process with a handful, and more of them only make each answer slower and cost CPU (with
64 connections instead of 8 a reader on loopback moved two thirds of the bytes for a quarter more CPU). So the best
time of a part bounds the number; below that it is found by trying (`growth`; `share`, where other processes of the
host read too), and cut where the store says so (`throttle`).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from wds_async.transfer.growth import Growth
from wds_async.transfer.share import Share
from wds_async.transfer.throttle import Throttle

__all__ = ["Concurrency", "Decision"]

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
