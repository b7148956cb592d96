"""`convert_shards`: MDS, against bytes made by hand and MosaicML Streaming."""

from __future__ import annotations

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from tests.servers import Origin
from tests.tools.converting import JPEG, convert, samples, write_tar
from wds_async import zstd
from wds_async.distributed.reopening import reopened
from wds_async.errors import ConfigError, JobFailed

COLUMNS = {"Label": ("int", 8), "raw": ("bytes", None), "text/en": ("str", None), "u8": ("uint8", 1)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def header(columns: dict[str, tuple[str, int | None]], **more: Any) -> bytes:
    lists = zip(*((name, *rest) for name, rest in columns.items()), strict=True)
    named = zip(("column_names", "column_encodings", "column_sizes"), map(list, lists), strict=True)
    return json.dumps({"version": 2, "format": "mds", **dict(named), **more}).encode()


def mds(head: bytes, *rows: bytes, offsets: list[int] | None = None) -> bytes:
    ends = [4 * (len(rows) + 2) + len(head)]
    for row in rows:
        ends.append(ends[-1] + len(row))
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *(offsets or ends)) + head + b"".join(rows)


def row(number: int, raw: bytes = b"\0\1", text: bytes = b"Hi") -> bytes:
    return struct.pack("<2Iq", len(raw), len(text), number) + raw + text + b"\xff"


def index(*files: str, columns: Any = COLUMNS, **more: Any) -> str:
    shards = [
        {
            **json.loads(header(columns)),
            "samples": 2,
            "raw_data": {"basename": name, "bytes": Path(name).stat().st_size},
        }
        | more
        for name in files
    ]
    return json.dumps({"version": 2, "shards": shards})


@pytest.mark.parametrize("how", [{}, {"typed": True}])
def test_shards_come_back_byte_for_byte(how: Any, here: Path) -> None:
    written = [write_tar(f"in/t-{n}.tar", n + 1) for n in range(2)]
    convert("in/*.tar", "mds/", to="mds", **how)
    listed = json.loads(Path("mds/index.json").read_bytes())["shards"]
    assert [one["raw_data"]["basename"] for one in listed] == ["t-0.mds", "t-1.mds"]
    assert [one["raw_data"]["bytes"] for one in listed] == [Path(f"mds/t-{n}.mds").stat().st_size for n in range(2)]
    kind = ("int", 8) if how else ("bytes", None)
    assert listed[0]["column_names"] == ["__key__", "cls", "jpg", "json", "seg.png", "txt"]
    assert listed[0]["column_encodings"] == ["str", kind[0], "jpeg", "json", "png", "str"]
    assert listed[0]["column_sizes"] == [None, kind[1], None, None, None, None]
    for place in ("mds/", "mds", "mds/index.json"):
        convert(place, f"{place.replace('/', '-')}back/")
        assert [Path(f"{place.replace('/', '-')}back/t-{n}.tar").read_bytes() for n in range(2)] == written


def test_a_file_made_by_hand(here: Path) -> None:
    arrays: dict[str, tuple[str, int | None]] = {
        "free": ("ndarray", None), "typed": ("ndarray:int16", None), "fixed": ("ndarray:float32:1,2", 8),
        "half": ("float16", 2), "big": ("uint64", 8), "digits": ("str_int", None), "image": ("bytes", None),
    }  # fmt: skip
    free, typed = b"\x20\x09\x02\x00\x01\x00" + bytes(8), b"\x04\x01\xff\xff"
    body = [free, typed, struct.pack("<2f", 1, 2), b"\x00\x3c", b"\xff" * 8, b"12", JPEG]
    sizes = [len(body[at]) for at in (0, 1, 5, 6)]
    Path("a.mds").write_bytes(mds(header(arrays), struct.pack("<4I", *sizes) + b"".join(body)))
    convert("a.mds", "out/")
    (sample,) = samples("out/a.tar")
    loaded = {
        name: np.load(io.BytesIO(sample[f"{name}.npy"]), allow_pickle=False) for name in ("free", "typed", "fixed")
    }
    assert (loaded["free"].dtype, loaded["free"].shape) == (np.dtype("<u4"), (2, 1))
    assert (loaded["typed"].dtype, loaded["typed"].tolist()) == (np.dtype("<i2"), [-1])
    assert loaded["fixed"].tolist() == [[1.0, 2.0]]
    assert (sample["half.json"], sample["big.cls"], sample["digits.cls"]) == (b"1.0", str(2**64 - 1).encode(), b"12")
    assert sample["image.jpg"] == JPEG


