"""This library, with its default settings."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def _dataset(job: Job) -> Any:
    """The dataset with ``job.options``; ``loop="asyncio"`` takes asyncio's own event loop where uvloop's would be
    taken."""
    import wds_async as wds
    from wds_async import background
    from wds_async.storage.registry import import_clients

    options = dict(job.options, **({"cache_dir": job.folder} if job.cache else {}))
    if options.pop("loop", "") == "asyncio":
        vars(background)["new_event_loop"] = asyncio.new_event_loop
    dataset = wds.WebDataset(job.urls, **{"shardshuffle": False, **options})
    import_clients(job.urls)
    return dataset


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    dataset = _dataset(job)
    return lambda: job.count(dataset)


def resume(job: Job) -> Run:
    """Go on at the middle of the epoch, in a dataset made anew."""
    before = _dataset(job)
    iterator = iter(before)
    for _ in range(job.samples // 2):
        next(iterator)
    state = before.state_dict()
    del iterator
    dataset = _dataset(job)

    def run() -> int:
        dataset.load_state_dict(state)
        return job.count(dataset)

    return run


def loader(job: Job) -> Run:
    """Batches of undecoded samples from the workers of a `WebLoader`."""
    return loader_with(job, num_workers=job.workers)


def images(job: Job) -> Run:
    """Pictures decoded and cropped in the workers of a `WebLoader`, in batches."""
    return images_with(job, num_workers=job.workers)


def loader_with(job: Job, **options: int) -> Run:
    """Batches of undecoded samples from a `WebLoader` with these ``options``."""
    import torch

    import wds_async as wds

    torch.set_num_threads(1)
    dataset = _dataset(job).to_tuple("jpg", "cls", "json").batched(job.batch)
    batches = wds.WebLoader(dataset, batch_size=None, **options)
    return lambda: job.count_batches(batches)


def images_with(job: Job, **options: int) -> Run:
    """Pictures decoded and cropped, in batches, from a `WebLoader` with these ``options``."""
    import torch

    import wds_async as wds

    torch.set_num_threads(1)
    dataset = _dataset(job).decode("torchrgb", size=job.size, crop="random").to_tuple("jpg", "cls").batched(job.batch)
    batches = wds.WebLoader(dataset, batch_size=None, **options)
    return lambda: job.count_images(batches)


PEER = Peer(
    "this library: asyncio engine, one window of parts, tar headers read in place",
    tasks={"samples": samples, "loader": loader, "images": images, "resume": resume},
    schemes=("file", "http", "https", "s3", "gs", "az", "ais"),
)
