"""Side by side with webdataset 1.0.2: torch's DataLoader over both, on two workers."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as ours
from tests.contract.common import same, without_path
from tests.servers import make_shards

theirs = pytest.importorskip("webdataset")
torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

BOTH = (theirs, ours)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    make_shards(tmp_path, 6, 8)
    return str(tmp_path / "shard-{000000..000005}.tar")


def dataset(wds: Any, urls: str, **kw: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wds.WebDataset(urls, **{"shardshuffle": False, **kw})


def loaded(loader: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(loader)


def with_worker(sample: dict[str, Any]) -> tuple[int, str, int]:
    info = torch.utils.data.get_worker_info()
    return info.id, sample["__key__"], int(sample["cls"])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_order_of_each_worker(shards: str, context: str) -> None:
    runs = []
    for wds in BOTH:
        loader = torch.utils.data.DataLoader(
            dataset(wds, shards).map(with_worker), batch_size=None, num_workers=2, multiprocessing_context=context
        )
        by_worker: dict[int, list[Any]] = collections.defaultdict(list)
        for worker, *rest in loaded(loader):
            by_worker[worker].append(rest)
        runs.append(dict(by_worker))
    assert runs[0] == runs[1]
    assert sorted(len(v) for v in runs[0].values()) == [24, 24]


def tuples_of(wds: Any, shards: str) -> Any:
    return dataset(wds, shards).decode("torchrgb8").to_tuple("png", "cls", "__key__")


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_by_torch(shards: str, drop_last: bool) -> None:
    runs = [
        loaded(torch.utils.data.DataLoader(tuples_of(w, shards), batch_size=5, num_workers=2, drop_last=drop_last))
        for w in BOTH
    ]
    assert same(runs[0], runs[1])


@pytest.mark.parametrize("partial", [False, True])
def test_batches_by_webdataset(shards: str, partial: bool) -> None:
    runs = [
        loaded(
            torch.utils.data.DataLoader(
                tuples_of(w, shards).batched(5, partial=partial), batch_size=None, num_workers=2
            )
        )
        for w in BOTH
    ]
    assert same(runs[0], runs[1])


STEPS: list[Any] = [
    lambda loader: loader,
    lambda loader: loader.unbatched(),
    lambda loader: loader.unbatched().shuffle(20, seed=3).batched(6),
    lambda loader: loader.with_epoch(25),
    lambda loader: loader.unbatched().batched(7, partial=False).with_epoch(9),
    lambda loader: loader.repeat(2).slice(3, 12),
    lambda loader: loader.unbatched().slice(11),
]


@pytest.mark.parametrize("steps", STEPS)
def test_web_loaders(shards: str, steps: Any) -> None:
    runs = []
    for wds in BOTH:
        data = tuples_of(wds, shards).batched(4)
        loader = steps(wds.WebLoader(data, batch_size=None, num_workers=2, shuffle=False))
        runs.append([loaded(loader) for _ in range(2)])
    assert same(runs[0], runs[1])


def test_pipelines_over_loaders(shards: str) -> None:
    """A DataLoader as the first stage of a pipeline."""
    runs = []
    for wds in BOTH:
        loader = torch.utils.data.DataLoader(tuples_of(wds, shards), num_workers=2, batch_size=3, drop_last=True)
        runs.append(loaded(wds.DataPipeline(loader, wds.unbatched())))
    assert same(runs[0], runs[1])
    assert len(runs[0]) == 48


def test_pipelines_by_hand(shards: str) -> None:
    runs = []
    for wds in BOTH:
        stages = [wds.SimpleShardList(shards, seed=5), wds.split_by_worker, wds.tarfile_to_samples()]
        data = wds.DataPipeline(
            *stages, wds.shuffle(10, seed=2), wds.decode(), wds.to_tuple("__key__ cls"), wds.batched(3)
        )
        runs.append(loaded(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)))
    assert same(runs[0], runs[1])


def test_workers_without_a_shard(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard for three workers: no harm without the check, and a pipeline by hand never checks."""
    one = shards.replace("{000000..000005}", "000000")
    for wds in BOTH:
        unchecked = dataset(wds, one, empty_check=False).to_tuple("cls")
        stages = [wds.SimpleShardList(one), wds.split_by_worker, wds.tarfile_to_samples(), wds.to_tuple("cls")]
        for data in (unchecked, wds.DataPipeline(*stages)):
            assert len(loaded(torch.utils.data.DataLoader(data, batch_size=None, num_workers=3))) == 8
    # A worker that raised keeps torch's DataLoader waiting for seconds when it goes: so by the variables.
    monkeypatch.setenv("WORKER", "1")
    monkeypatch.setenv("NUM_WORKERS", "3")
    for wds in BOTH:
        with pytest.raises(ValueError, match=r"(?i)no sample"):
            list(dataset(wds, one))
        assert list(dataset(wds, one, empty_check=False)) == []


def test_classes_of_torch(shards: str) -> None:
    for wds in BOTH:
        for one in (dataset(wds, shards), wds.SimpleShardList(shards), wds.ResampledShards(shards), wds.RoundRobin([])):
            assert isinstance(one, torch.utils.data.IterableDataset)
        assert wds.pytorch.IterableDataset is torch.utils.data.IterableDataset
        assert wds.shardlists.IterableDataset is torch.utils.data.IterableDataset


class Mine(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        return iter([{"__key__": str(i), "x": i} for i in range(20) if info is None or i % info.num_workers == info.id])


def test_datasets_of_the_users_own() -> None:
    runs = []
    for wds in BOTH:
        pipeline = wds.DataPipeline(Mine(), wds.shuffle(5, seed=1), wds.to_tuple("__key__", "x"), wds.batched(4))
        runs.append(loaded(wds.WebLoader(pipeline, batch_size=None, num_workers=2)))
    assert same(list(without_path(runs[0])), list(without_path(runs[1])))
