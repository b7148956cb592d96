"""Indexes that are learnt while shards are read."""

from __future__ import annotations

import gzip
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import BEFORE_HEAD, make_shard, make_shards
from wds_async.handlers import ignore_and_continue
from wds_async.indexed.places import cache_path, cached_index
from wds_async.indexed.scan import scan_shards
from wds_async.shardlists import split_by_worker

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def learning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WDS_LEARN_INDEX", "1")
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path / "cache"))  # WDS_CACHE would turn the shard cache on too


def dataset(urls: Any, **more: Any) -> wds.WebDataset:
    return wds.WebDataset([str(url) for url in ([urls] if isinstance(urls, str) else urls)], shardshuffle=False, **more)


def learnt(url: Any) -> Any:
    return cached_index(str(url))


def test_an_epoch_leaves_the_indexes_of_its_shards(tmp_path: Path, origin: Any) -> None:
    paths = make_shards(tmp_path / "data", 2, 5, payload=30_000)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    for places in (paths, urls):
        with dataset(places) as shards:
            with pytest.raises(TypeError):
                len(shards)
            samples = list(shards)
            assert len(shards) == 10
        for place, scanned in zip(places, scan_shards(map(str, places)), strict=True):
            found = learnt(place)
            assert scanned.index is not None
            assert found.facts == scanned.index.facts
            assert found.starts.tolist() == scanned.index.starts.tolist()
            last = len(found) - 1
            assert [found.stop(i) for i in range(last)] == [scanned.index.stop(i) for i in range(last)]
            assert scanned.index.stop(last) <= found.stop(last) <= found.facts.size
        with wds.IndexedDataset([str(place) for place in places]) as indexed:
            assert [sample["__key__"] for sample in indexed[:]] == [sample["__key__"] for sample in samples]
            assert indexed[-1]["bin"] == samples[-1]["bin"]


def test_nothing_is_kept_unless_it_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WDS_LEARN_INDEX")
    paths = make_shards(tmp_path / "data", 1, 5)
    with dataset(paths) as shards:
        list(shards)
        with pytest.raises(TypeError):
            len(shards)
    assert not (tmp_path / "cache").exists()


def test_only_shards_that_were_read_whole_and_good(tmp_path: Path) -> None:
    left, cut, corrupt, zeros, _ = paths = make_shards(tmp_path / "data", 5, 5)
    cut.write_bytes(cut.read_bytes()[:3000])
    data = bytearray(corrupt.read_bytes())
    data[2048:2060] = b"damaged here"
    corrupt.write_bytes(data)
    data = zeros.read_bytes().rstrip(b"\0")
    zeros.write_bytes(data + bytes(-len(data) % 512))  # it ends behind a member: more may have been lost
    with dataset([left]) as shards:
        list(itertools.islice(shards, 3))
    for policy in ("raise", "skip_shard", "resync"):
        with dataset(paths[1:], handler=ignore_and_continue, on_corrupt=policy) as shards:
            list(shards)
        assert [learnt(path) is not None for path in paths] == [False, False, False, False, True]


@pytest.mark.parametrize(
    "arguments",
    [
        {"select_files": lambda name: "0" in name},
        {"rename_files": lambda name: f"x{name}"},
        {"keys": lambda name: ("all", name)},
        {"expect": ("txt",), "handler": ignore_and_continue, "empty_check": False},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_another_grouping_learns_nothing_and_uses_nothing(tmp_path: Path, arguments: dict[str, Any]) -> None:
    paths = make_shards(tmp_path / "data", 2, 5)
    with dataset(paths, **arguments) as shards:
        list(shards)
    assert learnt(paths[0]) is None
    with dataset(paths) as shards:
        list(shards)
        assert len(shards) == 10
    with dataset(paths, **arguments) as shards, pytest.raises(TypeError):
        len(shards)


def test_a_shard_that_changes_is_learnt_anew(tmp_path: Path) -> None:
    paths = make_shards(tmp_path / "data", 2, 5)
    with dataset(paths) as shards:
        list(shards)
        assert len(shards) == 10
        paths[1].write_bytes(make_shard({"a": {"txt": b"1"}}))
        with pytest.raises(TypeError):
            len(shards)
        list(shards)
        assert len(shards) == 6
    written = os.stat(cache_path(str(paths[0]))).st_mtime_ns
    with dataset(paths) as shards:
        list(shards)
    assert os.stat(cache_path(str(paths[0]))).st_mtime_ns == written  # it is up to date


def test_compressed_and_empty_shards_are_counted(tmp_path: Path) -> None:
    packed, empty = tmp_path / "x.tar.gz", tmp_path / "empty.tar"
    packed.write_bytes(gzip.compress(make_shard({str(n): {"txt": b"1"} for n in range(7)})))
    empty.write_bytes(make_shard({}))
    with dataset([packed, empty]) as shards:
        list(shards)
        assert len(shards) == 7
    assert learnt(packed).facts.plain is False
    assert len(learnt(empty)) == 0


def test_a_transfer_that_broke_off_teaches_nothing(
    tmp_path: Path, origin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDS_RETRIES", "1")
    (path,) = make_shards(tmp_path / "data", 1, 9, payload=100_000)
    url = origin.add(path.name, path.read_bytes())
    origin.behave(when=lambda request: not request.headers["range"].startswith("bytes=0-"), cut_after=BEFORE_HEAD)
    with dataset(url, handler=ignore_and_continue) as shards:
        assert 0 < len(list(shards)) < 9
    assert learnt(url) is None
    origin.forget()
    with dataset(url, handler=ignore_and_continue) as shards:
        assert len(list(shards)) == len(shards) == 9


def test_a_part_of_a_shard_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = make_shards(tmp_path / "data", 1, 5)
    (scanned,) = scan_shards([str(path)])
    assert scanned.index is not None
    span = {"url": str(path), "start": int(scanned.index.starts[2])}
    with wds.DataPipeline([span], wds.tarfile_to_samples()) as shards:
        assert len(list(shards)) == 3
    monkeypatch.setenv("WORLD_SIZE", "3")
    total = 0
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with dataset([path], split="bytes", empty_check=False) as shards:
            total += len(list(shards))
    assert total == 5
    assert learnt(path) is None


def test_a_copy_in_the_shard_cache_tells_no_version(tmp_path: Path, origin: Any) -> None:
    (path,) = make_shards(tmp_path / "data", 1, 5)
    url = origin.add(path.name, path.read_bytes())
    with dataset(url, cache_dir=tmp_path / "shards") as shards:
        list(shards)
    first = learnt(url).facts
    with dataset(url, cache_dir=tmp_path / "shards") as shards:
        list(shards)
        assert len(shards) == 5
    assert learnt(url).facts == first


def test_workers_learn_for_all(tmp_path: Path) -> None:
    paths = make_shards(tmp_path / "data", 4, 3)
    shards = dataset(paths)
    loader = wds.WebLoader(shards, batch_size=None, num_workers=2)
    assert sum(1 for _ in loader) == 12
    assert len(shards) == len(loader) == 12
    urls = [str(path) for path in paths]
    split = wds.DataPipeline(wds.SimpleShardList(urls), split_by_worker, wds.tarfile_to_samples())
    assert len(wds.WebLoader(split, batch_size=None, num_workers=3)) == 12


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path / "file"))
    paths = make_shards(tmp_path / "data", 2, 5)
    with dataset(paths) as shards:
        assert sum(1 for _ in shards) == 10
    assert sum("no index is kept" in record.message for record in caplog.records) <= 1
