"""`index`: indexes of any number of shards, made by tasks that read their headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async.distributed.attempts import add_traffic
from wds_async.distributed.folder import JobFolder, job_url, output_folder
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.outputs import write_object
from wds_async.distributed.plan import Plan, planned
from wds_async.distributed.tasks import Input, Output, Record, Task
from wds_async.errors import ConfigError, ObjectChanged, WdsError
from wds_async.indexed import places
from wds_async.indexed.scan import ScannedShard, scan_shards
from wds_async.indexed.shardindex import ShardIndex
from wds_async.redact import redact
from wds_async.storage.listing.expand import Urls
from wds_async.storage.options import StorageOptions
from wds_async.storage.sink import publish, publish_new
from wds_async.tar.index import shard_list
from wds_async.transfer.traffic import Traffic

__all__ = ["KINDS", "IndexJob", "IndexWork", "index"]

KINDS = ("json", *places.KINDS)
_MOST_IN_TASK = 64
_TASKS = 64
_NAMED = 10


@dataclass(frozen=True)
class IndexWork:
    """Work: read the headers of shards, and write the ``kinds`` of indexes that each shard has of its own.

    ``folder``: where these go; None is beside each shard. ``out``: the folder that names in the records are relative
    to. ``list_url``, ``name``: the JSON list of all shards, which the job writes at its end, and the name in it.
    """

    kinds: tuple[str, ...]
    folder: str | None
    out: str
    list_url: str | None = None
    name: str = ""
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return what the indexes depend on besides the shards."""
        urls = {name: redact(getattr(self, name) or "") for name in ("folder", "out", "list_url")}
        return {"kind": "index", "kinds": list(self.kinds), "name": self.name, **urls}

    @classmethod
    def of(cls, description: Mapping[str, Any], options: StorageOptions) -> IndexWork:
        """Return the work that `describe` described."""
        urls = {name: description[name] or None for name in ("folder", "list_url")}
        kinds = tuple(description["kinds"])
        return cls(kinds=kinds, out=description["out"], name=description["name"], options=options, **urls)

    def run(self, task: Task) -> Record:
        """Index the shards of ``task``. Those without errors get their files also where another has one; the error
        that is raised then names each."""
        by_url, traffic = {one.url: one for one in task.inputs}, Traffic()
        scanned: dict[str, ShardIndex] = {}
        outputs: list[Output] = []
        errors: list[Exception] = []
        try:
            found = scan_shards(list(by_url), dali="dali" in self.kinds, options=self.options, traffic=traffic)
            for one in found:
                try:
                    scanned[one.url] = _checked(by_url[one.url], one)
                    outputs += self._write(one)
                except (WdsError, OSError) as exn:
                    errors.append(exn)
        finally:
            add_traffic(traffic)
        if errors:
            raise _all_of(errors)
        facts = [scanned[one.url].facts for one in task.inputs]
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=tuple(sorted(outputs, key=lambda output: output.url)),
            samples_in=sum(one.samples for one in facts),
            bytes_in=sum(one.size for one in facts),
            bytes_out=sum(output.bytes for output in outputs),
            more={"samples": [one.samples for one in facts], "sizes": [one.size for one in facts]},
        )

    def _write(self, scanned: ScannedShard) -> Iterator[Output]:
        for kind in self.kinds:
            if kind != "json":
                (place,) = places.places([scanned.url], kind, self.folder)
                assert scanned.index is not None
                data = places.file_bytes(kind, scanned.index, scanned.url, scanned.dali)
                yield write_object(place, data, self.out, self.options)


def _checked(wanted: Input, scanned: ScannedShard) -> ShardIndex:
    """Return the index of a shard that is still the one that the job was planned with."""
    if scanned.index is None:
        assert scanned.error is not None
        raise scanned.error
    facts = scanned.index.facts
    known = bool(wanted.version and facts.version)
    if (known and not facts.fits(wanted.size or facts.size, wanted.version)) or wanted.size not in (None, facts.size):
        raise ObjectChanged(
            f"{redact(wanted.url)}: it was replaced since the job was planned: {wanted.size} bytes and"
            f" {wanted.version or 'no version'} then, {facts.size} bytes and {facts.version or 'no version'} now. Plan"
            " it again with another job name, or overwrite=True"
        )
    return scanned.index


