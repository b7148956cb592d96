"""`create_shards`: shards of folders, tables and recipes, against `tar`, torchvision's rule and tarp's documents."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from tests.servers import Origin
from tests.servers.moto import clean_aws, empty_bucket, moto
from wds_async.distributed.engines.rank import RankEngine
from wds_async.distributed.reopening import reopened
from wds_async.errors import ConfigError, JobChanged, JobFailed, ShardNotFound, UnsafeContent
from wds_async.tools.create import TableColumns, create_shards

__all__ = ["clean_aws", "moto"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin() as server:
        yield server


def written(files: dict[str, bytes | str], folder: str = "in") -> str:
    """Write files below ``folder``, and return it."""
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def made(source: str, output: str = "out", **arguments: Any) -> Any:
    """Run the job, and return its summary."""
    return create_shards(source, output, engine=InlineEngine(), **arguments).run()


def samples(urls: str | list[Path]) -> list[dict[str, Any]]:
    dataset = wds.WebDataset(urls, shardshuffle=False)
    return [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in dataset
    ]


def members(name: str | Path) -> dict[str, bytes]:
    with tarfile.open(name) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar if one.isfile()}  # type: ignore[union-attr]


def bytes_of(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).glob("*")) if path.is_file()}


def test_a_folder_gives_the_samples_that_tar_makes_of_it() -> None:
    names = ["a/b.jpg", "a/b.seg.png", "a/b.txt", "a/ü 1.jpg", "a.dir/x.jpg", "a-b/x.JPG", "new\nline.txt", "empty.txt"]
    names.append(f"{'long' * 30}/{'name' * 30}.txt")
    source = written({name: b"" if name == "empty.txt" else name.encode() * 100 for name in names})
    subprocess.run(["tar", "--sort=name", "-cf", "../tar.tar", "."], cwd=source, check=True)
    written({".hidden.txt": "x", ".git/config.txt": "x", "README": "x", "__meta__/x.txt": "x"})
    job = create_shards(source, "out", engine=InlineEngine())
    assert {reason.partition(" ")[0]: count for reason, count in job.plan.store.counts.passed_over.items()} == {
        "hidden": 2, "without": 1, "below": 1
    }  # fmt: skip
    job.run()
    theirs = {name.removeprefix("./"): data for name, data in members("tar.tar").items()}
    ours = members("out/000000.tar")
    assert {name.replace("x.JPG", "x.jpg"): data for name, data in theirs.items()} == ours
    assert len(samples("out/000000.tar")) == 7
    assert not Path("out/_wds/create/plan").exists()


def test_an_image_folder_has_torchvisions_labels() -> None:
    names = ["n2/z.JPEG", "n10/a.v1.png", "n10/deep/b.webp", "Z/c.bmp", "Z/notes.txt", "beside.jpg"]
    source = written({name: name for name in names})
    classes = sorted(entry.name for entry in os.scandir(source) if entry.is_dir())  # torchvision's find_classes
    made(source, "out/train-{000000..}.tar", imagefolder=True)
    assert json.loads(Path("out/classes.json").read_text()) == classes == ["Z", "n10", "n2"]
    got = {sample["__key__"]: int(sample["cls"]) for sample in samples("out/train-000000.tar")}
    assert got == {"Z/c": 0, "n10/a_v1": 1, "n10/deep/b": 1, "n2/z": 2}
    Path("in/none").mkdir()
    with pytest.raises(ConfigError, match="'none' holds no image"):
        made(source, "other", imagefolder=True)
    # A validation set with fewer classes would have other labels beside the same list.
    val = written({"n2/v.jpg": "v"}, "val")
    with pytest.raises(ConfigError, match="other classes"):
        made(val, "out/val-{000000..}.tar", imagefolder=True)
    made(val, "out/val-{000000..}.tar", imagefolder=True, classes="out/classes.json")
    assert samples("out/val-000000.tar")[0]["cls"] == b"2"
    with pytest.raises(ConfigError, match=r"'n10/a.png' and 'n10/a.jpg'|'n10/a.jpg' and 'n10/a.png'|n10/a"):
        made(written({"n10/a.jpg": "x", "n10/a.jpeg": "x", "n10/a.JPG": "x"}, "twice"), "t", imagefolder=True)


def test_tarps_recipes() -> None:
    # The recipe of tarp's own test, and the one of its README: classes of folders as text.
    Path("plan").write_text("./a.txt /dev/null\na.more.txt text:more\nb.txt pipe:echo b\nb.more.txt text:more2\n")
    made("plan", "plan.tar", allow_pipe=True)
    assert members("plan.tar") == {"a.more.txt": b"more", "a.txt": b"", "b.more.txt": b"more2", "b.txt": b"b\n"}
    source = written({"cat/x.png": b"\x89", "dog/y.png": b"\x90"})
    lines = [f"{n}.txt text:{c}\n{n}.png\tfile:{source}/{c}/{n}.png\n" for c, n in (("cat", "x"), ("dog", "y"))]
    Path("readme").write_text("".join(sorted("".join(lines).splitlines(keepends=True))))
    made("readme", "readme-{000000..}.tar", maxcount=1)
    assert [samples(f"readme-00000{n}.tar")[0] for n in (0, 1)] == [
        {"__key__": "x", "png": b"\x89", "txt": b"cat"}, {"__key__": "y", "png": b"\x90", "txt": b"dog"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("../up.txt text:x", "leads out of the folder"),
        ("/etc/x.txt text:x", "begins with '/'"),
        ("a//b.txt text:x", "empty component"),
        ("noextension text:x", "no extension"),
        ("-rf.txt", "is no name of a member"),
        ("a.txt text:1\nb.txt text:2\na.txt text:3", "line 1 and plan, line 3 give the same key 'a'"),
        ("a.txt text:1\na.TXT text:2", "field 'txt' twice"),
        ("a.txt nonsense://x", "nonsense"),
        ("__x__/a.txt text:1", "describe the shard"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_line(line: str, error: str) -> None:
    Path("plan").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=error):
        create_shards("plan", "out")
    assert not Path("out").exists()


def test_commands_and_files_of_others_are_refused(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in ("a.txt pipe:touch pwned", "a.txt /etc/passwd", "a.txt file:/etc/passwd"):
        with pytest.raises(UnsafeContent):
            create_shards(origin.add("recipe", recipe.encode()), "out", format="recipe", allow_pipe=True)
    for header, value in (("file:txt", "/etc/passwd"), ("file:txt", "pipe:touch pwned"), ("url:txt", "pipe:id")):
        with pytest.raises(UnsafeContent):
            create_shards(origin.add("table.csv", f"{header}\n{value}\n".encode()), "out")
    Path("plan").write_text("a.txt pipe:touch pwned\n")
    for secure in ("", "1"):
        monkeypatch.setenv("WDS_SECURE", secure)
        with pytest.raises((UnsafeContent, ConfigError, ValueError, OSError)):
            create_shards("plan", "out", allow_pipe=secure == "1")
    assert not Path("pwned").exists()


def test_columns_become_fields() -> None:
    written({"x.jpg": b"\xff", "y.jpg": b"\xfe"}, "img")
    with open("t.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["name", "label.cls", "caption.txt", "file:jpg"])
        rows.writerows([["a/1.x", 3, 'two\nlines, "ü"', "img/x.jpg"], ["b", 4, "", "img/y.jpg"]])
    made("t.csv", columns=TableColumns(key="name"))
    assert samples("out/000000.tar") == [
        {"__key__": "a/1_x", "cls": b"3", "jpg": b"\xff", "txt": 'two\nlines, "ü"'.encode()},
        {"__key__": "b", "cls": b"4", "jpg": b"\xfe", "txt": b""},
    ]
    line = json.dumps({"l": True, "w": 3, "h": None, "m": {"a": [1]}, "p": "x.jpg"})
    Path("img/t.jsonl").write_text(f"{line}\n\n{line}\n")
    columns = TableColumns({"cls": "l", "m.json": "m"}, {"jpg": "p"}, {}, {"size": ["w", "h"], "all.json": ["*"]})
    made("img/t.jsonl", "jsonl", columns=columns)
    with pytest.raises(ConfigError, match="there is no column 'typo'"):
        create_shards("img/t.jsonl", "x", columns=TableColumns({"cls": "l", "txt": "typo"}))
    first, second = samples("jsonl/000000.tar")
    assert (first.pop("__key__"), second.pop("__key__")) == ("000000000", "000000001")
    assert first == second
    size, rest = json.loads(first.pop("size.json")), json.loads(first.pop("all.json"))
    assert (size, rest) == ({"w": 3, "h": None}, {})
    assert first == {"cls": b"1", "m.json": b'{"a": [1]}', "jpg": b"\xff"}


def test_parquet_with_images_in_it() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"image": [{"bytes": b"\1\0"}, {"bytes": b"\2"}], "n": [1, None]}), "t.parquet")
    made("t.parquet", columns=TableColumns({"jpg": "image.bytes", "cls": "n"}))
    assert samples("out/000000.tar") == [
        {"__key__": "000000000", "jpg": b"\1\0", "cls": b"1"}, {"__key__": "000000001", "jpg": b"\2"}
    ]  # fmt: skip
    whole = Path("t.parquet").read_bytes()
    Path("page.parquet").write_bytes(whole[:10] + b"\xff" * 20 + whole[30:])
    with pytest.raises(ConfigError, match=r"page\.parquet, behind row 0"):
        create_shards("page.parquet", "x")
    Path("bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"bad\.parquet"):
        create_shards("bad.parquet", "x")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("t.csv", "", "t.csv, line 1: it is empty"),
        ("t.csv", "a,b\n1\n", r"row 1 \(line 2\): 1 cells, where the header has 2"),
        ("t.csv", "a,a\n1,2\n", "a column has the name of another one"),
        ("t.csv", 'a\n"x\n', "unexpected end of data|no csv"),
        ("t.csv", "a.txt\n\xff\n", "no csv that can be read"),
        ("t.csv", "txt\n", "holds no sample"),
        ("t.tsv", "x.cls\ty.cls\n1\t2\n", "two columns give the field 'cls'"),
        ("t.csv", "A\n1\n", "lower case"),
        ("t.csv", "url:jpg\nno/url.jpg\n", "row 1, column 'url:jpg': 'no/url.jpg' is no URL"),
        ("t.csv", "file:jpg\n\n,\n", "cells"),
        ("t.jsonl", "{\n", "line 1: not valid JSON"),
        ("t.jsonl", "[1]\n", "line 1: list; each line is an object"),
    ],
)
def test_a_bad_table_is_refused_with_its_row(name: str, text: str, error: str) -> None:
    Path(name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=error):
        create_shards(name, "out")


def test_urls_of_a_table_are_fetched_with_their_faults(origin: Origin) -> None:
    urls = [origin.add(f"{n:02d}.jpg", bytes([n]) * 5000) for n in range(40)]
    origin.behave(path="/03.jpg", status=503, times=2)
    origin.behave(path="/04.jpg", delay_s=0.3)
    origin.behave(path="/05.jpg", redirect="/06.jpg")
    origin.behave(path="/07.jpg", cut_after=1000, times=1)
    Path("t.csv").write_text("url:jpg,cls\n" + "".join(f"{url},{n}\n" for n, url in enumerate(urls)))
    made("t.csv", "good-{000000..}.tar", maxcount=25)
    got = samples("good-{000000..000001}.tar")
    wanted = [6 if n == 5 else n for n in range(40)]
    assert [sample["jpg"] for sample in got] == [bytes([n]) * 5000 for n in wanted]
    assert origin.most_in_flight > 4
    # One that is missing fails at once with its row, and can be left out in a second try, which keeps what is done.
    origin.behave(path="/30.jpg", status=404)
    origin.behave(path="/31.jpg", status=403)
    with pytest.raises(JobFailed, match=r"t\.csv, row 31: the field 'jpg' of the sample '000000030': http.*30\.jpg"):
        made("t.csv", "bad-{000000..}.tar", maxcount=25)
    assert Path("bad-000000.tar").exists()
    assert not Path("bad-000001.tar").exists()
    summary = made("t.csv", "bad-{000000..}.tar", maxcount=25, skip_errors=True)
    assert (summary.before, summary.done, summary.skipped) == (1, 1, 2)
    assert [int(sample["cls"]) for sample in samples("bad-{000000..000001}.tar")] == [*range(30), *range(32, 40)]
    ledger = [json.loads(line) for line in Path("create-bad-errors.jsonl").read_text().splitlines()]
    assert [(one["row"], one["key"], one["url"]) for one in ledger] == [
        (f"t.csv, row {n + 1}", f"{n:09d}", urls[n]) for n in (30, 31)
    ]
    assert "404" in ledger[0]["error"]
    # Cells that are no URLs are errors of their rows too; a shard of errors alone is not there.
    Path("t.csv").write_text(f'url:jpg\n{urls[0]}\n{urls[1]}\nhtp://x/y\n""\n')
    with pytest.raises(ConfigError, match="row 3, column 'url:jpg': htp://x/y"):
        create_shards("t.csv", "cells/{000000..}.tar")
    assert made("t.csv", "cells/{000000..}.tar", maxcount=2, skip_errors=True).skipped == 2
    assert [*bytes_of("cells")] == ["cells/000000.tar", "cells/create-errors.jsonl"]


def test_the_bytes_depend_on_source_and_seed_alone() -> None:
    source = written({f"{n % 3}/{n:03d}.bin": os.urandom(200) for n in range(60)})
    made(source, "a/x-{000000..}.tar", maxsize=2000, shuffle=3, index=True)
    made(source, "b/x-{000000..}.tar", maxsize=2000, shuffle=3, index=True, workers=2)
    assert [*map(os.path.basename, bytes_of("a"))] == [f"x-{n:06d}.{kind}" for n in range(6) for kind in ("idx", "tar")]
    assert list(bytes_of("a").values()) == list(bytes_of("b").values())
    made(source, "c/x-{000005..000008}.tar", shuffle=4)
    keys = [sample["__key__"] for sample in samples("c/x-{000005..000008}.tar")]
    assert sorted(keys) == sorted(f"{n % 3}/{n:03d}" for n in range(60)) != keys
    assert [len(members(f"c/x-00000{n}.tar")) for n in range(5, 9)] == [15] * 4


def test_a_source_that_changes_is_another_job() -> None:
    source = written({f"{n}.txt": str(n) for n in range(4)})
    job = create_shards(source, "out/{000000..}.tar", maxcount=1, engine=InlineEngine())
    written({"2.txt": "changed"})
    with pytest.raises(JobFailed, match=r"2\.txt.*changed since it was listed"):
        job.run()
    assert sorted(bytes_of("out")) == [f"out/00000{n}.tar" for n in (0, 1, 3)]
    with pytest.raises(JobChanged, match="another job"):
        made(source, "out/{000000..}.tar", maxcount=1)
    made(source, "out/{000000..}.tar", maxcount=1, overwrite=True)
    assert [sample["txt"] for sample in samples("out/{000000..000003}.tar")] == [b"0", b"1", b"changed", b"3"]


def test_outputs_that_cannot_be() -> None:
    source = written({"a.txt": "x", "b.txt": "y"})
    for output, arguments, error in [
        ("in/out", {}, "below the folder that is read"),
        ("x-%06d.tar", {}, "written {shard:06d}"),
        ("x-{000..009}.tar", {}, "10 shards for 2 samples"),
        ("x.tar", {"maxcount": 1}, "names 1 shards"),
        ("x-{}.tar", {}, "it has one number"),
        ("x-{part}.tar", {}, "it needs the number of a shard"),
        ("", {}, "name the shards"),
        ("out", {"maxsize": "many"}, "maxsize='many'"),
        ("out", {"maxcount": 0}, "maxcount"),
        ("out", {"classes": ["a"]}, "image folder"),
        ("out", {"columns": TableColumns(key="k")}, "in is a folder"),
        ("out", {"format": "zip"}, "format='zip'"),
        ("out", {"format": "csv"}, r"this is a folder, not a table.*'in/\*\.csv'"),
        ("out", {"timeout": 0}, "timeout=0"),
    ]:
        with pytest.raises(ConfigError, match=error):
            create_shards(source, output, **arguments)
    with pytest.raises(ConfigError, match="no such folder"):
        create_shards("nowhere", "out")
    with pytest.raises(ShardNotFound, match=r"nowhere\.csv: there is no such file"):
        create_shards("nowhere.csv", "out")
    with pytest.raises(ConfigError, match=r"holds no sample \(1 without an extension"):
        create_shards(written({"README": "x"}, "bare"), "out")
    Path("t.csv").write_text("url:jpg\nhttp://127.0.0.1:1/x.jpg\n")
    with pytest.raises(ConfigError, match="nothing tells the sizes of 1 fields"):
        create_shards("t.csv", "out", maxsize="1M")


def test_standard_input_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"txt\nx\n"))
    monkeypatch.setattr("sys.stdin", stream)
    made("-", "out", format="csv")
    assert samples("out/000000.tar")[0]["txt"] == b"x"
    assert not stream.buffer.closed


@pytest.mark.slow
def test_a_bucket_on_both_sides(moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    client = empty_bucket(moto, clean_aws)
    for name in ("in/a b/x+1.jpg", "in/a b/x+1.txt", "in/ü.txt", "in/.hidden.txt"):
        client.put_object(Bucket="bucket", Key=name, Body=name.encode())
    client.put_object(Bucket="bucket", Key="t/t.csv", Body="file:txt\n../in/ü.txt\n".encode())
    made("s3://bucket/in/", "s3://bucket/out/{000000..}.tar", maxsize="1M")
    assert samples("s3://bucket/out/000000.tar") == [
        {"__key__": "a b/x+1", "jpg": b"in/a b/x+1.jpg", "txt": b"in/a b/x+1.txt"},
        {"__key__": "ü", "txt": "in/ü.txt".encode()},
    ]
    names = [one["Key"] for one in client.list_objects_v2(Bucket="bucket", Prefix="out/")["Contents"]]
    assert names == ["out/000000.tar", *(f"out/_wds/create/{name}" for name in (
        "00000.json", "finished.json", "inputs.jsonl.zst", "job.json"))]  # fmt: skip
    client.put_object(Bucket="bucket", Key="t/ü.txt", Body=b"beside")
    client.put_object(Bucket="bucket", Key="t/t.csv", Body="file:txt\nü.txt\n".encode())
    made("s3://bucket/t/t.csv", "local.tar")
    assert samples("local.tar")[0]["txt"] == b"beside"


def test_ranks_share_a_job_that_its_folder_describes(origin: Origin) -> None:
    Path("t.csv").write_text("url:txt\n" + "".join(f"{origin.add(f'{n}.txt', b'x')}\n" for n in range(4)))
    origin.behave(path="/3.txt", status=404, times=1)
    engines = [RankEngine(1, rank=rank, world_size=2) for rank in (0, 1)]
    for rank, engine in enumerate(engines):
        job = create_shards("t.csv", "out/{000000..}.tar", maxcount=1, engine=engine)
        if rank:
            with pytest.raises(JobFailed, match="row 4"):
                job.run()
        else:
            assert job.run().done == 2
    assert reopened("out/_wds/create", engine=InlineEngine()).retry().done == 1
    assert len(samples("out/{000000..000003}.tar")) == 4
    assert sorted(path.name for path in Path("out/_wds/create").iterdir())[-3:] == [
        "finished.json", "inputs.jsonl.zst", "job.json"
    ]  # fmt: skip
