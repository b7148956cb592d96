"""wds_async.zstd: Python's own module does what the package zstandard does."""

from __future__ import annotations

import io
import os
import sys
import types

import pytest
import zstandard

from tests.tar.test_decompress import unpack, zstd_frame
from wds_async import zstd
from wds_async.errors import CorruptShard, TruncatedShard

DATA = os.urandom(300_000) + bytes(2_000_000)


@pytest.fixture(params=["package", "of Python"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.14 its module is that of the package backports.zstd, under another name."""
    if request.param == "package":
        monkeypatch.setitem(sys.modules, "compression", None)
    elif sys.version_info < (3, 14):
        compression = types.SimpleNamespace(zstd=pytest.importorskip("backports.zstd"))
        monkeypatch.setitem(sys.modules, "compression", compression)
    assert (zstd._of_python() is None) is (request.param == "package")


def test_what_is_packed_comes_out() -> None:
    stream = io.BytesIO()
    with zstd.writer(stream) as file:
        file.write(DATA[:1000])
        file.write(DATA[1000:])
    assert not stream.closed
    for packed in (stream.getvalue(), zstd.packed([DATA[:5], DATA[5:]]), zstandard.compress(DATA)):
        assert len(packed) < len(DATA)
        assert zstd.unpacked(packed) == DATA
        assert unpack(packed + packed) == DATA + DATA


def test_damage_is_noticed() -> None:
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(DATA)
    with pytest.raises(TruncatedShard):
        unpack(packed[:-4])
    with pytest.raises(CorruptShard):
        unpack(packed[:200_000] + bytes([packed[200_000] ^ 255]) + packed[200_001:])


def test_windows_are_bounded() -> None:
    assert unpack(zstd_frame(29)) == b"x"
    with pytest.raises(CorruptShard, match="zstd stream wants more than 512 MiB"):
        unpack(zstd_frame(30))
