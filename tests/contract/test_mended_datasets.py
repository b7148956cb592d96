"""Faults of webdataset that are not copied: lists of shards, splitting, seeds, pipelines. Each test shows both."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as ours
from tests.servers import make_shards

theirs = pytest.importorskip("webdataset")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def dataset(wds: Any, urls: Any, **kw: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wds.WebDataset(urls, **{"shardshuffle": False, **kw})


def keys(wds: Any, urls: Any, **kw: Any) -> list[str]:
    return [sample["__key__"] for sample in dataset(wds, urls, **kw)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_shards(tmp_path, 4, 3)
    return tmp_path


@pytest.fixture
def shards(folder: Path) -> str:
    return str(folder / "shard-{000000..000003}.tar")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_braces_in_lists(shards: str) -> None:
    with pytest.raises(FileNotFoundError):
        keys(theirs, [shards])
    assert len(keys(ours, [shards])) == 12


def test_paths(folder: Path) -> None:
    with pytest.raises(ValueError, match="cannot handle urls"):
        dataset(theirs, folder / "shard-000000.tar")
    assert len(keys(ours, folder / "shard-000000.tar")) == 3


def test_empty_lists() -> None:
    with pytest.raises(IndexError):
        dataset(theirs, [])
    with pytest.raises(ours.WdsError, match="empty"):
        dataset(ours, [])


def test_expand_urls_of_lists(shards: str) -> None:
    with pytest.raises(AttributeError):
        theirs.shardlists.expand_urls([shards])
    assert len(ours.shardlists.expand_urls([shards])) == 4


def test_directories_by_name(folder: Path) -> None:
    """Shards of a directory are read, each once, and keep their names."""
    names = sorted(p.name for p in folder.iterdir())
    # webdataset would poll an unmatched pattern for ever; one shard that fits shows what it does to names.
    lists = theirs.shardlists.DirectoryShardList(f"{folder}/", pattern="*.tar", mode=None, poll=None)
    taken = [shard["url"] for shard in itertools.islice(lists, 4)]
    assert all(url.endswith(f"._{os.getpid()}_") for url in taken)
    for left in folder.iterdir():
        left.rename(str(left).partition("._")[0])
    assert len(keys(ours, f"{folder}/")) == 12
    assert sorted(p.name for p in folder.iterdir()) == names


def test_the_default_pattern_of_directories(folder: Path) -> None:
    def listed(wds: Any) -> list[Any]:
        return list(wds.shardlists.DirectoryShardList(f"{folder}/", poll=None, mode="unlink"))

    assert listed(theirs) == []
    assert len(listed(ours)) == 4


def test_multi_shard_samples(folder: Path) -> None:
    spec = {"prefix": f"{folder}/", "datasets": [{"name": "a", "shards": "shard-{000000..000003}.tar", "choose": 2}]}
    with pytest.raises(Exception, match="obsolete"):
        theirs.MultiShardSample(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(list(ours.MultiShardSample(spec))) == 2
        assert len(keys(ours, spec)) == 6


def test_several_ranks(shards: str, ranks: None) -> None:
    with pytest.raises(ValueError, match="nodesplitter"):
        keys(theirs, shards)
    assert len(keys(ours, shards)) == 6
    with pytest.raises(ValueError, match="single_node_only"):
        keys(ours, shards, nodesplitter=ours.single_node_only)


def test_several_ranks_and_resampling(shards: str, ranks: None) -> None:
    with pytest.raises(ValueError, match="nodesplitter"):
        next(iter(dataset(theirs, shards, resampled=True)))
    assert len(list(itertools.islice(dataset(ours, shards, resampled=True), 50))) == 50


def test_repeat(shards: str) -> None:
    assert len(keys(theirs, shards, repeat=True)) == 12
    assert len(list(itertools.islice(dataset(ours, shards, repeat=True), 40))) == 40


def test_verbose(shards: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    keys(theirs, shards, verbose=True)
    assert "shards" not in caplog.text + "".join(capfd.readouterr())
    keys(ours, shards, verbose=True)
    assert "4 shards" in caplog.text + "".join(capfd.readouterr())


def orders(wds: Any, shards: str, **kw: Any) -> list[list[str]]:
    data = dataset(wds, shards, shardshuffle=10, **kw)
    return [[sample["__key__"] for sample in data] for _ in range(6)]


def test_a_new_order_every_epoch(shards: str) -> None:
    same, new = orders(theirs, shards, seed=3), orders(ours, shards, seed=3)
    assert all(order == same[0] for order in same)
    assert any(order != new[0] for order in new)
    assert new[0] == same[0], "the first epoch is webdataset's"
    assert all(sorted(order) == sorted(new[0]) for order in new)


def test_the_seed_of_the_environment(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SEED", "3")
    with pytest.raises(TypeError):
        orders(theirs, shards, detshuffle=True)
    assert orders(ours, shards, detshuffle=True) == orders(ours, shards, seed=3)


def test_unseeded_ranks_agree(shards: str, ranks: None) -> None:
    """webdataset draws a seed for each dataset, so each rank's order would be another one."""
    assert dataset(theirs, shards).seed != dataset(theirs, shards).seed
    assert dataset(ours, shards).seed == dataset(ours, shards).seed == 0
    assert orders(ours, shards) == orders(ours, shards)


