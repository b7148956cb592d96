"""Arrow tables out of shards: a column for each field, with the payload copied once, from the tar to its column.

Members are appended to the buffer of their field's column as they are parsed, before it is known whether their sample
is whole. A sample consists of positions in these buffers; when it is complete, a row is made of the positions. Bytes of
a sample that was dropped (cut, or without a field that must be there) are taken out of the buffer again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_async import config, packages
from wds_async.errors import ConfigError, ShardFormatError
from wds_async.handlers import Handler, reraise_exception
from wds_async.observe.cost_limit import enforce
from wds_async.observe.ledger import Ledger
from wds_async.reading.options import field_limit, on_corrupt_policy, transfer_fields
from wds_async.reading.position import ReadState
from wds_async.reading.samples import ShardParsing, read_shards
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.group import RawSample, expected
from wds_async.tar.parse import Member, member_views
from wds_async.tar.source import ByteSource
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Board

__all__ = ["BlockOptions", "TableBuilder", "read_blocks", "schema_of"]

MAX_COLUMNS = 1024
NO_SAMPLE: Mapping[str, Any] = {}
_META = ("__key__", "__url__", "__offset__")
_ROW_BYTES = 8 + 2 * 4  # an offset in the tar, and those of two strings
_VALUE_BYTES = 4.125  # an offset, and a bit where a value may be missing
_FIRST_BYTES = 64 << 10
_MOST_BYTES = (1 << 31) - 1  # of a column: its offsets have 32 bits


@dataclass(frozen=True)
class BlockOptions:
    """Options of the rows of a table, and of reading the shards."""

    block_bytes: int
    """The most bytes of a table of more than one row."""
    fields: tuple[str, ...] | None = None
    """Columns besides the meta columns, in their order; None: those that there are."""
    handler: Handler = reraise_exception
    on_corrupt: str | None = None
    verify: str | None = None
    expect: tuple[str, ...] | None = None
    max_field_bytes: int = 1 << 30
    max_bad_fraction: float | None = None
    transfer: Mapping[str, Any] = field(default_factory=dict)
    storage: StorageOptions = NOTHING_GIVEN
    processes: int = 1
    """Processes of the host that read at the same time and share its memory."""

    def check(self) -> None:
        """Raise ConfigError for a value that is wrong."""
        if not 1 <= self.block_bytes <= 1 << 30:
            raise ConfigError(f"block_bytes={self.block_bytes}: from 1 byte to 1 GiB")
        if self.fields is not None and (bad := [name for name in self.fields if name != name.lower() or name in _META]):
            raise ConfigError(f"fields={list(self.fields)!r}: {bad[0]!r} is no field; fields are in lower case")
        if self.fields is not None and len(set(self.fields)) < len(self.fields):
            raise ConfigError(f"fields={list(self.fields)!r}: a field is named twice")
        on_corrupt_policy(self.on_corrupt)
        expected(self.expect, suffixes=self.fields)
        if field_limit(self.max_field_bytes) + self.block_bytes > _MOST_BYTES:
            raise ConfigError(
                f"max_field_bytes={self.max_field_bytes}: with block_bytes={self.block_bytes} at most"
                f" {_MOST_BYTES - self.block_bytes}, since a binary column of Arrow holds less than 2 GiB"
            )
        config.transfer_config(**transfer_fields(self.transfer, self.verify))


class Column:
    """The values of one field: ``memory`` holds those of the rows, and behind them, up to ``filled``, those of samples
    that are not rows yet. Positions count the bytes that the field ever had, so that they stay right when a table is
    cut off."""

    __slots__ = ("base", "capacity", "end", "ends", "filled", "is_shown", "last", "memory", "missing")

    def __init__(self, is_shown: bool = False) -> None:
        self.is_shown = is_shown
        """True if tables have it. A field that was seen in members of no sample only is none."""
        self.capacity = 0
        self.memory = memoryview(bytearray())
        self.filled = 0
        self.last = 0  # where the latest member begins
        self.base = 0  # position of its first byte
        self.end = 0  # index behind the values of the rows
        self.ends: list[int] = []
        self.missing: list[int] = []

    def grow(self, size: int) -> None:
        """Make place for ``size`` bytes, or twice what there was."""
        self._move(0, max(size, 2 * self.capacity, _FIRST_BYTES))

    def _move(self, start: int, capacity: int) -> None:
        """Go on in other memory, of ``capacity`` bytes or as many as need be, with what stands from ``start`` on."""
        kept = self.memory[start : self.filled]
        capacity = max(capacity, len(kept))
        self.memory, self.capacity, self.filled = np.empty(capacity, np.uint8).data, capacity, len(kept)
        self.memory[: self.filled] = kept

    def append(self, row: int, start: int, stop: int) -> None:
        """Make the bytes at positions ``start`` to ``stop`` the value of ``row``; rows before it may lack one."""
        if len(self.ends) < row:
            self.pad(row)
        at, end = start - self.base, self.end
        if at != end:  # the bytes of samples that were dropped lie between
            self.memory[end : end + self.filled - at] = self.memory[at : self.filled]
            self.base += at - end
            self.filled -= at - end
        self.end += stop - start
        self.ends.append(self.end)

    def pad(self, rows: int) -> None:
        """Fill up to ``rows`` values with missing ones."""
        self.missing += range(len(self.ends), rows)
        self.ends += [self.end] * (rows - len(self.ends))

    def cut(self, rows: int) -> Any:
        """Return the Arrow array of ``rows`` values. `begin` has to follow."""
        pa = _pyarrow()
        self.pad(rows)
        offsets = np.empty(rows + 1, np.int32)
        offsets[0], offsets[1:] = 0, self.ends
        bits = None
        if self.missing:
            present = np.ones(rows, np.uint8)
            present[self.missing] = 0
            bits = pa.py_buffer(np.packbits(present, bitorder="little"))
        data = pa.py_buffer(self.memory[: self.end])
        return pa.Array.from_buffers(pa.binary(), rows, [bits, pa.py_buffer(offsets), data], len(self.missing))

    def begin(self, start: int) -> None:
        """Begin a table with no rows. What stands at index ``start`` and behind it belongs to samples to come."""
        start = max(start, self.end)
        self._move(start, self.end + self.end // 16)  # the next table will be like this one
        self.base += start
        self.last = max(0, self.last - start)
        self.end, self.ends, self.missing = 0, [], []


class TableBuilder:
    """Builds tables of at most ``block_bytes`` of the samples that it is given, in order."""

    def __init__(self, block_bytes: int, fields: Iterable[str] | None = None) -> None:
        self.block_bytes = block_bytes
        self.columns: dict[str, Column] = {name: Column(is_shown=True) for name in fields or ()}
        self._open = fields is None
        self._keys: list[str] = []
        self._urls: list[str] = []
        self._offsets: list[int] = []
        self._bytes = self._empty_bytes()  # of the rows, without their fields
        self._latest: Column | None = None  # that of the latest member
        self._copied = 0  # bytes of fields since the last table, and before it of those that are no rows of it

    def positions(self, members: Iterable[tuple[str, Any, int]]) -> Iterator[tuple[str, Any, int]]:
        """Append the data of ``members`` to the columns of their fields, and yield them with positions in place of
        it."""
        columns, data = self.columns, None
        try:
            for name, data, offset in members:
                dot = name.find(".", name.rfind("/") + 1)
                column = columns.get(name[dot + 1 :])
                if column is None:
                    column = self._column(name[dot + 1 :], offset) if dot >= 0 else None
                if column is None:
                    yield name, (0, 0), offset
                    continue
                start = column.filled
                stop = start + len(data)
                if stop > column.capacity:
                    column.grow(stop)
                column.memory[start:stop] = data
                column.filled, column.last, self._latest = stop, start, column
                self._copied += stop - start
                yield name, (column.base + start, column.base + stop), offset
        finally:
            data = None  # a view of the engine's memory, which the frames of an error would keep

    def _column(self, extension: str, offset: int) -> Column | None:
        """Return the column of a field that is seen for the first time, or written in capitals; None if not wanted."""
        name = extension.lower()
        if name not in self.columns and self._open and not name.startswith("__"):
            if len(self.columns) >= MAX_COLUMNS:
                raise ShardFormatError(
                    f"the member at byte {offset} has the field {name[:80]!r}, and there are {MAX_COLUMNS} columns"
                    " already; name the fields that are wanted, as in fields=['jpg', 'json']"
                )
            self.columns[name] = Column()
            self._bytes += (len(self._keys) + 2) * _VALUE_BYTES
        return self.columns.get(name)

    def add(self, sample: RawSample) -> Any | None:
        """Add a sample of `positions` as a row. Return the table of the rows before it, if it does not fit with them,
        else None."""
        key, url, table, columns = sample["__key__"], sample.shard, None, self.columns
        letters = len(key) + len(url)
        text = letters if key.isascii() and url.isascii() else 4 * letters  # at most, in UTF-8
        size = text + _ROW_BYTES + len(columns) * _VALUE_BYTES
        if self._copied + self._bytes + size > self.block_bytes and self._is_full(sample, size):
            table = self.cut(sample)
        row = len(self._keys)
        for name, value in sample.items():
            if type(value) is tuple and (column := columns.get(name)) is not None:
                start, stop = value
                if start - column.base == column.end and len(column.ends) == row:
                    column.end += stop - start
                    column.ends.append(column.end)
                else:
                    column.append(row, start, stop)
        self._keys.append(key)
        self._urls.append(url)
        self._offsets.append(sample.offset)
        self._bytes += size
        return table

    def _is_full(self, sample: RawSample, size: float) -> bool:
        """Return whether ``sample``, with ``size`` bytes besides its fields, does not fit with the rows so far."""
        if not self._keys:
            return False
        fields = sum(value[1] - value[0] for value in sample.values() if type(value) is tuple)
        rows = sum(column.end for column in self.columns.values())
        return bool(rows + self._bytes + fields + size > self.block_bytes)

    def cut(self, following: Mapping[str, Any] = NO_SAMPLE) -> Any | None:
        """Return the table of the rows so far, and begin another; None where there are no rows. ``following`` is the
        sample that comes next. Besides it, only the latest member may be of a sample to come: it showed that
        ``following`` is complete."""
        if not self._keys:
            return None
        pa, rows = _pyarrow(), len(self._keys)
        meta = [
            _strings("key", self._keys, self._urls),
            _strings("URL", self._urls, self._urls),
            pa.array(self._offsets, pa.int64()),
        ]
        for column in self.columns.values():
            column.is_shown = column.is_shown or bool(column.ends)
        shown = {name: column for name, column in self.columns.items() if column.is_shown}
        columns = [*meta, *(column.cut(rows) for column in shown.values())]
        for name, column in self.columns.items():
            start = following[name][0] - column.base if name in following else column.filled
            column.begin(min(start, column.last) if column is self._latest else start)
        self._keys, self._urls, self._offsets, self._bytes = [], [], [], self._empty_bytes()
        self._copied = sum(column.filled for column in self.columns.values())
        return pa.Table.from_arrays(columns, schema=schema_of(shown))

    def _empty_bytes(self) -> float:
        """Return what the columns take without a row: an offset more than rows, and bits in whole bytes."""
        return (len(self.columns) + 2) * (_VALUE_BYTES + 1)


def schema_of(fields: Iterable[str]) -> Any:
    """Return the Arrow schema of a table with these fields."""
    pa = _pyarrow()
    meta = [("__key__", pa.string()), ("__url__", pa.string()), ("__offset__", pa.int64())]
    return pa.schema([*meta, *((name, pa.binary()) for name in fields)])


def _pyarrow() -> Any:
    return packages.optional("pyarrow", "reading shards as Arrow tables", "ray")


def _strings(kind: str, values: list[str], urls: list[str]) -> Any:
    """Return ``values`` as an Arrow array. ShardFormatError for one that is not UTF-8."""
    pa = _pyarrow()
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        bad = next(row for row, value in enumerate(values) if not value.isprintable() and _surrogates(value))
        shard = redact(urls[bad])
        why = f"the {kind} {redact(values[bad])!r} is not UTF-8, as text in Arrow must be; use other names"
        raise ShardFormatError(f"{shard}: {why}").at(shard, 0) from None


def _surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def read_blocks(shards: Collection[Mapping[str, Any]], options: BlockOptions) -> Iterator[Any]:
    """Yield Arrow tables of the samples of ``shards`` (dicts with a ``url``), in order, read ahead within the byte
    budget. The tables depend on the bytes of the shards only, so that a second run gives the same ones. Raise what
    `tarfile_samples` raises."""
    builder = TableBuilder(options.block_bytes, options.fields)
    ledger = Ledger(Board(), options.max_bad_fraction).begin()
    parsing = ShardParsing.of(
        ledger,
        options.handler,
        suffixes=options.fields,
        on_corrupt=options.on_corrupt,
        max_field_bytes=options.max_field_bytes,
        expect=options.expect,
    )
    views = functools.partial(member_views, max_field_bytes=options.max_field_bytes)
    parsing = dataclasses.replace(parsing, parse=_positions(builder, views), recorder=None)
    setting = config.transfer_config(options.processes, **transfer_fields(options.transfer, options.verify))
    state = ReadState()
    opening = functools.partial(
        open_shards, state.shards(shards), config=setting, stats=ledger.counters, options=options.storage
    )
    for sample in read_shards(opening, enforce, parsing, ledger, state):
        if (table := builder.add(sample)) is not None:  # type: ignore[arg-type]
            yield table
    if (table := builder.cut()) is not None:
        yield table


def _positions(
    builder: TableBuilder, views: Callable[[ByteSource], Iterable[tuple[str, Any, int]]]
) -> Callable[[ByteSource], Iterator[Member]]:
    return lambda source: builder.positions(views(source))
