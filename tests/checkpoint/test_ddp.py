"""Several ranks that are killed and go on have the losses of a training that was not, to the last bit."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.processes import kill, started
from tests.servers import make_shards

pytest.importorskip("torch")
STEPS = 20  # into the second epoch of 12


def start(folder: Path, ranks: int, kind: str, urls: list[str]) -> list[BaseProcess]:
    from tests.checkpoint import ddp

    folder.mkdir(exist_ok=True)
    return launch(ddp.main, ranks, folder, STEPS, kind, urls)


def launch(job: Callable[..., None], ranks: int, *arguments: Any) -> list[BaseProcess]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [started(job, *arguments, **common, RANK=str(rank)) for rank in range(ranks)]


def finish(processes: list[BaseProcess]) -> None:
    """Wait for all ranks; end them where one hangs, or has failed."""
    try:
        for process in processes:
            process.join(timeout=100)
            assert process.exitcode == 0
    finally:
        for process in processes:
            kill(process)


def run_steps(folder: Path, *arguments: Any, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank of `tests.checkpoint.steps` wrote."""
    from tests.checkpoint import steps

    finish(launch(steps.main, ranks, *arguments))
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def losses(folder: Path, ranks: int) -> list[str]:
    return [(folder / f"losses-{rank}").read_text() for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["epoch", "drop, with stages behind", "pad in this process"])
def test_the_losses_of_ranks_that_were_killed(kind: str, tmp_path: Path) -> None:
    ranks = 2
    # Shards that no number of ranks shares out evenly.
    urls = [str(path) for path in make_shards(tmp_path / "shards", shards=19, samples=5)]
    finish(start(tmp_path / "whole", ranks, kind, urls))
    killed = tmp_path / "killed"
    for step in (7, 14):
        processes = start(killed, ranks, kind, urls)
        deadline = time.monotonic() + 100
        while not (killed / f"model-{step}.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in processes:
            kill(process)
    finish(start(killed, ranks, kind, urls))
    assert losses(killed, ranks) == losses(tmp_path / "whole", ranks)
    assert len(set(losses(killed, ranks)[0].split())) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["drop", "pad 9"])
def test_ranks_that_were_others_before_take_as_many_steps(kind: str, tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path / "shards", shards=13, samples=5)]
    seen: Counter[str] = Counter()
    before = tmp_path / "none"
    for ranks, workers, stop in ((3, 2, 2), (2, 1, 0)):
        after = tmp_path / f"{ranks}-{workers}"
        found = run_steps(after, before, after, kind, workers, stop, urls, ranks=ranks)
        assert len({len(one["batches"]) for one in found}) == 1
        assert stop in (0, len(found[0]["batches"]))
        seen.update(key for one in found for batch in one["batches"] for key in batch)
        before = after
    if kind == "drop":
        assert set(seen.values()) == {1}
        assert len(seen) > 40
    else:  # 27 steps in all: 6 of three ranks, and 11 for each of two
        assert len(found[0]["batches"]) == 11
