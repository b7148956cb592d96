"""The window without I/O: every order of completion and every pace of the consumer gives the same stream.

`Reader` plays the fetchers and the consumer of one window; a seeded schedule decides who moves next. What it reads is
compared with the shards byte for byte, and the slabs are real memory, so two owners of one slab would show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wds_async.config import TransferConfig
from wds_async.errors import TransferError
from wds_async.transfer.slabs import SlabPool
from wds_async.transfer.window import End, Finished, Part, Piece, Shard, Window

KIB, MIB = 1 << 10, 1 << 20
BLOB = random.Random(0).randbytes(4 * MIB)


@dataclass(frozen=True)
class Plan:
    """A shard as its store has it. ``way``: how it is read; a ``breaks`` offset ends it in an error. Bytes from
    ``start`` to ``stop`` are wanted of it."""

    size: int
    way: str = "ranges"  # or "stream", known as one from the start; "turns", found out by its first answer;
    # "flaky", a range ignored in its middle; "left", a stream at first, then ranges; "refused", an error at once
    breaks: int | None = None
    skip_after: int | None = None
    start: int = 0
    stop: int | None = None

    @property
    def end(self) -> int:
        """Where it ends if all goes well."""
        return self.size if self.stop is None else min(self.size, self.stop)

    @property
    def behind(self) -> bool:
        """Whether bytes are wanted where there are none."""
        return self.start != self.stop and (
            self.start > self.size or (self.start == self.size and self.stop is not None)
        )

    @property
    def breaks_at(self) -> int | None:
        """Where it breaks, before its end; None where it does not."""
        return self.breaks if self.breaks is not None and max(self.start, self.breaks) < self.end else None

    @property
    def broken(self) -> bool:
        """Whether it ends in an error."""
        return self.way == "refused" or self.behind or self.breaks_at is not None

    def expected(self) -> int:
        """Where its good bytes end."""
        if self.way == "refused" or self.behind:
            return self.start
        return max(self.start, self.end if self.breaks_at is None else self.breaks_at)


class Reader:
    """One window with its fetchers and consumer."""

    def __init__(
        self, pool: SlabPool, config: TransferConfig, plans: Sequence[Plan], rng: random.Random, *, rough: bool = False
    ) -> None:
        self.plans = [Plan(MIB), Plan(MIB), *plans] if rough else plans  # enough for memory to be full
        self.rng = rng
        self.pool = pool
        self.flying: list[Part] = []
        self.cancelled: set[Part] = set()
        self.events: list[Piece | End | Finished] = []
        self.holds: Piece | None = None
        self.read = [plan.start for plan in self.plans]
        self.ended = 0
        self.skipped: set[int] = set()
        self.finished = False
        self.fetched = 0
        pool.readers += 1
        self.window = Window(pool, config, self.events.append, self.cancelled.add)
        self.rough = rough
        self.window.concurrency.rough = 1 << 30 if rough else 0
        self.ahead = 0
        self.added = 0
        if not self.plans:
            self.window.end_of_source()

    def content(self, number: int) -> memoryview:
        return memoryview(BLOB)[number * 4099 : number * 4099 + self.plans[number].size]

    # moves: each returns False where it has nothing to do

    def add(self) -> bool:
        if self.added == len(self.plans):
            return False
        plan = self.plans[self.added]
        error = TransferError("refused") if plan.way == "refused" else None
        streamed, span = plan.way == "stream", {"start": plan.start, "stop": plan.stop}
        self.window.add(f"shard{self.added}", streamed=streamed, error=error, **span)  # type: ignore[arg-type]
        self.added += 1
        if self.added == len(self.plans):
            self.window.end_of_source()
        return True

    def answer(self) -> bool:
        if not self.flying:
            return False
        # Over a rough line the head comes late, so that memory is full of what is behind it.
        late = 1 if self.rough and len(self.flying) > 1 and self.rng.random() < 0.9 else 0
        self._answer(self.rng.choice(self.flying[late:]))
        return True

    def consume(self) -> bool:
        if self.holds is not None:
            self.window.release(self.holds.slab)
            self.holds = None
            return True
        if not self.events:
            return False
        event = self.events.pop(0)
        assert not self.finished, "an event after Finished"
        if isinstance(event, Finished):
            assert self.ended == len(self.plans)
            self.finished = True
            return True
        number = event.shard.number
        assert number == self.ended, "out of order"
        plan = self.plans[number]
        if isinstance(event, Piece):
            assert event.length > 0
            start = self.read[number]
            self.read[number] += event.length
            assert event.slab.view[: event.length] == self.content(number)[start : self.read[number]], "wrong bytes"
            self.holds = event
            read = self.read[number] - plan.start
            if plan.skip_after is not None and read > plan.skip_after and number not in self.skipped:
                self.skipped.add(number)
                self.window.skip(number)
            return True
        self.ended += 1
        if number not in self.skipped:
            assert self.read[number] == plan.expected()
            assert (event.shard.error is not None) == plan.broken
        return True

    def settle(self) -> None:
        """What the pump does after every move."""
        self.window.deliver()
        started = self.window.plan()
        self.flying += started
        self.fetched += sum(part.stop - part.start for part in started)
        self.ahead += sum(not part.backed for part in started)

    @property
    def idle(self) -> bool:
        return not self.flying and self.holds is None and not self.events and self.added == len(self.plans)

    def _answer(self, part: Part) -> None:
        last = False
        if not part.dropped and part not in self.cancelled:
            shard, plan = part.shard, self.plans[part.shard.number]
            assert plan.start <= part.start < (part.stop if plan.stop is None else plan.stop)
            whole = part.start == 0 and plan.size <= (part.slab.size if part.backed else part.stop)
            whole = whole and plan.size == plan.end
            ignored = (plan.way == "turns" and not whole) or (plan.way == "flaky" and part.start > plan.size // 2)
            left = plan.way == "left" and part.start > plan.size // 2
            ignored = ignored or (plan.way == "left" and not left and shard.size is None)
            if (shard.streamed and not left) or ignored:
                if not shard.streamed and not self.window.turn_streamed(part):
                    return  # an earlier part has to come first
                if not part.backed:
                    return  # it waits for memory
                last = self._stream(part, plan)
            elif not part.backed:
                if plan.behind:
                    part.error = TransferError("behind the end")
                elif self.rng.random() < 0.5:  # its head may have come, its body waits for memory
                    self.window.learn(shard, plan.size)
                if part.dropped or (plan.behind is False and (plan.breaks_at is None or plan.breaks_at > part.start)):
                    return
                part.error = part.error or TransferError("broken")  # no attempt came as far as a body
            elif plan.behind:
                part.error = TransferError("behind the end")
            else:
                if shard.streamed:  # it stood still within this part
                    self._fill(part, plan, self.rng.randint(part.start, min(part.start + part.slab.size, plan.end)))
                    self.window.turn_ranged(part)
                self.window.learn(shard, plan.size)
                self._fill(part, plan, max(part.stop, part.start + part.filled))
        elif self.rng.random() < 0.5:
            return  # a cancelled part lands some time
        self.flying.remove(part)
        self.window.landed(part, last=last, error=part.error)

    def _stream(self, part: Part, plan: Plan) -> bool:
        if plan.behind:
            part.error = TransferError("behind the end")
            return False
        room = part.slab.size if self.rng.random() < 0.5 else self.rng.randint(1, part.slab.size)
        self._fill(part, plan, min(part.start + room, plan.end))
        at_end = part.error is None and part.start + part.filled == plan.end
        return at_end and (part.filled == 0 or self.rng.random() < 0.5)

    def _fill(self, part: Part, plan: Plan, stop: int) -> None:
        if part.dropped:
            return
        if plan.breaks_at is not None and stop > plan.breaks_at:
            stop, part.error = plan.breaks_at, TransferError("broken")
        if part.start >= stop:
            return
        part.slab.view[: stop - part.start] = self.content(part.shard.number)[part.start : stop]
        part.filled = stop - part.start


def run(readers: Sequence[Reader], rng: random.Random, most_moves: int = 20_000) -> None:
    """Move at random until everybody has finished; fail where nobody can move."""
    for _ in range(most_moves):
        for reader in rng.sample(readers, len(readers)):
            reader.settle()
        pool = readers[0].pool
        assert pool.used_bytes <= pool.max_blocks * pool.block_bytes
        assert sum(reader.window.held_bytes for reader in readers) <= pool.used_bytes
        open_ = [reader for reader in readers if not reader.finished]
        if not open_:
            return
        for reader in open_:
            assert not reader.idle, "stuck: nothing is in flight, the consumer holds nothing, and shards are left"
        moves = [move for reader in open_ for move in (reader.answer, reader.consume, reader.add)]
        rng.shuffle(moves)
        assert any(move() for move in moves), "nobody can move"
    raise AssertionError("it never ends")


sizes = st.one_of(
    st.sampled_from([0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 128 * KIB, 256 * KIB]),
    st.integers(0, 8 * KIB),
    st.integers(0, 1536 * KIB),
)
plans = st.builds(
    lambda size, start, length, **more: Plan(
        size, start=start % (size + 2), stop=None if length is None else start % (size + 2) + length, **more
    ),
    size=sizes,
    start=st.just(0) | sizes,
    length=st.none() | sizes,
    way=st.sampled_from(["ranges", "ranges", "ranges", "stream", "turns", "flaky", "left", "refused"]),
    breaks=st.none() | st.integers(0, 600 * KIB),
    skip_after=st.none() | st.integers(0, 600 * KIB),
)
configs = st.builds(
    lambda part, parts, first, connections: TransferConfig(
        part_bytes=part, budget_bytes=parts * part, first_part_bytes=first, connections=connections
    ),
    part=st.sampled_from([64 * KIB, 128 * KIB, 512 * KIB]),
    parts=st.integers(4, 12),
    first=st.sampled_from([1, 64 * KIB, 128 * KIB, 4 * MIB]),
    connections=st.integers(1, 16),
)


@settings(max_examples=300, deadline=None)
@given(plans=st.lists(plans, max_size=12), config=configs, seed=st.integers(0, 1 << 32), rough=st.booleans())
@example(plans=[Plan(0)], config=TransferConfig(), seed=0, rough=False)
@example(plans=[Plan(400 * KIB, breaks=300 * KIB)], config=TransferConfig(), seed=1, rough=False)
@example(plans=[Plan(1536 * KIB, "flaky")] * 4, config=TransferConfig(), seed=2, rough=True)
@example(plans=[Plan(1536 * KIB, "left")] * 4, config=TransferConfig(), seed=3, rough=True)
@example(plans=[Plan(1000, start=1000)], config=TransferConfig(), seed=4, rough=False)
@example(plans=[Plan(1000, start=1000, stop=1001)], config=TransferConfig(), seed=5, rough=False)
@example(plans=[Plan(1000, start=2000, stop=2000)], config=TransferConfig(), seed=6, rough=False)
@example(plans=[Plan(1536 * KIB, "left", start=MIB, stop=1200 * KIB)] * 4, config=TransferConfig(), seed=7, rough=True)
def test_any_order_gives_the_same_stream(plans: list[Plan], config: TransferConfig, seed: int, rough: bool) -> None:
    rng = random.Random(seed)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    reader = Reader(pool, config, plans, rng, rough=rough)
    run([reader], rng)
    assert reader.window.peak_bytes <= config.budget_bytes
    while reader.flying:  # cancelled parts that have not landed yet
        reader.answer()
    assert reader.window.held_bytes == pool.used_bytes == 0
    assert reader.window.flying == 0


@settings(max_examples=100, deadline=None)
@given(
    plans=st.lists(st.lists(plans, max_size=5), min_size=2, max_size=4), config=configs, seed=st.integers(0, 1 << 32)
)
def test_readers_of_one_pool(plans: list[list[Plan]], config: TransferConfig, seed: int) -> None:
    rng = random.Random(seed)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    run([Reader(pool, config, mine, rng, rough=rng.random() < 0.5) for mine in plans], rng)


@settings(max_examples=100, deadline=None)
@given(outer=st.lists(plans, max_size=8), inner=st.lists(plans, max_size=8), config=configs, seed=st.integers(0, 99))
def test_a_nested_reader_finishes_while_the_outer_one_waits(
    outer: list[Plan], inner: list[Plan], config: TransferConfig, seed: int
) -> None:
    rng = random.Random(seed)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    waiting = Reader(pool, config, outer, rng, rough=rng.random() < 0.5)
    for _ in range(rng.randrange(200)):  # some way in, perhaps with a piece in hand and the budget used up
        waiting.settle()
        rng.choice([waiting.answer, waiting.consume, waiting.add])()
    for _ in range(2):  # one after another, as a loop within a loop makes them
        nested = Reader(pool, config, inner, rng, rough=rng.random() < 0.5)
        run([nested], rng)
        while nested.flying:
            nested.answer()
        nested.window.close()
        pool.readers -= 1
    run([waiting], rng)


@settings(max_examples=100, deadline=None)
@given(plans=st.lists(plans, max_size=8), config=configs, seed=st.integers(0, 1 << 32), moves=st.integers(0, 60))
def test_close_gives_everything_back(plans: list[Plan], config: TransferConfig, seed: int, moves: int) -> None:
    rng = random.Random(seed)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    reader = Reader(pool, config, plans, rng, rough=rng.random() < 0.5)
    for _ in range(moves):
        reader.settle()
        rng.choice([reader.answer, reader.consume, reader.add])()
    reader.window.close()
    emitted = len(reader.events)
    while reader.flying:
        reader.answer()
    if reader.holds is not None:
        reader.window.release(reader.holds.slab)  # late: its memory may have another owner already
    reader.window.deliver()
    assert reader.window.plan() == []
    assert len(reader.events) == emitted
    assert pool.used_bytes == 0


def _eager(reader: Reader, moves: int = 2000) -> None:
    """Everything arrives at once, and nobody takes it."""
    while reader.add():
        pass
    for _ in range(moves):
        reader.settle()
        if not reader.answer():
            return


def test_a_consumer_that_takes_nothing_is_not_served_more_than_it_asked_for() -> None:
    config = TransferConfig()
    reader = Reader(SlabPool(config.budget_bytes, config.part_bytes), config, [Plan(3 * MIB)] * 40, random.Random(0))
    _eager(reader)
    assert 0 < reader.fetched <= 2 * MIB


def test_the_window_opens_as_samples_are_taken() -> None:
    config = TransferConfig(budget_bytes=32 * MIB, part_bytes=1 * MIB)
    reader = Reader(SlabPool(config.budget_bytes, config.part_bytes), config, [Plan(2 * MIB)] * 100, random.Random(0))
    _eager(reader)
    while not reader.finished:
        if not reader.consume():
            reader.answer()
        _eager(reader)
        if reader.window.peak_bytes > 28 * MIB:
            return
    raise AssertionError(f"the window never opened beyond {reader.window.peak_bytes}")


def test_many_small_shards_are_in_flight_at_once() -> None:
    config = TransferConfig(connections=16)
    reader = Reader(SlabPool(config.budget_bytes, config.part_bytes), config, [Plan(100 * KIB)] * 200, random.Random(0))
    most = 0
    while reader.add():
        pass
    while not reader.finished:
        reader.settle()
        most = max(most, reader.window.flying)
        if not reader.answer():
            while reader.consume():
                pass
    assert most == 16


@pytest.mark.parametrize("rough", [False, True])
def test_parts_are_asked_for_ahead_of_their_memory_where_faults_hold_up_the_line(rough: bool) -> None:
    config = TransferConfig(budget_bytes=4 * MIB, part_bytes=512 * KIB, connections=16)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    reader = Reader(pool, config, [Plan(3 * MIB)] * 8, random.Random(0), rough=rough)
    while reader.add():
        pass
    while reader.ended < 4:  # until the window is open
        reader.settle()
        _ = reader.answer() or reader.consume()
    while reader.consume():
        pass
    reader.settle()
    first = reader.flying[0]
    for part in reader.flying[1:]:  # all but the head of the line comes
        reader._answer(part)
    reader.settle()
    ahead = [part for part in reader.flying if not part.backed]
    assert (len(ahead) > 0) == rough
    assert len(ahead) <= 7  # half of the 14 that a line leaves that fails now and then
    backed: list[Part] = []
    for part in ahead:
        part.on_memory = lambda part=part: backed.append(part)  # type: ignore[misc]
    reader._answer(first)
    run([reader], reader.rng)
    assert backed == ahead


def test_a_stream_that_goes_on_in_ranges_begins_behind_what_came() -> None:
    """Its slab may hold more than was planned: a part that was cut, or that took the block held back for the head."""
    pool = SlabPool(MIB, 512 * KIB)
    window = Window(pool, TransferConfig(first_part_bytes=64 * KIB), lambda event: None, lambda part: None)
    shard = window.add("shard")
    part = window.plan()[0]
    window.learn(shard, 1000)
    assert window.turn_streamed(part)
    part.filled = part.slab.size
    window.turn_ranged(part)
    assert shard.planned == part.slab.size


@pytest.mark.parametrize("streams", [1, 4])
def test_streams_open_ahead_are_counted(streams: int) -> None:
    config = TransferConfig(open_streams=streams, first_part_bytes=64 * KIB)
    reader = Reader(
        SlabPool(config.budget_bytes, config.part_bytes), config, [Plan(10 * KIB, "stream")] * 20, random.Random(0)
    )
    while reader.add():
        pass
    reader.settle()
    assert {part.shard.number for part in reader.flying} == set(range(streams))


def test_skipping_a_shard_that_is_over_does_nothing() -> None:
    config = TransferConfig()
    reader = Reader(SlabPool(config.budget_bytes, config.part_bytes), config, [Plan(10), Plan(10)], random.Random(0))
    while not reader.finished:
        reader.settle()
        _ = reader.add() or reader.answer() or reader.consume()
    reader.window.skip(0)
    reader.window.skip(7)
    reader.settle()
    assert not reader.events


def test_a_shard_that_shrank_drops_what_lies_behind_its_end() -> None:
    config = TransferConfig()
    events: list[Piece | End | Finished] = []
    cancelled: list[Part] = []
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    window = Window(pool, config, events.append, cancelled.append)
    window._sizes.append(600 * KIB)
    window._guess = 600 * KIB
    shard: Shard = window.add("x")
    window.end_of_source()
    first, second, *_ = window.plan()
    window.learn(shard, 1000)
    assert (first.stop, second.dropped, cancelled[0]) == (1000, True, second)
    first.filled = 1000
    for part in (second, first):
        window.landed(part)
    window.deliver()
    assert [type(event) for event in events] == [Piece, End, Finished]


def _started(guess: int | None = None, **span: int) -> tuple[Window, Shard, list[Part]]:
    """A window of one shard, of which so much is wanted, and the parts that start at once."""
    config = TransferConfig()
    window = Window(SlabPool(config.budget_bytes, config.part_bytes), config, lambda event: None, lambda part: None)
    window._guess = guess
    shard = window.add("x", **span)  # type: ignore[arg-type]
    return window, shard, window.plan()


def test_a_span_whose_end_is_known_needs_no_guess() -> None:
    window, shard, parts = _started(start=5 * MIB, stop=5 * MIB + 300 * KIB)
    assert [(part.start - 5 * MIB, part.stop - 5 * MIB) for part in parts] == [(0, 128 * KIB), (128 * KIB, 300 * KIB)]
    window.learn(shard, 64 * MIB)
    assert (window.plan(), window._guess) == ([], 64 * MIB)  # what is learned is the size of the whole shard


def test_a_span_without_an_end_is_guessed_from_its_start_on() -> None:
    window, shard, parts = _started(start=5 * MIB)
    assert (parts[0].start, parts[-1].stop) == (5 * MIB, 6 * MIB)  # as much as of any shard of unknown size
    window.learn(shard, 5 * MIB + 1000)
    assert [part.stop for part in parts if not part.dropped] == [5 * MIB + 1000]
    for guess, bytes_ in ((8 * MIB, 128 * KIB), (1 * MIB, 64 * KIB)):  # the first part, and the least there is
        _, _, (first, *_) = _started(guess, start=7 * MIB)
        assert (first.start, first.stop - first.start) == (7 * MIB, bytes_)


def test_an_empty_span_asks_for_nothing() -> None:
    _, shard, parts = _started(start=MIB, stop=MIB)
    assert (parts, shard.complete) == ([], True)
