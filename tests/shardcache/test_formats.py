"""Telling a shard from something else by its beginning."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest
import zstandard

from wds_async.shardcache.formats import looks_like_shard


def _tar(format: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        info = tarfile.TarInfo("é.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    return buffer.getvalue()


_USTAR = _tar(tarfile.USTAR_FORMAT)


def _v7() -> bytes:
    header = bytearray(_USTAR[:512])
    header[257:512] = bytes(255)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + _USTAR[512:]


def _signed() -> bytes:
    """A V7 header with a checksum of signed bytes, as old tars on some machines wrote it."""
    header = bytearray(_v7()[:512])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(b - 256 if b > 127 else b for b in header)
    return bytes(header) + _USTAR[512:]


@pytest.mark.parametrize(
    "content",
    [
        _USTAR,
        _tar(tarfile.GNU_FORMAT),
        _tar(tarfile.PAX_FORMAT),
        _v7(),
        _signed(),
        gzip.compress(_USTAR),
        bz2.compress(_USTAR),
        lzma.compress(_USTAR),
        lzma.compress(_USTAR, lzma.FORMAT_ALONE),
        zstandard.compress(_USTAR),
    ],
)
def test_shards(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert looks_like_shard(tmp_path / "x")
    assert looks_like_shard(str(tmp_path / "x"))


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>" * 200, _USTAR[:511], b"x" + _USTAR[1:], bytes(2048), b"x" * 512, b"PK\3\4"],
)
def test_others(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert not looks_like_shard(tmp_path / "x")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        looks_like_shard(tmp_path / "x")
