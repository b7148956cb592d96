"""`convert_shards`: shards to TFRecord or Parquet, and TFRecord to shards, as a job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async import packages
from wds_async.arguments import check_size
from wds_async.distributed.attempts import add_traffic
from wds_async.distributed.folder import JobFolder, job_url, output_folder
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.outputs import Shards, SummedSink, bytes_of, check_template, shard_name
from wds_async.distributed.plan import Plan, planned
from wds_async.distributed.tasks import Input, Output, Record, Task
from wds_async.errors import ConfigError, ShardFormatError
from wds_async.handlers import reraise_exception
from wds_async.pipeline import DataPipeline
from wds_async.reading.stage import tarfile_to_samples
from wds_async.redact import redact
from wds_async.storage.listing.expand import Urls
from wds_async.storage.options import StorageOptions
from wds_async.tar.decompress import plain
from wds_async.tar.source import ByteSource
from wds_async.tar.write import compressed, compression
from wds_async.tools.convert import mapping, parquet
from wds_async.tools.convert.tfrecord import example_of, framed, message_of, records
from wds_async.tools.create.rows import check_key, packed_key
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Board

__all__ = ["FORMATS", "ConvertWork", "convert_shards", "format_of"]

FORMATS = ("shards", "tfrecord", "parquet")
_TFRECORD = re.compile(r"\.tf_?rec(ord)?s?(\.(gz|bz2|xz|zst))?(?=$|-)", re.IGNORECASE)
_PARQUET = re.compile(r"\.parquet$", re.IGNORECASE)
_TAR = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz|tbz2|txz)$", re.IGNORECASE)
_SUFFIX = {"shards": ".tar", "tfrecord": ".tfrecord", "parquet": ".parquet"}


def format_of(url: str) -> str | None:
    """Return the format that the name of a file tells, also ``.tfrecord-00000-of-00010``; None for other names."""
    path = url.partition("?")[0]
    kinds = {"tfrecord": _TFRECORD, "parquet": _PARQUET, "shards": _TAR}
    return next((kind for kind, pattern in kinds.items() if pattern.search(path)), None)


@dataclass(frozen=True)
class ConvertWork:
    """Work of `convert_shards`; its fields are arguments of that, as they were checked."""

    output: str
    to: str
    fields: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    typed: bool = False
    maxsize: int | None = None
    maxcount: int | None = None
    row_group: int = 64_000_000
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "options"}
        return {"kind": "convert", **fields, "output": redact(self.output), "fields": dict(self.fields)}

    @classmethod
    def of(cls, description: Mapping[str, Any], options: StorageOptions) -> ConvertWork:
        """Return the work that `describe` described."""
        return cls(**{name: value for name, value in description.items() if name != "kind"}, options=options)

    def name(self, url: str) -> str:
        """Return what stands for ``{name}`` in the output of ``url``."""
        return _TFRECORD.sub("", shard_name(url)) or shard_name(url)

    def run(self, task: Task) -> Record:
        """Read the input of ``task``, and write it in the other format."""
        out = output_folder(self.output)
        write = {"shards": self._to_shards, "tfrecord": self._to_tfrecord, "parquet": self._to_parquet}[self.to]
        samples, outputs = write(task, out)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=tuple(outputs),
            samples_in=samples,
            samples_out=samples,
            bytes_in=sum(one.size or 0 for one in task.inputs),
            bytes_out=sum(one.bytes for one in outputs),
        )

    def _to_shards(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        maxsize, maxcount = (float("inf") if one is None else one for one in (self.maxsize, self.maxcount))
        name = self.name(task.inputs[0].url)
        board = Board()
        shards = Shards(self.output, task.number, out, maxsize, maxcount, options=self.options, name=name)
        try:
            with (
                shards,
                open_shards(_infos(task), stats=board.counters(), options=self.options) as reader,
            ):
                for stream in reader:
                    source = ByteSource(_unpacked(stream), stream.url)
                    for number, (data, start) in enumerate(records(source)):
                        shards.write(self._sample(data, start, source, number))
        finally:
            add_traffic(board.traffic())
        return shards.samples, shards.outputs

    def _sample(self, data: bytes, start: int, source: ByteSource, number: int) -> dict[str, Any]:
        """Return the sample of record ``number``, whose data begins at ``start``."""
        features = example_of(data, source, start)
        try:
            if self.key is not None or mapping.KEY in features:
                key = mapping.key_of(features, self.key or mapping.KEY)
                key = packed_key(key) if self.key is not None else key
                check_key(key, f"feature {self.key or mapping.KEY!r}")
            else:
                key = packed_key(f"{self.name(source.url)}-{number:08d}")
            return {"__key__": key, **mapping.fields_of(features, self.fields)}
        except ValueError as exn:
            raise source.error(ShardFormatError, f"record {number:,}, at byte {start - 12:,}: {exn}", start) from exn

    def _to_tfrecord(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        count = 0
        with self._sink(task) as sink:
            kind = compression(sink.url.partition("?")[0], None)
            stream: Any = compressed(sink, kind, 0) if kind else sink
            for sample in self._samples(task):
                stream.write(framed(message_of(self._features(sample))))
                count += 1
            if kind:
                stream.close()
            return count, [sink.commit(out, count)]

    def _to_parquet(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        rows = (self._features(sample) for sample in self._samples(task))
        with self._sink(task) as sink:
            count = parquet.write(rows, sink, tuple(self.fields), self.row_group)
            return count, [sink.commit(out, count)]

    def _features(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the features of a sample. ShardFormatError, with shard and sample, for one that has none."""
        names = {} if self.to == "parquet" else self.fields
        try:
            made = mapping.features_of(sample, names, self.typed)
        except ValueError as exn:
            shard = redact(str(sample.get("__url__")))
            raise ShardFormatError(f"{shard}: sample {sample['__key__']!r}: {exn}").at(shard, None) from exn
        return {self.fields.get(name, name): values for name, values in made.items()} if names else made

    def _samples(self, task: Task) -> Iterator[Mapping[str, Any]]:
        reading = tarfile_to_samples(reraise_exception, storage_options=self.options)
        pipeline = DataPipeline(_infos(task), reading)
        try:
            with pipeline:
                yield from pipeline
        finally:
            add_traffic(pipeline.traffic())

    @contextlib.contextmanager
    def _sink(self, task: Task) -> Iterator[SummedSink]:
        """Give the task's output; an error discards it."""
        sink = SummedSink(
            self.output.format(task=task.number, part=0, name=self.name(task.inputs[0].url)), self.options
        )
        try:
            yield sink
        except BaseException:
            sink.abort()
            raise


