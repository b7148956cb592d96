"""Mixing the sources of a specification: proportions, epochs, labels, workers, ends."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers.shards import make_shard
from wds_async import shardlists
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import spec
from wds_async.shardlists.mixture import Labelled, Mixture
from wds_async.shardlists.spec import SpecSource
from wds_async.tariterators import tarfile_to_samples

Sample = dict[str, Any]


def make(shards: Any) -> DataPipeline:
    """A source's pipeline, as `WebDataset` builds it."""
    return DataPipeline(shards, shardlists.split_by_node, shardlists.split_by_worker, tarfile_to_samples())


def make_endless(shards: list[str]) -> DataPipeline:
    return DataPipeline(shardlists.ResampledShards(shards, deterministic=True), tarfile_to_samples())


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(a=(shards, samples), …)`` makes shards ``a-0.tar`` … of so many samples each."""

    def fill(**sources: tuple[int, int]) -> Path:
        for name, (shards, samples) in sources.items():
            for shard in range(shards):
                keys = [f"{name}/{shard}/{i}" for i in range(samples)]
                data = make_shard({key: {"txt": key.encode(), "cls": b"1", "nrm.jpg": b"j"} for key in keys})
                (tmp_path / f"{name}-{shard}.tar").write_bytes(data)
        return tmp_path

    return fill


def mixture(where: Path, *sources: dict[str, Any], **options: Any) -> Mixture:
    given = [{**source, "shards": f"{where}/{source['shards']}"} for source in sources]
    return Mixture(spec.load({"dataset": given}), options.pop("make", make), **options)


def keys(samples: Any, n: int | None = None) -> list[str]:
    return [sample["__key__"] for sample in itertools.islice(samples, n)]


def within(count: int, n: int, p: float) -> bool:
    """Five standard deviations: a draw that is right is outside once in a million."""
    return abs(count - n * p) <= 5 * (n * p * (1 - p)) ** 0.5


A = {"shards": "a-{0..3}.tar", "name": "a"}
B = {"shards": "b-0.tar", "name": "b"}


def test_an_epoch_holds_every_sample_once_in_the_shards_proportions(folder: Any) -> None:
    where = folder(a=(4, 500), b=(1, 500))
    mixed = mixture(where, A, B)
    assert mixed.weights == [4, 1]
    got = keys(mixed)
    assert len(got) == len(set(got)) == 2500
    head = Counter(key[0] for key in got[:1500])
    assert within(head["a"], 1500, 4 / 5)
    assert [key for key in got if key[0] == "b"] == [f"b/0/{i}" for i in range(500)]


def test_weights_hold_until_a_source_ends(folder: Any) -> None:
    where = folder(a=(4, 500), b=(1, 500), c=(1, 10))
    mixed = mixture(where, A, B | {"weight": 0.9}, {"shards": "c-0.tar", "weight": 0}, seed=5)
    got = keys(mixed)
    assert Counter(key[0] for key in got) == {"a": 2000, "b": 500}  # weight 0 leaves a source out
    mixed = mixture(where, A | {"weight": 1}, B | {"weight": 3}, seed=5)
    got = keys(mixed)
    assert within(Counter(key[0] for key in got[:600])["b"], 600, 3 / 4)
    assert len(set(got)) == 2500
    assert all(key[0] == "a" for key in got[-1000:])


@pytest.mark.parametrize("weights", [(4, 1), (1, 1), (1, 9)])
def test_resampled_proportions_hold_for_ever(folder: Any, weights: tuple[int, int]) -> None:
    where = folder(a=(4, 20), b=(1, 20))
    sources = [source | {"weight": weight} for source, weight in zip((A, B), weights, strict=True)]
    mixed = mixture(where, *sources, make=make_endless, resampled=True)
    stream = iter(mixed)
    n = 5000
    for _ in range(2):
        drawn = Counter(key[0] for key in keys(stream, n))
        assert within(drawn["a"], n, weights[0] / sum(weights))
    stream.close()


def test_one_endless_source_does_not_hold_up_the_end(folder: Any) -> None:
    where = folder(a=(4, 100), b=(1, 20))
    got = keys(mixture(where, A, B | {"resample": True, "weight": 4}))
    drawn = Counter(key[0] for key in got)
    assert drawn["a"] == 400
    assert within(drawn["b"], len(got), 0.5)
    assert {key for key in got if key[0] == "b"} == {f"b/0/{i}" for i in range(20)}


def test_choose_and_resample_count_shards_of_an_epoch(folder: Any) -> None:
    where = folder(a=(4, 5), b=(1, 5))
    mixed = mixture(where, A | {"choose": 2}, B | {"resample": 3})
    assert mixed.weights == [2, 3]
    chosen = []
    for _ in range(12):
        got = Counter(key.rsplit("/", 1)[0] for key in keys(mixed))
        assert got.pop("b/0") == 15
        assert list(got.values()) == [5, 5]
        chosen.append(frozenset(got))
    assert len(set(chosen)) > 2
    mixed.set_epoch(0)
    assert {key.rsplit("/", 1)[0] for key in keys(mixed)} - {"b/0"} == chosen[0]


def test_epochs_follow_from_seed_and_number(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = folder(a=(4, 30), b=(1, 30))
    state = random.getstate()
    mixed = mixture(where, A, B, seed=1)
    first, second = keys(mixed), keys(mixed)
    assert first != second
    assert random.getstate() == state
    mixed.set_epoch(0)
    assert keys(mixed) == first
    assert keys(mixture(where, A, B, seed=2)) not in (first, second)
    monkeypatch.setenv("WDS_EPOCH", "1")
    assert keys(mixture(where, A, B, seed=1)) == second


def test_ranks_share_every_source(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = folder(a=(4, 5), b=(1, 5))
    monkeypatch.setenv("WORLD_SIZE", "2")
    got = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        got += keys(mixture(where, A, B))
    assert len(got) == len(set(got)) == 25


def test_labels_and_fields(folder: Any) -> None:
    where = folder(a=(4, 5), b=(1, 5))
    mixed = mixture(where, A | {"scale": [1.0, 3.0], "extensions": "nrm.jpg;cls"}, B)
    for sample in mixed:
        if sample["__key__"][0] == "a":
            assert sample["__source__"] == {"name": "a", "scale": [1.0, 3.0]}
            assert [name for name in sample if not name.startswith("__")] == ["cls", "nrm.jpg"]
        else:
            assert sample["__source__"] == {"name": "b"}
            assert {"txt", "cls", "nrm.jpg"} <= set(sample)
        assert sample["__url__"].startswith(str(where))
        assert sample.offset >= 0  # still the raw sample that knows its place
        sample["__source__"]["name"] = "changed by its user"


def test_a_selection_that_fits_nothing_is_told_once(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    where = folder(a=(4, 5))
    with caplog.at_level(logging.WARNING, "wds_async"):
        got = list(mixture(where, A | {"extensions": "png"}))
    assert len(got) == 20
    assert [set(sample) - {"__key__", "__url__", "__local_path__"} for sample in got] == [{"__source__"}] * 20
    assert len([record for record in caplog.records if "source a: its extensions ['png']" in record.message]) == 1


def test_one_source_is_not_mixed(folder: Any) -> None:
    where = folder(a=(4, 5))
    mixed = mixture(where, A)
    assert keys(mixed) == keys(mixed) == [f"a/{shard}/{i}" for shard in range(4) for i in range(5)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_every_source(folder: Any, method: str) -> None:
    from torch.utils.data import DataLoader

    where = folder(a=(4, 5), b=(1, 5))
    pipeline = DataPipeline(mixture(where, A, B))
    loader = DataLoader(pipeline, batch_size=None, num_workers=2, multiprocessing_context=method)
    epochs = [keys(loader) for _ in range(2)]
    for got in epochs:
        assert len(got) == len(set(got)) == 25
    assert epochs[0] != epochs[1]
    assert pipeline.statistics().samples == 50
    assert pipeline.traffic().origins["file"].bytes == pipeline.statistics().wire_bytes
    pipeline.set_epoch(0)
    assert keys(loader) == epochs[0]


def test_samples_of_shards_are_handed_on() -> None:
    index = {"shardlist": [{"url": "a.tar", "nsamples": 3}, {"url": "b-{0..1}.tar", "nsamples": 8}]}
    mixed = Mixture(spec.load(index), make)
    assert mixed.datasets[0].pipeline[0].counts == {"a.tar": 3}


def test_statistics_and_urls(folder: Any) -> None:
    where = folder(a=(4, 5), b=(1, 5))
    mixed = mixture(where, A, B)
    assert mixed.urls == [f"{where}/a-{i}.tar" for i in range(4)] + [f"{where}/b-0.tar"]
    assert len(keys(mixed)) == mixed.statistics().samples == 25
    assert mixed.statistics().shards == 5


def test_a_source_is_opened_when_it_is_drawn(folder: Any) -> None:
    where = folder(a=(4, 5))
    mixed = mixture(where, A, {"shards": "none.tar", "weight": 1e-9})
    assert len(keys(mixed, 15)) == 15


def test_labels_are_not_shared() -> None:
    source = SpecSource("s", ("x.tar",), 1, metadata={"scale": [1, 2]})
    first, second = Labelled([{"__key__": "a"}, {"__key__": "b"}], source)
    first["__source__"]["scale"].append(3)
    assert second["__source__"] == {"name": "s", "scale": [1, 2]}
    assert source.metadata == {"scale": [1, 2]}
