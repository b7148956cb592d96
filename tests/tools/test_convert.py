"""`convert_shards`: TFRecord and Parquet, against bytes made by hand, TensorFlow and pyarrow."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from tests.packages import need_package
from tests.servers import Origin
from wds_async.distributed.reopening import reopened
from wds_async.errors import ConfigError, JobFailed
from wds_async.tools.convert import convert_shards
from wds_async.tools.convert.tfrecord import Values, framed, message_of

JPEG = b"\xff\xd8\xff" + bytes(range(256)) * 300


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(inputs: Any, output: str, **how: Any) -> Any:
    return convert_shards(inputs, output, engine=InlineEngine(), attempts=1, **how).run()


def write_tar(name: str, samples: int = 5) -> bytes:
    with wds.TarWriter(name, mtime=0) as sink:
        for n in range(samples):
            sink.write({"__key__": f"ä/{n}", "jpg": JPEG, "cls": str(n - 2).encode(), "seg.png": b"x", "txt": b""})
    return Path(name).read_bytes()


def write_records(name: str, *examples: dict[str, Values]) -> None:
    Path(name).write_bytes(b"".join(framed(message_of(one)) for one in examples))


def samples(name: str) -> list[dict[str, Any]]:
    return [dict(one) for one in wds.WebDataset(name, shardshuffle=False)]


@pytest.mark.parametrize("how", [{}, {"typed": True}])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_shards_come_back_from_tfrecord_byte_for_byte(how: Any, suffix: str, here: Path) -> None:
    written = [write_tar(f"in/t-{n}.tar", n + 1) for n in range(2)]
    convert("in/*.tar", f"tf/{{name}}.tfrecord{suffix}", **how)
    convert(f"tf/*.tfrecord{suffix}", "back/")
    assert [Path(f"back/t-{n}.tar").read_bytes() for n in range(2)] == written


def test_a_record_made_by_hand(here: Path) -> None:
    """The bytes of the CRC-32C's specification (RFC 3720: 32 zeros give 8a9136aa) stand for the checksum."""
    zeros = bytes(32)
    crc = 0x8A9136AA
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert framed(zeros)[12:] == zeros + struct.pack("<I", masked)
    entry = [
        bytes.fromhex("0a0169 1204 1a02 0801".replace(" ", "")),
        bytes.fromhex("0a016e 1208 1a06 0a04 7f8001 05".replace(" ", "")),
        bytes.fromhex("0a0166 120c 120a 0d0000803f 0d00000040".replace(" ", "")),
        bytes.fromhex("0a0170 120c 120a 0a08 0000803f 00000040".replace(" ", "")),
        bytes.fromhex("0a016d 120d 1a0b 08 ffffffffffffffffff01".replace(" ", "")),
    ]
    features = b"".join(b"\x0a" + bytes([len(one)]) + one for one in entry)
    Path("hand.tfrecord").write_bytes(framed(b"\x0a" + bytes([len(features)]) + features))
    convert("hand.tfrecord", "out/")
    (sample,) = samples("out/hand.tar")
    assert sample["__key__"] == "hand-00000000"
    assert (sample["i.cls"], sample["m.cls"]) == (b"1", b"-1")
    assert json.loads(sample["n.json"]) == [127, 128, 5]
    assert json.loads(sample["f.json"]) == json.loads(sample["p.json"]) == [1.0, 2.0]


def test_features_become_fields_by_what_they_hold_or_by_name(here: Path) -> None:
    image: dict[str, Values] = {
        "image/encoded": ("bytes", [JPEG]),
        "image/class/label": ("int64", [7]),
        "Image/Text": ("bytes", ["Hünd".encode()]),
        "raw": ("bytes", [b"\0\xff"]),
        "words": ("bytes", [b"a", b"b"]),
        "box": ("float", [0.5]),
        "none": ("int64", []),
        "file": ("bytes", [b"n01/n01_1.JPEG"]),
    }
    write_records("t.tfrecord-00000-of-00001", image)
    convert("t.tfrecord-*", "out/{name}.tar")
    (sample,) = samples("out/t-00000-of-00001.tar")
    fields = {name: value for name, value in sample.items() if not name.startswith("__")}
    assert fields == {
        "image.encoded.jpg": JPEG, "image.class.label.cls": b"7", "image.text.txt": "Hünd".encode(),
        "raw.bin": b"\0\xff", "words.json": b'["a", "b"]', "box.json": b"[0.5]", "file.txt": b"n01/n01_1.JPEG",
    }  # fmt: skip
    convert("t.tfrecord-*", "two/x.tar", fields={"jpg": "image/encoded", "cls": "image/class/label"}, key="file")
    (sample,) = samples("two/x.tar")
    assert (sample["__key__"], sample["jpg"], sample["cls"]) == ("n01/n01_1_JPEG", JPEG, b"7")
    assert "raw.bin" not in sample


def damaged(kind: str) -> bytes:
    good = framed(message_of({"a": ("bytes", [JPEG])}))
    match kind:
        case "cut":
            return good + good[:-3]
        case "cut in the length":
            return good + good[:7]
        case "flipped":
            return good + good[:500] + b"?" + good[501:]
        case "no records":
            return b"<!DOCTYPE html>" * 9
        case "absurd":
            return good + framed_length(1 << 60)
        case "sequence":
            return framed(b"\x12\x00")
        case "no protobuf":
            return framed(b"\x0a\x7fabc")
        case _:
            return framed(message_of({"__key__": ("bytes", [b"../x"]), "a": ("bytes", [b""])}))