def _infos(task: Task) -> list[dict[str, Any]]:
    return [{"url": one.url} | ({"version": one.version} if one.version else {}) for one in task.inputs]


def _unpacked(stream: Any) -> Any:
    """Return the pieces of a file of records. Only its name says that it is compressed: the length of the first record
    may look like gzip."""
    return plain(stream.read, stream.url) if compression(stream.url.partition("?")[0], None) else stream.read


def convert_shards(
    inputs: Urls,
    output: str,
    *,
    to: str | None = None,
    fields: Mapping[str, str] | None = None,
    key: str | None = None,
    typed: bool = False,
    maxsize: float | str | None = None,
    maxcount: int | None = None,
    row_group: float | str = "64M",
    job: str = "convert",
    engine: Any = "local",
    cpus: float | None = None,
    workers: int | None = None,
    attempts: int = 4,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Job:
    """Return the job that writes the files ``inputs`` (as for `map_shards`) in another format, one task each.

    ``output``: a folder, with a slash at its end, or names with ``{name}``, ``{task}`` and ``{part}`` (shards alone).
    ``to``: ``shards`` from TFRecord; ``tfrecord`` or ``parquet`` from shards; None: by the suffix of ``output``, and of
        the inputs if they are TFRecord.
    ``fields``: feature or column by the field of the sample; by default all, see `mapping.fields_of`.
    ``key``: the feature of the key; without it, ``__key__`` where there is one, else a number.
    ``typed``: write ``cls`` and the like as integers, to TFRecord.
    ``maxsize``, ``maxcount``: of new shards, see `MapWork`. ``row_group``: bytes of a row group of Parquet.

    Raise ConfigError for wrong arguments. See `map_shards` for the others.
    """
    options = StorageOptions(storage_options)
    sources = planned(inputs, options)
    chosen = _target(to, output, [one.url for one in sources])
    parts = maxsize is not None or maxcount is not None
    if output.endswith("/") or output in (".", ".."):
        output = f"{output.rstrip('/')}/{{name}}{'-{part:03d}' if parts else ''}{_SUFFIX[chosen]}"
    _check(chosen, output, parts, typed, key, fields or {})
    work = ConvertWork(
        output,
        chosen,
        dict(fields or {}),
        key,
        bool(typed),
        None if maxsize is None else bytes_of(maxsize),
        None if maxcount is None else check_size("convert_shards", "maxcount", maxcount, at_least=1),
        bytes_of(row_group, "row_group"),
        options,
    )
    plan = Plan(sources, 1)
    check_template(output, len(plan), parts=parts)
    _check_names(work, sources)
    folder = JobFolder(job_url(output_folder(output), job), options)
    how: dict[str, Any] = {"engine": engine, "options": {"cpus": cpus, "workers": workers}, "attempts": attempts}
    named = [redact(one.url) for one in sources[:100]]
    return Job(work, plan, folder, inputs=named, overwrite=overwrite, on_progress=on_progress, **how)


def _target(to: str | None, output: str, urls: Sequence[str]) -> str:
    """Return the format that is written. ConfigError where nothing tells it, or the inputs do not fit."""
    found = {format_of(url) for url in urls}
    if "parquet" in found:
        raise ConfigError("shards of the rows of Parquet are written by another command: wds-async create OUT TABLE")
    chosen = to or format_of(output) or ("shards" if found == {"tfrecord"} else None)
    if chosen not in FORMATS:
        raise ConfigError(f"to={to!r} (--to): the new format, one of {', '.join(FORMATS)}; the names do not tell it")
    for url in urls:
        kind = format_of(url)
        if kind == "tfrecord" and chosen != "shards":
            raise ConfigError(f"{redact(url)}: TFRecord becomes shards; {chosen} is written from shards")
        if kind == "shards" and chosen == "shards":
            raise ConfigError(f"{redact(url)}: it is a shard already; say what it becomes by to= (--to)")
    return chosen


def _check(to: str, output: str, parts: bool, typed: bool, key: str | None, fields: Mapping[str, str]) -> None:
    """Raise ConfigError for arguments that mean nothing for the format ``to``."""
    if to == "parquet":
        packages.optional("pyarrow.parquet", "Parquet", "parquet")
        if renamed := [name for name, column in fields.items() if name != column]:
            raise ConfigError(f"the field {renamed[0]!r} is a column of the same name in Parquet: name fields only")
    if to != "shards" and (parts or key is not None):
        raise ConfigError("maxsize, maxcount and key are for new shards")
    if to != "tfrecord" and typed:
        raise ConfigError("typed (--typed) is for TFRecord")
    if to == "tfrecord" and compression(output.partition("?")[0], None) not in ("", "gz"):
        raise ConfigError(f"output={redact(output)!r}: TFRecord is compressed by gzip, or not at all")
    for name in fields if to == "shards" else ():
        mapping.check_field(name)
    if "__key__" in fields:
        raise ConfigError("fields: the key is no field; it is taken from the feature that key= (--key) names")


def _check_names(work: ConvertWork, sources: Sequence[Input]) -> None:
    """Raise ConfigError where two inputs would become the same file."""
    seen: dict[str, str] = {}
    for number, one in enumerate(sources):
        name = work.output.format(task=number, part=0, name=work.name(one.url))
        if (other := seen.setdefault(name, one.url)) != one.url:
            raise ConfigError(f"{redact(other)} and {redact(one.url)} would become the same file {redact(name)}: add"
                              " {task} to the names of the output")  # fmt: skip
