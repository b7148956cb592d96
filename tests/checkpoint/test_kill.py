"""A training that is killed at any batch, and started again, reads what it would have read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.checkpoint.pipelines import urls_in
from tests.servers import Nginx

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent.parent

TRAININGS = [
    ("shuffle", 0, "fork"),
    ("shuffle", 2, "fork"),
    ("batched", 2, "forkserver"),
    ("random map", 3, "fork"),
    ("random mix", 1, "spawn"),
    ("resampled", 2, "fork"),
]


def start(folder: Path, training: tuple[str, int, str], urls: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the training, whose random numbers follow from its arguments."""
    folder.mkdir(exist_ok=True)
    name, workers, method = training
    code = (
        "import random, torch, numpy, pathlib, sys; random.seed(1); torch.manual_seed(1); numpy.random.seed(1);"
        "from tests.checkpoint.training import main; main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]),"
        "sys.argv[4], sys.argv[5:])"
    )
    arguments = [str(folder), name, str(workers), method, *urls]
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, *arguments], cwd=ROOT, start_new_session=True)


def run_killed(folder: Path, training: tuple[str, int, str], urls: Sequence[str], seed: int) -> int:
    """Run the training to its end, and kill it now and then. Return how often it was killed."""
    rng, kills = random.Random(seed), 0
    while not (folder / "done").exists():
        process = start(folder, training, urls)
        try:
            lines = count(folder) + rng.randint(1, 25) if kills < 2 else 10**9
            while process.poll() is None and count(folder) < lines:
                time.sleep(0.005)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
            process.wait()
        assert process.returncode in (0, -signal.SIGKILL)
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
    assert start(tmp_path / "whole", training, urls).wait() == 0
    kills = run_killed(tmp_path / "killed", training, urls, seed=len(str(training)))
    assert kills
    assert (tmp_path / "killed" / "batches").read_text() == (tmp_path / "whole" / "batches").read_text()
