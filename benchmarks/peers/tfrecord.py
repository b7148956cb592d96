"""The ``tfrecord`` package: TFRecord files for PyTorch without TensorFlow."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import fields_to_write, in_workers

__all__ = ["PEER"]


def make(job: Job) -> list[str]:
    """Write a TFRecord file for each shard by its `TFRecordWriter`."""
    from tfrecord import TFRecordWriter

    names = [f"{Path(path).stem}.tfrecord" for path in job.urls]
    for path, name in zip(job.urls, names, strict=True):
        writer = TFRecordWriter(f"{job.folder}/{name}")
        for sample in fields_to_write([path]):
            writer.write({field: (data, "byte") for field, data in sample.items()})
        writer.close()
    return names


def _samples(urls: list[str]) -> Iterator[dict[str, bytes]]:
    from tfrecord.reader import tfrecord_loader

    for url in urls:
        for sample in tfrecord_loader(url, None):
            yield {field: bytes(data) for field, data in sample.items()}


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    import tfrecord  # noqa: F401

    return lambda: job.count(_samples(job.urls))


def loader(job: Job, *, images: bool = False) -> Run:
    """Batches from DataLoader workers, of undecoded samples or of pictures."""
    return in_workers(job, _samples, images=images)


PEER = Peer(
    "tfrecord 1.14, TFRecord files by pure Python and protobuf",
    tasks={"samples": samples, "loader": loader, "images": functools.partial(loader, images=True)},
    requirements=("tfrecord==1.14.6",),
    schemes=("file",),
    format="TFRecord",
    make=make,
    cannot=dict.fromkeys(("http", "https", "s3", "gs", "az"), "reads local files only"),
)
