"""The index: which objects are in the cache, and which of their chunks with which checksum. One SQLite file (WAL).

It may be some writes behind the files, or say things of them that are not so any more after a crash: a chunk's checksum
is compared before it is served. What it says of an object has a checksum of its own. All methods block; one thread
at a time is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crc32c import crc32c

from wds_async.service.cache.chunks import PAGE
from wds_async.service.cache.entries import Entry
from wds_async.service.cache.policy import Policy
from wds_async.storage.base import Call

__all__ = ["Batch", "Index", "Journal", "Row", "Totals"]

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
class Row:
    """One object. ``facts``: JSON of what its origin said of it. ``checked``, ``used``: seconds since 1970; ``last``:
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
class Batch:
    """Changes to be written at once. ``pages``: the checksums of an entry's page; ``gone``: entries without a file."""

    rows: dict[int, Row] = field(default_factory=dict)
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
        """In a time that does not depend on how many entries there are."""
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
        """What is pinned (see `Totals.pins`)."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            return [name for (name,) in self._db.execute("SELECT name FROM pins ORDER BY name")]
        return []

    def pin(self, names: Iterable[str], *, pinned: bool) -> list[str]:
        """Pin ``names``, or no longer; what is pinned then."""
        change = "INSERT OR IGNORE INTO pins VALUES (?)" if pinned else "DELETE FROM pins WHERE name = ?"
        with self._lock, self._transaction():
            self._db.executemany(change, [(name,) for name in names])
        return self.pins()

    def load(self, key: str) -> tuple[Row, list[tuple[int, bytes]] | None] | None:
        """The object with this key and its pages of checksums (None: its row is damaged); None where there is none."""
        with self._lock:
            found = self._db.execute(f"SELECT {_COLUMNS}, crc FROM entries WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            pages = self._db.execute("SELECT page, crcs FROM chunks WHERE entry = ?", (found[0],)).fetchall()
        row = _row(found)
        return row, (pages if row.crc == found[-1] else None)

    def oldest(self, after: tuple[int, int], count: int) -> list[Row]:
        """The next entries by their last use, behind ``(last, id)``."""
        with self._lock:
            found = self._db.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE (last, id) > (?, ?) ORDER BY last, id LIMIT ?", (*after, count)
            )
            return [_row(values) for values in found]

    def numbers(self, first: int) -> set[int]:
        """The numbers of entries from ``first`` on."""
        with self._lock:
            return {number for (number,) in self._db.execute("SELECT id FROM entries WHERE id >= ?", (first,))}

    def empty(self) -> list[int]:
        """Entries of which nothing is kept: files of these hold what was in transit."""
        with self._lock:
            return [number for (number,) in self._db.execute("SELECT id FROM entries WHERE held = 0")]

    def rows(self, prefix: str = "") -> Iterator[Row]:
        """The objects whose key begins so, by key. A long answer: nothing may be written meanwhile by this object."""
        last = ""
        while rows := self.following(prefix, last, 1000):
            yield from rows
            last = rows[-1].key

    def following(self, prefix: str, last: str, count: int) -> list[Row]:
        """The next ``count`` objects whose key begins with ``prefix``, by key, behind the key ``last``."""
        with self._lock:
            found = self._db.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE key >= ? AND key > ? ORDER BY key LIMIT ?", (prefix, last, count)
            ).fetchall()
        return [row for row in map(_row, found) if row.key.startswith(prefix)]

    def write(self, batch: Batch, next_id: int, state: Mapping[str, Any], sweep_from: int | None = None) -> None:
        """All of it, or nothing. ``sweep_from``: see `Totals`; ``next_id`` where it is not given."""
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
        """Idempotent."""
        with self._lock:
            self._db.close()

    def _displace(self, rows: Iterable[Row]) -> None:
        """A key has one entry: an older one that still has it goes, with its triggers, which REPLACE would not fire."""
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
    """What is read by whom is nobody else's business; SQLite's other files get the rights of this one."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as exn:
        raise sqlite3.OperationalError(f"unable to open database file: {exn}") from exn