def test_columns_become_fields_by_their_encoding_or_by_name(here: Path) -> None:
    Path("x.mds").write_bytes(mds(header(COLUMNS), row(-1), row(7)))
    Path("x.mds.gz").write_bytes(gzip.compress(Path("x.mds").read_bytes()))
    Path("y.mds.zstd").write_bytes(zstd.packed([Path("x.mds").read_bytes()]))
    expected = {"label.cls": b"7", "raw.bin": b"\0\1", "text.en.txt": b"Hi", "u8.cls": b"255"}
    for name, file in (("x", "x.mds"), ("x", "x.mds.gz"), ("y", "y.mds.zstd")):
        convert(file, f"{file}-out/")
        assert samples(f"{file}-out/{name}.tar")[1] == {"__key__": f"{name}-00000001", **expected}
    convert("x.mds", "named/", fields={"txt": "text/en", "cls": "Label"}, key="Label")
    assert samples("named/x.tar")[1] == {"__key__": "7", "txt": b"Hi", "cls": b"7"}


def test_pickles_are_refused_and_can_be_left_out(here: Path) -> None:
    Path("p.mds").write_bytes(
        mds(header({"p": ("pkl", None), "q": ("pil", None), "s": ("str", None)}), b"\1\0\0\0" * 3 + b"abc")
    )
    with pytest.raises(JobFailed, match=r"p\.mds: the column 'p' is a pickle, which can run any program .*--field"):
        convert("p.mds", "out/")
    with pytest.raises(JobFailed, match="the column 'q' has the encoding 'pil'; those that are read are bytes, str"):
        convert("p.mds", "q/", fields={"txt": "q"})
    convert("p.mds", "some/", fields={"txt": "s"})
    assert samples("some/p.tar") == [{"__key__": "p-00000000", "txt": b"c"}]


HEAD = header(COLUMNS)
FIRST = 16 + len(HEAD)  # of two rows, each of 21 bytes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1\0", "ends in the number of its samples"),
        (b"<!DOCTYPE html>", "byte 0: 1,329,865,020 samples; the most are 16,777,216; is this file MDS"),
        (struct.pack("<I", 1 << 24) + b"abc", "in the offsets of its 16,777,216 samples: 3 of 67,108,868 bytes"),
        (mds(HEAD, row(0), row(1), offsets=[8, 9, 9]), "byte 4: the first sample would begin at byte 8, in the"),
        (mds(HEAD, row(0), row(1), offsets=[FIRST, FIRST - 1, 0]), rf"byte 8: sample 0 would end at byte {FIRST - 1}"),
        (mds(HEAD, row(0), offsets=[1 << 31, 1 << 31]), "byte 12: a header of 2,147,483,636 bytes; the most are"),
        (mds(HEAD, row(0))[:50], rf"byte 12: the file ends in its header of {len(HEAD)} bytes"),
        (mds(b"[" * 99_999, row(0)), "byte 12: the header, 99,999 bytes, does not describe columns"),
        (mds(HEAD.replace(b"2", b"3", 1), row(0)), "no object with version 2 and format 'mds'"),
        (mds(header({"a": ("int", 4)}), b"abcd"), "the column 'a' of 4 bytes; those of 'int' have 8"),
        (mds(HEAD, row(0), row(1))[:-3], rf"sample 1, at byte {FIRST + 21}: the file ends in its 21 bytes"),
        (mds(HEAD, row(0), row(1)) + b"x", rf"byte {FIRST + 42}: more bytes follow the last sample"),
        (mds(HEAD, row(0), b"\xff" * 21), r"sample 1, at byte \d+: 21 bytes, and by their sizes .* 8,589,934,\d+"),
        (mds(HEAD, b"abc"), r"sample 0, at byte \d+: 3 bytes, which end in the sizes of its 2 columns"),
        (mds(HEAD, row(0), offsets=[12 + len(HEAD), 0xFFFFFFFF]), r"sample 0, at byte \d+: 4,294,967,\d+ bytes;"),
        (mds(header({"a": ("ndarray", None)}), b"\3\0\0\0\x08\xff\xff"), "'a', 3 bytes: it ends in the shape"),
        (mds(header({"a": ("ndarray", None)}), b"\1\0\0\0\x08"), "the column 'a', 1 bytes: "),
        (mds(header({"a": ("ndarray:int8", None)}), b"\6\0\0\0\x06\xff\xff\xff\xff\0"), "for an array of int8 of"),
        (mds(header({"__key__": ("str", None)}), b"\4\0\0\0../x"), r"sample 0, at byte \d+: .*the key '\.\./x' cannot"),
    ],
)  # fmt: skip
def test_damage_is_named_with_file_sample_and_byte(data: bytes, message: str, here: Path) -> None:
    Path("x.mds").write_bytes(data)
    with pytest.raises(JobFailed, match=rf"x\.mds: .*{message}"):
        convert("x.mds", "out/")
    assert not Path("out/x.tar").exists()


