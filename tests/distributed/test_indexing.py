"""`index` as a job: the same files as the command makes, lists that can be read, errors that name each shard."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from tests.servers.moto import clean_aws, empty_bucket, moto
from tests.servers.origin import Origin
from wds_async import distributed as dist
from wds_async.errors import ConfigError, JobChanged, JobFailed
from wds_async.indexed import places
from wds_async.indexed.scan import scan_shards

__all__ = ["clean_aws", "moto"]

SHARDS, SAMPLES = 5, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(SHARDS):
        write(f"{tmp_path}/in/t-{shard:03d}.tar", SAMPLES + shard)
    return tmp_path / "in"


def write(url: str, samples: int) -> None:
    with wds.TarWriter(url, mtime=0) as sink:
        for n in range(samples):
            sink.write({"__key__": f"{n:03d}", "txt": f"text {n}", "cls": str(n)})


def job_of(inputs: Any, output: str | None = None, **kw: Any) -> dist.Job:
    return dist.index(inputs, output, **{"engine": InlineEngine(), "attempts": 1, **kw})


def shards_in(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["shardlist"]
    return rows


def test_it_writes_what_the_shards_hold(folder: Path) -> None:
    job = job_of(f"{folder}/", kinds=("json", *places.KINDS), inputs_per_task=2, name="small")
    summary = job.run()
    assert (summary.tasks, summary.done) == (3, 3)
    assert summary.samples_in == sum(range(SAMPLES, SAMPLES + SHARDS))
    assert summary.bytes_in == summary.bytes_read == sum(path.stat().st_size for path in folder.glob("*.tar"))
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    for kind in places.KINDS:
        for url, place, one in zip(urls, places.places(urls, kind), scan_shards(urls, dali=True), strict=True):
            assert one.index is not None
            assert Path(place).read_bytes() == places.file_bytes(kind, one.index, url, one.dali)
    rows = shards_in(folder / "index.json")
    sizes = [os.path.getsize(url) for url in urls]
    assert [one["url"] for one in rows] == [os.path.basename(url) for url in urls]
    assert [(one["nsamples"], one["filesize"]) for one in rows] == list(zip(range(4, 9), sizes, strict=True))
    assert json.loads((folder / "index.json").read_text())["name"] == "small"
    for name in ("index.json", "_wds/index/finished.json"):
        dataset = wds.WebDataset(str(folder / name), shardshuffle=False)
        assert len(dataset) == sum(1 for _ in dataset) == summary.samples_in
    assert wds.IndexedDataset(urls)[0]["txt"] == b"text 0"


def test_the_lists_do_not_depend_on_how_shards_are_divided(folder: Path) -> None:
    texts = set()
    for count in (1, 2, 5):
        job_of(f"{folder}/*.tar", f"{folder}/{count}.json", job=f"by-{count}", inputs_per_task=count).run()
        texts.add((folder / f"{count}.json").read_bytes())
        texts.add((folder / f"_wds/by-{count}/finished.json").read_bytes().replace(b"../../", b""))
        record = json.loads((folder / f"_wds/by-{count}/00000.json").read_text())
        assert record["more"]["samples"] == list(range(4, 4 + count))
        assert not record["outputs"]
    assert len(texts) == 1


def test_files_go_into_a_folder(folder: Path, tmp_path: Path) -> None:
    job_of(f"{folder}/*.tar", str(tmp_path / "out"), kinds=("json", "wds")).run()
    assert len(list((tmp_path / "out").glob("*.tar.index"))) == SHARDS
    assert not list(folder.glob("*.index"))
    assert shards_in(tmp_path / "out/index.json")[0]["url"] == f"{folder}/t-000.tar"
    record = json.loads((tmp_path / "out/_wds/index/00000.json").read_text())
    assert [one["url"] for one in record["outputs"]] == ["t-000.tar.index"]


def test_what_is_finished_is_not_read_again(folder: Path) -> None:
    for number in (1, 3):
        (folder / f"t-{number:03d}.tar").write_bytes(b"no tar at all" * 100)
    job = job_of(f"{folder}/*.tar", inputs_per_task=2, kinds=("json", "dali"))
    with pytest.raises(JobFailed) as caught:
        job.run()
    assert [number for number, _ in caught.value.failures] == [0, 1]
    assert "t-001.tar" in str(caught.value)
    assert "t-003.tar" in str(caught.value)
    assert not (folder / "index.json").exists()
    assert {path.name for path in folder.glob("*.idx")} == {"t-000.idx", "t-002.idx", "t-004.idx"}
    for number in (1, 3):
        write(f"{folder}/t-{number:03d}.tar", 9)
    with pytest.raises(JobChanged):
        job_of(f"{folder}/*.tar", inputs_per_task=2, kinds=("json", "dali")).run()
    engine = InlineEngine()
    job_of(f"{folder}/*.tar", inputs_per_task=2, kinds=("json", "dali"), overwrite=True, engine=engine).run()
    assert sorted(engine.ran) == [0, 1, 2]
    engine = InlineEngine()
    again = job_of(f"{folder}/*.tar", inputs_per_task=2, kinds=("json", "dali"), engine=engine).run()
    assert (again.before, again.done, engine.ran) == (3, 0, [])
    assert [one["nsamples"] for one in shards_in(folder / "index.json")] == [4, 9, 6, 9, 8]


def test_every_bad_shard_of_a_task_is_named(folder: Path) -> None:
    for number in (0, 2, 4):
        (folder / f"t-{number:03d}.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(JobFailed, match=r"3 shards have errors: .*t-000.*t-002.*t-004"):
        job_of(f"{folder}/*.tar", inputs_per_task=5).run()


def test_a_shard_that_is_replaced_later_is_an_error(folder: Path) -> None:
    job = job_of(f"{folder}/*.tar", attempts=3, engine=(engine := InlineEngine()))
    write(f"{folder}/t-002.tar", 50)
    with pytest.raises(JobFailed, match=r"t-002\.tar.* replaced since the job was planned"):
        job.run()
    assert engine.ran.count(2) == 1, "another attempt would not help"


def test_a_job_can_be_made_again_from_its_folder(folder: Path) -> None:
    bad = folder / "t-001.tar"
    good = bad.read_bytes()
    times = bad.stat()
    bad.write_bytes(bytes(len(good) - 512) + b"x" * 512)
    os.utime(bad, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(JobFailed):
        job_of(f"{folder}/*.tar", inputs_per_task=2, kinds=("json", "wds")).run()
    with open(bad, "r+b") as file:
        file.write(good)
    os.utime(bad, ns=(times.st_atime_ns, times.st_mtime_ns))
    engine = InlineEngine()
    again = dist.reopened(f"{folder}/_wds/index", engine=engine)
    assert len(again.tasks) == 3
    assert again.retry().done == 1
    assert engine.ran == [0]
    assert [one["nsamples"] for one in shards_in(folder / "index.json")] == list(range(4, 9))


def test_a_list_can_be_written_later(folder: Path) -> None:
    job_of(f"{folder}/*.tar").run()
    listed = folder / "index.json"
    before = listed.read_bytes()
    listed.unlink()
    (folder / "_wds/index/finished.json").unlink()
    dist.reopened(f"{folder}/_wds/index").finish()
    assert listed.read_bytes() == before
    assert (folder / "_wds/index/finished.json").exists()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: job_of(f"{folder}/*.tar", kinds=()), "kinds"),
        (lambda folder: job_of(f"{folder}/*.tar", kinds="json"), "kinds"),
        (lambda folder: job_of(f"{folder}/*.tar", kinds=("parquet",)), "parquet"),
        (lambda folder: job_of([f"{folder}/t-000.tar"] * 2), "named twice"),
        (lambda folder: job_of(twins(folder), str(folder), kinds=["dali"]), "same name"),
        (lambda folder: job_of(f"{folder}/*.tar", job="../x"), "job="),
        (lambda folder: job_of(f"{folder}/*.tar", inputs_per_task=0), "inputs_per_task"),
    ],
    ids=["no-kind", "text", "unknown", "twice", "same-place", "job", "none-per-task"],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    folder: Path, make: Callable[[Path], Any], text: str
) -> None:
    twins(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=text):
        make(folder)
    assert sorted(folder.rglob("*")) == before


def twins(folder: Path) -> list[str]:
    urls = [f"{folder}/{name}/x.tar" for name in "ab"]
    for url in urls:
        write(url, 1)
    return urls


def test_shards_without_a_common_folder_need_an_output(folder: Path, origin: Origin) -> None:
    origin.add("t.tar", (folder / "t-000.tar").read_bytes())
    url = origin.url("t.tar")
    with pytest.raises(ConfigError, match="share no folder"):
        job_of([url, url.replace("127.0.0.1", "localhost")])
    with pytest.raises(ConfigError, match="query"):
        job_of([f"{url}?signature=1"])


@pytest.mark.slow
def test_shards_of_a_bucket(moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    empty_bucket(moto, clean_aws)
    for shard in range(3):
        write(f"s3://bucket/in/{shard}/t.tar", SAMPLES)
    urls = [f"s3://bucket/in/{shard}/t.tar" for shard in range(3)]
    summary = job_of(urls, kinds=("json", "wds"), engine="local", workers=1).run()
    assert (summary.done, summary.samples_in) == (3, 12)
    assert summary.bytes_read == summary.bytes_in
    dataset = wds.WebDataset("s3://bucket/in/index.json", shardshuffle=False)
    assert len(dataset) == sum(1 for _ in dataset) == 12
    engine = InlineEngine()
    assert job_of(urls, kinds=("json", "wds"), engine=engine).run().before == 3
