"""WebDataset as its documents show it: each shard through a pipe from ``curl``."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER", "loader", "samples"]


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    import webdataset as wds

    dataset = wds.WebDataset(job.urls, shardshuffle=False, **job.options)
    return lambda: job.count(dataset)


def loader(job: Job) -> Run:
    """Batches of undecoded samples from DataLoader workers."""
    import torch
    import webdataset as wds

    torch.set_num_threads(1)
    dataset = wds.WebDataset(job.urls, shardshuffle=False, **job.options).to_tuple("jpg", "cls", "json")
    batches = wds.WebLoader(dataset.batched(job.batch), batch_size=None, num_workers=job.workers)
    return lambda: job.count_batches(batches)


PEER = Peer(
    "WebDataset 1.0.2, each shard through a pipe from curl",
    tasks={"samples": samples, "loader": loader},
    requirements=("webdataset==1.0.2",),
    schemes=("file", "http", "https"),
    programs=("curl",),
    cannot={scheme: f"its {tool} pipe has no endpoint to set" for scheme, tool in {"gs": "gsutil", "az": "az"}.items()},
)
