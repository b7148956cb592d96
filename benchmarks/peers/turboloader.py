"""TurboLoader: tars of JPEGs, decoded, cropped and resized into the batch by C++ threads."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def images(job: Job) -> Run:
    """Its batches as one array, shard after shard, because it takes one archive at a time.

    Its fused random crop reads local archives only. From HTTP it resizes the whole picture, which is less work for the
    resizing and more for the decoder.
    """
    import turboloader

    local = "://" not in job.urls[0]

    def batches() -> Iterator[Any]:
        for url in job.urls:
            with turboloader.DataLoader(
                url,
                batch_size=job.batch,
                num_workers=max(1, job.workers),
                image_size=job.size,
                output_format="pytorch",
                train_aug=local,
                hflip_prob=0.0,
            ) as loader:
                yield from loader

    return lambda: job.count_images(batches())


PEER = Peer(
    "TurboLoader 2.39: C++ threads decode, crop (local files only) and resize into the batch",
    tasks={"images": images},
    requirements=("turboloader==2.39.0",),
    schemes=("file", "http"),
    cannot={"https": "its own libcurl finds no certificates"}
    | dict.fromkeys(("samples", "loader"), "hands out decoded pictures only"),
)
