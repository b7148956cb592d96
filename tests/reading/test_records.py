"""CBOR and MessagePack files as streams of samples, read by the engine."""

from __future__ import annotations

import bz2
import datetime
import gzip
import itertools
import lzma
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.servers import Origin
from wds_async.errors import (
    ConfigError,
    CorruptShard,
    FieldTooLarge,
    MissingExtra,
    ShardNotFound,
    TruncatedShard,
)
from wds_async.filters import select
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.pipeline import DataPipeline
from wds_async.reading import records
from wds_async.reading.records import cbors_to_samples, msgpacks_to_samples
from wds_async.shardlists import SimpleShardList, split_by_worker

SAMPLES: list[Any] = [
    {"__key__": "a", "jpg": b"\xff\xd8" + bytes(3000), "cls": 3},
    [1, 2.5, None, True, {"nested": ["é", {}]}],
    "text",
    b"",
    7,
    {1: "a number is a key"},
]
FORMATS: list[tuple[Callable[..., Any], Callable[[Any], bytes]]] = [
    (cbors_to_samples, cbor2.dumps),
    (msgpacks_to_samples, msgpack.packb),
]
both = pytest.mark.parametrize(("stage", "dumps"), FORMATS, ids=["cbor", "msgpack"])


def write(path: Path, dumps: Callable[[Any], bytes], samples: list[Any] = SAMPLES) -> str:
    path.write_bytes(b"".join(map(dumps, samples)))
    return str(path)


def pieces(data: bytes, size: int) -> Callable[[], memoryview | None]:
    chunks: Iterator[memoryview] = iter([memoryview(data)[i : i + size] for i in range(0, len(data), size)])
    return lambda: next(chunks, None)


@both
def test_files_become_samples(tmp_path: Path, stage: Any, dumps: Any) -> None:
    """The call as users write it; every file is read to its end, and samples are what was written."""
    urls = [write(tmp_path / name, dumps) for name in ("a.cbors", "b.cbors")]
    pipeline = DataPipeline(SimpleShardList(urls), stage())
    assert list(pipeline) == list(pipeline) == SAMPLES * 2
    assert list(DataPipeline(SimpleShardList(urls), stage(), select(lambda x: x == 7))) == [7, 7]
    assert pipeline.statistics().samples == 4 * len(SAMPLES)
    assert list(stage().run([{"url": urls[0]}])) == SAMPLES


def test_cbor_types() -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)
    samples = [moment, 10**40, cbor2.CBORTag(4711, "x"), {"shared": moment}]
    data = b"".join(map(cbor2.dumps, samples)) + b"\x9f\x01\x02\xff" + b"\x5f\x41a\x41b\xff"  # indefinite lengths
    decoded = list(records._cbor_objects(pieces(data, 5), "u", 1000))
    assert [sample for sample, _, _ in decoded] == [*samples, [1, 2], b"ab"]


@both
def test_an_empty_file_has_no_samples(tmp_path: Path, stage: Any, dumps: Any) -> None:
    assert list(stage().run([write(tmp_path / "x", dumps, [])])) == []


