"""`map_shards` on Ray and Dask: the same bytes as on any engine, whatever is killed and whatever the store answers.

``WDS_TEST_ALL_POINTS=1`` takes fifty points of each kind in place of a few, and forty runs with a fault each.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.test_kills import ALL, children, done, driver
from tests.distributed.test_mapping import files, samples
from tests.servers import Origin
from tests.servers.raycluster import ENVIRONMENT, RayCluster
from wds_async import distributed as dist
from wds_async.distributed.engines import engine_of
from wds_async.errors import JobFailed

POINTS = 50 if ALL else 2
RAYLETS = 50 if ALL else 1
RUNS = 40 if ALL else 2
SHARDS, SAMPLES = 8, 40
FUNCTIONS = "tests.distributed.functions"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("in")
    for shard in range(SHARDS):
        with wds.TarWriter(folder / f"t-{shard:03d}.tar", mtime=0) as sink:
            for n in range(SAMPLES):
                sink.write({"__key__": f"{shard:04d}-{n:03d}", "bin": b"x" * 3000, "txt": f"{shard} {n}"})
    return f"{folder}/t-{{000..{SHARDS - 1:03d}}}.tar"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all outputs: a task's id names it, so results of two runs are alike only there."""
    return tmp_path_factory.mktemp("out") / "out"


@pytest.fixture(scope="module")
def wanted(inputs: str, out: Path) -> dict[str, bytes]:
    """What this job leaves on processes of this machine, without any fault."""
    assert job_of(inputs, out, engine="local", workers=2).run().done == SHARDS
    there = files(out)
    assert len(there) > 3 * SHARDS
    return there


@pytest.fixture(autouse=True)
def empty(out: Path) -> Iterator[None]:
    yield
    shutil.rmtree(out, ignore_errors=True)


def job_of(inputs: str, out: Path, function: str = "slower", **kw: Any) -> dist.Job:
    arguments = {"engine": "ray", "maxcount": 15, "index": True, "attempts": 20, **kw}
    return dist.map_shards(inputs, f"{out}/o-{{task:04d}}-{{part:02d}}.tar", f"{FUNCTIONS}:{function}", **arguments)


def whole(out: Path) -> dict[str, bytes]:
    """What is visible in the folder: a killed writer leaves files that no listing shows."""
    return {name: data for name, data in files(out).items() if not Path(name).name.startswith(".")}


def taken(out: Path) -> dict[str, bytes]:
    """What is visible in the folder, and empty it."""
    there = whole(out)
    shutil.rmtree(out)
    return there


@pytest.mark.parametrize("engine", ["rank", "ray", "dask"])
def test_the_same_bytes_on_every_engine(
    engine: str, request: pytest.FixtureRequest, inputs: str, out: Path, wanted: dict[str, bytes]
) -> None:
    shutil.rmtree(out, ignore_errors=True)
    if engine == "ray":
        request.getfixturevalue("ray")
    elif engine == "dask":
        request.getfixturevalue("dask")
    engines: list[Any] = [engine]
    if engine == "rank":
        engines = [engine_of("rank", rank=rank, world_size=2, workers=1) for rank in (1, 0)]
    elif engine == "dask":
        engines = [dist.DaskEngine(workers=2)]
    summaries = [job_of(inputs, out, engine=one).run() for one in engines]
    assert sum(summary.done for summary in summaries) == SHARDS
    assert files(out) == wanted


def test_a_task_that_always_fails_is_named_and_the_others_finish(ray: Any, inputs: str, out: Path) -> None:
    job = job_of(inputs, out, "fail_at_7", attempts=2)
    with pytest.raises(JobFailed, match=r"1 of 8 tasks failed") as failure:
        job.run()
    (one,) = failure.value.failures
    assert one[0] == 1
    assert "t-001.tar" in one[1]
    assert "0001-007" in one[1]
    assert "this one never works" in one[1]
    assert job.status().finished == SHARDS - 1
    assert len(samples(out)) == (SHARDS - 1) * SAMPLES


def workers_of(raylets: RayCluster) -> list[int]:
    """Pids of the processes that run tasks at this moment."""
    pids = [pid for raylet in raylets.raylets for pid in children(raylet)]
    return [pid for pid in pids if b"wds_async task" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def meanwhile(act: Callable[[], bool], rng: random.Random) -> Iterator[list[int]]:
    """Call ``act`` at random moments of the block; the list that is yielded grows by one each time that it is true."""
    over, times = threading.Event(), list[int]()

    def loop() -> None:
        while not over.wait(rng.uniform(0.05, 0.8)):
            if act():
                times.append(1)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield times
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(3600 if ALL else 400)
def test_workers_are_killed(ray: Any, raylets: RayCluster, inputs: str, out: Path, wanted: dict[str, bytes]) -> None:
    shutil.rmtree(out, ignore_errors=True)
    rng, kills, lost = random.Random(3), 0, 0
    while kills < POINTS:
        left = [None] * 3  # not more in a run: Ray takes seconds for a new worker

        def kill(left: list[None] = left) -> bool:
            pids = workers_of(raylets)
            if not left or not pids:
                return False
            left.pop()
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(pids), signal.SIGKILL)
                return True
            return False

        with meanwhile(kill, rng) as times:
            summary = job_of(inputs, out).run()
        kills, lost = kills + len(times), lost + summary.lost
        assert summary.done == SHARDS
        assert taken(out) == wanted
    assert lost


