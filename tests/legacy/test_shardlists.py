"""`ShardList` and `PytorchShardList`: which shards, in which order, for whom."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch

from tests.legacy.common import deprecated
from wds_async.legacy.datasets import PytorchShardList, ShardList
from wds_async.shardlists import split_by_node, split_by_worker

URLS = [f"{i}.tar" for i in range(12)]


shard_list = functools.partial(deprecated, ShardList)


pytorch_list = functools.partial(deprecated, PytorchShardList)


def urls(shards: Any) -> list[str]:
    return [shard["url"] for shard in shards]


@pytest.fixture
def second_worker_of_second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("WORKER", "1"), ("NUM_WORKERS", "3")):
        monkeypatch.setenv(name, value)


def test_shard_list() -> None:
    shards = shard_list("{0..11}.tar")
    assert list(shards) == list(shards) == [{"url": url} for url in URLS]
    assert urls(shard_list(URLS, splitter=split_by_worker, nodesplitter=split_by_node, shuffle=False)) == URLS
    assert isinstance(shards, torch.utils.data.IterableDataset)
    assert list(pickle.loads(pickle.dumps(shards))) == list(shards)
    with pytest.raises(TypeError):
        len(shards)
    assert len(shard_list(URLS, length=17)) == 17


@pytest.mark.usefixtures("second_worker_of_second_rank")
def test_shard_list_splits() -> None:
    assert urls(shard_list(URLS)) == URLS[1::3]
    assert urls(shard_list(URLS, splitter=None)) == URLS
    assert urls(shard_list(URLS, nodesplitter=True, splitter=False)) == URLS[1::2]
    assert urls(shard_list(URLS, splitter=True, nodesplitter=split_by_node)) == URLS[1::2][1::3]
    assert urls(shard_list(URLS, splitter=lambda given: [u for u in given if u in ("3.tar", "5.tar")])) == URLS[3:6:2]


def test_shard_list_shuffles() -> None:
    shards = shard_list(URLS, shuffle=True)
    orders = [urls(shards) for _ in range(4)]
    assert all(sorted(order) == sorted(URLS) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert urls(shard_list(URLS, shuffle=list.reverse)) == URLS[::-1]


def test_shard_list_then() -> None:
    assert list(shard_list(URLS).then(lambda source, n: (s["url"][:n] for s in source), 1))[:3] == ["0", "1", "2"]


def test_pytorch_list() -> None:
    shards = pytorch_list("{0..11}.tar", shuffle=False)
    assert list(shards) == [{"url": url} for url in URLS]
    assert isinstance(shards, torch.utils.data.IterableDataset)
    mixed = pytorch_list(URLS)
    orders = [urls(mixed) for _ in range(4)]
    assert all(sorted(order) == sorted(URLS) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.usefixtures("second_worker_of_second_rank")
def test_pytorch_list_splits() -> None:
    assert urls(pytorch_list(URLS, shuffle=False)) == URLS[1::2][1::3]
    assert urls(pytorch_list(URLS, shuffle=False, split_by_node=False)) == URLS[1::3]
    assert urls(pytorch_list(URLS, shuffle=False, split_by_worker=False)) == URLS[1::2]


def test_pytorch_list_shuffles_by_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    def ranks(shards: Any) -> tuple[list[str], list[str]]:
        found = []
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            found.append(urls(shards))
        return found[0], found[1]

    monkeypatch.setenv("WDS_EPOCH", "3")
    by_environment = pytorch_list(URLS, epoch_shuffle=True, shuffle=False)
    third = ranks(by_environment)
    assert sorted(third[0] + third[1]) == sorted(URLS)
    assert ranks(by_environment) == third  # WDS_EPOCH says so
    monkeypatch.setenv("WDS_EPOCH", "4")
    assert ranks(by_environment) != third
    by_environment.set_epoch(3)
    assert urls(by_environment) == third[1]
    monkeypatch.delenv("WDS_EPOCH")
    counted = pytorch_list(URLS, epoch_shuffle=True, shuffle=False)
    counted.set_epoch(2)
    assert urls(counted) != third[1]
    assert urls(counted) == third[1]  # each iteration is the next epoch
    assert urls(counted) != third[1]


def test_pytorch_list_in_workers() -> None:
    shards = pytorch_list(URLS, verbose=True)
    loader = torch.utils.data.DataLoader(shards, batch_size=None, num_workers=2)
    assert sorted(urls(loader)) == sorted(URLS)
