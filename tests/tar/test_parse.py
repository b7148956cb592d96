"""The parser reads what ``tarfile`` reads, from any pieces, and says what is wrong where it cannot."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import tarfile
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from wds_async.errors import CorruptShard, FieldTooLarge, NotATar, ShardFormatError, TruncatedShard
from wds_async.tar.parse import Member, members, members_of
from wds_async.tar.source import ByteSource

Entry = tuple[bytes, str, bytes, float]  # type, name, data, mtime
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
URL = "http://host/shard.tar"


class Feed:
    """Pieces of ``data`` in one block of memory that is used again, as the engine does; fails where somebody
    still refers to the piece before."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes, self.at, self.count = data, sizes, 0, 0
        self.block = bytearray()
        self.last: weakref.ref[memoryview] | None = None

    def __call__(self) -> memoryview | None:
        self.check()
        if self.at >= len(self.data):
            return None
        size = self.sizes[self.count % len(self.sizes)]
        self.block[:] = self.data[self.at : self.at + size]
        self.at += size
        self.count += 1
        view = memoryview(self.block)
        self.last = weakref.ref(view)
        return view

    def check(self) -> None:
        assert self.last is None or self.last() is None, "a piece is still referred to"
        self.block.append(0)  # BufferError where a part of it is


def parse(data: bytes, sizes: list[int] | None = None, **kw: Any) -> list[Member]:
    feed = Feed(data, sizes or [1 << 22])
    found = list(members(feed, URL, **kw))
    feed.check()
    return found


def parse_until_error(data: bytes, sizes: list[int]) -> tuple[list[Member], Exception | None]:
    feed = Feed(data, sizes)
    found: list[Member] = []
    try:
        for member in members(feed, URL):
            found.append(member)
    except ShardFormatError as error:
        feed.check()  # while the exception keeps its frames alive
        return found, error
    feed.check()
    return found, None


def by_tarfile(data: bytes, ignore_zeros: bool = False) -> list[tuple[str, bytes, int]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", ignore_zeros=ignore_zeros) as tar:
        return [(m.name, tar.extractfile(m).read(), m.offset) for m in tar if m.isreg()]  # type: ignore[union-attr]


def archive(entries: list[Entry], format: int, **kw: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, **kw) as tar:
        for kind, name, data, mtime in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mtime = kind, mtime  # type: ignore[assignment]
            if kind in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
                info.size = len(data)
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = "to/" + name
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # a name that ustar cannot hold
                continue
        end = tar.offset
    return out.getvalue()[: end + 1024]  # without the zeros up to a tape's record, which only take time


def simple(*names: str, data: bytes = b"x" * 700, format: int = tarfile.USTAR_FORMAT) -> bytes:
    return archive([(tarfile.REGTYPE, name, data, 0) for name in names], format)


def header(**changes: bytes) -> bytes:
    """A plain header with fields replaced, and a right checksum."""
    block = bytearray(simple("a.txt", data=b"")[:512])
    places = {"name": 0, "size": 124, "kind": 156, "magic": 257, "prefix": 345}
    for field, value in changes.items():
        block[places[field] : places[field] + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 512)


END = b"\0" * 1024

names = st.one_of(
    st.text("abc.", min_size=1, max_size=8),
    st.lists(st.text("abé漢.-", min_size=1, max_size=60), min_size=1, max_size=6).map("/".join),
    st.integers(95, 300).map(lambda n: ("d" * 40 + "/" + "n" * 300)[:n] + ".jpg"),
    st.just("raw\udcff\udc80.bin"),
).filter(lambda name: name not in (".", "..") and not name.startswith("/"))
kinds = st.sampled_from(
    [tarfile.REGTYPE] * 8
    + [tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
    + [tarfile.CHRTYPE]
)
contents = st.one_of(
    st.binary(max_size=20),
    st.tuples(st.binary(min_size=1, max_size=5), st.sampled_from([511, 512, 513, 1024, 5000])).map(
        lambda pair: (pair[0] * pair[1])[: pair[1]]
    ),
)
times = st.sampled_from([0, 1700000000, 1700000000.25, -5])
entries = st.lists(st.tuples(kinds, names, contents, times), max_size=6)
cuts = st.one_of(
    st.sampled_from([[61], [511], [512], [513], [1024], [1536], [4096], [1 << 22]]),
    st.lists(st.integers(30, 3000), min_size=1, max_size=6),
)


@settings(max_examples=400, deadline=None)
@given(entries=entries, format=st.sampled_from(FORMATS), sizes=cuts)
def test_equals_tarfile_whatever_the_pieces(entries: list[Entry], format: int, sizes: list[int]) -> None:
    data = archive(entries, format)
    assert [tuple(member) for member in parse(data, sizes)] == by_tarfile(data)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.tuples(entries, st.sampled_from(FORMATS)), min_size=1, max_size=3),
    filled=st.sampled_from([0, 10240, 32768]),  # bytes of a record
    sizes=cuts,
)
def test_concatenated_archives_are_read_on(parts: list[tuple[list[Entry], int]], filled: int, sizes: list[int]) -> None:
    archives = [one for entries, format in parts if (one := archive(entries, format)).strip(b"\0")]
    assume(archives)
    data = b"".join(one + bytes(-len(one) % filled if filled else 0) for one in archives)
    assert [tuple(member) for member in parse(data, sizes)] == by_tarfile(data, ignore_zeros=True)


