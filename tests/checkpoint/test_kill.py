"""A training that is killed at any batch, and started again, reads what it would have read."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.checkpoint.pipelines import urls_in
from tests.checkpoint.processes import kill, started
from tests.servers import Nginx

pytest.importorskip("torch")

TRAININGS = [
    ("shuffle", 0, "fork"),
    ("random map", 3, "fork"),
    ("random mix", 1, "spawn"),
]


def start(folder: Path, training: tuple[str, int, str], urls: Sequence[str]) -> BaseProcess:
    """Start the training, whose random numbers follow from its arguments."""
    from tests.checkpoint.training import seeded

    folder.mkdir(exist_ok=True)
    return started(seeded, folder, *training, list(urls), fresh=training[2] != "fork")


def run_killed(folder: Path, training: tuple[str, int, str], urls: Sequence[str], seed: int) -> int:
    """Run the training to its end, and kill it now and then. Return how often it was killed."""
    rng, kills = random.Random(seed), 0
    while not (folder / "done").exists():
        process = start(folder, training, urls)
        try:
            lines = count(folder) + rng.randint(1, 25) if kills < 2 else 10**9
            while process.is_alive() and count(folder) < lines:
                time.sleep(0.005)
        finally:
            kills += process.is_alive()
            kill(process)
        assert process.exitcode in (0, -signal.SIGKILL)
    return kills


def count(folder: Path) -> int:
    path = folder / "batches"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_killed_and_started_again(training: tuple[str, int, str], tmp_path: Path, nginx: Callable[..., Nginx]) -> None:
    server = nginx(tmp_path / "shards")
    urls = [server.url(Path(path).name) for path in urls_in(tmp_path / "shards")]
    whole = start(tmp_path / "whole", training, urls)
    whole.join()
    assert whole.exitcode == 0
    kills = run_killed(tmp_path / "killed", training, urls, seed=len(str(training)))
    assert kills
    assert (tmp_path / "killed" / "batches").read_text() == (tmp_path / "whole" / "batches").read_text()
