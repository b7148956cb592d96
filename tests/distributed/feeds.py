"""Pipelines of feeds, by their names; where their shards are comes by the environment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import wds_async as wds
from wds_async import world

__all__ = [
    "SHARDS",
    "broken",
    "by_ranks",
    "expected",
    "fatal",
    "images",
    "not_a_pipeline",
    "plain",
    "slow",
    "workers",
    "write_shards",
]

SHARDS = "WDS_TEST_FEED_SHARDS"
Sample = dict[str, Any]


def write_shards(folder: Path, shards: int = 6, samples: int = 20, size: int = 2000) -> str:
    for shard in range(shards):
        with wds.TarWriter(folder / f"t-{shard:03d}.tar", mtime=0) as sink:
            for n in range(samples):
                sink.write({"__key__": f"{shard:03d}-{n:03d}", "bin": bytes([n]) * size})
    return f"{folder}/t-{{000..{shards - 1:03d}}}.tar"


def _dataset() -> wds.WebDataset:
    return wds.WebDataset(os.environ[SHARDS], shardshuffle=100, nodesplitter=wds.split_by_node, seed=5)


def plain() -> Any:
    """Batches of keys and payload."""
    return _dataset().compose(wds.detshuffle(10, seed=3)).to_tuple("__key__", "bin").batched(4, partial=True)


def slow() -> Any:
    return (
        _dataset().map(_sleep).compose(wds.detshuffle(10, seed=3)).to_tuple("__key__", "bin").batched(4, partial=True)
    )


def _sleep(sample: Sample) -> Sample:
    time.sleep(0.005)
    return sample


def images() -> Any:
    """Batches that are large enough for shared memory, with a tensor, an array and bytes."""
    return _dataset().map(_image).batched(4, partial=True)


def _image(sample: Sample) -> tuple[str, Any]:
    return sample["__key__"], np.full((100, 200, 3), sample["bin"][0], np.uint8)


def workers() -> Any:
    """A DataLoader with two workers in the decoder."""
    return wds.WebLoader(plain(), batch_size=None, num_workers=2)


def broken() -> Any:
    return _dataset().map(_fail).to_tuple("__key__").batched(4)


def _fail(sample: Sample) -> Sample:
    if sample["__key__"] == "003-007":
        raise ValueError("this one never works")
    return sample


def fatal() -> Any:
    return _dataset().map(_die).to_tuple("__key__").batched(4)


def _die(sample: Sample) -> Sample:
    os.kill(os.getpid(), signal.SIGKILL)
    return sample


def not_a_pipeline() -> Iterator[int]:
    return iter([1, 2])


# ------------------------------------------------------------------ what a feed of them gives


def keys(batches: Any) -> list[list[str]]:
    return [list(batch[0]) for batch in batches]


def expected(pipeline: Callable[[], Any], decoders: int, epochs: int = 1) -> list[list[list[str]]]:
    """The keys of the batches of each epoch, in the order of their numbers."""
    shares = []
    for decoder in range(decoders):
        with world.standing_at(world.Place(decoder, decoders, 0, 1)):
            whole = pipeline()
            shares.append([keys(whole) for _ in range(epochs)])
    rounds = max(len(share[epoch]) for share in shares for epoch in range(epochs))
    return [
        [share[epoch][k] for k in range(rounds) for share in shares if k < len(share[epoch])] for epoch in range(epochs)
    ]


def by_ranks(feed: Any, world_size: int, epochs: int = 1, states: Any = None) -> list[list[list[list[str]]]]:
    """The keys that each rank gets, for each epoch."""

    def rank(number: int) -> list[list[list[str]]]:
        loader = feed.loader(number, world_size)
        if states is not None:
            loader.load_state_dict(states)
        try:
            return [keys(loader) for _ in range(epochs)]
        finally:
            loader.close()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))
