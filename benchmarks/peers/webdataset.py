"""WebDataset as its documents show it: each shard through a pipe from ``curl``."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import functools

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER", "loader", "samples"]


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    import webdataset as wds

    options = {**job.options, **({"cache_dir": job.folder} if job.cache else {})}
    dataset = wds.WebDataset(job.urls, shardshuffle=False, **options)
    return lambda: job.count(dataset)


def loader(job: Job) -> Run:
    """Batches of undecoded samples from DataLoader workers."""
    import torch
    import webdataset as wds

    torch.set_num_threads(1)
    dataset = wds.WebDataset(job.urls, shardshuffle=False, **job.options).to_tuple("jpg", "cls", "json")
    batches = wds.WebLoader(dataset.batched(job.batch), batch_size=None, num_workers=job.workers)
    return lambda: job.count_batches(batches)


def images(job: Job) -> Run:
    """Pictures decoded and cropped by Pillow in DataLoader workers, in batches."""
    import torch
    import webdataset as wds

    from benchmarks.pictures import random_resized_crop

    torch.set_num_threads(1)
    dataset = wds.WebDataset(job.urls, shardshuffle=False, **job.options).decode("pil").to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(functools.partial(random_resized_crop, size=job.size), int).batched(job.batch)
    batches = wds.WebLoader(dataset, batch_size=None, num_workers=job.workers)
    return lambda: job.count_images(batches)


PEER = Peer(
    "WebDataset 1.0.2, each shard through a pipe from curl",
    tasks={"samples": samples, "loader": loader, "images": images},
    requirements=("webdataset==1.0.2",),
    schemes=("file", "http", "https"),
    programs=("curl",),
    cannot={"resume": "has no state", **dict.fromkeys(("s3", "gs", "az"), "reads it by a program of the store's own")},
)
