"""Samples as rows of Parquet: a column of bytes for each field, and the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wds_async import packages
from wds_async.errors import ShardFormatError
from wds_async.tools.convert.tfrecord import Values

__all__ = ["write"]

_KEY = "__key__"
_MOST_ROWS = 100_000


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


def write(rows: Iterable[Mapping[str, Values]], sink: Any, columns: Sequence[str], group_bytes: int) -> int:
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
                self._columns = sorted({name for row in rows for name in row} - {_KEY})
            schema = pa.schema([(_KEY, pa.string()), *((name, pa.binary()) for name in self._columns)])
            module = packages.optional("pyarrow.parquet", "Parquet", "parquet")
            self._writer = module.ParquetWriter(
                self._stream, schema, use_dictionary=False, write_statistics=[_KEY], compression="snappy"
            )
        if self._all:
            self._check(rows)
        keys = pa.array([row[_KEY][1][0].decode("utf-8") for row in rows], pa.string())
        values = [
            pa.array([row[name][1][0] if name in row else None for row in rows], pa.binary()) for name in self._columns
        ]
        table = pa.Table.from_arrays([keys, *values], schema=self._writer.schema)
        self._writer.write_table(table, row_group_size=max(1, len(rows)))

    def _check(self, rows: Sequence[Mapping[str, Values]]) -> None:
        known = {_KEY, *self._columns}
        for row in rows:
            if new := row.keys() - known:
                raise ShardFormatError(
                    f"the sample {row[_KEY][1][0].decode()!r} has the field {min(new)!r}, and the columns were written"
                    f" already: {', '.join(self._columns)}; name those that are wanted (--field)"
                )

    def close(self) -> None:
        """Write the end of the file."""
        if self._writer is not None:
            self._writer.close()