@pytest.mark.parametrize("environment", [False, True])
def test_the_seed_of_one_rank_is_drawn(shards: str, monkeypatch: pytest.MonkeyPatch, environment: bool) -> None:
    """As webdataset draws it: ``random.seed`` gives the order, and the program's later draws are the same."""
    if environment:
        monkeypatch.setenv("WDS_SEED", "3")
    state, runs = random.getstate(), []
    for wds in (theirs, ours):
        random.seed(11)
        made = [dataset(wds, shards, shardshuffle=100) for _ in "ab"]
        runs.append(([[sample["__key__"] for sample in d] for d in made], [str(d.seed) for d in made], random.random()))
    random.setstate(state)
    # The seed of the variable stays text in webdataset.
    assert runs[0][1:] == runs[1][1:]
    assert environment or runs[0][0] == runs[1][0]
    assert (runs[1][1][0] == runs[1][1][1]) == environment


class Count(ours.PipelineStage):
    """A stage with a state: how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, source: Iterator[Any]) -> Iterator[Any]:
        self.runs += 1
        return iter(source)


def test_composed_pipelines_and_shared_stages() -> None:
    """A pipeline and what was composed of it count epochs apart: neither changes the other's next order."""

    def second(wds: Any) -> tuple[list[int], list[int]]:
        first = wds.DataPipeline(lambda: iter(range(50)), wds.detshuffle(20, seed=1))
        composed = first.compose(lambda source: source)
        return list(first), list(composed)

    a, b = second(theirs)
    assert a != b
    a, b = second(ours)
    assert a == b


def test_length(shards: str) -> None:
    def given(wds: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dataset(wds, shards).with_length(12)

    for wds in (theirs, ours):
        assert len(given(wds)) == 12
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(given(theirs))
    assert len(pickle.loads(pickle.dumps(given(ours)))) == 12
    assert type(given(ours)) is ours.WebDataset


def test_the_stages_of_a_dataset(shards: str) -> None:
    made = [dataset(wds, shards, shardshuffle=10).pipeline for wds in (theirs, ours)]
    names = [
        [getattr(s, "__name__", getattr(getattr(s, "f", s), "__name__", type(s).__name__)) for s in p] for p in made
    ]
    splitters = ["split_by_node", "split_by_worker"]
    assert names[0] == ["SimpleShardList", "single_node_only", splitters[1], "_shuffle", "StreamingOpen",
                        "tar_file_expander", "group_by_keys", "check_empty"]  # fmt: skip
    assert names[1][:4] == ["SimpleShardList", "detshuffle", *splitters]
    assert len(made[1]) == 6


def test_associate(shards: str) -> None:
    assert not hasattr(theirs.WebDataset, "associate")
    extra = dataset(ours, shards).associate({k: {"extra": 1} for k in keys(ours, shards)})
    assert all(sample["extra"] == 1 for sample in extra)


def test_listed() -> None:
    def lengths(wds: Any) -> list[int]:
        return [len(x) for x in wds.FluidWrapper(lambda: iter(range(7))).listed(3, partial=False)]

    assert lengths(theirs) == [3, 3, 1]
    assert lengths(ours) == [3, 3]


def test_epochs_and_lengths_as_classes() -> None:
    with pytest.raises(TypeError, match="abstract"):
        theirs.with_epoch(range(5), 3)
    with pytest.raises(TypeError, match="abstract"):
        theirs.with_length(range(5), 3)
    epochs = ours.with_epoch(range(5), 3)
    assert [list(epochs) for _ in range(2)] == [[0, 1, 2], [3, 4, 0]]
    assert len(ours.with_length(range(5), 3)) == 3
    assert list(ours.with_length(range(5), 3)) == list(range(5))
