"""SPDL: a pipeline of threads, its own parser of tars, FFmpeg's decoder and filters."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import itertools
import math
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) if "://" in url else open(url, "rb") as file:
        data: bytes = file.read()
        return data


def _grouped(shard: bytes) -> list[dict[str, memoryview]]:
    """Return the samples of a shard, whose fields stay where they are."""
    import spdl.io

    groups = itertools.groupby(spdl.io.iter_tarfile(shard), lambda item: item[0].partition(".")[0])
    return [{name.partition(".")[2]: data for name, data in fields} for _, fields in groups]


def _batches(job: Job) -> Any:
    """The pipeline up to lists of undecoded samples."""
    from spdl.pipeline import PipelineBuilder

    fetched = PipelineBuilder().add_source(job.urls).pipe(_fetch, concurrency=4)
    shards = fetched.pipe(_grouped)

    def batched(samples: list[Any]) -> Iterator[list[Any]]:
        for start in range(0, len(samples), job.batch):
            yield samples[start : start + job.batch]

    return shards.pipe(batched)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    pipeline = _batches(job).add_sink(3).build(num_threads=6)

    def run() -> int:
        with pipeline.auto_stop():
            return job.count(itertools.chain.from_iterable(pipeline))

    return run


def loader(job: Job) -> Run:
    """Batches of undecoded samples; no batch has samples of two shards."""
    pipeline = _batches(job).add_sink(3).build(num_threads=max(2, job.workers) + 4)

    def run() -> int:
        with pipeline.auto_stop():
            return job.count_batches((batch,) for batch in pipeline)

    return run


def _part(size: int) -> str:
    """FFmpeg's filters for a random part of 8 to 100 % of the picture, resized to ``size``."""
    area, ratio = random.uniform(0.08, 1.0), math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    wide, high = min(1.0, math.sqrt(area * ratio)), min(1.0, math.sqrt(area / ratio))
    crop = f"crop=iw*{wide:.4f}:ih*{high:.4f}:(iw-ow)*{random.random():.4f}:(ih-oh)*{random.random():.4f}"
    return f"{crop},scale={size}:{size}:flags=bilinear,format=pix_fmts=rgb24"


def images(job: Job) -> Run:
    """Pictures decoded, cropped and resized by FFmpeg in threads, a batch at a time."""
    import numpy as np
    import spdl.io

    def decoded(batch: list[dict[str, memoryview]]) -> tuple[Any, Any]:
        frames = []
        for sample in batch:
            packets = spdl.io.demux_image(bytes(sample["jpg"]))
            frames.append(spdl.io.decode_packets(packets, filter_desc=_part(job.size)))
        pixels = spdl.io.to_numpy(spdl.io.convert_frames(frames))
        floats = np.multiply(pixels.transpose(0, 3, 1, 2), np.float32(1 / 255), order="C")
        return floats, np.array([int(bytes(sample["cls"])) for sample in batch])

    threads = max(1, job.workers)
    built = _batches(job).pipe(decoded, concurrency=threads).add_sink(3)
    pipeline = built.build(num_threads=threads + 6)

    def run() -> int:
        with pipeline.auto_stop():
            return job.count_images(pipeline)

    return run


PEER = Peer(
    "SPDL 0.8: threads, its own tar parser over whole shards, FFmpeg",
    tasks={"samples": samples, "loader": loader, "images": images},
    requirements=("spdl==0.8.0",),
    schemes=("file", "http", "https"),
    programs=("ffmpeg",),  # whose shared libraries (4 to 9) it loads to decode
)
