"""MDS, the format of MosaicML Streaming, read and written without it.

A file is the number and the offsets of its samples, a header in JSON that names the columns and their encodings, and
the samples. ``index.json`` in the folder lists the files. Source: ``streaming/base/format/mds`` of mosaicml-streaming.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_async.distributed.tasks import Output
from wds_async.errors import ConfigError, CorruptShard, FieldTooLarge, ShardFormatError, TruncatedShard, UnsafeContent
from wds_async.tar.source import ByteSource
from wds_async.tools.convert import mapping
from wds_async.tools.convert.mapping import KEY, npy, of_bytes, stored
from wds_async.tools.convert.offsets import check_columns, decoded, ended, items, joined, leaves, table
from wds_async.tools.convert.tfrecord import Values

__all__ = ["MdsColumns", "columns_of", "encoded", "index_text", "listed", "samples"]

_MOST_HEADER = 16 << 20
_INTEGERS = {
    "int": "<q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q",
    "uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q",
}  # fmt: skip
_FLOATS = {"float16": "<e", "float32": "<f", "float64": "<d"}
_AS_STORED = {
    "str": ".txt", "str_int": ".cls", "str_float": ".txt", "str_decimal": ".txt",
    "jpeg": ".jpg", "png": ".png", "json": ".json",
}  # fmt: skip
_ARRAYS = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32",
    33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_WRITTEN = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png", "json": "json", "txt": "str", "text": "str"}


@dataclass(frozen=True)
class MdsColumns:
    """The columns of a file: names, encodings, and the bytes of those whose size is fixed."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    def config(self) -> dict[str, Any]:
        """Return what a file and the index hold about the columns."""
        return {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": None,
            "column_names": list(self.names),
            "column_encodings": list(self.encodings),
            "column_sizes": list(self.sizes),
        }

    def head(self) -> bytes:
        """Return the header of a file."""
        return json.dumps(self.config(), sort_keys=True).encode("ascii")


def samples(source: ByteSource, wanted: Collection[str] | None) -> Iterator[tuple[int, dict[str, Values]]]:
    """Yield the offset of each sample in the file, and its columns: those ``wanted``, or all; ``__key__`` always.

    ShardFormatError, with the byte, for a damaged file, and for a column that is missing or of an encoding that is not
    read; UnsafeContent for a pickle.
    """
    offsets = table(source, "MDS")
    columns = _header(source, offsets)
    check_columns(source, columns.names, wanted)
    decoders: dict[str, Callable[[bytes], Values]] = {}
    for name, encoding, size in zip(columns.names, columns.encodings, columns.sizes, strict=True):
        if wanted is None or name in wanted or name == KEY:
            decoders[name] = _decoder(source, name, encoding, size)
    for number, (start, data) in enumerate(items(source, offsets)):
        try:
            parts = dict(zip(columns.names, leaves(data, columns.sizes), strict=True))
            yield start, {name: decoded(name, decode, parts[name]) for name, decode in decoders.items()}
        except ValueError as exn:
            raise source.error(CorruptShard, f"sample {number:,}, at byte {start:,}: {exn}", start) from exn
    ended(source)


def _header(source: ByteSource, offsets: array[int]) -> MdsColumns:
    """Return the columns that stand between the offsets and the first sample."""
    at = source.offset
    size = offsets[0] - at
    if size > _MOST_HEADER:
        raise source.error(FieldTooLarge, f"byte {at:,}: a header of {size:,} bytes; the most are {_MOST_HEADER:,}", at)
    data = source.take(size)
    if len(data) < size:
        raise source.error(TruncatedShard, f"byte {at:,}: the file ends in its header of {size:,} bytes", at)
    try:
        return _columns(json.loads(data))
    except (ValueError, RecursionError) as exn:
        why = f"byte {at:,}: the header, {size:,} bytes, does not describe columns: {exn}"
        raise source.error(ShardFormatError, why, at) from exn


def _columns(config: Any) -> MdsColumns:
    """Return the columns of a header. ValueError for what is none."""
    if not isinstance(config, dict) or config.get("version") != 2 or config.get("format") != "mds":
        raise ValueError("no object with version 2 and format 'mds'")
    lists = [config.get(f"column_{what}") for what in ("names", "encodings", "sizes")]
    names, encodings, sizes = (one if isinstance(one, list) else [] for one in lists)
    if not names or not len(names) == len(encodings) == len(sizes) or len({*map(str, names)}) != len(names):
        raise ValueError(f"{len(names):,} names, {len(encodings):,} encodings and {len(sizes):,} sizes of columns")
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        if not isinstance(name, str) or not isinstance(encoding, str):
            raise ValueError(f"the column {name!r} with the encoding {encoding!r}")
        fixed = _size_of(encoding)
        is_size = size is None or (type(size) is int and 0 <= size < 1 << 32)
        if not is_size or fixed not in (None, size):
            raise ValueError(f"the column {name!r} of {size!r} bytes; those of {encoding!r} have {fixed or 'any size'}")
    return MdsColumns(tuple(names), tuple(encodings), tuple(size or None for size in sizes))


