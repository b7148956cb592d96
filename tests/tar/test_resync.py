"""Reading on behind damage: all that can be had is had, and nothing that was not in the shard."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tar.test_parse import END, URL, Feed, header, padded, pax
from wds_async.errors import CorruptShard, FieldTooLarge, NotATar, ShardFormatError, TruncatedShard
from wds_async.tar.blocks import checks
from wds_async.tar.decompress import plain
from wds_async.tar.headers import MAX_EXTENSIONS
from wds_async.tar.parse import members_of
from wds_async.tar.resync import resync, seek
from wds_async.tar.source import ByteSource, Read

Pair = tuple[str, bytes]
CUTS = ([1 << 22], [513], [511, 7])
LONG = "d" * 60 + "/" + "n" * 90  # with its ending it is in no header
BLOCK = 512


@dataclass
class Outcome:
    found: list[Pair] = field(default_factory=list)
    gaps: list[tuple[int | None, int | None]] = field(default_factory=list)  # where, and how much was passed over
    errors: list[ShardFormatError] = field(default_factory=list)


def read_on(read: Read, admit: Callable[[str], str | None] | None = None) -> Outcome:
    """What a shard gives to who never gives up."""
    source, got, skipped = ByteSource(read, URL), Outcome(), 0
    while skipped is not None:
        try:
            for name, data, _ in members_of(source, admit=admit, max_field_bytes=1 << 20):
                got.found.append((name, data))
            break
        except FieldTooLarge as error:
            got.errors.append(error)
        except (CorruptShard, NotATar) as error:
            got.errors.append(error)
            skipped = resync(source, error.offset)
            got.gaps.append((error.offset, skipped))
        except TruncatedShard as error:
            got.errors.append(error)
            break
    source.drop()
    return got


def outcome(data: bytes, sizes: list[int] | None = None) -> Outcome:
    feed = Feed(data, sizes or [1 << 22])
    got = read_on(feed)
    feed.check()
    return got


@dataclass(frozen=True)
class Packed:
    """A tar, and where its members are: from the first header block to behind the padding."""

    data: bytes
    pairs: list[Pair]
    spans: list[tuple[int, int]]


def pack(pairs: list[Pair], format: int = tarfile.USTAR_FORMAT, mtime: float = 0) -> Packed:
    out, spans = io.BytesIO(), []
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, data in pairs:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime  # type: ignore[assignment]
            begin = tar.offset
            tar.addfile(info, io.BytesIO(data))
            spans.append((begin, tar.offset))
        end = tar.offset
    return Packed(out.getvalue()[: end + 1024], pairs, spans)


def some(count: int, name: str = "{:03}.bin") -> list[Pair]:
    return [(name.format(i), bytes([65 + i]) * (700 + i)) for i in range(count)]


def hit(data: bytes, at: int, with_: bytes) -> bytes:
    return data[:at] + with_ + data[at + len(with_) :]


# -- one header is gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("which", range(5))
def test_a_damaged_header_costs_its_member(which: int, sizes: list[int]) -> None:
    shard = pack(some(5))
    begin, end = shard.spans[which]
    got = outcome(hit(shard.data, begin + 30, b"\xff\xfe"), sizes)
    assert got.found == shard.pairs[:which] + shard.pairs[which + 1 :]
    assert got.gaps == [(begin, end - begin if which < 4 else None)]
    assert [(error.shard, error.offset) for error in got.errors] == [(URL, begin)]
    assert isinstance(got.errors[0], NotATar if which == 0 else CorruptShard)


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("much", [1, 100, 511, 512, 700])
def test_bytes_that_were_added_shift_nothing_for_us(much: int, sizes: list[int]) -> None:
    shard = pack(some(5))
    at = shard.spans[2][0]
    got = outcome(shard.data[:at] + b"?" * much + shard.data[at:], sizes)
    assert got.found == shard.pairs
    assert got.gaps == [(at, much)]


@pytest.mark.parametrize("much", [1, 300, 512, 1024])
def test_bytes_that_are_missing_cost_what_they_touch(much: int) -> None:
    shard = pack(some(6))
    _, end = shard.spans[2]
    got = outcome(shard.data[: end - much] + shard.data[end:])
    assert got.found[:2] == shard.pairs[:2]
    assert got.found[-2:] == shard.pairs[-2:]
    assert {name for name, _ in got.found} <= {name for name, _ in shard.pairs}
    assert len(got.errors) == 1


def test_what_follows_damage_to_the_end_is_the_end() -> None:
    shard = pack(some(3))
    at = shard.spans[1][0]
    got = outcome(shard.data[:at] + b"x" * 5000)
    assert got.found == shard.pairs[:1]
    assert got.gaps == [(at, None)]


def test_the_place_to_go_on_from_is_kept() -> None:
    shard = pack(some(3))
    source = ByteSource(Feed(hit(shard.data, shard.spans[1][0], b"\xff"), [1 << 22]), URL)
    with pytest.raises(CorruptShard) as info:
        list(members_of(source))
    assert info.value.offset == source.offset == shard.spans[1][0]
    assert resync(source) == 2048 - 512
    assert source.offset == shard.spans[2][0]
    assert resync(source) == 0
    source.drop()


def test_an_admission_that_fails_leaves_the_rest() -> None:
    source = ByteSource(Feed(pack(some(3)).data, [1 << 22]), URL)

    def admit(name: str) -> str:
        raise KeyError(name)

    with pytest.raises(KeyError):
        list(members_of(source, admit=admit))
    assert resync(source) == 1024
    assert [name for name, _, _ in members_of(source)] == ["001.bin", "002.bin"]


# -- extension headers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("sizes", CUTS)
def test_the_extension_header_found_belongs_to_its_member(format: int, sizes: list[int]) -> None:
    shard = pack(some(4, LONG + "{:03}.jpg"), format)
    got = outcome(hit(shard.data, shard.spans[1][0], b"\xff"), sizes)
    assert got.found == [shard.pairs[0], *shard.pairs[2:]]  # what is behind the damaged one has lost its name


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", [LONG + "{:03}.jpg", "ünï{:03}.jpg"])
@pytest.mark.parametrize("hole", [1, 512, 1024])
def test_a_member_that_lost_its_name_is_not_given_another(format: int, name: str, hole: int) -> None:
    shard = pack(some(4, name), format, mtime=1.5)
    got = outcome(hit(shard.data, shard.spans[1][0], b"\xff" * hole))
    assert got.found == [shard.pairs[0], *shard.pairs[2:]]


def test_a_lost_header_of_times_alone_costs_nothing() -> None:
    shard = pack(some(4), tarfile.PAX_FORMAT, mtime=1.5)
    got = outcome(hit(shard.data, shard.spans[1][0], b"\xff"))
    assert got.found == shard.pairs
    assert got.gaps == [(shard.spans[1][0], 1024)]


def test_a_pax_header_whose_data_is_damaged_costs_its_member() -> None:
    shard = pack(some(4, "ä{:03}.jpg"), tarfile.PAX_FORMAT)
    begin, end = shard.spans[1]
    got = outcome(hit(shard.data, begin + BLOCK, b"xx"))
    assert got.found == [shard.pairs[0], *shard.pairs[2:]]
    assert got.gaps == [(begin, end - begin)]


def test_the_member_of_an_extension_header_is_damaged() -> None:
    shard = pack(some(4, LONG + "{:03}.jpg"), tarfile.PAX_FORMAT)
    begin, end = shard.spans[1]
    got = outcome(hit(shard.data, begin + 2 * BLOCK, b"\xff"))
    assert got.found == [shard.pairs[0], *shard.pairs[2:]]
    assert got.gaps == [(begin, end - begin)]


# -- members that are refused, and what comes behind them ----------------------------------------------------------


@pytest.mark.parametrize("sizes", CUTS)
def test_a_field_above_the_limit_is_passed_over(sizes: list[int]) -> None:
    large = header(name=b"big.txt\0", size=b"%011o\0" % ((1 << 20) + 1)) + padded(b"y" * ((1 << 20) + 1))
    got = outcome(pack(some(1)).data[:-1024] + large + pack(some(2)).data, sizes)
    assert [name for name, _ in got.found] == ["000.bin", "000.bin", "001.bin"]
    assert [type(error) for error in got.errors] == [FieldTooLarge]
    assert (got.errors[0].shard, got.errors[0].offset) == (URL, 1536)


def test_a_field_above_the_limit_that_is_not_there() -> None:
    got = outcome(header(size=b"\x80" + (1 << 62).to_bytes(11, "big")) + b"x" * 3000)
    assert [type(error) for error in got.errors] == [FieldTooLarge, TruncatedShard]


@pytest.mark.parametrize("much", [MAX_EXTENSIONS, MAX_EXTENSIONS + 1, 3000])
@pytest.mark.parametrize(
    ("sizes", "record"), [([1 << 22], b"mtime=1"), ([1500], b"mtime=1"), ([1 << 22], b"comment=x")]
)
def test_a_chain_of_extension_headers_is_bounded(much: int, sizes: list[int], record: bytes) -> None:
    chain = pack(some(1)).data[:-1024] + pax(b"x", record) * much + header() + pack(some(3)).data
    got = outcome(chain, sizes)
    if much <= MAX_EXTENSIONS:
        assert [name for name, _ in got.found] == ["000.bin", "a.txt", "000.bin", "001.bin", "002.bin"]
    else:
        assert [name for name, _ in got.found] == ["000.bin", "000.bin", "001.bin", "002.bin"]
        assert [error.offset for error in got.errors] == [1536]
        assert f"has {much} extension headers" in str(got.errors[0])


@pytest.mark.parametrize("much", [2, 300])
def test_extension_headers_that_lie_about_their_size_are_passed_over(much: int) -> None:
    lie = header(kind=b"x", size=b"%011o\0" % (1 << 30))
    got = outcome(lie * much + pack(some(3)).data)
    assert got.found == some(3)[1:]
    assert len(got.errors) == much


@pytest.mark.parametrize(
    "size", [b"\xff" * 12, b"-0000000005\0", b"\x80" + b"\x7f" * 11, b"\x80\0\0\0\x80" + b"\0" * 7]
)
def test_sizes_that_nothing_has_cost_their_member(size: bytes) -> None:
    got = outcome(pack(some(1)).data[:-1024] + header(size=size) + pack(some(2)).data)
    assert got.found == some(1) + some(2)
    assert got.gaps == [(1536, 512)]


@pytest.mark.parametrize("digits", [b"9" * 19, b"0" * 41 + b"5", b"9" * 5000])
def test_pax_sizes_that_nothing_has_cost_their_member(digits: bytes) -> None:
    got = outcome(pack(some(1)).data[:-1024] + pax(b"x", b"size=" + digits) + header() + pack(some(2)).data)
    assert got.found == some(1) + some(2)
    assert "PAX size" in str(got.errors[0])


# -- holes of zeros ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("which", range(6))
def test_a_hole_is_no_end(which: int, blocks: int, sizes: list[int]) -> None:
    shard = pack([(name, data * 3) for name, data in some(6)])
    begin, _ = shard.spans[which]
    got = outcome(hit(shard.data, begin, bytes(blocks * BLOCK)), sizes)
    if which == 5:  # only the end is behind it: two blocks are then what a tar may end with
        assert got.found == shard.pairs[:5]
        assert len(got.errors) == (blocks < 2)
        return
    touched = [number for number, (a, b) in enumerate(shard.spans) if a < begin + blocks * BLOCK and b > begin]
    assert got.found == [pair for number, pair in enumerate(shard.pairs) if number not in touched]
    if shard.spans[touched[-1]][1] == begin + blocks * BLOCK:
        return  # it ends with a member: archives one after another look the same
    assert got.gaps == [(begin, shard.spans[touched[-1]][1] - begin)]
    assert f"from byte {begin} to {begin + blocks * BLOCK}" in str(got.errors[0])


def test_a_hole_within_data_is_data() -> None:
    shard = pack([("a.bin", b"x" * 5000), ("b.bin", b"y")])
    got = outcome(hit(shard.data, 1024, bytes(1024)))
    assert got.found == [("a.bin", b"x" * 512 + bytes(1024) + b"x" * (5000 - 1536)), ("b.bin", b"y")]


def test_one_block_of_zeros_is_an_end_only_at_the_end_or_before_a_member() -> None:
    shard = pack(some(2))
    body = shard.data[:-1024]
    assert outcome(body + bytes(BLOCK)).errors == []
    assert outcome(body + bytes(BLOCK) + body).found == shard.pairs * 2
    assert outcome(body + bytes(BLOCK + 100)).errors == []
    for rest in (b"g" * 3000, b"g"):
        got = outcome(body + bytes(BLOCK) + rest)
        assert got.found == shard.pairs
        assert got.gaps == [(len(body), None)]


@pytest.mark.parametrize("sizes", [[1 << 22], [5000], [513]])
def test_what_is_left_behind_an_end_is_left_alone_unless_it_has_members(sizes: list[int]) -> None:
    shard = pack(some(2))
    junk = b"ustar, or so it says " * 10_000
    assert outcome(shard.data + junk, sizes) == Outcome(shard.pairs)
    got = outcome(shard.data + junk + shard.data, sizes)
    assert got.found == shard.pairs * 2
    assert got.gaps == [(len(shard.data) - 1024, 1024 + len(junk))]


def test_zeros_at_the_start_need_a_tar_behind_them() -> None:
    shard = pack(some(3))
    assert outcome(bytes(10240)) == Outcome()
    got = outcome(hit(shard.data, 0, bytes(1024)))
    assert got.found == shard.pairs[1:]
    for much in (512, 1024, 32 << 10):  # an image of a disc begins so
        got = outcome(bytes(much) + b"\1CD001" + b"x" * 9000)
        assert [type(error) for error in got.errors] == [NotATar]


def test_many_zeros_are_passed_over() -> None:
    zeros = bytes(1 << 20)
    pieces = iter([memoryview(pack(some(1)).data), *[memoryview(zeros)] * 20, memoryview(pack(some(2)).data)])
    assert read_on(lambda: next(pieces, None)).found == some(1) + some(2)


# -- what is taken for a header ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lure",
    [
        b"ustar" * 300,
        header(name=bytes(100)),
        header(kind=b"@"),
        header(size=b"\xff" * 12),
        header(size=b"no octal...\0"),
        hit(header(), 300, b"x"),
        b"the manual says: the magic is 'ustar\0' at byte 257 " * 40,
    ],
)
def test_what_only_looks_like_a_header_is_passed_over(lure: bytes) -> None:
    shard = pack(some(2))
    source = ByteSource(Feed(lure + b"." + shard.data, [100]), URL)
    assert seek(source)
    assert source.offset == len(lure) + 1
    assert [name for name, _, _ in members_of(source)] == ["000.bin", "001.bin"]


def test_a_header_that_lost_its_first_byte_is_none() -> None:
    two = b"".join(header(name=name) for name in (b"000.bin", b"001.bin"))
    assert (two[148:149], two[156:157]) == (b"0", b"0")  # so that the sum is what it was
    assert not checks(two[1:513])
    assert checks(two[512:])


def test_headers_of_v7_are_not_found() -> None:
    v7 = header(kind=b"\0", magic=b"\0" * 255)
    got = outcome(pack(some(1)).data[:-1024] + b"x" * BLOCK + v7 + END)
    assert got.found == some(1)
    assert got.gaps == [(1536, None)]


def test_behind_damage_the_members_of_a_tar_within_come_up() -> None:
    """Nothing tells them from members of the shard: docs name it."""
    inner = pack(some(2, "inner{}.bin"))
    shard = pack([("a.bin", b"1"), ("b.tar", inner.data), ("c.bin", b"3")])
    got = outcome(hit(shard.data, shard.spans[1][0], b"\xff"))
    assert got.found == [shard.pairs[0], *inner.pairs, shard.pairs[2]]


def test_a_damaged_compressed_stream_cannot_be_read_on() -> None:
    packed = bytearray(gzip.compress(pack([("a.bin", bytes(range(256)) * 8), *some(4)]).data, mtime=0))
    packed[60] ^= 255
    pieces = iter([memoryview(bytes(packed))])
    got = read_on(plain(lambda: next(pieces, None), URL))
    assert [gap for _, gap in got.gaps] == [None]


# -- bounds --------------------------------------------------------------------------------------------------------


def test_looking_for_a_header_takes_little_memory() -> None:
    piece = bytes(range(1, 256)) * 4096
    pieces = iter([memoryview(b"ustar" * 1000), *[memoryview(piece)] * 60])
    source = ByteSource(lambda: next(pieces, None), URL)
    tracemalloc.start()
    try:
        assert not seek(source)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert source.offset == 5000 + 60 * len(piece)


def test_global_headers_take_no_memory() -> None:
    headers = [pax(b"g", b"GNU.sparse.%d=%s" % (n, b"s" * 900), b"k%d=%s" % (n, b"v" * 900)) for n in range(100)]
    read = iter([memoryview(block) for block in [*headers, END]])
    source = ByteSource(lambda: next(read, None), URL)
    tracemalloc.start()
    try:
        assert list(members_of(source)) == []
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


# -- damage at random ----------------------------------------------------------------------------------------------

payloads = st.one_of(
    st.binary(max_size=40),
    st.tuples(st.binary(min_size=1, max_size=5), st.sampled_from([511, 512, 1024, 3000])).map(
        lambda pair: (pair[0] * pair[1])[: pair[1]]
    ),
    st.just(b'{"caption": "ustar"}\n'),
)
ways = st.sampled_from(["flip", "zero", "cut", "insert", "delete", "noise"])
places = st.tuples(ways, st.floats(0, 1), st.sampled_from([1, 2, 100, 512, 513, 1024, 4096]), st.booleans())
cuts = st.sampled_from([[1 << 22], [512], [513], [700, 61]])


def damage(data: bytes, way: str, at: int, much: int) -> tuple[bytes, int]:
    """The bytes after it, and up to where (in the shard as it was) they are not what they were."""
    if way == "cut":
        return data[:at], len(data)
    if way == "insert":
        return data[:at] + b"\xa5" * much + data[at:], at + 1
    if way == "delete":
        return data[:at] + data[at + much :], at + much
    old = data[at : at + much]
    new = {"flip": bytes([b ^ 0x5A for b in old]), "zero": bytes(len(old)), "noise": b"\xc3\x28" * len(old)}[way]
    return hit(data, at, new[: len(old)]), at + len(old)


@settings(max_examples=200, deadline=None)
@given(contents=st.lists(payloads, min_size=1, max_size=8), place=places, sizes=cuts)
def test_nothing_foreign_is_given_and_all_behind_is(
    contents: list[bytes], place: tuple[str, float, int, bool], sizes: list[int]
) -> None:
    shard = pack([(f"{number:03}.bin", data) for number, data in enumerate(contents)])
    way, where, much, aligned = place
    at = int(len(shard.data) * where)
    at = at & -BLOCK if aligned else at
    data, end = damage(shard.data, way, at, much)
    touched = {shard.pairs[n][0] for n, (a, b) in enumerate(shard.spans) if a < end and b >= at}
    got = outcome(data, sizes)
    for pair in got.found:
        assert pair in shard.pairs or pair[0] in touched
    names = [name for name, _ in got.found]
    assert names == sorted(set(names))
    lost_to = end + (much if way == "delete" else 0)  # what is read as the data of a member that is too short
    ends = [b for a, b in shard.spans if a < end and b >= at]
    lost_to = max([lost_to, *(b + (much if way == "delete" else 0) for b in ends)])
    if way != "cut":
        assert [n for n in names if n not in touched] == [
            pair[0]
            for pair, (a, _) in zip(shard.pairs, shard.spans, strict=True)
            if pair[0] not in touched and (a < at or a >= lost_to or pair[0] in names)
        ]


@settings(max_examples=200, deadline=None)
@given(
    names=st.lists(st.sampled_from([LONG, "short", "ünïcode"]), min_size=2, max_size=6),
    format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    mtime=st.sampled_from([0, 1.5]),
    place=st.tuples(st.integers(0, 99), st.integers(0, 3), st.integers(0, 511), st.sampled_from([b"\xff", bytes(512)])),
    sizes=cuts,
)
def test_damaged_headers_give_no_member_another_name(
    names: list[str], format: int, mtime: float, place: tuple[int, int, int, bytes], sizes: list[int]
) -> None:
    shard = pack([(f"{name}{n:03}.bin", b"%d" % n * 600) for n, name in enumerate(names)], format, mtime)
    which, block, at, what = place
    begin, end = shard.spans[which % len(shard.spans)]
    headers = [a for a in range(begin, end, BLOCK) if shard.data[a + 257 : a + 262] == b"ustar"]
    spot = headers[block % len(headers)] + (at if len(what) == 1 else 0)
    got = outcome(hit(shard.data, spot, what), sizes)
    assert [pair for pair in shard.pairs if pair in got.found] == got.found
    assert len(got.found) >= len(shard.pairs) - 2


@settings(max_examples=100, deadline=None)
@given(
    contents=st.lists(payloads, min_size=1, max_size=5),
    hits=st.lists(places, min_size=2, max_size=5),
    format=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    sizes=cuts,
)
def test_however_often_it_is_damaged_it_ends(
    contents: list[bytes], hits: list[tuple[str, float, int, bool]], format: int, sizes: list[int]
) -> None:
    prefix = "" if format == tarfile.USTAR_FORMAT else LONG
    data = pack([(f"{prefix}{number:03}.bin", data) for number, data in enumerate(contents)], format).data
    for way, where, much, aligned in hits:
        at = int(len(data) * where)
        data, _ = damage(data, way, at & -BLOCK if aligned else at, much)
    got = outcome(data, sizes)
    again = outcome(data, [4096])
    assert (got.found, got.gaps) == (again.found, again.gaps)  # pieces decide nothing
    offsets = [offset for offset, _ in got.gaps]
    assert offsets == sorted(offsets)
