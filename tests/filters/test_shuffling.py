"""Shuffling: orders that follow from a seed, and nothing lost."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("persistent", [False, True])
def test_detshuffle_goes_on_counting_in_new_workers(persistent: bool) -> None:
    from torch.utils.data import DataLoader

    stage = shuffling.detshuffle(100, seed=3)
    loader = DataLoader(
        DataPipeline(range(20), stage),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    reference = shuffling.detshuffle(100, seed=3)
    for _ in range(2):
        expected = list(reference.run(range(20)))
        got = list(loader)
        assert got[::2] == got[1::2] == expected
    stage.set_epoch(0)
    assert next(iter(loader)) == next(iter(shuffling.shuffle(100, seed=3)(range(20))))
