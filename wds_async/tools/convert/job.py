"""`convert_shards`: shards to TFRecord, MDS, LitData, Parquet or folders of images, and the first three to shards."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async import packages
from wds_async.arguments import check_size
from wds_async.distributed.attempts import add_traffic
from wds_async.distributed.folder import JobFolder, job_url, output_folder, read_objects
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.outputs import (
    ANY_NUMBER,
    Shards,
    SummedSink,
    bytes_of,
    check_inputs_stay,
    check_template,
    shard_name,
)
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
from wds_async.tools.convert import litdata, mapping, mds, tfrecord
from wds_async.tools.convert.offsets import OffsetFiles
from wds_async.tools.convert.rows import METADATA, row_of, write_images, write_parquet
from wds_async.tools.convert.tfrecord import Values, framed, message_of
from wds_async.tools.create.rows import check_key, packed_key
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Board

__all__ = ["FORMATS", "ConvertJob", "ConvertWork", "convert_shards", "format_of"]

FORMATS = ("shards", "tfrecord", "mds", "litdata", "parquet", "imagefolder")
_NAMES = {
    "tfrecord": re.compile(r"\.tf_?rec(ord)?s?(\.(gz|bz2|xz|zst))?(?=$|-)", re.IGNORECASE),
    "mds": re.compile(r"\.mds(\.(zstd|gz|bz2|br|snappy))?$", re.IGNORECASE),
    "litdata": re.compile(r"(\.zstd(:\d+)?)?\.bin$", re.IGNORECASE),
    "parquet": re.compile(r"\.parquet$", re.IGNORECASE),
    "shards": re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz|tbz2|txz)$", re.IGNORECASE),
}
_SUFFIX = {
    "shards": ".tar",
    "tfrecord": ".tfrecord",
    "mds": ".mds",
    "litdata": ".bin",
    "parquet": ".parquet",
    "imagefolder": f"/{METADATA}",
}
_READERS = {"tfrecord": (tfrecord.samples, "record"), "mds": (mds.samples, "sample")}
_TITLES = {"tfrecord": "TFRecord", "mds": "MDS", "litdata": "LitData"}
_INDEXED: dict[str, Any] = {"mds": mds, "litdata": litdata}
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
    columns: Mapping[str, Any] | None = None
    """Of inputs that are chunks of LitData: `LitDataColumns.config`."""
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "options"}
        if self.columns is None:
            del fields["columns"]
        return {"kind": "convert", **fields, "output": redact(self.output), "fields": dict(self.fields)}

    @classmethod
    def of(cls, description: Mapping[str, Any], options: StorageOptions) -> ConvertWork:
        """Return the work that `describe` described."""
        return cls(**{name: value for name, value in description.items() if name != "kind"}, options=options)

    def name(self, url: str) -> str:
        """Return what stands for ``{name}`` in the output of ``url``."""
        name = shard_name(url)
        return next((short for kind in _TITLES if (short := _NAMES[kind].sub("", name)) != name), name) or name

    def run(self, task: Task) -> Record:
        """Read the input of ``task``, and write it in the other format."""
        out = output_folder(self.output)
        more: dict[str, Any] = {}
        images = 0
        match self.to:
            case "shards":
                samples, outputs = self._to_shards(task, out)
            case "tfrecord":
                samples, outputs = self._to_tfrecord(task, out)
            case "mds" | "litdata":
                samples, outputs, more["columns"] = self._to_columns(task, out)
            case "imagefolder":
                samples, outputs, images = self._to_imagefolder(task, out)
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
            bytes_out=sum(one.bytes for one in outputs) + images,
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
                    source, read, noun = self._reader(stream)
                    for number, (start, features) in enumerate(read(source, wanted)):
                        where = f"{noun} {number:,}, at byte {start:,}"
                        shards.write(self._sample(features, number, source, start, where))
        finally:
            add_traffic(board.traffic())
        return shards.samples, shards.outputs

    def _reader(self, stream: Any) -> tuple[ByteSource, Any, str]:
        """Return the bytes of a file, the function that yields what is in it, and the name of such a thing."""
        if self.columns is not None:
            columns = litdata.LitDataColumns.of(self.columns)
            source = ByteSource(columns.unpacked(stream), stream.url)
            return source, functools.partial(litdata.samples, columns), "sample"
        return ByteSource(_unpacked(stream), stream.url), *_READERS[format_of(stream.url) or "tfrecord"]

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

    def _to_columns(self, task: Task, out: str) -> tuple[int, Sequence[Output], dict[str, Any] | None]:
        """Write MDS or LitData; return also what ``index_text`` wants to know of the columns, None without samples."""
        format = _INDEXED[self.to]
        name = functools.partial(self.output.format, task=task.number, name=self.name(task.inputs[0].url))
        columns: Any = None
        with OffsetFiles(name, out, *self._limits, self.options) as files:
            for sample in self._samples(task):
                features = self._features(sample)
                if columns is None:
                    columns = format.columns_of(features, self.fields)
                    files.begin(columns.head())
                with _naming(sample):
                    data = format.encoded(features, columns, self.fields)
                files.write(data)
        return files.samples, files.outputs, columns.config() if columns else None

    def _to_parquet(self, task: Task, out: str) -> tuple[int, Sequence[Output]]:
        rows = (self._features(sample) for sample in self._samples(task))
        with self._sink(task) as sink:
            count = write_parquet(rows, sink, tuple(self.fields), self.row_group)
            return count, [sink.commit(out, count)]

    def _to_imagefolder(self, task: Task, out: str) -> tuple[int, Sequence[Output], int]:
        """Write images and ``metadata.jsonl``; return also the bytes of the images."""
        count, sizes = 0, array("Q")
        with self._sink(task) as sink:
            for line in write_images(self._rows(task, sizes), sink.url.removesuffix(METADATA), self.options):
                sink.write(line)
                count += 1
            return count, [sink.commit(out, count)], sum(sizes)

    def _rows(self, task: Task, sizes: array[int]) -> Iterator[tuple[dict[str, Any], dict[str, bytes]]]:
        names: set[str] = set()
        for sample in self._samples(task):
            with _naming(sample):
                line, images = row_of(sample, self.fields)
                if line["file_name"] in names:
                    raise ValueError("its key is there twice, and so would be its images")
            names.add(line["file_name"])
            sizes.extend(map(len, images.values()))
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
            publish(f"{output_folder(work.output)}{_INDEX}", self._index(_INDEXED[work.to]), self.folder.options)
        super().finish()

    def _index(self, format: Any) -> bytes:
        """Return the index of the files. JobFailed where two have other columns: no batch could have samples of both.
        ``format``: the module of their format."""
        files: list[Output] = []
        columns: dict[str, Any] = {}
        for record in self.folder.records(range(len(self.tasks))):
            files += record.outputs
            if record.outputs and (columns := columns or record.more["columns"]) != (others := record.more["columns"]):
                raise JobFailed(
                    f"{redact(self.folder.out)}{record.outputs[0].url} has {_named(others)}, and {files[0].url} has"
                    f" {_named(columns)}: name the fields that all have (--field), and begin again (--overwrite)"
                )
        if not files:
            raise JobFailed(f"{redact(self.folder.url)}: the inputs have no samples, so there is nothing to list")
        text: bytes = format.index_text(files, columns)
        return text


def _named(columns: Mapping[str, Any]) -> str:
    """Return columns as text."""
    names, encodings = (columns.get(f"column_{what}") or columns[what] for what in ("names", "encodings"))
    return f"the columns {', '.join(f'{name} ({kind})' for name, kind in zip(names, encodings, strict=True))}"


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
    with the ``index.json`` of MDS or LitData stands for the files in that.

    ``output``: a folder, with a slash at its end, or names with ``{name}``, ``{task}`` and ``{part}``.
    ``to``: ``shards`` from TFRecord, MDS and LitData; any other of `FORMATS` from shards; None: by the suffix of
        ``output``, else ``shards`` where no input is one.
    ``fields``: feature or column by the field of the sample; by default all, see `mapping.fields_of`.
    ``key``: the feature of the key; without it, ``__key__`` where there is one, else a number.
    ``typed``: write ``cls`` and the like as integers, to TFRecord, MDS and LitData.
    ``maxsize``, ``maxcount``: of new files, see `MapWork`. ``row_group``: bytes of a row group of Parquet.

    Raise ConfigError for wrong arguments. See `map_shards` for the others.
    """
    options = StorageOptions(storage_options)
    sources, columns = _planned(inputs, options)
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
        columns.config() if columns else None,
        options,
    )
    check_template(output, len(sources), parts=parts)
    _check_names(work, sources)
    folder = JobFolder(job_url(output_folder(output), job), options)
    if not overwrite:
        _check_index(chosen, folder)
    how: dict[str, Any] = {"engine": engine, "options": {"cpus": cpus, "workers": workers}, "attempts": attempts}
    how |= {"inputs": [redact(one.url) for one in sources[:100]], "overwrite": overwrite, "on_progress": on_progress}
    return ConvertJob(work, Plan(sources), folder, **how)


