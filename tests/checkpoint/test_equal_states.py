"""States of ranks that compare what they have (``equal=`` without ``steps=``)."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.checkpoint.pipelines import shown
from tests.servers import make_shards
from tests.test_equalsteps import Ranks
from wds_async import equalsteps

SIZES = [3, 1, 4]
"""Shards of each rank."""

PIPELINES: dict[str, Callable[[Any], Any]] = {
    "shuffled batches": lambda samples: samples.shuffle(7, seed=1).to_tuple("__key__").batched(2),
    "unseeded shuffle": lambda samples: samples.shuffle(7),
    "of two passes": lambda samples: samples.shuffle(3, seed=2).repeat(2),
}


class Jobs:
    """Ranks as threads, each with shards of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.urls = [
            [str(path) for path in make_shards(folder / str(rank), shards=count, samples=4)]
            for rank, count in enumerate(SIZES)
        ]
        self.own = threading.local()
        monkeypatch.setattr(equalsteps, "_tally_of_ranks", lambda: self.own.tally)

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """Return what ``job(rank)`` returned on each rank."""
        ranks = Ranks(len(SIZES))

        def one(rank: int) -> Any:
            self.own.tally = ranks.tally(rank)
            return job(rank)

        with ThreadPoolExecutor(len(SIZES)) as threads:
            return list(threads.map(one, range(len(SIZES))))

    def dataset(self, rank: int, name: str, mode: str) -> Any:
        return PIPELINES[name](wds.WebDataset(self.urls[rank], shardshuffle=3, seed=1, equal=mode))


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "mode", "rarely"),
    [
        *itertools.product(["shuffled batches", "of two passes"], ["drop", "pad", "repeat"], [False]),
        ("unseeded shuffle", "pad", False),
        ("of two passes", "drop", True),
        ("of two passes", "pad", True),
    ],
)
def test_goes_on_exactly_at_every_point(
    name: str, mode: str, rarely: bool, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equalsteps, "_SAVE_EVERY", 10**9 if rarely else 0)

    def whole(rank: int) -> Any:
        pipeline = jobs.dataset(rank, name, mode)
        shown(pipeline)
        states, items = [], []
        for item in pipeline:
            items += shown([item])
            states.append(json.loads(json.dumps(pipeline.state_dict())))
        return states, items, shown(pipeline)

    ranks = jobs.run(whole)
    assert len({len(items) for _, items, _ in ranks}) == 1
    for count in range(1, len(ranks[0][1]) + 1, 2 if rarely else 1):

        def resumed(rank: int, count: int = count) -> Any:
            pipeline = jobs.dataset(rank, name, mode)
            pipeline.load_state_dict(ranks[rank][0][count - 1])
            iterator = iter(pipeline)
            first = shown(itertools.islice(iterator, 3))
            state = json.loads(json.dumps(pipeline.state_dict()))
            del iterator
            pipeline = jobs.dataset(rank, name, mode)
            pipeline.load_state_dict(state)
            rest = shown(pipeline) if len(first) == 3 else []
            return first + rest, shown(pipeline) if first else None

        for rank, (items, later) in enumerate(jobs.run(resumed)):
            assert items == ranks[rank][1][count:], (count, rank)
            assert name == "unseeded shuffle" or later in (None, ranks[rank][2]), (count, rank)
