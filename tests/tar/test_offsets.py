"""Where samples stand in a plain tar: the same samples as reading it from the start gives."""

from __future__ import annotations

import io
import tarfile

import pytest

from tests.servers import make_tar
from wds_async.errors import CorruptShard, DuplicateField, NotATar, TruncatedShard
from wds_async.tar import group, parse
from wds_async.tar.index import SampleTable

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def table(data: bytes) -> SampleTable:
    return SampleTable(memoryview(data), "x.tar")


def contents(data: bytes, i: int) -> dict[str, bytes]:
    return {name: data[start:stop] for name, (start, stop) in table(data).fields(i).items()}


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_samples_as_read_in_order(format: int) -> None:
    long = "a/" + "n" * (120 if format != tarfile.USTAR_FORMAT else 80)
    names = [
        "__meta__/info.json",
        "a/1.jpg",
        "a/1.seg.png",
        "a/2.jpg",
        "README",
        f"{long}.jpg",
        f"{long}.cls",
        "a/1.jpg",
    ]
    data = make_tar([(name, name.encode() * 100) for name in names], format=format)
    pieces = iter((memoryview(data),))
    wanted = list(group.samples(parse.members(lambda: next(pieces, None), "x.tar"), "x.tar"))
    found = table(data)
    assert found.keys == [sample["__key__"] for sample in wanted] == ["a/1", "a/2", long, "a/1"]
    for i, sample in enumerate(wanted):
        fields = {f".{name}": value for name, value in sample.items() if not name.startswith("__")}
        assert contents(data, i) == fields


def test_fields_keep_their_case() -> None:
    assert list(contents(make_tar([("a.JPG", b"1"), ("a.Cls", b"2")]), 0)) == [".JPG", ".Cls"]


def test_folders_and_links_are_no_samples() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("d.x")
        folder.type = tarfile.DIRTYPE
        link = tarfile.TarInfo("b.x")
        link.type, link.linkname = tarfile.SYMTYPE, "a.x"
        archive.addfile(folder)
        archive.addfile(link)
    assert len(table(buffer.getvalue() + make_tar([("a.x", b"1")]))) == 1


def test_a_field_that_comes_twice_is_an_error_of_its_sample() -> None:
    data = make_tar([("a.x", b"1"), ("b.x", b"2"), ("b.x", b"3"), ("c.x", b"4")])
    assert table(data).keys == ["a", "b", "c"]
    assert contents(data, 2) == {".x": b"4"}
    with pytest.raises(DuplicateField, match=r"x\.tar.*'b'.*'\.x'"):
        table(data).fields(1)


def test_beyond_the_last_sample() -> None:
    found = table(make_tar([("a.x", b"1")]))
    with pytest.raises(IndexError):
        found.fields(1)


def test_what_is_no_good_shard() -> None:
    data = make_tar([("a.x", bytes(3000)), ("b.x", bytes(3000))])
    with pytest.raises(NotATar, match=r"x\.tar"):
        table(b"<html>" + bytes(600))
    with pytest.raises(TruncatedShard, match=r"x\.tar"):
        table(data[:5000])
    with pytest.raises(CorruptShard, match=r"x\.tar"):
        table(data[:3584] + b"garbage!" * 64 + data[3584 + 512 :])
