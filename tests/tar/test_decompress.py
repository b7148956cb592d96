"""Compressed shards read like plain ones, in bounded pieces; damage is told as such."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tar.test_parse import Feed
from wds_async.errors import CorruptShard, FieldTooLarge, ShardFormatError, TruncatedShard
from wds_async.tar.decompress import PIECE_BYTES, gunzip, plain, plain_span
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


def drain(read: Read) -> bytes:
    out = bytearray()
    while (piece := read()) is not None:
        assert 1 <= len(piece) <= PIECE_BYTES
        out += piece
        del piece  # valid until the next read only
    assert read() is None
    return bytes(out)


def unpack(data: bytes, size: int = 1 << 22) -> bytes:
    feed = Feed(data, [size])
    result = drain(plain(feed, URL))
    feed.check()
    return result


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("size", [1 << 22, 4096, 7])
def test_every_format_gives_its_bytes(kind: str, size: int) -> None:
    data = noise(20_000 if size < 1 << 20 else 3_000_000) + b"z" * 300_000
    assert unpack(PACK[kind](data), size) == data


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
    read = plain(Feed(bomb, [1 << 22]), URL)
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
    feed = Feed(packed[:where], [size])
    with pytest.raises(TruncatedShard, match=f"{URL}: the .* ends early, after {where} compressed bytes") as info:
        drain(plain(feed, URL))
    assert (info.value.shard, info.value.offset) == (URL, where)
    feed.check()


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1), flip=st.integers(1, 255), size=st.sampled_from([1 << 22, 13]))
def test_damage_is_never_passed_off_as_data(kind: str, where: float, flip: int, size: int) -> None:
    data = noise(2000) + b"text " * 200
    packed = bytearray(PACK[kind](data))
    packed[12 + int((len(packed) - 13) * where)] ^= flip
    feed = Feed(bytes(packed), [size])
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


def packed_tar(kind: str, sizes: list[int]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    return PACK[kind](out.getvalue())


@pytest.mark.parametrize(("kind", "tail"), [("gzip", 8), ("gzip", 4), ("bzip2", 4), ("xz", 30), ("zstd", 4)])
def test_a_checksum_that_fails_at_the_very_end_is_told_behind_the_members(kind: str, tail: int) -> None:
    """The members were delivered before it could be known."""
    packed = bytearray(packed_tar(kind, [100, 3_000_000]))
    packed[-tail] ^= 1
    parsed = members(plain(Feed(bytes(packed), [1000]), URL), URL)
    if kind != "bzip2":  # which checks each block before it gives it
        assert next(parsed)[0] == "0.bin"
    with pytest.raises(CorruptShard) as info:
        list(parsed)
    assert (info.value.shard, info.value.offset) == (URL, len(packed))


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("wanted", [True, False])
def test_a_bomb_takes_no_more_memory_than_its_fields_may(kind: str, wanted: bool) -> None:
    bomb = packed_tar(kind, [1000, 40 << 20, 10])
    assert len(bomb) < 100_000
    read, found = plain(Feed(bomb, [1 << 20]), URL), []
    tracemalloc.start()
    try:
        for name, data, _ in members(read, URL, admit=(lambda name: name if wanted or name != "1.bin" else None)):
            found.append((name, len(data)))
            del data
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [("0.bin", 1000), ("1.bin", 40 << 20), ("2.bin", 10)][:: 1 if wanted else 2]
    assert most < (100 << 20 if wanted else 16 << 20)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_field_above_the_limit_is_not_unpacked(kind: str) -> None:
    read = plain(Feed(packed_tar(kind, [1000, 40 << 20]), [1000]), URL)
    tracemalloc.start()
    try:
        with pytest.raises(FieldTooLarge, match=r"'1\.bin'"):
            list(members(read, URL, max_field_bytes=1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def zstd_frame(window_log: int) -> bytes:
    return b"\x28\xb5\x2f\xfd\0" + bytes([(window_log - 10) << 3]) + (1 | 1 << 3).to_bytes(3, "little") + b"x"


def test_windows_are_bounded() -> None:
    assert unpack(zstd_frame(29)) == b"x"
    with pytest.raises(CorruptShard, match="zstd stream wants more than 512 MiB"):
        unpack(zstd_frame(30))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    with pytest.raises(CorruptShard, match="xz stream wants more than 512 MiB"):
        unpack(lzma.compress(b"x" * 100, filters=filters))


def test_gunzip_is_as_gzips_and_bounded() -> None:
    data = noise(3000)
    packed = gzip.compress(data)
    assert gunzip(b"") == gzip.decompress(b"") == b""
    assert gunzip(packed) == data
    assert gunzip(packed + bytes(9) + packed + bytes(100)) == data * 2
    assert gunzip(packed, 3000) == data
    for limit, many in ((2999, 1), (0, 1), (5999, 2)):
        with pytest.raises(FieldTooLarge, match=f"{limit} bytes"):
            gunzip(packed * many, limit)
    with pytest.raises(EOFError):
        gunzip(packed[:-3])
    for wrong in (b"text", packed + b"text"):
        with pytest.raises(gzip.BadGzipFile):
            gunzip(wrong)
    with pytest.raises(zlib.error):
        gunzip(packed[:-8] + bytes(8))


def test_gunzip_unpacks_no_more_than_it_may() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(FieldTooLarge):
            gunzip(bomb, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


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
    read = plain(Feed(out.getvalue(), [1000]), URL)
    assert [name for name, _, _ in members(read, URL)] == ["BZh91/0001.jpg"]


def test_errors_of_the_stream_pass() -> None:
    pieces = iter([memoryview(bz2.compress(noise(9000))[:5000])])

    def read() -> memoryview:
        for piece in pieces:
            return piece
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        drain(plain(read, URL))


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("start", [0, 512, 100_000])
def test_a_span_of_a_compressed_shard_is_refused(kind: str, start: int) -> None:
    """At the beginning of a stream, or a later one of several, by its bytes; elsewhere by the name of the shard."""
    packed = PACK[kind](bytes(1000))
    with pytest.raises(ShardFormatError, match=f"at byte {start}: compressed shards have no spans") as caught:
        plain_span(Feed(packed, [7]), URL, start)
    assert (caught.value.shard, caught.value.offset) == (URL, start)
    for name in ("x.tar.gz", "x.TGZ?sig=a", "x.tar.zst#a", "x.tar.bz2", "x.txz"):
        with pytest.raises(ShardFormatError, match=f"no tar header at byte {start or 1}: compressed"):
            plain_span(Feed(b"in the middle of it" * 100, [512]), f"http://host/{name}", start or 1)


@pytest.mark.parametrize("name", ["\x1f\x8b\x08a.txt", "BZh91AY&SY.txt", "]\0\0\x80\0", "(\xb5/\xfd.txt"])
def test_a_header_in_the_middle_of_a_tar_is_never_taken_for_compressed_data(name: str) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as tar:
        tar.addfile(tarfile.TarInfo(name))
    for data in (out.getvalue(), bytes(1024), b"", b"rubbish" * 100):
        assert drain(plain_span(Feed(data, [100, 700]), "http://host/x.tar", 512)) == data
    assert drain(plain_span(Feed(out.getvalue(), [512]), "http://host/x.tar.gz", 512)) == out.getvalue()
