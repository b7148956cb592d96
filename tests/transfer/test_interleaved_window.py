"""The window of a consumer with several shards open, which waits for any one of them: it is never stuck, and the memory
is bounded. `Interleaved` plays the fetchers, as in `test_window`, and that consumer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.transfer.test_window import KIB, MIB, Plan, Reader, configs, plans, run
from wds_async.config import TransferConfig
from wds_async.transfer.interleaved_window import InterleavedWindow
from wds_async.transfer.options import ReadOptions
from wds_async.transfer.slabs import MIN_SLAB_BYTES, SlabPool
from wds_async.transfer.window import End, Finished, Piece


class Interleaved(Reader):
    """One window, its fetchers, and a consumer that holds a piece of each of its open shards."""

    def __init__(
        self, pool: SlabPool, config: TransferConfig, plans: Sequence[Plan], rng: random.Random, interleave: int
    ) -> None:
        super().__init__(pool, config, plans, rng)
        pool.readers -= 1
        counters: Any = None
        options = ReadOptions(config=config, counters=counters, interleave=interleave)
        self.interleave = interleave
        self.window = InterleavedWindow(pool, options, self.events.append, self.cancelled.add)
        pool.enter(self.window.reserved_blocks)
        self.open: dict[int, Piece | None] = {}
        self.opened = 0
        self.wanted: int | None = None
        self.arrived: dict[int, list[Piece | End]] = {}
        if not self.plans:
            self.window.end_of_source()

    def consume(self) -> bool:
        while self.events:
            event = self.events.pop(0)
            if isinstance(event, Finished):
                assert not self.finished
                self.finished = True
                return True
            self.arrived.setdefault(event.shard.number, []).append(event)
        while len(self.open) < self.interleave and self.opened < self.added:
            self.open[self.opened] = None
            self.window.opened(self.opened)
            self.opened += 1
        if self.wanted is None:
            if not self.open:
                return False
            self.wanted = self.rng.choice(list(self.open))
            if (piece := self.open[self.wanted]) is not None:
                self.window.release(piece.slab)
                self.open[self.wanted] = None
            return True
        if not self.arrived.get(self.wanted):
            return False  # it waits for this one, whatever else has come
        number, event = self.wanted, self.arrived[self.wanted].pop(0)
        self.wanted = None
        if isinstance(event, Piece):
            self._take(number, event)
        else:
            self._over(number, event)
        return True

    def _take(self, number: int, event: Piece) -> None:
        start, plan = self.read[number], self.plans[number]
        self.read[number] += event.length
        assert event.slab.view[: event.length] == self.content(number)[start : self.read[number]], "wrong bytes"
        self.open[number] = event
        if (
            plan.skip_after is not None
            and self.read[number] - plan.start > plan.skip_after
            and number not in self.skipped
        ):
            self.skipped.add(number)
            self.window.skip(number)

    def _over(self, number: int, event: End) -> None:
        del self.open[number]
        self.ended += 1
        if number not in self.skipped:
            assert self.read[number] == self.plans[number].expected()
            assert (event.shard.error is not None) == self.plans[number].broken

    @property
    def idle(self) -> bool:
        if self.flying or self.events or self.added < len(self.plans):
            return False
        return self.wanted is not None and not self.arrived.get(self.wanted)


def most_open(config: TransferConfig) -> int:
    return max(1, config.budget_bytes // (4 * MIN_SLAB_BYTES))


@settings(max_examples=300, deadline=None)
@given(plans=st.lists(plans, max_size=12), config=configs, open_=st.integers(2, 99), seed=st.integers(0, 1 << 32))
@example(plans=[Plan(MIB)] * 9, config=TransferConfig(part_bytes=64 * KIB, budget_bytes=256 * KIB), open_=1, seed=1)
@example(plans=[Plan(MIB, "stream")] * 9, config=TransferConfig(), open_=7, seed=2)
def test_whichever_shard_is_wanted_comes(plans: list[Plan], config: TransferConfig, open_: int, seed: int) -> None:
    rng = random.Random(seed)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    reader = Interleaved(pool, config, plans, rng, min(open_, most_open(config)))
    run([reader], rng)
    consume_rest(reader, rng)
    assert reader.window.peak_bytes <= config.budget_bytes
    assert pool.mapped_bytes <= config.budget_bytes
    while reader.flying:
        reader.answer()
    reader.window.close()
    assert reader.window.held_bytes == pool.used_bytes == 0
    assert reader.window.flying == 0


def consume_rest(reader: Interleaved, rng: random.Random) -> None:
    """Read what has arrived: the last events came in front of the end."""
    while reader.consume():
        reader.settle()
    assert reader.ended == len(reader.plans)


@settings(max_examples=150, deadline=None)
@given(
    plans=st.lists(st.lists(plans, max_size=6), min_size=2, max_size=4),
    config=configs,
    open_=st.integers(1, 99),
    seed=st.integers(0, 1 << 32),
)
def test_readers_of_one_pool(plans: list[list[Plan]], config: TransferConfig, open_: int, seed: int) -> None:
    rng = random.Random(seed)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    readers: list[Reader] = [
        Interleaved(pool, config, mine, rng, max(2, min(open_, most_open(config)))) for mine in plans[1:]
    ]
    run([Reader(pool, config, plans[0], rng, rough=rng.random() < 0.5), *readers], rng)


@settings(max_examples=100, deadline=None)
@given(plans=st.lists(plans, max_size=8), config=configs, seed=st.integers(0, 1 << 32), moves=st.integers(0, 60))
def test_close_gives_everything_back(plans: list[Plan], config: TransferConfig, seed: int, moves: int) -> None:
    rng = random.Random(seed)
    pool = SlabPool(config.budget_bytes, config.part_bytes)
    reader = Interleaved(pool, config, plans, rng, 2)
    for _ in range(moves):
        reader.settle()
        rng.choice([reader.answer, reader.consume, reader.add])()
    reader.window.close()
    while reader.flying:
        reader.answer()
    assert pool.used_bytes == 0


def test_open_shards_have_as_much_memory_as_each_other() -> None:
    """And shards behind them are fetched ahead."""
    config = TransferConfig(part_bytes=64 * KIB, budget_bytes=2 * MIB, connections=64)
    pool, rng = SlabPool(config.budget_bytes, config.part_bytes), random.Random(1)
    reader = Interleaved(pool, config, [Plan(MIB + 200 * KIB * number) for number in range(9)], rng, 4)
    most, ahead = 0, 0
    while reader.add():
        pass
    while not reader.finished:
        reader.settle()
        open_ = reader.window._open()
        if len(open_) == 4 and open_[0].number == 0:
            most = max(most, *(shard.held_bytes for shard in open_))
        ahead = max([ahead, *(shard.held_bytes for shard in list(reader.window._shards.values())[len(open_) :])])
        for move in rng.sample([reader.answer, reader.answer, reader.consume], 3):
            move()
    assert config.budget_bytes // 8 < most <= config.budget_bytes // 4
    assert ahead >= 64 * KIB