def _all_of(errors: Sequence[Exception]) -> Exception:
    """Return one error for all; of several, permanent only if all are."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(exn) for exn in errors}
    kind = kinds.pop() if len(kinds) == 1 and issubclass(type(errors[0]), WdsError) else WdsError
    texts = [str(exn) for exn in errors[:_NAMED]]
    texts += [f"and {len(errors) - _NAMED} more"] if len(errors) > _NAMED else []
    return kind(f"{len(errors)} shards have errors: {'; '.join(texts)}")


class IndexJob(Job):
    """Job of `IndexWork`, which ends with the lists of shards: ``finished.json``, and the one that was asked for."""

    def finish(self) -> None:
        """Write the lists where every task has a record."""
        contents = self.folder.contents()
        work = self.work
        assert isinstance(work, IndexWork)
        if len(contents.finished) < len(self.tasks):
            return
        if contents.complete and work.list_url is None:
            return
        found: list[tuple[str, int, int]] = []
        for record in self.folder.records(range(len(self.tasks))):
            samples, sizes = record.more["samples"], record.more["sizes"]
            found += zip([one.url for one in record.inputs], samples, sizes, strict=True)
        if work.list_url is not None:
            here = work.list_url[: work.list_url.rfind("/") + 1]
            publish(work.list_url, _listed(found, here, "", work.name), work.options)
        publish_new(f"{self.folder.url}/finished.json", _listed(found, work.out, "../../", work.name), work.options)


def _listed(shards: Sequence[tuple[str, int, int]], folder: str, up: str, name: str) -> bytes:
    """Return a list of shards: those below ``folder`` by their names in it, with ``up`` before them."""
    rows = []
    for url, samples, size in shards:
        inside = url.startswith(folder) if folder else not ("://" in url or url.startswith("/"))
        rows.append({"url": f"{up}{url[len(folder) :]}" if inside else url, "nsamples": samples, "filesize": size})
    return shard_list(rows, name).encode("utf-8")


def index(
    inputs: Urls,
    output: str | None = None,
    *,
    kinds: Sequence[str] = ("json",),
    name: str = "",
    job: str = "index",
    inputs_per_task: int | None = None,
    engine: Any = "local",
    cpus: float | None = None,
    workers: int | None = None,
    attempts: int = 4,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Job:
    """Return the job that writes indexes of the shards ``inputs``: how many samples each holds, and where they are.

    ``inputs``: URLs as for `WebDataset` (braces, wildcards, folders). They are listed now, with their versions.
    ``output``: a folder for all files, or, if it ends in ``.json``, the list alone. None: the indexes of shards go
        beside them, and the list into the folder that all shards share, as ``JOB.json``. The job's folder is
        ``_wds/JOB`` in the folder of the list.
    ``kinds``: ``"json"``: one list of all shards with their samples and sizes, written at the end. ``"dali"``,
        ``"energon"``, ``"wds"``: a file for each shard, for DALI, Energon and `IndexedDataset`.
    ``name``: of the data set, in the list.
    ``inputs_per_task``: shards that one task reads, many at once. None: 1 to 64, by their number.
    ``job``, ``engine``, ``cpus``, ``workers``, ``attempts``, ``overwrite``, ``on_progress``, ``storage_options``: see
        `map_shards`.

    Members are read only where they are small; else their headers alone are requested. ``WebDataset`` reads the job's
    folder as a list of the shards, too.

    Raise ConfigError for wrong arguments and where two indexes would be in the same place, UrlError and StorageError
    where the shards cannot be listed. Nothing is written before `Job.run`.
    """
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise ConfigError(f"kinds={kinds!r}: some of {', '.join(KINDS)}, in a tuple or list")
    options = StorageOptions(storage_options)
    shards = planned(inputs, options)
    work = _work([one.url for one in shards], output, tuple(dict.fromkeys(kinds)), name, job, options)
    count = max(1, min(_MOST_IN_TASK, len(shards) // _TASKS)) if inputs_per_task is None else inputs_per_task
    return IndexJob(
        work,
        Plan(shards, count),
        JobFolder(job_url(work.out, job), options),
        engine=engine,
        options={"cpus": cpus, "workers": workers},
        inputs={"inputs_per_task": count},
        attempts=attempts,
        overwrite=overwrite,
        on_progress=on_progress,
    )


def _work(
    urls: Sequence[str], output: str | None, kinds: tuple[str, ...], name: str, job: str, options: StorageOptions
) -> IndexWork:
    """Return the work, with the places of everything that it writes."""
    if len(set(urls)) != len(urls):
        raise ConfigError(f"{redact(_first_twice(urls))}: this shard is named twice; an index has each once")
    folder = None if output is None or output.endswith(".json") else f"{output.rstrip('/')}/"
    out = _shared_folder(urls) if output is None else folder or output[: output.rfind("/") + 1]
    output_folder(f"{out}{{")  # raises where there is none
    for kind in kinds:
        if kind != "json":
            places.places(urls, kind, folder)
    list_url = f"{out}{job}.json" if output is None or folder is not None else output
    return IndexWork(kinds, folder, out, list_url if "json" in kinds else None, name, options)


def _first_twice(urls: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(url for url in urls if url in seen or seen.add(url))  # type: ignore[func-returns-value]


def _shared_folder(urls: Sequence[str]) -> str:
    """Return the folder that all shards are in or below. ConfigError where there is none that can be written to."""
    if any("?" in url and "://" in url for url in urls):
        raise ConfigError("the URLs of the shards have a query, so the job has no place beside them: name an output")
    heads = [url[: url.rfind("/") + 1] for url in urls]
    low, high = min(heads), max(heads)
    end = next((at for at, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))
    shared = low[: low.rfind("/", 0, end) + 1]
    if "://" in heads[0] and not shared.partition("://")[2].strip("/"):
        raise ConfigError(f"{redact(urls[0])} and {redact(urls[-1])} share no folder: name an output")
    return shared
