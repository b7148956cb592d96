"""``wds-async index``."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

from tests.servers import make_shard
from tests.servers.moto import CREDENTIALS, clean_aws, moto
from tests.tar.test_index import energon_of
from wds_async.cli.index import command, progress_bar
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, ObjectChanged
from wds_async.indexed.dataset import ShardListDataset
from wds_async.indexed.randomaccess import IndexedDataset
from wds_async.indexed.shardindex import ShardIndex
from wds_async.shardlists.spec import load
from wds_async.tar.index import DaliIndex, scan

__all__ = ["clean_aws", "moto"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))


def call(*arguments: Any, status: int = 0) -> Any:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
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


def test_bad_shards_are_named_at_the_end_and_no_list_is_written(shards: Any, tmp_path: Path) -> None:
    good, bad, other = shards(3, 3)
    bad.write_bytes(bad.read_bytes()[:3000])
    other.unlink()
    output = tmp_path / "index.json"
    output.write_text("old")
    result = call(bad, good, other, "-o", output, status=1)
    assert output.read_text() == "old"
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert [name.name in line for name, line in zip((bad, other), errors, strict=True)] == [True, True]
    assert "1 shard, 3 samples" in result.stderr
    assert result.stderr.rstrip().endswith("2 errors")
    call(good, "-o", tmp_path / "a new folder" / "index.json")
    assert (tmp_path / "a new folder" / "index.json").exists()


def read_bytes(origin: Any) -> int:
    """How many requests wanted more than the first bytes of a shard."""
    return sum(r.headers.get("range", "") not in ("bytes=0-511", "bytes=0-0") for r in origin.requests)


def test_a_second_run_reads_only_what_has_changed(shards: Any, origin: Any) -> None:
    paths = shards(3, 4)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    first = call(*urls).stdout
    origin.forget()
    assert call(*urls, "--dry-run").stdout == "0 shards would be read, 3 are up to date\n"
    second = call(*urls)
    assert second.stdout == first
    assert "3 up to date before" in second.stderr
    assert read_bytes(origin) == 0
    origin.add(paths[1].name, make_shard({"a": {"txt": b"1"}}))
    assert call(*urls, "--dry-run").stdout == "1 shard would be read, 2 are up to date\n"
    counts = [shard["nsamples"] for shard in json.loads(call(*urls).stdout)["shardlist"]]
    assert counts == [4, 1, 4]
    origin.forget()
    call(*urls, "--again")
    assert read_bytes(origin) >= 3


def test_an_interrupted_run_goes_on(shards: Any, tmp_path: Path) -> None:
    """What was found before an error, or Ctrl-C, need not be found again."""
    paths = shards(3, 4)
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[:3000])
    call(*paths, "-o", tmp_path / "i.json", status=1)
    paths[2].write_bytes(whole)
    result = call(*paths, "-o", tmp_path / "i.json")
    assert "3 shards, 12 samples" in result.stderr
    assert "2 up to date before" in result.stderr


@pytest.mark.parametrize("kind", ["dali", "energon", "wds"])
def test_a_file_for_each_shard(kind: str, shards: Any, tmp_path: Path) -> None:
    paths = shards(2, 4)
    call(*paths, "--kind", kind)
    names = {"dali": "shard-000000.idx", "energon": "shard-000000.tar.idx", "wds": "shard-000000.tar.index"}
    beside = paths[0].with_name(names[kind])
    data = paths[0].read_bytes()
    if kind == "energon":
        assert beside.read_bytes() == energon_of(data)
    elif kind == "dali":
        pieces = iter([memoryview(data)])
        assert beside.read_text() == DaliIndex(scan(lambda: next(pieces, None), "u")).text()
    else:
        found = ShardIndex.from_bytes(beside.read_bytes())
        assert [found.keys[i] for i in range(len(found))] == ["000000", "000001", "000002", "000003"]
    written = beside.stat().st_mtime_ns
    assert "2 up to date before" in call(*paths, "--kind", kind).stderr
    assert beside.stat().st_mtime_ns == written
    call(*paths, "--kind", kind, "-o", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / names[kind]).read_bytes() == beside.read_bytes()


def test_a_file_that_is_gone_is_written_without_reading(shards: Any, origin: Any, tmp_path: Path) -> None:
    (path,) = shards(1, 4)
    url = origin.add(path.name, path.read_bytes())
    call(url, "--kind", "wds", "-o", tmp_path / "i")
    (file,) = (tmp_path / "i").iterdir()
    before = file.read_bytes()
    file.unlink()
    origin.forget()
    call(url, "--kind", "wds", "-o", tmp_path / "i")
    assert file.read_bytes() == before
    assert read_bytes(origin) == 0


def test_dalis_index_of_a_former_shard_is_not_taken_for_the_new_ones(shards: Any) -> None:
    """As many samples, and our own index is up to date: still DALI's has other offsets."""
    (path,) = shards(1, 3)
    call(path, "--kind", "dali")
    path.write_bytes(make_shard({str(n): {"txt": bytes(1000)} for n in range(3)}))
    call(path)
    call(path, "--kind", "dali")
    pieces = iter([memoryview(path.read_bytes())])
    assert path.with_suffix(".idx").read_text() == DaliIndex(scan(lambda: next(pieces, None), "u")).text()


