"""This library with threads in the place of DataLoader workers."""

from __future__ import annotations

from benchmarks.peer import Job, Peer, Run
from benchmarks.peers.wds_async import PEER as WORKERS
from benchmarks.peers.wds_async import images_with, loader_with

__all__ = ["PEER"]


def loader(job: Job) -> Run:
    """Batches of undecoded samples, made on a thread."""
    return loader_with(job, threads=job.workers)


def images(job: Job) -> Run:
    """Pictures decoded and cropped on as many threads as there would be workers."""
    return images_with(job, threads=job.workers)


PEER = Peer(
    "this library, with WebLoader(threads=n) in the place of worker processes",
    tasks={"loader": loader, "images": images},
    schemes=WORKERS.schemes,
)
