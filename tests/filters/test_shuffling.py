"""Shuffling: orders that follow from a seed, and nothing lost."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.errors import ConfigError
from wds_async.filters import shuffling
from wds_async.pipeline import DataPipeline


@given(st.integers(0, 60), st.integers(1, 70), st.integers(0, 70), st.integers(0, 5))
def test_nothing_is_lost_and_the_seed_decides(n: int, bufsize: int, initial: int, seed: int) -> None:
    stage = shuffling.shuffle(bufsize, initial, seed=seed)
    once = list(stage(iter(range(n))))
    assert sorted(once) == list(range(n))
    assert list(stage(range(n))) == once


@given(st.integers(0, 60), st.integers(1, 30), st.integers(1, 30))
def test_never_holds_more_than_the_buffer(n: int, bufsize: int, initial: int) -> None:
    counter = itertools.count()
    source = (item for item, _ in zip(range(n), counter, strict=False))
    for given_out, _ in enumerate(shuffling.shuffle(bufsize, initial, seed=1)(source)):
        taken = n if source.gi_frame is None else int(repr(counter)[6:-1])
        assert taken - given_out <= bufsize


def test_a_random_generator_of_the_users_own() -> None:
    class Counting(random.Random):
        calls = 0

        def randint(self, a: int, b: int) -> int:
            self.calls += 1
            return super().randint(a, b)

    rng = Counting(5)
    mine = list(shuffling.shuffle(10, rng=rng)(range(30)))
    assert rng.calls == 30
    assert mine == list(shuffling.shuffle(10, rng=random.Random(5))(range(30)))
    assert mine == list(shuffling.shuffle(10, seed=5)(range(30)))


def test_without_a_seed_orders_differ_and_the_global_state_is_left_alone() -> None:
    before = random.getstate()
    orders = {tuple(shuffling.shuffle(100)(range(50))) for _ in range(3)}
    list(shuffling.rsample(0.5, seed=1)(range(50)))
    assert len(orders) == 3
    assert random.getstate() == before


def test_detshuffle_has_one_order_an_epoch() -> None:
    stage = shuffling.detshuffle(100, seed=3)
    assert stage.epoch == -1
    first, second = list(stage.run(range(20))), list(stage.run(range(20)))
    assert stage.epoch == 1
    assert first != second
    assert first == list(shuffling.shuffle(100, seed=3)(range(20)))
    stage.set_epoch(0)
    assert list(stage.run(range(20))) == first
    stage.epoch = 0
    assert list(stage.run(range(20))) == second
    assert list(pickle.loads(pickle.dumps(stage)).run(range(20))) != second
    assert "epoch=1" in repr(stage)


def test_epochshuffle_permutes_everything_anew_in_each_epoch() -> None:
    stage = shuffling.epochshuffle(seed=3)
    orders = [list(stage.run(iter(range(1000)))) for _ in range(3)]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    # A buffer would leave the last items at the end.
    assert min(order.index(999) for order in orders) < 500
    stage.set_epoch(1)
    assert list(stage.run(range(1000))) == orders[1]
    assert list(shuffling.epochshuffle(seed=3, epoch=1).run(range(1000))) == orders[2]
    assert "seed=3 epoch=1" in repr(stage)


def test_the_order_of_an_epoch_is_the_same_everywhere_and_stays_so() -> None:
    """Another list here would change the order of every training that goes on after an update."""
    assert shuffling.permutation(12, 0, 0) == [2, 3, 4, 6, 0, 9, 11, 5, 7, 1, 10, 8]
    assert shuffling.permutation(12, 7, 3) == [10, 1, 3, 6, 9, 4, 2, 11, 5, 0, 7, 8]
    assert shuffling.permutation(12, 3, 7) != shuffling.permutation(12, 7, 3) != shuffling.permutation(12, 8, 2)
    assert shuffling.permutation(0, 0, 0) == []


def test_every_order_is_as_likely() -> None:
    counts = Counter(tuple(shuffling.permutation(3, 1, epoch)) for epoch in range(6000))
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())


def test_a_list_without_end_cannot_be_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffling, "_PERMUTED_AT_MOST", 10)
    assert len(list(shuffling.epochshuffle().run(range(10)))) == 10
    with pytest.raises(ConfigError, match="more than 10 came"):
        next(iter(shuffling.epochshuffle().run(itertools.count())))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", [functools.partial(shuffling.detshuffle, 100), shuffling.epochshuffle])
def test_epochs_go_on_counting_in_new_workers(make: Callable[..., Any], persistent: bool) -> None:
    from torch.utils.data import DataLoader

    stage = make(seed=3)
    loader = DataLoader(
        DataPipeline(range(20), stage),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    reference = make(seed=3)
    for _ in range(2):
        expected = list(reference.run(range(20)))
        got = list(loader)
        assert got[::2] == got[1::2] == expected
    stage.set_epoch(0)
    assert next(iter(loader)) == next(iter(make(seed=3).run(range(20))))
