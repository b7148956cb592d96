"""Several ranks that are killed and go on have the losses of a training that was not, to the last bit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import make_shards

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent.parent
STEPS = 20  # into the second epoch of 12


def start(folder: Path, ranks: int, urls: list[str]) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    folder.mkdir(exist_ok=True)
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.ddp", str(folder), str(STEPS), *urls]
    return [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank)}, start_new_session=True)
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks; end them where one hangs, or has failed."""
    try:
        for process in processes:
            assert process.wait(timeout=100) == 0
    finally:
        kill(processes)


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def losses(folder: Path, ranks: int) -> list[str]:
    return [(folder / f"losses-{rank}").read_text() for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_losses_of_ranks_that_were_killed(ranks: int, tmp_path: Path) -> None:
    # Shards that no number of ranks shares out evenly.
    urls = [str(path) for path in make_shards(tmp_path / "shards", shards=19, samples=5)]
    finish(start(tmp_path / "whole", ranks, urls))
    killed = tmp_path / "killed"
    for step in (7, 14):
        processes = start(killed, ranks, urls)
        deadline = time.monotonic() + 100
        while not (killed / f"model-{step}.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        kill(processes)
    finish(start(killed, ranks, urls))
    assert losses(killed, ranks) == losses(tmp_path / "whole", ranks)
    assert len(set(losses(killed, ranks)[0].split())) == STEPS