def _size_of(encoding: str) -> int | None:
    """Return how many bytes each value takes; None where they differ."""
    if (code := (_INTEGERS | _FLOATS).get(encoding)) is not None:
        return struct.calcsize(code)
    dtype, shape = _array_type(encoding)
    return None if dtype is None or shape is None else math.prod(shape) * np.dtype(dtype).itemsize


def _array_type(encoding: str) -> tuple[str | None, tuple[int, ...] | None]:
    """Return dtype and shape of ``ndarray:int32:2,3``, None for those that stand in each value."""
    if not encoding.startswith("ndarray:"):
        return None, None
    _, dtype, *shapes = encoding.split(":")
    try:
        (shape,) = [tuple(map(int, shapes[0].split(",")))] if shapes else [None]
    except ValueError:
        shape = (0,)
    if dtype not in _ARRAYS.values() or len(shapes) > 1 or (shape is not None and min(shape) < 1):
        raise ValueError(f"the encoding {encoding!r}")
    return dtype, shape


def _decoder(source: ByteSource, name: str, encoding: str, size: int | None) -> Callable[[bytes], Values]:
    """Return the function that makes the values of a column of its bytes."""
    leave = f"name the columns that are wanted (--field FIELD=COLUMN), without {name!r}"
    if encoding == "pkl":
        why = f"{source.shown}: the column {name!r} is a pickle, which can run any program when it is read: {leave}"
        raise UnsafeContent(why)
    if encoding in _AS_STORED:
        return functools.partial(stored, _AS_STORED[encoding])
    if encoding in _INTEGERS:
        return functools.partial(_integer, _INTEGERS[encoding])
    if encoding in _FLOATS:
        return functools.partial(_float, _FLOATS[encoding])
    if encoding == "bytes":
        return of_bytes
    if encoding.partition(":")[0] == "ndarray":
        return functools.partial(_array, *_array_type(encoding))
    known = ", ".join(("bytes", *_AS_STORED, *_INTEGERS, *_FLOATS, "ndarray"))
    why = f"the column {name!r} has the encoding {encoding!r}; those that are read are {known}: {leave}"
    raise source.error(ShardFormatError, why, source.offset)


def _integer(code: str, data: bytes) -> Values:
    return "int64", list(struct.unpack(code, data))


def _float(code: str, data: bytes) -> Values:
    return ".json", [json.dumps(struct.unpack(code, data)[0]).encode("ascii")]


def _array(dtype: str | None, shape: tuple[int, ...] | None, data: bytes) -> Values:
    """Return an array as ``.npy``. ValueError where its bytes do not fit its shape."""
    at = 0
    if dtype is None:
        if (dtype := _ARRAYS.get(data[0])) is None:
            raise ValueError(f"the type {data[0]} of an array")
        at = 1
    if shape is None:
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        at += 1
        if len(data) < at + axes * width:
            raise ValueError(f"it ends in the shape of an array of {axes} axes")
        shape = tuple(int.from_bytes(data[at + n * width : at + (n + 1) * width], "little") for n in range(axes))
        at += axes * width
    return ".npy", [npy(data[at:], dtype, shape)]


def columns_of(features: Mapping[str, Values], fields: Mapping[str, str]) -> MdsColumns:
    """Return the columns for samples like ``features``; ``fields``: the name of a column, where it is not the field's.
    An encoding follows from the field's extension."""
    names, encodings = mapping.columns_of(features, fields, _WRITTEN)
    return MdsColumns(names, encodings, tuple(map(_size_of, encodings)))


def encoded(features: Mapping[str, Values], columns: MdsColumns, fields: Mapping[str, str]) -> bytes:
    """Return a sample. ValueError where it has other fields than ``columns``, and for text and JSON that are none."""
    return joined(mapping.column_bytes(features, fields, columns.names, columns.encodings), columns.sizes)


def index_text(files: Sequence[Output], config: Mapping[str, Any]) -> bytes:
    """Return ``index.json`` for ``files``; ``config``: of their `MdsColumns`."""
    shards = [
        {
            **config,
            "raw_data": {"basename": one.url, "bytes": one.bytes, "hashes": {}},
            "samples": one.samples,
            "zip_data": None,
        }
        for one in files
    ]
    return json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode("ascii")


def listed(index: Mapping[str, Any], where: str) -> list[tuple[Any, Any]]:
    """Return name and bytes of the files that ``index.json`` lists. ConfigError, with ``where``, for what is not
    read."""
    files = []
    for number, shard in enumerate(index["shards"]):
        try:
            if (shard["version"], shard["format"]) != (2, "mds"):
                raise ValueError(f"version {shard['version']!r} of the format {shard['format']!r}; MDS 2 is read")
            file = shard.get("zip_data") or shard["raw_data"]
            if type(file["bytes"]) is not int:
                raise ValueError(f"{file['bytes']!r} bytes")
            files.append((file["basename"], file["bytes"]))
        except (LookupError, TypeError, AttributeError, ValueError) as exn:
            raise ConfigError(f"{where}: entry {number:,} of 'shards': {type(exn).__name__}: {exn}") from exn
    return files
