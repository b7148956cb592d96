"""Decoders, machines and trainers of feeds killed at any point: every batch once, in the same order.

``WDS_TEST_ALL_POINTS=1`` takes fifty kills in place of a few.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import feeds
from tests.distributed.feeds import expected, keys
from tests.servers.raycluster import ENVIRONMENT, RayCluster
from wds_async import distributed as dist

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("WDS_TEST_ALL_POINTS") == "1"
POINTS, PER_EPOCH = 50 if ALL else 3, 2
PATIENCE_S = 3600 if ALL else 180

pytestmark = pytest.mark.timeout(PATIENCE_S)


@pytest.fixture(scope="module", autouse=True)
def _shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(feeds.SHARDS, feeds.write_shards(tmp_path_factory.mktemp("feed"), 5, 20))
        yield


def ray_engine() -> dist.RayEngine:
    return dist.RayEngine(cpus=1, runtime_env={"env_vars": {feeds.SHARDS: os.environ[feeds.SHARDS]}})


def check_with_kills(feed: dist.Feed, kill: Callable[[random.Random], bool], points: int, seed: int = 0) -> None:
    """Take all batches of as many epochs as there are kills for, with a kill soon after some of the batches."""
    rng, done = random.Random(seed), []
    epochs = -(-points // PER_EPOCH)
    loader, wanted = feed.loader(0, 1), expected(feeds.slow, 2, epochs)
    for epoch in range(epochs):
        left = min(PER_EPOCH, points - epoch * PER_EPOCH)
        at = {rng.randrange(len(wanted[epoch])) for _ in range(left)}
        got = []
        for number, batch in enumerate(loader):
            got += keys([batch])
            if number in at:
                timer = threading.Timer(rng.random() * 0.1, lambda: done.append(kill(rng)))
                timer.start()
                if rng.random() < 0.5:
                    timer.join()
        assert got == wanted[epoch]
    timer.join()
    assert sum(done) >= points // 2  # others came when the last one had not been replaced, or fell on the same batch


def test_decoders_that_are_killed(tmp_path: Path) -> None:
    with dist.Feed(feeds.slow, decoders=2, ahead="20K") as feed:

        def kill(rng: random.Random) -> bool:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(feed._engine.pids()), signal.SIGKILL)  # type: ignore[union-attr]
                return True
            return False

        check_with_kills(feed, kill, POINTS)


class Elsewhere:
    """An actor that takes the first machine, which cannot be killed, so that decoders are on the others."""


def test_actors_and_machines_that_are_killed(ray: Any, raylets: RayCluster) -> None:
    first = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    elsewhere = ray.remote(Elsewhere).options(num_cpus=2, scheduling_strategy=first).remote()
    ray.get(elsewhere.__ray_ready__.remote(), timeout=60)
    killing = threading.Lock()
    with dist.Feed(feeds.slow, ray_engine(), decoders=2, ahead="20K") as feed:

        def kill_actor(rng: random.Random) -> bool:
            actor, _ = feed._engine._decoders[rng.randrange(2)]  # type: ignore[union-attr]
            with contextlib.suppress(ray.exceptions.RayError, ProcessLookupError):
                pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
                os.kill(pid, signal.SIGKILL)
                return True
            return False

        def kill_machine(rng: random.Random) -> bool:
            with killing:
                raylets.kill_raylet(rng.choice([1, 2]))
                raylets.restore()
            return True

        check_with_kills(feed, kill_actor, POINTS if ALL else 1)
        check_with_kills(feed, kill_machine, POINTS if ALL else 1, seed=1)
        ray.kill(elsewhere)


# ------------------------------------------------------------------ trainers


def run(folder: Path, ranks: int, epochs: int, state: Path | None) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.distributed.feed_trainer", f"{folder}/feed"]
    return [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(epochs), str(folder), *([str(state)] if state else [])],
            cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(ranks)
    ]  # fmt: skip


def lines(folder: Path, rank: int) -> list[Any]:
    with contextlib.suppress(FileNotFoundError):
        text = Path(folder, f"log-{rank}").read_text()
        return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
    return []


def latest_state(folder: Path, ranks: int) -> Path | None:
    """The state of the last step at which all ranks have saved theirs."""
    steps = [{path.name.split("-")[1] for path in folder.glob(f"state-*-{rank}")} for rank in range(ranks)]
    common = set.intersection(*steps)
    return folder / f"state-{max(common)}-0" if common else None


def check_trainers(feed: dist.Feed, folder: Path, kills: int, seed: int = 0) -> None:
    """Train with two ranks, kill one of them after some steps, and the other, as a launcher does; start both again."""
    rng, ranks = random.Random(seed), 2
    epochs = 2 + kills // 4
    (folder / "feed").write_bytes(pickle.dumps(feed))
    for kill in range(kills + 1):
        before = [len(lines(folder, rank)) for rank in range(ranks)]
        processes = run(folder, ranks, epochs, latest_state(folder, ranks))
        try:
            victim, steps = rng.randrange(ranks), rng.randrange(1, 12)
            while kill < kills and len(lines(folder, victim)) < before[victim] + steps:
                assert all(process.poll() in (None, 0) for process in processes)
                if all(process.poll() == 0 for process in processes):
                    break
                time.sleep(0.005)
            if kill == kills:
                assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
        finally:
            for process in (processes[victim], *processes):
                process.kill()
                process.wait()
    wanted = [batch for epoch in expected(feeds.slow, 2, epochs) for batch in epoch[:24]]
    for rank in range(ranks):
        entries = [line for line in lines(folder, rank) if line != "end"]
        by_step = {step: batch for _, step, batch in entries}
        assert all(by_step[step] == batch for _, step, batch in entries), "another batch at the same step"
        assert [by_step[step] for step in sorted(by_step)] == wanted[rank::ranks]


def test_trainers_that_are_killed(tmp_path: Path) -> None:
    with dist.Feed(feeds.slow, decoders=2, ahead="20K") as feed:
        check_trainers(feed, tmp_path, POINTS if ALL else 2)


def test_trainers_of_a_cluster_that_are_killed(ray: Any, tmp_path: Path) -> None:
    with dist.Feed(feeds.slow, ray_engine(), decoders=2, ahead="20K") as feed:
        check_trainers(feed, tmp_path, POINTS if ALL else 1)
