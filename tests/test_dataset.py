"""`WebDataset`: arguments, shard order over ranks, workers and epochs, fluent methods, DataLoader workers."""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import make_shard
from wds_async import logs, shardlists
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, UrlError
from wds_async.handlers import ignore_and_continue

SHARDS, PER_SHARD = 8, 6


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """Brace notation for SHARDS shards of PER_SHARD samples; key ``s<shard>/<number>``."""
    for s in range(SHARDS):
        shard = {f"s{s}/{i}": {"cls": str(i).encode(), "txt": f"{s}.{i}".encode()} for i in range(PER_SHARD)}
        (tmp_path / f"d-{s}.tar").write_bytes(make_shard(shard))
    return str(tmp_path / f"d-{{0..{SHARDS - 1}}}.tar")


ALL = sorted(f"s{s}/{i}" for s in range(SHARDS) for i in range(PER_SHARD))


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]


def shard_order(samples: Any) -> list[str]:
    return [key.split("/")[0] for key in keys(samples) if key.endswith("/0")]


def test_everything_in_order(spec: str) -> None:
    ds = WebDataset(spec)
    assert keys(ds) == keys(ds) == ALL
    assert keys(WebDataset([Path(u) for u in ds.pipeline[0].urls])) == ALL
    assert keys(WebDataset(str(Path(spec).parent) + "/")) == ALL
    assert [type(stage).__name__ for stage in ds.pipeline] == [
        "SimpleShardList", "function", "function", "TarStage", "partial"
    ]  # fmt: skip


@pytest.mark.parametrize("urls", [[], 3, None])
def test_urls_that_are_none(urls: Any) -> None:
    with pytest.raises(UrlError):
        WebDataset(urls)


def test_arguments_out_of_range(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mode='other'"):
        WebDataset(spec, mode="other")
    with pytest.raises(ConfigError, match="one directory"):
        WebDataset([spec], mode="unlink")


def test_arguments_that_a_specification_cannot_have(spec: str) -> None:
    with pytest.raises(ConfigError, match="for a directory"):
        WebDataset({"dataset": [{"shards": spec}]}, mode="unlink")
    with pytest.raises(ConfigError, match="orders its shards itself"):
        WebDataset("wds_async.shardlists:SimpleShardList", resampled=True)


def test_shard_shuffle_that_says_too_little(spec: str) -> None:
    with pytest.warns(UserWarning, match="shardshuffle is not given") as record:
        assert keys(WebDataset(spec, shardshuffle=None)) == ALL
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="100 shards") as record:
        assert shard_order(WebDataset(spec, shardshuffle=True)) != shard_order(WebDataset(spec, shardshuffle=False))
    assert record[0].filename == __file__


def test_without_a_seed_a_restart_has_another_order(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    def made(program_seed: int) -> WebDataset:
        random.seed(program_seed)
        return WebDataset(spec, shardshuffle=100)

    state = random.getstate()
    try:
        with caplog.at_level(logging.INFO, "wds_async"):
            runs = [made(n) for n in (1, 1, 2)]
    finally:
        random.setstate(state)
    assert runs[0].seed == runs[1].seed != runs[2].seed
    orders = [shard_order(run) for run in runs]
    assert orders[0] == orders[1] != orders[2]
    assert shard_order(WebDataset(spec, shardshuffle=100, seed=runs[2].seed)) == orders[2]
    assert f"no seed is given: {runs[2].seed} was drawn; seed={runs[2].seed} or WDS_SEED" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "wds_async"):
        WebDataset(spec, shardshuffle=False)  # no order depends on it
    assert not caplog.records


