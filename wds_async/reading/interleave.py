"""Samples drawn from several shards that are open at once, so that a small shuffle buffer mixes well.

Up to ``interleave`` lanes read one shard after another each, and a lane whose shard is over takes the next one of the
list. For each sample a lane is drawn. One reader fetches for all of them, so memory and connections are those of one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_async import config, world
from wds_async.checkpoint.history import ReadLog
from wds_async.checkpoint.states import SourceState, pack_random, unpack_random
from wds_async.errors import ConfigError, StateError
from wds_async.observe.cost_limit import enforce
from wds_async.observe.ledger import EpochLog, Ledger
from wds_async.reading.options import transfer_fields
from wds_async.reading.position import OpenShard, OpenStretch, check_shard, entry_left, facts_of
from wds_async.reading.recover import ShardRecovery
from wds_async.reading.samples import Sample, ShardParsing, read_shards
from wds_async.stages import Traits
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.group import RawSample
from wds_async.transfer.reader import InterleavedReader, ShardCache, ShardReader, ShardStream, open_shards
from wds_async.transfer.slabs import MIN_SLAB_BYTES
from wds_async.transfer.stats import Board, Counters

__all__ = ["InterleavedState", "interleaved_samples"]


def interleaved_samples(
    src: Iterable[Any],
    *,
    interleave: int,
    ordered: bool = True,
    seed: Any = 0,
    transfer: Mapping[str, Any] | None = None,
    cache: ShardCache | None = None,
    storage_options: StorageOptions = NOTHING_GIVEN,
    verify: str | None = None,
    max_bad_fraction: float | None = None,
    counters: Counters | None = None,
    opened: Callable[[ShardReader], Any] | None = None,
    ledger: EpochLog | None = None,
    state: InterleavedState | None = None,
    **parsing: Any,
) -> Iterator[Sample]:
    """The samples of the shards in ``src``, of which ``interleave`` are open at once: each sample is the next one of an
    open shard that is drawn. Every shard gives its samples in their order, and all of them once.

    The draws follow from ``seed``, the epoch, rank and worker. With ``ordered=False`` the draw is among the open shards
    whose bytes are there, so that none is waited for while another can go on; the order differs from run to run. The
    other arguments are those of `samples.tarfile_samples`. ConfigError where the byte budget is too small for so many
    open shards, and for shards whose names change while they are read (a directory's).
    """
    ledger = ledger or Ledger(Board(), max_bad_fraction).begin(counters)
    setting = config.transfer_config(workers=world.place().num_workers, **transfer_fields(transfer, verify))
    if (least := 4 * interleave * MIN_SLAB_BYTES) > setting.budget_bytes:
        raise ConfigError(
            f"interleave={interleave}: so many open shards take {least} bytes at least, and the budget has "
            f"{setting.budget_bytes}: open fewer, or raise it (WDS_BUDGET, budget_bytes)"
        )
    state = state or InterleavedState()
    lanes = state.begin(interleave, _generator(seed, ledger.epoch))
    parsers = [ShardParsing.of(ledger, **parsing) for _ in lanes]
    opening = functools.partial(
        open_shards,
        _entries(state.shards(src)),
        config=setting,
        stats=ledger.counters,
        cache=cache,
        options=storage_options,
        interleave=interleave,
    )
    return _interleaved(opening, opened or enforce, parsers, ledger, state, ordered)


def _generator(seed: Any, epoch: int | None) -> random.Random:
    """Return the generator of the draws of this worker in ``epoch``."""
    here = world.place()
    name = f"interleave {world.seed_number(seed)} {epoch} {here.rank} {here.worker}"
    return random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big"))


def _entries(source: Iterator[Any]) -> Iterator[Any]:
    for entry in source:
        if getattr(entry, "alone", False):
            raise ConfigError(
                "interleave= opens several shards at once, and a directory gives one after another, whose file it "
                "renames or removes when the next one is taken: leave out interleave=, or mode="
            )
        yield entry


class LanePosition:
    """Position of a lane: its shard, and the place in it."""

    def __init__(self, state: InterleavedState, saved: Mapping[str, Any] | None = None) -> None:
        self.sample: RawSample | None = None
        self.next: Mapping[str, Any] | None = saved
        """Place in the shard that it begins next, if that was taken from the list already."""
        self.open: ShardRecovery | None = None
        self.given = OpenStretch()
        self._number = 0
        self._state = state

    def take(self, stream: ShardStream) -> None:
        """Note that ``stream`` is the shard that it begins next."""
        number = self._state.took(stream.number, stream.url)
        if self.next is None:
            self.next = {"number": number, "url": stream.url, "start": None}

    def begin(self, shard: ShardRecovery, number: int) -> None:
        """Note that ``shard``, number ``number`` of the reader, begins."""
        self.open, self.sample, self.next = shard, None, None
        self._number = self._state.took(number, shard.stream.url)
        self.given.begin(shard)

    def wanted(self, samples: Iterator[RawSample], stream: ShardStream) -> Iterator[RawSample]:
        """Return those of ``samples`` that the entry of their shard asks for."""
        return self.given.wanted(samples, stream)

    def over(self, shard: ShardRecovery) -> None:
        """Note that ``shard`` is over."""
        self._state.over(shard)
        self.given.end(self.sample, self._state.log)

    def stop(self) -> None:
        """Note that a handler ended the stream, which is that of all lanes."""
        self._state.stop()

    @property
    def is_between(self) -> bool:
        """True if the next sample comes from another shard."""
        return self.open is None or (self.sample is not None and self.sample.stop is None)

    def save(self) -> dict[str, Any] | None:
        """Return its place, None between two shards."""
        if self.next is not None:
            return dict(self.next)
        if self.open is None or self.sample is None or self.sample.stop is None:
            return None
        place = {"number": self._number, "url": self.sample.shard, "start": self.sample.stop}
        return {**place, **facts_of(self.open)}


class InterleavedState(SourceState):
    """Positions of the lanes that have shards to read, and the generator that draws among them."""

    def __init__(self) -> None:
        self.lanes: list[LanePosition] = []
        self.rng = random.Random(0)
        self._loaded: Mapping[str, Any] = {}
        self._interleave = 0
        self._taken = 0
        """Shards that lanes have taken from the list."""
        self._last: str | None = None
        """URL of the latest of these."""
        self._first = 0
        """`_taken` when this run began."""
        self._open_before: list[Mapping[str, Any]] = []
        """Places in the shards that were open then, which are read first."""
        self._entries: list[Any] | None = None
        """Shards that were shared out, in place of those of the shard list."""
        self._endless = False
        self._facts: dict[str, Any] = {}
        """By URL, facts of the shards that were read (see `position.entries_of`)."""
        self.log = ReadLog()

    def begin(self, interleave: int, rng: random.Random) -> list[LanePosition]:
        """Return the lanes, as they were left. StateError where there were not so many of them."""
        self._interleave, self.rng = interleave, rng
        lanes = self._loaded.get("lanes", [None] * interleave)
        if (before := self._loaded.get("interleave", interleave)) != interleave:
            raise StateError(
                f"the state was saved with interleave={before}, and this is interleave={interleave}: go on with as "
                "many, or share the states out anew (merge_states) among another number of ranks or workers"
            )
        if "random" in self._loaded:
            rng.setstate(unpack_random(self._loaded["random"]))
        self.lanes = [LanePosition(self, saved) for saved in lanes]
        return list(self.lanes)

    def took(self, number: int, url: str) -> int:
        """Return the number in the list of shard ``number`` of the reader, which a lane begins."""
        if number < len(self._open_before):
            return int(self._open_before[number]["number"])
        ordinal = self._first + number - len(self._open_before)
        if ordinal >= self._taken:
            self._taken, self._last = ordinal + 1, url
        return ordinal

    def record_shards(self, shards: dict[str, Any]) -> None:
        self._facts = shards

    def over(self, shard: OpenShard) -> None:
        """Note the facts of a shard that is over."""
        self._facts[shard.stream.url] = facts_of(shard)

    def shards(self, source: Iterable[Any]) -> Iterator[Any]:
        """Return the shards to read: those that were open, from where they were left, and those that follow."""
        if self._entries is not None:
            source = itertools.chain(self._entries, source if self._endless else ())
        rest = iter(source)
        if not self._first:
            return rest
        taken = {place["number"]: None for place in self._open_before}
        entry = None
        for number, entry in enumerate(itertools.islice(rest, self._first)):
            if number in taken:
                taken[number] = entry
        check_shard(entry, self._last, self._first - 1)
        return itertools.chain(self._left(taken), rest)

    def _left(self, entries: Mapping[int, Any]) -> list[Any]:
        for place in self._open_before:
            check_shard(entries[place["number"]], place["url"], place["number"])
        return [_left_of(entries[place["number"]], place) for place in self._open_before]

    def listed(self) -> Iterator[Any]:
        """Return the shards to read that do not come from an endless source."""
        entries = self._entries or []
        places = self._open_before
        known = {at["number"]: entries[at["number"]] for at in places if at["number"] < len(entries)}
        left = self._left({at["number"]: known.get(at["number"], {"url": at["url"]}) for at in places})
        return iter([*left, *entries[self._first :]])

    def save(self) -> dict[str, Any]:
        for lane in self.lanes:
            if lane.open is not None:
                self.over(lane.open)
        lanes = [lane.save() for lane in self.lanes]
        gone = 0
        if self._entries is not None:
            gone = min([self._taken, len(self._entries), *(at["number"] for at in lanes if at is not None)])
        return {
            "interleave": self._interleave,
            "lanes": [at and {**at, "number": at["number"] - gone} for at in lanes],
            "taken": self._taken - gone,
            "last": self._last,
            "random": pack_random(self.rng.getstate()),
            "log": self.log.packed(stretch for lane in self.lanes for stretch in lane.given.until(lane.sample)),
            **({} if self._entries is None else {"entries": self._entries[gone:], "endless": self._endless}),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self._loaded = saved
        self.log.load(saved.get("log", ""))
        self._taken = self._first = saved.get("taken", 0)
        self._last = saved.get("last")
        self._open_before = [at for at in saved.get("lanes", ()) if at is not None]
        self._entries, self._endless = saved.get("entries"), saved.get("endless", False)


def _left_of(entry: Any, place: Mapping[str, Any]) -> Any:
    return entry if place["start"] is None else entry_left(entry, place)


interleaved_samples.traits = Traits(handler="handler", state=InterleavedState)  # type: ignore[attr-defined]


class Lane:
    """The shards that one lane reads, one after another; the reader is shared."""

    def __init__(
        self, reader: InterleavedReader, position: LanePosition, parsing: ShardParsing, ledger: EpochLog
    ) -> None:
        self.position = position
        self._reader = reader
        self._policy = parsing.policy
        self._stream: ShardStream | None = None
        self._next: ShardStream | None = None
        if position.next is not None:  # it is this lane's, whichever lane is drawn first
            self._take()
        self.samples = read_shards(lambda: self, _nothing, parsing, ledger, position, is_epoch=False)

    @property
    def closed(self) -> bool:
        """True if the reader is closed."""
        return self._reader.closed

    @property
    def stopped(self) -> bool:
        """True if a handler has ended everything."""
        return self._policy.stop

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *exc: object) -> None:
        pass  # with the reader

    def __iter__(self) -> Iterator[ShardStream]:
        return self

    def __next__(self) -> ShardStream:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._next = self._next or next(self._reader), None
        return self._stream

    def _take(self) -> ShardStream:
        self._next = next(self._reader)
        self.position.take(self._next)
        return self._next

    def is_ready(self) -> bool:
        """Return whether its next sample is probably there: bytes have come that it has not begun, or it has those of
        two samples like the latest one. Between two shards it takes the next one, which others need not wait for."""
        if self.position.is_between:
            try:
                return self._reader.has_arrived(self._next or self._take())
            except StopIteration:
                return True
        if self._stream is None or self._reader.has_arrived(self._stream):
            return True
        sample, shard = self.position.sample, self.position.open
        if sample is None or sample.stop is None or shard is None:
            return False
        return shard.in_hand >= 2 * (sample.stop - sample.offset)


def _nothing(lane: Lane) -> None:
    """Do nothing: the reader of the lanes itself is watched."""


def _interleaved(
    opening: Callable[[], Any],
    opened: Callable[[ShardReader], Any],
    parsers: Sequence[ShardParsing],
    ledger: EpochLog,
    state: InterleavedState,
    ordered: bool,
) -> Iterator[Sample]:
    counters, draw, positions = ledger.counters, state.rng.random, state.lanes
    with opening() as reader:
        opened(reader)
        lanes: list[Lane] = []
        try:
            for position, parsing in zip(positions, parsers, strict=True):
                lanes.append(Lane(reader, position, parsing, ledger))
            samples = [lane.samples for lane in lanes]
            while lanes:
                number = int(draw() * len(lanes))
                if not ordered:
                    number = _first_ready(lanes, number, reader)
                if (sample := next(samples[number], None)) is not None:
                    yield sample
                elif lanes[number].stopped:
                    return
                else:
                    del lanes[number], samples[number], positions[number]
            counters.add("epochs")
        finally:
            for lane in lanes:
                lane.samples.close()  # type: ignore[attr-defined]
            del ledger  # see `CorruptionPolicy`


def _first_ready(lanes: Sequence[Lane], drawn: int, reader: InterleavedReader) -> int:
    """Return the number of the first lane that is ready, from the ``drawn`` one on, after waiting for one if need
    be; the drawn one if no bytes are on their way."""
    for waited in (False, True):
        for number in itertools.chain(range(drawn, len(lanes)), range(drawn)):
            if lanes[number].is_ready():
                return number
        if not waited:
            reader.wait()
    return drawn
