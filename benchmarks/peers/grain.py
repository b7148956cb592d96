"""Grain over ArrayRecord files: records of tar fields, read by threads."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import decoded, fields_to_write

__all__ = ["PEER"]


def make(job: Job) -> list[str]:
    """Write an ArrayRecord file for each shard by its `ArrayRecordWriter`, a record a sample."""
    from array_record.python.array_record_module import ArrayRecordWriter

    names = [f"{Path(path).stem}.array_record" for path in job.urls]
    for path, name in zip(job.urls, names, strict=True):
        writer = ArrayRecordWriter(f"{job.folder}/{name}", "group_size:1")
        for sample in fields_to_write([path]):
            writer.write(pickle.dumps(sample))
        writer.close()
    return names


def _dataset(job: Job) -> Any:
    import grain

    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(job.urls)).map(pickle.loads)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process with its sixteen reading threads."""
    dataset = _dataset(job).to_iter_dataset()
    return lambda: job.count(dataset)


def _in_workers(job: Job, dataset: Any) -> Any:
    import grain

    return dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers))


def loader(job: Job) -> Run:
    """Batches of undecoded samples from its worker processes."""
    batches = _in_workers(job, _dataset(job).batch(job.batch, batch_fn=list).to_iter_dataset())
    return lambda: job.count_batches((batch,) for batch in batches)


class _Decode:
    """The transform, which its workers must be able to pickle."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, sample: dict[str, bytes]) -> Any:
        return decoded(sample, self.size)


def images(job: Job) -> Run:
    """Pictures decoded by Pillow and cropped in its worker processes, in batches."""
    batches = _in_workers(job, _dataset(job).map(_Decode(job.size)).batch(job.batch).to_iter_dataset())
    return lambda: job.count_images(batches)


PEER = Peer(
    "Grain 0.2 over ArrayRecord files of one record a group, sixteen threads",
    tasks={"samples": samples, "loader": loader, "images": images},
    requirements=("grain==0.2.18", "array_record==0.8.6"),
    schemes=("file",),
    format="ArrayRecord",
    make=make,
    cannot=dict.fromkeys(("http", "https"), "has no reader over HTTP")
    | dict.fromkeys(("s3", "gs", "az"), "reads stores by file systems of TensorFlow only"),
)
