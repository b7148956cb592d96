"""Files of TFRecord and the messages ``tf.train.Example`` in them, read and written without TensorFlow.

A record is the length of its data (8 bytes, little-endian), the masked CRC-32C of these 8 bytes, the data, and the
masked CRC-32C of that. An Example is a map from names to lists: of bytes, of floats (32 bits) or of integers (64).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from crc32c import crc32c

from wds_async.errors import CorruptShard, FieldTooLarge, ShardFormatError, TruncatedShard
from wds_async.tar.source import ByteSource

__all__ = ["MAX_RECORD_BYTES", "Values", "example_of", "framed", "message_of", "records", "samples"]

Values = tuple[str, list[Any]]
"""A feature: ``bytes``, ``float`` or ``int64`` ("" for one without any of these lists), and its values; or a suffix,
``.json``, which tells what the only value is."""
MAX_RECORD_BYTES = 1 << 30
_KINDS = {1: "bytes", 2: "float", 3: "int64"}
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEAD_BYTES = 12
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _masked(data: bytes) -> int:
    """Return the CRC-32C of ``data`` as records hold it: turned right by 15 bits, plus a constant."""
    crc: int = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Return ``data`` as a record."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, _CRC.pack(_masked(length)), data, _CRC.pack(_masked(data))))


def records(source: ByteSource, limit: int = MAX_RECORD_BYTES) -> Iterator[tuple[bytes, int]]:
    """Yield the data of each record, and the offset of its first byte in the stream.

    TruncatedShard where the stream ends inside a record, CorruptShard for a checksum that does not match, FieldTooLarge
    for a record of more than ``limit`` bytes, before its data is read.
    """
    number = 0
    while head := source.take(_HEAD_BYTES):
        start = source.offset - len(head)
        where = f"record {number:,}, at byte {start:,}"
        if len(head) < _HEAD_BYTES:
            raise source.error(TruncatedShard, f"{where}: the file ends in the record's length", start)
        if _masked(head[:8]) != _CRC.unpack_from(head, 8)[0]:
            why = "the checksum of its length does not match"
            why += "; is this file TFRecord, and not compressed?" if number == 0 else ", so the file is damaged here"
            raise source.error(CorruptShard, f"{where}: {why}", start)
        size = _LENGTH.unpack_from(head)[0]
        if size > limit:
            raise source.error(FieldTooLarge, f"{where}: {size:,} bytes; the most are {limit:,}", start)
        data, crc = source.take(size), source.take(4)
        if len(data) < size or len(crc) < 4:
            raise source.error(TruncatedShard, f"{where}: the file ends in its {size:,} bytes of data", start)
        if _masked(data) != _CRC.unpack(crc)[0]:
            raise source.error(CorruptShard, f"{where}: the checksum of its {size:,} bytes does not match", start)
        yield data, start + _HEAD_BYTES
        number += 1


def samples(source: ByteSource, wanted: Collection[str] | None) -> Iterator[tuple[int, dict[str, Values]]]:
    """Yield the offset of each record in the stream, and the features of its Example. Raise what `records` and
    `example_of` raise."""
    for data, start in records(source):
        yield start - _HEAD_BYTES, example_of(data, source, start)


class _Malformed(Exception):
    """Bytes that are no protobuf: what is wrong, and the position."""

    def __init__(self, why: str, position: int) -> None:
        super().__init__(why)
        self.position = position


def example_of(data: bytes, source: ByteSource, start: int) -> dict[str, Values]:
    """Return the features of the Example ``data``, in their order. ShardFormatError, with the byte, for what is none;
    ``start``: offset of ``data`` in the stream."""
    features: dict[str, Values] = {}
    try:
        for number, at, stop in _messages(data, 0, len(data), (1, 2)):
            if number == 2:
                raise _Malformed("a SequenceExample; Example is what can be read", at)
            for _, entry, entry_stop in _messages(data, at, stop, (1,)):
                name, values = _entry(data, entry, entry_stop)
                features[name] = values
    except _Malformed as exn:
        at = start + exn.position
        raise source.error(ShardFormatError, f"no Example in the record at byte {start - _HEAD_BYTES:,}: {exn} (at byte"
                           f" {at:,})", at) from None  # fmt: skip
    return features


def _entry(data: bytes, at: int, stop: int) -> tuple[str, Values]:
    """Return an entry of the map: name and values. What comes later counts, as in any message of protobuf."""
    name = ""
    values: Values = ("", [])
    for number, start, end in _messages(data, at, stop, (1, 2)):
        if number == 1:
            try:
                name = data[start:end].decode("utf-8")
            except UnicodeDecodeError:
                raise _Malformed("the name of a feature is not UTF-8", start) from None
            continue
        for kind, first, last in _messages(data, start, end, tuple(_KINDS)):
            found = _values(data, _KINDS[kind], first, last)
            values = (_KINDS[kind], [*values[1], *found] if values[0] == _KINDS[kind] else found)
    return name, values


def _values(data: bytes, kind: str, at: int, stop: int) -> list[Any]:
    values: list[Any] = []
    for number, wire, start, end in _fields(data, at, stop):
        if number != 1:
            continue
        if kind == "bytes" and wire == _BYTES:
            values.append(data[start:end])
        elif kind == "float" and wire in (_BYTES, _FIXED32):
            if (end - start) % 4:
                raise _Malformed(f"{end - start:,} bytes of floats, each of 4", start)
            values += struct.unpack(f"<{(end - start) // 4}f", data[start:end])
        elif kind == "int64" and wire in (_BYTES, _VARINT):
            following = start
            while following < end:
                value, following = _varint(data, following, end)
                values.append(value - (1 << 64) if value >> 63 else value)
        else:
            raise _Malformed(f"a value of wire type {wire} in a list of {kind}", start)
    return values


def _messages(data: bytes, at: int, stop: int, numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop of the fields with these numbers, which are strings, bytes or messages."""
    for number, wire, start, end in _fields(data, at, stop):
        if number in numbers:
            if wire != _BYTES:
                raise _Malformed(f"field {number} has wire type {wire}, not {_BYTES}", start)
            yield number, start, end


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and stop of the value of each field of the message."""
    while at < stop:
        tag, start = _varint(data, at, stop)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            end = _varint(data, start, stop)[1]
        elif wire == _BYTES:
            size, start = _varint(data, start, stop)
            end = start + size
        elif wire in (_FIXED32, _FIXED64):
            end = start + (4 if wire == _FIXED32 else 8)
        else:
            raise _Malformed(f"wire type {wire}", at)
        if end > stop or not number:
            raise _Malformed(f"field {number} of {end - start:,} bytes, of which {stop - start:,} are there", at)
        yield number, wire, start, end
        at = end


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the number at ``at``, and where it ends."""
    value = 0
    for position in range(at, min(stop, at + 10)):
        byte = data[position]
        value |= (byte & 0x7F) << 7 * (position - at)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + 1
    raise _Malformed("a number without an end", at)


def message_of(features: Mapping[str, Values]) -> bytes:
    """Return ``features`` as an Example, in their order: the same features give the same bytes."""
    entries = []
    for name, (kind, values) in features.items():
        number = next(number for number, known in _KINDS.items() if known == kind)
        feature = _field(number, _packed(kind, values))
        entries.append(_field(1, _field(1, name.encode("utf-8")) + _field(2, feature)))
    return _field(1, b"".join(entries))


def _packed(kind: str, values: Iterable[Any]) -> bytes:
    if kind == "bytes":
        return b"".join(_field(1, value) for value in values)
    if kind == "float":
        return _field(1, b"".join(struct.pack("<f", value) for value in values))
    return _field(1, b"".join(_number(value & 0xFFFFFFFFFFFFFFFF) for value in values))


def _field(number: int, data: bytes) -> bytes:
    return b"".join((_number(number << 3 | _BYTES), _number(len(data)), data))


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
