"""Files in the cache: which are shards, and which go first."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from wds_async.shardcache.eviction import evict, files, touch
from wds_async.shardcache.formats import looks_like_shard
from wds_async.shardcache.partial import lock_file


def _tar(format: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        info = tarfile.TarInfo("é.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    return buffer.getvalue()


_USTAR = _tar(tarfile.USTAR_FORMAT)


def _v7(*, signed: bool = False) -> bytes:
    """A V7 header; ``signed``: with a checksum of signed bytes, as old tars on some machines wrote it."""
    header = bytearray(_USTAR[:512])
    header[257:512] = bytes(255)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(b - 256 if signed and b > 127 else b for b in header)
    return bytes(header) + _USTAR[512:]


_TARS = [_USTAR, _tar(tarfile.GNU_FORMAT), _tar(tarfile.PAX_FORMAT), _v7(), _v7(signed=True)]
_PACKED = [gzip.compress(_USTAR), bz2.compress(_USTAR), lzma.compress(_USTAR), zstandard.compress(_USTAR),
           lzma.compress(_USTAR, lzma.FORMAT_ALONE)]  # fmt: skip
_OTHERS = [b"", b"<html>" * 200, _USTAR[:511], b"x" + _USTAR[1:], bytes(2048), b"x" * 512, b"PK\3\4"]


@pytest.mark.parametrize(("content", "shard"), [(c, True) for c in _TARS + _PACKED] + [(c, False) for c in _OTHERS])
def test_shards_are_recognised_by_their_beginning(tmp_path: Path, content: bytes, shard: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert looks_like_shard(path) is looks_like_shard(str(path)) is shard
    path.unlink()
    with pytest.raises(FileNotFoundError):
        looks_like_shard(path)


def _file(path: Path, size: int, used: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used, 1))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".partial").mkdir()
    return tmp_path


def test_the_least_recently_used_go_first(folder: Path) -> None:
    for number, used in enumerate([30, 10, 40, 20]):
        _file(folder / f"s3@b/{number}.tar", 100, used)
    touch(folder / "s3@b/0.tar")
    assert (folder / "s3@b/0.tar").stat().st_mtime == 1
    assert evict(folder, 400, lambda name: True) == []
    assert evict(folder, 250, lambda name: True) == ["s3@b/1.tar", "s3@b/3.tar"]
    assert evict(folder, 0, lambda name: True) == ["s3@b/2.tar", "s3@b/0.tar"]
    touch(folder / "s3@b/0.tar")  # gone: no error


def test_only_our_own_count(folder: Path) -> None:
    theirs = _file(folder / "bucket/a.tar", 1000, 1)
    _file(folder / "s3@b/a.tar", 100, 2)
    unfinished = _file(folder / ".partial/a.part", 1000, 0)
    assert evict(folder, 100, lambda name: name.startswith("s3@")) == []
    assert evict(folder, 99, lambda name: name.startswith("s3@")) == ["s3@b/a.tar"]
    assert theirs.exists()
    assert unfinished.exists()


def test_one_process_at_a_time_evicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.shardcache.eviction._WAIT_S", 0.05)
    _file(folder / "a/1", 10, 100)
    lock = lock_file(folder / ".partial/eviction.lock")
    assert lock is not None
    assert evict(folder, 0, lambda name: True) == []
    lock.release()
    assert evict(folder, 0, lambda name: True) == ["a/1"]


def test_what_vanishes_is_passed_over(folder: Path) -> None:
    _file(folder / "a/1", 10, 100)
    (folder / "dangling").symlink_to(folder / "nowhere")
    assert [entry.name for entry in files(folder)] == ["1"]
    assert list(files(folder / "nowhere")) == []
