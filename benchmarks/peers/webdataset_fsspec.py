"""WebDataset over fsspec's files with blocks of 32 MiB, which its users are told to take where ``curl`` is too slow."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

from typing import Any

from benchmarks.peer import Job, Peer, Run, Task
from benchmarks.peers import webdataset

__all__ = ["PEER"]

_BLOCK_BYTES = 32 << 20
_SCHEMES = ("http", "https", "s3", "gs", "az")


def _over_fsspec(task: Task) -> Task:
    def prepare(job: Job) -> Run:
        import fsspec
        import webdataset as wds

        def opened(url: str, mode: str, bufsize: int, **kwargs: Any) -> Any:
            filesystem, _ = fsspec.core.url_to_fs(url)  # a new one in each worker: they do not live through a fork
            return filesystem.open(url, "rb", block_size=_BLOCK_BYTES)

        fsspec.get_filesystem_class(job.urls[0].partition(":")[0])  # imports what it needs, before the clock starts
        wds.gopen_schemes.update(dict.fromkeys(_SCHEMES, opened))
        return task(job)

    return prepare


PEER = Peer(
    "WebDataset 1.0.2 over fsspec's files, blocks of 32 MiB",
    tasks={name: _over_fsspec(task) for name, task in webdataset.PEER.tasks.items()},
    requirements=("webdataset==1.0.2", "fsspec", "aiohttp", "s3fs", "gcsfs", "adlfs"),
    schemes=_SCHEMES,
    environment={"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"},  # it asks by gRPC first, and waits where there is none
)
