"""Hugging Face ``datasets``, streaming."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import functools
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def _dataset(job: Job) -> Any:
    from datasets import load_dataset

    files = {"train": job.urls}
    return load_dataset("webdataset", data_files=files, split="train", streaming=True, cache_dir=job.folder)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    dataset = _dataset(job).decode(False)
    return lambda: job.count(dataset)


def loader(job: Job) -> Run:
    """Batches of undecoded samples from DataLoader workers, which share the shards."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    dataset = _dataset(job).decode(False)
    batches = DataLoader(dataset, batch_size=job.batch, num_workers=job.workers, collate_fn=list)
    return lambda: job.count_batches((batch,) for batch in batches)


def _cropped(sample: dict[str, Any], size: int) -> dict[str, Any]:
    from benchmarks.pictures import random_resized_crop

    return {"jpg": random_resized_crop(sample["jpg"].convert("RGB"), size), "cls": sample["cls"]}


def images(job: Job) -> Run:
    """Pictures decoded by Pillow and cropped in DataLoader workers, in batches."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    dataset = _dataset(job)
    left = [name for name in dataset.column_names if name not in ("jpg", "cls")]
    dataset = dataset.map(functools.partial(_cropped, size=job.size), remove_columns=left)
    batches = DataLoader(dataset, batch_size=job.batch, num_workers=job.workers)
    return lambda: job.count_images(batches, "jpg")


PEER = Peer(
    "Hugging Face datasets 5.2, load_dataset('webdataset', streaming=True)",
    tasks={"samples": samples, "loader": loader, "images": images},
    requirements=("datasets==5.2.0",),
    schemes=("file", "http", "https"),
    environment={"HF_HUB_DISABLE_TELEMETRY": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
    part=1 / 4,
)
