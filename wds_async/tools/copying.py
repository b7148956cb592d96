"""`copy_shards`: objects copied byte for byte from one store to another, as a job."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async.distributed.attempts import add_traffic
from wds_async.distributed.folder import JobFolder, job_url
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.outputs import SummedSink, check_inputs_stay
from wds_async.distributed.plan import Plan, planned
from wds_async.distributed.tasks import Output, Record, Task
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.listing.expand import Urls
from wds_async.storage.options import StorageOptions
from wds_async.tools.sums import sums_text
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Board

__all__ = ["CopyJob", "CopyWork", "copy_shards"]


@dataclass(frozen=True)
class CopyWork:
    """Work of `copy_shards`: ``out`` is the folder of the copies; ``base`` is cut off the URLs of the inputs, or where
    it is "" all of their folders."""

    out: str
    base: str = ""
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        return {"kind": "copy", "out": redact(self.out), "base": redact(self.base)}

    @classmethod
    def of(cls, description: Mapping[str, Any], options: StorageOptions) -> CopyWork:
        """Return the work that `describe` described."""
        return cls(description["out"], description["base"], options)

    def name(self, url: str) -> str:
        """Return the name of the copy of ``url``, relative to ``out``."""
        path = url.partition("?")[0]
        return path.removeprefix(self.base) if self.base else posixpath.basename(path)

    def run(self, task: Task) -> Record:
        """Copy the inputs of ``task``, many parts at once."""
        infos = [{"url": one.url} | ({"version": one.version} if one.version else {}) for one in task.inputs]
        outputs: list[Output] = []
        sums: dict[str, str] = {}
        board = Board()
        try:
            with open_shards(infos, stats=board.counters(), options=self.options) as shards:
                for shard in shards:
                    sink = SummedSink(f"{self.out}{self.name(shard.url)}", self.options)
                    digest = hashlib.sha256()
                    try:
                        while (piece := shard.read()) is not None:
                            sink.write(piece)
                            digest.update(piece)
                        outputs.append(sink.commit(self.out, None))
                    except BaseException:
                        sink.abort()
                        raise
                    sums[outputs[-1].url] = digest.hexdigest()
        finally:
            add_traffic(board.traffic())
        size = sum(one.bytes for one in outputs)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=tuple(outputs),
            bytes_in=size,
            bytes_out=size,
            more={"sha256": sums},
        )


class CopyJob(Job):
    """A job of `copy_shards`."""

    def sums(self) -> str:
        """Return SHA256SUMS of all copies, once they are finished."""
        records: Iterator[Record] = self.folder.records(range(len(self.tasks)))
        return sums_text({name: digest for record in records for name, digest in record.more["sha256"].items()})


def copy_shards(
    inputs: Urls,
    out: str,
    *,
    tree: bool = False,
    job: str = "copy",
    engine: Any = "local",
    cpus: float | None = None,
    workers: int | None = None,
    attempts: int = 4,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyJob:
    """Return the job that copies the objects ``inputs`` (as for `map_shards`) into the folder ``out``, byte for byte.

    A copy has the name of its object, or with ``tree`` its path below the folder that all have in common. It appears
    under that name when it is whole; its CRC-32C and SHA-256 are in the record. ConfigError for two of one name. See
    `map_shards` for the other arguments.
    """
    options = StorageOptions(storage_options)
    sources = planned(inputs, options)
    urls = [one.url.partition("?")[0] for one in sources]
    if not out.endswith("/") and out not in (".", ".."):
        raise ConfigError(f"OUT={redact(out)!r}: the copies' folder, with a slash at its end")
    folder = f"{out.rstrip('/')}/" if out not in (".", "./") else ""
    work = CopyWork(folder, _common_folder(urls) if tree else "", options)
    seen: dict[str, str] = {}
    for url in urls:
        if (other := seen.setdefault(work.name(url), url)) != url:
            raise ConfigError(f"{redact(other)} and {redact(url)} have the same name: keep their folders (--tree)")
    check_inputs_stay((f"{folder}{work.name(url)}" for url in urls), urls)
    given: dict[str, Any] = {"engine": engine, "options": {"cpus": cpus, "workers": workers}, "attempts": attempts}
    return CopyJob(
        work,
        Plan(sources, 1),
        JobFolder(job_url(folder, job), options),
        overwrite=overwrite,
        on_progress=on_progress,
        inputs=[redact(url) for url in urls[:100]],
        **given,
    )


def _common_folder(urls: Sequence[str]) -> str:
    """Return the URL of the folder that all ``urls`` lie in, with its slash."""
    common = urls[0]
    for url in urls[1:]:
        while not url.startswith(common):
            common = common[:-1]
    return common[: common.rfind("/") + 1]