@settings(max_examples=300, deadline=None)
@given(entries=entries, format=st.sampled_from(FORMATS), sizes=cuts, where=st.floats(0, 1))
def test_a_truncated_archive_gives_a_prefix_and_an_error_or_its_end(
    entries: list[Entry], format: int, sizes: list[int], where: float
) -> None:
    data = archive(entries, format)
    whole = by_tarfile(data)
    cut = int(len(data) * where)
    found, error = parse_until_error(data[:cut], sizes)
    assert [tuple(member) for member in found] == whole[: len(found)]
    if cut == 0:
        assert isinstance(error, NotATar)
    elif error is not None:
        assert isinstance(error, TruncatedShard if cut >= 512 else NotATar | TruncatedShard)
        assert URL in str(error)
        if isinstance(error, TruncatedShard):
            assert f"byte {cut}" in str(error)
    else:  # only between two members is an early end no error
        assert cut == len(data) or not data[cut:].strip(b"\0") or cut % 512 == 0
        assert found == list(by_tarfile(data[:cut]))


@settings(max_examples=300, deadline=None)
@given(
    entries=st.lists(st.tuples(kinds, names, contents, times), min_size=1, max_size=4),
    format=st.sampled_from(FORMATS),
    sizes=cuts,
    which=st.integers(0, 99),
    at=st.integers(0, 511),
    flip=st.integers(1, 255),
)
def test_a_damaged_header_gives_a_prefix_and_an_error(
    entries: list[Entry], format: int, sizes: list[int], which: int, at: int, flip: int
) -> None:
    data = bytearray(archive(entries, format))
    with tarfile.open(fileobj=io.BytesIO(bytes(data)), mode="r:") as tar:
        starts = [member.offset for member in tar]
    if not starts:
        return
    whole = by_tarfile(bytes(data))
    start = starts[which % len(starts)]
    data[start + at] ^= flip
    found, error = parse_until_error(bytes(data), sizes)
    assert [tuple(member) for member in found] == whole[: len(found)]
    if error is None:  # a byte of the checksum field that says nothing, like the blank behind its digits
        assert 148 <= at < 156
        assert len(found) == len(whole)
    else:
        assert isinstance(error, NotATar if start == 0 else CorruptShard)
        assert start == 0 or f"byte {start}" in str(error)


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_equals_tarfile_on_gnu_tars_archives(tmp_path: Path, format: str) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jpg").write_bytes(b"j" * 1000)
    (folder / "a.cls").write_bytes(b"7")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "sub" / "ünï.txt").write_bytes(b"u" * 512)
    (folder / "link.jpg").symlink_to("a.jpg")
    (folder / "hard.jpg").hardlink_to(folder / "a.jpg")
    if format != "v7":
        long = folder / "sub" / ("d" * 90)
        long.mkdir()
        (long / ("n" * 90 + ".txt")).write_bytes(b"long")
    if format in ("gnu", "oldgnu", "posix"):
        (folder / ("m" * 200 + ".txt")).write_bytes(b"longer")
        (folder / "longlink").symlink_to("x" * 180)
    out = tmp_path / "x.tar"
    command = ["tar", f"--format={format}", "--sort=name", "-cf", str(out), "-C", str(folder), "."]
    subprocess.run(command, check=True)
    data = out.read_bytes()
    expected = by_tarfile(data)
    assert len(expected) >= 4
    for sizes in ([1 << 22], [512], [513], [1] * 2000 + [700]):
        assert [tuple(member) for member in parse(data, sizes)] == expected


