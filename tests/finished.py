"""A job's folder on this machine, with shards and their records, as runners leave it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import crc32c

import wds_async as wds
from wds_async.distributed.folder import JobFolder
from wds_async.distributed.tasks import Output, Record

__all__ = ["SAMPLES", "write_job"]

SAMPLES = 5
"""Samples in a shard."""


def write_job(out: Path, tasks: int = 3, *, finished: Collection[int] | None = None, job: str = "j") -> str:
    """Write the shards of ``tasks`` tasks and an index beside each, the records of the ``finished`` ones (default: all)
    and, where these are all, the list of shards; return the job's folder."""
    folder = JobFolder(f"{out}/_wds/{job}")
    folder.create({"work": {"kind": "test"}, "tasks": tasks})
    for task in range(tasks):
        shard = out / f"x-{task:02d}.tar"
        with wds.TarWriter(shard, mtime=0) as writer:
            for n in range(SAMPLES):
                writer.write({"__key__": f"{task}-{n}", "bin": bytes([task, n]) * 3000})
        body = shard.read_bytes()
        index = Output(f"{shard.name}.idx", 3, f"{crc32c.crc32c(b'idx'):08x}")
        outputs = (Output(shard.name, len(body), f"{crc32c.crc32c(body):08x}", SAMPLES), index)
        if finished is None or task in finished:
            folder.commit(Record(task, f"{task:032x}", (), outputs, SAMPLES, SAMPLES))
    if finished is None or len(finished) == tasks:
        folder.finish(tasks)
    return folder.url
