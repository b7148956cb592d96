"""Indexes say where samples are, in the formats of the tools that read them."""

from __future__ import annotations

import io
import json
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.servers.shards import make_tar
from tests.writing import in_memory
from wds_async.errors import ConfigError, NotATar, ShardFormatError
from wds_async.redact import redact
from wds_async.tar.group import base_plus_ext
from wds_async.tar.index import (
    DaliIndex,
    MemberEntry,
    dali_name,
    energon_index,
    energon_name,
    headers_of,
    read_dali,
    read_energon,
    scan,
    shard_list,
    shard_list_name,
)
from wds_async.tar.parse import members
from wds_async.tar.source import ByteSource
from wds_async.writer import TarWriter


def scanned(data: bytes, piece: int = 1000) -> list[MemberEntry]:
    pieces = iter([memoryview(data)[at : at + piece] for at in range(0, len(data), piece)])
    return list(scan(lambda: next(pieces, None), "u"))


SAMPLES = [
    {"__key__": "a/1", "jpg": b"x" * 700, "cls": b"3"},
    {"__key__": "a/2", "jpg": b"", "seg.png": b"y"},
    {"__key__": "k" * 150, "jpg": b"long"},
]


def test_a_scan_agrees_with_tarfile_and_with_the_writer(tmp_path: object) -> None:
    data = in_memory(*SAMPLES)
    entries = scanned(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert entries == [MemberEntry(m.name, m.offset_data, m.size) for m in tar]
    with TarWriter(f"{tmp_path}/x.tar", index="dali") as sink:
        assert [sink.write(sample) for sample in SAMPLES] == [701, 1, 4]
    with open(f"{tmp_path}/x.idx", encoding="utf-8") as file:
        assert file.read() == DaliIndex(entries).text()


def test_dalis_format() -> None:
    # As in DALI's documentation of wds2idx 1.2: a head line, then extension, offset, size and name of each field.
    index = DaliIndex(scanned(in_memory(*SAMPLES[:2])))
    assert len(index) == 2
    assert index.text() == (
        "v1.2 2\ncls 512 1 a/1.cls jpg 1536 700 a/1.jpg\njpg 3072 0 a/2.jpg seg.png 3584 1 a/2.seg.png\n"
    )
    assert read_dali(index.text()) == [
        [MemberEntry("a/1.cls", 512, 1), MemberEntry("a/1.jpg", 1536, 700)],
        [MemberEntry("a/2.jpg", 3072, 0), MemberEntry("a/2.seg.png", 3584, 1)],
    ]


def test_members_that_belong_to_no_sample_are_left_out() -> None:
    index = DaliIndex(
        [
            MemberEntry("__meta__/x.json", 0, 1),
            MemberEntry("README", 0, 1),
            MemberEntry("a.x", 9, 1),
            MemberEntry(".h", 0, 1),
        ]
    )
    assert index.text() == "v1.2 1\nx 9 1 a.x\n"


@pytest.mark.parametrize("name", ["a b.jpg", "a.j pg", "a\n.jpg", "a."])
def test_blanks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="blanks"):
        DaliIndex([MemberEntry(name, 0, 0)])


@pytest.mark.parametrize(
    ("url", "name"),
    [("x.tar", "x.idx"), ("a.b/train-001.tar.gz", "a.b/train-001.idx"), ("s3://b/x.y.tar", "s3://b/x.idx")],
)
def test_the_index_lies_where_wds2idx_puts_it(url: str, name: str) -> None:
    assert dali_name(url) == name


@pytest.mark.parametrize(
    ("pattern", "place", "name"),
    [
        ("train-%06d.tar", "train.json", "train"),
        ("s3://b/a/train_%d.tar", "s3://b/a/train.json", "train"),
        ("a/%06d.tar", "a/index.json", ""),
        ("a%%b/100%%-%03d.tar", "a%b/100%.json", "100%"),
    ],
)
def test_the_list_is_called_after_the_pattern(pattern: str, place: str, name: str) -> None:
    assert shard_list_name(pattern) == (place, name)


def test_the_list_is_that_of_wids_version_1() -> None:
    shards = [{"url": "a-0.tar", "nsamples": 3, "filesize": 10240}, {"url": "a-1.tar", "nsamples": 1}]
    text = shard_list(shards, "a")
    assert json.loads(text) == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": "a",
        "shardlist": shards,
    }
    assert "name" not in json.loads(shard_list(shards))


def test_a_scan_of_something_else_says_so() -> None:
    with pytest.raises(NotATar, match="gzip"):
        scanned(in_memory(*SAMPLES, compress="gz"))


def test_a_member_costs_no_look_for_secrets_in_the_url() -> None:
    """Removing secrets from a URL costs more than reading a header: it was done twice a member."""
    calls: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is redact.__code__:
            calls.append(frame.f_code.co_name)

    pieces = iter([memoryview(make_tar([(f"{n}.bin", b"x") for n in range(500)]))])
    sys.setprofile(watch)
    try:
        found = sum(1 for _ in scan(lambda: next(pieces, None), "s3://bucket/x.tar"))
    finally:
        sys.setprofile(None)
    assert found == 500
    assert len(calls) <= 1


