"""Several ranks that are killed and go on have the losses of a training that was not, to the last bit."""

from __future__ import annotations

import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.checkpoint.processes import kill, started
from tests.servers import make_shards

pytest.importorskip("torch")
STEPS = 20  # into the second epoch of 12


def start(folder: Path, ranks: int, urls: list[str]) -> list[BaseProcess]:
    from tests.checkpoint import ddp

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    folder.mkdir(exist_ok=True)
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [started(ddp.main, folder, STEPS, urls, **common, RANK=str(rank)) for rank in range(ranks)]


def finish(processes: list[BaseProcess]) -> None:
    """Wait for all ranks; end them where one hangs, or has failed."""
    try:
        for process in processes:
            process.join(timeout=100)
            assert process.exitcode == 0
    finally:
        for process in processes:
            kill(process)


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
        for process in processes:
            kill(process)
    finish(start(killed, ranks, urls))
    assert losses(killed, ranks) == losses(tmp_path / "whole", ranks)
    assert len(set(losses(killed, ranks)[0].split())) == STEPS
