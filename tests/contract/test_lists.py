"""Side by side with webdataset 1.0.2: shard lists, shuffles, splitters and mixes, seed by seed."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_async as ours
from tests.contract.common import agree, outcome

theirs = pytest.importorskip("webdataset")

BOTH = (theirs, ours)
URLS = [f"{i:03}.tar" for i in range(30)]
SPECS = [
    "{000..029}.tar", "a.tar", "a.tar::b.tar", "x{0..3}/y{a,b}.tar::z.tar", "pipe:cat {1..3}.tar", "{01..03}{x,y}",
    "s3://b/{0..2}.tar",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_expansion(spec: str) -> None:
    assert ours.shardlists.expand_urls(spec) == theirs.shardlists.expand_urls(spec)
    assert ours.shardlists.expand_source(spec) == theirs.shardlists.expand_source(spec)
    assert [list(w.shardspec(spec)) for w in (ours,)] == [list(w.shardspec(spec)) for w in (theirs,)]


def test_expansion_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_ROOT", "r/{0..1}")
    monkeypatch.setenv("WDS_DATA", "${ROOT}/d")
    spec = "${DATA}/{a,b}.tar"
    assert ours.shardlists.expand_urls(spec) == theirs.shardlists.expand_urls(spec)
    for wds in BOTH:
        with pytest.raises((AssertionError, ValueError)):
            wds.shardlists.expand_urls("${NOTSET}/a.tar")


@pytest.mark.parametrize("seed", [None, 0, 17, "text", 2.5])
def test_simple_lists(seed: Any) -> None:
    lists = [w.SimpleShardList(URLS, seed=seed) for w in BOTH]
    assert len(lists[0]) == len(lists[1])
    assert lists[0].urls == lists[1].urls
    for _ in range(2):
        assert list(lists[0]) == list(lists[1])


def test_a_seed_that_is_set_later() -> None:
    urls = list(map(str, range(10)))
    for wds in BOTH:
        pipeline = wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_node, wds.split_by_worker)
        assert next(iter(pipeline)) == {"url": "0"}
        pipeline.stage(0).seed = 17
        assert next(iter(pipeline)) == {"url": "7"}


@pytest.fixture(params=[(0, 1, 0, 1), (0, 4, 0, 4), (3, 4, 2, 4), (1, 3, 0, 2)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS"), request.param, strict=True):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("seed", [0, 5, 1 << 40])
def test_deterministic_resampling(seed: int, place: None) -> None:
    lists = [w.ResampledShards(URLS, nshards=50, seed=seed, deterministic=True) for w in BOTH]
    for epoch in range(3):
        assert list(lists[0]) == list(lists[1])
        assert lists[0].epoch == lists[1].epoch == epoch


def test_resampling_by_a_worker_seed() -> None:
    lists = [w.ResampledShards(URLS, 20, 3, lambda: 11, True) for w in BOTH]
    assert list(lists[0]) == list(lists[1])


def test_resampling_without_a_seed() -> None:
    for wds in BOTH:
        drawn = wds.ResampledShards(URLS, nshards=40)
        runs = [[shard["url"] for shard in drawn] for _ in range(2)]
        assert runs[0] != runs[1]
        assert set(runs[0]) <= set(URLS)


@pytest.mark.parametrize("urls", [[], 7, "{0..3}.tar"])
def test_what_is_resampled(urls: Any) -> None:
    agree(*[outcome(lambda w=w: w.ResampledShards(urls, nshards=5, deterministic=True)) for w in BOTH])


def test_the_filter_that_resamples() -> None:
    for wds in BOTH:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = list(wds.DataPipeline(lambda: iter(URLS), wds.resampled(100)))
        assert len(drawn) == 100
        assert set(drawn) <= set(URLS)


@pytest.mark.parametrize("splitter", ["split_by_node", "split_by_worker"])
def test_splitters(splitter: str, place: None) -> None:
    assert list(getattr(ours, splitter)(iter(URLS))) == list(getattr(theirs, splitter)(iter(URLS)))
    assert ours.utils.pytorch_worker_info() == theirs.utils.pytorch_worker_info()
    assert ours.utils.pytorch_worker_seed() == theirs.utils.pytorch_worker_seed()


def test_one_node_only(place: None) -> None:
    agree(*[outcome(lambda w=w: w.single_node_only(iter(URLS))) for w in BOTH])


@given(st.lists(st.integers(0, 1 << 60), min_size=1))
def test_seeds_of_integers(values: list[int]) -> None:
    assert ours.utils.make_seed(*values) == theirs.utils.make_seed(*values)


@pytest.mark.parametrize("bufsize", [1, 2, 3, 10, 29, 30, 31, 1000])
@pytest.mark.parametrize("initial", [0, 1, 7, 100])
def test_shuffles(bufsize: int, initial: int) -> None:
    for seed in (0, 1, "text", 99.5):
        orders = [
            list(w.DataPipeline(lambda: iter(URLS), w.shuffle(bufsize, initial=initial, seed=seed))) for w in BOTH
        ]
        assert orders[0] == orders[1]
    orders = [list(w.DataPipeline(lambda: iter(URLS), w.shuffle(bufsize, initial, random.Random(4)))) for w in BOTH]
    assert orders[0] == orders[1]


def test_the_order_that_the_contract_names() -> None:
    for wds in BOTH:
        assert list(wds.filters._shuffle(iter(range(6)), bufsize=3, seed=0)) == [1, 2, 0, 3, 5, 4]
    both = [outcome(lambda w=w: w.filters._shuffle(iter(range(6)), seed=0, rng=random.Random(0))) for w in BOTH]
    agree(*both)


@pytest.mark.parametrize(("bufsize", "initial", "seed", "epoch"), [(10, 100, 0, -1), (3, 1, 7, 5), (1000, 5, 2, 0)])
def test_shuffles_that_count_epochs(bufsize: int, initial: int, seed: int, epoch: int) -> None:
    stages = [w.detshuffle(bufsize, initial, seed, epoch) for w in BOTH]
    pipelines = [w.DataPipeline(lambda: iter(URLS), stage) for w, stage in zip(BOTH, stages, strict=True)]
    assert stages[0].epoch == stages[1].epoch == epoch
    for number in range(1, 5):
        assert list(pipelines[0]) == list(pipelines[1])
        assert stages[0].epoch == stages[1].epoch == epoch + number
    stages[0].epoch = stages[1].epoch = 40
    assert list(pipelines[0]) == list(pipelines[1])


def test_workers_go_on_from_the_passes_of_their_parent() -> None:
    """As webdataset's do, which copy the parent's counter; those of ours have the next epoch each time, too."""
    from torch.utils.data import DataLoader

    orders = []
    for wds in BOTH:
        pipeline = wds.DataPipeline(wds.SimpleShardList(URLS), wds.detshuffle(10))
        drawn = wds.DataPipeline(wds.ResampledShards(URLS, 20, deterministic=True))
        runs = []
        for stages in (pipeline, drawn):
            passes = [list(stages), list(stages), list(DataLoader(stages, batch_size=None, num_workers=1))]
            runs.append([[shard["url"] for shard in shards] for shards in passes])
        orders.append(runs)
    assert orders[0] == orders[1]
    assert all(first != second != third != first for first, second, third in orders[1])


def sources() -> list[Any]:
    return [range(20), range(100, 105), iter("abcdefghijkl"), np.arange(200, 203)]


@pytest.mark.parametrize("longest", [False, True])
@pytest.mark.parametrize("weights", [None, [1, 1, 1, 1], [0.5, 0.2, 0.2, 0.1], [8, 0, 1, 3], [1e-3, 1e3, 1, 7]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mixes(longest: bool, weights: Any, seed: int) -> None:
    """The draws of ``random.seed(n)`` are webdataset's, with and without ``seed=n``, and the program's next one too."""
    state = random.getstate()
    random.seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # webdataset divides 0 by 0 where only weights of 0 are left
        expected = outcome(lambda: theirs.RandomMix(sources(), probs=weights, longest=longest))
    after = random.getstate()
    random.seed(seed)
    unseeded = outcome(lambda: ours.RandomMix(sources(), probs=weights, longest=longest))
    same_after = random.getstate() == after
    random.setstate(state)
    if expected[1] is not None:
        assert longest
        assert 0 in weights  # and then looks behind the end of its list
        return
    agree(expected, outcome(lambda: ours.RandomMix(sources(), probs=weights, longest=longest, seed=seed)))
    agree(expected, unseeded)
    assert same_after


@pytest.mark.parametrize("mode", ["unlink", "keep", "resample"])
@pytest.mark.parametrize("select", ["oldest"])
def test_directories(tmp_path: Path, mode: str, select: str) -> None:
    """What is named while it is read, and what is left of it."""
    runs = []
    for wds in BOTH:
        folder = tmp_path / wds.__name__
        folder.mkdir()
        for i in range(3):
            (folder / f"{i}.tar").touch()
        given = wds.shardlists.DirectoryShardList(f"{folder}/", pattern="*.tar", select=select, mode=mode, poll=None)
        source, seen = iter(given), []
        for _ in range(2):
            seen.append(next(source)["url"].replace(str(folder), ""))
        del source
        runs.append((seen, sorted(p.name for p in folder.iterdir() if "._" not in p.name)))
    assert runs[0] == runs[1]