def framed_length(size: int) -> bytes:
    return struct.pack("<Q", size) + framed(struct.pack("<Q", size))[-4:]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", r"x\.tfrecord: record 1, at byte 76,8\d\d: the file ends in its 76,8\d\d bytes of data"),
        ("cut in the length", r"record 1, at byte 76,8\d\d: the file ends in the record's length"),
        ("flipped", r"record 1, at byte 76,8\d\d: the checksum of its 76,8\d\d bytes does not match"),
        ("no records", "record 0, at byte 0: the checksum of its length does not match; is this file TFRecord"),
        ("absurd", r"record 1, at byte 76,8\d\d: 1,152,921,504,606,846,976 bytes; the most are 1,073,741,824"),
        ("sequence", "record at byte 0: a SequenceExample"),
        ("no protobuf", r"record at byte 0: field 1 of 127 bytes, of which 3 are there \(at byte 12\)"),
        ("key", r"record 0, at byte 0: .*the key '\.\./x' cannot be used"),
    ],
)
def test_damage_is_named_with_file_and_byte(kind: str, message: str, here: Path) -> None:
    Path("x.tfrecord").write_bytes(damaged(kind))
    with pytest.raises(JobFailed, match=message):
        convert("x.tfrecord", "out/")
    assert not Path("out/x.tar").exists()


def test_parquet_is_read_by_pyarrow_and_has_row_groups_by_size(here: Path) -> None:
    need_package("pyarrow")
    import pyarrow.parquet as pq

    write_tar("in/t.tar")
    convert("in/t.tar", "out/", to="parquet", row_group=2 * len(JPEG))
    table = pq.read_table("out/t.parquet")
    assert [str(one.type) for one in table.schema] == ["string", *["binary"] * 4]
    assert table.column_names == ["__key__", "cls", "jpg", "seg.png", "txt"]
    assert table.to_pylist()[4] == {"__key__": "ä/4", "cls": b"2", "jpg": JPEG, "seg.png": b"x", "txt": b""}
    assert pq.ParquetFile("out/t.parquet").num_row_groups == 3
    convert("in/t.tar", "some/t.parquet", fields={"cls": "cls", "mask": "mask"})
    assert pq.read_table("some/t.parquet").to_pylist()[0] == {"__key__": "ä/0", "cls": b"-2", "mask": None}


def test_a_field_that_comes_behind_the_first_row_group_is_an_error(here: Path) -> None:
    need_package("pyarrow")
    with wds.TarWriter("t.tar") as sink:
        sink.write({"__key__": "0", "txt": b"ab"})
        sink.write({"__key__": "1", "txt": b"ab", "new": b""})
    with pytest.raises(
        JobFailed, match="the sample '1' has the field 'new', and the columns were written already: txt"
    ):
        convert("t.tar", "out/t.parquet", row_group=1)
    assert not Path("out/t.parquet").exists()


def test_records_come_from_any_store_and_a_job_is_opened_again(here: Path) -> None:
    write_tar("t.tar")
    convert("t.tar", "t.tfrecord")
    with Origin() as server:
        convert(server.add("t.tfrecord", Path("t.tfrecord").read_bytes()), "out/")
    assert Path("out/t.tar").read_bytes() == Path("t.tar").read_bytes()
    convert_shards("t.tar", "later/", to="tfrecord", engine=InlineEngine())
    assert not Path("later").exists()
    assert reopened("out/_wds/convert").folder.contents().complete


@pytest.mark.parametrize(
    ("name", "output", "how", "message"),
    [
        ("t.tar", "out/", {}, "the new format, one of"),
        ("t.tar", "x.tar", {}, "a shard already"),
        ("t.parquet", "out/", {}, "wds-async create"),
        ("t.tfrecord", "x.parquet", {}, "TFRecord becomes shards"),
        ("t.tar", "x.tfrecord", {"key": "a"}, "for new shards"),
        ("t.tfrecord", "out/", {"typed": True}, "is for TFRecord"),
        ("t.tfrecord", "out/", {"fields": {"../x": "a"}}, r"the field '\.\./x'"),
        ("t.tar", "x.tfrecord.zst", {}, "compressed by gzip"),
        ("{t,u}.tar", "x.tfrecord", {}, "would write the same file"),
        ("{t,sub/t}.tar", "out/", {"to": "tfrecord"}, "would become the same file out/t.tfrecord"),
    ],
)
def test_arguments_that_do_not_fit(name: str, output: str, how: Any, message: str, here: Path) -> None:
    Path("sub").mkdir()
    for one in ("sub/t.tar", "t.tar", "u.tar", "t.parquet", "t.tfrecord"):
        Path(one).touch()
    with pytest.raises(ConfigError, match=message):
        convert(name, output, **how)


def test_tensorflow_reads_ours_and_writes_what_we_read(here: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    write_tar("t.tar")
    convert("t.tar", "t.tfrecord", typed=True)
    for number, record in enumerate(tf.data.TFRecordDataset("t.tfrecord")):
        found = tf.io.parse_single_example(
            record, {"jpg": tf.io.FixedLenFeature([], tf.string), "cls": tf.io.FixedLenFeature([], tf.int64)}
        )
        assert (found["jpg"].numpy(), found["cls"].numpy()) == (JPEG, number - 2)
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[-5]))
    with tf.io.TFRecordWriter("theirs.tfrecord") as sink:
        sink.write(tf.train.Example(features=tf.train.Features(feature={"a": feature})).SerializeToString())
    convert("theirs.tfrecord", "theirs/")
    assert samples("theirs/theirs.tar")[0]["a.cls"] == b"-5"
