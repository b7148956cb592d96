"""Compressed shards read like plain ones, in bounded pieces; damage is told as such."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tarfile
import weakref
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_async.errors import CorruptShard, ShardFormatError, TruncatedShard
from wds_async.tar.decompress import PIECE_BYTES, plain
from wds_async.tar.parse import members
from wds_async.tar.source import Read

URL = "http://host/shard.tar"


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def _zstd_streamed(data: bytes) -> bytes:
    out = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compressobj()
    return out.compress(data) + out.flush()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zstd": _zstd,
    "zstd-streamed": _zstd_streamed,
}


class Feed:
    """Pieces of ``data`` in one block of memory that is used again; fails where the one before is held on to."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size, self.at = data, size, 0
        self.block = bytearray()
        self.last: weakref.ref[memoryview] | None = None

    def __call__(self) -> memoryview | None:
        self.check()
        if self.at >= len(self.data):
            return None
        self.block[:] = self.data[self.at : self.at + self.size]
        self.at += self.size
        view = memoryview(self.block)
        self.last = weakref.ref(view)
        return view

    def check(self) -> None:
        assert self.last is None or self.last() is None, "a piece is still referred to"
        self.block.append(0)


def drain(read: Read) -> bytes:
    out = bytearray()
    while (piece := read()) is not None:
        assert 1 <= len(piece) <= PIECE_BYTES
        out += piece
        del piece  # valid until the next read only
    assert read() is None
    return bytes(out)


def unpack(data: bytes, size: int = 1 << 22) -> bytes:
    feed = Feed(data, size)
    result = drain(plain(feed, URL))
    feed.check()
    return result


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("size", [1 << 22, 4096, 7])
def test_every_format_gives_its_bytes(kind: str, size: int) -> None:
    data = noise(20_000) + b"z" * 300_000
    assert unpack(PACK[kind](data), size) == data


@pytest.mark.parametrize("kind", PACK)
def test_bytes_that_do_not_compress_come_through_large_pieces(kind: str) -> None:
    data = noise(3_000_000)
    assert unpack(PACK[kind](data)) == data


@pytest.mark.parametrize("kind", [kind for kind in PACK if kind != "lzma"])
@pytest.mark.parametrize("size", [1 << 22, 10])
def test_streams_one_after_another_and_zeros_behind_them(kind: str, size: int) -> None:
    parts = [b"first" * 100, b"", noise(1000)]
    packed = b"".join(PACK[kind](part) for part in parts) + b"\0" * 1024
    assert unpack(packed, size) == b"".join(parts)


def test_zstd_passes_over_skippable_frames() -> None:
    skippable = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    assert unpack(skippable + _zstd(b"data") + skippable) == b"data"
    assert unpack(skippable + _zstd(b"data") + skippable, 3) == b"data"
    with pytest.raises(TruncatedShard):
        unpack(_zstd(b"data") + skippable[:-1])


@pytest.mark.parametrize("kind", PACK)
def test_a_bomb_comes_out_in_bounded_pieces(kind: str) -> None:
    bomb = PACK[kind](b"\0" * 50_000_000)
    assert len(bomb) < 200_000
    read = plain(Feed(bomb, 1 << 22), URL)
    total = 0
    while (piece := read()) is not None:
        assert len(piece) <= PIECE_BYTES
        total += len(piece)
    assert total == 50_000_000


@pytest.mark.parametrize("kind", [kind for kind in PACK if kind != "lzma"])
@settings(max_examples=40, deadline=None)
@given(where=st.integers(11, 1500), size=st.sampled_from([1 << 22, 13]))
def test_an_early_end_is_told_with_its_offset(kind: str, where: int, size: int) -> None:
    packed = PACK[kind](noise(2000))
    feed = Feed(packed[:where], size)
    with pytest.raises(TruncatedShard, match=f"{URL}: the .* ends early, after {where} compressed bytes"):
        drain(plain(feed, URL))
    feed.check()


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1), flip=st.integers(1, 255), size=st.sampled_from([1 << 22, 13]))
def test_damage_is_never_passed_off_as_data(kind: str, where: float, flip: int, size: int) -> None:
    data = noise(2000) + b"text " * 200
    packed = bytearray(PACK[kind](data))
    packed[12 + int((len(packed) - 13) * where)] ^= flip
    feed = Feed(bytes(packed), size)
    told: ShardFormatError | None = None
    try:
        assert drain(plain(feed, URL)) == data  # a bit that means nothing, like a reserved one
    except ShardFormatError as error:
        told = error
    if told is not None:
        feed.check()
        assert isinstance(told, CorruptShard | TruncatedShard)
        assert URL in str(told)
        assert "compressed byte" in str(told)


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_garbage_behind_a_stream_is_damage(kind: str) -> None:
    with pytest.raises(CorruptShard):
        unpack(PACK[kind](b"data") + b"no member of anything")


def test_errors_show_no_secret() -> None:
    with pytest.raises(TruncatedShard) as info:
        drain(plain(Feed(gzip.compress(b"x")[:-3], 99), "https://h/x.tgz?X-Amz-Signature=hush"))
    assert "hush" not in str(info.value)


def test_errors_of_the_stream_pass() -> None:
    pieces = iter([memoryview(bz2.compress(noise(9000))[:5000])])

    def read() -> memoryview:
        for piece in pieces:
            return piece
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        drain(plain(read, URL))


def test_what_is_not_compressed_is_handed_through_uncopied() -> None:
    pieces = [memoryview(b"a plain tar's bytes"), memoryview(b"x"), memoryview(b"more")]
    waiting = iter(pieces)
    read = plain(lambda: next(waiting, None), URL)
    assert [read() is piece for piece in pieces] == [True] * 3
    assert read() is None
    assert read() is None


@pytest.mark.parametrize("data", [b"", b"x", b"short", b"just long enough", b"\x1f\x8b"])
def test_short_streams_stay_what_they_are(data: bytes) -> None:
    for size in (1, 4, 100):
        assert unpack(data, size) == data


def test_a_tar_whose_first_member_is_called_bzh_is_a_tar() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("BZh91/0001.jpg"))
    read = plain(Feed(out.getvalue(), 1000), URL)
    assert [name for name, _, _ in members(read, URL)] == ["BZh91/0001.jpg"]


@pytest.mark.parametrize("kind", PACK)
def test_a_compressed_shard_gives_its_members(kind: str) -> None:
    out = io.BytesIO()
    contents = [noise(3000), b"", b"y" * 700_000]
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number, data in enumerate(contents):
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    read = plain(Feed(PACK[kind](out.getvalue()), 1000), URL)
    assert [data for _, data, _ in members(read, URL)] == contents