@pytest.mark.timeout(3600 if ALL else 400)
def test_raylets_are_killed(ray: Any, raylets: RayCluster, inputs: str, out: Path, wanted: dict[str, bytes]) -> None:
    shutil.rmtree(out, ignore_errors=True)
    rng, kills = random.Random(4), 0
    while kills < RAYLETS:
        left = [rng.choice((1, 2))]

        def kill(left: list[int] = left) -> bool:
            if not left or not workers_of(raylets):
                return False
            raylets.kill_raylet(left.pop())
            return True

        with meanwhile(kill, rng) as times:
            summary = job_of(inputs, out).run()
        kills += len(times)
        raylets.restore()
        assert summary.done == SHARDS
        assert taken(out) == wanted


def on_ray(raylets: RayCluster, inputs: str, out: Path) -> Any:
    """A process that runs the same job on the cluster."""
    options = {"engine": "ray", "workers": None, "attempts": 20, "function": "slower"}
    return driver(inputs, out, **options, RAY_ADDRESS=raylets.address, **ENVIRONMENT)


def until_it_works(process: subprocess.Popen[str], raylets: RayCluster) -> None:
    """Wait until tasks run, or the driver has ended."""
    until = time.monotonic() + 60
    while process.poll() is None and not workers_of(raylets) and time.monotonic() < until:
        time.sleep(0.01)


def until_a_task_is_done(process: subprocess.Popen[str], out: Path) -> None:
    """Wait until there is a record, or the driver has ended."""
    while process.poll() is None and not list(out.glob("_wds/map/0*.json")):
        time.sleep(0.01)


@pytest.mark.timeout(3600 if ALL else 400)
def test_drivers_are_killed_and_started_again(
    raylets: RayCluster, inputs: str, out: Path, wanted: dict[str, bytes]
) -> None:
    shutil.rmtree(out, ignore_errors=True)
    rng, kills, before = random.Random(5), 0, 0
    while kills < POINTS:
        while True:
            with on_ray(raylets, inputs, out) as process:
                until_it_works(process, raylets)
                wait_s = rng.uniform(0.0, 1.5) if kills < POINTS else 60.0
                if not kills:  # so that something is there to go on with
                    wait_s = 0.0
                    until_a_task_is_done(process, out)
                until = time.monotonic() + wait_s
                while process.poll() is None and time.monotonic() < until:
                    time.sleep(0.01)
                if process.poll() is not None:
                    summary = done(process)
                    break
                process.send_signal(signal.SIGKILL)
                process.wait(10)
                kills += 1
        before += summary["before"]
        assert summary["done"] + summary["before"] == SHARDS
        assert taken(out) == wanted
    assert before


def test_an_interrupted_driver_leaves_a_job_to_go_on_with(
    raylets: RayCluster, inputs: str, out: Path, wanted: dict[str, bytes]
) -> None:
    shutil.rmtree(out, ignore_errors=True)
    with on_ray(raylets, inputs, out) as process:
        until_it_works(process, raylets)
        until_a_task_is_done(process, out)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
    finished = len(list(out.glob("_wds/map/0*.json")))
    assert 0 < finished < SHARDS
    with on_ray(raylets, inputs, out) as process:
        summary = done(process)
    assert (summary["done"], summary["before"]) == (SHARDS - finished, finished)
    assert taken(out) == wanted


def has_tasks(pid: int) -> bool:
    """Return whether threads of the process have processes of their own."""
    with contextlib.suppress(OSError):
        return any(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return False


@pytest.mark.timeout(3600 if ALL else 400)
def test_dask_workers_are_killed(dask: Any, inputs: str, out: Path, wanted: dict[str, bytes]) -> None:
    """Dask itself starts other workers, and gives their tasks to them."""
    rng, kills = random.Random(6), 0
    options = {"n_workers": 2, "threads_per_worker": 2, "dashboard_address": "127.0.0.1:0"}
    with dask.LocalCluster(**options) as cluster:
        while kills < POINTS:
            left = [None] * 2

            def kill(left: list[None] = left) -> bool:
                pids = [one.pid for one in cluster.workers.values() if one.pid and has_tasks(one.pid)]
                if not left or not pids:
                    return False
                left.pop()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    return True
                return False

            shutil.rmtree(out, ignore_errors=True)
            with meanwhile(kill, rng) as times:
                summary = job_of(inputs, out, engine=dist.DaskEngine(address=cluster.scheduler_address)).run()
            kills += len(times)
            assert summary.done == SHARDS
            assert taken(out) == wanted


@pytest.mark.timeout(3600 if ALL else 400)
@pytest.mark.parametrize("retries", ["1", ""], ids=["tasks are run again", "requests are sent again"])
def test_one_503_at_a_random_place_loses_no_sample(
    ray: Any, inputs: str, out: Path, origin: Origin, retries: str
) -> None:
    for shard in Path(inputs).parent.glob("*.tar"):
        origin.add(shard.name, shard.read_bytes())
    urls = f"{origin.base}/{Path(inputs).name}"
    shutil.rmtree(out, ignore_errors=True)
    variables = {"WDS_RETRIES": retries, "WDS_PART_SIZE": "64K"}

    def run() -> dist.JobSummary:
        return job_of(urls, out, "augment", engine=dist.RayEngine(runtime_env={"env_vars": variables})).run()

    assert run().samples_in == SHARDS * SAMPLES
    there, requests = taken(out), len(origin.requests)
    assert requests > 2 * SHARDS
    rng, again = random.Random(7), 0
    for place in [SHARDS, *(rng.randrange(requests) for _ in range(RUNS - 1))]:  # the first: after those of the plan
        origin.forget()
        origin.behave(status=503, skip=place, times=1)
        summary = run()
        assert (summary.done, summary.samples_in) == (SHARDS, SHARDS * SAMPLES)
        assert taken(out) == there
        again += summary.retried
    assert again > 0 if retries else again == 0
