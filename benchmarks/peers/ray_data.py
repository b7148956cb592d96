"""Ray Data's reader of WebDatasets, on a cluster of this machine alone."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import decoded

__all__ = ["PEER"]


def _dataset(job: Job) -> Any:
    """The data set without decoding; the cluster runs before the clock starts."""
    import ray
    import ray.data

    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=1 << 30,
        log_to_driver=False,
        logging_level="ERROR",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel("ERROR")
    return ray.data.read_webdataset(job.urls, decoder=None)


def samples(job: Job) -> Run:
    """Undecoded samples in the driver, read by its worker processes."""
    dataset = _dataset(job)
    return lambda: job.count(dataset.iter_rows())


def loader(job: Job) -> Run:
    """Batches of undecoded samples in the driver."""
    batches = _dataset(job).iter_batches(batch_size=job.batch, prefetch_batches=2)
    return lambda: job.count_batches(batches, "__key__")


def images(job: Job) -> Run:
    """Pictures decoded by Pillow and cropped in its worker processes, in batches."""

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        picture, label = decoded(sample, job.size)
        return {"jpg": picture, "cls": label}

    batches = _dataset(job).map(transform).iter_batches(batch_size=job.batch, prefetch_batches=2)
    return lambda: job.count_images(batches, "jpg")


PEER = Peer(
    "Ray Data, read_webdataset(decoder=None), through its object store",
    tasks={"samples": samples, "loader": loader, "images": images},
    requirements=("ray>=2.57",),
    schemes=("file", "http", "https"),
    environment={
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    },
    part=1 / 4,
)
