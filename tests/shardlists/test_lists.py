"""Which shards, in which order, for whom."""

from __future__ import annotations

import itertools
import logging
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from fsspec.spec import AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st

from wds_async import shardlists
from wds_async.errors import UrlError
from wds_async.shardlists import directories
from wds_async.storage.listing.expand import forget_listings
from wds_async.storage.options import StorageOptions

URLS = [f"http://host/{i}.tar" for i in range(10)]


def urls(source: Any, n: int | None = None) -> list[str]:
    return [shard["url"] for shard in itertools.islice(source, n)]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS", "WDS_SHOW_SEED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Any:
    def at(rank: int, world_size: int, worker: int = 0, num_workers: int = 1) -> None:
        values = {"RANK": rank, "WORLD_SIZE": world_size, "WORKER": worker, "NUM_WORKERS": num_workers}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return at


@pytest.mark.parametrize(
    "spec",
    ["http://host/{0..9}.tar", URLS, (u for u in URLS), ["http://host/{0..4}.tar", "http://host/{5..9}.tar"]],
)
def test_simple_list(spec: Any) -> None:
    shards = shardlists.SimpleShardList(spec)
    assert len(shards) == 10
    assert urls(shards) == URLS
    assert urls(shards) == URLS


def test_paths(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"{i}.tar").touch()
    expected = [str(tmp_path / "0.tar"), str(tmp_path / "1.tar")]
    assert urls(shardlists.SimpleShardList(tmp_path / "{0..1}.tar")) == expected
    assert urls(shardlists.SimpleShardList([tmp_path / "0.tar", str(tmp_path / "1.tar")])) == expected


@pytest.mark.parametrize("kind", [shardlists.SimpleShardList, shardlists.ResampledShards])
@pytest.mark.parametrize("nothing", [[], (), iter([]), 3, None, b"x.tar", {"a": 1}])
def test_no_shards(kind: Any, nothing: Any) -> None:
    with pytest.raises(UrlError):
        kind(nothing)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_splitting_gives_each_shard_to_one_worker(n: int, ranks: int, workers: int) -> None:
    shares: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(ranks))
        patch.setenv("NUM_WORKERS", str(workers))
        for rank in range(ranks):
            for worker in range(workers):
                patch.setenv("RANK", str(rank))
                patch.setenv("WORKER", str(worker))
                share = list(shardlists.split_by_worker(shardlists.split_by_node(range(n))))
                assert share == sorted(share)
                shares += share
    assert sorted(shares) == list(range(n))


def test_resampled_shards_are_drawn_with_replacement_and_do_not_end() -> None:
    drawn = urls(shardlists.ResampledShards(URLS), 1000)
    assert set(drawn) == set(URLS)
    assert len(drawn) == 1000
    assert len(urls(shardlists.ResampledShards(URLS, nshards=7))) == 7


def test_deterministic_resampling(stand: Any) -> None:
    def run(**kw: Any) -> list[list[str]]:
        shards = shardlists.ResampledShards(URLS, deterministic=True, **kw)
        return [urls(shards, 50) for _ in range(3)]

    once = run()
    assert run() == once
    assert len({tuple(epoch) for epoch in once}) == 3
    assert run(seed=1) != once
    assert run(seed="text") == run(seed="text") != once
    stand(0, 1, 1, 2)
    assert run() != once
    assert run(worker_seed=lambda: 0) == once


def test_resampling_epoch_can_be_set() -> None:
    shards = shardlists.ResampledShards(URLS, deterministic=True)
    assert shards.epoch == -1
    first = urls(shards, 50)
    urls(shards, 50)
    assert shards.epoch == 1
    shards.set_epoch(0)
    assert urls(shards, 50) == first
    shards.epoch = -1
    assert urls(shards, 50) == first
    assert pickle.loads(pickle.dumps(shards)).epoch == 0


def test_seed_is_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WDS_SHOW_SEED", "1")
    with caplog.at_level(logging.WARNING, "wds_async"):
        urls(shardlists.ResampledShards(URLS), 1)
    assert "ResampledShards seed" in caplog.text


def test_resampled_filter() -> None:
    drawn = list(shardlists.resampled(100, seed=1)(range(5)))
    assert len(drawn) == 100
    assert set(drawn) == set(range(5))
    assert list(shardlists.resampled(100, seed=1)(range(5))) == drawn
    with pytest.raises(UrlError, match="nothing to draw from"):
        list(shardlists.resampled(3)([]))


