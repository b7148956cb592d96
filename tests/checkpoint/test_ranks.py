"""The state of all ranks in one checkpoint, over a real process group."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import wds_async as wds
from tests.checkpoint.pipelines import dataset, shown, taken, urls_in
from tests.servers import make_shards

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent.parent
RANKS = 2


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_rank_goes_on_where_it_was(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path / "shards", shards=12, samples=10)]
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.checkpoint.rank", str(tmp_path), *urls]
    jobs = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    try:
        assert [job.wait(120) for job in jobs] == [0] * RANKS
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    seen = []
    for rank in range(RANKS):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(result["begun"]) == 7
        assert result["begun"] + result["rest"] == result["whole"]
        seen += [key for batch in result["whole"] for key in batch]
    assert sorted(seen) == [f"{number:06d}" for number in range(120)]


def test_it_is_the_loader_in_all_else(tmp_path: Path) -> None:
    urls = urls_in(tmp_path / "shards")
    inner = dataset(urls, shardshuffle="epoch", seed=1).with_length(35, silent=True)
    outer = wds.AllRanks(inner)
    assert len(outer) == 35
    epochs = [shown(outer) for _ in range(2)]
    outer.set_epoch(0)
    assert shown(outer) == epochs[0]
    for twin in (copy.copy(outer), pickle.loads(pickle.dumps(outer))):
        twin.set_epoch(1)
        iterator = iter(twin)
        begun = taken(iterator, 9)
        state = json.loads(json.dumps(twin.state_dict()))
        other = wds.AllRanks(dataset(urls, shardshuffle="epoch", seed=1))
        other.load_state_dict(state)
        assert [*begun, *shown(other)] == epochs[1]
    with pytest.raises(AttributeError, match="nothing"):
        _ = outer.nothing
