"""The index of the cache: its objects and the checksums of their chunks, in one SQLite file (WAL).

It may lag some writes behind the files, or be wrong about them after a crash: a chunk is compared with its checksum
before it is served, and a row has a checksum of its own. All methods of `Index` block; one thread at a time is let in.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crc32c import crc32c

from wds_async.redact import redact

__all__ = ["CHUNK_BYTES", "PAGE", "Chunks", "Index", "IndexBatch", "IndexRow", "Totals", "key_of"]


CHUNK_BYTES = 2 << 20
"""As large as the engine's parts, so that a chunk is one request."""
PAGE = 512
"""Chunks whose checksums are one row of the index."""
_RECORD = struct.Struct("<HI")


class Chunks:
    """The chunks of one object of ``size`` bytes (None: unknown).

    A chunk is present with its CRC-32C. It is trusted once this process has written or verified it. It stays unless it
    is on probation, from where it may be evicted at any time.
    """

    def __init__(self, size: int | None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.size = size
        self.chunk_bytes = chunk_bytes
        self.on_probation: set[int] = set()
        """Those of the probation segment."""
        self._crcs: dict[int, int] = {}
        self._trusted: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self._crcs

    @property
    def count(self) -> int | None:
        """How many chunks the object has."""
        return None if self.size is None else -(-self.size // self.chunk_bytes)

    @property
    def whole(self) -> bool:
        """Whether all of them are there."""
        return len(self._crcs) == self.count

    @property
    def settled(self) -> bool:
        """Whether all of them are there, trusted, and stay."""
        return not self.on_probation and len(self._trusted) == self.count

    def trusted(self, number: int) -> bool:
        """Return whether the chunk may be served as it is."""
        return number in self._trusted

    def crc(self, number: int) -> int:
        """Return the CRC-32C of a chunk that is there."""
        return self._crcs[number]

    def add(self, number: int, crc: int, *, on_probation: bool = False) -> None:
        """Add a chunk that this process has written."""
        self._crcs[number] = crc
        self._trusted.add(number)
        if on_probation:
            self.on_probation.add(number)

    def trust(self, number: int) -> None:
        """Mark a chunk as verified."""
        self._trusted.add(number)

    def distrust(self, number: int | None = None) -> None:
        """Require a chunk (None: every one) to be verified again before it is served."""
        if number is None:
            self._trusted.clear()
        else:
            self._trusted.discard(number)

    def drop(self, number: int) -> None:
        """Remove a chunk."""
        self._crcs.pop(number, None)
        self._trusted.discard(number)
        self.on_probation.discard(number)

    def numbers(self) -> list[int]:
        """Return the present chunks."""
        return sorted(self._crcs)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first byte of a chunk and the one behind its last."""
        start = number * self.chunk_bytes
        stop = start + self.chunk_bytes
        return start, stop if self.size is None else min(stop, self.size)

    def length(self, number: int) -> int:
        """Return the bytes of a chunk."""
        start, stop = self.bounds(number)
        return stop - start

    def over(self, start: int, stop: int) -> range:
        """Return the chunks that hold bytes ``[start, stop)``."""
        return range(start // self.chunk_bytes, -(-stop // self.chunk_bytes)) if stop > start else range(0)

    def ready(self, start: int, stop: int, *, on_probation: bool = False) -> int:
        """Return the end of what is there from ``start`` on, trusted and staying (with ``on_probation``: or on
        probation)."""
        if self.size is not None:
            stop = min(stop, self.size)
            if self.settled:
                return max(start, stop)
        number, chunk = start // self.chunk_bytes, self.chunk_bytes
        while number * chunk < stop and number in self._trusted and (on_probation or number not in self.on_probation):
            number += 1
        return max(start, min(stop, number * chunk))

    # -- rows of the index

    def page(self, page: int) -> bytes:
        """Return the checksums of the page's chunks that stay, for the index."""
        first = page * PAGE
        return b"".join(
            _RECORD.pack(number - first, self._crcs[number])
            for number in range(first, first + PAGE)
            if number in self._crcs and number not in self.on_probation
        )

    def load(self, pages: Iterable[tuple[int, bytes]]) -> None:
        """Add the chunks of index pages, untrusted. Malformed records are skipped."""
        for page, packed in pages:
            for number, crc in _unpack(page, packed):
                if self.count is None or number < self.count:
                    self._crcs[number] = crc


def _unpack(page: int, packed: bytes) -> Iterator[tuple[int, int]]:
    whole = len(packed) - len(packed) % _RECORD.size
    for place, crc in _RECORD.iter_unpack(packed[:whole]):
        yield page * PAGE + place, crc


@functools.lru_cache(maxsize=4096)
def key_of(url: str) -> str:
    """Return the name of ``url`` in the index, which lies on a disk: signatures and passwords are replaced by a digest.
    A URL with another signature is another object, so that no client uses the rights of another."""
    shown = redact(url)
    return url if shown == url else f"{shown} {hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


_VERSION = 1
_LOCKED_S = 2.0
"""How long another program may keep it locked: what could not be written is noted, and the service's end waits."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, identity TEXT NOT NULL, size INTEGER,
    ranged INTEGER NOT NULL, facts TEXT NOT NULL, checked REAL NOT NULL, used REAL NOT NULL, last INTEGER NOT NULL,
    held INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_last ON entries (last, id);
CREATE INDEX IF NOT EXISTS empty ON entries (id) WHERE held = 0;
CREATE TABLE IF NOT EXISTS chunks (
    entry INTEGER NOT NULL, page INTEGER NOT NULL, crcs BLOB NOT NULL, PRIMARY KEY (entry, page)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (
    tenant TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN
    INSERT INTO totals VALUES (NEW.tenant, 1, NEW.held)
    ON CONFLICT (tenant) DO UPDATE SET entries = entries + 1, bytes = bytes + excluded.bytes; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF held ON entries BEGIN
    UPDATE totals SET bytes = bytes + NEW.held - OLD.held WHERE tenant = NEW.tenant; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - OLD.held WHERE tenant = OLD.tenant;
    DELETE FROM chunks WHERE entry = OLD.id; END;
"""
_PINS = "CREATE TABLE IF NOT EXISTS pins (name TEXT PRIMARY KEY) WITHOUT ROWID"
"""Younger than the schema's version: an index without this table has no pins."""
_COLUMNS = "id, key, tenant, identity, size, ranged, facts, checked, used, last, held"
_UPSERT = f"""
INSERT INTO entries ({_COLUMNS}, crc) VALUES ({", ".join("?" * 12)})
ON CONFLICT (id) DO UPDATE SET size = excluded.size, facts = excluded.facts, checked = excluded.checked,
    used = excluded.used, last = excluded.last, held = excluded.held, crc = excluded.crc"""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One object. ``facts``: the origin's answer about it as JSON. ``checked``, ``used``: seconds since 1970; ``last``:
    the policy's time of the last use. ``held``: bytes of its chunks."""

    id: int
    key: str
    tenant: str
    identity: str
    size: int | None
    ranged: bool
    facts: str
    checked: float
    used: float
    last: int
    held: int

    @property
    def crc(self) -> int:
        """Of what must not be wrong unnoticed."""
        return crc32c(repr((self.id, self.key, self.identity, self.size, self.ranged, self.facts)).encode())

    @property
    def values(self) -> tuple[Any, ...]:
        return (
            self.id, self.key, self.tenant, self.identity, self.size, int(self.ranged), self.facts, self.checked,
            self.used, self.last, self.held,
        )  # fmt: skip


@dataclass(slots=True)
class IndexBatch:
    """Changes to be written at once. ``pages``: the checksums of an entry's page; ``gone``: entries without a file."""

    rows: dict[int, IndexRow] = field(default_factory=dict)
    pages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Totals:
    """What is there: entries, and bytes by tenant; the next entry's number; what the policy had learned."""

    entries: int
    by_tenant: Mapping[str, int]
    next_id: int
    state: Mapping[str, Any]
    sweep_from: int = 1
    """Files with this number or a higher one may be there though no entry tells of them."""
    pins: tuple[str, ...] = ()
    """Keys, and prefixes of keys that end with "/", of what is never evicted."""


class Index:
    """The SQLite file at ``path``. sqlite3.DatabaseError where it is none, or of another version."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._lock = threading.Lock()
        if read_only:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        else:
            _make(path)
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_LOCKED_S)
        try:
            if read_only:
                self._check()
            else:
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def totals(self) -> Totals:
        """Return the totals, in constant time."""
        with self._lock:
            rows = self._db.execute("SELECT tenant, entries, bytes FROM totals WHERE entries > 0").fetchall()
            meta = dict(self._db.execute("SELECT name, value FROM meta"))
        entries = sum(row[1] for row in rows)
        try:
            state = json.loads(meta.get("state", "{}"))
        except ValueError:
            state = {}
        return Totals(
            entries,
            {row[0]: row[2] for row in rows},
            int(meta.get("next_id", 1)),
            state,
            int(meta.get("sweep_from", 1)),
            tuple(self.pins()),
        )

    def pins(self) -> list[str]:
        """Return what is pinned (see `Totals.pins`)."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            return [name for (name,) in self._db.execute("SELECT name FROM pins ORDER BY name")]
        return []

    def pin(self, names: Iterable[str], *, pinned: bool) -> list[str]:
        """Add or remove pins, and return all of them."""
        change = "INSERT OR IGNORE INTO pins VALUES (?)" if pinned else "DELETE FROM pins WHERE name = ?"
        with self._lock, self._transaction():
            self._db.executemany(change, [(name,) for name in names])
        return self.pins()

    def load(self, key: str) -> tuple[IndexRow, list[tuple[int, bytes]] | None] | None:
        """Return the object with this key and its pages of checksums (None: its row is damaged); None if there is
        none."""
        with self._lock:
            values = self._db.execute(f"SELECT {_COLUMNS}, crc FROM entries WHERE key = ?", (key,)).fetchone()
            if values is None:
                return None
            pages = self._db.execute("SELECT page, crcs FROM chunks WHERE entry = ?", (values[0],)).fetchall()
        row = _row(values)
        return row, (pages if row.crc == values[-1] else None)

    def oldest(self, after: tuple[int, int], count: int) -> list[IndexRow]:
        """Return the next entries by their last use, behind ``(last, id)``."""
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE (last, id) > (?, ?) ORDER BY last, id LIMIT ?", (*after, count)
            )
            return [_row(values) for values in rows]

    def numbers(self, first: int) -> set[int]:
        """Return the numbers of entries from ``first`` on."""
        with self._lock:
            return {number for (number,) in self._db.execute("SELECT id FROM entries WHERE id >= ?", (first,))}

    def empty(self) -> list[int]:
        """Return the entries without chunks that stay."""
        with self._lock:
            return [number for (number,) in self._db.execute("SELECT id FROM entries WHERE held = 0")]

    def rows(self, prefix: str = "") -> Iterator[IndexRow]:
        """Yield the objects whose key begins with ``prefix``, by key. This object must not write meanwhile."""
        last = ""
        while rows := self.following(prefix, last, 1000):
            yield from rows
            last = rows[-1].key

    def following(self, prefix: str, last: str, count: int) -> list[IndexRow]:
        """Return the next ``count`` objects whose key begins with ``prefix``, by key, behind the key ``last``."""
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE key >= ? AND key > ? ORDER BY key LIMIT ?", (prefix, last, count)
            ).fetchall()
        return [row for row in map(_row, rows) if row.key.startswith(prefix)]

    def write(self, batch: IndexBatch, next_id: int, state: Mapping[str, Any], sweep_from: int | None = None) -> None:
        """Write a batch in one transaction. ``sweep_from``: see `Totals`; ``next_id`` by default."""
        meta = (
            ("next_id", str(next_id)),
            ("state", json.dumps(state)),
            ("sweep_from", str(next_id if sweep_from is None else sweep_from)),
        )
        with self._lock, self._transaction():
            self._db.executemany("DELETE FROM entries WHERE id = ?", [(number,) for number in batch.gone])
            rows = [row for number, row in batch.rows.items() if number not in batch.gone]
            self._displace(rows)
            self._db.executemany(_UPSERT, [(*row.values, row.crc) for row in rows])
            pages = [(entry, page, crcs) for (entry, page), crcs in batch.pages.items() if entry not in batch.gone]
            self._db.executemany("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", pages)
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta)

    def close(self) -> None:
        """Close the database; idempotent."""
        with self._lock:
            self._db.close()

    def _displace(self, rows: Iterable[IndexRow]) -> None:
        """Delete older entries with the keys of ``rows``: REPLACE would not fire the triggers."""
        self._db.executemany("DELETE FROM entries WHERE key = ? AND id != ?", [(row.key, row.id) for row in rows])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        if self._db.execute("PRAGMA user_version").fetchone()[0] == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        self._db.execute(_PINS)
        self._check()

    def _check(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != _VERSION:
            raise sqlite3.DatabaseError(f"version {version} of an index, not {_VERSION}")
        self._db.execute("SELECT 1 FROM entries LIMIT 1").fetchall()


def _make(path: Path) -> None:
    """Create the database file with mode 0600; SQLite's other files take over its mode."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as exn:
        raise sqlite3.OperationalError(f"unable to open database file: {exn}") from exn


def _row(values: tuple[Any, ...]) -> IndexRow:
    number, key, tenant, identity, size, ranged, *rest = values[:11]
    return IndexRow(number, key, tenant, identity, size, bool(ranged), *rest)
