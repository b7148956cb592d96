"""What every engine that sends attempts to other processes does: the same tests for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.probes import Probe, Unloadable, task
from tests.distributed.test_kills import ended
from tests.servers.raycluster import RayCluster
from wds_async.distributed.engines import apart, engine_of
from wds_async.distributed.engines.base import TaskEngine
from wds_async.distributed.engines.local import pickled
from wds_async.distributed.tasks import AttemptResult
from wds_async.errors import ConfigError, WdsError

ENGINES = ("local", "ray", "dask")
LONG_S = 60.0


@pytest.fixture(scope="module")
def dask_address(dask: Any) -> Iterator[str]:
    from dask import config

    with (
        config.set({"distributed.scheduler.allowed-failures": 1, "distributed.comm.timeouts.connect": "3s"}),
        dask.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
    ):
        yield cluster.scheduler_address


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[TaskEngine]:
    options: dict[str, Any] = {"workers": 2}
    if request.param == "ray":
        request.getfixturevalue("ray")
        options = {}
    elif request.param == "dask":
        options = {"address": request.getfixturevalue("dask_address")}
    engine = engine_of(request.param, **options)
    yield engine
    engine.close()


def outcomes(engine: TaskEngine, count: int) -> dict[int, AttemptResult]:
    results: dict[int, AttemptResult] = {}
    until = time.monotonic() + LONG_S
    while len(results) < count:
        assert time.monotonic() < until, f"{len(results)} of {count} tasks ended"
        if (result := engine.outcome(1.0)) is not None:
            assert result.task not in results
            results[result.task] = result
    return results


def test_each_task_has_one_outcome(engine: TaskEngine, tmp_path: Path) -> None:
    engine.start(Probe(str(tmp_path)))
    assert engine.capacity >= 2
    for number in range(30):
        engine.submit(task(number, "fail" if number == 11 else ""))
    results = outcomes(engine, 30)
    assert engine.outcome(0.01) is None
    failed = results.pop(11)
    assert (failed.record, failed.error, failed.permanent, failed.lost) == (None, "it never works", True, False)
    assert all(one.record is not None and one.record.id == f"id{one.task}" for one in results.values())
    assert len(list(tmp_path.glob("*.began.*"))) == 30
    assert len({one.place for one in results.values()}) >= 2


def test_a_killed_process_loses_its_task_and_no_other(engine: TaskEngine, tmp_path: Path) -> None:
    engine.start(Probe(str(tmp_path)))
    for number in range(12):
        engine.submit(task(number, "die" if number in (2, 5) else ""))
    results = outcomes(engine, 12)
    lost = {number for number, one in results.items() if one.lost}
    assert lost == {2, 5}
    assert all(results[number].record is None and results[number].error for number in lost)
    assert all(results[number].record is not None for number in range(12) if number not in lost)


def test_a_task_may_be_given_again(engine: TaskEngine, tmp_path: Path) -> None:
    engine.start(Probe(str(tmp_path)))
    for _ in range(2):
        engine.submit(task(1))
        assert outcomes(engine, 1)[1].record is not None
    assert len(list(tmp_path.glob("1.began.*"))) == 2


def test_to_close_ends_what_runs(engine: TaskEngine, tmp_path: Path) -> None:
    engine.start(Probe(str(tmp_path)))
    for number in range(40):
        engine.submit(task(number, "sleep", seconds=3))
    until = time.monotonic() + LONG_S
    while not list(tmp_path.glob("*.began.*")):
        assert time.monotonic() < until
        time.sleep(0.02)
    engine.close()
    engine.close()
    time.sleep(3.5)
    began = list(tmp_path.glob("*.began.*"))
    time.sleep(1)
    assert list(tmp_path.glob("*.began.*")) == began
    assert not list(tmp_path.glob("*.ended"))


def test_what_does_not_pickle_is_refused_at_once(engine: TaskEngine) -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        engine.start(lambda task: AttemptResult(task.number))


def test_what_workers_cannot_load_is_an_error(engine: TaskEngine) -> None:
    engine.start(Unloadable())
    engine.submit(task(4))
    with contextlib.suppress(WdsError):
        result = outcomes(engine, 1)[4]
        assert "no such module" in result.error
        assert not result.lost
        assert engine.name != "local"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 1000}, "asks for CPU 1000, and no machine of the cluster has as much.*CPU 2"),
        ({"resources": {"tpu": 1}}, "CPU 1 and tpu 1.*tpu 0.*autoscaling=True"),
        ({"memory": "900T"}, "memory"),
    ],
)
def test_ray_a_task_that_fits_no_machine_is_refused(
    ray: Any, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of("ray", **options).start(Probe(str(tmp_path)))
    growing = engine_of("ray", autoscaling=True, **options)
    growing.start(Probe(str(tmp_path)))
    assert growing.capacity == 16
    growing.close()


@pytest.mark.parametrize(
    "options",
    [{"cpus": -1}, {"cpus": 0}, {"cpus": float("nan")}, {"memory": "much"}, {"resources": {"x": -2}}, {"wheels": 4}],
)
def test_ray_bad_options_are_refused(options: dict[str, Any]) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match="engine='ray'"):
        engine_of("ray", **options)


def test_ray_another_cluster_than_that_of_the_program(ray: Any, raylets: RayCluster, tmp_path: Path) -> None:
    engine_of("ray", address=raylets.address).start(Probe(str(tmp_path)))
    with pytest.raises(ConfigError, match="is connected to the cluster at 127"):
        engine_of("ray", address="127.0.0.1:1").start(Probe(str(tmp_path)))


def test_ray_a_local_folder_for_workers_belongs_to_ray_init(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only supported at the job level .*ray.init"):
        engine_of("ray", runtime_env={"working_dir": str(tmp_path)}).start(Probe(str(tmp_path)))


def test_dask_an_idle_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_IDLE_S", 0.5)
    monkeypatch.setattr(apart, "_is_cancelled", lambda key: False)
    job = pickled(Probe(str(tmp_path)))
    places = [apart.run_apart(job, task(number), "key").place for number in range(3)]
    assert len(set(places)) == 1
    pid, until = int(places[0]), time.monotonic() + LONG_S
    while not ended(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_dask_resources_that_no_worker_has(dask_address: str, tmp_path: Path) -> None:
    engine = engine_of("dask", address=dask_address, resources={"GPU": 1})
    with pytest.raises(ConfigError, match="none of 2 workers has as much"):
        engine.start(Probe(str(tmp_path)))
    engine.close()


@pytest.mark.parametrize("workers", [1, None])
def test_dask_a_cluster_of_its_own(dask: Any, tmp_path: Path, workers: int | None) -> None:
    engine = engine_of("dask", workers=workers)
    engine.start(Probe(str(tmp_path)))
    engine.submit(task(0))
    assert outcomes(engine, 1)[0].record is not None
    engine.close()
    engine.close()
