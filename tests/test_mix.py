"""Mixing streams: orders, proportions, ends, and parity of the draws with webdataset."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async import mix
from wds_async.errors import ConfigError
from wds_async.pipeline import DataPipeline

theirs = pytest.importorskip("webdataset")


class Tracked:
    """A dataset that knows whether its iterators were closed, and what else was asked of it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.open = 0
        self.epoch: int | None = None
        self.closed = False

    def __iter__(self) -> Iterator[int]:
        self.open += 1
        try:
            yield from range(self.n)
        finally:
            self.open -= 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def close(self) -> None:
        self.closed = True


def named(*lengths: int) -> list[list[tuple[int, int]]]:
    return [[(source, i) for i in range(n)] for source, n in enumerate(lengths)]


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(lengths, st.booleans())
def test_round_robin_is_webdatasets(counts: list[int], longest: bool) -> None:
    got = list(mix.RoundRobin(named(*counts), longest=longest))
    assert got == list(theirs.RoundRobin(named(*counts), longest=longest))
    if longest:
        assert len(got) == sum(counts)


@given(lengths, st.booleans(), st.integers(0, 1 << 40), st.data())
def test_random_mix_draws_as_webdataset_does(counts: list[int], longest: bool, seed: int, data: st.DataObject) -> None:
    weights = st.lists(st.floats(0.01, 100), min_size=len(counts), max_size=len(counts))
    probs = data.draw(st.none() | weights)
    state = random.getstate()
    try:
        random.seed(seed)
        expected = list(theirs.RandomMix(named(*counts), probs, longest))
    finally:
        random.setstate(state)
    ours = mix.RandomMix(named(*counts), probs, longest, seed=seed)
    assert list(ours) == list(ours) == expected
    assert random.getstate() == state
    if longest:
        assert sorted(expected) == sorted(itertools.chain(*named(*counts)))


def test_without_a_seed_each_iteration_draws_anew() -> None:
    mixed = mix.RandomMix(named(50, 50))
    assert len({tuple(mixed) for _ in range(3)}) == 3


def test_sources_of_weight_nothing_come_last() -> None:
    got = list(mix.RandomMix(named(2, 3, 2), [1, 0, 0], longest=True, seed=0))
    assert got == [*named(2, 3, 2)[0], *named(2, 3, 2)[1], *named(2, 3, 2)[2]]


@pytest.mark.parametrize("probs", [[1], [1, 2, 3], [1, -1], [0, 0], [float("nan"), 1], [float("inf"), 1]], ids=str)
def test_probabilities_that_are_none(probs: list[float]) -> None:
    with pytest.raises(ConfigError, match="probabilities"):
        mix.RandomMix(named(1, 1), probs)


@pytest.mark.parametrize("mixed", [mix.RandomMix([]), mix.RoundRobin([]), mix.RoundRobin([], longest=True)])
def test_a_mix_of_nothing_is_empty(mixed: Any) -> None:
    assert list(mixed) == []


def test_endless_sources_are_not_waited_for() -> None:
    sources = [range(100), itertools.repeat("x")]
    got = list(mix.random_samples(sources, [1, 3], longest=True, rng=random.Random(0), endless={1}))
    assert [x for x in got if x != "x"] == list(range(100))
    assert 200 < got.count("x") < 420


@pytest.mark.parametrize("kind", [mix.RandomMix, mix.RoundRobin])
def test_leaving_closes_every_source(kind: Any) -> None:
    datasets = [Tracked(10), Tracked(10), Tracked(10)]
    stream = iter(kind(datasets))
    list(itertools.islice(stream, 12))
    assert any(d.open for d in datasets)
    stream.close()
    assert [d.open for d in datasets] == [0, 0, 0]
    list(kind([Tracked(3), one := Tracked(10)]))
    assert one.open == 0


def test_an_error_closes_the_others() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("broken")

    datasets: list[Any] = [Tracked(10), DataPipeline(broken), Tracked(10)]
    with pytest.raises(RuntimeError, match="broken"):
        list(mix.RoundRobin(datasets))
    assert datasets[0].open == datasets[2].open == 0


def test_an_iterator_of_the_callers_own_stays_open() -> None:
    mine = iter(Tracked(10))
    stream = iter(mix.RoundRobin([mine]))
    assert next(stream) == 0
    stream.close()
    assert next(mine) == 1


def test_calls_reach_every_dataset() -> None:
    datasets = [Tracked(1), Tracked(1)]
    mixed = mix.RoundRobin([*datasets, range(3)])
    mixed.set_epoch(7)
    mixed.close()
    assert [(d.epoch, d.closed) for d in datasets] == [(7, True)] * 2
    assert mixed.statistics() is None
    assert mixed.traffic() is None


def test_in_workers_and_pickled() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    mixed = mix.RandomMix([range(5), range(10, 15)], [1, 2], longest=True, seed=3)
    assert isinstance(mixed, IterableDataset)
    copy = pickle.loads(pickle.dumps(mixed))
    assert list(copy) == list(mixed)
    loader = DataLoader(mixed, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(loader) == sorted([*mixed, *mixed])


def test_a_mix_without_a_seed_leaves_the_programs_draws_independent() -> None:
    """With a copy of the global generator every sample of the first source would draw below one half."""
    random.seed(7)
    drawn: dict[str, list[bool]] = {"a": [], "b": []}
    for item in itertools.islice(mix.RandomMix([itertools.repeat("a"), itertools.repeat("b")]), 4000):
        drawn[item].append(random.random() < 0.5)
    for flips in drawn.values():
        assert abs(sum(flips) / len(flips) - 0.5) < 0.06  # five standard deviations


def test_a_mix_without_a_seed_follows_the_seed_of_a_dataloaders_worker() -> None:
    import torch.utils.data

    def of_workers(seed: int) -> list[list[str]]:
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(mix.RandomMix(named(50, 50)), batch_size=None, num_workers=2)
        items = list(loader)
        return [items[::2], items[1::2]]

    assert of_workers(1) == of_workers(1) != of_workers(2)
