"""torchdata's nodes: threads that fetch and unpack whole shards, and decode."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import functools
import urllib.request
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import decoded, untarred

__all__ = ["PEER"]


def _shard(url: str) -> list[dict[str, bytes]]:
    with urllib.request.urlopen(url) if "://" in url else open(url, "rb") as file:
        return list(untarred(file.read()))


def _samples(job: Job) -> Any:
    """A node of undecoded samples; its threads are as many as there would be workers."""
    from torchdata import nodes

    shards = nodes.ParallelMapper(nodes.IterableWrapper(job.urls), _shard, num_workers=max(2, job.workers))
    return nodes.Unbatcher(shards)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    from torchdata import nodes

    dataset = nodes.Loader(_samples(job))
    return lambda: job.count(dataset)


def loader(job: Job) -> Run:
    """Batches of undecoded samples."""
    from torchdata import nodes

    batches = nodes.Loader(nodes.Prefetcher(nodes.Batcher(_samples(job), job.batch, drop_last=False), 2))
    return lambda: job.count_batches((batch,) for batch in batches)


def images(job: Job) -> Run:
    """Pictures decoded by Pillow and cropped in threads, in batches."""
    import torch
    from torch.utils.data import default_collate
    from torchdata import nodes

    torch.set_num_threads(1)
    transform = functools.partial(decoded, size=job.size)
    pictures = nodes.ParallelMapper(_samples(job), transform, num_workers=job.workers, prebatch=16)
    collated = nodes.Mapper(nodes.Batcher(pictures, job.batch, drop_last=False), default_collate)
    batches = nodes.Loader(nodes.Prefetcher(collated, 2))
    return lambda: job.count_images(batches)


PEER = Peer(
    "torchdata 0.11 nodes: threads that fetch shards whole for Python's tarfile",
    tasks={"samples": samples, "loader": loader, "images": images},
    requirements=("torchdata>=0.11",),
    schemes=("file", "http", "https"),
)