# -- forms that neither writer gives at will -----------------------------------------------------------------------


def test_a_base_256_size_is_read() -> None:
    data = header(size=b"\x80" + (5).to_bytes(11, "big")) + padded(b"hello") + END
    assert parse(data) == [("a.txt", b"hello", 0)] == list(by_tarfile(data))


@pytest.mark.parametrize("size", [b"\xff" * 12, b"-0000000005\0", b"0000000009x\0", b"hello world\0"])
def test_a_size_that_is_none_is_corrupt(size: bytes) -> None:
    with pytest.raises(CorruptShard, match="byte 1024 has the size"):
        parse(simple("a", data=b"1")[:1024] + header(size=size) + END)


@pytest.mark.parametrize(
    "size", [b"00000000005\0", b"00000000005 ", b"000000000005", b"         5 \0", b"5\0\0\0\0\0\0\0\0\0\0\0"]
)
def test_sizes_are_read_in_every_spelling(size: bytes) -> None:
    assert parse(header(size=size) + padded(b"hello") + END) == [("a.txt", b"hello", 0)]


def test_a_v7_header_and_a_v7_directory() -> None:
    blank = b"\0" * 255
    data = header(kind=b"\0", magic=blank, name=b"dir/\0\0\0\0", size=b"00000000005\0")
    data += header(kind=b"\0", magic=blank, size=b"00000000005\0") + padded(b"hello") + END
    assert parse(data) == [("a.txt", b"hello", 512)] == list(by_tarfile(data))


def test_the_prefix_of_ustar_counts_and_old_gnus_times_do_not() -> None:
    assert parse(header(prefix=b"some/folder") + END)[0][0] == "some/folder/a.txt"
    assert parse(header(prefix=b"14712345670\0", magic=b"ustar  \0") + END)[0][0] == "a.txt"


def test_a_checksum_over_signed_bytes_is_accepted() -> None:
    block = bytearray(header(name="é.txt".encode()))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(struct.unpack("512b", block))
    assert parse(bytes(block) + END)[0][0] == "é.txt"


def test_an_unknown_type_is_passed_over_with_its_data() -> None:
    data = header(kind=b"V", size=b"00000001000\0") + b"v" * 512 + simple("b.txt", data=b"b")
    assert parse(data) == [("b.txt", b"b", 1024)] == list(by_tarfile(data))


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6"])
def test_links_and_their_like_have_no_data_whatever_their_size(kind: bytes) -> None:
    data = header(kind=kind, size=b"00000001000\0") + simple("b.txt", data=b"b")
    assert parse(data) == [("b.txt", b"b", 512)] == list(by_tarfile(data))


def pax(kind: bytes, *records: bytes) -> bytes:
    payload = b""
    for record in records:
        size = next(n for digits in range(1, 12) if len(str(n := len(record) + 2 + digits)) == digits)
        payload += b"%d %s\n" % (size, record)
    return header(kind=kind, name=b"pax\0\0", size=b"%011o\0" % len(payload)) + padded(payload)


def test_pax_gives_size_and_path() -> None:
    data = pax(b"x", b"size=5", b"path=new/name.txt", b"mtime=1.5") + header() + padded(b"hello") + END
    assert parse(data) == [("new/name.txt", b"hello", 0)] == list(by_tarfile(data))


def test_pax_times_alone_change_nothing_but_the_offset() -> None:
    times = pax(b"x", b"mtime=1700000000.25", b"atime=-3", b"ctime=0.1")
    data = times + header(size=b"00000000005\0") + padded(b"hello") + header() + END
    for sizes in ([1 << 22], [512], [1024], [1000]):
        found = parse(data, sizes)
        assert found == [("a.txt", b"hello", 0), ("a.txt", b"", 2048)]
        assert found == list(by_tarfile(data))


