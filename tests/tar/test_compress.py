"""Shards are compressed as their names say."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma

import pytest
import zstandard

from wds_async.errors import ConfigError
from wds_async.tar.write import compressed, compression


@pytest.mark.parametrize(
    ("name", "compress", "kind"),
    [
        ("x.tar", None, ""),
        ("x.TGZ", None, "gz"),
        ("x.tar.gz", None, "gz"),
        ("x.tar.bz2", None, "bz2"),
        ("x.txz", None, "xz"),
        ("x.tar.zst", None, "zst"),
        ("", None, ""),
        ("x.tar", True, "gz"),
        ("x.tar.gz", False, ""),
        ("x.tar.gz", "zst", "zst"),
        ("x.tar.zst", "xz", "xz"),
        ("x.tar.gz", "xz", "gz"),
        ("x.tar.xz", "bz2", "bz2"),
        ("x.tar.bz2", True, "gz"),
    ],
)
def test_the_argument_and_the_suffix(name: str, compress: bool | str | None, kind: str) -> None:
    assert compression(name, compress) == kind


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="compress='lz4'"):
        compression("x.tar", "lz4")


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


@pytest.mark.parametrize(
    ("kind", "back"),
    [("", bytes), ("gz", gzip.decompress), ("bz2", bz2.decompress), ("xz", lzma.decompress), ("zst", _unzstd)],
)
def test_closing_the_compressor_leaves_the_file_open(kind: str, back: object) -> None:
    out = io.BytesIO()
    stream = compressed(out, kind, 0)
    stream.write(b"abc" * 1000)
    if stream is not out:
        stream.close()
    assert back(out.getvalue()) == b"abc" * 1000  # type: ignore[operator]
