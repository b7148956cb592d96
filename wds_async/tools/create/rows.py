"""Rows: samples that are to be written, and where each of their fields comes from."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import sqlite3
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from wds_async.errors import ConfigError, StorageError
from wds_async.redact import redact
from wds_async.tar.group import SKIP_META, base_plus_ext

__all__ = [
    "META",
    "FieldSource",
    "RowCounts",
    "RowStore",
    "SourceRow",
    "check_key",
    "data_of",
    "packed_key",
    "text_field",
]

META = re.compile(SKIP_META)
"""Names of members that describe a shard."""

_NUMBER = "SELECT line FROM rows WHERE number = ?"
_BATCH_BYTES = 256 << 10
_packed = json.JSONEncoder(separators=(",", ":")).encode
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class FieldSource:
    """The bytes of one field: ``kind`` is ``file`` (of this machine, or a mounted one), ``url``, ``text`` (``value`` is
    that), ``base64``, or ``error``: there are none, and ``value`` says why. ``size`` and ``version`` are what a listing
    tells of a file or an object."""

    field: str
    kind: str
    value: str
    size: int | None = None
    version: str = ""

    def __str__(self) -> str:
        if self.kind in ("file", "url"):
            return f"{self.field} <- {redact(self.value)}"
        shown = self.value if self.kind in ("text", "error") else f"{self.size:,} bytes"
        return f"{self.field} = {shown if len(shown) <= 40 else f'{shown[:40]}…'}"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One sample: its key, its fields, and the place in the source that it comes from, for messages."""

    key: str
    fields: tuple[FieldSource, ...]
    where: str

    @property
    def size(self) -> int:
        """Bytes of all fields; -1 where one is not known."""
        sizes = [one.size for one in self.fields]
        return -1 if None in sizes else sum(size or 0 for size in sizes)

    def line(self) -> bytes:
        """Return the row as a line of JSON."""
        fields = [(one.field, one.kind, one.value, one.size, one.version) for one in self.fields]
        return _packed((self.key, self.where, fields)).encode("ascii") + b"\n"

    @classmethod
    def of(cls, line: bytes) -> SourceRow:
        """Return the row that `line` gave."""
        key, where, fields = json.loads(line.decode("ascii"))
        return cls(key, tuple(FieldSource(*one) for one in fields), where)


def text_field(name: str, value: str | bytes) -> FieldSource:
    """Return a field with these bytes, or with this text in UTF-8. ValueError for text that has none."""
    if isinstance(value, bytes):
        return FieldSource(name, "base64", base64.b64encode(value).decode("ascii"), len(value))
    return FieldSource(name, "text", value, len(value.encode("utf-8", "surrogateescape")))


def data_of(source: FieldSource) -> bytes:
    """Return the bytes of a field that stands in its row."""
    if source.kind == "base64":
        return base64.b64decode(source.value)
    return source.value.encode("utf-8", "surrogateescape")


def packed_key(name: str) -> str:
    """Return ``name`` as a key that is read back whole: dots of its last component become ``_``."""
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.replace('.', '_')}"


def check_key(key: str, where: str) -> None:
    """Raise ConfigError for a key that tar would not unpack below the working directory, or no reader gives back."""
    parts = key.split("/")
    wrong = (
        "it begins with '/'" if key.startswith("/")
        else "'..' leads out of the folder" if ".." in parts
        else "it has an empty component, or '.'" if "" in parts or "." in parts
        else "a name with NUL" if "\0" in key
        else "a name that begins with a dot is hidden" if parts[-1].startswith(".")
        else "names like '__x__' in front describe the shard" if META.match(f"{key}.x")
        else "" if base_plus_ext(f"{key}.x") == (key, "x")
        else "its last component has a dot"
    )  # fmt: skip
    if wrong:
        raise ConfigError(f"{where}: the key {key!r} cannot be used: {wrong}. Rename it, or number the samples")


