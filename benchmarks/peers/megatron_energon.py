"""Megatron-Energon: WebDatasets with its own index beside the shards."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import decoded, fields_to_write

__all__ = ["PEER"]


def make(job: Job) -> list[str]:
    """Write the samples by webdataset, as its documents show, with keys that no two shards share, which it insists on;
    then let its ``energon prepare`` write the index."""
    from webdataset import TarWriter

    numbers = itertools.count()
    for path in job.urls:
        with TarWriter(f"{job.folder}/{Path(path).name}") as writer:
            for sample in fields_to_write([path]):
                writer.write({"__key__": f"{next(numbers):09d}", **sample})
    prepare = [str(Path(sys.executable).with_name("energon")), "prepare", "--non-interactive", "--no-progress"]
    prepare += ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "2", job.folder]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    return [""]


def _loader(job: Job, *, images: bool = False, batch: int | None) -> Any:
    """Its loader of one epoch: lists of undecoded samples, or pictures decoded and cropped in its workers."""
    import torch
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        WorkerConfig,
        basic_sample_keys,
        get_loader,
        get_val_dataset,
        stateless,
    )

    @dataclasses.dataclass
    class Fields(Sample):
        """What the benchmark takes of a sample."""

        fields: Any
        label: int

    @stateless
    def cook(sample: dict[str, Any]) -> Any:
        if not images:
            return Fields(**basic_sample_keys(sample), fields=sample, label=0)
        picture, label = decoded(sample, job.size)
        return Fields(**basic_sample_keys(sample), fields=torch.from_numpy(picture), label=label)

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        """Cook samples, stack pictures, and hand over what can be pickled."""

        decoder = None
        cookers = (Cooker(cook),)

        def batch(self, samples: list[Any]) -> Any:
            return super().batch(samples) if images else [sample.fields for sample in samples]

        def encode_batch(self, batch: Any) -> Any:
            return (batch.fields, batch.label) if images else batch

    config = WorkerConfig(rank=0, world_size=1, num_workers=job.workers)
    dataset = get_val_dataset(
        job.urls[0], split_part="train", worker_config=config, batch_size=batch, task_encoder=Encoder()
    )
    return get_loader(dataset)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    dataset = _loader(job, batch=None)
    return lambda: job.count(sample for sample in dataset)


def loader(job: Job) -> Run:
    """Batches of undecoded samples from its workers."""
    batches = _loader(job, batch=job.batch)
    return lambda: job.count_batches((batch,) for batch in batches)


def images(job: Job) -> Run:
    """Pictures decoded by Pillow and cropped in its workers, in batches."""
    batches = _loader(job, images=True, batch=job.batch)
    return lambda: job.count_images(batches)


PEER = Peer(
    "Megatron-Energon 7.4, CrudeWebdataset with a cooker",
    tasks={"samples": samples, "loader": loader, "images": images},
    requirements=("megatron-energon==7.4.1",),
    schemes=("file",),
    format="WebDataset with its index",
    make=make,
    cannot=dict.fromkeys(("http", "https"), "has no reader over HTTP")
    | dict.fromkeys(("s3", "gs", "az"), "wants a file of its storage client's profiles"),
)
