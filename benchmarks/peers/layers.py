"""The reading of this library cut off behind one layer: what a byte and a sample cost up to there."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def _same(sample: Any) -> Any:
    return sample


def _members(job: Job, *, copies: bool) -> Run:
    from wds_async.tar.parse import member_views, members_of
    from wds_async.tar.source import ByteSource
    from wds_async.transfer.reader import open_shards

    walk: Callable[[ByteSource], Iterator[Any]] = members_of if copies else member_views

    def run() -> int:
        with open_shards(job.urls) as shards:
            for shard in shards:
                for _ in walk(ByteSource(shard.read, shard.url)):
                    pass
        return 0

    return run


def _engine(job: Job) -> Run:
    from wds_async.transfer.reader import open_shards

    def run() -> int:
        with open_shards(job.urls) as shards:
            for shard in shards:
                while shard.read() is not None:
                    pass
        return 0

    return run


def _group(job: Job) -> Run:
    from wds_async.tar.group import samples
    from wds_async.tar.parse import members_of
    from wds_async.tar.source import ByteSource
    from wds_async.transfer.reader import open_shards

    def run() -> int:
        with open_shards(job.urls) as shards:
            return sum(job.count(samples(members_of(ByteSource(shard.read, shard.url)), shard.url)) for shard in shards)

    return run


def _pipeline(job: Job, more: Callable[[Any], Any] = _same) -> Run:
    import wds_async as wds

    dataset = more(wds.WebDataset(job.urls, shardshuffle=False))
    return lambda: job.count(dataset)


def _batches(job: Job, workers: int | None) -> Run:
    import wds_async as wds

    fields = job.options["fields"]
    dataset = wds.WebDataset(job.urls, shardshuffle=False).to_tuple(*fields).batched(job.batch)
    batches = dataset if workers is None else wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    return lambda: job.count_batches(batches)


_LAYERS: dict[str, Callable[[Job], Run]] = {
    "engine": _engine,
    "parse": functools.partial(_members, copies=False),
    "copy": functools.partial(_members, copies=True),
    "group": _group,
    "pipeline": _pipeline,
    "shuffle": functools.partial(_pipeline, more=lambda dataset: dataset.shuffle(1000, seed=1)),
    "map": functools.partial(_pipeline, more=lambda dataset: dataset.map(_same)),
    "batch": functools.partial(_batches, workers=None),
    "worker": functools.partial(_batches, workers=1),
}


def layers(job: Job) -> Run:
    """Everything up to the layer ``job.options["layer"]``."""
    return _LAYERS[job.options["layer"]](job)


PEER = Peer("this library, cut off behind a layer (for the scenario layers)", tasks={"layers": layers})