def _planned(inputs: Urls, options: StorageOptions) -> tuple[list[Input], litdata.LitDataColumns | None]:
    """Return the inputs, and for a folder with an ``index.json`` of MDS or LitData, or this file, the files that it
    lists; and what is in those of LitData."""
    urls: list[str] = []
    sizes: dict[str, int] = {}
    columns: dict[str, litdata.LitDataColumns] = {}
    for given in [inputs] if isinstance(inputs, str | os.PathLike) else inputs:
        name = os.fspath(given)
        index = _read_index(folder, options) if (folder := _index_folder(name)) is not None else None
        if index is None or folder is None:
            urls.append(name)
            continue
        where = f"{redact(folder)}{_INDEX}"
        if "chunks" in index:
            names, columns[folder] = litdata.listed(index, where)
            files: list[tuple[Any, Any]] = [(one, None) for one in names]
        else:
            files = mds.listed(index, where)
        for file, size in files:
            if not isinstance(file, str) or ".." in file.split("/") or file[:1] in ("", "/") or "://" in file:
                raise ConfigError(f"{where}: {file!r} is no name of a file beside it")
            urls.append(f"{folder}{file}")
            sizes[urls[-1]] = size
    sources = planned(urls, options)
    for one in sources:
        if (size := sizes.get(one.url)) is not None and one.size not in (None, size):
            raise ConfigError(
                f"{redact(one.url)}: {one.size:,} bytes, and {_INDEX} lists {size:,}: it was replaced or cut"
            )
    return sources, _columns(sources, columns, options)


