"""Older fluent methods on today's pipelines, and what `stage_of` takes for a stage."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wds_async import filters
from wds_async.errors import ConfigError
from wds_async.filters import shuffle
from wds_async.fluid import FluidInterface
from wds_async.legacy.fluent import Equalized, OlderMethods
from wds_async.pipeline import DataPipeline, FilterFunction, Sourced, stage_of, stages_of
from wds_async.records import RecordStage, cbors_to_samples
from wds_async.samplecache import DBCache
from wds_async.shardlists import split_by_worker
from wds_async.tariterators import TarStage, tarfile_to_samples


class Pipe(DataPipeline, FluidInterface, OlderMethods):
    """A pipeline with the older methods."""


def add(source: Iterable[int], n: int, *, times: int = 1) -> Iterator[int]:
    for x in source:
        yield x + n * times


class Doubling:
    """A dataset of users' own that takes its source by `source_`."""

    def __init__(self, by: int = 2) -> None:
        self.by = by
        self.source: Any = None

    def source_(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return (self.by * x for x in self.source)


def test_stage_of() -> None:
    def run(stage: Any, source: Any = (1, 2, 3)) -> list[Any]:
        return list(getattr(stage, "run", stage)(iter(source)))

    assert run(stage_of(add, 1, times=2)) == [3, 4, 5]
    assert run(stage_of(add, 1)) == [2, 3, 4]
    assert run(stage_of(filters.map, str)) == ["1", "2", "3"]
    assert run(stage_of(filters.batched, 2, collation_fn=None)) == [[1, 2], [3]]
    assert run(stage_of(filters.map(str))) == ["1", "2", "3"]
    assert run(stage_of(split_by_worker)) == [1, 2, 3]
    assert run(stage_of(itertools.islice, 2)) == [1, 2]
    assert run(stage_of(enumerate)) == [(0, 1), (1, 2), (2, 3)]
    assert run(stage_of(filters.Cached)) == [1, 2, 3]
    assert sorted(run(stage_of(filters.detshuffle, 10))) == [1, 2, 3]
    assert run(stage_of(Doubling, 3)) == [3, 6, 9]
    assert isinstance(stage_of(tarfile_to_samples), TarStage)
    assert isinstance(stage_of(cbors_to_samples), RecordStage)
    stage = filters.Cached()
    assert stage_of(stage) is stage
    for nothing in (7, "shuffle", None):
        with pytest.raises(ConfigError, match="no function"):
            stage_of(nothing)


def test_stages_of(tmp_path: Path) -> None:
    """``compose`` takes stages; a stage written with its arguments is one, too."""
    stages = [split_by_worker, filters.map(str), filters.Cached()]
    assert stages_of(*stages) == stages
    assert stages_of() == []
    (stage,) = stages_of(DBCache, str(tmp_path / "c.db"), 1000)
    assert isinstance(stage, DBCache)
    assert (stage.size, list(stage.run([1]))) == (1000, [1])
    (stage,) = stages_of(filters.Cached)
    assert isinstance(stage, filters.Cached)
    (stage,) = stages_of(Doubling, 3)
    assert list(stage.run([1])) == [3]
    (stage,) = stages_of(add, 5)
    assert list(stage([1])) == [6]
    (stage,) = stages_of(add, n=5)
    assert list(stage([1])) == [6]
    (stage,) = stages_of(filters.batched, 2, collation_fn=None)
    assert list(stage([1])) == [[1]]
    (stage,) = stages_of(tarfile_to_samples)
    assert isinstance(stage, TarStage)


def test_stages_pickle() -> None:
    stages = [stage_of(add, 1), stage_of(shuffle, 5, seed=1), stage_of(Doubling, 3), stage_of(filters.Cached)]
    copied = pickle.loads(pickle.dumps(DataPipeline(range(3), stages)))
    assert sorted(copied) == [3, 6, 9]


def test_sourced_shares_nothing_between_runs() -> None:
    stage = Sourced(Doubling())
    one, two = stage.run([1, 2]), stage.run([5])
    assert (list(one), list(two)) == ([2, 4], [10])
    assert stage.dataset.source is None


def test_pipe_and_then() -> None:
    pipeline = Pipe(range(3))
    with pytest.warns(DeprecationWarning, match=r"^\.pipe\(f\) is deprecated; use \.compose\(f\)") as caught:
        piped = pipeline.pipe(lambda source: (x + 1 for x in source))
    assert caught[0].filename == __file__
    assert list(piped) == [1, 2, 3]
    with pytest.warns(DeprecationWarning, match=r"^\.then\("):
        assert list(pipeline.then(add, 10, times=2)) == [20, 21, 22]
    with pytest.warns(DeprecationWarning, match=r"^\.then\("):
        assert list(pipeline.then(filters.map, str)) == ["0", "1", "2"]
    with pytest.warns(DeprecationWarning, match=r"^\.then\("):
        assert list(pipeline.then(Doubling, 4).slice(2)) == [0, 4]
    assert pipeline.pipeline == [range(3)]
    assert isinstance(piped, Pipe)


def test_associate() -> None:
    samples = ({"__key__": "a"}, {"__key__": "b"})
    assert list(Pipe(samples).associate({"a": {"x": 1}})) == [{"__key__": "a", "x": 1}, {"__key__": "b"}]
    assert next(iter(Pipe(samples).associate(lambda key: {"x": key * 2})))["x"] == "aa"


def test_dbcache(tmp_path: Path) -> None:
    pipeline = Pipe(({"__key__": "a"}, {"__key__": "b"}, {"__key__": "c"}))
    with pytest.warns(DeprecationWarning, match=r"^\.dbcache.*use \.compose\(LMDBCached"):
        cached = pipeline.dbcache(str(tmp_path / "c.db"), 2)
    assert list(cached) == list(cached) == [{"__key__": "a"}, {"__key__": "b"}]
    assert isinstance(cached.pipeline[-1], DBCache)


def equalized(pipeline: Any, *args: Any, **kw: Any) -> Any:
    with pytest.warns(DeprecationWarning, match=r"^\.ddp_equalize.*with_epoch") as caught:
        result = pipeline.ddp_equalize(*args, **kw)
    assert caught[0].filename == __file__
    return result


@pytest.mark.parametrize(("rank", "items"), [("0", 3), ("1", 9)])
def test_ddp_equalize(monkeypatch: pytest.MonkeyPatch, rank: str, items: int) -> None:
    """Ranks with different shares give the same number."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    result = equalized(Pipe(range(items)), 15)
    assert list(result) == list(itertools.islice(itertools.cycle(range(items)), 7))
    with pytest.raises(TypeError):
        len(result)
    sized = equalized(Pipe(range(items)), 15, with_length=True)
    assert len(sized) == len(list(sized)) == 7
    assert list(sized.map(str).slice(1)) == ["0"]


def test_ddp_equalize_shares_among_workers() -> None:
    pipeline = equalized(Pipe(range(10), split_by_worker), 25)
    found = list(torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=2))
    assert len(found) == 25
    assert set(found) == set(range(10))
    loader = Pipe(torch.utils.data.DataLoader(Pipe(range(10), split_by_worker), batch_size=None, num_workers=2))
    assert len(list(equalized(loader, 7))) == 7


def test_ddp_equalize_says_when_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="worker 0 of rank 0 owes 5 items"):
        list(equalized(Pipe(()), 5))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="leaves nothing for each of 8 ranks"):
        list(equalized(Pipe(range(3)), 7))


def test_ddp_equalize_passes_on_epochs_and_closing() -> None:
    pipeline = Pipe(range(20), filters.detshuffle(20, seed=1))
    result = equalized(pipeline, 20)
    result.set_epoch(3)
    third = list(result)
    result.set_epoch(3)
    assert list(result) == third
    assert list(result) != third
    result.close()
    assert pipeline.closed


def test_equalized_is_a_dataset() -> None:
    assert isinstance(Equalized(range(3), 2), torch.utils.data.IterableDataset)
    assert isinstance(stage_of(add, 1), FilterFunction)


def test_compose_with_arguments(tmp_path: Path) -> None:
    """``compose`` as it was written in 2020, on today's pipelines."""
    samples = tuple({"__key__": str(i)} for i in range(5))
    cached = Pipe(samples).compose(DBCache, str(tmp_path / "c.db"), 3)
    assert list(cached) == list(cached.map(dict)) == list(samples[:3])
    assert list(Pipe(range(3)).compose(add, 1, times=2).compose(filters.map(str), filters.Cached())) == ["2", "3", "4"]