def test_a_seed_that_changes_no_order_is_not_logged(
    spec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WDS_SEED", raising=False)
    source = {"shards": spec}
    made = functools.partial(WebDataset, shardshuffle=False)
    with caplog.at_level(logging.INFO, "wds_async"):
        made({"dataset": [source]})
        made({"dataset": [source, source]}, seed=3)
        assert not caplog.records
        made({"dataset": [source, source]})
        made({"dataset": [source | {"choose": 2}]})
    assert len([text for text in caplog.messages if text.startswith("no seed is given: ")]) == 2
    caplog.clear()
    monkeypatch.setattr(logs, "_process", logs.Once())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    made({"dataset": [source]})
    assert not caplog.records
    made({"dataset": [source, source]})
    assert "the shards of 2 ranks are mixed by seed 0" in caplog.text


@pytest.mark.parametrize("shuffle", [100, "epoch"])
def test_without_a_seed_ranks_take_shares_of_one_order(
    spec: str, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process group may begin after the dataset was made."""
    ranks = [WebDataset(spec, shardshuffle=shuffle) for _ in range(2)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for rank, ds in enumerate(ranks):
        monkeypatch.setenv("RANK", str(rank))
        shares += keys(pickle.loads(pickle.dumps(ds)))
    assert sorted(shares) == ALL
    monkeypatch.delenv("WORLD_SIZE")
    splitters = [lambda source, rank=rank: itertools.islice(source, rank, None, 2) for rank in range(2)]
    own = [WebDataset(spec, shardshuffle=shuffle, nodesplitter=splitter) for splitter in splitters]
    assert sorted(keys(own[0]) + keys(own[1])) == ALL
    monkeypatch.setenv("NUM_WORKERS", "2")
    shares = []
    for worker in range(2):
        monkeypatch.setenv("WORKER", str(worker))
        shares += keys(WebDataset(spec, shardshuffle=shuffle))  # made in the worker itself
    assert sorted(shares) == ALL


@pytest.mark.parametrize("shuffle", [100, "epoch"])
def test_seed_and_epoch_from_the_environment(spec: str, shuffle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = WebDataset(spec, shardshuffle=shuffle, seed=5)
    orders = [shard_order(ds) for _ in range(3)]
    monkeypatch.setenv("WDS_SEED", "5")
    monkeypatch.setenv("WDS_EPOCH", "2")
    assert shard_order(WebDataset(spec, shardshuffle=shuffle)) == orders[2]
    assert WebDataset(spec).seed == 5
    assert WebDataset(spec, seed=6).seed == 6
    ds.set_epoch(1)
    assert shard_order(ds) == orders[1]
    monkeypatch.setenv("WDS_SEED", "five")
    with pytest.raises(ConfigError, match="WDS_SEED"):
        WebDataset(spec)


@pytest.mark.parametrize("shuffle", [100, "epoch"])
def test_all_ranks_and_workers_share_one_order(spec: str, shuffle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = WebDataset(spec, shardshuffle=shuffle, seed=3)
    epochs = [shard_order(whole) for _ in range(2)]
    shares: dict[tuple[int, int], list[list[str]]] = {}
    for rank, worker in itertools.product(range(2), range(2)):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "WORKER": worker, "NUM_WORKERS": 2}.items():
            monkeypatch.setenv(name, str(value))
        ds = WebDataset(spec, shardshuffle=shuffle, seed=3)
        shares[rank, worker] = [shard_order(ds) for _ in range(2)]
    for epoch, order in enumerate(epochs):
        for (rank, worker), share in shares.items():
            assert share[epoch] == order[rank::2][worker::2]
    # Shuffled before they are split, so a worker meets other shards in another epoch.
    assert any(set(share[0]) != set(share[1]) for share in shares.values())


def test_resampled(spec: str) -> None:
    for ds in (WebDataset(spec, resampled=True), WebDataset(spec, mode="resampled")):
        assert set(shard_order(ds.slice(100 * PER_SHARD))) == {f"s{i}" for i in range(SHARDS)}
    with pytest.warns(UserWarning, match="shardshuffle"):
        WebDataset(spec, resampled=True, shardshuffle=100)
    twice = [keys(WebDataset(spec, resampled=True, seed=4).slice(100)) for _ in range(2)]
    assert twice[0] == twice[1]
    ds = WebDataset(spec, resampled=True, seed=4).slice(100)
    assert keys(ds) == twice[0]
    assert keys(ds) != twice[0]


def test_empty_check(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER", "9")
    monkeypatch.setenv("NUM_WORKERS", "10")
    with pytest.raises(ValueError, match=r"worker 9 of 10, rank 0 of 1: .* fewer shards \(8\) .*\(10\)"):
        list(WebDataset(spec))
    assert list(WebDataset(spec, empty_check=False)) == []
    # The cure that the message names: samples are split, not shards.
    assert keys(WebDataset(spec, workersplitter=None).compose(shardlists.split_by_worker)) == ALL[9::10]


def test_an_empty_rank_is_told_before_training(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(ConfigError, match="8 shards for 9 ranks"):
        WebDataset(spec)
    assert shard_order(WebDataset(spec, empty_check=False)) == ["s0"]
    assert len(keys(WebDataset(spec, nodesplitter=None).compose(shardlists.split_by_node))) == 6


def test_progress(spec: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert keys(WebDataset(spec)) == ALL
    assert capfd.readouterr().err == ""
    assert keys(WebDataset(spec, progress=True)) == ALL
    assert "48 samples" in capfd.readouterr().err
    monkeypatch.setenv("WDS_PROGRESS", "1")
    assert len(WebDataset(spec).pipeline) == len(WebDataset(spec, progress=False).pipeline) + 1


def test_statistics(spec: str) -> None:
    ds = WebDataset(spec)
    list(ds.shuffle(10).slice(20))
    assert 20 <= ds.statistics().samples <= 48
    assert ds.statistics().bytes > 0
    assert ds.traffic().origins["file"].bytes >= ds.statistics().bytes


class _Turning:
    """A program's own list of shards: each epoch begins with the next one."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.urls = [*self.urls[1:], self.urls[0]]
        return ({"url": url, "weight": 1} for url in self.urls)


def test_a_source_is_any_iterable_of_dicts(spec: str) -> None:
    import torch.utils.data

    class Turning(_Turning, torch.utils.data.IterableDataset):  # type: ignore[misc]
        pass

    urls = shardlists.expand_urls(spec)
    dicts = [{"url": url} for url in urls]
    for shards in (dicts, tuple(dicts), iter(dicts), _Turning(urls), Turning(urls)):
        assert sorted(keys(WebDataset(shards, shardshuffle=False))) == ALL
        assert sorted(keys(WebDataset(iter(dicts), shardshuffle=5, seed=1))) == ALL
    assert list(shardlists.SimpleShardList(dicts)) == dicts
    assert {shard["url"] for shard in itertools.islice(shardlists.ResampledShards(dicts), 100)} == set(urls)
    own = WebDataset(Turning(urls), shardshuffle=False)
    assert [shard_order(own)[0] for _ in range(3)] == ["s1", "s2", "s3"]  # nothing was taken when it was made
    shuffled = WebDataset(Turning(urls), shardshuffle=100, seed=1)
    assert shard_order(shuffled) != shard_order(shuffled)


def test_an_empty_archive_is_named_as_a_cause(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.tar").write_bytes(bytes(10240))
    dataset = WebDataset(str(tmp_path / "{0..4}.tar"), shardshuffle=False)
    named = ", ".join(str(tmp_path / f"{number}.tar") for number in range(3))
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(f"empty archives, without a member: {named} and 2 more")):
            list(dataset)


def test_an_empty_archive_among_others_is_logged_once(
    tmp_path: Path, spec: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("x", "y"):
        (tmp_path / f"{name}.tar").write_bytes(bytes(1024))
    urls = [str(tmp_path / "x.tar"), spec, str(tmp_path / "y.tar")]
    assert sorted(keys(WebDataset(urls, shardshuffle=False))) == ALL
    assert [record.getMessage() for record in caplog.records if "empty" in record.getMessage()] == [
        f"{tmp_path}/x.tar: the archive is empty: it ends without a member (logged once)"
    ]


def test_shards_that_a_handler_passed_over_are_named_as_the_cause(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"passed over by the handler: .*x\.tar.*is empty \(0 bytes\)"):
        list(WebDataset(str(tmp_path / "x.tar"), shardshuffle=False, handler=ignore_and_continue))
