"""Chunks of LitData, read and written without it.

A chunk is the number and the offsets of its items, and the items: the sizes of all leaves, and the leaves. What they
are stands in ``index.json``. Rows that are plain data are in Arrow's IPC format behind the offsets instead; compressed
ones in frames of zstd. Source: ``litdata/streaming`` (``writer``, ``item_loader``, ``serializers``, ``framed_zstd``).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wds_async import packages
from wds_async.distributed.tasks import Output
from wds_async.errors import ConfigError, CorruptShard, ShardFormatError, UnsafeContent, WdsError
from wds_async.tar.decompress import hands_through, plain
from wds_async.tar.source import ByteSource
from wds_async.tools.convert import mapping
from wds_async.tools.convert.mapping import KEY, npy, of_bytes, stored
from wds_async.tools.convert.offsets import (
    check_columns,
    decoded,
    items,
    joined,
    leaves,
    offsets_of,
    table,
)
from wds_async.tools.convert.tfrecord import MAX_RECORD_BYTES, Values

__all__ = ["LitDataColumns", "columns_of", "encoded", "index_text", "listed", "samples"]

_FRAMED = b"LDFZ01\0\0"
_FOOTER = b"LDARW01\0"
_ARROW_FILE = b"ARROW1\0\0"
_MOST_LEAVES = 10_000
_PIECE = 256 << 10
_AS_STORED = {"str": ".txt", "text": ".txt", "jpeg": ".jpg", "tiff": ".tif", "tifffile": ".tif", "pdf": ".pdf"}
_FILES = ("image", "file", "video", "audio")
_NUMBERS = {"int": "<q", "bool": "<?", "float": "<d"}
_NUMPY = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bool",
)  # fmt: skip
_TORCH = (
    *("float32",) * 2, *("float64",) * 2, *("complex64",) * 2, *("complex128",) * 2, *("float16",) * 2, "bfloat16",
    "uint8", "int8", *("int16",) * 2, *("int32",) * 2, *("int64",) * 2, "bool", "uint16",
)  # fmt: skip
_WRITTEN = {"json": "str", "txt": "str", "text": "str"}


@dataclass(frozen=True)
class LitDataColumns:
    """The leaves of the items: names and encodings; and how the chunks are compressed: "", ``chunk``, ``batch`` (in
    frames) or ``sample``."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    compressed: str = ""

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> LitDataColumns:
        """Return the columns of `config`."""
        return cls(tuple(description["names"]), tuple(description["encodings"]), description["compressed"])

    def head(self) -> bytes:
        """Return what stands between the offsets and the items of a chunk."""
        return b""

    def config(self) -> dict[str, Any]:
        """Return the columns as JSON."""
        return asdict(self) | {"names": list(self.names), "encodings": list(self.encodings)}

    def unpacked(self, stream: Any) -> Any:
        """Return the pieces of a chunk."""
        return plain(stream.read, stream.url) if self.compressed == "chunk" else stream.read


def samples(
    columns: LitDataColumns, source: ByteSource, wanted: Collection[str] | None
) -> Iterator[tuple[int, dict[str, Values]]]:
    """Yield the offset of each item in the chunk, and its leaves: those ``wanted``, or all; ``__key__`` always.

    ShardFormatError, with the byte, for a damaged chunk, and for a leaf that is missing or of a format that is not
    read; UnsafeContent for a pickle.
    """
    framed = columns.compressed == "batch" and source.take(8)
    if framed == _FRAMED:
        offsets, source = _frames(source)
    elif framed:
        raise source.error(CorruptShard, "byte 0: no chunk of frames of zstd, as index.json says", 0)
    else:
        offsets = table(source, "a chunk of LitData")
        if len(offsets) > 1 and offsets[0] == offsets[-1]:
            yield from _rows(source, len(offsets) - 1, wanted)
            return
    check_columns(source, columns.names, wanted)
    decoders: dict[str, Callable[[bytes], Values]] = {}
    for name, kind in zip(columns.names, columns.encodings, strict=True):
        if wanted is None or name in wanted or name == KEY:
            decoders[name] = _decoder(source, name, kind)
    sizes = [None] * len(columns.names)
    for number, (start, packed) in enumerate(items(source, offsets)):
        try:
            data = _inflated(packed, source) if columns.compressed == "sample" else packed
            parts = dict(zip(columns.names, leaves(data, sizes), strict=True))
            yield start, {name: decoded(name, decode, parts[name]) for name, decode in decoders.items()}
        except ValueError as exn:
            raise source.error(CorruptShard, f"sample {number:,}, at byte {start:,}: {exn}", start) from exn
    _ended(source)


def _ended(source: ByteSource) -> None:
    """Raise ShardFormatError where other bytes than a copy of the rows in Arrow follow the last item."""
    at, last = source.offset, b""
    while piece := source.take(_PIECE):
        last = (last + piece)[-len(_FOOTER) :]
    if last not in (b"", _FOOTER):
        why = f"byte {at:,}: more bytes follow the last item: their number or their offsets are damaged"
        raise source.error(ShardFormatError, why, at)


