"""LitData: its own chunks, which it downloads to local disk ahead of reading."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import decoded, fields_to_write

__all__ = ["PEER"]


def _fields(path: str) -> Iterator[dict[str, bytes]]:
    yield from fields_to_write([path])


def make(job: Job) -> list[str]:
    """Write the samples as chunks of 64 MB by its `optimize`."""
    from litdata import optimize

    optimize(_fields, job.urls, output_dir=job.folder, chunk_bytes="64MB", num_workers=1)
    return [""]


def _dataset(job: Job, transform: Any = None) -> Any:
    from litdata import StreamingDataset

    cache = None if "://" not in job.urls[0] else job.folder
    return StreamingDataset(job.urls[0], cache_dir=cache, transform=transform, shuffle=False)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    dataset = _dataset(job)
    return lambda: job.count(sample for sample in dataset)  # it starts anew whenever an iterator is asked of it


def loader(job: Job) -> Run:
    """Batches of undecoded samples from DataLoader workers."""
    import torch
    from litdata import StreamingDataLoader

    torch.set_num_threads(1)
    batches = StreamingDataLoader(_dataset(job), batch_size=job.batch, num_workers=job.workers, collate_fn=list)
    return lambda: job.count_batches((batch,) for batch in batches)


def images(job: Job) -> Run:
    """Pictures decoded by Pillow and cropped in DataLoader workers, in batches."""
    import torch
    from litdata import StreamingDataLoader

    torch.set_num_threads(1)
    dataset = _dataset(job, lambda sample: decoded(sample, job.size))
    batches = StreamingDataLoader(dataset, batch_size=job.batch, num_workers=job.workers)
    return lambda: job.count_images(batches)


PEER = Peer(
    "LitData 0.2, its chunks of 64 MB, downloaded to disk ahead of reading",
    tasks={"samples": samples, "loader": loader, "images": images},
    # Without obstore, which it would use for S3 and whose store it does not allow plain HTTP: boto3 takes its place.
    without_dependencies=("litdata==0.2.76", "tifffile==2026.3.3"),
    schemes=("file", "s3"),
    format="LitData",
    make=make,
    cannot=dict.fromkeys(("http", "https"), "has no download over HTTP")
    | dict.fromkeys(("gs", "az"), "its client takes no endpoint from the environment"),
    environment={"DISABLE_VERSION_CHECK": "1"},
)
