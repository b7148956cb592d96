"""The protocol of feeds without processes: every order of messages, losses and ends that hypothesis comes upon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_async.distributed.feed.coordinator import Coordinator
from wds_async.distributed.feed.messages import Numbering, RankReport
from wds_async.distributed.feed.production import DecoderBatches, DecoderWork, Production
from wds_async.distributed.feed.ranks import RankBatches
from wds_async.errors import StateError

# ------------------------------------------------------------------ numbers


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 9), st.randoms(use_true_random=False))
def test_numbers_follow_rounds_and_what_is_known_never_changes(ends: list[int], start: int, rng: random.Random) -> None:
    expected = [(d, k) for k in range(max(ends, default=0)) for d in range(len(ends)) if k < ends[d]]
    made, over = [0] * len(ends), [False] * len(ends)
    known = start
    while not all(over):
        d = rng.randrange(len(ends))
        made[d], over[d] = min(made[d] + 1, ends[d]), over[d] or made[d] == ends[d]
        numbering = Numbering(start, tuple(made), tuple(over))
        assert numbering.known >= known
        known = numbering.known
        for number in range(start, known):
            assert numbering.locate(number) == expected[number - start]
        for number in range(start, known + 1):
            before = expected[: number - start]
            assert numbering.counts(number) == tuple(sum(d == one for d, _ in before) for one in range(len(ends)))
    assert numbering.total == start + len(expected)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 20))
def test_as_long_as_no_decoder_is_over_batch_s_of_rank_r_is_that_of_decoder_sw_plus_r_mod_n(
    decoders: int, ranks: int, step: int
) -> None:
    numbering = Numbering(0, (step * ranks + ranks,) * decoders, (False,) * decoders)
    for rank in range(ranks):
        assert numbering.locate(step * ranks + rank)[0] == (step * ranks + rank) % decoders


# ------------------------------------------------------------------ a whole feed


@dataclass
class FakePipeline:
    """Items that are shared out by chance, with a state, and with the random draws of `rng` in every batch."""

    items: int
    place: tuple[int, int]
    epoch: int = 0
    left: list[int] | None = None

    def share(self) -> list[int]:
        rng = random.Random(f"{self.epoch} {self.place[1]}")
        places = [rng.randrange(self.place[1]) for _ in range(self.items)]
        return [item for item, place in enumerate(places) if place == self.place[0]]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if self.left is None:
            self.left = self.share()
        return self._rest()

    def _rest(self) -> Iterator[tuple[int, int]]:
        while self.left:
            item = self.left.pop(0)
            yield (self.epoch, item)
        self.left, self.epoch = None, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "left": None if self.left is None else list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "merged" in state:
            begun = [one for one in state["merged"] if one["left"] is not None]
            place, places = self.place
            left = [item for one in begun for item in one["left"]]
            self.epoch = max(one["epoch"] for one in begun or state["merged"])
            self.left = left[place::places] if begun else None
        else:
            self.epoch, left_ = state["epoch"], state["left"]
            self.left = None if left_ is None else list(left_)


def merge(states: list[Any]) -> dict[str, Any]:
    assert all("left" in state for state in states)
    return {"merged": list(states)}


class FakeDecoder:
    """A decoder's process: what it knows is gone when it is replaced."""

    def __init__(self, feed: FakeFeed, slot: int) -> None:
        self.feed, self.slot = feed, slot
        self.incarnation = feed.coordinator.join(slot)
        self.batches = DecoderBatches(DecoderWork(self.pipeline, lambda batch: (batch, 10)), feed.credit)
        self.current: Production | None = None

    def pipeline(self) -> FakePipeline:
        assert self.current is not None
        return FakePipeline(self.feed.items, self.current.place)

    def make(self) -> None:
        self.current = self.batches.due()
        if self.current is not None:
            made = self.current.advance()
            if self.feed.rng.random() < 0.2:  # an assignment arrives while a batch is made
                self.exchange()
            if self.feed.rng.random() < 0.5:
                self.current._due_at = float("inf")  # states are rare
            self.current.store(made)

    def exchange(self, lost: bool = False) -> None:
        reports = self.batches.reports()
        assignments = self.feed.coordinator.report(self.slot, self.incarnation, reports)
        assert assignments is not None
        if not lost:
            self.batches.told(reports)
            self.batches.follow(assignments)


