"""`Dataset`, with the arguments of both of its generations."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.legacy.common import deprecated
from wds_async.dataset import WebDataset
from wds_async.errors import ShardNotFound
from wds_async.handlers import ignore_and_continue
from wds_async.legacy.datasets import Dataset
from wds_async.reading import parts


@pytest.fixture
def urls(shards: Any) -> list[str]:
    return [str(path) for path in shards(4, 3)]


dataset = functools.partial(deprecated, Dataset)


def keys(samples: Iterable[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


KEYS = [f"{i:06}" for i in range(12)]


def test_methods_change_the_object(urls: list[str]) -> None:
    data = dataset(urls, length=99)
    assert len(data) == 99
    assert list(data) == list(WebDataset(urls, shardshuffle=False))
    assert data.decode(only="cls").to_tuple("__key__", "cls").map_tuple(None, str) is data
    assert next(iter(data)) == ("000000", "0")
    assert data.shuffle(0) is data
    with pytest.warns(DeprecationWarning, match=r"^\.pipe\(f\)"):
        assert data.pipe(first) is data
    assert next(iter(data)) == "000000"
    assert isinstance(data, torch.utils.data.IterableDataset)
    with pytest.raises(TypeError):
        len(dataset(urls, length=True))


def first(source: Iterable[Any]) -> Iterator[Any]:
    return (x[0] for x in source)


def test_workers_and_pickles(urls: list[str]) -> None:
    data = dataset(urls)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)
    assert sorted(keys(loader)) == KEYS
    assert keys(pickle.loads(pickle.dumps(data))) == KEYS


@pytest.fixture
def second_worker_of_second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("WORKER", "1"), ("NUM_WORKERS", "2")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("second_worker_of_second_rank")
def test_splitting(urls: list[str]) -> None:
    assert keys(dataset(urls)) == KEYS[9:]
    assert keys(dataset(urls, prepare_for_worker=False)) == KEYS[3:6] + KEYS[9:]
    assert keys(dataset(urls, splitter=None)) == KEYS[3:6] + KEYS[9:]
    assert keys(dataset(urls, shard_selection=lambda given: given[2:3])) == KEYS[6:9]
    assert keys(dataset(urls, splitter=lambda given: given[:2])) == KEYS[:6]
    prepared = []
    data = dataset(urls, prepare_for_worker=prepared.append)
    assert keys(data) == KEYS[9:]
    assert prepared == [data]


def test_shuffling(urls: list[str]) -> None:
    orders = [keys(data) for data in [dataset(urls, shuffle=True)] for _ in range(4)]
    assert all(sorted(order) == KEYS for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert keys(dataset(urls, shuffle=list.reverse)) == KEYS[9:] + KEYS[6:9] + KEYS[3:6] + KEYS[:3]
    assert sorted(keys(dataset(urls, shuffle=2))) == KEYS


def test_open_fn(urls: list[str], tmp_path: Path) -> None:
    opened = []

    def opener(url: str) -> Any:
        opened.append(url)
        return open(url.removeprefix("my:"), "rb")

    data = dataset([f"my:{url}" for url in urls], open_fn=opener)
    for _ in range(2):
        assert keys(data) == KEYS
    assert opened == [f"my:{url}" for url in urls] * 2
    assert next(iter(data))["__url__"] == f"my:{urls[0]}"
    broken = dataset([f"my:{tmp_path}/missing", f"my:{urls[0]}"], open_fn=opener)
    with pytest.raises(FileNotFoundError):
        list(broken)
    broken = dataset([f"my:{tmp_path}/missing", f"my:{urls[0]}"], open_fn=opener, handler=ignore_and_continue)
    assert keys(broken) == KEYS[:3]


def test_handlers(urls: list[str], tmp_path: Path) -> None:
    given = [str(tmp_path / "missing"), *urls]
    with pytest.raises(ShardNotFound):
        list(dataset(given))
    assert keys(dataset(given, handler=ignore_and_continue)) == KEYS
    assert keys(dataset(given, tarhandler=ignore_and_continue)) == KEYS


def test_initial_pipeline(urls: list[str]) -> None:
    def names(source: Iterable[Any]) -> Iterator[str]:
        return (item["fname"] for item in source if item)

    assert list(dataset(urls, initial_pipeline=[names]))[:2] == ["000000.png", "000000.cls"]
    assert keys(dataset(urls, initial_pipeline=[parts.group_by_keys])) == KEYS
