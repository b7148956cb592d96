"""Python's ``tarfile`` over the store's own fsspec file (s3fs, gcsfs, adlfs), blocks of 32 MiB."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import grouped

__all__ = ["PEER"]

_BLOCK_BYTES = 32 << 20


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
                yield from grouped(archive)

    return lambda: job.count(read())


PEER = Peer(
    "Python's tarfile over s3fs, gcsfs and adlfs, blocks of 32 MiB",
    tasks={"samples": samples},
    requirements=("fsspec", "aiohttp", "s3fs", "gcsfs", "adlfs"),
    schemes=("http", "https", "s3", "gs", "az"),
    environment={"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"},  # it asks by gRPC first, and waits where there is none
)
