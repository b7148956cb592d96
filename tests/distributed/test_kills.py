"""Workers and drivers killed at many points, and several runners at once: the same records and the same bytes.

``WDS_TEST_ALL_POINTS=1`` takes fifty points each in place of a few.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.test_mapping import files

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("WDS_TEST_ALL_POINTS") == "1"
POINTS = 50 if ALL else 3
KILLS_A_RUN = 6  # on a busy machine, no task would ever come to its end if there were more and more
SHARDS, SAMPLES = 8, 40


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("in")
    for shard in range(SHARDS):
        with wds.TarWriter(folder / f"t-{shard:03d}.tar", mtime=0) as sink:
            for n in range(SAMPLES):
                sink.write({"__key__": f"{shard:04d}-{n:03d}", "bin": b"x" * 3000})
    return f"{folder}/t-{{000..{SHARDS - 1:03d}}}.tar"


@pytest.fixture(scope="module")
def wanted(inputs: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run without any fault leaves."""
    folder = tmp_path_factory.mktemp("wanted")
    with driver(inputs, folder) as process:
        assert done(process)["done"] == SHARDS
    return whole(folder)


def whole(folder: Path) -> dict[str, bytes]:
    """What is visible in a folder: without what a killed writer left behind, which no listing shows."""
    there = {name: data for name, data in files(folder).items() if not Path(name).name.startswith(".")}
    for name in [name for name in there if "_wds/" in name and not name.endswith(("job.json", ".zst"))]:
        there[name] = b"".join(line for line in there[name].splitlines(True) if b'"id"' not in line)
    del there["_wds/map/job.json"]  # it names the folder
    return there


@contextlib.contextmanager
def driver(inputs: str, folder: Path, **arguments: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {name: str(arguments.pop(name)) for name in list(arguments) if name.isupper()}
    options = [f"{name}={json.dumps(value)}" for name, value in {"workers": 2, "maxcount": 15, **arguments}.items()]
    command = [sys.executable, "-m", "tests.distributed.driver", inputs]
    process = subprocess.Popen(
        [*command, f"{folder}/o-{{task:04d}}-{{part:02d}}.tar", *options],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "begin\n"
            yield process
        finally:
            process.kill()


def done(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout is not None
    last = process.stdout.readlines()[-1:]
    assert process.wait(60) == 0
    summary: dict[str, int] = json.loads(last[0])
    return summary


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(one) for one in text.split()]


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.timeout(3600 if ALL else 120)
def test_workers_are_killed_while_a_job_runs(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    rng, kills, lost, run = random.Random(1), 0, 0, 0
    while kills < POINTS:
        run += 1
        until = min(POINTS, kills + KILLS_A_RUN)
        with driver(inputs, tmp_path / str(run), attempts=20) as process:
            while process.poll() is None and kills < until:
                time.sleep(rng.uniform(0.5, 2.5))
                if pids := children(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(pids), signal.SIGKILL)
                        kills += 1
            summary = done(process)
        lost += summary["lost"]
        assert summary["done"] == SHARDS
        assert whole(tmp_path / str(run)) == wanted
    assert lost


@pytest.mark.timeout(3600 if ALL else 120)
def test_drivers_are_killed_and_started_again(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    rng, kills, run = random.Random(2), 0, 0
    while kills < POINTS:
        run += 1
        while True:
            with driver(inputs, tmp_path / str(run)) as process:
                until = time.monotonic() + (rng.uniform(0.0, 3.0) if kills < POINTS else 60)
                while process.poll() is None and time.monotonic() < until:
                    time.sleep(0.01)
                workers = children(process.pid)
                if process.poll() is not None:
                    assert done(process)
                    break
                process.send_signal(signal.SIGKILL)
                kills += 1
                process.wait(10)
            until = time.monotonic() + 20  # workers end with the process that started them
            while not all(map(ended, workers)) and time.monotonic() < until:
                time.sleep(0.01)
            assert all(map(ended, workers))
        assert whole(tmp_path / str(run)) == wanted


def test_two_runners_at_once(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    with driver(inputs, tmp_path, workers=1) as one, driver(inputs, tmp_path, workers=1) as two:
        first, second = done(one), done(two)
    assert all(summary["done"] + summary["before"] == SHARDS for summary in (first, second))
    assert whole(tmp_path) == wanted


@pytest.mark.timeout(3600 if ALL else 120)
def test_ranks_share_the_tasks_and_one_of_them_is_killed(inputs: str, wanted: dict[str, bytes], tmp_path: Path) -> None:
    rng = random.Random(3)
    for point in range(POINTS if ALL else 1):
        one_rank_is_killed(inputs, tmp_path / str(point), rng.uniform(0.0, 3.0) if ALL else 0.0)
        assert whole(tmp_path / str(point)) == wanted


def one_rank_is_killed(inputs: str, folder: Path, after_s: float) -> None:
    """Run a job by three ranks, kill the second one, and start it again."""
    ranks = [{"RANK": 0}, {"JOB_COMPLETION_INDEX": 1}, {"RANK": 2}]
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(driver(inputs, folder, engine="rank", workers=1, WORLD_SIZE=3, **rank))
            for rank in ranks
        ]
        time.sleep(after_s)
        running[1].send_signal(signal.SIGKILL)
        running[1].wait(10)
        summaries = [done(running[0]), done(running[2])]
    assert [summary["done"] for summary in summaries] == [3, 2]
    with driver(inputs, folder, engine="rank", workers=1, WORLD_SIZE=3, **ranks[1]) as process:
        summary = done(process)
    assert 0 <= SHARDS - summary["before"] <= 3