def test_the_index_names_files_in_folders_and_compressed_ones_at_any_store(here: Path) -> None:
    Path("x.mds").write_bytes(mds(HEAD, row(1), row(2)))
    packed = gzip.compress(Path("x.mds").read_bytes())
    Path("x.mds.gz").write_bytes(packed)
    text = index("x.mds", zip_data={"basename": "g/x.mds.gz", "bytes": len(packed)})
    with Origin() as server:
        server.add("set/g/x.mds.gz", packed)
        url = server.add("set/index.json", text.encode())
        convert(url.removesuffix("index.json"), "out/")
        assert [one["label.cls"] for one in samples("out/x.tar")] == [b"1", b"2"]
        server.add("set/g/x.mds.gz", packed[:-9])
        with pytest.raises(ConfigError, match=r"set/g/x\.mds\.gz: \d+ bytes, and index\.json lists \d+: it was"):
            convert(url, "cut/")


@pytest.mark.parametrize("name", ["../x.mds", "/x.mds", "s3://b/x.mds", "", 7])
def test_an_index_names_no_files_elsewhere(name: Any, here: Path) -> None:
    Path("x.mds").write_bytes(mds(HEAD))
    Path("index.json").write_text(index("x.mds", raw_data={"basename": name, "bytes": 9}))
    with pytest.raises(ConfigError, match=r"index\.json: .* is no name of a file beside it"):
        convert("index.json", "out/")


def test_several_files_by_size_and_a_job_that_is_opened_again(here: Path) -> None:
    write_tar("t.tar", 5)
    convert("t.tar", "mds/", to="mds", maxcount=2, fields={"cls": "label", "jpg": "jpg"}, typed=True)
    listed = json.loads(Path("mds/index.json").read_bytes())["shards"]
    assert [one["samples"] for one in listed] == [2, 2, 1]
    assert listed[0]["column_names"] == ["__key__", "jpg", "label"]
    assert listed[0]["column_encodings"] == ["str", "jpeg", "int"]
    Path("mds/index.json").unlink()
    Path("mds/_wds/convert/finished.json").unlink()
    reopened("mds/_wds/convert").finish()
    assert len(json.loads(Path("mds/index.json").read_bytes())["shards"]) == 3
    convert("mds", "back/{task}-{name}.tar")
    assert [one["__key__"] for one in samples("back/2-t-002.tar")] == ["ä/4"]


def test_samples_that_do_not_fit_the_first_one(here: Path) -> None:
    write_tar("in/t-0.tar")
    write_tar("in/t-1.tar", new=b"")
    with pytest.raises(JobFailed, match=r"mds/t-1\.mds has the columns .* new \(bytes\).*, and t-0\.mds has .*--field"):
        convert("in/*.tar", "mds/", to="mds")
    assert not Path("mds/index.json").exists()
    for fields, message in (
        ({"txt": b"", "new": b""}, "has the field 'new', which the first one lacks"),
        ({"other": b""}, "has the field 'other', which"),
        ({"txt": b"\xff"}, "the column 'txt' is no str: 'utf-8' codec"),
    ):
        with wds.TarWriter("t.tar") as sink:
            sink.write({"__key__": "0", "txt": b"ab"})
            sink.write({"__key__": "1", **fields})
        with pytest.raises(JobFailed, match=rf"t\.tar: sample '1': .*{message}"):
            convert("t.tar", "x/", to="mds", overwrite=True)
        assert not Path("x/t.mds").exists()


