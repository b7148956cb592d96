"""Amazon's S3 connector for PyTorch: its CRT client, whole shards in sequence, and the standard library's tarfile."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import functools
import os
import tarfile
from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import grouped, in_workers

__all__ = ["PEER"]


def _samples(urls: list[str]) -> Iterator[dict[str, bytes]]:
    from s3torchconnector import S3ClientConfig, S3IterableDataset

    dataset: Any = S3IterableDataset.from_objects(
        urls,
        region=os.environ["AWS_DEFAULT_REGION"],
        endpoint=os.environ["AWS_ENDPOINT_URL_S3"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    for reader in dataset:
        with tarfile.open(fileobj=reader, mode="r|") as archive:
            yield from grouped(archive)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    import s3torchconnector  # noqa: F401

    return lambda: job.count(_samples(job.urls))


def loader(job: Job, *, images: bool = False) -> Run:
    """Batches from DataLoader workers, of undecoded samples or of pictures."""
    return in_workers(job, _samples, images=images)


PEER = Peer(
    "s3torchconnector 1.5 (AWS CRT), its sequential reader, and Python's tarfile",
    tasks={"samples": samples, "loader": loader, "images": functools.partial(loader, images=True)},
    requirements=("s3torchconnector==1.5.0",),
    schemes=("s3",),
    cannot=dict.fromkeys(("file", "http", "https", "gs", "az"), "reads S3 only"),
)
