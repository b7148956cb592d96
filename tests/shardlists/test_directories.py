"""Shards that come and go: names, ends, waiting, several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from wds_async.errors import ConfigError, UrlError
from wds_async.pipeline import DataPipeline
from wds_async.shardlists.directories import DirectoryShardList
from wds_async.tariterators import tarfile_to_samples
from wds_async.transfer.reader import open_shards


def fill(folder: Path, count: int, start: int = 0) -> list[str]:
    names = [f"f{i}.tar" for i in range(start, start + count)]
    for i, name in enumerate(names):
        (folder / name).touch()
        os.utime(folder / name, (i + start, i + start))
    return names


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def urls(shards: Any, n: int | None = None) -> list[str]:
    return [shard["url"] for shard in itertools.islice(shards, n)]


def test_unlink_takes_the_oldest_first_and_leaves_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    taken = iter(DirectoryShardList(tmp_path, mode="unlink", select="oldest", poll=None))
    first = next(taken)
    assert first == {"url": f"{tmp_path}/f0.tar._{os.getpid()}_"}
    assert first.alone  # whoever reads ahead has to know
    assert names(tmp_path) == [f"f0.tar._{os.getpid()}_", "f1.tar", "f2.tar"]
    assert urls(taken) == [f"{tmp_path}/f{i}.tar._{os.getpid()}_" for i in (1, 2)]
    assert names(tmp_path) == []


def test_keep(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    assert len(urls(DirectoryShardList(tmp_path, mode="keep", poll=None))) == 3
    assert names(tmp_path) == [f"f{i}.tar._done_" for i in range(3)]


def test_resample_puts_shards_back(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    shards = DirectoryShardList(tmp_path)
    for _ in range(3):  # each iteration leaves one unread, and gives back what the last one left
        assert len(set(urls(shards, 60))) == 3
        assert sum("._" in name for name in names(tmp_path)) == 1
    another = pickle.loads(pickle.dumps(shards))
    assert len(set(urls(another, 60))) == 2


def test_without_a_mode_names_stay_and_each_comes_once(tmp_path: Path) -> None:
    expected = fill(tmp_path, 5)
    shards = DirectoryShardList(tmp_path, mode=None, poll=None, select="oldest")
    taken = iter(shards)
    got = urls(taken, 3)
    fill(tmp_path, 1, 5)
    assert got + urls(taken) == [f"{tmp_path}/{name}" for name in [*expected, "f5.tar"]]
    assert names(tmp_path) == [*expected, "f5.tar"]
    assert len(urls(shards)) == 6


def test_the_default_pattern(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tgz", "c.tar.tgz", "d.zip", "e.tar._done_", "f.tar._1_"):
        (tmp_path / name).touch()
    found = urls(DirectoryShardList(f"{tmp_path}/", mode=None, poll=None))
    assert sorted(found) == [f"{tmp_path}/{name}" for name in ("a.tar", "b.tgz", "c.tar.tgz")]
    every = urls(DirectoryShardList(tmp_path, pattern="*", mode=None, poll=None))
    assert sorted(map(os.path.basename, every)) == ["a.tar", "b.tgz", "c.tar.tgz", "d.zip"]


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]"
    folder.mkdir()
    fill(folder, 2)
    assert len(urls(DirectoryShardList(folder, mode="unlink", poll=None))) == 2


def test_polling_finds_what_comes_and_ends_by_its_timeout(tmp_path: Path) -> None:
    shards = DirectoryShardList(tmp_path, mode="unlink", poll=0.01, timeout=0.3)
    began = time.monotonic()
    assert urls(shards) == []
    assert time.monotonic() - began >= 0.3
    later = threading.Timer(0.05, fill, (tmp_path, 2))
    later.start()
    assert len(urls(shards)) == 2
    later.join()


def test_closing_ends_the_waiting(tmp_path: Path) -> None:
    shards = DirectoryShardList(tmp_path, poll=1000)
    closer = threading.Timer(0.05, shards.close)
    closer.start()
    assert urls(shards) == []
    closer.join()
    fill(tmp_path, 1)
    assert len(urls(shards, 1)) == 1  # another iteration waits anew


def test_what_ended_processes_left_is_given_back(tmp_path: Path) -> None:
    dead = multiprocessing.get_context("fork").Process(target=int)
    dead.start()
    dead.join()
    for pid in (dead.pid, 99999999, os.getpid(), 1):
        (tmp_path / f"f{pid}.tar._{pid}_").touch()
    for mode in ("unlink", "keep", "resample"):
        DirectoryShardList(tmp_path, mode=mode).cleanup_files_without_processes()
        assert names(tmp_path) == sorted(
            [f"f{dead.pid}.tar", "f99999999.tar", f"f{os.getpid()}.tar._{os.getpid()}_", "f1.tar._1_"]
        )


def test_shards_that_their_user_removed_are_no_error(tmp_path: Path) -> None:
    fill(tmp_path, 6)
    for mode in ("unlink", "keep", "resample"):
        taken = iter(DirectoryShardList(tmp_path, mode=mode, poll=None))
        os.unlink(next(taken)["url"])
        urls(taken, 1)
    assert not any("._done_" in name for name in names(tmp_path))


def _take_all(folder: str, results: Any) -> None:
    results.put(urls(DirectoryShardList(folder, mode="keep", poll=None)))


def test_processes_share_without_taking_one_twice(tmp_path: Path) -> None:
    expected = fill(tmp_path, 60)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=_take_all, args=(str(tmp_path), results)) for _ in range(3)]
    for process in processes:
        process.start()
    taken = [url for _ in processes for url in results.get()]
    for process in processes:
        process.join()
    assert sorted(os.path.basename(url).split("._")[0] for url in taken) == sorted(expected)
    assert names(tmp_path) == sorted(name + "._done_" for name in expected)


def test_read_by_the_engine_before_they_are_recycled(shards: Any) -> None:
    paths = shards(3, 4)
    expected = sorted(path.read_bytes() for path in paths)
    contents = []
    with open_shards(DirectoryShardList(paths[0].parent, mode="unlink", poll=None), lookahead=1) as opened:
        for stream in opened:
            data = bytearray()
            while (piece := stream.read()) is not None:
                data += piece
            contents.append(bytes(data))
    assert sorted(contents) == expected
    assert names(paths[0].parent) == []


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(UrlError, match="not a directory"):
        DirectoryShardList(tmp_path / "none")
    with pytest.raises(ConfigError, match="mode='once'"):
        DirectoryShardList(tmp_path, mode="once")
    with pytest.raises(ConfigError, match="select='best'"):
        DirectoryShardList(tmp_path, select="best")


@pytest.mark.parametrize("mode", ["unlink", "keep"])
def test_in_a_pipeline_nothing_is_taken_ahead(shards: Any, mode: str) -> None:
    folder = shards(20, 5)[0].parent
    pipeline = DataPipeline(DirectoryShardList(folder, mode=mode, poll=None), tarfile_to_samples())
    assert len({sample["__key__"] for sample in pipeline}) == 100
    assert names(folder) == ([] if mode == "unlink" else [f"shard-{i:06}.tar._done_" for i in range(20)])
