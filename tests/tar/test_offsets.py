"""Where samples stand in a plain tar: the same samples as reading it from the start gives."""

from __future__ import annotations

import tarfile

import pytest

from tests.servers import make_tar
from wds_async.errors import DuplicateField
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


def test_a_field_that_comes_twice_is_an_error_of_its_sample() -> None:
    data = make_tar([("a.x", b"1"), ("b.x", b"2"), ("b.x", b"3"), ("c.x", b"4")])
    assert table(data).keys == ["a", "b", "c"]
    assert contents(data, 2) == {".x": b"4"}
    with pytest.raises(DuplicateField, match=r"x\.tar.*'b'.*'\.x'"):
        table(data).fields(1)
