"""Older fluent methods on today's pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wds_async import filters
from wds_async.errors import ConfigError
from wds_async.fluid import FluidInterface
from wds_async.legacy.fluent import OlderMethods
from wds_async.pipeline import DataPipeline
from wds_async.samplecache import SQLiteCache
from wds_async.shardlists import split_by_worker


class Pipe(DataPipeline, FluidInterface, OlderMethods):
    """A pipeline with the older methods."""


def add(source: Iterable[int], n: int, *, times: int = 1) -> Iterator[int]:
    for x in source:
        yield x + n * times


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
    assert pipeline.pipeline == [range(3)]
    assert isinstance(piped, Pipe)


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


def test_compose_with_arguments(tmp_path: Path) -> None:
    """``compose`` as it was written in 2020, on today's pipelines."""
    samples = tuple({"__key__": str(i)} for i in range(5))
    cached = Pipe(samples).compose(SQLiteCache, str(tmp_path / "c.db"), 3)
    assert list(cached) == list(cached.map(dict)) == list(samples[:3])
    assert list(Pipe(range(3)).compose(add, 1, times=2).compose(filters.map(str), filters.Cached())) == ["2", "3", "4"]
