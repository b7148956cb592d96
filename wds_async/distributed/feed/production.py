"""Production of one decoder in a generation: batches by their numbers, and states from which it can make them again.

A batch is made in order and kept until a rank takes it. One that is asked for again, as its rank lost it with a
connection, is made again from the latest state before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wds_async.distributed.feed.messages import Assignment, DecoderReport
from wds_async.errors import StateError

__all__ = ["DecoderBatches", "DecoderWork", "Kept", "Production"]

_SAVE_EVERY = 200

Kept = tuple[Any, int]
"""A batch, packed for its way, and its bytes."""


@dataclass(frozen=True)
class DecoderWork:
    """Work of a decoder: ``make`` gives the pipeline at the beginning of its data, with ``state_dict`` and
    ``load_state_dict``; ``pack`` what is kept of a batch, and its bytes; ``release`` is given what is not needed."""

    make: Callable[[], Any]
    pack: Callable[[Any], Kept]
    release: Callable[[Any], None] = lambda packed: None


class Production:
    """The batches of one decoder in one generation. A state is saved so rarely that it takes at most 0.5 % of the
    time."""

    def __init__(self, assignment: Assignment, work: DecoderWork) -> None:
        assert assignment.begin is not None, "a decoder that knows nothing of the generation is given a state"
        self.generation = assignment.generation
        self.place = assignment.decoder, assignment.decoders
        self._make, self._pack, self._release = work.make, work.pack, work.release
        first, state = assignment.begin
        self._states: dict[int, Any] = {first: state}
        self._next = self._made = first
        self._floor, self._stop, self._needed = assignment.floor, assignment.stop, assignment.needed
        self._end = assignment.stop if assignment.final else None
        """The number of its batches, once that and the state behind them are known."""
        self._exhausted = self._begun = False
        self._kept: dict[int, Kept] = {}
        self._taken: set[int] = set()
        self._untold: dict[int, Any] = {}
        self._back: int | None = first
        """Number of the batch for which it has to go back to a state."""
        self._begin: Any = state
        self._at_stop = False
        self._pipeline: Any = None
        self._items: Iterator[Any] | None = None
        self._due_at = 0.0

    # ------------------------------------------------------------------ what is asked of it, while it makes a batch

    def follow(self, assignment: Assignment) -> None:
        """Take a new floor, below which nothing is needed any more, and a new stop."""
        self._floor, self._needed = max(self._floor, assignment.floor), assignment.needed
        stop = assignment.stop
        if stop is not None and self._stop is None:
            self._stop = stop
            if self._next > stop or (self._end is not None and self._end > stop):
                self._end, self._exhausted, self._back = None, False, stop
                self._states = {number: state for number, state in self._states.items() if number <= stop}
        below = self._floor if stop is None else min(self._floor, stop)
        needed = max(one for one in self._states if one <= max(below, min(self._states)))
        self._states = {number: state for number, state in self._states.items() if number >= needed}
        for number in [one for one in self._kept if not self._is_wanted(one)]:
            self._release(self._kept.pop(number)[0])
        self._taken = {number for number in self._taken if number >= self._floor}

    def _is_wanted(self, number: int) -> bool:
        return number >= self._floor and (self._stop is None or number < self._stop)

    def take(self, number: int) -> Kept | None:
        """Return batch ``number`` and forget it; None where it has still to be made."""
        kept = self._kept.pop(number, None)
        if kept is not None:
            self._taken.add(number)
        elif number < self._next and self._is_wanted(number):
            self._taken.discard(number)
            self._back = number if self._back is None else min(self._back, number)
        return kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of the batches that no rank has taken yet."""
        return sum(size for _, size in self._kept.values())

    def is_due(self, asked: int | None, *, credit: bool) -> bool:
        """Return whether the next batch should be made: there is ``credit``, or a rank has ``asked`` for it or for a
        later one. What was lost, what the next step needs, and what ends the generation is made without credit."""
        following = self._next if self._back is None else min(self._next, self._back)
        if self._end is not None and following >= self._end:
            return False
        again = following < max(self._made, self._needed) or following == self._stop
        return credit or again or (asked is not None and asked >= following)

    def report(self) -> DecoderReport:
        """Return what is to be told. States are told again until `told`."""
        return DecoderReport(self.generation, self._made, self._end is not None, self._exhausted, dict(self._untold))

    def told(self, report: DecoderReport) -> None:
        """Note that ``report`` has arrived."""
        for number in report.states:
            self._untold.pop(number, None)

    # ------------------------------------------------------------------ making

    def settle(self) -> None:
        """Go back to a state where that is asked for. To be called before `advance`."""
        if self._back is not None:
            self._next = max(one for one in self._states if one <= self._back)
            self._begin = self._states[self._next]
            self._items = self._pipeline = self._back = None

    def advance(self) -> tuple[int, Kept | None] | None:
        """Make the next batch, and return its number with it, packed, where it is wanted; None at the end. It takes
        long, and nothing that others look at is changed: `store` does that."""
        if self._items is None:
            self._pipeline = self._make()
            if self._begin is not None:
                self._pipeline.load_state_dict(self._begin)
            self._items = iter(self._pipeline)
            if not self._begun:  # with seeds and generators as they are in this process, before they make anything
                self._begun = True
                self._save()
        self._at_stop = self._next == self._stop
        if self._at_stop:
            return None
        for batch in self._items:
            return self._next, self._pack(batch) if self._is_missing(self._next) else None
        return None

    def _is_missing(self, number: int) -> bool:
        return self._is_wanted(number) and number not in self._taken and number not in self._kept

    def store(self, made: tuple[int, Kept | None] | None) -> None:
        """Keep what `advance` returned."""
        if made is None:
            if self._back is None:
                self._finish()
            return
        number, kept = made
        if kept is not None and self._is_missing(number):
            self._kept[number] = kept
        elif kept is not None:
            self._release(kept[0])
        self._next = number + 1
        if self._stop is not None and self._next > self._stop and self._back is None:  # given while this was made
            self._back = self._stop
        if time.monotonic() >= self._due_at and self._next != self._end:
            self._save()
        self._made = max(self._made, self._next)

    def _save(self) -> None:
        began = time.monotonic()
        self._states[self._next] = self._untold[self._next] = self._pipeline.state_dict()
        now = time.monotonic()
        self._due_at = now + _SAVE_EVERY * (now - began)

    def _finish(self) -> None:
        stopped = self._at_stop
        if not stopped and self._next < self._made:
            raise StateError(
                f"feed: decoder {self.place[0]} made {self._made} batches, and the second time only {self._next}: its "
                "pipeline is not deterministic, or its shards have changed"
            )
        self._end, self._exhausted = self._next, not stopped
        self._made = self._next
        self._save()

    def leave(self) -> None:
        """Let another pipeline run in this process: the program's random generators are then its own, and this one
        goes back to a state when it is its turn again."""
        if self._items is not None and self._back is None:
            self._back = self._next

    def close(self) -> None:
        """Release the batches, and close the pipeline."""
        for packed, _ in self._kept.values():
            self._release(packed)
        self._kept = {}
        if callable(close := getattr(self._pipeline, "close", None)):
            close()
        self._items = self._pipeline = None


