"""Tables as sources of `create_shards`: CSV, TSV, JSON lines and Parquet, whose columns are fields."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async import packages
from wds_async.errors import ConfigError, StorageError, UnsafeContent
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import locate
from wds_async.tools.create.rows import FieldSource, RowCounts, SourceRow, packed_key, text_field
from wds_async.tools.create.sources import opened, source_of
from wds_async.urls import scheme

__all__ = ["FORMATS", "TableColumns", "TableSource", "format_of"]

FORMATS = ("csv", "tsv", "jsonl", "parquet")
_SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
"""Fields that are read back as an int."""
_CELL_BYTES = 128 << 20
_ALL = "*"
_BUFFER_BYTES = 1 << 20
_BATCH = 64
"""Rows of Parquet that are in memory at once: a column may hold images."""


def format_of(name: str) -> str | None:
    """Return the format of a table by the suffix of its name, also before ``.gz``; None for other names."""
    stem = name.partition("?")[0].lower().removesuffix(".gz")
    return _SUFFIXES.get(os.path.splitext(stem)[1])


@dataclass(frozen=True)
class TableColumns:
    """Columns that become fields. ``fields``: field by its column's value. ``files``, ``urls``: field by the column
    that names a path or a URL, whose bytes it gets. ``json``: field by the columns that its object holds; ``*`` is all
    that are not used otherwise. ``key``: the column of the key; None numbers the rows.

    Without any of these but ``key`` all columns are fields, named by the columns: ``cls``, or ``label.cls`` for
    ``cls``; ``file:jpg`` and ``url:jpg`` name files and URLs.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    urls: Mapping[str, str] = field(default_factory=dict)
    json: Mapping[str, Sequence[str]] = field(default_factory=dict)
    key: str | None = None

    @property
    def are_named(self) -> bool:
        """True if an argument says which columns are written."""
        return bool(self.fields or self.files or self.urls or self.json)

    def names(self) -> list[str]:
        """Return the columns that arguments name."""
        several = [name for names in self.json.values() for name in names if name != _ALL]
        single = [*self.fields.values(), *self.files.values(), *self.urls.values(), *several]
        return single if self.key is None else [*single, self.key]

    def needed(self, header: Sequence[str]) -> list[str] | None:
        """Return the columns of a table that are read; None for all, as where one is not there, for the message."""
        every = not self.are_named or any(_ALL in names for names in self.json.values())
        tops = {name if name in header else name.partition(".")[0] for name in self.names()}
        return None if every or tops - set(header) else [name for name in header if name in tops]

    def resolved(self, header: Sequence[str], where: str) -> TableColumns:
        """Return the columns for a table with these names. ConfigError for one that is not there."""
        chosen = self if self.are_named else self._by_names([name for name in header if name != self.key], where)
        flat = chosen.names()
        for name in flat:
            if name not in header and name.partition(".")[0] not in header:
                raise ConfigError(f"{where}: there is no column {name!r}; there are {', '.join(map(repr, header))}")
        rest = [name for name in header if name not in flat]
        jsons = {made: [one for name in names for one in (rest if name == _ALL else [name])]
                 for made, names in chosen.json.items()}  # fmt: skip
        return TableColumns(chosen.fields, chosen.files, chosen.urls, jsons, self.key)

    def _by_names(self, header: Sequence[str], where: str) -> TableColumns:
        kinds: dict[str, dict[str, str]] = {"": {}, "file": {}, "url": {}}
        for name in header:
            kind, colon, rest = name.partition(":")
            kind, made = (kind, rest) if colon and kind in kinds else ("", name.partition(".")[2] or name)
            if made in (taken := {one for names in kinds.values() for one in names}):
                raise ConfigError(f"{where}: two columns give the field {made!r}; name them by --field (of {taken})")
            kinds[kind][made] = name
        return TableColumns(kinds[""], kinds["file"], kinds["url"], {}, self.key)


