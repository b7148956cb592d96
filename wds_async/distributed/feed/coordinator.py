"""The coordinator of a feed: who decodes what, which batches are known to exist, and what is acknowledged.

Plain code without threads and connections: the engines call it, one call at a time. It holds no batches. A session
begins when ranks begin at one place of the data. It has generations: stretches of batches that the same number of
decoders makes. A generation ends with the epoch, or where the number of decoders changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_async.checkpoint.merge import merge_states
from wds_async.distributed.feed.messages import (
    Assignment,
    DecoderReport,
    FeedState,
    Generation,
    Horizon,
    Numbering,
    RankReport,
    Started,
)
from wds_async.errors import ConfigError, StateError

__all__ = ["Coordinator"]

_VERSION = 1
_STEPS_APART = 4
_STATES_KEPT = 16
_MOST_DEATHS = 5
_GROWS_ABOVE = 0.1
_GROWS_AFTER_S = 10.0


@dataclass
class _Progress:
    """Progress of one decoder of a generation. A state that is None is the beginning of the data."""

    made: int
    states: dict[int, Any]
    over: bool = False
    exhausted: bool = False
    stop: int | None = None
    base: int | None = None
    """Number of the state that it began from, until it has told its own."""

    def __post_init__(self) -> None:
        self.base = None if self.exhausted else min(self.states)

    @property
    def final(self) -> bool:
        """True if it is over and its last state is here."""
        return self.over and self.made in self.states and self.made != self.base

    def before(self, count: int) -> tuple[int, Any]:
        """Return the latest state before batch ``count``, and of which batch it is."""
        number = max(one for one in self.states if one <= count)
        return number, self.states[number]

    def add(self, states: Mapping[int, Any], floor: int) -> None:
        """Take ``states``, and drop those that are not needed any more."""
        for number, state in states.items():
            if number == self.base:  # the same place, with the random generators that the first incarnation had
                self.states[number], self.base = state, None
            self.states.setdefault(number, state)
        needed = self.before(floor)[0]
        self.states = {number: state for number, state in sorted(self.states.items()) if number >= needed}
        while len(self.states) > _STATES_KEPT:  # every other one between the first and the last
            for number in list(self.states)[1:-1:2]:
                del self.states[number]


@dataclass
class _Making:
    """A generation as the coordinator has it."""

    id: int
    epoch: int
    start: int
    decoders: list[_Progress]
    stopped: bool = False
    """It ends before its data does."""

    @property
    def numbering(self) -> Numbering:
        made, over = zip(*((one.made, one.over) for one in self.decoders), strict=True)
        return Numbering(self.start, made, over)

    @property
    def over(self) -> bool:
        return all(one.over for one in self.decoders)

    @property
    def last(self) -> bool:
        """True if no data of the epoch is left behind it, as far as is known."""
        return not self.stopped or all(one.exhausted for one in self.decoders)

    def view(self) -> Generation:
        return Generation(self.id, self.epoch, self.numbering, self.last)

    def stop_at(self, stops: Sequence[int]) -> None:
        """End it behind the first ``stops`` batches of each decoder."""
        self.stopped = True
        for one, stop in zip(self.decoders, stops, strict=True):
            one.stop = stop
            if not one.over and one.made >= stop:
                one.made, one.over = stop, True


class Coordinator:
    """Coordinator of ``decoders`` decoders, which may grow by itself to ``most``. Ranks may be as many bytes apart as
    may be ``ahead``, and four steps in any case. A decoder, or a rank for which others wait, that is not heard of for
    ``silence_s`` ends the session."""

    def __init__(
        self,
        decoders: int,
        most: int | None = None,
        ahead: int = 0,
        merge: Callable[[Sequence[Any]], Any] = merge_states,
        silence_s: float = math.inf,
    ) -> None:
        self.wanted = decoders
        self.ahead = ahead
        self._batch_bytes = 0
        self._merge, self._silence_s = merge, silence_s
        self._heard_at: dict[tuple[str, int], float] = {}
        self.most = max(decoders, most or decoders)
        self.session = 0
        self.failed = ""
        self._generations: list[_Making] = []
        self._next_id = 0
        self._ranks: dict[int, tuple[int, int]] = {}
        """Epoch and number up to which each rank was given its batches."""
        self._world_size = 0
        self._origin: tuple[Any, ...] = ()
        self._incarnations: dict[int, int] = {}
        self._waited_s = self._elapsed_s = 0.0
        self._deaths: dict[int, int] = {}
        """Number of starts of each decoder since it last made a batch."""

    # ------------------------------------------------------------------ ranks

    def begin(self, rank: int, world_size: int, state: FeedState | None = None) -> Started:
        """Begin with ``rank``: join the session of the other ranks, or begin a new one where this rank has one
        already. ConfigError where other ranks of the session began elsewhere."""
        if not 0 <= rank < world_size:
            raise ConfigError(f"feed: rank {rank} of {world_size}")
        origin = _origin_of(state)
        if not self.session or rank in self._ranks or world_size != self._world_size:
            self._begin_session(world_size, state)
        elif origin != self._origin:
            raise ConfigError(
                f"feed: rank {rank} begins at {origin[:2]} (epoch, batch), and other ranks of the same session at "
                f"{self._origin[:2]}: load states of the same step on all ranks"
            )
        epoch, number = self._origin[:2]
        self._ranks[rank] = (epoch, number)
        return Started(self.session, epoch, number)

    def _begin_session(self, world_size: int, state: FeedState | None) -> None:
        self._origin = _origin_of(state)
        self.session += 1
        self.failed, self._world_size, self._ranks = "", world_size, {}
        self._waited_s = self._elapsed_s = 0.0
        self._generations, self._deaths = [], {}
        now = time.monotonic()
        self._heard_at = {("rank", rank): now for rank in range(world_size)}
        if state is None or not state["decoders"]:
            self._add(0, 0, [_Progress(0, {0: None}) for _ in range(self.wanted)])
            return
        saved = state["decoders"]
        ends, over = tuple(have for have, _, _ in saved), tuple(ended for _, _, ended in saved)
        counts = Numbering(state["start"], ends, over).counts(state["next"])
        progress = [
            _Progress(max(have, count), {have: one}, ended, ended)
            for (have, one, ended), count in zip(saved, counts, strict=True)
        ]
        generation = self._add(state["epoch"], state["start"], progress)
        if len(saved) != self.wanted and not generation.over and not state["ended"]:
            generation.stop_at(counts)
            self._go_on()

    def exchange(self, report: RankReport) -> Horizon:
        """Take a rank's report, and return what it may do."""
        if report.session != self.session:
            return Horizon((), 0, superseded=True)
        self._heard_at["rank", report.rank] = time.monotonic()
        before = self._ranks.get(report.rank, (0, 0))
        self._ranks[report.rank] = max(before, (report.epoch, report.next))
        self._measure(report)
        latest = self._generations[-1]
        if report.epoch > latest.epoch and latest.last and all(one.final for one in latest.decoders):
            self._follow(latest, latest.epoch + 1, 0)
        self._retire()
        epoch, floor = self._floor()
        self._batch_bytes = max(self._batch_bytes, report.batch_bytes)
        apart = max(_STEPS_APART, self.ahead // (self._world_size * max(self._batch_bytes, 1)))
        limit = floor + apart * self._world_size if epoch == report.epoch else 0
        if report.epoch < epoch:
            limit = max(one.numbering.known for one in self._generations)
        lagging = tuple(rank for rank in range(self._world_size) if self._ranks.get(rank, (0, -1)) <= (epoch, floor))
        self._look_for_silence(lagging if limit <= report.next else ())
        views = tuple(one.view() for one in self._generations if one.epoch == report.epoch)
        return Horizon(views, limit, lagging, self.failed)

    def _look_for_silence(self, lagging: Sequence[int]) -> None:
        """Fail where a decoder, or a rank that others wait for, is not heard of any more. One that has made all of its
        batches may still have some that ranks lack."""
        now = time.monotonic()
        for kind, number in [*(("decoder", one) for one in range(self.slots())), *(("rank", one) for one in lagging)]:
            silent_s = now - self._heard_at.setdefault((kind, number), now)
            if silent_s > self._silence_s and not self.failed:
                why = (
                    "its process, or its machine, has ended or stopped, or the others began before it could"
                    if kind == "rank"
                    else "no process or machine can be had for it, or it hangs; see its log"
                )
                self.failed = f"feed: {kind} {number} was not heard of for {silent_s:.0f} s: {why}"

    def state_at(self, session: int, epoch: int, number: int) -> FeedState:
        """Return the state in which the batches of ``epoch`` below ``number`` were given. StateError in another
        session."""
        if session != self.session:
            raise StateError("feed: another session has begun, and the state of this one is gone")
        making = [one for one in self._generations if one.epoch == epoch and one.start <= number]
        latest = self._generations[-1]
        if ended := not making and (epoch, number) == (latest.epoch + 1, 0) and latest.over:
            making, epoch, number = [latest], latest.epoch, latest.numbering.known
        if not making:
            raise StateError(f"feed: nothing is known any more of epoch {epoch} at batch {number}")
        generation = making[-1]
        decoders = []
        for one, count in zip(generation.decoders, generation.numbering.counts(number), strict=True):
            have, state = one.before(count)
            # One that was stopped is not over: its data goes on.
            decoders.append([have, state, one.final and one.exhausted and have == one.made])
        position = {"epoch": epoch, "next": number, "start": generation.start, "ended": ended}
        return {"feed": _VERSION, **position, "decoders": decoders}

    def _floor(self) -> tuple[int, int]:
        """Return the epoch and the number below which all ranks were given everything."""
        begun = self._ranks.values()
        return min([*begun, *([self._origin[:2]] * (len(self._ranks) < self._world_size))])

    # ------------------------------------------------------------------ decoders

    def fail(self, error: str) -> None:
        """End the session with ``error``."""
        self.failed = self.failed or error

    def join(self, slot: int, how: str = "ended") -> int:
        """Return the number of the new incarnation of decoder ``slot``: earlier ones are not listened to. ``how`` the
        last one ended."""
        self._incarnations[slot] = self._incarnations.get(slot, 0) + 1
        self._deaths[slot] = self._deaths.get(slot, 0) + 1
        if self._deaths[slot] > _MOST_DEATHS:
            self.failed = self.failed or (
                f"feed: decoder {slot} {how}, for the {_MOST_DEATHS}th time without making a batch: want of memory, "
                "or native code that ends it? Its standard error says more"
            )
        return self._incarnations[slot]

    def report(
        self, slot: int, incarnation: int, reports: Sequence[DecoderReport], error: str = ""
    ) -> tuple[Assignment, ...] | None:
        """Take what decoder ``slot`` tells, and return what it has to make, the oldest generation first; None for one
        that has been replaced and should end."""
        if incarnation != self._incarnations.get(slot):
            return None
        self._heard_at["decoder", slot] = time.monotonic()
        known = {one.generation for one in reports}
        for report in reports:
            generation = next((one for one in self._generations if one.id == report.generation), None)
            if generation is not None and slot < len(generation.decoders):
                self._take(generation, slot, report)
                self.failed = self.failed or error
        self._go_on()
        assignments = []
        for generation in self._generations:
            if slot < len(generation.decoders):
                one = generation.decoders[slot]
                floor = self._floor_of(generation)[slot]
                begin = None if generation.id in known else one.before(floor)
                stop = one.made if one.over else one.stop
                assignments.append(
                    Assignment(
                        generation.id,
                        slot,
                        len(generation.decoders),
                        floor,
                        stop,
                        begin,
                        self._needed(generation),
                        one.final,
                    )
                )
        return tuple(assignments)

    def _take(self, generation: _Making, slot: int, report: DecoderReport) -> None:
        one = generation.decoders[slot]
        if not one.over:
            made = report.made if one.stop is None else min(report.made, one.stop)
            if made > one.made or report.over:
                self._deaths[slot] = 0
            one.made = max(one.made, made)
            one.exhausted = report.exhausted and report.made == one.made
            one.over = one.exhausted or one.made == one.stop
        one.exhausted = one.exhausted or (report.exhausted and report.made == one.made)
        last = one.made if one.over else report.made
        states = {number: state for number, state in report.states.items() if number <= last}
        one.add(states, self._floor_of(generation)[slot])
        if report.exhausted and one.made in states:  # behind its end; before, the end was not known
            one.states[one.made] = states[one.made]

    def _floor_of(self, generation: _Making) -> tuple[int, ...]:
        """Return how many of its batches of ``generation`` each decoder need not have any more."""
        epoch, floor = self._floor()
        numbering = generation.numbering
        if epoch != generation.epoch:
            floor = generation.start if epoch < generation.epoch else numbering.known
        return numbering.counts(min(max(floor, generation.start), numbering.known))

    def _needed(self, generation: _Making) -> int:
        """Return how many batches each decoder that is not over must have made, so that it is known of all batches of
        the next step of every rank where they are."""
        unfinished = [one.made for one in generation.decoders if not one.over]
        numbers = [number for epoch, number in self._ranks.values() if epoch == generation.epoch]
        missing = max(numbers, default=0) + self._world_size - generation.numbering.known
        return min(unfinished) - (-missing // len(unfinished)) if unfinished and numbers and missing > 0 else 0

    # ------------------------------------------------------------------ generations

    def _add(self, epoch: int, start: int, decoders: list[_Progress]) -> _Making:
        self._next_id += 1
        self._generations.append(_Making(self._next_id, epoch, start, decoders))
        return self._generations[-1]

    def _go_on(self) -> None:
        """Begin the next generation where the latest was stopped and all its decoders have told their last state."""
        if not self._generations:
            return
        latest = self._generations[-1]
        if latest.last or not all(one.final for one in latest.decoders):
            return
        total = latest.numbering.total
        assert total is not None, "all its decoders are over"
        self._follow(latest, latest.epoch, total)

    def _follow(self, before: _Making, epoch: int, start: int) -> None:
        """Add the generation behind ``before``, of as many decoders as are wanted."""
        states = [one.states[one.made] for one in before.decoders]
        if len(states) == self.wanted:  # one that has no more data in this epoch stays over
            over = [one.exhausted and epoch == before.epoch for one in before.decoders]
            decoders = [_Progress(0, {0: state}, *[ended] * 2) for state, ended in zip(states, over, strict=True)]
            self._add(epoch, start, decoders)
            return
        try:
            merged = self._merge(states)
        except StateError as exn:
            self.failed = self.failed or f"feed: the number of decoders cannot change: {exn}"
        else:
            self._add(epoch, start, [_Progress(0, {0: merged}) for _ in range(self.wanted)])

    def _retire(self) -> None:
        """Forget generations of which every rank has had everything."""
        epoch, floor = self._floor()
        while len(self._generations) > 1:
            first, then = self._generations[:2]
            total = first.numbering.total
            if total is None or (epoch, floor) < (first.epoch, total) or (epoch, floor) < (then.epoch, then.start):
                return
            del self._generations[0]

    def resize(self, decoders: int) -> None:
        """Have ``decoders`` decoders from the next round on that none of them has made yet, or, between two epochs,
        from the next epoch on. ConfigError below 1."""
        if decoders < 1:
            raise ConfigError(f"feed: resize({decoders}): it needs at least one decoder")
        self.wanted, self.most = decoders, max(decoders, self.most)
        if not self._generations:
            return
        latest = self._generations[-1]
        if latest.stopped or latest.over or len(latest.decoders) == decoders:
            return  # it goes on with as many as are wanted then
        rounds = max(one.made for one in latest.decoders) + 1
        latest.stop_at([rounds] * len(latest.decoders))

    def slots(self) -> int:
        """Return how many decoders are needed now."""
        return max([self.wanted, *(len(one.decoders) for one in self._generations)])

    def _measure(self, report: RankReport) -> None:
        """Grow where ranks wait too much: by the share of the time in which they do."""
        self._waited_s += report.waited_s
        self._elapsed_s += report.elapsed_s
        if self._elapsed_s < _GROWS_AFTER_S * self._world_size:
            return
        share = min(0.9, self._waited_s / self._elapsed_s)
        self._waited_s = self._elapsed_s = 0.0
        if share > _GROWS_ABOVE and self.wanted < self.most and len(self._generations) == 1:
            self.resize(min(self.most, math.ceil(self.wanted / (1 - share))))


def _origin_of(state: FeedState | None) -> tuple[int, int, int, int]:
    """Return the epoch and the number at which a rank begins, the start of the generation, and its decoders, of a
    state. StateError for what is none."""
    if state is None:
        return 0, 0, 0, 0
    names = ("feed", "epoch", "next", "start", "ended", "decoders")
    missing = [name for name in names if name not in state]
    if missing or state["feed"] != _VERSION:
        raise StateError(f"{state!r:.60} is no state of a feed (version {_VERSION}), or a damaged one")
    decoders = len(state["decoders"])
    if state["ended"]:
        return state["epoch"] + 1, 0, state["start"], decoders
    return state["epoch"], state["next"], state["start"], decoders
