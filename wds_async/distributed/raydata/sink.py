"""Ray Data's sink of shards: one shard for each write task, and a record of it, created only if absent.

The number of a shard is that of Ray's task. Tasks are numbered in the order of the dataset's blocks, which Ray is told
to preserve. The same blocks come as long as the plan, its inputs and the sizes of blocks are the same; Ray promises no
more than that. So the id of a record depends on the keys of its rows too. It is an error if the number of a task has a
record of other rows; one whose number has a record of the same rows is done.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async import packages
from wds_async.arguments import check_size
from wds_async.config import transfer_config
from wds_async.distributed.folder import JobFolder, job_url, output_folder
from wds_async.distributed.functions import function_named, name_of
from wds_async.distributed.outputs import Shards, bytes_of, check_template
from wds_async.distributed.progress import JobSummary
from wds_async.distributed.tasks import Record, Task, record_of
from wds_async.errors import ConfigError, JobChanged, ShardNotFound, WdsError
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.transfer.reader import open_shards
from wds_async.writer import make_encoder

__all__ = ["ShardSink", "WrittenShard", "write"]

_OPEN_RANGE = re.compile(r"\{(0+)\.\.\}")
_NAMING = ("__key__", "__url__", "__offset__")
_SLICE_BYTES = 4 << 20


def write(
    dataset: Any,
    output: str,
    *,
    job: str,
    shard_bytes: int | str = "500M",
    version: str = "",
    encoder: bool | str | Callable[..., Any] = True,
    index: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **ray_options: Any,
) -> JobSummary:
    """Write a Ray dataset as shards, and return what was done.

    ``output`` is a template of names: ``"s3://bucket/train-{000000..}.tar"``, or with ``{task:06d}``. Each row is a
    sample: ``__key__`` is its key, a str; every other column whose name does not begin with ``_`` is a field. Null
    leaves the field out, and a row of nulls only is an error. Bytes are written as they are, str as UTF-8; ``encoder``
    makes bytes of other values by the field's name, see `TarWriter`: int and float for ``cls`` and ``txt``, arrays and
    tensors for ``npy``, ``pth`` and images, lists and dicts for ``json``. pandas makes floats of whole numbers among
    which one is missing: ``1.0``. A value without encoder is an error that names the row; workers import an encoder
    that is a function by its name.

    A shard consists of the blocks up to the one with which they have ``shard_bytes`` in memory, and a task holds them
    all; ``index`` writes DALI's index beside each.

    A record of each shard stands in ``OUT/_wds/JOB/``, and at the end a list of all; ``WebDataset("OUT/_wds/JOB")``
    reads them. When the same job is run again, the shards that have a record are not written again; their rows are
    still made. Rows are recognised by ``__key__``, ``__url__`` and ``__offset__``: change ``version`` or ``job`` when
    what is made of them changes. JobChanged where the folder holds a job with other options, or where a shard has other
    rows than its record: the dataset, its order or the sizes of its blocks have changed. ``overwrite`` drops the
    records of a job with other options.

    ``ray_options`` (``concurrency``, ``ray_remote_args``) go to ``Dataset.write_datasink``. Raise ConfigError before
    anything is written for a wrong argument, and a StorageError where the folder cannot be written.
    """
    data = packages.optional("ray.data", "raydata.write", "ray")
    size = bytes_of(shard_bytes, "shard_bytes")
    template = _OPEN_RANGE.sub(lambda match: f"{{task:0{len(match[1])}d}}", output)
    check_template(template, 2)
    encoder = encoder if isinstance(encoder, bool) else name_of(encoder, "encoder")
    options = StorageOptions(storage_options)
    description = {"kind": "raydata", "output": redact(template), "version": version, "shard_bytes": size}
    description |= {"encoder": encoder, "index": bool(index)}
    folder = JobFolder(job_url(output_folder(template), job), options)
    kind = type("ShardDatasink", (ShardSink, data.Datasink), {})
    sink: ShardSink = kind(template, folder, description, check_size("raydata.write", "shard_bytes", size, at_least=1))
    began, execution = time.monotonic(), dataset.context.execution_options
    folder.create({"work": description, "tasks": None, "ids": None, "inputs": []}, overwrite=overwrite)
    before, execution.preserve_order = execution.preserve_order, True
    try:
        dataset.write_datasink(sink, **ray_options)
    finally:
        execution.preserve_order = before
    return sink.finish(time.monotonic() - began)


@dataclass(frozen=True)
class WrittenShard:
    """Result of one write task."""

    task: int
    id: str
    samples: int
    block_bytes: int
    """Bytes of its rows in memory."""
    bytes: int
    before: bool = False
    """True if it had a record when it began."""
    first: bool = True
    """False where another runner committed it meanwhile."""


@dataclass(eq=False)
class ShardSink:
    """Methods of a Ray ``Datasink`` that writes shards and commits them to the folder of a job."""

    template: str
    folder: JobFolder
    description: Mapping[str, Any]
    shard_bytes: int
    shards: Sequence[WrittenShard] = field(default_factory=list)

    @property
    def min_bytes_per_write(self) -> int:
        """Bytes of blocks that make a shard."""
        return self.shard_bytes

    def get_name(self) -> str:
        """Return the name of the operator."""
        return "Shards"

    def write(self, blocks: Iterable[Any], ctx: Any) -> WrittenShard:
        """Write the rows of ``blocks``, in one of Ray's processes."""
        tables = [_table(block) for block in blocks]
        number, samples = int(ctx.task_idx), sum(table.num_rows for table in tables)
        size = sum(table.nbytes for table in tables)
        task = Task(number, (), {"rows": _hash_of_rows(tables)})
        identity = task.identity(self.description)
        if (there := self._record(number)) is not None:
            self._compare(there, identity)
            return WrittenShard(number, identity, samples, size, there.bytes_out, before=True)
        encoder = self.description["encoder"]
        encode = make_encoder(function_named(encoder, "encoder") if isinstance(encoder, str) else encoder, None)
        shards = Shards(
            self.template,
            number,
            self.folder.out,
            encoder=encode,
            index=self.description["index"],
            options=self.folder.options,
        )
        with shards:
            for table in tables:
                _write_rows(shards, table)
        record = Record(
            number,
            identity,
            (),
            tuple(shards.outputs),
            samples_in=samples,
            samples_out=shards.samples,
            bytes_out=shards.bytes,
        )
        first = self.folder.commit(record)
        if not first and (there := self._record(number)) is not None:
            self._compare(there, identity)
            if there.outputs != record.outputs:
                raise JobChanged(
                    f"{redact(self.folder.url)}: task {number} was written twice at the same time, with other bytes"
                    f" for the same rows, so {there.outputs[0].url} may not be what its record tells. What makes the"
                    " rows has to give the same every time; run the job again with overwrite=True and another version"
                )
        return WrittenShard(number, identity, samples, size, record.bytes_out, first=first)

    def _record(self, number: int) -> Record | None:
        """Return the record of task ``number``, None where there is none. A missing one is asked for once."""
        url = f"{self.folder.url}/{number:05d}.json"
        config = transfer_config().taking_refusals()
        try:
            with open_shards([url], config=config, options=self.folder.options) as reader:
                stream = next(reader)
                pieces = []
                while (piece := stream.read()) is not None:
                    pieces.append(bytes(piece))
        except ShardNotFound:
            return None
        return record_of(b"".join(pieces), url)

    def _compare(self, there: Record, identity: str) -> None:
        """Raise JobChanged for a record of other rows."""
        if there.id != identity:
            raise JobChanged(
                f"{redact(self.folder.url)}/{there.task:05d}.json: the record of a shard with other rows than those of"
                f" part {there.task} of the dataset now. The dataset, its order or the sizes of its blocks have changed"
                " since; give the job another name, or another version and overwrite=True"
            )

    def on_write_complete(self, write_result: Any) -> None:
        """Take the results of all tasks, in the driver."""
        self.shards = sorted(write_result.write_returns, key=lambda one: one.task)

    def finish(self, seconds: float) -> JobSummary:
        """Write the list of shards, and return the summary of the run."""
        count = len(self.shards)
        if extra := sorted(self.folder.finished() - {one.task for one in self.shards})[:10]:
            raise JobChanged(
                f"{redact(self.folder.url)}: it has records of the tasks {extra} (and maybe more), and the dataset has"
                f" {count} shards only. It was divided otherwise before; give the job another name, or another version"
                " and overwrite=True"
            )
        self.folder.finish(count, [one.id for one in self.shards])
        samples = sum(one.samples for one in self.shards)
        return JobSummary(
            job=self.folder.url,
            tasks=count,
            before=sum(one.before for one in self.shards),
            done=sum(not one.before for one in self.shards),
            elsewhere=sum(not one.first for one in self.shards),
            samples_in=samples,
            samples_out=samples,
            bytes_in=sum(one.block_bytes for one in self.shards),
            bytes_out=sum(one.bytes for one in self.shards if not one.before),
            seconds=seconds,
        )