def _row(values: tuple[Any, ...]) -> Row:
    number, key, tenant, identity, size, ranged, *rest = values[:11]
    return Row(number, key, tenant, identity, size, bool(ranged), *rest)


logger = logging.getLogger("wds_async")


class Journal:
    """Writes to ``index`` what was noted since the last `flush`. None: there is no index, and nothing is written.
    ``broken`` is called where it cannot be written for what is in it."""

    def __init__(
        self,
        index: Index | None,
        call: Call,
        policy: Policy,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        next_id: int,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self._broken = broken
        self._call = call
        self._policy = policy
        self._clock = clock
        self._wall = wall
        self._next_id = next_id
        self._dirty: dict[int, Entry] = {}
        self._pages: dict[tuple[int, int], Entry] = {}
        self._made: set[int] = set()
        """Whose files there may be, though the index has no row of them."""
        self._keys: set[str] = set()
        self._keys_on_their_way: set[str] = set()
        self._going: set[int] = set()
        self._gone: set[int] = set()
        self._writing = asyncio.Lock()
        self._said = False

    def new_id(self) -> int:
        """A number that no entry has had."""
        number, self._next_id = self._next_id, self._next_id + 1
        self._made.add(number)
        return number

    def unmade(self, number: int) -> None:
        """There is no file of this number, and there will be none."""
        self._made.discard(number)

    @property
    def behind(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._dirty or self._gone)

    def pending(self, key: str) -> bool:
        """Whether the index may not know yet what there is of an object."""
        return key in self._keys or key in self._keys_on_their_way

    def used(self, entry: Entry) -> None:
        """It was used, or asked for at its origin."""
        if entry.file is not None and not entry.gone:
            self._dirty[entry.id] = entry
            self._keys.add(entry.key)

    def changed(self, entry: Entry, number: int) -> None:
        """A chunk of it has come or gone."""
        if entry.file is not None and not entry.gone:
            self._dirty[entry.id] = entry
            self._keys.add(entry.key)
            self._pages[entry.id, number // PAGE] = entry

    def removing(self, number: int) -> None:
        """Its file is about to go."""
        self._going.add(number)
        self._dirty.pop(number, None)

    def removed(self, number: int) -> None:
        """Its file is gone."""
        self._gone.add(number)
        self._made.discard(number)

    def is_removed(self, number: int) -> bool:
        """Whether it is gone, though the index may not know yet."""
        return number in self._going

    async def flush(self) -> bool:
        """Write what was noted until now; False where the index refused, and then it is noted still."""
        async with self._writing:
            if self.index is None or not self.behind:
                return True
            entries, pages, gone = self._dirty, self._pages, set(self._gone)
            self._dirty, self._pages = {}, {}
            self._keys_on_their_way, self._keys = self._keys, set()
            batch = self._batch(entries, pages, gone)
            sweep_from = min(self._made - batch.rows.keys(), default=self._next_id)
            try:
                await self._call(self.index.write, batch, self._next_id, self._policy.state(), sweep_from)
            except sqlite3.Error as exn:
                self._dirty, self._pages = {**entries, **self._dirty}, {**pages, **self._pages}
                self._keys |= self._keys_on_their_way
                self._complain(exn)
                return False
            self._keys_on_their_way = set()
            self._made -= batch.rows.keys()
            self._gone -= gone
            self._going -= gone
            self._said = False
            return True

    def _batch(self, entries: dict[int, Entry], pages: dict[tuple[int, int], Entry], gone: set[int]) -> Batch:
        clock, wall = self._clock(), self._wall()
        rows = {
            number: entry.row(wall - (clock - entry.checked), wall, self._policy.last_use(number))
            for number, entry in entries.items()
            if not entry.gone
        }
        packed = {key: entry.chunks.page(key[1]) for key, entry in pages.items() if not entry.gone}
        return Batch(rows, packed, gone)

    def _complain(self, exn: sqlite3.Error) -> None:
        if not isinstance(exn, sqlite3.OperationalError):
            self._broken()
        if not self._said:
            logger.warning(
                "cache: the index cannot be written: %s; what is cached from now on is forgotten at a restart until it "
                "can", exn,
            )  # fmt: skip
        self._said = True
