"""`convert_shards`: shards to TFRecord, MDS, Parquet or folders of images, and the first two to shards, as a job."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async import packages
from wds_async.arguments import check_size
from wds_async.distributed.attempts import add_traffic
from wds_async.distributed.folder import JobFolder, job_url, output_folder, read_objects
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.outputs import Shards, SummedSink, bytes_of, check_template, shard_name
from wds_async.distributed.plan import Plan, planned
from wds_async.distributed.tasks import Input, Output, Record, Task
from wds_async.errors import AccessDenied, ConfigError, JobFailed, ShardFormatError, ShardNotFound
from wds_async.handlers import reraise_exception
from wds_async.pipeline import DataPipeline
from wds_async.reading.stage import tarfile_to_samples
from wds_async.redact import redact
from wds_async.storage.listing.expand import Urls
from wds_async.storage.options import StorageOptions
from wds_async.storage.sink import publish
from wds_async.tar.decompress import plain
from wds_async.tar.source import ByteSource
from wds_async.tar.write import compressed, compression
from wds_async.tools.convert import mapping, mds, tfrecord
from wds_async.tools.convert.offsets import OffsetFiles
from wds_async.tools.convert.rows import METADATA, row_of, write_images, write_parquet
from wds_async.tools.convert.tfrecord import Values, framed, message_of
from wds_async.tools.create.rows import check_key, packed_key
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Board

__all__ = ["FORMATS", "ConvertJob", "ConvertWork", "convert_shards", "format_of"]

FORMATS = ("shards", "tfrecord", "mds", "parquet", "imagefolder")
_NAMES = {
    "tfrecord": re.compile(r"\.tf_?rec(ord)?s?(\.(gz|bz2|xz|zst))?(?=$|-)", re.IGNORECASE),
    "mds": re.compile(r"\.mds(\.(zstd|gz|bz2|br|snappy))?$", re.IGNORECASE),
    "parquet": re.compile(r"\.parquet$", re.IGNORECASE),
    "shards": re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz|tbz2|txz)$", re.IGNORECASE),
}
_SUFFIX = {
    "shards": ".tar",
    "tfrecord": ".tfrecord",
    "mds": ".mds",
    "parquet": ".parquet",
    "imagefolder": f"/{METADATA}",
}
_READERS = {"tfrecord": (tfrecord.samples, "record"), "mds": (mds.samples, "sample")}
_TITLES = {"tfrecord": "TFRecord", "mds": "MDS"}
_INDEXED = ("mds",)
"""Formats whose files an ``index.json`` lists."""
_INDEX = "index.json"


def format_of(url: str) -> str | None:
    """Return the format that the name of a file tells, also ``.tfrecord-00000-of-00010``; None for other names."""
    path = url.partition("?")[0]
    return next((kind for kind, pattern in _NAMES.items() if pattern.search(path)), None)


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
        name = shard_name(url)
        return next((short for kind in _READERS if (short := _NAMES[kind].sub("", name)) != name), name) or name

    def run(self, task: Task) -> Record:
        """Read the input of ``task``, and write it in the other format."""
        out = output_folder(self.output)
        more: dict[str, Any] = {}
        match self.to:
            case "shards":
                samples, outputs = self._to_shards(task, out)
            case "tfrecord":
                samples, outputs = self._to_tfrecord(task, out)
            case "mds":
                samples, outputs, more["columns"] = self._to_mds(task, out)
            case "imagefolder":
                samples, outputs = self._to_imagefolder(task, out)
            case _:
                samples, outputs = self._to_parquet(task, out)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=tuple(outputs),
            samples_in=samples,
            samples_out=samples,
            bytes_in=sum(one.size or 0 for one in task.inputs),
            bytes_out=sum(one.bytes for one in outputs),
            more=more,
        )

    def _to_shards(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        name = self.name(task.inputs[0].url)
        board = Board()
        shards = Shards(self.output, task.number, out, *self._limits, options=self.options, name=name)
        wanted = {*self.fields.values(), *filter(None, [self.key])} if self.fields else None
        try:
            with (
                shards,
                open_shards(_infos(task), stats=board.counters(), options=self.options) as reader,
            ):
                for stream in reader:
                    source = ByteSource(_unpacked(stream), stream.url)
                    read, noun = _READERS[format_of(stream.url) or "tfrecord"]
                    for number, (start, features) in enumerate(read(source, wanted)):
                        where = f"{noun} {number:,}, at byte {start:,}"
                        shards.write(self._sample(features, number, source, start, where))
        finally:
            add_traffic(board.traffic())
        return shards.samples, shards.outputs

    @property
    def _limits(self) -> tuple[float, float]:
        """Bytes and samples beyond which another file begins."""
        maxsize, maxcount = (float("inf") if one is None else one for one in (self.maxsize, self.maxcount))
        return maxsize, maxcount

    def _sample(
        self, features: Mapping[str, Values], number: int, source: ByteSource, start: int, where: str
    ) -> dict[str, Any]:
        """Return the sample of the record ``number``, which begins at ``start``; ``where`` says so."""
        try:
            if self.key is not None or mapping.KEY in features:
                key = mapping.key_of(features, self.key or mapping.KEY)
                key = packed_key(key) if self.key is not None else key
                check_key(key, f"feature {self.key or mapping.KEY!r}")
            else:
                key = packed_key(f"{self.name(source.url)}-{number:08d}")
            return {"__key__": key, **mapping.fields_of(features, self.fields)}
        except ValueError as exn:
            raise source.error(ShardFormatError, f"{where}: {exn}", start) from exn

    def _to_tfrecord(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        count = 0
        with self._sink(task) as sink:
            kind = compression(sink.url.partition("?")[0], None)
            stream: Any = compressed(sink, kind, 0) if kind else sink
            for sample in self._samples(task):
                features = self._features(sample)
                stream.write(framed(message_of({self.fields.get(name, name): features[name] for name in features})))
                count += 1
            if kind:
                stream.close()
            return count, [sink.commit(out, count)]

    def _to_mds(self, task: Task, out: str) -> tuple[int, Sequence[Output], dict[str, Any] | None]:
        """Write MDS; return also what `mds.index_text` wants to know of the columns, None without samples."""
        name = functools.partial(self.output.format, task=task.number, name=self.name(task.inputs[0].url))
        columns: mds.MdsColumns | None = None
        with OffsetFiles(name, out, b"", *self._limits, self.options) as files:
            for sample in self._samples(task):
                features = self._features(sample)
                if columns is None:
                    columns = mds.columns_of(features, self.fields)
                    files.head = columns.head()
                with _naming(sample):
                    data = mds.encoded(features, columns, self.fields)
                files.write(data)
        return files.samples, files.outputs, columns.config() if columns else None

    def _to_parquet(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        rows = (self._features(sample) for sample in self._samples(task))
        with self._sink(task) as sink:
            count = write_parquet(rows, sink, tuple(self.fields), self.row_group)
            return count, [sink.commit(out, count)]

    def _to_imagefolder(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        count = 0
        with self._sink(task) as sink:
            for line in write_images(self._rows(task), sink.url.removesuffix(METADATA), self.options):
                sink.write(line)
                count += 1
            return count, [sink.commit(out, count)]

    def _rows(self, task: Task) -> Iterator[tuple[dict[str, Any], dict[str, bytes]]]:
        names: set[str] = set()
        for sample in self._samples(task):
            with _naming(sample):
                line, images = row_of(sample, self.fields)
                if line["file_name"] in names:
                    raise ValueError("its key is there twice, and so would be its images")
            names.add(line["file_name"])
            yield line, images

    def _features(self, sample: Mapping[str, Any]) -> dict[str, Values]:
        """Return the features of a sample, by its fields. ShardFormatError, with shard and sample, for one that has
        none."""
        with _naming(sample):
            return mapping.features_of(sample, () if self.to == "parquet" else self.fields, self.typed)

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


@contextlib.contextmanager
def _naming(sample: Mapping[str, Any]) -> Iterator[None]:
    """Raise a ValueError as ShardFormatError with shard and sample."""
    try:
        yield
    except ValueError as exn:
        shard = redact(str(sample.get("__url__")))
        raise ShardFormatError(f"{shard}: sample {sample['__key__']!r}: {exn}").at(shard, None) from exn


class ConvertJob(Job):
    """Job of `ConvertWork`, which ends with the index that a format has of its files."""

    def finish(self) -> None:
        """Write the index and the list of files where every task has a record."""
        contents, work = self.folder.contents(), self.work
        assert isinstance(work, ConvertWork)
        if work.to in _INDEXED and len(contents.finished) >= len(self.tasks) and not contents.complete:
            publish(f"{output_folder(work.output)}{_INDEX}", self._index(), self.folder.options)
        super().finish()

    def _index(self) -> bytes:
        """Return the index. JobFailed where two files have other columns: no batch could have samples of both."""
        files: list[tuple[str, int, int, Mapping[str, Any]]] = []
        for record in self.folder.records(range(len(self.tasks))):
            files += [(one.url, one.bytes, one.samples or 0, record.more["columns"]) for one in record.outputs]
        for name, _, _, columns in files:
            if columns != files[0][3]:
                raise JobFailed(
                    f"{redact(self.folder.out)}{name} has {mds.described(columns)}, and {files[0][0]} has"
                    f" {mds.described(files[0][3])}: name the fields that all have (--field), and begin again"
                    " (--overwrite)"
                )
        return mds.index_text(files)


def _infos(task: Task) -> list[dict[str, Any]]:
    return [{"url": one.url} | ({"version": one.version} if one.version else {}) for one in task.inputs]


def _unpacked(stream: Any) -> Any:
    """Return the pieces of a file of records. Only its name says that it is compressed: the length of the first record
    may look like gzip."""
    name = stream.url.partition("?")[0]
    return plain(stream.read, stream.url) if compression(name, None) or name.endswith(".zstd") else stream.read


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
) -> ConvertJob:
    """Return the job that writes the files ``inputs`` (as for `map_shards`) in another format, one task each. A folder
    with the ``index.json`` of MDS stands for the files in that.

    ``output``: a folder, with a slash at its end, or names with ``{name}``, ``{task}`` and ``{part}`` (shards and MDS).
    ``to``: ``shards`` from TFRecord and MDS; ``tfrecord``, ``mds`` or ``parquet`` from shards; None: by the suffix of
        ``output``, else ``shards`` where the inputs are TFRecord or MDS.
    ``fields``: feature or column by the field of the sample; by default all, see `mapping.fields_of`.
    ``key``: the feature of the key; without it, ``__key__`` where there is one, else a number.
    ``typed``: write ``cls`` and the like as integers, to TFRecord and MDS.
    ``maxsize``, ``maxcount``: of new shards and files of MDS, see `MapWork`. ``row_group``: bytes of one of Parquet.

    Raise ConfigError for wrong arguments. See `map_shards` for the others.
    """
    options = StorageOptions(storage_options)
    sources = _planned(inputs, options)
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
    if chosen in _INDEXED and not overwrite:
        _check_index(folder)
    how: dict[str, Any] = {"engine": engine, "options": {"cpus": cpus, "workers": workers}, "attempts": attempts}
    named = [redact(one.url) for one in sources[:100]]
    return ConvertJob(work, plan, folder, inputs=named, overwrite=overwrite, on_progress=on_progress, **how)


def _planned(inputs: Urls, options: StorageOptions) -> list[Input]:
    """Return the inputs, and for a folder with an ``index.json`` of MDS, or this file, the files that it lists."""
    urls: list[str] = []
    sizes: dict[str, int] = {}
    for given in [inputs] if isinstance(inputs, str | os.PathLike) else inputs:
        name = os.fspath(given)
        index = _read_index(folder, options) if (folder := _index_folder(name)) is not None else None
        if index is None:
            urls.append(name)
            continue
        listed = mds.listed(index, f"{redact(folder or '')}{_INDEX}")
        urls += [f"{folder}{file}" for file, _ in listed]
        sizes |= {f"{folder}{file}": size for file, size in listed}
    sources = planned(urls, options)
    for one in sources:
        if (size := sizes.get(one.url)) is not None and one.size not in (None, size):
            raise ConfigError(
                f"{redact(one.url)}: {one.size:,} bytes, and {_INDEX} lists {size:,}: it was replaced or cut"
            )
    return sources


def _index_folder(name: str) -> str | None:
    """Return the folder, with its slash, whose ``index.json`` the input ``name`` may stand for."""
    if name == _INDEX or name.endswith(f"/{_INDEX}"):
        return name.removesuffix(_INDEX)
    if name.endswith("/") or "://" in name:
        return name if name.endswith("/") else None
    return f"{name}/" if os.path.isdir(name) else None


def _read_index(folder: str, options: StorageOptions) -> dict[str, Any] | None:
    """Return the ``index.json`` of a folder; None where there is none, or that of something else."""
    try:
        index = json.loads(next(read_objects([f"{folder}{_INDEX}"], options)))
    except (ShardNotFound, AccessDenied, ValueError, RecursionError):  # some web servers answer any name with a page
        return None
    shards = index.get("shards") if isinstance(index, dict) else None
    return index if shards and all(isinstance(one, dict) and "format" in one for one in shards) else None


def _check_index(folder: JobFolder) -> None:
    """Raise ConfigError where the index of other files is in the folder of the outputs."""
    if folder.contents().begun:
        return
    with contextlib.suppress(ShardNotFound):
        next(read_objects([f"{folder.out}{_INDEX}"], folder.options))
        raise ConfigError(
            f"{redact(folder.out)}{_INDEX} is there already, so these files would be lost to its readers: write to"
            " another folder, or replace it (--overwrite)"
        )


def _target(to: str | None, output: str, urls: Sequence[str]) -> str:
    """Return the format that is written. ConfigError where nothing tells it, or the inputs do not fit."""
    found = {format_of(url) for url in urls}
    if "parquet" in found:
        raise ConfigError("shards of the rows of Parquet are written by another command: wds-async create OUT TABLE")
    chosen = to or format_of(output) or ("shards" if found and found <= _READERS.keys() else None)
    if chosen not in FORMATS:
        raise ConfigError(f"to={to!r} (--to): the new format, one of {', '.join(FORMATS)}; the names do not tell it")
    for url in urls:
        kind = format_of(url)
        if kind in _READERS and chosen != "shards":
            raise ConfigError(f"{redact(url)}: {_TITLES[kind]} becomes shards; {chosen} is written from shards")
        if (packed := re.search(r"\.mds\.(br|snappy)$", url.partition("?")[0])) is not None:
            raise ConfigError(f"{redact(url)}: MDS compressed by {packed[1]} is not read; zstd, gz and bz2 are")
        if kind == "shards" and chosen == "shards":
            raise ConfigError(f"{redact(url)}: it is a shard already; say what it becomes by to= (--to)")
    return chosen


def _check(to: str, output: str, parts: bool, typed: bool, key: str | None, fields: Mapping[str, str]) -> None:
    """Raise ConfigError for arguments that mean nothing for the format ``to``."""
    if to == "parquet":
        packages.optional("pyarrow.parquet", "Parquet", "parquet")
        if renamed := [name for name, column in fields.items() if name != column]:
            raise ConfigError(f"the field {renamed[0]!r} is a column of the same name in Parquet: name fields only")
    if to not in ("shards", *_INDEXED) and parts:
        raise ConfigError("maxsize and maxcount are for new shards and files of MDS")
    if to != "shards" and key is not None:
        raise ConfigError("key is for new shards")
    if to not in _READERS and typed:
        raise ConfigError("typed (--typed) is for TFRecord and MDS")
    if to != "shards" and len({*fields.values()}) < len(fields):
        raise ConfigError("fields: two of them would be the same feature or column")
    if to == "mds" and not output.partition("?")[0].endswith(".mds"):
        raise ConfigError(
            f"output={redact(output)!r}: a folder, or names that end in .mds; MDS is written uncompressed"
        )
    if to == "imagefolder" and not output.endswith(f"/{METADATA}"):
        raise ConfigError(f"output={redact(output)!r}: a folder, with a slash at its end")
    if to == "tfrecord" and compression(output.partition("?")[0], None) not in ("", "gz"):
        raise ConfigError(f"output={redact(output)!r}: TFRecord is compressed by gzip, or not at all")
    for name in fields if to == "shards" else ():
        mapping.check_field(name)
    if "__key__" in fields or (to != "shards" and "__key__" in fields.values()):
        raise ConfigError("fields: the key is no field; it is taken from the feature that key= (--key) names")


def _check_names(work: ConvertWork, sources: Sequence[Input]) -> None:
    """Raise ConfigError where two inputs would become the same file."""
    seen: dict[str, str] = {}
    for number, one in enumerate(sources):
        name = work.output.format(task=number, part=0, name=work.name(one.url))
        if (other := seen.setdefault(name, one.url)) != one.url:
            raise ConfigError(f"{redact(other)} and {redact(one.url)} would become the same file {redact(name)}: add"
                              " {task} to the names of the output")  # fmt: skip
