"""The least recently used go first, and only what is ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wds_async.shardcache.eviction import evict, files, touch
from wds_async.shardcache.partial import lock_file


def _file(path: Path, size: int, used: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used, 1))
    return path


def test_order_and_bound(tmp_path: Path) -> None:
    for number, used in enumerate([30, 10, 40, 20]):
        _file(tmp_path / f"s3@b/{number}.tar", 100, used)
    (tmp_path / ".partial").mkdir()
    assert evict(tmp_path, 400, lambda name: True) == []
    assert evict(tmp_path, 250, lambda name: True) == ["s3@b/1.tar", "s3@b/3.tar"]
    assert sorted(os.listdir(tmp_path / "s3@b")) == ["0.tar", "2.tar"]
    assert evict(tmp_path, 0, lambda name: True) == ["s3@b/0.tar", "s3@b/2.tar"]


def test_only_ours_counts(tmp_path: Path) -> None:
    theirs = _file(tmp_path / "bucket/a.tar", 1000, 1)
    ours = _file(tmp_path / "s3@b/a.tar", 100, 2)
    unfinished = _file(tmp_path / ".partial/a.part", 1000, 0)
    assert evict(tmp_path, 100, lambda name: name.startswith("s3@")) == []
    assert evict(tmp_path, 99, lambda name: name.startswith("s3@")) == ["s3@b/a.tar"]
    assert (theirs.exists(), ours.exists(), unfinished.exists()) == (True, False, True)


def test_use_counts_and_change_stays(tmp_path: Path) -> None:
    first, second = _file(tmp_path / "a/1", 10, 100), _file(tmp_path / "a/2", 10, 200)
    (tmp_path / ".partial").mkdir()
    touch(first)
    assert first.stat().st_mtime == 1
    assert evict(tmp_path, 10, lambda name: True) == ["a/2"]
    assert not second.exists()
    touch(second)  # gone: no error


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.shardcache.eviction._WAIT_S", 0.05)
    _file(tmp_path / "a/1", 10, 100)
    (tmp_path / ".partial").mkdir()
    lock = lock_file(tmp_path / ".partial/eviction.lock")
    assert lock is not None
    assert evict(tmp_path, 0, lambda name: True) == []
    lock.release()
    assert evict(tmp_path, 0, lambda name: True) == ["a/1"]


def test_files_passes_over_what_vanishes(tmp_path: Path) -> None:
    _file(tmp_path / "a/1", 10, 100)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert [entry.name for entry in files(tmp_path)] == ["1"]
    assert list(files(tmp_path / "nowhere")) == []
