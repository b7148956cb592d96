"""`convert_shards`: chunks of LitData, against bytes made by hand and LitData."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from tests.packages import need_package
from tests.tools.converting import JPEG, convert, samples, write_tar
from wds_async import zstd
from wds_async.errors import ConfigError, JobFailed

LEAF = {"type": None, "context": None, "children_spec": []}
PLAIN = {"Label": "int", "raw": "bytes", "text": "str"}
BATCH = {"compression": "zstd", "compression_level": "batch"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(kind: str, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": json.dumps(context), "children_spec": list(children)}


def write_index(*names: str, formats: dict[str, str] = PLAIN, tree: Any = None, **config: Any) -> None:
    tree = tree or spec("builtins.dict", list(formats), *[LEAF] * len(formats))
    config = {"data_format": list(formats.values()), "data_spec": json.dumps([1, tree]), "compression": None} | config
    chunks = [{"filename": name, "chunk_bytes": 1, "chunk_size": 1, "dim": None} for name in names]
    Path("index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


def item(*leaves: bytes) -> bytes:
    return struct.pack(f"<{len(leaves)}I", *map(len, leaves)) + b"".join(leaves)


def chunk(*rows: bytes, offsets: list[int] | None = None) -> bytes:
    ends = [4 * (len(rows) + 2)]
    for row in rows:
        ends.append(ends[-1] + len(row))
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *(offsets or ends)) + b"".join(rows)


def framed(*rows: bytes, count: int | None = None, in_frame: int = 2) -> bytes:
    """Return a chunk of frames of zstd, as ``framed_zstd`` describes it."""
    groups = [rows[at : at + in_frame] for at in range(0, len(rows), in_frame)]
    packed = [zstd.packed(group) for group in groups]
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    head = struct.pack("<8sHHIII", b"LDFZ01", 1, 0, count or len(rows), in_frame, len(groups))
    return head + struct.pack(f"<{len(ends)}I", *ends) + bytes(24 * len(groups)) + b"".join(packed)


def row(number: int) -> bytes:
    return item(struct.pack("<q", number), b"\0\1", b"Hi")


@pytest.mark.parametrize("how", [{}, {"typed": True}])
def test_shards_come_back_byte_for_byte(how: Any, here: Path) -> None:
    written = [write_tar(f"in/t-{n}.tar", n + 1) for n in range(2)]
    convert("in/*.tar", "chunks/", to="litdata", **how)
    index = json.loads(Path("chunks/index.json").read_bytes())
    assert index["config"]["data_format"] == ["str", "int" if how else "bytes", "bytes", "str", "bytes", "str"]
    assert [(one["filename"], one["chunk_size"]) for one in index["chunks"]] == [("t-0.bin", 1), ("t-1.bin", 2)]
    for place, name in (("chunks/", "a"), ("chunks", "b"), ("chunks/t-*.bin", "c")):
        convert(place, f"{name}/")
        assert [Path(f"{name}/t-{n}.tar").read_bytes() for n in range(2)] == written


@pytest.mark.parametrize("level", ["", "chunk", "sample", "batch"])
def test_a_chunk_made_by_hand(level: str, here: Path) -> None:
    rows = [row(-1), row(2), row(7)]
    data = {
        "": chunk(*rows),
        "chunk": zstd.packed([chunk(*rows)]),
        "sample": chunk(*(zstd.packed([one]) for one in rows)),
        "batch": framed(*rows),
    }[level]
    Path("chunk-0-0.bin").write_bytes(data)
    write_index("chunk-0-0.bin", **({"compression": "zstd:4", "compression_level": level} if level else {}))
    convert("index.json", "out/")
    fields = {"label.cls": b"7", "raw.bin": b"\0\1", "text.txt": b"Hi"}
    assert samples("out/chunk-0-0.tar")[2] == {"__key__": "chunk-0-0-00000002", **fields}
    convert("chunk-*.bin", "named/", fields={"txt": "text", "cls": "Label"}, key="Label")
    assert samples("named/chunk-0-0.tar")[2] == {"__key__": "7", "txt": b"Hi", "cls": b"7"}


def test_leaves_are_named_by_their_path_and_become_fields_by_their_format(here: Path) -> None:
    formats = {
        "image": "jpeg", "a.0": "bool", "a.1": "float", "wav": "audio:wav", "t": "tensor", "n": "numpy",
        "flat": "no_header_tensor:17", "doc": "json", "page": "file", "bad": "pickle",
    }  # fmt: skip
    lists = spec("builtins.list", None, LEAF, LEAF)
    keys = ["image", "a", "wav", "t", "n", "flat", "doc", "page", "bad"]
    write_index("c.bin", formats=formats, tree=spec("builtins.dict", keys, LEAF, lists, *[LEAF] * 7))
    tensor = struct.pack(">4I", 13, 2, 2, 1) + struct.pack("<2h", 1, 2)
    arrays = [tensor, struct.pack("<3I2f", 9, 1, 2, 1, 2), struct.pack("<2q", 5, 6)]
    data = [JPEG, b"\1", struct.pack("<d", 0.5), b"RIFF", *arrays, b'{"a": 1}', b"\0", b"cos"]
    Path("c.bin").write_bytes(chunk(item(*data)))
    with pytest.raises(JobFailed, match=r"c\.bin: the leaf 'bad' is a pickle, which can run any program .*--field"):
        convert("c.bin", "no/")
    named = {name.replace("a.", "a"): name for name in formats if name != "bad"}
    convert("c.bin", "out/", fields=named)
    (sample,) = samples("out/c.tar")
    loaded = {name: np.load(io.BytesIO(sample.pop(name)), allow_pickle=False).tolist() for name in ("t", "n", "flat")}
    assert loaded == {"t": [[1], [2]], "n": [1.0, 2.0], "flat": [5, 6]}
    assert sample == {
        "__key__": "c-00000000", "image": JPEG, "a0": b"1", "a1": b"0.5", "wav": b"RIFF", "doc": b'{"a": 1}',
        "page": b"\0",
    }  # fmt: skip
    write_index(
        "c.bin",
        formats=dict(list(formats.items())[:-1]),
        tree=spec("builtins.dict", keys[:-1], LEAF, lists, *[LEAF] * 6),
    )
    Path("c.bin").write_bytes(chunk(item(*data[:-1])))
    convert("c.bin", "all/")
    assert set(samples("all/c.tar")[0]) == {
        "__key__", "image.jpg", "a.0.cls", "a.1.json", "wav.wav", "t.npy", "n.npy", "flat.npy", "doc.json", "page.bin",
    }  # fmt: skip


def arrow(*rows: dict[str, Any], count: int | None = None, cut: int = 0) -> bytes:
    pa = pytest.importorskip("pyarrow")
    table, sink = pa.Table.from_pylist(list(rows)), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        for at in range(len(rows)):
            writer.write_table(table.slice(at, 1))
    data = sink.getvalue().to_pybytes()
    end = b"" if cut else struct.pack("<I", len(data)) + b"LDARW01\0"
    return chunk(*[b""] * (count or len(rows))) + data[: len(data) - cut] + end


def test_rows_in_the_format_of_arrow(here: Path) -> None:
    need_package("pyarrow")
    write_index("c.bin")
    nested = {"n": 1, "x": 0.5, "yes": True, "s": "ü", "jpg": JPEG, "l": [{"b": None}, {"b": 1}], "none": None}
    Path("c.bin").write_bytes(arrow(nested, nested | {"n": 2, "none": "x"}))
    convert("c.bin", "out/")
    first, second = samples("out/c.tar")
    fields = {"n.cls": b"1", "x.json": b"0.5", "yes.cls": b"1", "s.txt": "ü".encode(), "jpg.jpg": JPEG}
    assert first == {"__key__": "c-00000000", **fields, "l.json": b'[{"b": null}, {"b": 1}]'}
    assert (second["n.cls"], second["none.txt"]) == (b"2", b"x")
    convert("c.bin", "some/", fields={"txt": "s"})
    assert samples("some/c.tar")[1] == {"__key__": "c-00000001", "txt": "ü".encode()}
    offsets = arrow({"s": "x" * 12_345}).rpartition(struct.pack("<2I", 0, 12_345))
    for data, message in (
        (offsets[0] + struct.pack("<2i", 0, -1) + offsets[2], r"sample 0, in the rows of Arrow from byte 12: .*offset"),
        (arrow(nested, count=3), "1 rows of Arrow, and the chunk has 3 items"),
        (arrow(nested, nested, cut=2000), r"sample \d, in the rows of Arrow from byte 16: "),
        (chunk(b"", b""), r"sample 0, in the rows of Arrow from byte 16: "),
        (arrow({"a": [b"x"]}), "the column 'a' has no form in JSON"),
    ):
        Path("c.bin").write_bytes(data)
        with pytest.raises(JobFailed, match=rf"c\.bin: .*{message}"):
            convert("c.bin", "bad/", overwrite=True)


@pytest.mark.parametrize(
    ("data", "config", "message"),
    [
        (b"<!DOCTYPE html>", {}, "byte 0: 1,329,865,020 samples; the most are 16,777,216; is this file a chunk"),
        (chunk(row(1))[:9], {}, "the file ends in the offsets of its 1 samples: 5 of 8 bytes"),
        (chunk(row(1), offsets=[12, 11]), {}, "byte 8: sample 0 would end at byte 11, before it begins at 12"),
        (chunk(row(1), offsets=[13, 40]), {}, "the first sample would begin at byte 13, not 12"),
        (chunk(row(1), row(2))[:-1], {}, "sample 1, at byte 40: the file ends in its 24 bytes"),
        (chunk(row(1), b"\xff" * 24), {}, r"sample 1, at byte 40: 24 bytes, and by their sizes .* 12,884,\d+"),
        (chunk(item(b"1", b"", b"")), {}, "the column 'Label', 1 bytes: "),
        (chunk(row(1)) + b"more", {}, "byte 36: more bytes follow the last item"),
        (chunk(row(1)), BATCH, "byte 0: no chunk of frames of zstd"),
        (framed(row(1))[:20], BATCH, "the file ends in its head"),
        (framed(row(1), count=1 << 31), BATCH, "byte 12: 2,147,483,648 samp"),
        (framed(row(1))[:40], BATCH, "the list of its 1 frames"),
        (framed(row(1))[:-2], BATCH, "zstd stream ends early"),
        (framed(row(1))[:56] + b"none", BATCH, "byte 56: no frame of zstd"),
        (chunk(b"\x28\xb5\x2f\xfdx"), BATCH | {"compression_level": "sample"}, "bytes that are no zstd"),
    ],
)  # fmt: skip
def test_damage_is_named_with_file_sample_and_byte(data: bytes, config: Any, message: str, here: Path) -> None:
    Path("x.bin").write_bytes(data)
    write_index("x.bin", **config)
    with pytest.raises(JobFailed, match=rf"x\.bin: .*{message}"):
        convert("x.bin", "out/")
    assert not Path("out/x.tar").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"encryption": {"level": "chunk"}}, "encrypted"),
        ({"item_loader": "TokensLoader"}, "another loader than PyTreeLoader"),
        ({"compression": "lz4"}, "compressed by 'lz4'"),
        ({"tree": spec("collections.deque", None, LEAF)}, "items of the type 'collections.deque'"),
        ({"tree": spec("builtins.dict", ["a"], LEAF)}, "1 names and 3 formats of leaves"),
        ({"data_spec": None}, "TypeError"),
        ({"name": "../x.bin"}, "is no name of a file beside it"),
    ],
)
def test_indexes_that_cannot_be_read(config: dict[str, Any], message: str, here: Path) -> None:
    Path("x.bin").write_bytes(chunk(row(1)))
    write_index(config.pop("name", "x.bin"), **config)
    with pytest.raises(ConfigError, match=rf"index\.json: .*{message}"):
        convert("index.json", "out/")
    Path("index.json").unlink()
    with pytest.raises(ConfigError, match=r"x\.bin: no index\.json of LitData beside it says what is in this file"):
        convert("x.bin", "out/")


def test_litdata_reads_ours_and_writes_what_we_read(here: Path) -> None:
    litdata = pytest.importorskip("litdata")
    writer = pytest.importorskip("litdata.streaming.writer")
    for n in range(2):
        with wds.TarWriter(f"in/t-{n}.tar") as sink:
            for m in range(3):
                fields = {"jpg": JPEG, "cls": b"-3", "json": b'{"a": [1]}', "txt": "ü".encode(), "empty": b""}
                sink.write({"__key__": f"{n}/{m}", **fields})
    convert("in/*.tar", "chunks/", to="litdata", typed=True, maxcount=2)
    dataset = litdata.StreamingDataset("chunks", shuffle=False)
    assert [one["__key__"] for one in dataset] == [f"{n}/{m}" for n in range(2) for m in range(3)]
    expected = {"__key__": "1/2", "cls": -3, "json": '{"a": [1]}', "txt": "ü", "jpg": JPEG, "empty": b""}
    assert dataset[5] == expected

    for level in (None, "chunk", "batch", "sample"):
        folder = f"theirs-{level}"
        sink = writer.BinaryWriter(folder, chunk_size=2, compression=level and "zstd", compression_level=level)
        for n in range(3):
            sink[n] = {"n": n, "x": {"y": 0.5, "s": "ß"}, "array": np.full((2, 1), n, "int16"), "yes": True}
        sink.done()
        sink.merge()
        convert(folder, f"ours-{level}/")
        (sample,) = samples(f"ours-{level}/chunk-0-1.tar")
        assert np.load(io.BytesIO(sample.pop("array.npy"))).tolist() == [[2], [2]]
        fields = {"n.cls": b"2", "x.y.json": b"0.5", "x.s.txt": "ß".encode(), "yes.cls": b"1"}
        assert sample == {"__key__": "chunk-0-1-00000000", **fields}
    for packed in (None, "zstd"):
        sink = writer.BinaryWriter(f"rows-{packed}", chunk_size=300, compression=packed)
        for n in range(600):
            sink[n] = {"n": n, "words": "ß" * n, "l": [1.5] * n}
        sink.done()
        sink.merge()
        convert(f"rows-{packed}", f"tars-{packed}/")
        last = samples(f"tars-{packed}/chunk-0-1.tar")[299]
        assert (last["n.cls"], last["words.txt"]) == (b"599", "ß".encode() * 599)
        assert json.loads(last["l.json"]) == [1.5] * 599
