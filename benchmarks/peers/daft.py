"""Daft: a data frame of the shards; pictures stay in the tars until they are read by range."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def _frames(job: Job) -> Iterator[Any]:
    """Yield a data frame of each shard, with the bytes of its pictures, which it would read only when asked.

    A frame of several shards does not come back on a machine with two cores (Daft 0.7.26), even without the pictures.
    """
    import daft

    @daft.func(return_dtype=daft.DataType.binary())
    def content(file: daft.File) -> bytes:
        with file.open() as opened:
            data: bytes = opened.read()
            return data

    for url in job.urls:
        frame = daft.read_webdataset(url)
        yield frame.with_column("jpg", content(frame["jpg"])) if "jpg" in frame.column_names else frame


def samples(job: Job) -> Run:
    """Undecoded samples."""
    import daft

    daft.set_runner_native()

    return lambda: job.count(row for frame in _frames(job) for row in frame.iter_rows())


def images(job: Job) -> Run:
    """Pictures decoded and resized whole by its expressions."""
    import daft
    import numpy as np
    from daft.functions import decode_image, resize

    daft.set_runner_native()

    def pictures() -> Iterator[Any]:
        for frame in _frames(job):
            picture = resize(decode_image(frame["jpg"], mode="RGB"), job.size, job.size)
            for row in frame.select(picture.alias("jpg"), "cls").iter_rows():
                yield np.asarray(row["jpg"]).transpose(2, 0, 1)

    def batches() -> Iterator[Any]:
        rows = pictures()
        while batch := list(itertools.islice(rows, job.batch)):
            yield (np.stack(batch).astype(np.float32) / np.float32(255),)

    return lambda: job.count_images(batches())


PEER = Peer(
    "Daft 0.7, read_webdataset of each shard; pictures by range from the tars, resized whole",
    tasks={"samples": samples, "images": images},
    requirements=("daft==0.7.26",),
    schemes=("file", "http", "s3"),
    cannot={
        "loader": "has no DataLoader workers",
        "https": "trusts public authorities only",
        **dict.fromkeys(("gs", "az"), "takes no endpoint from the environment"),
    },
    environment={"DAFT_PROGRESS_BAR": "0", "DO_NOT_TRACK": "true"},
    part=1 / 16,
)