@dataclass
class RowCounts:
    """Counts of a source: samples with each field, bytes, fields of unknown size, and what was passed over."""

    fields: Counter[str] = field(default_factory=Counter)
    fetched: int = 0
    """Files and URLs."""
    bytes: int = 0
    unknown: int = 0
    """Fields whose size nothing tells."""
    buckets: dict[str, list[int]] = field(default_factory=dict)
    """Number and bytes of the objects of each bucket. Web servers are left out: there may be millions of them."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """By reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """One name for each reason."""

    def pass_over(self, reason: str, name: str) -> None:
        """Count a file that gives no field."""
        self.passed_over[reason] += 1
        self.examples.setdefault(reason, name)


class RowStore:
    """Rows in a temporary file: memory holds eight bytes for each. ``counts`` sums them up, ``first`` are three."""

    def __init__(self) -> None:
        self.counts = RowCounts()
        self.first: list[SourceRow] = []
        self.sizes = array("q")
        """Bytes of each row's fields, -1 where they are unknown."""
        self._new: list[tuple[int, bytes, bytes]] = []
        self._new_bytes = 0
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._db.close)  # Python 3.13 warns of a connection that is not closed
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, key BLOB, line BLOB)")
        self._db.execute("BEGIN")

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, rows: Iterable[SourceRow]) -> None:
        """Add ``rows``. ConfigError for a key or fields that no reader would give back as they are."""
        for row in rows:
            _check(row)
            self._count(row)
            line = row.line()
            self._new.append((len(self.sizes), row.key.encode("utf-8", "surrogateescape"), line))
            self._new_bytes += len(line)
            self.sizes.append(row.size)
            if self._new_bytes >= _BATCH_BYTES:
                self._flush()
        self._flush()

    def check_keys(self) -> None:
        """Raise ConfigError where two rows have one key."""
        twice = self._db.execute("SELECT min(number), max(number) FROM rows GROUP BY key HAVING count(*) > 1 LIMIT 1")
        for numbers in twice:
            one, other = (SourceRow.of(line) for line in self.lines(numbers))
            raise ConfigError(
                f"{one.where} and {other.where} give the same key {one.key!r}: a reader takes adjacent ones for one"
                " sample. Sort the source, give another key, or number the samples"
            )

    def lines(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """Yield the rows of these numbers as lines."""
        for number in numbers:
            (line,) = self._db.execute(_NUMBER, (number,)).fetchone()
            yield line

    def order(self, seed: int | None) -> array[int]:
        """Return the numbers of all rows: as they came, or permuted by ``seed``."""
        numbers = array("q", range(len(self)))
        if seed is not None:
            random.Random(seed).shuffle(numbers)
        return numbers

    def digest(self, numbers: Iterable[int]) -> str:
        """Return a hash of these rows in their order."""
        digest = hashlib.sha256()
        for line in self.lines(numbers):
            digest.update(line)
        return digest.hexdigest()

    def _flush(self) -> None:
        try:
            self._db.executemany("INSERT INTO rows VALUES (?, ?, ?)", self._new)
        except sqlite3.OperationalError as exn:
            raise StorageError(f"the temporary file of the rows, at row {len(self)}: {exn}. Set TMPDIR.") from exn
        self._new.clear()
        self._new_bytes = 0

    def _count(self, row: SourceRow) -> None:
        counts = self.counts
        for one in row.fields:
            counts.fields[one.field] += 1
            counts.fetched += one.kind in ("file", "url")
            counts.unknown += one.size is None
            counts.bytes += one.size or 0
            if one.kind == "url" and "://" in one.value and not one.value.startswith("http"):
                sums = counts.buckets.setdefault("/".join(one.value.split("/", 3)[:3]), [0, 0])
                sums[0] += 1
                sums[1] += one.size or 0
        if len(self.first) < _SHOWN:
            self.first.append(row)


def _check(row: SourceRow) -> None:
    check_key(row.key, row.where)
    names: dict[str, Any] = {}
    for one in row.fields:
        if not one.field or one.field != one.field.lower() or {"/", "\0"} & set(one.field) or one.field[0] == "_":
            raise ConfigError(
                f"{row.where}: {one.field!r} is no name of a field: lower case, without '/', and not with '_' in front"
            )
        if one.field in names:
            raise ConfigError(
                f"{row.where}: the sample {row.key!r} has the field {one.field!r} twice: {names[one.field]}, and {one}"
                " (names are read in lower case)"
            )
        names[one.field] = one
    if not names:
        raise ConfigError(f"{row.where}: the sample {row.key!r} has no field")
