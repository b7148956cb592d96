"""Samples and batches by the standard library and torch, for peers that only fetch bytes."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peer import Job, Run

__all__ = ["ahead", "decoded", "fields_to_write", "grouped", "in_workers", "untarred"]


def grouped(archive: tarfile.TarFile) -> Iterator[dict[str, bytes]]:
    """Yield the samples: members that come one after another and have the same key."""
    sample: dict[str, bytes] = {}
    before = None
    for member in archive:
        key, _, field = member.name.partition(".")
        data = archive.extractfile(member)
        if data is None:
            continue
        if key != before and sample:
            yield sample
            sample = {}
        before = key
        sample[field] = data.read()
    if sample:
        yield sample


def untarred(shard: bytes) -> Iterator[dict[str, bytes]]:
    """Yield the samples of a shard in memory."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as archive:
        yield from grouped(archive)


def ahead(fetch: Callable[[str], Any], urls: Sequence[str], threads: int = 4) -> Iterator[Any]:
    """Yield ``fetch(url)`` in order, with ``threads`` of them under way."""
    with ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(fetch, url) for url in urls[:threads]]
        for url in [*urls[threads:], None]:
            while len(waiting) >= (threads if url else 1):
                yield waiting.pop(0).result()
            if url:
                waiting.append(pool.submit(fetch, url))


def decoded(sample: dict[str, Any], size: int) -> tuple[Any, int]:
    """Return a random part of the picture, resized by Pillow, as float32 CHW, and the class."""
    import PIL.Image

    from benchmarks.pictures import random_resized_crop

    return random_resized_crop(PIL.Image.open(io.BytesIO(sample["jpg"])).convert("RGB"), size), int(sample["cls"])


def in_workers(job: Job, read: Callable[[list[str]], Iterable[dict[str, bytes]]], *, images: bool = False) -> Run:
    """Return the reading of batches from torch's DataLoader, whose workers share the shards: ``read`` gives the samples
    of a worker's. Batches are lists of undecoded samples, or with ``images`` tensors of pictures and of classes."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    torch.set_num_threads(1)

    class Samples(IterableDataset[Any]):
        """The samples of one worker."""

        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            samples = read(job.urls[worker.id :: worker.num_workers] if worker else job.urls)
            return (decoded(sample, job.size) for sample in samples) if images else iter(samples)

    collate = None if images else list
    batches = DataLoader(Samples(), batch_size=job.batch, num_workers=job.workers, collate_fn=collate)
    if images:
        return lambda: job.count_images(batches)
    return lambda: job.count_batches((batch,) for batch in batches)


def fields_to_write(paths: Iterable[str]) -> Iterator[dict[str, bytes]]:
    """Yield the samples of local shards, for a peer's own writer."""
    for path in paths:
        with tarfile.open(path, "r|") as archive:
            yield from grouped(archive)
