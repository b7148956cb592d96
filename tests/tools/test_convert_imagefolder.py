"""`convert_shards` to a folder of images with ``metadata.jsonl``, which Hugging Face reads, and back by `create`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from tests.packages import need_package
from tests.servers.moto import clean_aws, empty_bucket, moto
from wds_async.errors import ConfigError, JobFailed
from wds_async.tools.convert import convert_shards
from wds_async.tools.create import create_shards
from wds_async.tools.create.tables import TableColumns

__all__ = ["clean_aws", "moto"]

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(inputs: Any, output: str, **how: Any) -> Any:
    return convert_shards(inputs, output, engine=InlineEngine(), attempts=1, **how).run()


def write(name: str, *samples: dict[str, Any]) -> None:
    with wds.TarWriter(name, mtime=0) as sink:
        for sample in samples:
            sink.write(sample)


def image(number: int, kind: str = "png") -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (8, 9), (number, 0, 0)).save(data, kind)
    return data.getvalue()


def make(shards: int = 2, samples: int = 4) -> None:
    for s in range(shards):
        rows = [
            {
                "__key__": f"ä b/{s}-{n}",
                "jpg": image(n, "jpeg"),
                "a.png": image(n),
                "cls": n % 3,
                "txt": f"ü {n}",
                "json": {"w": n},
            }
            for n in range(samples)
        ]
        write(f"in/t-{s}.tar", *rows)


def test_hugging_face_reads_it_and_create_makes_the_same_shards_of_it() -> None:
    need_package("datasets")
    from datasets import load_dataset

    make()
    convert("in/*.tar", "out/", to="imagefolder")
    theirs = load_dataset("imagefolder", data_dir="out", split="train", cache_dir="cache")
    ours = list(wds.WebDataset("in/*.tar", shardshuffle=False).decode("pil"))
    assert sorted(theirs.column_names) == sorted(["image", "a.png", "__key__", "cls", "txt", "json"])
    rows = sorted(theirs, key=lambda row: row["__key__"])  # they come in any order of the files
    for row, sample in zip(rows, ours, strict=True):
        assert [row[name] for name in ("__key__", "cls", "txt", "json")] == [
            sample[name] for name in ("__key__", "cls", "txt", "json")
        ]
        assert row["image"].tobytes() == sample["jpg"].tobytes()
        assert row["a.png"].tobytes() == sample["a.png"].tobytes()
    back = create_shards(
        "out/*/metadata.jsonl",
        "back-{000000..}.tar",
        columns=TableColumns(
            key="__key__",
            fields={"cls": "cls", "txt": "txt", "json": "json"},
            files={"jpg": "file_name", "a.png": "a.png_file_name"},
        ),
        maxcount=4,
        engine=InlineEngine(),
    )
    back.run()
    for n in range(2):
        assert Path(f"back-00000{n}.tar").read_bytes() == Path(f"in/t-{n}.tar").read_bytes()


def test_chosen_fields_have_the_names_of_their_columns() -> None:
    write("a.tar", {"__key__": "x", "png": PNG, "cls": "7", "npy": b"\xff"})
    summary = convert("a.tar", "out/", to="imagefolder", fields={"png": "png", "cls": "label"})
    assert Path("out/a/x.png").read_bytes() == PNG
    assert summary.bytes_out == len(PNG) + Path("out/a/metadata.jsonl").stat().st_size
    assert json.loads(Path("out/a/metadata.jsonl").read_text()) == {"file_name": "x.png", "__key__": "x", "label": 7}


def test_to_a_bucket(moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    client = empty_bucket(moto, clean_aws)
    write("a.tar", *({"__key__": f"{n:03d}", "png": PNG + bytes([n])} for n in range(100)))
    convert("a.tar", "s3://bucket/out/", to="imagefolder")
    found = {one["Key"] for one in client.list_objects_v2(Bucket="bucket")["Contents"]}
    assert {f"out/a/{n:03d}.png" for n in range(100)} < found
    lines = client.get_object(Bucket="bucket", Key="out/a/metadata.jsonl")["Body"].read().splitlines()
    assert [json.loads(line)["file_name"] for line in lines] == [f"{n:03d}.png" for n in range(100)]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"__key__": "../up", "png": PNG}, "no path below a folder"),
        ({"__key__": "/etc/x", "png": PNG}, "no path below a folder"),
        ({"__key__": "x", "cls": "1"}, "no image among its fields"),
        ({"__key__": "x", "png": PNG, "npy": b"\xff\xfe"}, "'npy' is neither an image"),
        ({"__key__": "x", "png": PNG, "json": b"{"}, "'json' is neither an image"),
    ],
)
def test_what_cannot_be_written_names_the_sample(sample: dict[str, Any], message: str, here: Path) -> None:
    write("a.tar", sample)
    with pytest.raises(JobFailed, match=message) as caught:
        convert("a.tar", "out/", to="imagefolder")
    assert repr(sample["__key__"]) in str(caught.value)
    assert not list(here.glob("out/**/metadata.jsonl"))


@pytest.mark.filterwarnings("ignore:.*the key 'x' returns")
def test_a_key_that_is_there_twice() -> None:
    write("a.tar", {"__key__": "x", "png": PNG}, {"__key__": "y", "png": PNG}, {"__key__": "x", "png": PNG})
    with pytest.raises(JobFailed, match="its key is there twice"):
        convert("a.tar", "out/", to="imagefolder")


def test_the_output_is_a_folder() -> None:
    write("a.tar", {"__key__": "x", "png": PNG})
    with pytest.raises(ConfigError, match="a folder, with a slash"):
        convert("a.tar", "out-{name}.zip", to="imagefolder")
