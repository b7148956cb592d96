"""Sparse members: files of which a tar holds only the pieces that are data, and a map of where they belong.

The formats are GNU tar's: the old one (type ``S``, with the map in the header and in blocks behind it) and those of PAX
records, 0.0, 0.1 and 1.0. Source: the GNU tar manual, "Storing Sparse Files".
"""

from __future__ import annotations

import io
from typing import NamedTuple

from wds_async.tar.blocks import BLOCK, number

__all__ = ["MAX_PIECES", "PREFIX", "Sparse", "SparseRecords", "old_sparse"]

MAX_PIECES = 1 << 20
"""Of one member: a longer map is not believed, since it would take more memory than the data."""
PREFIX = b"GNU.sparse."
_FIELDS = {b"name", b"size", b"realsize", b"map", b"major", b"minor"}
_STRUCT_BYTES = 24
_DIGITS = 20  # of the largest file


class Sparse(NamedTuple):
    """Layout of a sparse member: its true ``size`` in bytes, and its ``pieces`` as offsets and lengths; None: the map
    stands before the data (format 1.0).
    """

    size: int
    pieces: list[tuple[int, int]] | None

    def expand(self, data: bytes) -> bytes:
        """Return the whole file of which ``data`` is stored. Raise ValueError for a map that does not fit."""
        pieces, pos = (self.pieces, 0) if self.pieces is not None else _leading_map(data)
        whole, view, end = io.BytesIO(), memoryview(data), 0
        for offset, length in pieces:
            if offset < end or offset + length > self.size or pos + length > len(data):
                raise ValueError(
                    f"has a sparse map that does not fit: {length} bytes at {offset} of {self.size}, behind byte {end}"
                )
            whole.seek(offset)  # what is passed over is zeros
            whole.write(view[pos : pos + length])
            pos, end = pos + length, offset + length
        if end < self.size:
            whole.seek(self.size - 1)
            whole.write(b"\0")
        return whole.getvalue()


class SparseRecords:
    """The records of a PAX header about a sparse member."""

    def __init__(self) -> None:
        self._fields: dict[bytes, bytes] = {}
        self._map: list[bytes] = []  # of format 0.0, which has a record for each number
        self.any = False

    @property
    def name(self) -> bytes:
        """The member's name; its header has another one. Empty where there is none."""
        return self._fields.get(b"name", b"")

    def add(self, key: bytes, value: bytes) -> None:
        """Take the record ``key``, which begins with `PREFIX`. Raise ValueError for a map that is too long."""
        self.any = True
        field = key[len(PREFIX) :]
        if field in _FIELDS:
            self._fields[field] = value
        elif field in (b"offset", b"numbytes"):
            if len(self._map) >= 2 * MAX_PIECES:
                raise ValueError(f"a sparse map of more than {MAX_PIECES} pieces")
            self._map.append(value)

    def sparse(self) -> Sparse:
        """Return how the member is expanded. Raise ValueError where the records are not enough."""
        fields = self._fields
        size = fields.get(b"realsize", fields.get(b"size"))
        version = fields.get(b"major"), fields.get(b"minor")
        if size is None or not (b"map" in fields or self._map or version in ((b"1", b"0"), (None, None))):
            raise ValueError("is stored sparse in a format that is not known; pack the shard again without --sparse")
        if b"map" in fields:
            numbers = fields[b"map"].split(b",", 2 * MAX_PIECES) if fields[b"map"] else []
        elif version == (b"1", b"0"):
            return Sparse(_count(size), None)
        else:
            numbers = self._map
        return Sparse(_count(size), _paired([_count(digits) for digits in numbers]))


def old_sparse(header: bytes, more: bytes) -> Sparse:
    """Return how a member of type ``S`` is expanded; ``more`` are the maps of the blocks behind its header. Raise
    ValueError for a bad map."""
    if len(more) > MAX_PIECES * _STRUCT_BYTES:
        raise ValueError(f"has a sparse map of more than {MAX_PIECES} pieces")
    table = header[386:482] + more
    numbers = [number(table[at : at + 12]) for at in range(0, len(table), 12)]
    return Sparse(_positive(number(header[483:495])), _paired([_positive(value) for value in numbers]))


def _leading_map(data: bytes) -> tuple[list[tuple[int, int]], int]:
    """Return the map of format 1.0 (lines of numbers, filled up to whole blocks), and where the data begins."""
    count, pos = _line(data, 0)
    if count > MAX_PIECES:
        raise ValueError(f"has a sparse map of {count} pieces; more than {MAX_PIECES} are not believed")
    numbers = []
    for _ in range(2 * count):
        value, pos = _line(data, pos)
        numbers.append(value)
    return _paired(numbers), pos + -pos % BLOCK


def _line(data: bytes, pos: int) -> tuple[int, int]:
    end = data.find(b"\n", pos, pos + _DIGITS + 1)
    return _count(data[pos : max(end, pos)]), end + 1


def _paired(numbers: list[int]) -> list[tuple[int, int]]:
    """Return offsets and lengths, without the pieces of no bytes that fill up a table or mark the end."""
    if len(numbers) % 2:
        raise ValueError("has a sparse map of an odd number of numbers")
    return [pair for pair in zip(numbers[::2], numbers[1::2], strict=True) if pair[1]]


def _count(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _DIGITS:
        raise ValueError(f"has {digits[:40]!r} in its sparse map")
    return int(digits)


def _positive(value: int) -> int:
    if value < 0:
        raise ValueError(f"has {value} in its sparse map")
    return value
