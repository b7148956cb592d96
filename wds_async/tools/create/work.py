"""Work of `create_shards`: rows in, a shard out; and the job around it, which writes the rows of each task."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import stat
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Self

from wds_async import zstd
from wds_async.config import TransferConfig, transfer_config
from wds_async.distributed.attempts import add_traffic
from wds_async.distributed.engines.base import RankedEngine
from wds_async.distributed.folder import JobFolder
from wds_async.distributed.jobs import Job
from wds_async.distributed.outputs import Shards
from wds_async.distributed.plan import Plan
from wds_async.distributed.tasks import Input, Record, Task
from wds_async.errors import (
    AccessDenied,
    ConfigError,
    ObjectChanged,
    ShardNotFound,
    StorageError,
    UnsafeContent,
    UrlError,
    WdsError,
)
from wds_async.observe.cost_limit import enforce
from wds_async.redact import redact
from wds_async.storage.listing.expand import folder_entries
from wds_async.storage.local import explain_os_error, version_without_inode
from wds_async.storage.options import StorageOptions
from wds_async.storage.removal import remove
from wds_async.storage.sink import open_sink, publish
from wds_async.tar import decompress
from wds_async.tools.create.rows import FieldSource, RowStore, SourceRow, data_of
from wds_async.transfer.reader import ShardStream, open_shards
from wds_async.writer import TarWriter

__all__ = ["CreateJob", "CreateWork", "RowPlan"]

logger = logging.getLogger("wds_async")

_FAULTS = (StorageError, UrlError, OSError)
_PERMANENT = (ShardNotFound, AccessDenied, UrlError, FileNotFoundError, PermissionError, IsADirectoryError)
_SKIPPING_TIMEOUT_S = 30.0
_SKIPPING_ATTEMPTS = 5
"""A list of web pages' images has dead hosts by the hundred: to wait for each until its timeout would take days."""
_LIKELY_BYTES = 100 << 10
"""Size of an object where nothing tells it: an image of a web page."""
_LEAST_PART = 128 << 10
_MOST_AHEAD = 512


@dataclass(frozen=True)
class CreateWork:
    """Work: write the samples of the rows that are the input of a task to a shard, or to several parts."""

    template: str
    """Names of the shards, with ``{task}``, a number from ``first``, and ``{part}``."""
    out: str
    """The folder that names in the records are relative to."""
    first: int = 0
    maxsize: int | None = None
    """Bytes of fields beyond which another part begins; None: one part."""
    index: bool = False
    skip_errors: bool = False
    """True if a sample is left out whose file or URL cannot be read; the record names it. No part of what the job is,
    so that a job that failed goes on with it."""
    timeout_s: float | None = None
    """Seconds without a byte before a URL is given up; no part of what the job is."""
    allow_pipe: bool = False
    """True if rows may have commands; no part of what the job is."""
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        names = ("first", "maxsize", "index")
        urls = {"template": redact(self.template), "out": redact(self.out)}
        return {"kind": "create", **urls, **{name: getattr(self, name) for name in names}}

    @classmethod
    def of(cls, description: Mapping[str, Any], options: StorageOptions) -> CreateWork:
        """Return the work that `describe` described. It runs no commands."""
        return cls(**{name: value for name, value in description.items() if name != "kind"}, options=options)

    def run(self, task: Task) -> Record:
        """Read the rows of ``task`` and their files, and write the shard."""
        (listed,) = task.inputs
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows")
            return self._run(task, _fetched(listed, path, self.options), _Again(lambda: _lines_of(path)))

    def _run(self, task: Task, count: int, rows: Iterable[bytes]) -> Record:
        reading = _RowReading(self, rows)
        shards = Shards(
            self.template,
            task.number + self.first,
            self.out,
            maxsize=float("inf") if self.maxsize is None else self.maxsize,
            encoder=False,
            index=self.index,
            options=self.options,
        )
        with shards:
            for sample in reading.samples():
                shards.write(sample)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=tuple(shards.outputs),
            samples_in=count,
            samples_out=shards.samples,
            bytes_in=reading.bytes,
            bytes_out=shards.bytes,
            skipped=tuple(reading.skipped),
        )

    def transfer(self, sizes: Sequence[int | None]) -> TransferConfig:
        """Return the engine's settings for objects of these sizes."""
        # A URL that is missing is no shard whose permissions may come late.
        config = transfer_config().taking_refusals()
        known = [size for size in sizes if size is not None]
        size = sum(known) // len(known) if known else _LIKELY_BYTES
        # Each object takes a slab of memory at least, so small slabs let more of them be on their way.
        part = min(config.part_bytes, max(_LEAST_PART, 1 << (2 * size).bit_length()))
        timeout_s = self.timeout_s or (_SKIPPING_TIMEOUT_S if self.skip_errors else config.retry.timeout_s)
        attempts = config.retry.max_attempts or (_SKIPPING_ATTEMPTS if self.skip_errors else None)
        return replace(
            config,
            part_bytes=part,
            retry=replace(config.retry, timeout_s=timeout_s, max_attempts=attempts),
            stall_timeout_s=min(config.stall_timeout_s, timeout_s),
            connect_timeout_s=min(config.connect_timeout_s, timeout_s),
        )


