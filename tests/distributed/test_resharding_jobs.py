"""`reshard` as a job: the same bytes on every engine, in stores, and after kills.

``WDS_TEST_ALL_POINTS=1`` takes fifty points in place of a few.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from tests.distributed.resharddriver import job_of
from tests.distributed.test_resharding import contents, files, numbered, outputs, plain, read, write
from tests.servers import moto as moto_server
from wds_async import distributed as dist
from wds_async.distributed.engines import engine_of
from wds_async.distributed.folder import JobFolder
from wds_async.errors import JobChanged, JobFailed

clean_aws, moto = moto_server.clean_aws, moto_server.moto
ROOT = Path(__file__).parents[2]
ALL = os.environ.get("WDS_TEST_ALL_POINTS") == "1"
SHARDS, SAMPLES, TASKS = 5, 300, 5 + 1 + 7


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("in")
    write(folder, [numbered(SAMPLES // SHARDS, 1000, seed=seed) for seed in range(SHARDS)])
    return f"{folder}/in-{{000..{SHARDS - 1:03d}}}.tar"


@pytest.fixture(scope="module")
def wanted(inputs: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run without any fault leaves: shards and records."""
    out = tmp_path_factory.mktemp("wanted")
    engine = InlineEngine()
    summary = job_of(inputs, out, engine=engine).run()
    assert (summary.done, summary.samples_in, summary.samples_out) == (TASKS, SAMPLES, SAMPLES)
    assert engine.ran == [*range(SHARDS), 0, *range(7)]
    shapes = [len(record.more["runs"]) for record in JobFolder(f"{out}/_wds/reshard/scatter").records(range(SHARDS))]
    assert max(shapes) > 1, "runs"
    assert JobFolder(f"{out}/_wds/reshard/plan").record(0).more["buckets"] > 5
    return whole(out)


def whole(out: Path) -> dict[str, bytes]:
    """What is visible in the folder but ``job.json``, which names other folders, and no spill objects."""
    there = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file() and path.name[0] != "."}
    assert not (out / "_wds/reshard/spill").exists()
    return {name: path.read_bytes() for name, path in there.items() if not name.endswith(("job.json", ".zst"))}


