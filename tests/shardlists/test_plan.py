"""Shard plans: what the arguments of `WebDataset` make of a list of shards. The orders are in ``test_dataset.py``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from wds_async import logs
from wds_async.errors import ConfigError
from wds_async.filters.shuffling import detshuffle, epochshuffle
from wds_async.shardlists import ResampledShards, SimpleShardList, split_by_node, split_by_worker
from wds_async.shardlists.directories import DirectoryShardList
from wds_async.shardlists.plan import ShardPlan, log_seed, shuffle_buffer, shuffle_seed

URLS = ["a.tar", "b.tar", "c.tar"]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS", "WDS_EPOCH"):
        monkeypatch.delenv(name, raising=False)


def kinds(stages: list[Any]) -> list[Any]:
    return [stage if callable(stage) and not hasattr(stage, "run") else type(stage) for stage in stages]


def test_stages(tmp_path: Path) -> None:
    splitters = [split_by_node, split_by_worker]
    assert kinds(ShardPlan().stages(URLS)) == [SimpleShardList, *splitters]
    assert kinds(ShardPlan(buffer=10).stages(URLS)) == [SimpleShardList, detshuffle, *splitters]
    assert kinds(ShardPlan(permuted=True).stages(URLS)) == [SimpleShardList, epochshuffle, *splitters]
    assert kinds(ShardPlan(permuted=True).stages(ResampledShards(URLS))) == [ResampledShards]
    assert kinds(ShardPlan(buffer=10, nodesplitter=None, workersplitter=False).stages(URLS)) == [
        SimpleShardList, detshuffle
    ]  # fmt: skip
    # Who draws for himself shares with nobody, unless the program brings a splitter of its own.
    assert kinds(ShardPlan(resampled=True).stages(URLS)) == [ResampledShards]
    assert kinds(ShardPlan(resampled=True, nodesplitter=iter).stages(URLS)) == [ResampledShards, iter]
    assert kinds(ShardPlan(mode="keep").stages(str(tmp_path))) == [DirectoryShardList]
    assert kinds(ShardPlan(buffer=10).stages(ResampledShards(URLS))) == [ResampledShards]


def test_a_shard_list_is_taken_as_it_is() -> None:
    shards = SimpleShardList(URLS, counts={"a.tar": 3})
    assert ShardPlan().stages(shards)[0] is shards


def test_modes() -> None:
    with pytest.raises(ConfigError, match="mode='other'"):
        ShardPlan(mode="other")
    with pytest.raises(ConfigError, match="one directory"):
        ShardPlan(mode="unlink").stages(URLS)


def test_empty_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="3 shards for 4 ranks"):
        ShardPlan().stages(URLS)
    assert ShardPlan(strict=False).stages(URLS)
    assert ShardPlan(nodesplitter=None).stages(URLS)


def test_the_buffer() -> None:
    assert [shuffle_buffer(n, False, 2) for n in (False, 0, 7, "epoch")] == [0, 0, 7, 0]
    with pytest.raises(TypeError, match=r"'epochs'.*'epoch'"):
        shuffle_buffer("epochs", False, 2)
    with pytest.warns(UserWarning, match="not given"):
        assert shuffle_buffer(None, False, 2) == 0
    with pytest.warns(UserWarning, match="100 shards"):
        assert shuffle_buffer(True, False, 2) == 100
    with pytest.warns(UserWarning, match="resampled"):
        assert shuffle_buffer(7, True, 2) == 0
    assert shuffle_buffer(None, True, 2) == 0


def test_pipes_that_need_no_command_are_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_process", logs.Once())
    with caplog.at_level(logging.WARNING, "wds_async"):
        ShardPlan().stages("pipe:cat x.tar")
    assert "WDS_NATIVE_PIPES" in caplog.text


def test_several_ranks_are_told_once_that_there_is_no_seed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_process", logs.Once())
    monkeypatch.delenv("WDS_SEED", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in "1200":
        monkeypatch.setenv("RANK", rank)
        log_seed(shuffle_seed(None, split_by_node), "shuffled")
        log_seed(shuffle_seed(7, split_by_node), "shuffled")
    (record,) = caplog.records
    assert "the shards of 4 ranks are shuffled by seed 0" in record.getMessage()
    assert "Pass seed= or WDS_SEED" in record.getMessage()
    monkeypatch.setattr(logs, "_process", logs.Once())
    monkeypatch.setenv("WDS_EPOCH", "3")  # it goes on where another run ended
    log_seed(shuffle_seed(None, split_by_node), "shuffled")
    assert len(caplog.records) == 1