@dataclass
class FakeFeed:
    rng: random.Random
    decoders: int
    world_size: int
    items: int
    credit: int
    even: bool
    given: list[list[tuple[int, int]]] = field(default_factory=list)
    """What each rank's program got, behind the state that was loaded last, by epochs and steps."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.decoders, merge=merge)
        self.processes = [FakeDecoder(self, slot) for slot in range(self.decoders)]
        self.rows: dict[tuple[int, int], Any] = {}
        self.ends: set[tuple[int, int]] = set()
        self.start(None)

    def start(self, state: Any) -> None:
        self.coordinator_state = state
        self.ranks = [
            RankBatches(rank, self.world_size, self.coordinator.begin(rank, self.world_size, state), 25, even=self.even)
            for rank in range(self.world_size)
        ]

    # -- events

    def kill(self) -> None:
        slot = self.rng.randrange(len(self.processes))
        self.coordinator._deaths.clear()  # any number of times
        self.processes[slot] = FakeDecoder(self, slot)

    def resize(self) -> None:
        self.coordinator.resize(self.rng.randint(1, 4))

    def restart(self) -> None:
        """All trainers are killed, and go on from a state of the slowest, perhaps with another number of ranks."""
        rank = min(self.ranks, key=lambda one: (one.epoch, one.next))
        state = self.coordinator.state_at(rank.session, rank.epoch, rank.next)
        self.rows = {place: row for place, row in self.rows.items() if place < (rank.epoch, rank.next)}
        self.ends = {(epoch, total) for epoch, total in self.ends if epoch < rank.epoch}
        assert all(len(row) == 1 for row in self.rows.values())
        self.world_size = self.rng.randint(1, 3) if self.rng.random() < 0.3 else self.world_size
        old = self.ranks[0]
        self.start(state)
        with pytest.raises(StateError):
            self.coordinator.state_at(old.session, old.epoch, old.next)

    def exchange(self, rank: RankBatches) -> None:
        horizon = self.coordinator.exchange(RankReport(rank.session, rank.rank, rank.epoch, rank.next, batch_bytes=10))
        assert (horizon.superseded, horizon.failed) == (False, "")
        while len(self.processes) < self.coordinator.slots():
            self.processes.append(FakeDecoder(self, len(self.processes)))
        rank.update(horizon)

    def fetch(self, rank: RankBatches, lost: bool = False) -> None:
        for decoder in rank.decoders():
            wanted = rank.wanted(decoder)
            assert wanted is not None
            kept = self.processes[decoder].batches.take(wanted.generation, wanted.place)
            if kept is not None and not lost:
                rank.arrived(wanted, *kept)
                if self.rng.random() < 0.1:  # it comes twice
                    rank.arrived(wanted, *kept)

    def take(self, rank: RankBatches, epochs: int) -> None:
        if rank.is_over:
            self.ends.add((rank.epoch, rank.total or 0))
            if rank.epoch < epochs:
                rank.begin_epoch()
        elif rank.is_ready:
            number = rank.next + rank.rank
            row = self.rows.setdefault((rank.epoch, number), [])
            row.append(rank.take())

    def step(self, epochs: int, chaos: bool) -> None:
        rng = self.rng
        event = rng.randrange(100)
        process, rank = rng.choice(self.processes), rng.choice(self.ranks)
        if event < 30:
            process.make()
        elif event < 50:
            process.exchange(lost=chaos and rng.random() < 0.1)
        elif event < 65:
            self.exchange(rank)
        elif event < 80:
            self.fetch(rank, lost=chaos and rng.random() < 0.1)
        else:
            self.take(rank, epochs)


def run(feed: FakeFeed, epochs: int, events: dict[str, float], chaos_steps: int) -> None:
    """Let everything happen in any order; then without faults, until all epochs are over."""
    for _ in range(chaos_steps):
        for event, chance in events.items():
            if feed.rng.random() < chance:
                getattr(feed, event)()
        feed.step(epochs - 1, chaos=bool(events))
    for _ in range(40_000):
        if all(rank.epoch == epochs - 1 and rank.is_over for rank in feed.ranks):
            break
        feed.step(epochs - 1, chaos=False)
    else:
        raise AssertionError("it does not come to its end")
    for rank in feed.ranks:
        feed.take(rank, 0)
    assert all(len(row) == 1 for row in feed.rows.values()), "a batch was given twice"


def in_order(items: int, decoders: int, epoch: int) -> list[tuple[int, int]]:
    shares = [FakePipeline(items, (d, decoders), epoch).share() for d in range(decoders)]
    longest = max(map(len, shares))
    return [(epoch, share[k]) for k in range(longest) for share in shares if k < len(share)]


FEEDS = st.builds(
    FakeFeed,
    st.integers(0, 2**32).map(random.Random),
    decoders=st.integers(1, 4),
    world_size=st.integers(1, 3),
    items=st.integers(0, 25),
    credit=st.sampled_from([1, 15, 10_000]),
    even=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(FEEDS, st.integers(0, 300))
def test_every_batch_comes_once_in_the_same_order_whatever_is_killed_and_lost(feed: FakeFeed, steps: int) -> None:
    run(feed, 2, {"kill": 0.02}, steps)
    for epoch in range(2):
        expected = in_order(feed.items, feed.decoders, epoch)
        if feed.even:
            expected = expected[: len(expected) // feed.world_size * feed.world_size]
        came = [feed.rows[place][0] for place in sorted(feed.rows) if place[0] == epoch]
        assert came == expected
    assert feed.ends == {(epoch, feed.items) for epoch in range(2)}, "ranks end an epoch at different places"


@settings(max_examples=150, deadline=None)
@given(FEEDS, st.integers(0, 300))
def test_trainers_that_go_on_from_a_state_get_the_rest_in_the_same_order(feed: FakeFeed, steps: int) -> None:
    feed.even = False  # with another number of ranks, the same batches are left over only if none are
    feed.start(None)
    run(feed, 2, {"kill": 0.02, "restart": 0.02}, steps)
    for epoch in range(2):
        came = [feed.rows[place][0] for place in sorted(feed.rows) if place[0] == epoch]
        assert came == in_order(feed.items, feed.decoders, epoch)


@settings(max_examples=250, deadline=None)
@given(FEEDS, st.integers(0, 400), st.booleans())
def test_another_number_of_decoders_gives_every_item_once(feed: FakeFeed, steps: int, restarts: bool) -> None:
    feed.even = False
    feed.start(None)
    run(feed, 2, {"kill": 0.02, "resize": 0.02, **({"restart": 0.02} if restarts else {})}, steps)
    for epoch in range(2):
        came = [feed.rows[place][0] for place in sorted(feed.rows) if place[0] == epoch]
        assert sorted(came) == [(epoch, item) for item in range(feed.items)]
        assert [number for e, number in sorted(feed.rows) if e == epoch] == list(range(len(came)))