class DecoderBatches:
    """All that one decoder makes, of one generation after the other. It stops ahead of the ranks when the batches that
    they have not taken have ``credit`` bytes, but for those that a rank asks for."""

    def __init__(self, work: DecoderWork, credit: int) -> None:
        self._work, self._credit = work, credit
        self._failed: set[int] = set()
        self._productions: dict[int, Production] = {}
        self._asked: dict[int, int] = {}
        """The latest batch that a rank has asked for, by generation."""
        self._running: Production | None = None

    def follow(self, assignments: Sequence[Assignment]) -> list[Production]:
        """Take what is to be made now, and return what is not any more: it is to be closed."""
        ids = {one.generation for one in assignments}
        dropped = [one for number, one in self._productions.items() if number not in ids]
        self._productions = {number: one for number, one in self._productions.items() if number in ids}
        for assignment in assignments:
            production = self._productions.get(assignment.generation)
            if production is not None:
                production.follow(assignment)
            elif assignment.begin is not None:
                self._productions[assignment.generation] = Production(assignment, self._work)
        return dropped

    def take(self, generation: int, number: int) -> Kept | None:
        """Return batch ``number`` of a generation and forget it; None where it is not here yet, and is made then."""
        self._asked[generation] = max(number, self._asked.get(generation, 0))
        production = self._productions.get(generation)
        return None if production is None else production.take(number)

    def due(self) -> Production | None:
        """Return what to make the next batch of, ready for `Production.advance`; None while nothing is to be made."""
        has_credit = sum(one.kept_bytes for one in self._productions.values()) < self._credit
        for number, one in self._productions.items():
            if number not in self._failed and one.is_due(self._asked.get(number), credit=has_credit):
                if self._running not in (None, one):
                    self._running.leave()
                self._running = one
                one.settle()
                return one
        return None

    def fail(self, production: Production) -> None:
        """Make nothing more of ``production``: its pipeline has raised an error."""
        self._failed.add(production.generation)

    def close(self) -> None:
        """Close all pipelines."""
        for production in self._productions.values():
            production.close()

    def reports(self) -> list[DecoderReport]:
        """Return what is to be told to the coordinator."""
        return [one.report() for one in self._productions.values()]

    def told(self, reports: Sequence[DecoderReport]) -> None:
        """Note that ``reports`` have arrived."""
        for report in reports:
            if (production := self._productions.get(report.generation)) is not None:
                production.told(report)