def test_a_global_pax_header_gives_later_members_what_they_lack() -> None:
    data = pax(b"g", b"comment=x") + header() + pax(b"g", b"path=all.txt") + header()
    data += pax(b"x", b"path=own.txt") + header() + header() + END
    assert [tuple(member) for member in parse(data)] == by_tarfile(data)
    assert [name for name, _, _ in parse(data)] == ["a.txt", "all.txt", "own.txt", "all.txt"]
    assert len(parse(header() + pax(b"g", b"comment=x") + END)) == 1  # it belongs to no member


def test_of_two_headers_that_name_a_member_the_first_counts() -> None:
    def long(name: bytes) -> bytes:
        return header(kind=b"L", size=b"%011o\0" % (len(name) + 1)) + padded(name + b"\0")

    for first, second in ((pax(b"x", b"path=1"), pax(b"x", b"path=2")), (long(b"1"), pax(b"x", b"path=2"))):
        data = first + second + header() + second + first + header() + END
        assert [tuple(member) for member in parse(data)] == by_tarfile(data)
        assert [name for name, _, _ in parse(data)] == ["1", "2"]


@pytest.mark.parametrize(
    "payload",
    [b"8 path=x\n", b"11 path=x\n", b"99 path=x\n", b"path=x\n", b"0 path=x\n", b"-9 path=x\n", b"9 pathxx\n\n"],
)
def test_a_pax_header_that_does_not_add_up_is_corrupt(payload: bytes) -> None:
    good = b"9 path=x\n"
    assert parse(header(kind=b"x", size=b"%011o\0" % len(good)) + padded(good) + header() + END)[0][0] == "x"
    with pytest.raises(CorruptShard, match="PAX header at byte 0"):
        parse(header(kind=b"x", size=b"%011o\0" % len(payload)) + padded(payload) + header() + END)


def test_a_pax_size_that_is_none_is_corrupt() -> None:
    with pytest.raises(CorruptShard, match="PAX size b'-5'"):
        parse(pax(b"x", b"size=-5") + header() + END)


@pytest.mark.parametrize(("kind", "size"), [(b"L", (64 << 10) + 1), (b"K", 1 << 30), (b"x", (64 << 20) + 1)])
def test_extension_headers_are_bounded(kind: bytes, size: int) -> None:
    with pytest.raises(CorruptShard, match="extension header at byte 0"):
        parse(header(kind=kind, size=b"%011o\0" % size) + b"x" * 4096)


def test_a_pax_header_of_many_megabytes() -> None:
    data = pax(b"x", b"comment=" + b"c" * (3 << 20), b"path=b.txt", b"k=" + b"v" * (3 << 20)) + header() + END
    assert parse(data, [100_000]) == [("b.txt", b"", 0)] == by_tarfile(data)


def test_a_pax_header_of_many_records_takes_no_memory() -> None:
    """Only those that change how the member is read are kept."""
    records = b"".join(b"11 %05d=b\n" % number for number in range(50_000))
    blocks = [header(kind=b"x", size=b"%011o\0" % len(records)), padded(records), header(), END]
    read = iter([memoryview(block) for block in blocks])
    tracemalloc.start()
    try:
        assert len(list(members(lambda: next(read, None), URL))) == 1
        assert tracemalloc.get_traced_memory()[1] < 3 * len(records)
    finally:
        tracemalloc.stop()


def test_a_pax_name_is_bounded_as_a_long_one() -> None:
    assert len(parse(pax(b"x", b"path=" + b"n" * (64 << 10)) + header() + END)[0][0]) == 64 << 10
    with pytest.raises(CorruptShard, match=r"byte 0 is damaged: a path of 65537 bytes"):
        parse(pax(b"x", b"path=" + b"n" * ((64 << 10) + 1)) + header() + END)


@pytest.mark.parametrize(
    "name", ["", "n" * 100, "/etc/passwd.txt", "../up.txt", "\x1b[31m\a.txt", "a\nb.txt", "a//b.txt", "..", "?"]
)
def test_names_are_handed_on_as_they_are(name: str) -> None:
    """They are names, and nothing here takes one for a path; messages show them quoted."""
    assert parse(header(name=name.encode() + b"\0" * (100 - len(name))) + END) == [(name, b"", 0)]
    large = header(name=name.encode() + b"\0" * (100 - len(name)), size=b"%011o\0" % 5)
    with pytest.raises(FieldTooLarge) as info:
        parse(large + padded(b"hello") + END, max_field_bytes=4)
    assert str(info.value).isprintable()


