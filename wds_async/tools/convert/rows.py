"""Samples as rows: of Parquet, and of a folder of images with ``metadata.jsonl``.

``load_dataset("imagefolder")`` of Hugging Face reads that folder,
https://huggingface.co/docs/datasets/image_dataset#imagefolder: a line has ``file_name``, the path of an image relative
to the file, and a column for everything else; columns that end with ``_file_name`` are images too.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from wds_async import packages
from wds_async.decoding.images import IMAGE_EXTENSIONS
from wds_async.errors import ShardFormatError
from wds_async.storage.options import StorageOptions
from wds_async.storage.sink import publish
from wds_async.tools.convert.mapping import KEY, NUMBERS
from wds_async.tools.convert.tfrecord import Values

__all__ = ["METADATA", "row_of", "write_images", "write_parquet"]

METADATA = "metadata.jsonl"
_MOST_ROWS = 100_000
_AT_ONCE = 16
_WAITING = 4 * _AT_ONCE
"""Images that wait to be written."""


class _Stream:
    """File for pyarrow: a sink that counts."""

    closed = False

    def __init__(self, sink: Any) -> None:
        self.write = sink.write
        self._sink = sink

    def tell(self) -> int:
        """Return how many bytes were written."""
        return int(self._sink.bytes)

    def flush(self) -> None:
        """Do nothing: the sink is published as a whole."""

    def close(self) -> None:
        """Do nothing: the sink is published by its owner."""


def write_parquet(rows: Iterable[Mapping[str, Values]], sink: Any, columns: Sequence[str], group_bytes: int) -> int:
    """Write ``rows`` to ``sink``, and return how many there are.

    ``columns``: fields that are written; without any, those of the first row group, and ShardFormatError for a field
    that appears behind it. A field that a sample lacks is null. A row group ends at ``group_bytes`` of fields.
    """
    pa = packages.optional("pyarrow", "Parquet", "parquet")
    stream = _Stream(sink)
    file = _Table(pa, pa.PythonFile(stream, mode="w"), list(columns))
    try:
        count = _write_groups(rows, file, group_bytes)
    except BaseException:
        stream.write = len  # pyarrow writes the end of the file when its writer goes, whatever became of the sink
        file.close()
        raise
    file.close()
    return count


def _write_groups(rows: Iterable[Mapping[str, Values]], file: _Table, group_bytes: int) -> int:
    group: list[Mapping[str, Values]] = []
    count = size = 0
    for row in rows:
        group.append(row)
        size += sum(len(values[0]) for _, values in row.values())
        count += 1
        if size >= group_bytes or len(group) == _MOST_ROWS:
            file.add(group)
            group, size = [], 0
    if group or not count:
        file.add(group)
    return count


class _Table:
    """The file, whose columns are known from its first row group on."""

    def __init__(self, pa: Any, stream: Any, columns: list[str]) -> None:
        self._pa = pa
        self._stream = stream
        self._columns = columns
        self._all = not columns
        self._writer: Any = None

    def add(self, rows: Sequence[Mapping[str, Values]]) -> None:
        """Write a row group."""
        pa = self._pa
        if self._writer is None:
            if self._all:
                self._columns = sorted({name for row in rows for name in row} - {KEY})
            schema = pa.schema([(KEY, pa.string()), *((name, pa.binary()) for name in self._columns)])
            module = packages.optional("pyarrow.parquet", "Parquet", "parquet")
            self._writer = module.ParquetWriter(
                self._stream, schema, use_dictionary=False, write_statistics=[KEY], compression="snappy"
            )
        if self._all:
            self._check(rows)
        keys = pa.array([row[KEY][1][0].decode("utf-8") for row in rows], pa.string())
        values = [
            pa.array([row[name][1][0] if name in row else None for row in rows], pa.binary()) for name in self._columns
        ]
        table = pa.Table.from_arrays([keys, *values], schema=self._writer.schema)
        self._writer.write_table(table, row_group_size=max(1, len(rows)))

    def _check(self, rows: Sequence[Mapping[str, Values]]) -> None:
        known = {KEY, *self._columns}
        for row in rows:
            if new := row.keys() - known:
                raise ShardFormatError(
                    f"the sample {row[KEY][1][0].decode()!r} has the field {min(new)!r}, and the columns were written"
                    f" already: {', '.join(self._columns)}; name those that are wanted (--field)"
                )

    def close(self) -> None:
        """Write the end of the file."""
        if self._writer is not None:
            self._writer.close()


def write_images(
    rows: Iterable[tuple[Mapping[str, Any], Mapping[str, bytes]]], folder: str, options: StorageOptions
) -> Iterator[bytes]:
    """Write the images of each row below ``folder``, several at once, and yield its line of ``metadata.jsonl``; those
    of the last lines are there when the iteration ends. Raise what writing raises."""
    writing: list[Future[None]] = []
    with ThreadPoolExecutor(_AT_ONCE, "imagefolder") as threads:
        try:
            for line, images in rows:
                for name, data in images.items():
                    writing.append(threads.submit(publish, f"{folder}{name}", data, options))
                while len(writing) > _WAITING:
                    writing.pop(0).result()
                yield json.dumps(line, ensure_ascii=False).encode("utf-8") + b"\n"
            for one in writing:
                one.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def row_of(sample: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the line of a sample and the bytes of its images by name.

    ``fields``: the column of each field that is wanted; by default all, under their own names. The first image, of a
    field without a dot if there is one, is ``file_name``; the others are ``FIELD_file_name``. ValueError for a sample
    without an image, and for a field that is neither an image, nor JSON, nor text.
    """
    line: dict[str, Any] = {}
    images: dict[str, bytes] = {}
    key = _path_of(sample[KEY])
    chosen = fields or {name: name for name in sample if not name.startswith("__")}
    for field in sorted(chosen, key=lambda field: "." in field):
        if field not in sample:
            raise ValueError(f"there is no field {field!r}; there are {[one for one in sample if one[:2] != '__']}")
        data, suffix = bytes(sample[field]), field.rpartition(".")[2]
        if suffix in IMAGE_EXTENSIONS:
            line["file_name" if not images else f"{chosen[field]}_file_name"] = name = f"{key}.{field}"
            images[name] = data
        else:
            line[chosen[field]] = _value(field, suffix, data)
    if not images:
        raise ValueError("there is no image among its fields")
    return {"file_name": line.pop("file_name"), KEY: sample[KEY], **line}, images


def _path_of(key: str) -> str:
    """Return ``key`` as a path within the folder. ValueError for one that leads out of it."""
    path = posixpath.normpath(key)
    if path != key or path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError("its key is no path below a folder: rename the samples, as by wds-async map")
    return path


def _value(field: str, suffix: str, data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
        if suffix in ("json", "jsn"):
            return json.loads(text)
        return int(text) if suffix in NUMBERS else text
    except ValueError:
        raise ValueError(
            f"the field {field!r} is neither an image, JSON, a number nor text: name others by --field"
        ) from None
