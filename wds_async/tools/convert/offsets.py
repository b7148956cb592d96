"""Files that begin with the number and the offsets of their samples, as MDS and LitData's chunks do.

The number and each offset are 4 bytes, little-endian; there is one offset more than samples: where the last one ends. A
sample is the sizes of those leaves (columns) whose size varies, 4 bytes each, and the bytes of all leaves.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, Self

from wds_async.distributed.outputs import SummedSink
from wds_async.distributed.tasks import Output
from wds_async.errors import ConfigError, CorruptShard, FieldTooLarge, ShardFormatError, TruncatedShard
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.tar.source import ByteSource
from wds_async.tools.convert.mapping import KEY
from wds_async.tools.convert.tfrecord import MAX_RECORD_BYTES, Values

__all__ = [
    "MAX_SAMPLES",
    "OffsetFiles",
    "check_columns",
    "decoded",
    "ended",
    "items",
    "joined",
    "leaves",
    "offsets_of",
    "table",
]

MAX_SAMPLES = 1 << 24
_MOST_BYTES = (1 << 32) - 1
_IN_MEMORY = 64 << 20
_PIECE = 1 << 20


def table(source: ByteSource, what: str) -> array[int]:
    """Return the offsets that a file of the format ``what`` begins with. Raise what `offsets_of` raises; CorruptShard
    where they begin in themselves."""
    head = source.take(4)
    if len(head) < 4:
        raise source.error(TruncatedShard, f"the file ends in the number of its samples, after {len(head)} bytes", 0)
    (count,) = struct.unpack("<I", head)
    offsets = offsets_of(source, count, what, 0)
    if offsets[0] < source.offset:
        why = f"byte 4: the first sample would begin at byte {offsets[0]:,}, in the offsets, which end at"
        raise source.error(CorruptShard, f"{why} {source.offset:,}; {_doubt(what)}", 4)
    return offsets


def offsets_of(source: ByteSource, count: int, what: str, place: int) -> array[int]:
    """Return the offsets of ``count`` samples, a number that stands at byte ``place``.

    TruncatedShard where the file ends in them, FieldTooLarge for more than `MAX_SAMPLES`, before anything is read,
    CorruptShard where they decrease.
    """
    at, size = source.offset, 4 * (count + 1)
    if count > MAX_SAMPLES:
        why = f"byte {place:,}: {count:,} samples; the most are {MAX_SAMPLES:,}; {_doubt(what)}"
        raise source.error(FieldTooLarge, why, place)
    data = source.take(size)
    if len(data) < size:
        why = f"the file ends in the offsets of its {count:,} samples: {len(data):,} of {size:,} bytes; {_doubt(what)}"
        raise source.error(TruncatedShard, why, at)
    offsets = _little_endian(array("I", data))
    for number in range(count):
        if offsets[number + 1] < offsets[number]:
            wrong = at + 4 * (number + 1)
            why = f"byte {wrong:,}: sample {number:,} would end at byte {offsets[number + 1]:,}, before it begins at"
            raise source.error(CorruptShard, f"{why} {offsets[number]:,}: the offsets are damaged", wrong)
    return offsets


def _doubt(what: str) -> str:
    return f"is this file {what}, and not compressed?"


def _little_endian(numbers: array[int]) -> array[int]:
    """Return ``numbers`` with their bytes turned where this machine is big-endian."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def items(source: ByteSource, offsets: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each sample; ``source`` stands at the first.

    CorruptShard where the offsets begin elsewhere, TruncatedShard where the file ends in a sample, FieldTooLarge for
    one of more than 1 GiB, before it is read.
    """
    if offsets[0] != source.offset:
        why = f"the first sample would begin at byte {offsets[0]:,}, not {source.offset:,}: the offsets are damaged"
        raise source.error(CorruptShard, why, source.offset)
    for number in range(len(offsets) - 1):
        start, size = offsets[number], offsets[number + 1] - offsets[number]
        where = f"sample {number:,}, at byte {start:,}"
        if size > MAX_RECORD_BYTES:
            why = f"{where}: {size:,} bytes; the most are {MAX_RECORD_BYTES:,}"
            raise source.error(FieldTooLarge, why, start)
        data = source.take(size)
        if len(data) < size:
            raise source.error(TruncatedShard, f"{where}: the file ends in its {size:,} bytes", start)
        yield start, data


def ended(source: ByteSource) -> None:
    """Raise ShardFormatError where bytes follow the last sample."""
    at = source.offset
    if source.take(1):
        why = f"byte {at:,}: more bytes follow the last sample: their number or their offsets are damaged"
        raise source.error(ShardFormatError, why, at)


def check_columns(source: ByteSource, names: Sequence[str], wanted: Collection[str] | None) -> None:
    """Raise ShardFormatError where one of the columns ``wanted`` is not among ``names``; all want ``__key__``."""
    if wanted is not None and (missing := set(wanted) - {*names, KEY}):
        there = ", ".join(map(repr, names))
        raise source.error(ShardFormatError, f"no column {min(missing)!r}; there are {there}", source.offset)


def decoded(name: str, decode: Callable[[bytes], Values], data: bytes) -> Values:
    """Return the values of a column. ValueError, with its ``name``, for bytes that are none."""
    try:
        return decode(data)
    except (ValueError, IndexError, struct.error) as exn:
        raise ValueError(f"the column {name!r}, {len(data):,} bytes: {exn}") from exn


def leaves(data: bytes, sizes: Sequence[int | None]) -> list[bytes]:
    """Return the leaves of a sample. ``sizes``: those that are fixed, else None. ValueError where they do not make up
    the sample."""
    varying = sum(size is None for size in sizes)
    if len(data) < 4 * varying:
        raise ValueError(f"{len(data):,} bytes, which end in the sizes of its {varying:,} columns")
    claimed = iter(struct.unpack_from(f"<{varying}I", data))
    lengths = [next(claimed) if size is None else size for size in sizes]
    if (total := 4 * varying + sum(lengths)) != len(data):
        raise ValueError(f"{len(data):,} bytes, and by their sizes its columns take {total:,}: the sizes are damaged")
    at, made = 4 * varying, []
    for length in lengths:
        made.append(data[at : at + length])
        at += length
    return made


def joined(parts: Sequence[bytes], sizes: Sequence[int | None]) -> bytes:
    """Return ``parts`` as a sample. ``sizes``: see `leaves`."""
    varying = [len(part) for part, size in zip(parts, sizes, strict=True) if size is None]
    return b"".join((struct.pack(f"<{len(varying)}I", *varying), *parts))


class OffsetFiles:
    """The files that one task writes, one after another; see `Shards` for limits.

    ``name``: called with ``part=``, the number of a file. The samples of the open file are kept in a temporary file,
    since the offsets come before them. A context manager: an exception discards the open file.
    """

    def __init__(
        self,
        name: Callable[..., str],
        out: str,
        maxsize: float = float("inf"),
        maxcount: float = float("inf"),
        options: StorageOptions | None = None,
    ) -> None:
        self.outputs: list[Output] = []
        self.samples = 0
        self._head = b""
        self._name, self._out, self._options = name, out, options or StorageOptions()
        self._maxsize, self._maxcount = maxsize, maxcount
        self._body: IO[bytes] | None = None
        self._ends = array("I")

    def begin(self, head: bytes) -> None:
        """Take what stands between the offsets and the samples of each file."""
        self._head = head

    def write(self, data: bytes) -> None:
        """Write a sample. ConfigError where the file would have more than 4 GiB, or `MAX_SAMPLES` samples."""
        if self._ends and (len(self._ends) >= self._maxcount or self._ends[-1] >= self._maxsize):
            self._finish()
        if self._body is None:
            self._body = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - closed by _finish or __exit__
        end = (self._ends[-1] if self._ends else 0) + len(data)
        if len(self._head) + end + 4 * (len(self._ends) + 3) > _MOST_BYTES or len(self._ends) >= MAX_SAMPLES:
            name = redact(self._name(part=len(self.outputs)))
            raise ConfigError(f"{name}: more than 4 GiB, or {MAX_SAMPLES:,} samples, in one file: give it a --maxsize")
        self._body.write(data)
        self._ends.append(end)
        self.samples += 1

    def _finish(self) -> None:
        """Publish the open file."""
        body, self._body = self._body, None
        if body is None:
            return
        ends, self._ends = self._ends, array("I")
        start = 4 * (len(ends) + 2) + len(self._head)
        with body:
            sink = SummedSink(self._name(part=len(self.outputs)), self._options)
            try:
                sink.write(_little_endian(array("I", (len(ends), start, *(start + end for end in ends)))).tobytes())
                sink.write(self._head)
                body.seek(0)
                while piece := body.read(_PIECE):
                    sink.write(piece)
                self.outputs.append(sink.commit(self._out, len(ends)))
            except BaseException:
                sink.abort()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._finish()
        elif self._body is not None:
            self._body.close()