@pytest.mark.parametrize("rest", [END, b"garbage!" * 64])
def test_an_extension_header_needs_its_member(rest: bytes) -> None:
    with pytest.raises(CorruptShard, match="extension header at byte 0"):
        parse(pax(b"x", b"mtime=1.5") + rest)
    with pytest.raises(TruncatedShard, match="headers of the member at byte 0"):
        parse(pax(b"x", b"mtime=1.5"))


# -- ends and beginnings ------------------------------------------------------------------------------------------


def test_a_tar_of_zeros_has_no_members() -> None:
    assert parse(b"\0" * 10240) == [] == by_tarfile(b"\0" * 10240)
    assert parse(b"\0" * 512) == []


def test_garbage_behind_the_end_is_left_alone() -> None:
    data = simple("a.txt")
    for garbage in (b"garbage " * 100, b"x", b"\0" * 100):
        assert len(parse(data + garbage)) == 1


def test_garbage_counts_as_the_end_only_right_behind_zeros() -> None:
    data = simple("a.txt") + simple("b.txt", data=b"x" * 512)[:1024]
    with pytest.raises(CorruptShard, match=f"block at byte {len(data)} is no tar header"):
        parse(data + b"garbage " * 100)


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE HTML><title>Sign in</title>" + b" " * 600, "HTML"),
        (b"\n <html>" + b"x" * 600, "HTML"),
        (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "XML"),
        (b'{"error": {"code": 404}}', "JSON"),
        (b"PK\x03\x04" + b"\0" * 600, "zip"),
        (b"PAR1" + b"\0" * 600, "Parquet"),
        (b"\x1f\x8b\x08\0" + b"\0" * 600, "gzip"),
        (b"\xff\xd8\xff\xe0" + b"\0" * 600, "JPEG"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "LFS"),
        (b"\x1b[31mred\x07" * 100, "no tar header"),
    ],
)
def test_what_is_no_tar_is_told_by_its_look(start: bytes, hint: str) -> None:
    for sizes in ([1 << 22], [7]):
        with pytest.raises(NotATar, match=hint) as info:
            parse(start, sizes)
        assert URL in str(info.value)
        assert str(info.value).isprintable()
        assert isinstance(pickle.loads(pickle.dumps(info.value)), NotATar)


def test_a_truncated_member_says_what_is_missing() -> None:
    data = simple("a.txt", "b.txt", data=b"x" * 700)
    with pytest.raises(TruncatedShard, match=r"byte 2148, inside member 'b.txt' .*byte 1536.*700 .*wanted, 100 got"):
        parse(data[: 1536 + 512 + 100])


def test_errors_show_no_secret() -> None:
    with pytest.raises(NotATar) as info:
        list(members(lambda: None, "https://h/x.tar?X-Amz-Signature=hush"))
    assert "hush" not in str(info.value)


# -- admission and limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1 << 22], [100], [513]])
def test_admit_renames_and_passes_over(sizes: list[int]) -> None:
    data = simple("a.txt", "b.txt", "c.txt")

    def admit(name: str) -> str | None:
        return None if name == "b.txt" else name.upper()

    assert [name for name, _, _ in parse(data, sizes, admit=admit)] == ["A.TXT", "C.TXT"]
    assert parse(data, sizes, admit=lambda name: None) == []


def test_a_field_above_the_limit_is_refused_before_its_data() -> None:
    feed = Feed(header(size=b"%011o\0" % (3 << 30)) + b"x" * 100_000, [1024])
    with pytest.raises(FieldTooLarge, match=r"'a.txt' at byte 0 has 3221225472 bytes"):
        list(members(feed, URL))
    assert feed.count == 1
    assert len(parse(simple("a.txt"), max_field_bytes=700)) == 1
    with pytest.raises(FieldTooLarge):
        parse(simple("a.txt"), max_field_bytes=699)
    assert parse(simple("a.txt"), max_field_bytes=10, admit=lambda name: None) == []


