"""``wds-async index``."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

from wds_async.cli.index import command
from wds_async.errors import TruncatedShard
from wds_async.indexed.dataset import ShardListDataset
from wds_async.shardlists.spec import load


def call(*arguments: Any) -> Any:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_counts_samples_and_bytes(shards: Any, tmp_path: Path) -> None:
    paths = shards(3, 4)
    packed = tmp_path / "shards" / "packed.tar.gz"
    packed.write_bytes(gzip.compress(paths[0].read_bytes()))
    result = call(*paths, packed, "--name", "small")
    index = json.loads(result.stdout)
    assert index["wids_version"] == 1
    assert index["name"] == "small"
    assert [shard["nsamples"] for shard in index["shardlist"]] == [4] * 4
    assert [shard["filesize"] for shard in index["shardlist"]] == [os.path.getsize(p) for p in [*paths, packed]]
    assert [shard["url"] for shard in index["shardlist"]] == [*map(str, paths), str(packed)]
    assert "4 shards, 16 samples" in result.stderr


def test_an_index_moves_with_its_shards(shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(2, 3, directory=tmp_path / "data" / "train")
    monkeypatch.chdir(tmp_path)
    call("data/train/shard-{000000..000001}.tar", "-o", "data/index.json")
    assert [s["url"] for s in json.loads((tmp_path / "data/index.json").read_text())["shardlist"]] == [
        "train/shard-000000.tar",
        "train/shard-000001.tar",
    ]
    assert sorted(os.listdir(tmp_path / "data")) == ["index.json", "train"]  # no temporary file is left
    (tmp_path / "data").rename(tmp_path / "moved")
    with ShardListDataset(str(tmp_path / "moved" / "index.json")) as dataset:
        assert len(dataset) == 6
        assert dataset[5][".json"] == {"number": 5}


def test_shards_elsewhere(shards: Any, origin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = shards(1, 2)
    url = origin.add(f"data/{path.name}", path.read_bytes())
    (shard,) = json.loads(call(url).stdout)["shardlist"]
    assert (shard["url"], shard["nsamples"]) == (url, 2)
    monkeypatch.chdir(path.parent.parent)
    index = json.loads(call(f"shards/{path.name}", "--base", "s3://bucket/data").stdout)
    assert index["shardlist"][0]["url"] == f"s3://bucket/data/shards/{path.name}"


def test_an_index_is_written_to_a_url(shards: Any, tmp_path: Path) -> None:
    paths = shards(2, 3)
    call(*paths, "-o", "memory://test-index/i.json")
    (tmp_path / "index.json").write_bytes(fsspec.filesystem("memory").cat_file("/test-index/i.json"))
    (source,) = load(tmp_path / "index.json").sources
    assert (source.urls, source.nsamples) == (tuple(map(str, paths)), 6)


def test_a_bad_shard_is_named_and_nothing_is_written(shards: Any, tmp_path: Path) -> None:
    good, bad = shards(2, 3)
    bad.write_bytes(bad.read_bytes()[:3000])
    output = tmp_path / "index.json"
    output.write_text("old")
    with pytest.raises(TruncatedShard, match=bad.name):
        call(good, bad, "-o", output)
    assert output.read_text() == "old"
    call(good, "-o", tmp_path / "a new folder" / "index.json")
    assert (tmp_path / "a new folder" / "index.json").exists()