@both
@pytest.mark.parametrize(
    "compress", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress], ids=["gz", "bz2", "xz", "zst"]
)
def test_compressed(tmp_path: Path, stage: Any, dumps: Any, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(compress(b"".join(map(dumps, SAMPLES * 50))))
    assert list(stage().run([str(path)])) == SAMPLES * 50


@both
def test_over_http_in_parts(origin: Origin, stage: Any, dumps: Any) -> None:
    samples = [{"i": i, "data": bytes(5000)} for i in range(200)]
    origin.add("/x.bin", b"".join(map(dumps, samples)))
    transfer = {"part_bytes": 1 << 16, "budget_bytes": 1 << 20}
    assert list(stage(transfer=transfer).run([origin.url("/x.bin")])) == samples
    assert len(origin.requests) > 3


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("cbor", [True, False], ids=["cbor", "msgpack"])
@given(samples=st.lists(_VALUES, max_size=6), size=st.integers(1, 60), cut=st.integers(0, 1000), base=st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_any_samples_in_any_pieces_cut_anywhere(cbor: bool, samples: list[Any], size: int, cut: int, base: int) -> None:
    """What is whole before the cut comes out with its places; a cut inside an object is told, with the object's."""
    objects, dumps = (records._cbor_objects, cbor2.dumps) if cbor else (records._msgpack_objects, msgpack.packb)
    data = b"".join(map(dumps, samples))
    ends = [0]
    for sample in samples:
        ends.append(ends[-1] + len(dumps(sample)))
    cut = min(cut, len(data))
    whole = sum(end <= cut for end in ends) - 1
    stream = objects(pieces(data[:cut], size), "some.url", 1 << 20, base)
    places = [(base + start, base + stop) for start, stop in itertools.pairwise(ends)]
    assert list(itertools.islice(stream, whole)) == [
        (sample, *place) for sample, place in zip(samples[:whole], places, strict=False)
    ]
    if cut == ends[whole]:
        assert list(stream) == []
        return
    cut_at = f"some.url: the object at byte {base + ends[whole]} is cut by the end of the file at byte {base + cut};"
    with pytest.raises(TruncatedShard, match=re.escape(cut_at)):
        next(stream)


@both
def test_errors_go_to_the_handler(tmp_path: Path, stage: Any, dumps: Any) -> None:
    good = write(tmp_path / "good", dumps)
    cut = tmp_path / "cut"
    cut.write_bytes(dumps(1) + dumps("abc")[:-1])
    bad = tmp_path / "bad"
    bad.write_bytes(dumps(1) + (b"\x1c" if stage is cbors_to_samples else b"\xc1"))
    missing = str(tmp_path / "missing")
    for path, error, match in (
        (cut, TruncatedShard, f"{cut}.*byte 1 is cut by the end of the file at byte 4"),
        (bad, CorruptShard, f"{bad}.*byte 1 cannot be decoded"),
        (missing, ShardNotFound, missing),
    ):
        urls = [good, str(path), good]
        with pytest.raises(error, match=match):
            list(stage().run(urls))
        before = [] if path == missing else [1]
        assert list(stage(ignore_and_continue).run(urls)) == SAMPLES + before + SAMPLES
        assert list(stage(ignore_and_stop).run(urls)) == SAMPLES + before


def test_a_map_with_a_list_for_a_key_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(msgpack.packb(1) + b"\x81\x91\x01\x02")
    with pytest.raises(CorruptShard, match="byte 1 cannot be decoded: TypeError"):
        list(msgpacks_to_samples().run([str(path)]))


@both
def test_the_size_of_an_object_is_bounded(tmp_path: Path, stage: Any, dumps: Any) -> None:
    url = write(tmp_path / "x", dumps, [1, bytes(9 << 20)])
    samples = stage(max_object_bytes=8 << 20).run([url])
    assert next(samples) == 1
    with pytest.raises(FieldTooLarge, match=r"byte 1 .*max_object_bytes=8388608"):
        next(samples)
    assert list(stage(max_object_bytes=10 << 20).run([url])) == [1, bytes(9 << 20)]


@both
def test_a_length_that_lies_takes_no_memory(tmp_path: Path, stage: Any, dumps: Any) -> None:
    lie = b"\x5b" + b"\x00\x00\x00\x7f" + bytes(4) if stage is cbors_to_samples else b"\xc6\xff\xff\xff\xff"
    path = tmp_path / "x"
    path.write_bytes(lie + bytes(1000))
    with pytest.raises((TruncatedShard, CorruptShard, FieldTooLarge), match="byte 0"):
        list(stage().run([str(path)]))


@both
def test_workers(tmp_path: Path, stage: Any, dumps: Any) -> None:
    urls = [write(tmp_path / str(i), dumps, [{"n": 10 * i + j} for j in range(3)]) for i in range(4)]
    dataset = DataPipeline(SimpleShardList(urls), split_by_worker, stage())
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(sample["n"] for sample in loader) == [10 * i + j for i in range(4) for j in range(3)]
    assert dataset.statistics().samples == 12
    copied = pickle.loads(pickle.dumps(dataset))
    assert [sample["n"] for sample in copied] == [10 * i + j for i in range(4) for j in range(3)]


@both
def test_arguments_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Any, dumps: Any) -> None:
    with pytest.raises(ConfigError):
        stage(transfer={"no_such_field": 1})
    monkeypatch.setitem(sys.modules, "cbor2" if stage is cbors_to_samples else "msgpack", None)
    with pytest.raises(MissingExtra, match=r"wds-async\[formats\]"):
        list(stage().run([write(tmp_path / "x", dumps)]))