def test_nothing_is_referred_to_after_close() -> None:
    feed = Feed(simple("a.txt", "b.txt"), [1 << 22])
    found = members(feed, URL)
    assert next(found)[0] == "a.txt"
    found.close()  # type: ignore[attr-defined]
    feed.check()


def test_what_read_and_admit_raise_passes() -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(simple("a.txt")[:1024])
        raise ConnectionError("gone")

    pieces = broken()
    read: Callable[[], memoryview] = lambda: next(pieces)  # noqa: E731
    with pytest.raises(ConnectionError):
        list(members(read, URL))

    def admit(name: str) -> str:
        raise KeyError(name)

    with pytest.raises(KeyError):
        parse(simple("a.txt"), admit=admit)


def test_a_lying_size_takes_no_memory() -> None:
    with pytest.raises(TruncatedShard):
        parse(header(size=b"\x80" + (1 << 50).to_bytes(11, "big")) + b"x" * 5000, max_field_bytes=1 << 60)


def test_names_in_messages_are_cut() -> None:
    with pytest.raises(FieldTooLarge) as info:
        parse(simple("n" * 300, format=tarfile.GNU_FORMAT), max_field_bytes=9)
    assert repr("n" * 200 + "…") in str(info.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=3000), sizes=cuts)
def test_random_bytes_never_hang_nor_raise_anything_else(data: bytes, sizes: list[int]) -> None:
    parse_until_error(data, sizes)


@pytest.mark.parametrize("end", [b"", b"\0" * 512, b"\0" * 700], ids=["none", "one block", "one block and a half"])
def test_a_missing_end_of_archive_is_an_error_where_it_is_required(end: bytes) -> None:
    data = simple("a.jpg", "a.txt")[: -len(END)] + end
    found: list[Member] = []
    asked: list[int] = []

    def end_required() -> bool:
        asked.append(len(found))
        return True

    with pytest.raises(TruncatedShard, match="the server gave no length") as caught:
        found.extend(members(Feed(data, [700]), URL, end_required=end_required))
    assert caught.value.offset == len(data)
    assert "without the two blocks of zeros" in str(caught.value)
    assert asked == [2], "it is asked at the end only"
    assert len(parse(data, end_required=lambda: False)) == 2


@pytest.mark.parametrize("end", [END, bytes(5000), END + b"left behind by a tape drive"])
def test_a_required_end_of_archive_that_is_there(end: bytes) -> None:
    def never() -> bool:
        raise AssertionError("the archive has its end")

    assert len(parse(simple("a.jpg", "a.txt")[: -len(END)] + end, end_required=never)) == 2
    two = simple("a.jpg") + simple("b.jpg")
    assert len(parse(two, end_required=never)) == 2
    with pytest.raises(TruncatedShard):
        parse(two[: -len(END)], end_required=lambda: True)


@settings(max_examples=100, deadline=None)
@given(
    names=st.lists(st.sampled_from(["a.jpg", "b" * 150, "d/ü.txt", "c" * 90 + "/" + "e" * 60]), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    format=st.sampled_from(FORMATS),
    cut=st.integers(0, 5),
)
def test_offsets_are_those_of_the_whole_tar_wherever_reading_begins(
    names: list[str], sizes: list[int], format: int, cut: int
) -> None:
    assume(format != tarfile.USTAR_FORMAT or not any(len(name) > 100 for name in names))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 700 * number
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    data = out.getvalue()
    whole = parse(data)
    starts = [offset for _, _, offset in whole]
    start = starts[min(cut, len(starts) - 1)]
    feed = Feed(data[start:], sizes)
    source = ByteSource(feed, URL, start=start)
    assert list(members_of(source)) == whole[starts.index(start) :]
    assert (source.offset, source.doubt, source.empty) == (len(data), "", False)
    source.drop()


def test_what_is_wrong_behind_the_beginning_of_a_span_is_told_by_its_place() -> None:
    data = b"\1" * 512
    for start, kind in ((0, NotATar), (512, CorruptShard)):
        with pytest.raises(kind, match=f"at byte {start}") as caught:
            list(members_of(ByteSource(Feed(data, [512]), URL, start=start)))
        assert caught.value.offset == start
    source = ByteSource(Feed(b"", [512]), URL, start=1024)  # it begins at the end of its shard
    assert list(members_of(source)) == []
    assert source.doubt == ""
