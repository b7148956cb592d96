"""The index of the cache: its objects and the checksums of their chunks, in one SQLite file (WAL).

It may lag behind the files, or be wrong about them after a crash: a chunk of an earlier process is compared with its
checksum before it is served, and a row has a checksum of its own.
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
from typing import Any, NamedTuple

from crc32c import crc32c

from wds_async.redact import redact

__all__ = ["CHUNK_BYTES", "PAGE", "Chunks", "Index", "IndexBatch", "IndexRow", "Totals", "key_of"]

CHUNK_BYTES = 2 << 20  # as large as the engine's parts, so that a chunk is one request
PAGE = 512  # chunks whose checksums are one row of the index
_RECORD = struct.Struct("<HI")


@functools.lru_cache(maxsize=4096)
def key_of(url: str) -> str:
    """Return the key of ``url`` in the index, which is on disk: signatures and passwords are replaced by a digest. A
    URL with another signature is another object, so that no client uses the rights of another."""
    shown = redact(url)
    return url if shown == url else f"{shown} {hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


class Chunks:
    """The chunks of one object of ``size`` bytes (None: unknown).

    A chunk is present with its CRC-32C (``crcs``). It is ``trusted``, and may be served, once this process has written
    or verified it. It stays unless it is in the probation segment, from where it may be evicted at any time.
    """

    def __init__(self, size: int | None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.size = size
        self.chunk_bytes = chunk_bytes
        self.crcs: dict[int, int] = {}
        self.trusted: set[int] = set()
        self.on_probation: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self.crcs

    @property
    def count(self) -> int | None:
        return None if self.size is None else -(-self.size // self.chunk_bytes)

    @property
    def whole(self) -> bool:
        return len(self.crcs) == self.count

    @property
    def settled(self) -> bool:
        """True if all chunks are present, trusted, and stay."""
        return not self.on_probation and len(self.trusted) == self.count

    def add(self, number: int, crc: int, *, on_probation: bool = False) -> None:
        self.crcs[number] = crc
        self.trusted.add(number)
        if on_probation:
            self.on_probation.add(number)

    def drop(self, number: int) -> None:
        self.crcs.pop(number, None)
        self.trusted.discard(number)
        self.on_probation.discard(number)

    def numbers(self) -> list[int]:
        return sorted(self.crcs)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first byte of a chunk and the one behind its last."""
        start = number * self.chunk_bytes
        stop = start + self.chunk_bytes
        return start, stop if self.size is None else min(stop, self.size)

    def length(self, number: int) -> int:
        start, stop = self.bounds(number)
        return stop - start

    def over(self, start: int, stop: int) -> range:
        """Return the chunks that hold bytes ``[start, stop)``."""
        return range(start // self.chunk_bytes, -(-stop // self.chunk_bytes)) if stop > start else range(0)

    def ready(self, start: int, stop: int, *, on_probation: bool = False) -> int:
        """Return the end of the trusted bytes from ``start`` on that stay (with ``on_probation``: of those too that may
        be evicted)."""
        if self.size is not None:
            stop = min(stop, self.size)
            if self.settled:
                return max(start, stop)
        number, chunk = start // self.chunk_bytes, self.chunk_bytes
        while number * chunk < stop and number in self.trusted and (on_probation or number not in self.on_probation):
            number += 1
        return max(start, min(stop, number * chunk))

    def page(self, page: int) -> bytes:
        """Return the checksums of the page's chunks that stay, for the index."""
        first = page * PAGE
        return b"".join(
            _RECORD.pack(number - first, self.crcs[number])
            for number in range(first, first + PAGE)
            if number in self.crcs and number not in self.on_probation
        )

    def load(self, pages: Iterable[tuple[int, bytes]]) -> None:
        """Add the chunks of index pages, untrusted. Malformed records are skipped."""
        for page, packed in pages:
            whole = len(packed) - len(packed) % _RECORD.size
            for place, crc in _RECORD.iter_unpack(packed[:whole]):
                number = page * PAGE + place
                if self.count is None or number < self.count:
                    self.crcs[number] = crc


_VERSION = 1
_LOCKED_S = 2.0  # how long to wait for another program that keeps the file locked: unwritten changes are kept in memory
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


class IndexRow(NamedTuple):
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
        return crc32c(repr((self.id, self.key, self.identity, self.size, bool(self.ranged), self.facts)).encode())


_COLUMNS = ", ".join(IndexRow._fields)
_UPSERT = f"""
INSERT INTO entries ({_COLUMNS}, crc) VALUES ({", ".join("?" * 12)})
ON CONFLICT (id) DO UPDATE SET size = excluded.size, facts = excluded.facts, checked = excluded.checked,
    used = excluded.used, last = excluded.last, held = excluded.held, crc = excluded.crc"""


@dataclass(slots=True)
class IndexBatch:
    """Changes to be written at once. ``pages``: the checksums of an entry's page; ``gone``: entries without a file."""

    rows: dict[int, IndexRow] = field(default_factory=dict)
    pages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of an index: entries, bytes by tenant, the next entry's number, and the policy's learned state."""

    entries: int = 0
    by_tenant: Mapping[str, int] = field(default_factory=dict)
    next_id: int = 1
    state: Mapping[str, Any] = field(default_factory=dict)
    sweep_from: int = 1  # files with this number or a higher one may exist without an entry
    pins: tuple[str, ...] = ()  # keys, and prefixes of keys that end with "/", of what is never evicted


class Index:
    """The SQLite file at ``path``. All methods block; one thread at a time is let in. sqlite3.DatabaseError if it is no
    index, or of another version."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._lock = threading.Lock()
        if read_only:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        else:
            try:  # with mode 0600, which SQLite's other files take over
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            except OSError as exn:
                raise sqlite3.OperationalError(f"unable to open database file: {exn}") from exn
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_LOCKED_S)
        try:
            if not read_only:
                self._prepare()
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version != _VERSION:
                raise sqlite3.DatabaseError(f"version {version} of an index, not {_VERSION}")
            self._db.execute("SELECT 1 FROM entries LIMIT 1").fetchall()
        except BaseException:
            self._db.close()
            raise

    def totals(self) -> Totals:
        with self._lock:
            rows = self._db.execute("SELECT tenant, entries, bytes FROM totals WHERE entries > 0").fetchall()
            meta = dict(self._db.execute("SELECT name, value FROM meta"))
        try:
            state = json.loads(meta.get("state", "{}"))
        except ValueError:
            state = {}
        next_id, sweep_from = (int(meta.get(name, 1)) for name in ("next_id", "sweep_from"))
        by_tenant = {tenant: held for tenant, _, held in rows}
        return Totals(sum(row[1] for row in rows), by_tenant, next_id, state, sweep_from, tuple(self.pins()))

    def pins(self) -> list[str]:
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            return [name for (name,) in self._db.execute("SELECT name FROM pins ORDER BY name")]
        return []

    def pin(self, names: Iterable[str], *, pinned: bool) -> list[str]:
        """Add or remove pins, and return all of them."""
        change = "INSERT OR IGNORE INTO pins VALUES (?)" if pinned else "DELETE FROM pins WHERE name = ?"
        with self._transaction():
            self._db.executemany(change, [(name,) for name in names])
        return self.pins()

    def load(self, key: str) -> tuple[IndexRow, list[tuple[int, bytes]] | None] | None:
        """Return the object with this key and its pages of checksums (None: its row is damaged); None without one."""
        with self._lock:
            values = self._db.execute(f"SELECT {_COLUMNS}, crc FROM entries WHERE key = ?", (key,)).fetchone()
            if values is None:
                return None
            pages = self._db.execute("SELECT page, crcs FROM chunks WHERE entry = ?", (values[0],)).fetchall()
        row = IndexRow(*values[:-1])
        return row, (pages if row.crc == values[-1] else None)

    def oldest(self, after: tuple[int, int], count: int) -> list[IndexRow]:
        """Return the next entries by their last use, behind ``(last, id)``."""
        return self._rows("WHERE (last, id) > (?, ?) ORDER BY last, id LIMIT ?", *after, count)

    def following(self, prefix: str, last: str, count: int) -> list[IndexRow]:
        """Return the next ``count`` objects whose key begins with ``prefix``, by key, behind the key ``last``."""
        rows = self._rows("WHERE key >= ? AND key > ? ORDER BY key LIMIT ?", prefix, last, count)
        return [row for row in rows if row.key.startswith(prefix)]

    def rows(self, prefix: str = "") -> Iterator[IndexRow]:
        """Yield the objects whose key begins with ``prefix``, by key. This object must not write meanwhile."""
        last = ""
        while rows := self.following(prefix, last, 1000):
            yield from rows
            last = rows[-1].key

    def numbers(self, first: int) -> set[int]:
        with self._lock:
            return {number for (number,) in self._db.execute("SELECT id FROM entries WHERE id >= ?", (first,))}

    def empty(self) -> set[int]:
        with self._lock:
            return {number for (number,) in self._db.execute("SELECT id FROM entries WHERE held = 0")}

    def write(self, batch: IndexBatch, next_id: int, state: Mapping[str, Any], sweep_from: int | None = None) -> None:
        """Write a batch in one transaction. ``sweep_from``: see `Totals`; ``next_id`` by default."""
        sweep_from = next_id if sweep_from is None else sweep_from
        meta = {"next_id": str(next_id), "state": json.dumps(state), "sweep_from": str(sweep_from)}
        rows = [row for number, row in batch.rows.items() if number not in batch.gone]
        pages = [(entry, page, crcs) for (entry, page), crcs in batch.pages.items() if entry not in batch.gone]
        with self._transaction():
            self._db.executemany("DELETE FROM entries WHERE id = ?", [(number,) for number in batch.gone])
            # Older entries with the same keys: REPLACE would not fire the triggers.
            self._db.executemany("DELETE FROM entries WHERE key = ? AND id != ?", [(row.key, row.id) for row in rows])
            self._db.executemany(_UPSERT, [(*row, row.crc) for row in rows])
            self._db.executemany("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", pages)
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _rows(self, where: str, *values: Any) -> list[IndexRow]:
        with self._lock:
            return [IndexRow(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM entries {where}", values)]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
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