def test_what_was_learnt_while_training_is_used(shards: Any, origin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = shards(1, 4)
    url = origin.add(path.name, path.read_bytes())
    monkeypatch.setenv("WIDS_CACHE", os.environ["WDS_CACHE"])
    monkeypatch.delenv("WDS_CACHE")
    monkeypatch.setenv("WDS_LEARN_INDEX", "1")
    with WebDataset(url, shardshuffle=False) as dataset:
        list(dataset)
    origin.forget()
    assert json.loads(call(url).stdout)["shardlist"][0]["nsamples"] == 4
    call(url, "--kind", "wds", "-o", path.parent)
    assert read_bytes(origin) == 0
    call(url, "--kind", "energon", "-o", path.parent)  # which needs to know where the last sample ends
    assert path.with_name(f"{path.name}.idx").read_bytes() == energon_of(path.read_bytes())


def test_shards_whose_index_cannot_be(shards: Any, tmp_path: Path) -> None:
    (path,) = shards(1, 2)
    packed = path.with_name("packed.tar.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    blank = path.with_name("blank.tar")
    blank.write_bytes(make_shard({"a b": {"txt": b"1"}}))
    for kind in ("dali", "energon"):
        result = call(packed, path, "--kind", kind, status=1)
        assert "is compressed" in result.stderr
        assert "1 error" in result.stderr
    assert "blanks" in call(blank, "--kind", "dali", status=1).stderr
    call(packed, blank, "--kind", "wds")
    with pytest.raises(ConfigError, match="the same name"):
        call(path, path.with_name("shard-000000.x.tar"), "--kind", "dali")
    with pytest.raises(ConfigError, match="no place beside"):
        call("pipe:cat x.tar", "--kind", "wds")
    with pytest.raises(ConfigError, match="--kind json"):
        call(path, "--kind", "wds", "--name", "x")


def test_indexes_beside_shards_of_a_bucket(shards: Any, moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    for name, text in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": moto, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        clean_aws.setenv(name, text)
    files = fsspec.filesystem("s3", endpoint_url=moto, skip_instance_cache=True)
    files.mkdir("index-beside")
    for path in shards(2, 3):
        files.pipe_file(f"index-beside/{path.name}", path.read_bytes())
    urls = "s3://index-beside/shard-{000000..000001}.tar"
    call(urls, "--kind", "wds")
    assert "2 up to date before" in call(urls, "--kind", "wds").stderr
    with IndexedDataset(urls) as dataset:
        assert [dataset[i]["__key__"] for i in (5, 0)] == ["000005", "000000"]
    files.pipe_file("index-beside/shard-000001.tar", make_shard({"new": {"txt": b"1"}}))
    with IndexedDataset(urls) as dataset, pytest.raises(ObjectChanged, match="wds-async index"):
        dataset[5]


def test_no_folder_to_keep_things_in_is_no_error(shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "file" / "cache"))
    result = call(*shards(2, 3))
    assert "is not kept" in result.stderr
    assert len(json.loads(result.stdout)["shardlist"]) == 2


def test_a_store_that_cannot_be_written_is_said_with_what_to_do(shards: Any, origin: Any, tmp_path: Path) -> None:
    urls = [origin.add(path.name, path.read_bytes()) for path in shards(3, 2)]
    result = call(*urls, "--kind", "wds", status=1)
    assert "405" in result.stderr
    assert "2 with the same error" in result.stderr
    assert "-o FOLDER" in result.stderr
    assert call(*urls, "--kind", "wds", "--verbose", status=1).stderr.count("405 (405)") == 3
    call(*urls, "--kind", "wds", "-o", tmp_path / "i")
    with IndexedDataset(urls) as dataset:  # what was found is in the cache folder
        assert len(dataset) == 6


def test_a_terminal_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(3, 1) as advance:
        advance(0, 2_000_000)
        advance(1, 3_000_000)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "2/3 shards  5.0 MB" in shown
