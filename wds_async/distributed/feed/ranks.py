"""Consumption of a rank of a feed: which batches, in which order, how many of them ahead, and where its epoch ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from wds_async.distributed.feed.messages import Generation, Horizon, Started

__all__ = ["RankBatches", "Wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch to be fetched: its number in the epoch, and where it is."""

    number: int
    epoch: int
    generation: int
    decoder: int
    place: int
    """The how manieth batch of that decoder it is, from 0."""


class RankBatches:
    """The batches of one rank. At step s it takes number s * W + r, behind those before the session.

    An epoch of all ranks ends at the same step: with the last step for which all have a batch (``even``), or else one
    step later for the first ones. ``ahead`` is how many bytes of batches may be fetched that the program has not yet.
    """

    def __init__(self, rank: int, world_size: int, started: Started, ahead: int, *, even: bool = True) -> None:
        self.rank, self.world_size, self.session = rank, world_size, started.session
        self.epoch, self._first = started.epoch, started.next
        self._even, self._ahead = even, ahead
        self._step = self._planned = 0
        self._generations: tuple[Generation, ...] = ()
        self._limit = started.next
        self._queues: dict[int, deque[Wanted]] = {}
        self._here: dict[int, tuple[Any, int]] = {}
        self._largest = 0

    @property
    def next(self) -> int:
        """The number of the first batch of the next step: all batches below it that are this rank's were given."""
        return self._first + self._step * self.world_size

    def update(self, horizon: Horizon) -> None:
        """Take what the coordinator tells."""
        if horizon.generations and horizon.generations[0].epoch == self.epoch:
            self._generations, self._limit = horizon.generations, horizon.limit
        self._plan()

    def begin_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch += 1
        self._first = self._step = self._planned = 0
        self._generations, self._limit = (), 0
        self._queues, self._here = {}, {}

    def _known(self) -> int:
        return self._generations[-1].numbering.known if self._generations else 0

    @property
    def total(self) -> int | None:
        """The number of batches of the epoch; None while it is not known."""
        if not self._generations or not self._generations[-1].last:
            return None
        return self._generations[-1].numbering.total

    def _has(self, step: int) -> bool | None:
        """Return whether this rank takes a batch at ``step``; None if that is not known yet."""
        first = self._first + step * self.world_size
        last = first + (self.world_size - 1 if self._even else self.rank)
        if last < self._known():
            return True
        return None if self.total is None else False

    def _plan(self) -> None:
        """Queue batches that may be fetched."""
        while self._has(self._planned):
            number = self._first + self._planned * self.world_size + self.rank
            enough = (self._planned - self._step) * self._largest >= self._ahead
            if self._planned > self._step and (enough or not self._largest):
                return
            generation = next(one for one in reversed(self._generations) if one.numbering.start <= number)
            decoder, place = generation.numbering.locate(number)
            wanted = Wanted(number, self.epoch, generation.id, decoder, place)
            self._queues.setdefault(decoder, deque()).append(wanted)
            self._planned += 1

    def decoders(self) -> list[int]:
        """Return the decoders from which something is wanted."""
        return [decoder for decoder, queue in self._queues.items() if queue]

    def wanted(self, decoder: int) -> Wanted | None:
        """Return what to fetch from ``decoder`` next; None for nothing. It is the same until `arrived`."""
        queue = self._queues.get(decoder)
        return queue[0] if queue else None

    def arrived(self, wanted: Wanted, batch: Any, size: int) -> None:
        """Take a batch of ``size`` bytes. One that was had before is dropped."""
        queue = self._queues.get(wanted.decoder)
        if not queue or queue[0] != wanted:
            return
        queue.popleft()
        self._here[wanted.number] = batch, size
        self._largest = max(self._largest, size, 1)
        self._plan()

    @property
    def is_starving(self) -> bool:
        """True if nothing further can be planned, or given, until the coordinator tells more."""
        if self.next >= self._limit:
            return True
        enough = self._planned > self._step and (
            not self._largest or (self._planned - self._step) * self._largest >= self._ahead
        )
        return not enough and self._has(self._planned) is None

    @property
    def is_over(self) -> bool:
        """True if the epoch has no further step for this rank."""
        return self._has(self._step) is False

    @property
    def left_over(self) -> int:
        """Batches at the end of the epoch that no rank is given, fewer than there are ranks."""
        total = self.total
        return 0 if total is None or not self._even else max(0, total - self._first) % self.world_size

    @property
    def is_ready(self) -> bool:
        """True if the batch of the next step is here, and this rank is not too far before others."""
        return self.next + self.rank in self._here and self.next < self._limit

    @property
    def batch_bytes(self) -> int:
        """Bytes of the largest batch so far."""
        return self._largest

    def take(self) -> Any:
        """Return the batch of the next step, which is here."""
        batch, _ = self._here.pop(self.next + self.rank)
        self._step += 1
        self._plan()
        return batch
