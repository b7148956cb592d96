"""The samplers: every index once, near each other, in an order that follows from seed and epoch."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.errors import ConfigError
from wds_async.indexed.samplers import (
    ChunkedSampler,
    DistributedChunkedSampler,
    ShardedSampler,
    ShardListSampler,
    WeightedSampler,
)

lengths_of_shards = st.lists(st.integers(0, 30), min_size=1, max_size=12)


class Lengths:
    """As much of a dataset as samplers look at."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return sum(self.lengths)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@given(lengths_of_shards, st.integers(0, 2**32), st.booleans())
def test_sharded_every_index_once_and_shards_whole(lengths: list[int], seed: int, first: bool) -> None:
    dataset = Lengths(*lengths)
    sampler = ShardedSampler(dataset, seed=seed, shufflefirst=first)
    shard_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    for _ in range(3):
        order = list(sampler)
        assert sorted(order) == list(range(len(dataset)))
        assert len(order) == len(sampler)
        visits = [shard_of[index] for index in order]
        assert sum(a != b for a, b in pairwise(visits)) == max(0, len(set(visits)) - 1)


def test_sharded_keeps_the_order_of_shards_in_the_first_epoch_only() -> None:
    sampler = ShardedSampler(Lengths(*[10] * 20), seed=3)
    firsts = [[index // 10 for index in order[::10]] for order in (list(sampler), list(sampler))]
    assert firsts[0] == list(range(20))
    assert firsts[1] != list(range(20))
    eager = ShardedSampler(Lengths(*[10] * 20), seed=3, shufflefirst=True)
    assert [index // 10 for index in list(eager)[::10]] != list(range(20))


def test_sharded_takes_lengths_beside_the_dataset() -> None:
    assert sorted(ShardedSampler(object(), lengths=[2, 3])) == list(range(5))  # type: ignore[arg-type]
    assert ShardedSampler is ShardListSampler


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 2**32))
def test_chunked_every_index_once_and_chunks_whole(total: int, chunk: int, seed: int) -> None:
    sampler = ChunkedSampler(Lengths(total), chunksize=chunk, seed=seed)
    for _ in range(3):
        order = list(sampler)
        assert sorted(order) == list(range(total))
        assert len(sampler) == total
        visits = [index // chunk for index in order]
        assert sum(a != b for a, b in pairwise(visits)) == len(set(visits)) - 1


def test_the_order_is_that_of_wids() -> None:
    """One seed gives the order that runs with wids had: ranges first, then each range's indexes."""
    rng = random.Random(7 + 1289738273 * 2)
    chunks = [list(range(0, 4)), list(range(4, 8)), list(range(8, 10))]
    starts = [0, 1, 2]
    rng.shuffle(starts)
    wanted = []
    for number in starts:
        rng.shuffle(chunks[number])
        wanted += chunks[number]
    sampler = ChunkedSampler(Lengths(10), chunksize=4, seed=7)
    sampler.set_epoch(2)
    assert list(sampler) == wanted


def test_epochs_differ_and_come_back() -> None:
    for sampler in (ChunkedSampler(Lengths(1000), chunksize=50), ShardedSampler(Lengths(*[50] * 20))):
        orders = [tuple(sampler) for _ in range(4)]
        assert len(set(orders)) == 4
        assert sampler.epoch == 4
        sampler.set_epoch(1)
        assert tuple(sampler) == orders[1]
        list(islice(sampler, 10))  # a pass that is left is not an epoch
        assert sampler.epoch == 2


def test_without_shuffling_the_indexes_come_in_order() -> None:
    sampler = ChunkedSampler(Lengths(25), chunksize=10, shuffle=False, shufflefirst=True)
    assert [list(sampler), list(sampler)] == [list(range(25))] * 2


def test_a_part_of_the_indexes() -> None:
    assert sorted(ChunkedSampler(Lengths(100), num_samples=30)) == list(range(30))
    assert sorted(ChunkedSampler(Lengths(100), num_samples=(20, 30), chunksize=3)) == list(range(20, 30))
    assert len(ChunkedSampler(Lengths(100), num_samples=(20, 30))) == 10
    assert list(ChunkedSampler(Lengths(100), num_samples=(5, 5))) == []


@pytest.mark.parametrize(
    "wrong", [{"chunksize": 0}, {"num_samples": 11}, {"num_samples": (-1, 4)}, {"num_samples": (4, 3)}]
)
def test_what_cannot_be_sampled_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ChunkedSampler(Lengths(10), **wrong)  # type: ignore[arg-type]


@given(st.integers(1, 60), st.integers(1, 150), st.integers(1, 20))
def test_a_length_per_replica_is_what_comes(total: int, length: int, chunk: int) -> None:
    sampler = ChunkedSampler(Lengths(total), dslength_per_replica=length, chunksize=chunk)
    for epoch in range(2):
        whole = ChunkedSampler(Lengths(total), chunksize=chunk)
        whole.set_epoch(epoch)
        order = list(whole)
        assert list(sampler) == [order[i % total] for i in range(length)]
        assert len(sampler) == length
        assert sampler.epoch == epoch + 1


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 50), st.sampled_from([None, True, False]), st.booleans())
def test_distributed_shares(total: int, replicas: int, chunk: int, drop_last: bool | None, shuffle: bool) -> None:
    ranks = [
        DistributedChunkedSampler(
            Lengths(total), num_replicas=replicas, rank=rank, chunksize=chunk, drop_last=drop_last, shuffle=shuffle
        )
        for rank in range(replicas)
    ]
    for _ in range(2):
        shares = [list(rank) for rank in ranks]
        assert [len(share) for share in shares] == [len(rank) for rank in ranks]
        times = Counter(index for share in shares for index in share)
        assert set(times) <= set(range(total))
        if drop_last is None:
            assert times == Counter(range(total))
        elif drop_last:
            assert times == Counter(range(total // replicas * replicas))
        else:
            assert set(times) == set(range(total))
        if drop_last is not None:
            assert len({len(share) for share in shares}) == 1
        for share in shares:  # neighbours
            assert max(share, default=0) - min(share, default=0) < max(1, len(share))


def test_distributed_takes_the_rank_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(DistributedChunkedSampler(Lengths(10))) == list(range(10))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sorted(DistributedChunkedSampler(Lengths(10))) == [8, 9]
    assert sorted(DistributedChunkedSampler(Lengths(10), rank=0)) == [0, 1, 2, 3]  # 0 is a rank, not "none given"
    assert sorted(DistributedChunkedSampler(Lengths(10), num_samples=3)) == [2]


def test_distributed_refuses_a_rank_beyond_the_last() -> None:
    with pytest.raises(ConfigError, match="rank 4 of 4"):
        DistributedChunkedSampler(Lengths(10), num_replicas=4, rank=4)


weights_of_indexes = st.lists(st.sampled_from([0.0, 1e-300, 0.5, 1.0, 7.0, 1e300]), max_size=40)


@given(weights_of_indexes, st.integers(0, 2**32), st.integers(1, 5), st.data())
def test_weighted_no_index_twice_and_none_without_weight(
    weights: list[float], seed: int, replicas: int, data: st.DataObject
) -> None:
    possible = {index for index, weight in enumerate(weights) if weight}
    count = data.draw(st.integers(0, len(possible)))
    ranks = [WeightedSampler(weights, count, seed=seed, rank=rank, num_replicas=replicas) for rank in range(replicas)]
    (alone,) = [WeightedSampler(weights, count, seed=seed, rank=0, num_replicas=1)]
    for epoch in range(2):
        order, shares = list(alone), [list(sampler) for sampler in ranks]
        assert len(set(order)) == len(order) == count == len(alone)
        assert set(order) <= possible
        assert {len(share) for share in shares} == {count // replicas} == {len(sampler) for sampler in ranks}
        assert [index for step in zip(*shares, strict=True) for index in step] == order[: count // replicas * replicas]
        alone.set_epoch(epoch)
        assert list(alone) == order  # an epoch has one order


def test_weighted_draws_by_weight() -> None:
    """Against the exact chances of drawing two of three without replacement."""
    weights, draws = [1.0, 2.0, 5.0], 20_000
    seen = Counter(tuple(WeightedSampler(weights, 2, seed=seed)) for seed in range(draws))
    total = sum(weights)
    for first in range(3):
        for second in set(range(3)) - {first}:
            chance = weights[first] / total * weights[second] / (total - weights[first])
            assert abs(seen[first, second] / draws - chance) < 0.015


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (([-1.0],), "weights"),
        (([float("nan")],), "weights"),
        (([float("inf")],), "weights"),
        (([[1.0]],), "weights"),
        (([1.0, 0.0], 2), "1 indexes have a weight"),
        (([1.0], -1), "num_samples"),
    ],
)
def test_weighted_refuses_what_cannot_be_drawn(arguments: tuple[object, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        WeightedSampler(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        WeightedSampler([1.0], rank=2, num_replicas=2)
