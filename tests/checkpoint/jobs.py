"""The ranks of one job, in one process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

import wds_async as wds

__all__ = ["Job"]


class Job:
    """The ranks of one job, in this process one after the other; ``state`` is a merged one to go on from. ``make``
    makes the dataset of a rank; ``workers`` puts a loader behind it."""

    def __init__(
        self,
        make: Callable[[], Any],
        ranks: int,
        workers: int | None,
        monkeypatch: pytest.MonkeyPatch,
        state: Any = None,
        **kw: Any,
    ) -> None:
        self.monkeypatch, self.ranks = monkeypatch, ranks
        self.loaders: list[Any] = []
        for rank in range(ranks):
            self.be(rank)
            loader = make()
            if workers is not None:
                loader = wds.WebLoader(loader, batch_size=None, num_workers=workers, **kw)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            self.loaders.append(loader)
        self.begin()

    def begin(self) -> None:
        """Begin an iteration of each rank."""
        self.iterators = []
        for rank, loader in enumerate(self.loaders):
            self.be(rank)
            self.iterators.append(iter(loader))

    def be(self, rank: int) -> None:
        self.monkeypatch.setenv("RANK", str(rank))
        self.monkeypatch.setenv("WORLD_SIZE", str(self.ranks))

    def items(self, count: int | None = None) -> list[list[Any]]:
        """Return the next ``count`` items of each rank, or all that are left."""
        items = []
        for rank, iterator in enumerate(self.iterators):
            self.be(rank)
            items.append(list(itertools.islice(iterator, count)))
        return items

    def take(self, count: int | None = None) -> list[str]:
        """Return the keys of the next ``count`` samples of each rank, or of all that are left."""
        items = itertools.chain.from_iterable(self.items(count))
        return [item["__key__"] if isinstance(item, dict) else repr(item) for item in items]

    def batches(self, count: int | None = None) -> list[list[str]]:
        """Return the next global batches: those of the ranks, joined."""
        return [list(itertools.chain(*batch)) for batch in zip(*self.items(count), strict=True)]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()

    def merged(self) -> Any:
        states = []
        for rank, loader in enumerate(self.loaders):
            self.be(rank)
            states.append(json.loads(json.dumps(loader.state_dict())))
        return wds.merge_states(states[::-1])
