"""Python's ``tarfile`` over the store's own fsspec file (s3fs, gcsfs, adlfs), blocks of 32 MiB."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]

_BLOCK_BYTES = 32 << 20


def _grouped(archive: tarfile.TarFile) -> Iterator[dict[str, bytes]]:
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


def samples(job: Job) -> Run:
    """Undecoded samples, shard after shard."""
    import fsspec

    filesystem, _ = fsspec.core.url_to_fs(job.urls[0])

    def read() -> Iterator[Any]:
        for url in job.urls:
            with (
                filesystem.open(url, "rb", block_size=_BLOCK_BYTES) as file,
                tarfile.open(fileobj=file, mode="r|") as archive,
            ):
                yield from _grouped(archive)

    return lambda: job.count(read())


PEER = Peer(
    "Python's tarfile over s3fs, gcsfs and adlfs, blocks of 32 MiB",
    tasks={"samples": samples},
    requirements=("fsspec", "aiohttp", "s3fs", "gcsfs", "adlfs"),
    schemes=("http", "https", "s3", "gs", "az"),
    environment={"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"},  # it asks by gRPC first, and waits where there is none
)
