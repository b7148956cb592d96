"""MosaicML Streaming: its own shards (MDS), which it downloads to local disk ahead of reading."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import sys
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import fields_to_write

__all__ = ["PEER"]

_SHARD_BYTES = 64 << 20


def _streaming() -> Any:
    """Import it. For datasets of pictures, which are not used here, it takes two names from torchvision; the registry's
    torchvision is built for CUDA and cannot be imported beside torch for CPUs, so that empty ones stand in for them."""
    if "torchvision" not in sys.modules:
        modules = {"torchvision.datasets": "VisionDataset", "torchvision.transforms.functional": "to_tensor"}
        for name in ("torchvision", "torchvision.transforms", *modules):
            sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
        for name, wanted in modules.items():
            setattr(sys.modules[name], wanted, object)
    import streaming

    return streaming


def make(job: Job) -> list[str]:
    """Write the samples as MDS by its `MDSWriter`."""
    streaming = _streaming()
    samples = fields_to_write(job.urls)
    first = next(samples)
    with streaming.MDSWriter(out=job.folder, columns=dict.fromkeys(first, "bytes"), size_limit=_SHARD_BYTES) as writer:
        writer.write(first)
        for sample in samples:
            writer.write(sample)
    return [""]


def _dataset(job: Job, transform: Any = None) -> Any:
    class Dataset(_streaming().StreamingDataset):  # type: ignore[misc]
        """Samples, transformed where they are read, as its guide shows."""

        def __getitem__(self, at: int) -> Any:
            sample = super().__getitem__(at)
            return transform(sample) if transform else sample

    remote = job.urls[0].replace("az://", "azure://")
    where = {"local": remote} if "://" not in remote else {"remote": remote, "local": job.folder}
    return Dataset(**where, shuffle=False, batch_size=job.batch)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    dataset = _dataset(job)
    return lambda: job.count(dataset)


def loader(job: Job) -> Run:
    """Batches of undecoded samples from DataLoader workers."""
    import torch

    torch.set_num_threads(1)
    batches = _streaming().StreamingDataLoader(
        _dataset(job), batch_size=job.batch, num_workers=job.workers, collate_fn=list
    )
    return lambda: job.count_batches((batch,) for batch in batches)


def images(job: Job) -> Run:
    """Pictures decoded by Pillow and cropped in DataLoader workers, in batches."""
    import PIL.Image
    import torch

    from benchmarks.pictures import random_resized_crop

    torch.set_num_threads(1)

    def transform(sample: dict[str, bytes]) -> tuple[Any, int]:
        picture = PIL.Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
        return random_resized_crop(picture, job.size), int(sample["cls"])

    batches = _streaming().StreamingDataLoader(_dataset(job, transform), batch_size=job.batch, num_workers=job.workers)
    return lambda: job.count_images(batches)


PEER = Peer(
    "MosaicML Streaming 0.13, MDS shards of 64 MiB, downloaded to disk ahead of reading",
    tasks={"samples": samples, "loader": loader, "images": images},
    # Its own requirements hold numpy below 2.2, and bring the clients of six clouds; boto3 is there with s3fs.
    without_dependencies=(
        "mosaicml-streaming==0.13.0",
        "brotli",
        "zstd",
        "python-snappy",
        "cramjam",
        "catalogue",
    ),
    schemes=("file", "s3"),
    format="MDS",
    make=make,
    cannot=dict.fromkeys(("http", "https"), "has no download over HTTP")
    | dict.fromkeys(("gs", "az"), "its client takes no endpoint from the environment"),
)
