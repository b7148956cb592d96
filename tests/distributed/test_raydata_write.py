"""Ray Data's rows as shards: whole, once, the same bytes every time, and only what has a record counts."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.packages import need_package
from tests.servers.shards import make_shard
from wds_async.dataset import WebDataset
from wds_async.distributed import raydata
from wds_async.distributed.folder import JobFolder
from wds_async.distributed.raydata.sink import ShardSink
from wds_async.distributed.tasks import Record
from wds_async.errors import ConfigError, JobChanged, StorageError

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(240)]

SAMPLES = 240
POINTS = range(3, 240, 6) if os.environ.get("WDS_TEST_ALL_POINTS") == "1" else (3, 200)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four shards of 60 samples of 2 kB."""
    folder = tmp_path_factory.mktemp("source")
    for shard in range(4):
        numbers = range(shard * 60, shard * 60 + 60)
        content = {f"{n:06d}": {"bin": random.Random(n).randbytes(2000), "cls": str(n).encode()} for n in numbers}
        (folder / f"in-{shard}.tar").write_bytes(make_shard(content))
    return str(folder / "in-{0..3}.tar")


def read(source: str) -> Any:
    return raydata.read(source, block_bytes="32K")


def written(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their names."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def shards_of(job: Path) -> list[str]:
    """The shards of the list of a finished job."""
    return [str(job / one["url"]) for one in json.loads((job / "finished.json").read_text())["shardlist"]]


class Disturbed:
    """A function for batches that ends its process once, or fails as long as a file is there, at a given sample."""

    def __init__(self, folder: Path, sample: int, kills: bool) -> None:
        self.mark, self.sample, self.kills = str(folder / "mark"), sample, kills

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.sample in [int(value) for value in batch["cls"]]:
            if not self.kills and os.path.exists(self.mark):
                raise ValueError(f"sample {self.sample} is not to my taste")
            if self.kills:
                try:
                    os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return batch
                os.kill(os.getpid(), signal.SIGKILL)
        return batch


@pytest.fixture(scope="module")
def expected(ray: Any, source: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed run."""
    out = tmp_path_factory.mktemp("expected")
    summary = raydata.write(read(source), f"{out}/out-{{0000..}}.tar", job="j", shard_bytes="100K")
    assert (summary.samples_out, summary.before, summary.elsewhere) == (SAMPLES, 0, 0)
    assert summary.done == summary.tasks > 3
    return written(out)


def as_expected(files: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """Whether the shards are the same, bytes and all, and so are their records but for ids, which hold the output."""
    assert files.keys() == expected.keys()
    return all(files[name] == expected[name] for name in files if name.endswith(".tar"))


def test_shards_are_the_rows_in_order(tmp_path: Path, ray: Any, source: str, expected: dict[str, bytes]) -> None:
    summary = raydata.write(read(source), f"{tmp_path}/out-{{0000..}}.tar", job="j", shard_bytes="100K")
    assert as_expected(written(tmp_path), expected)
    shards = shards_of(tmp_path / "_wds" / "j")
    assert [os.path.basename(url) for url in shards] == [f"out-{n:04d}.tar" for n in range(summary.tasks)]
    samples = list(WebDataset(shards, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{n:06d}" for n in range(SAMPLES)]
    assert [sample["bin"] for sample in samples] == [random.Random(n).randbytes(2000) for n in range(SAMPLES)]


def test_the_same_job_writes_nothing_again(tmp_path: Path, ray: Any, source: str) -> None:
    output = f"{tmp_path}/{{task:03d}}.tar"
    first = raydata.write(read(source), output, job="j", shard_bytes="200K")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = raydata.write(read(source), output, job="j", shard_bytes="200K")
    assert (again.tasks, again.before, again.done) == (first.tasks, first.tasks, 0)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("sample", POINTS)
def test_a_killed_worker_changes_nothing(
    tmp_path: Path, ray: Any, source: str, expected: dict[str, bytes], sample: int
) -> None:
    dataset = read(source).map_batches(Disturbed(tmp_path, sample, kills=True).__call__, batch_size=None)
    raydata.write(dataset, f"{tmp_path}/out/out-{{0000..}}.tar", job="j", shard_bytes="100K")
    assert (tmp_path / "mark").exists()
    assert as_expected(written(tmp_path / "out"), expected)


class Marks:
    """Adds a field with the path of a file to one sample, and to no other."""

    def __init__(self, path: Path, sample: int) -> None:
        self.path, self.sample = str(path), sample

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "mark": [self.path if int(value) == self.sample else "" for value in batch["cls"]]}


@pytest.mark.parametrize("sample", POINTS)
def test_a_process_that_is_killed_while_it_writes_leaves_no_part_of_a_shard(
    tmp_path: Path, ray: Any, source: str, expected: dict[str, bytes], sample: int
) -> None:
    marks = Marks(tmp_path / "mark", sample)
    dataset = read(source).map_batches(marks.__call__, batch_size=None)
    output, encoder = f"{tmp_path}/out/out-{{0000..}}.tar", "tests.distributed.functions:kill_while_writing"
    summary = raydata.write(dataset, output, job="j", shard_bytes="100K", encoder=encoder)
    assert (tmp_path / "mark").exists()
    assert (summary.done, summary.samples_out) == (summary.tasks, SAMPLES)
    files, shards = written(tmp_path / "out"), shards_of(tmp_path / "out" / "_wds" / "j")
    seen = {name for name in files if not name.startswith(("_wds", "."))}  # a dot: a file that has no name yet
    assert seen == {os.path.basename(url) for url in shards}
    samples = {one["__key__"]: one["bin"] for one in WebDataset(shards, shardshuffle=False)}
    assert samples == {f"{n:06d}": random.Random(n).randbytes(2000) for n in range(SAMPLES)}


def test_a_run_that_failed_is_gone_on_with(tmp_path: Path, ray: Any, source: str, expected: dict[str, bytes]) -> None:
    (tmp_path / "mark").touch()
    disturbed = Disturbed(tmp_path, 200, kills=False)
    output = f"{tmp_path}/out/out-{{0000..}}.tar"
    with pytest.raises(ray.exceptions.RayTaskError, match="not to my taste"):
        raydata.write(
            read(source).map_batches(disturbed.__call__, batch_size=None), output, job="j", shard_bytes="100K"
        )
    job = tmp_path / "out" / "_wds" / "j"
    assert not (job / "finished.json").exists()
    (tmp_path / "mark").unlink()
    dataset = read(source).map_batches(disturbed.__call__, batch_size=None)
    summary = raydata.write(dataset, output, job="j", shard_bytes="100K")
    assert summary.before + summary.done == summary.tasks
    assert as_expected(written(tmp_path / "out"), expected)


def test_other_options_or_rows_are_another_job(tmp_path: Path, ray: Any, source: str) -> None:
    output = f"{tmp_path}/{{task:03d}}.tar"
    dataset = read(source)
    raydata.write(dataset, output, job="j", shard_bytes="200K")
    with pytest.raises(JobChanged, match="version"):
        raydata.write(dataset, output, job="j", shard_bytes="200K", version="2")
    with pytest.raises(ray.exceptions.RayTaskError, match="the record of a shard with other rows"):
        raydata.write(read(source.replace("{0..3}", "{1..3}")), output, job="j", shard_bytes="200K")
    raydata.write(dataset, output, job="blocks", shard_bytes=1)
    with pytest.raises(JobChanged, match="it has records of the tasks"):
        raydata.write(read(source.replace("{0..3}", "{0..1}")), output, job="blocks", shard_bytes=1)
    summary = raydata.write(dataset, output, job="j", shard_bytes="200K", version="2", overwrite=True)
    assert (summary.before, summary.samples_out) == (0, SAMPLES)


def test_values_are_encoded_by_their_fields(tmp_path: Path, ray: Any) -> None:
    rows = [
        {"__key__": f"{n}", "npy": np.full((2, 3), n), "cls": n, "txt": f"number {n}", "_note": "x", "bin": None}
        for n in range(5)
    ]
    raydata.write(ray.data.from_items(rows), f"{tmp_path}/{{0000..}}.tar", job="j", index=True)
    samples = list(WebDataset(shards_of(tmp_path / "_wds" / "j"), shardshuffle=False).decode())
    assert sorted(sample["cls"] for sample in samples) == list(range(5))
    assert all((sample["npy"] == np.full((2, 3), sample["cls"])).all() for sample in samples)
    assert all(sample["txt"] == f"number {sample['cls']}" for sample in samples)
    assert {name for sample in samples for name in sample if not name.startswith("__")} == {"npy", "cls", "txt"}
    assert list(tmp_path.glob("*.idx"))


def test_wrong_arguments_are_found_before_anything_is_written(tmp_path: Path, ray: Any) -> None:
    dataset = ray.data.from_items([{"__key__": "a", "txt": "b"}])
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("out.tar", {}, "add {task}"),
        ("{task}.tar", {"job": "a/b"}, "job='a/b'"),
        ("{task}.tar", {"shard_bytes": "much"}, "shard_bytes='much'"),
        ("{task}.tar", {"encoder": lambda sample: sample}, "a lambda"),
        ("{page}.tar", {}, "task"),
    ]
    for output, options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            raydata.write(dataset, f"{tmp_path}/{output}", **{"job": "j", **options})
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        raydata.write(dataset, f"{tmp_path}/file/{{task}}.tar", job="j")
    with pytest.raises(ray.exceptions.RayTaskError, match="rows need a column __key__"):
        raydata.write(ray.data.from_items([{"txt": "b"}]), f"{tmp_path}/{{task}}.tar", job="j")


# -- one task, without a cluster --------------------------------------------------------------------------------


class Overtaken(JobFolder):
    """A folder in which another runner always commits first, with another shard."""

    def commit(self, record: Record) -> bool:
        other = Record(record.task, record.id, (), tuple(_with_other_sum(one) for one in record.outputs))
        assert super().commit(other)
        return super().commit(record)


def _with_other_sum(output: Any) -> Any:
    return type(output)(output.url, output.bytes, "00000000", output.samples)


@pytest.fixture
def table() -> Any:
    need_package("ray")
    import pyarrow as pa

    return pa.table({"__key__": ["a", "b"], "txt": ["1", None], "bin": [b"2", b"3"]})


def sink_of(folder: JobFolder) -> ShardSink:
    return ShardSink(f"{folder.out}{{task}}.tar", folder, {"encoder": True, "index": False}, 100)


def test_a_race_that_is_lost_to_other_bytes_is_an_error(tmp_path: Path, table: Any) -> None:
    sink = sink_of(Overtaken(f"{tmp_path}/_wds/j"))
    with pytest.raises(JobChanged, match="written twice at the same time"):
        sink.write([table], SimpleNamespace(task_idx=0))


def test_a_second_attempt_finds_the_record(tmp_path: Path, table: Any) -> None:
    sink = sink_of(JobFolder(f"{tmp_path}/_wds/j"))
    first = sink.write([table], SimpleNamespace(task_idx=7))
    assert (first.before, first.first, first.samples) == (False, True, 2)
    shard = tmp_path / "7.tar"
    before = shard.stat().st_mtime_ns
    second = sink.write([table.slice(0, 1), table.slice(1)], SimpleNamespace(task_idx=7))
    assert (second.before, second.id, second.bytes) == (True, first.id, shard.stat().st_size)
    assert shard.stat().st_mtime_ns == before
    samples = list(WebDataset(str(shard), shardshuffle=False))
    assert [(sample["__key__"], sample.get("txt"), sample["bin"]) for sample in samples] == [
        ("a", b"1", b"2"),
        ("b", None, b"3"),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"txt": ["1", None]}, "row 1 of a block of 2, which came from s3://b/b.tar at byte 7: the sample 'b' has no"),
        ({"foo": [1, 2]}, "row 0 of a block of 2, which came from s3://b/a.tar at byte 0: field 'foo' of sample 'a'"),
        ({"a/b": [b"1", b"2"]}, "row 0 of a block of 2.* without '/'"),
        ({"__key__": ["a", "a"], "txt": ["1", "2"]}, "row 1 of a block of 2.* the key 'a'"),
        ({"__key__": [1, 2], "txt": ["1", "2"]}, "row 0 of a block of 2.* a __key__ of type str"),
    ],
)
def test_rows_that_no_shard_can_hold_are_named(tmp_path: Path, rows: dict[str, Any], message: str) -> None:
    need_package("ray")
    import pyarrow as pa

    meta = {"__key__": ["a", "b"], "__url__": ["s3://b/a.tar", "s3://b/b.tar"], "__offset__": [0, 7]}
    with pytest.raises(ValueError, match=message):
        sink_of(JobFolder(f"{tmp_path}/_wds/j")).write([pa.table({**meta, **rows})], SimpleNamespace(task_idx=0))
    assert not list(tmp_path.iterdir())


def test_a_table_is_made_samples_of_in_slices(tmp_path: Path) -> None:
    need_package("ray")
    import pyarrow as pa

    values = [random.Random(n).randbytes(100_000) for n in range(200)]
    table = pa.table({"__key__": [f"{n:03d}" for n in range(200)], "bin": values, "cls": list(range(200))})
    folder = JobFolder(f"{tmp_path}/_wds/j")
    assert sink_of(folder).write([table], SimpleNamespace(task_idx=0)).samples == 200
    samples = list(WebDataset(str(tmp_path / "0.tar"), shardshuffle=False))
    assert [(one["bin"], one["cls"]) for one in samples] == [(value, b"%d" % n) for n, value in enumerate(values)]