@dataclass
class TableSource:
    """The rows of the tables ``urls``, one after another."""

    urls: Sequence[str]
    format: str
    columns: TableColumns = field(default_factory=TableColumns)
    skip_errors: bool = False
    """True if a cell that names no file or URL is an error of its row alone, when that is read."""
    options: StorageOptions = field(default_factory=StorageOptions)

    @property
    def unique(self) -> bool:
        return self.columns.key is None

    def describe(self) -> str:
        named = "standard input" if self.urls[0] == "-" else redact(self.urls[0])
        more = f" and {len(self.urls) - 1:,} more" if len(self.urls) > 1 else ""
        key = "the number of the row" if self.columns.key is None else f"column {self.columns.key!r}"
        return f"{named}{more} as {self.format}; the key is {key}"

    def rows(self, counts: RowCounts) -> Iterator[SourceRow]:
        """Yield the rows. ConfigError, with table and row, for what cannot be read or written as a field."""
        number, seen = 0, set[str]()
        for url in self.urls:
            shown = "standard input" if url == "-" else redact(url)
            place, names, resolved = _Place.of(url, self.options), list[str](), self.columns
            for here, values in self._values(url, shown):
                if list(values) != names:  # lines of JSON may differ; what a line lacks is empty in it
                    names = list(values)
                    header = names if self.format != "jsonl" else list(dict.fromkeys([*names, *self.columns.names()]))
                    resolved = self.columns.resolved(header, f"{shown}, {here}")
                    seen.update(names)
                yield self._row(values, resolved, number, f"{shown}, {here}", place)
                number += 1
        for name in self.columns.names() if number else ():
            if not {name, name.partition(".")[0]} & seen:
                raise ConfigError(
                    f"{self.describe()}: there is no column {name!r}; there are {', '.join(map(repr, sorted(seen)))}"
                )

    def _row(
        self, values: Mapping[str, Any], columns: TableColumns, number: int, where: str, place: _Place
    ) -> SourceRow:
        made: list[FieldSource] = []
        for name, column in columns.fields.items():
            if (value := _value(values, column)) is not None:
                made.append(_encoded(name, value, f"{where}, column {column!r}"))
        for kind, named in (("path", columns.files), ("URL", columns.urls)):
            for name, column in named.items():
                here = f"{where}, column {column!r}"
                try:
                    made.append(place.field(name, _value(values, column), kind, here))
                except ConfigError as exn:
                    if not self.skip_errors:
                        raise
                    made.append(FieldSource(name, "error", str(exn), 0))
        for name, several in columns.json.items():
            full = name if name.rpartition(".")[2] == "json" else f"{name}.json"
            made.append(_encoded(full, {one: _value(values, one) for one in several}, where))
        key = f"{number:09d}"
        if columns.key is not None:
            value = _value(values, columns.key)
            if value is None or value == "":
                raise ConfigError(f"{where}, column {columns.key!r}: the key is empty")
            key = packed_key(str(value))
        return SourceRow(key, tuple(sorted(made, key=lambda one: one.field)), where)

    def _values(self, url: str, shown: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each row of a table by its columns, and where it is."""
        with opened(url, self.options) as file:
            packed = url.partition("?")[0].lower().endswith(".gz")
            stream: Any = gzip.GzipFile(fileobj=file, mode="rb") if packed else file
            try:
                kinds = {"parquet": self._parquet, "jsonl": _json_lines}
                yield from kinds.get(self.format, self._separated)(stream)
            except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile, zlib.error) as exn:
                raise ConfigError(f"{shown}: no {self.format} that can be read: {exn}") from exn
            except _Unreadable as exn:
                raise ConfigError(f"{shown}, {exn}") from exn

    def _parquet(self, stream: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        pyarrow = packages.optional("pyarrow", "reading Parquet", "parquet")
        parquet = packages.optional("pyarrow.parquet", "reading Parquet", "parquet")
        number = 0
        with contextlib.ExitStack() as stack:
            if not (hasattr(stream, "seekable") and stream.seekable()):
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stream, copy)
                stream = copy
            try:
                file = parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES)
                columns = self.columns.needed(file.schema_arrow.names)
                for group in range(file.num_row_groups):  # of all at once, pyarrow holds several in memory
                    for batch in file.iter_batches(batch_size=_BATCH, row_groups=[group], columns=columns):
                        for values in batch.to_pylist():
                            number += 1
                            yield f"row {number}", values
            except StorageError:
                raise
            except (pyarrow.ArrowException, OSError) as exn:  # OSError where a page is damaged
                raise _Unreadable(f"behind row {number}: {exn}") from exn

    def _separated(self, stream: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        csv.field_size_limit(_CELL_BYTES)
        try:
            yield from self._cells(csv.reader(text, delimiter="\t" if self.format == "tsv" else ",", strict=True))
        finally:
            text.detach()  # standard input stays open

    @staticmethod
    def _cells(reader: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        header = next(reader, None)
        if header is None:
            raise _Unreadable("line 1: it is empty; the first line names the columns")
        if len(set(header)) != len(header):
            raise _Unreadable(f"line 1: a column has the name of another one: {header}")
        for number, cells in enumerate(reader, 1):
            if not cells:
                continue
            if len(cells) != len(header):
                raise _Unreadable(
                    f"row {number} (line {reader.line_num}): {len(cells)} cells, where the header has {len(header)}"
                )
            yield f"row {number}", dict(zip(header, cells, strict=True))


class _Unreadable(Exception):
    """Error: a row that is none; the message says where."""


def _json_lines(stream: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as exn:
            raise _Unreadable(f"line {number}: not valid JSON ({exn})") from exn
        if not isinstance(values, dict):
            raise _Unreadable(f"line {number}: {type(values).__name__}; each line is an object")
        yield f"line {number}", values


def _value(values: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a part of it: ``image.bytes`` of the column ``image``."""
    if column in values:
        return values[column]
    head, _, rest = column.partition(".")
    inner = values.get(head)
    return _value(inner, rest) if rest and isinstance(inner, Mapping) else None


def _encoded(name: str, value: Any, where: str) -> FieldSource:
    """Return the field of a value: bytes and text as they are, everything else as JSON."""
    if isinstance(value, bool) and name.rpartition(".")[2] in _NUMBERS:
        value = int(value)
    try:
        text = value if isinstance(value, str | bytes) else json.dumps(value, ensure_ascii=False, default=str)
        return text_field(name, text)
    except (ValueError, TypeError) as exn:
        raise ConfigError(f"{where}: {value!r:.80} cannot be written as {name!r}: {exn}") from exn


@dataclass(frozen=True)
class _Place:
    """The folder that paths in a table are relative to, and whether the table was fetched."""

    folder: str
    is_remote: bool
    options: StorageOptions

    @classmethod
    def of(cls, url: str, options: StorageOptions) -> _Place:
        """Return the place of a table; paths in one of standard input are relative to the working directory."""
        is_remote = url != "-" and locate(url, options=options).path is None
        return cls("" if url == "-" else url.partition("?")[0].rpartition("/")[0], is_remote, options)

    def field(self, name: str, value: Any, what: str, where: str) -> FieldSource:
        """Return the field with the bytes of ``value``, a path or a URL: ``what`` it is to be. ConfigError for what is
        none, UnsafeContent for a command, and for a file of this machine that a fetched table names."""
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{where}: {value!r} is no {what}")
        kind = scheme(value)
        if kind in ("pipe", "-"):
            raise UnsafeContent(f"{where}: a table may not run a command ({redact(value)})")
        if what == "URL" and kind in ("", "file"):
            raise ConfigError(f"{where}: {value!r} is no URL; columns of paths are named by --file, or file:{name}")
        if not kind and self.folder and not os.path.isabs(value):
            value = f"{self.folder}/{value}"
        made = source_of(value, name, where, self.options)
        if made.kind == "file" and self.is_remote:
            raise UnsafeContent(f"{where}: a table that was fetched may not read a file of this machine ({value!r})")
        return made