@pytest.mark.parametrize(
    ("name", "output", "how", "message"),
    [
        ("x.mds", "x.tfrecord", {}, "MDS becomes shards; tfrecord is written from shards"),
        ("x.mds.br", "out/", {}, "MDS compressed by br is not read; zstd, gz and bz2 are"),
        ("t.tar", "x.mds.zstd", {}, "names that end in .mds"),
        ("t.tar", "out/", {"to": "mds", "key": "a"}, "key is for new shards"),
        ("t.tar", "out/", {"to": "mds", "fields": {"a": "x", "b": "x"}}, "two of them would be the same"),
        ("t.tar", "out/", {"to": "mds", "fields": {"a": "__key__"}}, "the key is no field"),
        ("t.tar", "used/", {"to": "mds"}, "used/index.json is there already"),
    ],
)
def test_arguments_that_do_not_fit(name: str, output: str, how: Any, message: str, here: Path) -> None:
    Path("used").mkdir()
    for one in ("t.tar", "x.mds", "x.mds.br", "used/index.json"):
        Path(one).touch()
    with pytest.raises(ConfigError, match=message):
        convert(name, output, **how)


def test_mosaicml_streaming_reads_ours_and_writes_what_we_read(here: Path) -> None:
    streaming = pytest.importorskip("streaming")
    image_of = pytest.importorskip("PIL.Image")
    made = io.BytesIO()
    image_of.new("RGB", (9, 7)).save(made, "JPEG")
    for n in range(2):
        with wds.TarWriter(f"in/t-{n}.tar") as sink:
            for m in range(3):
                fields = {"jpg": made.getvalue(), "cls": b"-3", "json": b'{"a": [1]}', "txt": "ü".encode(), "pt": b"\0"}
                sink.write({"__key__": f"{n}/{m}", **fields})
    convert("in/*.tar", "mds/", to="mds", typed=True, maxcount=2)
    dataset = streaming.StreamingDataset(local="mds", shuffle=False, batch_size=1)
    assert [dataset[n]["__key__"] for n in range(len(dataset))] == [f"{n}/{m}" for n in range(2) for m in range(3)]
    first = dataset[0]
    assert first.pop("jpg").size == (9, 7)
    assert first == {"__key__": "0/0", "cls": -3, "json": {"a": [1]}, "txt": "ü", "pt": b"\0"}

    columns = {
        "n": "int",
        "half": "float16",
        "words": "str",
        "array": "ndarray",
        "fixed": "ndarray:int32:2",
        "doc": "json",
    }
    for packed in (None, "gz", "zstd"):
        with streaming.MDSWriter(out=f"theirs-{packed}", columns=columns, compression=packed, size_limit=400) as sink:
            for n in range(4):
                arrays = {"array": np.full((1, 300), n, "uint16"), "fixed": np.array([n, -n], "int32")}
                sink.write({"n": n, "half": np.float16(0.5), "words": "ß", "doc": {"n": n}, **arrays})
        assert len(list(Path(f"theirs-{packed}").glob("*.mds*"))) == 5, "the first file has no samples"
        convert(f"theirs-{packed}", f"ours-{packed}/")
        (sample,) = samples(f"ours-{packed}/shard.00004.tar")
        assert np.load(io.BytesIO(sample.pop("array.npy"))).tolist() == [[3] * 300]
        assert np.load(io.BytesIO(sample.pop("fixed.npy"))).tolist() == [3, -3]
        fields = {"n.cls": b"3", "half.json": b"0.5", "words.txt": "ß".encode(), "doc.json": b'{"n": 3}'}
        assert sample == {"__key__": "shard_00004-00000000", **fields}