def _table(block: Any) -> Any:
    """Return a block as an Arrow table with keys."""
    accessor = packages.optional("ray.data.block", "raydata.write", "ray").BlockAccessor
    table = accessor.for_block(block).to_arrow()
    if table.num_rows and "__key__" not in table.column_names:
        raise ConfigError(f"raydata.write: rows need a column __key__; there are {', '.join(table.column_names[:10])}")
    return table


def _hash_of_rows(tables: Iterable[Any]) -> str:
    """Return a hash of what names the rows, in order; of how they are divided into blocks it does not depend."""
    digest = hashlib.sha256()
    for table in tables:
        columns = [table.column(name).to_pylist() for name in _NAMING if name in table.column_names]
        for row in zip(*columns, strict=True):
            digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _write_rows(shards: Shards, table: Any) -> None:
    """Write the rows of ``table`` as samples. ValueError for one that cannot be written, with where it came from."""
    row = 0
    try:
        for sample in _samples(table):
            if len(sample) < 2:
                raise ValueError(
                    f"the sample {sample.get('__key__')!r} has no field, and a shard cannot hold it: all columns but"
                    " those whose names begin with '_' are null. Dataset.filter takes such rows out"
                )
            shards.write(sample)
            row += 1
    except (WdsError, OSError):
        raise
    except Exception as exn:
        origin = [str(table.column(name)[row]) for name in _NAMING[1:] if name in table.column_names]
        where = f", which came from {redact(origin[0])} at byte {origin[-1]}" if len(origin) == 2 else ""
        raise ValueError(f"raydata.write: row {row} of a block of {table.num_rows}{where}: {exn}") from exn


def _samples(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``table`` as samples. Fields that are null are left out."""
    names = [name for name in table.column_names if name == "__key__" or not name.startswith("_")]
    step = max(1, table.num_rows * _SLICE_BYTES // max(1, table.nbytes))  # so many rows are Python's at a time
    for start in range(0, table.num_rows, step):
        part = table.slice(start, step)
        for values in zip(*(_values(part, name) for name in names), strict=True):
            yield {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _values(table: Any, name: str) -> Iterable[Any]:
    """Return the values of a column: bytes and text as such, anything else (tensors) as Ray gives it to a row."""
    types = packages.optional("pyarrow.types", "raydata.write", "ray")
    column = table.column(name)
    plain = (types.is_binary, types.is_large_binary, types.is_string, types.is_large_string)
    if any(is_plain(column.type) for is_plain in plain):
        values: Iterator[Any] = (value for chunk in column.chunks for value in chunk.to_pylist())
        return values
    accessor = packages.optional("ray.data.block", "raydata.write", "ray").BlockAccessor
    rows = accessor.for_block(table.select([name])).iter_rows(public_row_format=True)
    return map(functools.partial(_item, name), rows)


def _item(name: str, row: Mapping[str, Any]) -> Any:
    return row[name]
