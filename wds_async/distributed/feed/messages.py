"""Messages of the coordinator, the decoders and the ranks of a feed, and the numbers of its batches.

Batches are numbered round by round. A round has one batch of each decoder that still has one, in the order of the
decoders. While all of them have, batch ``n`` comes from decoder ``n mod N``; behind the end of one the others go on
without it. Numbers follow from what the decoders have and from nothing else, so all ranks find the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Assignment", "DecoderReport", "FeedState", "Generation", "Horizon", "Numbering", "RankReport", "Started",
]  # fmt: skip

FeedState = Mapping[str, Any]
"""State of a feed, as values that JSON can hold."""


@dataclass(frozen=True)
class Numbering:
    """Counts of the batches of N decoders. ``made`` only grows, and no decoder that is over goes on, so a
    number that was located stays where it is."""

    start: int
    """Number of the first batch."""
    made: tuple[int, ...]
    """Least number of batches of each decoder."""
    over: tuple[bool, ...]
    """True if it has no more than that."""

    @functools.cached_property
    def known(self) -> int:
        """The first number of which it is not known yet who makes it, or whether there is such a batch."""
        unfinished = [made for made, over in zip(self.made, self.over, strict=True) if not over]
        if not unfinished:
            return self.start + sum(self.made)
        rounds = min(unfinished)
        count = sum(min(made, rounds) for made in self.made)
        for made, over in zip(self.made, self.over, strict=True):
            if made > rounds:
                count += 1
            elif not over:
                break
        return self.start + count

    @functools.cached_property
    def total(self) -> int | None:
        """The number behind the last batch; None while a decoder may have more."""
        return self.known if all(self.over) else None

    @functools.cached_property
    def _stretches(self) -> Sequence[tuple[int, int, Sequence[int]]]:
        """Stretches of rounds of the same decoders: number of the first batch, first round, decoders."""
        ends = sorted({made for made, over in zip(self.made, self.over, strict=True) if over})
        first, begin, stretches = 0, self.start, []
        for end in [*ends, None]:
            has = [d for d, over in enumerate(self.over) if not over or self.made[d] > first]
            if has:
                stretches.append((begin, first, has))
            if end is not None:
                begin, first = begin + (end - first) * len(has), end
        return stretches

    def locate(self, number: int) -> tuple[int, int]:
        """Return the decoder that makes batch ``number``, and the how manieth of its batches that is, from 0."""
        if not self.start <= number < self.known:
            raise IndexError(f"batch {number} of those from {self.start} to before {self.known}")
        begin, first, decoders = next(one for one in reversed(self._stretches) if one[0] <= number)
        rounds, place = divmod(number - begin, len(decoders))
        return decoders[place], first + rounds

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the batches below ``number`` each decoder makes."""
        counts = [made if over else 0 for made, over in zip(self.made, self.over, strict=True)]
        for begin, first, decoders in self._stretches:
            if begin <= number:
                rounds, place = divmod(number - begin, len(decoders))
                for position, decoder in enumerate(decoders):
                    count = first + rounds + (position < place)
                    counts[decoder] = min(count, self.made[decoder]) if self.over[decoder] else count
            else:
                for decoder in decoders:
                    counts[decoder] = min(counts[decoder], first)
        return tuple(counts)


@dataclass(frozen=True)
class Generation:
    """Batches of a generation, as ranks know them."""

    id: int
    epoch: int
    numbering: Numbering
    last: bool
    """True if the epoch ends with it, once all its decoders are over."""


@dataclass(frozen=True)
class Started:
    """Beginning of a rank: session, epoch, and number of its first step's first batch."""

    session: int
    epoch: int
    next: int


@dataclass(frozen=True)
class RankReport:
    """Message of a rank: all batches of ``epoch`` that are its own and below ``next`` were given to the program."""

    session: int
    rank: int
    epoch: int
    next: int
    waited_s: float = 0.0
    """Time that the program waited for batches since the last report, of ``elapsed_s``."""
    elapsed_s: float = 0.0
    batch_bytes: int = 0
    """Bytes of its largest batch, 0 before the first."""


@dataclass(frozen=True)
class Horizon:
    """Permission of a rank: take batches of ``generations``, up to before ``limit`` in its epoch."""

    generations: tuple[Generation, ...]
    limit: int
    lagging: tuple[int, ...] = ()
    """Ranks that are the furthest behind."""
    failed: str = ""
    """Error of a decoder, which ends the session."""
    superseded: bool = False
    """Another session has begun."""


@dataclass(frozen=True)
class DecoderReport:
    """Message of a decoder about a generation. ``states`` are those before batch n, that were not told before."""

    generation: int
    made: int = 0
    over: bool = False
    exhausted: bool = False
    """It is over because its data ended."""
    states: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Assignment:
    """Order to a decoder: make batches ``floor`` to before ``stop`` (None: to the end of its data)."""

    generation: int
    decoder: int
    decoders: int
    floor: int
    stop: int | None
    begin: tuple[int, Any] | None = None
    """The number of a batch and the state before it, for a decoder that knows nothing of the generation yet."""
    needed: int = 0
    """Number of batches that must be there for the ranks' next step, whatever else waits to be taken."""
    final: bool = False
    """True if the state behind the last batch is known too."""