def _rest(source: ByteSource) -> Callable[[], memoryview | None]:
    """Return the pieces that ``source`` has not given yet."""

    def read() -> memoryview | None:
        piece = source.take(_PIECE)
        return memoryview(piece) if piece else None

    return read


def _frames(source: ByteSource) -> tuple[array[int], ByteSource]:
    """Return the offsets of a chunk of frames of zstd, and the bytes of its items. Its magic was read."""
    head = source.take(16)
    if len(head) < 16:
        raise source.error(CorruptShard, f"byte 8: the file ends in its head, after {8 + len(head)} bytes", 8)
    version, _, count, _, frames = struct.unpack("<HHIII", head)
    if version != 1 or frames > count:
        raise source.error(CorruptShard, f"byte 8: version {version} with {frames:,} frames of {count:,} items", 8)
    offsets = offsets_of(source, count, "a chunk of LitData", 12)
    at, size = source.offset, 24 * frames
    if source.skip(size) < size:
        raise source.error(CorruptShard, f"byte {at:,}: the file ends in the list of its {frames:,} frames", at)
    at = source.offset
    read = plain(_rest(source), source.url)
    if count and hands_through(read):
        raise source.error(CorruptShard, f"byte {at:,}: no frame of zstd", at)
    return offsets, ByteSource(read, source.url)


def _inflated(packed: bytes, source: ByteSource) -> bytes:
    """Return the bytes of an item that is a frame of zstd by itself. ValueError for what is none."""
    pieces = iter([memoryview(packed)])
    try:
        data = ByteSource(plain(lambda: next(pieces, None), source.url), source.url).take(MAX_RECORD_BYTES + 1)
    except ShardFormatError as exn:
        raise ValueError(f"{len(packed):,} bytes that are no zstd: {exn}") from exn
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"more than {MAX_RECORD_BYTES:,} bytes behind zstd")
    return data


class _ArrowFile:
    """File for pyarrow that is read in order."""

    closed = False

    def __init__(self, source: ByteSource) -> None:
        self.read = source.take

    def close(self) -> None:
        """Do nothing: the stream is closed by its owner."""


def _rows(source: ByteSource, count: int, wanted: Collection[str] | None) -> Iterator[tuple[int, dict[str, Values]]]:
    """Yield the rows of a chunk that holds them in Arrow's format."""
    pa = packages.optional("pyarrow", "this chunk of LitData, whose rows are in Arrow's format,", "parquet")
    start, number = source.offset, 0
    magic = source.take(len(_ARROW_FILE))
    if magic != _ARROW_FILE:
        source.put_back(magic)
    try:
        with pa.ipc.open_stream(pa.PythonFile(_ArrowFile(source), mode="r")) as batches:
            names = batches.schema.names
            check_columns(source, names, wanted)
            if len({*names}) < len(names):
                raise ValueError("two columns have the same name")
            names = [name for name in names if wanted is None or name in wanted or name == KEY]
            for batch in batches:
                batch.validate(full=True)  # pyarrow trusts the offsets in a file until then
                for row in batch.select(names).to_pylist():
                    yield start, {name: _value(name, value) for name, value in row.items()}
                    number += 1
    except WdsError:
        raise
    except (ValueError, ArithmeticError, LookupError, ImportError, OSError, MemoryError, pa.ArrowException) as exn:
        why = f"sample {number:,}, in the rows of Arrow from byte {start:,}: {exn}"
        raise source.error(CorruptShard, why, start) from exn
    if number != count:
        why = f"byte {start:,}: {number:,} rows of Arrow, and the chunk has {count:,} items"
        raise source.error(CorruptShard, why, start)


def _value(name: str, value: Any) -> Values:
    """Return a value of a row. ValueError for one that has no form in JSON."""
    match value:
        case None:
            return "", []
        case bool() | int():
            return "int64", [int(value)]
        case str():
            return ".txt", [value.encode("utf-8")]
        case bytes():
            return of_bytes(value)
    try:
        return ".json", [json.dumps(value, ensure_ascii=False).encode("utf-8")]
    except (TypeError, ValueError) as exn:
        raise ValueError(f"the column {name!r} has no form in JSON: {exn}") from exn


def _decoder(source: ByteSource, name: str, format: str) -> Callable[[bytes], Values]:
    """Return the function that makes the values of a leaf of its bytes."""
    leave = f"name those that are wanted (--field FIELD=LEAF), without {name!r}"
    kind, _, detail = format.partition(":")
    if kind == "pickle":
        why = f"{source.shown}: the leaf {name!r} is a pickle, which can run any program when it is read: {leave}"
        raise UnsafeContent(why)
    if kind in _AS_STORED:
        return functools.partial(stored, _AS_STORED[kind])
    if kind in _FILES and re.fullmatch(r"[a-z0-9]{1,8}", detail.partition(":")[0]):
        return functools.partial(stored, f".{detail.partition(':')[0]}")
    if kind in ("bytes", *_FILES):
        return of_bytes
    if kind in _NUMBERS:
        return functools.partial(_number, _NUMBERS[kind])
    if kind == "json":
        return _json
    if kind in ("tensor", "numpy"):
        return functools.partial(_array, kind)
    types = {"no_header_tensor": _TORCH, "no_header_numpy": _NUMPY}.get(kind, ())
    if detail.isdecimal() and len(detail) < 4 and int(detail) < len(types):
        return functools.partial(_flat, types[int(detail)])
    known = ", ".join(("bytes", *_FILES, *_AS_STORED, *_NUMBERS, "json", "tensor", "numpy"))
    why = f"the leaf {name!r} has the format {format!r}; those that are read are {known}: {leave}"
    raise source.error(ShardFormatError, why, source.offset)