MULTI = {
    "prefix": "http://host/",
    "buckets": ["all"],
    "datasets": [
        {"shards": "a-{0..9}.tar", "choose": 4},
        {"shards": ["b-{0..3}.tar", "c.tar"], "resample": 7, "name": "b"},
        {"shards": "d-{0..2}.tar", "buckets": "other"},
    ],
}


def test_multi_shard_sample_is_webdatasets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = pytest.importorskip("webdataset")
    monkeypatch.setenv("ALLOW_OBSOLETE", "1")
    path = tmp_path / "multi.yaml"
    path.write_text(yaml.safe_dump(MULTI))
    for multi in (MULTI, str(path)):
        ours, other = (w.MultiShardSample(multi) for w in (shardlists, theirs))
        for epoch in (0, 1, 17):
            ours.set_epoch(epoch)
            other.set_epoch(epoch)
            got = list(ours)
            assert got == list(other)
            assert len(got) == 14
    capsys.readouterr()


def test_multi_shard_sample_has_one_order_an_epoch() -> None:
    shards = shardlists.MultiShardSample(MULTI)
    assert shards.epoch == -1
    epochs = [urls(shards) for _ in range(3)]
    assert shards.epoch == 2
    assert len({tuple(epoch) for epoch in epochs}) == 3
    shards.set_epoch(1)
    assert urls(shards) == epochs[1]
    assert urls(shardlists.MultiShardSample(MULTI)) == epochs[0]  # so every rank has the same and takes its share
    assert urls(shardlists.MultiShardSample(MULTI, seed=1)) == epochs[1]
    assert urls(pickle.loads(pickle.dumps(shards))) == epochs[2]
    assert len(shards.urls) == 18
    endless = shardlists.MultiShardSample({"datasets": [{"shards": "x-{0..4}.tar", "resample": True}]})
    assert len(urls(endless)) == 5


def test_shardspec(tmp_path: Path) -> None:
    path = tmp_path / "multi.yaml"
    path.write_text(yaml.safe_dump(MULTI))
    assert isinstance(shardlists.shardspec(str(path)), shardlists.MultiShardSample)
    assert isinstance(shardlists.shardspec(MULTI), shardlists.MultiShardSample)
    simple = shardlists.shardspec("x-{0..3}.tar")
    assert isinstance(simple, shardlists.SimpleShardList)
    assert len(simple) == 4


def test_patterns_of_stores_are_listed_with_options() -> None:
    options = {"listed": {"names": "b.tar a.tar"}}

    class Listed(AbstractFileSystem):  # type: ignore[misc]
        protocol = "listed"
        cachable = False

        def __init__(self, names: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.names = names.split()

        def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
            return [{"name": f"{path}/{name}", "size": 1, "type": "file"} for name in self.names]

    fsspec.register_implementation("listed", Listed, clobber=True)
    expected = ["listed://b/a.tar", "listed://b/b.tar"]
    assert shardlists.SimpleShardList("listed://b/*.tar", storage_options=options).urls == expected
    assert shardlists.ResampledShards("listed://b/", storage_options=options).urls == expected
    assert shardlists.expand_urls("listed://b/[ab].tar", storage_options=StorageOptions(options)) == expected
    with pytest.raises(UrlError, match="among 0 names"):
        shardlists.expand_source("listed://b/*.tar")
    forget_listings()


def test_what_is_expanded_stays_as_it_is() -> None:
    names = shardlists.Expanded(["s3://b/{x,y}.tar", "s3://b/*.tar"])
    assert shardlists.SimpleShardList(names).urls == names
    assert shardlists.expand_source(names, 1) == names[:1]
    with pytest.raises(UrlError, match="no shards"):
        shardlists.expand_source(shardlists.Expanded())


def test_a_seed_of_true_is_the_time() -> None:
    shards = shardlists.SimpleShardList(URLS, seed=True)
    assert isinstance(shards.seed, float)
    assert urls(shards) == urls(shards)
    assert sorted(urls(shards)) == URLS


def test_names_that_programs_import_from_here() -> None:
    from torch.utils.data import IterableDataset

    assert shardlists.IterableDataset is IterableDataset
    assert shardlists.DirectoryShardList is directories.DirectoryShardList
    with pytest.raises(AttributeError, match="no_such_name"):
        shardlists.no_such_name  # noqa: B018
