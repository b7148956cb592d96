"""Indexes say where samples are, in the formats of the tools that read them."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from types import FrameType

import pytest

from tests.servers.shards import make_tar
from tests.writing import in_memory, read_dali
from wds_async.errors import NotATar
from wds_async.redact import redact
from wds_async.tar.index import (
    DaliIndex,
    MemberEntry,
    dali_name,
    scan,
    shard_list,
    shard_list_name,
)
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