def test_a_shuffle(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    source = [sample for number in range(SHARDS) for sample in read(Path(inputs).parent / f"in-{number:03d}.tar")]
    job = job_of(inputs, tmp_path, engine=InlineEngine())
    assert list(tmp_path.iterdir()) == []
    assert not job.status().complete
    job.run()
    assert whole(tmp_path) == wanted
    there = contents(tmp_path)
    assert sorted(plain(there)) == sorted(plain(source)) != plain(there)
    assert [len(read(path)) for path in outputs(tmp_path)] == [42, 43, 43, 43, 43, 43, 43]
    assert job.status().complete
    assert (again := job_of(inputs, tmp_path, engine=InlineEngine()).run()).done == 0
    assert again.before == 7
    shards = json.loads((tmp_path / "_wds/reshard/finished.json").read_text())["shardlist"]
    assert [one["nsamples"] for one in shards] == [42, 43, 43, 43, 43, 43, 43]
    assert len(wds.WebDataset(f"{tmp_path}/_wds/reshard/finished.json", shardshuffle=False)) == SAMPLES


@pytest.mark.parametrize("engine", ["local", "rank", "ray"])
def test_the_same_bytes_on_every_engine(
    engine: str, request: pytest.FixtureRequest, inputs: str, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    engines: list[Any] = [engine]
    if engine == "ray":
        request.getfixturevalue("ray")
    elif engine == "local":
        engines = [engine_of("local", workers=3)]
    else:
        engines = [engine_of("rank", rank=rank, world_size=2, workers=1) for rank in (0, 1)]
    jobs = [job_of(inputs, tmp_path, engine=one) for one in engines]
    with ThreadPoolExecutor() as pool:
        summaries = list(pool.map(dist.ReshardJob.run, jobs))
    assert sum(summary.done for summary in summaries) == TASKS
    assert whole(tmp_path) == wanted


@pytest.mark.parametrize(("seed", "memory"), [(1, 300_000), (2, 1_000_000), (3, 10_000_000)])
def test_the_same_bytes_by_any_memory_and_order_of_tasks(
    seed: int, memory: int, inputs: str, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    class AnyOrder(InlineEngine):
        capacity = 100

        def outcome(self, timeout_s: float) -> Any:
            random.Random(seed).shuffle(self._waiting)
            return super().outcome(timeout_s)

    job_of(inputs, tmp_path, engine=AnyOrder(), memory=memory).run()
    assert files(tmp_path) == {name: data for name, data in wanted.items() if name.endswith(".tar")}


def test_another_seed_is_another_job(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    job_of(inputs, tmp_path, engine=InlineEngine()).run()
    with pytest.raises(JobChanged, match="shuffle is 7 there and 8 here"):
        job_of(inputs, tmp_path, shuffle=8, engine=InlineEngine()).run()
    assert whole(tmp_path) == wanted
    job_of(inputs, tmp_path, shuffle=8, engine=InlineEngine(), overwrite=True).run()
    after = whole(tmp_path)
    assert after.keys() == wanted.keys()
    assert all(after[name] != data for name, data in wanted.items() if name.endswith(".tar"))


class Stopped(BaseException):
    """The runner is gone."""


class Stops(InlineEngine):
    """An engine that ends after ``attempts``."""

    def __init__(self, attempts: int) -> None:
        super().__init__()
        self.left = attempts

    def outcome(self, timeout_s: float) -> Any:
        if not self.left:
            raise Stopped
        self.left -= 1
        return super().outcome(timeout_s)


@pytest.mark.parametrize("attempts", range(TASKS))
def test_it_goes_on_behind_any_task(attempts: int, inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        job_of(inputs, tmp_path, engine=Stops(attempts)).run()
    spilled = list((tmp_path / "_wds/reshard/spill").glob("*")) if attempts else []
    assert len(spilled) == min(attempts, SHARDS + 1)
    if attempts % 3 == 2:  # also without one of the spill objects, or the plan
        random.Random(attempts).choice(spilled).unlink()
    engine = InlineEngine()
    summary = job_of(inputs, tmp_path, engine=engine).run()
    assert len(engine.ran) == summary.done == TASKS - attempts + (attempts % 3 == 2)
    assert whole(tmp_path) == wanted


def test_spill_objects_of_a_finished_job_are_found(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    job_of(inputs, tmp_path, engine=InlineEngine()).run()
    left = tmp_path / "_wds/reshard/spill/00000.spill"
    left.parent.mkdir()
    left.write_bytes(b"its runner ended before it removed this")
    assert job_of(inputs, tmp_path, engine=InlineEngine()).run().done == 0
    assert whole(tmp_path) == wanted


@contextlib.contextmanager
def driver(inputs: str, out: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    words = [f"{name}={json.dumps(value)}" for name, value in {"workers": 2, **options}.items()]
    command = [sys.executable, "-m", "tests.distributed.resharddriver", inputs, str(out), *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.timeout(3600 if ALL else 120)
def test_drivers_are_killed_and_started_again(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    draw, kills, ended = random.Random(1), 0, 0
    while kills < (50 if ALL else 3) or not ended:
        with driver(inputs, tmp_path) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(6)):
                process.stdout.readline()
            if kills >= (50 if ALL else 3):
                assert process.wait(60) == 0
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0.0, 0.3))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
                continue
        assert process.returncode == 0
        ended += 1
        assert whole(tmp_path) == wanted
        for path in [one for one in tmp_path.rglob("*") if one.is_file()]:
            path.unlink()


@pytest.mark.timeout(3600 if ALL else 120)
def test_workers_are_killed(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    draw, kills, run = random.Random(2), 0, 0
    while kills < (50 if ALL else 3):
        run += 1
        with driver(inputs, tmp_path / str(run), attempts=20) as process:
            assert process.stdout is not None
            while process.stdout.readline():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0.0, 0.05))
                if draw.random() < 0.5 and (pids := children(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(draw.choice(pids), signal.SIGKILL)
                        kills += 1
            assert process.wait(60) == 0
        assert whole(tmp_path / str(run)) == wanted


def test_a_task_that_fails_is_named_and_nothing_is_written(inputs: str, tmp_path: Path) -> None:
    data = [path.read_bytes() for path in sorted(Path(inputs).parent.iterdir())]
    for number, one in enumerate(data):
        (tmp_path / f"{number}.tar").write_bytes(one[: 20_000 if number == 3 else None])
    job = job_of(f"{tmp_path}/*.tar", tmp_path / "out", engine=InlineEngine(), attempts=1)
    with pytest.raises(JobFailed, match=r"1 of 5 tasks failed.*\n.*task 3 .*3\.tar"):
        job.run()
    assert job.status().finished == 4
    assert job.status().failed[0][0] == 3
    assert not outputs(tmp_path / "out")
    (tmp_path / "3.tar").write_bytes(data[3])
    engine = InlineEngine()
    with pytest.raises(JobChanged):
        job_of(f"{tmp_path}/*.tar", tmp_path / "out", engine=engine).run()
    job_of(f"{tmp_path}/*.tar", tmp_path / "out", engine=engine, overwrite=True).run()
    assert len(contents(tmp_path / "out")) == SAMPLES


def test_in_a_store(inputs: str, tmp_path: Path, moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    bucket = moto_server.empty_bucket(moto, clean_aws)
    paths = sorted(Path(inputs).parent.iterdir())[:2]
    for path in paths:
        bucket.upload_file(str(path), "bucket", f"in/{path.name}")
    output = "o-{000..001}.tar"
    summary = job_of("s3://bucket/in/*.tar", "s3://bucket/out", output=output, engine=InlineEngine()).run()
    assert summary.done == 2 + 1 + 2
    assert summary.requests > 4
    job_of(list(map(str, paths)), tmp_path, output=output, engine=InlineEngine()).run()
    keys = {one["Key"] for one in bucket.list_objects_v2(Bucket="bucket", Prefix="out/")["Contents"]}
    assert keys == {f"out/{path.relative_to(tmp_path)}" for path in tmp_path.rglob("*") if path.is_file()}
    for name, data in files(tmp_path).items():
        assert bucket.get_object(Bucket="bucket", Key=f"out/{name}")["Body"].read() == data
