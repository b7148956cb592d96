"""Jobs beside mapping: other works, their folders in stores, faults of stores and disks, and what must not hang.

``WDS_TEST_ALL_POINTS=1`` reads forty times through faults in place of a few.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed import functions
from tests.distributed.test_mapping import FUNCTIONS, files, job_of
from tests.servers import moto as moto_server
from tests.servers.origin import Origin
from wds_async import distributed as dist
from wds_async.distributed.engines.local import LocalEngine
from wds_async.distributed.engines.rank import RankEngine, rank_here
from wds_async.distributed.folder import JobFolder, job_url, output_folder
from wds_async.distributed.plan import Plan
from wds_async.distributed.tasks import Input, Record, Task, record_bytes, record_of
from wds_async.errors import ConfigError, JobFailed, StorageError, UrlError

clean_aws, moto = moto_server.clean_aws, moto_server.moto
RUNS = 40 if os.environ.get("WDS_TEST_ALL_POINTS") == "1" else 3


@dataclass(frozen=True)
class Doubling:
    """A work without samples: it writes down twice the number of its task."""

    out: str
    fails: tuple[int, ...] = ()
    unpicklable: Any = None

    def describe(self) -> dict[str, Any]:
        return {"kind": "doubling"}

    def run(self, task: Task) -> Record:
        if task.number in self.fails:
            raise RuntimeError(f"no {task.number}")
        return Record(task.number, task.identity(self.describe()), task.inputs, (), more={"twice": 2 * task.number})


def tasks_of(count: int, size: int = 1) -> Plan:
    return Plan([Input(f"https://user:hush@host/x-{n}.tar?sig=hush", 5) for n in range(count)], size)


def test_any_work_is_a_job(tmp_path: Path) -> None:
    folder = JobFolder(job_url(f"{tmp_path}/", "double"))
    job = dist.Job(Doubling(str(tmp_path)), tasks_of(11, 3), folder, engine=LocalEngine(2), finishes=False)
    assert job.run().done == 4
    assert [record.more["twice"] for record in folder.records(range(4))] == [0, 2, 4, 6]
    assert not folder.contents().complete
    assert len(folder.inputs()) == 11
    text = "".join(path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file())
    assert "hush" not in text


def test_a_work_that_does_not_pickle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    work = Doubling("", unpicklable=threading.Lock())
    job = dist.Job(work, tasks_of(2), JobFolder(f"{tmp_path}/_wds/x"), engine=LocalEngine(1))
    with pytest.raises(ConfigError, match="cannot be sent"):
        job.run()
    assert files(tmp_path) == {}


def test_retry_runs_what_failed_and_nothing_else(tmp_path: Path) -> None:
    folder = JobFolder(f"{tmp_path}/_wds/x")
    with pytest.raises(JobFailed, match=r"2 of 5 tasks failed.*\n.*task 1 .*no 1.*\n.*task 4 .*no 4"):
        dist.Job(Doubling("", fails=(1, 4)), tasks_of(5), folder, engine=LocalEngine(1), attempts=1).run()
    (tmp_path / "_wds/x/00002.json").unlink()
    again = dist.Job(Doubling(""), tasks_of(5), folder, engine=LocalEngine(1))
    assert again.retry().done == 2
    assert folder.finished() == {0, 1, 3, 4}
    assert again.run().done == 1
    assert again.status().complete


def test_a_task_that_always_kills_its_process_is_named_and_the_others_finish(tmp_path: Path) -> None:
    inputs = shards_of(tmp_path)
    with pytest.raises(JobFailed, match=r"task 1 .*t-001\.tar.*killed by SIGKILL"):
        job_of(inputs, tmp_path / "out", functions.kill_at_7, attempts=1).run()
    assert JobFolder(f"{tmp_path}/out/_wds/map").finished() == {0, 2}


def shards_of(tmp_path: Path) -> str:
    for shard in range(3):
        with wds.TarWriter(tmp_path / f"in/t-{shard:03d}.tar", mtime=0) as sink:
            for n in range(20):
                sink.write({"__key__": f"{shard:04d}-{n:03d}", "bin": random.Random(n).randbytes(20_000)})
    return f"{tmp_path}/in/t-{{000..002}}.tar"


def test_faults_of_a_store_lose_no_sample(tmp_path: Path, origin: Origin) -> None:
    shards_of(tmp_path)
    for path in sorted((tmp_path / "in").iterdir()):
        origin.add(path.name, path.read_bytes())
    job_of(origin.url("t-{000..002}.tar").replace("%7B", "{").replace("%7D", "}"), tmp_path / "out", workers=1).run()
    wanted = files(tmp_path / "out")
    for run in range(RUNS):
        origin.forget()
        origin.behave(status=503, probability=0.3, times=3)
        shutil.rmtree(tmp_path / "out")
        job = job_of(origin.url("t-{000..002}.tar").replace("%7B", "{").replace("%7D", "}"), tmp_path / "out")
        summary = job.run()
        assert (summary.samples_in, summary.samples_out) == (60, 54), run
        assert files(tmp_path / "out") == wanted


@pytest.fixture
def bucket(moto: str, clean_aws: pytest.MonkeyPatch) -> Any:
    return moto_server.empty_bucket(moto, clean_aws)


def test_inputs_outputs_and_records_in_a_store(tmp_path: Path, bucket: Any) -> None:
    shards_of(tmp_path)
    for path in (tmp_path / "in").iterdir():
        bucket.upload_file(str(path), "bucket", f"in/{path.name}")
    arguments = ("s3://bucket/in/*.tar", "s3://bucket/out/o-{task:04d}.tar", f"{FUNCTIONS}:augment")
    job = dist.map_shards(*arguments, engine="local", workers=2)
    summary = job.run()
    assert (summary.done, summary.samples_out) == (3, 54)
    assert summary.requests >= 3
    keys = {one["Key"] for one in bucket.list_objects_v2(Bucket="bucket", Prefix="out/")["Contents"]}
    assert keys == {
        *(f"out/o-{n:04d}.tar" for n in range(3)),
        *(f"out/_wds/map/{name}" for name in ("job.json", "inputs.jsonl.zst", "finished.json")),
        *(f"out/_wds/map/{n:05d}.json" for n in range(3)),
    }
    assert len(wds.WebDataset("s3://bucket/out/_wds/map/finished.json", shardshuffle=False)) == 54
    again = dist.map_shards(*arguments, engine="local", workers=2)
    assert again.run().before == 3
    record = again.folder.record(2)
    assert not again.folder.commit(record)
    local = job_of(f"{tmp_path}/in/*.tar", tmp_path / "out")
    local.run()
    assert [one.crc32c for one in record.outputs] == [one.crc32c for one in local.folder.record(2).outputs]


def test_a_store_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, bucket: Any) -> None:
    inputs = shards_of(tmp_path)
    job = dist.map_shards(inputs, "s3://nobucket/o-{task}.tar", f"{FUNCTIONS}:augment", workers=1)
    with pytest.raises(StorageError, match="nobucket"):
        job.run()


def test_a_folder_that_is_a_file_is_an_error_at_once(tmp_path: Path) -> None:
    inputs = shards_of(tmp_path)
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(StorageError, match="out"):
        job_of(inputs, tmp_path / "out").run()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte. Skips where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_fails_the_tasks_and_a_second_run_finishes_them(tmp_path: Path, small_disk: Path) -> None:
    inputs = shards_of(tmp_path)
    (small_disk / "in the way").write_bytes(bytes(500_000))
    job = job_of(inputs, small_disk / "out", workers=1, attempts=2)
    with pytest.raises(JobFailed, match="No space left on device"):
        job.run()
    tars = {path.name for path in (small_disk / "out").glob("*.tar")}
    assert len(tars) == len(job.folder.finished()) < 3
    assert not list((small_disk / "out").glob(".*"))
    (small_disk / "in the way").unlink()
    shutil.rmtree(small_disk / "out/_wds")  # two shards of 400 KB and a third do not fit either
    for name in tars:
        (small_disk / "out" / name).unlink()
    assert job_of(f"{tmp_path}/in/t-{{000..001}}.tar", small_disk / "out", workers=1).run().done == 2


def test_waiting_for_other_ranks_ends_with_the_names_of_what_is_missing(tmp_path: Path) -> None:
    inputs = shards_of(tmp_path)
    first = job_of(inputs, tmp_path / "out", engine=RankEngine(1, rank=0, world_size=2))
    assert first.run().done == 2
    with pytest.raises(JobFailed, match=r"1 of 3 tasks have no record.*Missing: 1 .*t-001\.tar"):
        first.wait(0.3)
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    job_of(inputs, tmp_path / "out", engine=RankEngine(1, rank=1, world_size=2)).run()
    waiting.join(20)
    assert not waiting.is_alive()
    assert first.status().complete


def test_ranks_drop_another_jobs_records_once(tmp_path: Path) -> None:
    inputs = shards_of(tmp_path)
    job_of(inputs, tmp_path / "out").run()
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        engine = RankEngine(1, rank=rank, world_size=2)
        try:
            job_of(inputs, tmp_path / "out", engine=engine, version="2", overwrite=True).run()
        except BaseException as exn:
            errors.append(exn)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(40)
    assert errors == []
    assert job_of(inputs, tmp_path / "out", version="2").status().complete


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"JOB_COMPLETION_INDEX": "3", "RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
    ],
)
def test_the_rank_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], place: tuple[int, int]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rank_here() == place
    engine = RankEngine(1)
    assert [number for number in range(8) if engine.is_mine(number)] == list(range(place[0], 8, place[1]))


def test_a_number_of_ranks_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="which one is this"):
        RankEngine(1)
    with pytest.raises(ConfigError, match="rank=4"):
        RankEngine(1, rank=4, world_size=4)


@pytest.mark.parametrize(
    ("template", "folder"),
    [
        ("s3://b/x/train-{task}.tar", "s3://b/x/"),
        ("s3://b/{task}/x.tar", "s3://b/"),
        ("/data/o/{task}.tar", "/data/o/"),
        ("o-{task}.tar", ""),
        ("out/a{task}/b.tar", "out/"),
    ],
)
def test_the_folder_of_a_template(template: str, folder: str) -> None:
    assert output_folder(template) == folder


@pytest.mark.parametrize(
    "template", ["s3://{task}/x.tar", "s3://b-{task}.tar", "s3:///x-{task}.tar", "https://h/a?x=1/{task}"]
)
def test_templates_without_a_common_folder_are_refused(template: str) -> None:
    with pytest.raises(UrlError):
        output_folder(template)


def test_records_are_read_back() -> None:
    record = Record(3, "id", (Input("s3://b/x.tar", 5, "v"),), (), skipped=({"stage": "map"},), more={"a": [1]})
    assert record_of(record_bytes(record)) == record
    for wrong in (b"", b"{}", b"[1]", b'{"task": 1}'):
        with pytest.raises(ConfigError, match="no record"):
            record_of(wrong)