def _fetched(listed: Input, path: str, options: StorageOptions) -> int:
    """Write the rows of a task to a file, and return how many they are. ObjectChanged for others than were planned."""
    digest, count = hashlib.sha256(), 0
    with open_shards([listed.url], options=options) as reader, open(path, "wb") as file:
        read = decompress.plain(next(reader).read, listed.url)
        while (piece := read()) is not None:
            digest.update(piece)
            count += bytes(piece).count(b"\n")
            file.write(piece)
    if digest.hexdigest() != listed.version:
        raise ObjectChanged(f"{redact(listed.url)}: these are not the rows that the job was planned with")
    return count


def _lines_of(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


@dataclass(frozen=True)
class _Again(Iterable[bytes]):
    """Lines that are read anew for each iterator."""

    lines: Callable[[], Iterable[bytes]]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.lines())


class _RowReading:
    """Reader of the files and URLs of rows, the URLs many at once. ``bytes`` were read; ``skipped`` are entries for the
    record."""

    def __init__(self, work: CreateWork, lines: Iterable[bytes]) -> None:
        self._work, self._lines = work, lines
        self.bytes = 0
        self.skipped: list[dict[str, Any]] = []

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples, in the order of the rows."""
        config = self._work.transfer(self._sizes())
        ahead = min(_MOST_AHEAD, config.budget_bytes // config.part_bytes)
        with open_shards(self._urls(), config=config, lookahead=ahead, options=self._work.options) as reader:
            enforce(reader)
            try:
                for line in self._lines:
                    row = SourceRow.of(line)
                    sample = self._sample(row, lambda: next(reader))
                    if sample is not None:
                        yield sample
            finally:
                add_traffic(reader.counters.traffic)

    def _sizes(self) -> list[int | None]:
        """Return the sizes of the first objects."""
        rows = map(SourceRow.of, itertools.islice(self._lines, _MOST_AHEAD))
        return [one.size for row in rows for one in row.fields if one.kind == "url"]

    def _urls(self) -> Iterator[dict[str, str]]:
        for line in self._lines:
            row = SourceRow.of(line)
            for one in row.fields:
                if one.kind == "url":
                    if one.value.startswith("pipe:") and not self._work.allow_pipe:
                        raise UnsafeContent(
                            f"{row.where}: a command is run by the command line alone that names it: start it again"
                        )
                    yield {"url": one.value, **({"version": one.version} if one.version else {})}

    def _sample(self, row: SourceRow, following: Callable[[], ShardStream]) -> dict[str, Any] | None:
        """Return the sample of a row; None for one that is skipped."""
        sample: dict[str, Any] | None = {"__key__": row.key}
        for one in row.fields:
            stream = following() if one.kind == "url" else None
            if sample is None:
                continue  # the next stream ends this one
            try:
                sample[one.field] = _read(one, stream)
            except _FAULTS as exn:
                error = _located(exn, row, one)
                if not self._work.skip_errors:
                    raise error from exn
                self._skip(row, one, error)
                sample = None
        self.bytes += sum(len(value) for name, value in (sample or {}).items() if name != "__key__")
        return sample

    def _skip(self, row: SourceRow, source: FieldSource, error: WdsError) -> None:
        entry = {"stage": "create", "reason": " ".join(str(error).split()), "shard": redact(source.value)}
        self.skipped.append({**entry, "key": row.key, "field": source.field, "row": row.where, "samples": 1})


def _read(source: FieldSource, stream: ShardStream | None) -> bytes:
    """Return the bytes of a field; ``stream`` is that of a URL."""
    if stream is not None:
        pieces = []
        while (piece := stream.read()) is not None:
            pieces.append(bytes(piece))
        data = b"".join(pieces)
    elif source.kind == "file":
        data = _file(source)
    elif source.kind == "error":
        raise UrlError(source.value)
    else:
        return data_of(source)
    if source.size not in (None, len(data)):
        raise ObjectChanged(f"{redact(source.value)}: {len(data):,} bytes, and {source.size:,} when it was listed")
    return data


def _file(source: FieldSource) -> bytes:
    # Not by the engine: a file of some kilobytes takes it thirty times as long as one call of the system.
    status = os.stat(source.value)
    if not stat.S_ISREG(status.st_mode) and source.value != os.devnull:
        raise UrlError(f"{redact(source.value)}: this is no regular file")
    if source.version and version_without_inode(status.st_size, status.st_mtime_ns) != source.version:
        raise ObjectChanged(f"{redact(source.value)}: it was changed since it was listed; start the command again")
    with open(source.value, "rb", buffering=0) as file:
        return file.readall()


def _located(exn: Exception, row: SourceRow, source: FieldSource) -> WdsError:
    """Return the error of a file or URL of ``row``, which names all of these."""
    text = str(exn) if isinstance(exn, WdsError) else f"{redact(source.value)}: {explain_os_error(exn).reason}"
    changed = isinstance(exn, ObjectChanged)
    kind = ObjectChanged if changed else UrlError if isinstance(exn, _PERMANENT) else StorageError
    return kind(f"{row.where}: the field {source.field!r} of the sample {row.key!r}: {text}")


@dataclass
class RowPlan:
    """Rows, cut into shards: shard ``n`` has the rows ``numbers[cuts[n]:cuts[n + 1]]`` of ``store``. ``beside`` are
    other files of the data set, by URL."""

    store: RowStore
    numbers: array[int]
    cuts: Sequence[int]
    beside: Mapping[str, bytes] = field(default_factory=dict)
    source: str = ""
    """Description of the source, in words."""

    def lines(self, cost: str = "") -> Iterator[str]:
        """Yield what is read, for people. ``cost``: of reading, in words."""
        counts, first = self.store.counts, self.store.first
        unknown = f", and {counts.unknown:,} of unknown size" if counts.unknown else ""
        yield f"reads   {self.source}"
        fetched = f"files and URLs: {counts.fetched:,}"
        yield f"holds   samples: {len(self.store):,}; {fetched}; bytes: {counts.bytes:,}{unknown}{cost}"
        yield f"fields  {', '.join(f'{name} ({count:,})' for name, count in sorted(counts.fields.items()))}"
        for reason, count in sorted(counts.passed_over.items()):
            yield f"leaves  {count:,} out, {reason}: {redact(counts.examples[reason])}{', …' if count > 1 else ''}"
        for row in first:
            yield f"sample  {row.key}: {', '.join(map(str, row.fields))}"
        samples = [stop - start for start, stop in itertools.pairwise(self.cuts)]
        least, most = min(samples), max(samples)
        yield f"shards  {len(samples):,}, samples in each: {f'{least:,} to ' if least < most else ''}{most:,}"

    def inputs(self, folder: str) -> list[Input]:
        """Return the input of each task: where its rows will be, and their hash."""
        made = []
        for number in range(len(self.cuts) - 1):
            digest = self.store.digest(self._rows(number))
            made.append(Input(f"{folder}{number:05d}-{digest[:12]}.jsonl.zst", None, digest))
        return made

    def all_lines(self) -> Iterable[bytes]:
        """Return the rows of all shards, in order; they can be gone through again."""
        return _Again(lambda: self.store.lines(self.numbers))

    def publish(self, number: int, url: str, options: StorageOptions) -> None:
        """Write the rows of a shard, compressed."""
        sink = open_sink(url, options=options)
        try:
            with zstd.writer(sink) as packer:
                for line in self.store.lines(self._rows(number)):
                    packer.write(line)
            sink.commit()
        except BaseException:
            sink.abort()
            raise

    def _rows(self, number: int) -> array[int]:
        return self.numbers[self.cuts[number] : self.cuts[number + 1]]


class CreateJob(Job):
    """Job of `CreateWork`. It writes the rows of its tasks to ``plan/`` in its folder before it starts, and removes
    them at the end; with what was skipped it writes ``JOB-errors.jsonl`` beside the shards."""

    plan: RowPlan | None = None
    """None for a job that was made again from its folder, which has the rows."""

    @classmethod
    def planned(cls, work: CreateWork, plan: RowPlan, folder: JobFolder, **how: Any) -> Self:
        """Return the job of ``plan``. ``how``: arguments of `Job`."""
        job = cls(work, Plan(plan.inputs(f"{folder.url}/plan/")), folder, **how)
        job.plan = plan
        return job

    def write(self, stream: BinaryIO) -> int:
        """Write all samples as one tar to an open file, here and now, without records; return how many they are.
        ConfigError for a job that was made again from its folder."""
        if self.plan is None or not isinstance(self.work, CreateWork):
            raise ConfigError(f"{redact(self.folder.url)}: its rows are in its folder; run it")
        if self.work.index:
            raise ConfigError("output='-': an index goes beside a file, and standard output has no place for it")
        reading = _RowReading(self.work, self.plan.all_lines())
        with TarWriter(stream, mtime=0, compress=False, encoder=False) as tar:
            for sample in reading.samples():
                tar.write(sample)
        for entry in reading.skipped:
            logger.warning("left out: %s", entry["reason"])
        return tar.count

    def finish(self) -> None:
        """Write the list of shards, and of what was skipped, where every task has a record."""
        contents = self.folder.contents()
        if len(contents.finished) < len(self.tasks):
            return
        if not contents.complete:
            self._write_errors()
            super().finish()
        remove([f"{self.folder.url}/plan/"], self.folder.options)

    def _run(self, chosen: Callable[[Any], Iterable[int]]) -> Any:
        if isinstance(self.work, CreateWork) and self.work.template == "-":
            raise ConfigError("output='-': a job has no standard output; CreateJob.write writes there")
        if self.plan is not None:
            self._prepare(self.plan, chosen)
        return super()._run(chosen)

    def _prepare(self, plan: RowPlan, chosen: Callable[[Any], Iterable[int]]) -> None:
        """Write what the tasks read that are to be run here. JobChanged where the folder holds another job."""
        folder, engine = self.folder, self._engine
        contents = folder.contents()
        if contents.begun and not self.overwrite:
            folder.compare(self.document(), self._inputs_of_tasks())
        share = engine if isinstance(engine, RankedEngine) else None
        numbers = chosen(contents) if not self.overwrite else range(len(self.tasks))
        wanted = [number for number in numbers if share is None or share.is_mine(number)]
        there = self._there()
        for number in wanted:
            (listed,) = self.tasks[number].inputs
            if listed.url.rpartition("/")[2] not in there:
                plan.publish(number, listed.url, folder.options)
        if wanted and (share is None or share.leads):
            for url, data in plan.beside.items():
                publish(url, data, folder.options)

    def _there(self) -> set[str]:
        """Return the names of the lists of rows that were written before."""
        try:
            entries = list(folder_entries(f"{self.folder.url}/plan/", options=self.folder.options))
        except ShardNotFound:
            return set()
        return {entry.url.rpartition("/")[2] for entry in entries}

    @property
    def errors_url(self) -> str:
        """URL of the file that names what was skipped."""
        return f"{self.folder.out}{self.folder.url.rpartition('/')[2]}-errors.jsonl"

    def _write_errors(self) -> None:
        """Write what was skipped, one object a line; nothing where nothing was."""
        sink = None
        for record in self.folder.records(range(len(self.tasks))):
            for entry in record.skipped:
                sink = sink or open_sink(self.errors_url, options=self.folder.options)
                line = {new: entry.get(old) for new, old in _ERROR_NAMES.items()}
                sink.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n")
        if sink is not None:
            sink.commit()


_ERROR_NAMES = {"row": "row", "key": "key", "field": "field", "url": "shard", "error": "reason"}
