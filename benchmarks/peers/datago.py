"""Datago: tars over HTTP, fetched and decoded by Rust's threads."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def _braced(urls: list[str]) -> str:
    """Return the URLs as one pattern, which is what it takes: a range of the numbers in front of ``.tar``."""
    (stem, _, first), (_, _, last) = (url.removesuffix(".tar").rpartition("-") for url in (urls[0], urls[-1]))
    return f"{stem}-{{{first}..{last}}}.tar"


def images(job: Job) -> Run:
    """Pictures decoded and resized whole, one by one; the batches are made here."""
    import datago
    import numpy as np

    datago.initialize_logging(log_level="error")
    config = {
        "source_type": "webdataset",
        "source_config": {
            "url": _braced(job.urls),
            "random_sampling": False,
            "concurrent_downloads": 8,
            "rank": 0,
            "world_size": 1,
        },
        "image_config": {
            "crop_and_resize": True,
            "default_image_size": job.size,
            "downsampling_ratio": 32,
            "min_aspect_ratio": 1.0,
            "max_aspect_ratio": 1.0,
            "pre_encode_images": False,
            "image_to_rgb8": True,
        },
        "prefetch_buffer_size": 128,
        "samples_buffer_size": 64,
        "limit": job.samples,
    }
    client = datago.DatagoClient(json.dumps(config))

    def batches() -> Iterator[Any]:
        batch = np.empty((job.batch, 3, job.size, job.size), np.float32)
        held = 0
        client.start()
        while (sample := client.get_sample()) is not None:
            pixels = sample.image.to_numpy_array()
            np.multiply(pixels.transpose(2, 0, 1), np.float32(1 / 255), out=batch[held])
            held += 1
            if held == job.batch:
                yield (batch,)
                batch, held = np.empty_like(batch), 0
        if held:
            yield (batch[:held],)
        client.stop()

    return lambda: job.count_images(batches())


PEER = Peer(
    "Datago 2026.10 (Rust threads): pictures resized whole, without a random part",
    tasks={"images": images},
    requirements=("datago==2026.10.1",),
    schemes=("http", "https"),
    cannot={"file": "its WebDataset source takes URLs only"}
    | dict.fromkeys(("samples", "loader"), "hands out decoded pictures only"),
)