def energon_of(data: bytes) -> bytes:
    """Energon's index as its ``prepare`` makes it with Python's ``tarfile``: the offset of the first member of each
    key, then where the archive's members end."""
    offsets, last = [], None
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            key = base_plus_ext(member.name)[0]
            if member.isreg() and key is not None and key != last:
                offsets.append(member.offset)
                last = key
        return struct.pack(f"<{len(offsets) + 1}Q", *offsets, tar.offset)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_are_those_that_tarfile_reads(format: int) -> None:
    names = ["a/1.jpg", "a/1.cls", "ü/2.jpg", "x" * 90 + "/" + "y" * 60 + ".txt", "plain", "z.bin"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = number * 300, number + (0.5 if format == tarfile.PAX_FORMAT else 0)
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    data = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(m.name, m.offset, m.offset_data, m.size, False) for m in tar if m.isreg()]
    for piece in (len(data), 512, 1000, 1):
        pieces = iter([memoryview(data)[at : at + piece] for at in range(0, len(data), piece)])
        source = ByteSource(lambda pieces=pieces: next(pieces, None), "u")
        assert list(headers_of(source)) == expected
        source.drop()


@given(st.lists(st.tuples(st.integers(0, 2000), st.booleans()), max_size=6), st.data())
def test_damage_ends_a_walk_as_it_ends_a_reader(sizes: list[tuple[int, bool]], draw: st.DataObject) -> None:
    """Which errors there are, and where, does not depend on whether data is wanted."""
    files = [(f"{n}.{'x' * (120 if long else 1)}", b"d" * size) for n, (size, long) in enumerate(sizes)]
    data = bytearray(make_tar(files, format=tarfile.PAX_FORMAT))
    cut = draw.draw(st.integers(0, len(data)))
    if draw.draw(st.booleans()):
        del data[cut:]
    elif cut < len(data):
        data[cut] ^= draw.draw(st.integers(1, 255))

    def ends(walk: Callable[[Any], Iterator[Any]]) -> tuple[list[Any], str]:
        pieces, seen = iter([memoryview(bytes(data))[at : at + 700] for at in range(0, len(data), 700)]), []
        try:
            for item in walk(lambda: next(pieces, None)):
                seen.append(item)
        except ShardFormatError as exn:
            return seen, f"{type(exn).__name__} {exn}"
        return seen, ""

    read, why = ends(lambda read: members(read, "u"))
    walked, same = ends(lambda read: headers_of(ByteSource(read, "u")))
    assert why == same or (why.startswith("TruncatedShard") and same.startswith("TruncatedShard"))
    assert [(name, start) for name, _, start in read] == [(name, start) for name, start, *_ in walked][: len(read)]
    assert len(walked) - len(read) in ((0, 1) if why else (0,))  # the member whose data is cut has its header


def test_energons_format() -> None:
    data = in_memory(*SAMPLES)
    starts, last = [], None
    stop = 0
    source = ByteSource(iter([memoryview(data), None]).__next__, "u")
    for name, start, offset, size, _ in headers_of(source):
        key = base_plus_ext(name)[0]
        starts += [start] if key != last else []
        last, stop = key, offset + -(-size // 512) * 512
    source.drop()
    assert energon_index(starts, stop) == energon_of(data)
    assert read_energon(energon_of(data)) == [*starts, stop]
    assert read_energon(energon_index((), 0)) == [0]
    assert energon_name("s3://b/a/x.y.tar") == "s3://b/a/x.y.tar.idx"


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"v1.2 0\n", struct.pack("<3Q", 0, 1024, 512), struct.pack("<2Q", 0, 5)]
)
def test_what_is_no_index_of_energon(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"x\.idx: no index of Energon"):
        read_energon(data, "x.idx")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: ''"),
        ("v1.0 1\ncls 512 1\n", "line 1: 'v1.0 1'; an index of DALI begins with 'v1.2 N' or 'v1.1 N'"),
        ("v1.1 1\ncls 512 1 a.cls\n", "line 2: 'cls 512 1 a.cls' is no list of extension, offset and size$"),
        ("v1.2 x\n", "line 1"),
        ("v1.2 2\ncls 512 1 a.cls\n", "says 2 samples, and it has 1"),
        ("v1.2 1\ncls 512 1\n", "line 2: 'cls 512 1' is no list"),
        ("v1.2 2\ncls 512 1 a.cls\ncls -1 1 b.cls\n", "line 3"),
        ("v1.2 1\n\n", "line 2"),
    ],
)
def test_what_is_no_index_of_dali(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"x.idx.*{why}"):
        read_dali(text, "x.idx")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("v1.2 2\ncls 512 600 a.cls\ncls 1536 1 b.cls\n", "line 3: byte 1536 .* behind byte 1536"),
        ("v1.2 1\ncls 0 1 a.cls\n", "line 2: byte 0 "),
        ("v1.1 1\ncls 513 1\n", "line 2: byte 513 "),
        ("v1.1 2\ncls 512 1\ncls 1536 1000\n", "line 3: .* ends at byte 2,560 of a shard that has 2,048 bytes"),
    ],
)
def test_an_index_of_dali_that_fits_no_such_tar(text: str, why: str) -> None:
    with pytest.raises(ShardFormatError, match=f"x.idx, {why}"):
        read_dali(text, "x.idx", 2048)
    assert read_dali("v1.1 1\ncls 512 1 jpg 1536 9\n", shard_bytes=2048) == [
        [MemberEntry("", 512, 1), MemberEntry("", 1536, 9)]
    ]