def _columns(
    sources: Sequence[Input], known: dict[str, litdata.LitDataColumns], options: StorageOptions
) -> litdata.LitDataColumns | None:
    """Return what is in chunks of LitData, by the indexes in their folders; None for files of other formats."""
    for one in sources:
        folder = one.url[: one.url.rfind("/") + 1]
        if format_of(one.url) != "litdata" or any(map(folder.startswith, known)):
            continue
        index = _read_index(folder, options)
        if index is None or "chunks" not in index:
            raise ConfigError(f"{redact(one.url)}: no {_INDEX} of LitData beside it says what is in this file")
        known[folder] = litdata.listed(index, f"{redact(folder)}{_INDEX}")[1]
    if len({*known.values()}) > 1 or (known and {format_of(one.url) for one in sources} != {"litdata"}):
        raise ConfigError("chunks of LitData with other leaves, or other files beside them: convert each by itself")
    return next(iter(known.values()), None)


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
    if not isinstance(index, dict):
        return None
    shards = index.get("shards")
    is_mds = shards and isinstance(shards, list) and all(isinstance(one, dict) and "format" in one for one in shards)
    return index if is_mds or ("config" in index and isinstance(index.get("chunks"), list)) else None


def _check_index(to: str, folder: JobFolder) -> None:
    """Raise ConfigError where the index of other files is in the folder of the outputs, for a format that has one."""
    if to not in _INDEXED or folder.contents().begun:
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
    chosen = to or format_of(output) or ("shards" if found and found <= _TITLES.keys() else None)
    if chosen not in FORMATS:
        raise ConfigError(f"to={to!r} (--to): the new format, one of {', '.join(FORMATS)}; the names do not tell it")
    for url in urls:
        kind = format_of(url)
        if kind in _TITLES and chosen != "shards":
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
        raise ConfigError("maxsize and maxcount are for new shards, files of MDS and chunks of LitData")
    if to != "shards" and key is not None:
        raise ConfigError("key is for new shards")
    if to not in _TITLES and typed:
        raise ConfigError("typed (--typed) is for TFRecord, MDS and LitData")
    if to != "shards" and len({*fields.values()}) < len(fields):
        raise ConfigError("fields: two of them would be the same feature or column")
    if to in _INDEXED and not output.partition("?")[0].endswith(_SUFFIX[to]):
        raise ConfigError(
            f"output={redact(output)!r}: a folder, or names that end in {_SUFFIX[to]}; {_TITLES[to]} is written"
            " uncompressed"
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
    """Raise ConfigError where two inputs would become the same file, and where a file would replace an input."""
    seen: dict[str, str] = {}
    for number, one in enumerate(sources):
        name = work.output.format(task=number, part=0, name=work.name(one.url))
        if (other := seen.setdefault(name, one.url)) != one.url:
            raise ConfigError(f"{redact(other)} and {redact(one.url)} would become the same file {redact(name)}: add"
                              " {task} to the names of the output")  # fmt: skip
    check_inputs_stay(
        (
            work.output.format(task=number, part=ANY_NUMBER, name=work.name(one.url))
            for number, one in enumerate(sources)
        ),
        (one.url for one in sources),
    )