def _number(code: str, data: bytes) -> Values:
    (value,) = struct.unpack(code, data)
    return (".json", [json.dumps(value).encode("ascii")]) if code == "<d" else ("int64", [int(value)])


def _json(data: bytes) -> Values:
    if data[:1] not in (b"[", b"{"):
        raise ValueError("nested data in a binary form of LitData's own, which is not read")
    return ".json", [data]


def _flat(dtype: str, data: bytes) -> Values:
    return ".npy", [npy(data, dtype, None)]


def _array(kind: str, data: bytes) -> Values:
    """Return a tensor or an array of numpy, behind its type, its number of axes and their sizes."""
    order, types = (">", _TORCH) if kind == "tensor" else ("<", _NUMPY)
    number, axes = struct.unpack_from(f"{order}2I", data)
    if number >= len(types) or len(data) < 8 + 4 * axes:
        raise ValueError(f"type {number:,} and {axes:,} axes")
    return ".npy", [npy(data[8 + 4 * axes :], types[number], struct.unpack_from(f"{order}{axes}I", data, 8))]


def columns_of(features: Mapping[str, Values], fields: Mapping[str, str]) -> LitDataColumns:
    """Return the leaves for samples like ``features``; ``fields``: the name of a leaf, where it is not the field's. A
    format follows from the field's extension. Only formats that need no other package, in any version of LitData."""
    return LitDataColumns(*mapping.columns_of(features, fields, _WRITTEN))


def encoded(features: Mapping[str, Values], columns: LitDataColumns, fields: Mapping[str, str]) -> bytes:
    """Return an item. ValueError where it has other fields than ``columns``, and for text that is none."""
    parts = mapping.column_bytes(features, fields, columns.names, columns.encodings)
    return joined(parts, [None] * len(parts))


def index_text(files: Sequence[Output], config: Mapping[str, Any]) -> bytes:
    """Return ``index.json`` for ``files``; ``config``: of their `LitDataColumns`."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    names = config["names"]
    spec = {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [leaf] * len(names)}
    crcs = " ".join(one.crc32c for one in files)
    index = {
        "chunks": [
            {"chunk_bytes": one.bytes, "chunk_size": one.samples, "dim": None, "filename": one.url} for one in files
        ],
        "config": {
            "chunk_bytes": max((one.bytes for one in files), default=None),
            "chunk_size": None,
            "compression": None,
            "data_format": config["encodings"],
            "data_spec": json.dumps([1, spec]),
            "encryption": None,
            "item_loader": "PyTreeLoader",
        },
        "updated_at": hashlib.sha256(crcs.encode()).hexdigest()[:16],  # other data are not taken from a cache of these
    }
    return json.dumps(index, sort_keys=True).encode("ascii")


def listed(index: Mapping[str, Any], where: str) -> tuple[list[Any], LitDataColumns]:
    """Return the names of the chunks that ``index.json`` lists, and their leaves. ConfigError, with ``where``, for what
    is not read."""
    try:
        config = index["config"]
        if config.get("encryption") or config.get("item_loader", "PyTreeLoader") != "PyTreeLoader":
            raise ValueError("chunks that are encrypted, or were written with another loader than PyTreeLoader")
        formats = tuple(map(str, config["data_format"]))
        names = tuple(_names(json.loads(config["data_spec"])[1]))
        if len(names) != len(formats) or len({*names}) != len(names):
            raise ValueError(f"{len(names):,} names and {len(formats):,} formats of leaves")
        level = (config.get("compression_level") or "chunk") if config.get("compression") else ""
        if level not in ("", "chunk", "batch", "sample") or (level and not config["compression"].startswith("zstd")):
            raise ValueError(f"compressed by {config['compression']!r}, {level!r}")
        files = [one["filename"] for one in index["chunks"]]
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as exn:
        raise ConfigError(f"{where}: its chunks cannot be read: {type(exn).__name__}: {exn}") from exn
    return files, LitDataColumns(names, formats, level)


def _names(spec: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of the leaves: keys and numbers of the places, with dots between them."""
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        yield ".".join(path) or "0"
        return
    if kind in ("builtins.dict", "collections.OrderedDict"):
        keys = json.loads(spec["context"])
    elif kind in ("builtins.list", "builtins.tuple"):
        keys = range(len(children))
    else:
        raise ValueError(f"items of the type {kind!r}")
    for key, child in itertools.islice(zip(keys, children, strict=True), _MOST_LEAVES):
        yield from _names(child, (*path, str(key)))
