"""The objects that are in memory: found by their key, loaded from the index, put away when nobody reads them."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterable

from wds_async.chunkcache.entries import Entry, facts_from
from wds_async.chunkcache.fetching import Fetching
from wds_async.chunkcache.folder import OpenFolder
from wds_async.chunkcache.index import Row
from wds_async.chunkcache.policy import Resident
from wds_async.transfer.ranges import Facts

__all__ = ["Shelf", "resident"]

logger = logging.getLogger("wds_async")


class Shelf:
    """At most ``most_idle`` objects that nobody reads are kept open; the others are found again by the index."""

    def __init__(
        self,
        fetching: Fetching,
        opened: OpenFolder | None,
        chunk_bytes: int,
        most_idle: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._fetching = fetching
        self._opened = opened
        self._chunk_bytes = chunk_bytes
        self._most_idle = most_idle
        self._clock = clock
        self._wall = wall
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        fetching.settle, fetching.remove = self.settle, self.evict

    @property
    def readers(self) -> int:
        """How many read now."""
        return sum(len(entry.readers) for entry in self._fetching.entries.values())

    def get(self, key: str) -> Entry | None:
        """The object, where it is in memory."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def new(self, key: str, url: str, facts: Facts, tenant: str) -> Entry:
        """An object that was just asked for at its origin."""
        entry = Entry(self._fetching.journal.new_id(), key, url, facts, tenant, self._chunk_bytes)
        entry.checked = self._clock()
        self._fetching.entries[entry.id] = entry
        return entry

    def put(self, entry: Entry) -> Entry:
        """From now on it is what its key stands for."""
        if entry.gone:
            return entry
        old = self._entries.get(entry.key)
        if old is not None and old is not entry:
            self.discard(old)
        self._entries[entry.key] = entry
        self._put_away()
        return entry

    async def load(self, key: str, url: str) -> Entry | None:
        """What the index knows of the object; None where that is nothing, or its file is gone."""
        journal = self._fetching.journal
        if self._opened is None:
            return None
        if journal.pending(key):
            await journal.flush()
        try:
            found = await self._fetching.disk.call(self._opened.index.load, key)
        except sqlite3.Error as exn:
            self.index_failed(exn)
            return None
        if found is None or journal.is_removed(found[0].id):
            return None
        row, pages = found
        entry = None
        if pages is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                entry = Entry(row.id, key, url, facts_from(row), row.tenant, self._chunk_bytes)
        if entry is None:
            self.evict_rows([row])
            return None
        entry.chunks.load(pages)
        entry.file = await self._fetching.disk.open(row.id)
        if entry.file is None or journal.is_removed(row.id):
            self._close(entry)
            self.evict_rows([row])
            return None
        with contextlib.suppress(OSError):
            await self._fetching.disk.trim(entry)
        entry.before = resident(row)
        age_s = self._wall() - row.checked
        entry.checked = self._clock() - age_s if age_s >= 0 else float("-inf")
        self._fetching.entries[entry.id] = entry
        return self.put(entry)

    def discard(self, entry: Entry) -> None:
        """The object is in the cache no more: its file goes, and who has it open reads on."""
        if entry.gone:
            return
        entry.gone = True
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self._fetching.entries.pop(entry.id, None)
        if entry.before is not None:  # the policy counts its bytes, and does not know whose they are
            self._fetching.policy.remember([(entry.id, entry.before)])
        self._fetching.policy.forget(entry.id)
        self._remove_file(entry)
        if not entry.busy:
            self._close(entry)

    def evict(self, numbers: Iterable[int]) -> None:
        """Objects make room for others."""
        for number in numbers:
            entry = self._fetching.entries.get(number)
            if entry is not None:
                self.discard(entry)
            else:
                self._fetching.policy.forget(number)
                self._begin_removal(number)

    def evict_rows(self, rows: Iterable[Row]) -> None:
        """The same for objects as the index has them, of which the policy may not know yet."""
        rows = [row for row in rows if not self._fetching.journal.is_removed(row.id)]
        self._fetching.policy.remember((row.id, resident(row)) for row in rows)
        self.evict(row.id for row in rows)

    def settle(self, entry: Entry) -> None:
        """Somebody has let go of it."""
        if entry.busy or entry.closed:
            return
        if entry.gone:
            self._remove_file(entry)  # where it was made just when the entry went
            self._close(entry)
        elif entry.file is not None and (not entry.chunks.numbers() or (entry.in_order and not entry.chunks.whole)):
            self.discard(entry)
        else:
            self._put_away()

    def close(self) -> None:
        """Close all files."""
        for entry in [*self._entries.values(), *self._fetching.entries.values()]:
            self._close(entry)
        self._entries.clear()

    def index_failed(self, exn: sqlite3.Error) -> None:
        """The index cannot be read: what it says is taken for nothing, and the next start begins anew."""
        logger.warning("cache: the index cannot be read: %s; it is replaced at the next start", exn)
        self._fetching.stats.disk_errors += 1
        if self._opened is not None and not isinstance(exn, sqlite3.OperationalError):
            self._opened.mark_broken()

    def _put_away(self) -> None:
        """Close the longest unused of those that nobody reads, where they are too many."""
        over = len(self._entries) - self._most_idle
        if over <= 0:
            return
        for entry in [*self._entries.values()][: over + self._most_idle // 2]:
            if over > 0 and not entry.busy and not entry.chunks.passing:
                del self._entries[entry.key]
                self._fetching.entries.pop(entry.id, None)
                self._close(entry)
                over -= 1

    def _close(self, entry: Entry) -> None:
        entry.closed = True
        if entry.file is None:
            self._fetching.journal.unmade(entry.id)
        else:
            entry.file.close()

    def _remove_file(self, entry: Entry) -> None:
        if entry.file is not None and not entry.removed:
            entry.removed = True
            self._begin_removal(entry.id)

    def _begin_removal(self, number: int) -> None:
        self._fetching.journal.removing(number)
        self._fetching.finish(self._remove(number))

    async def _remove(self, number: int) -> None:
        if await self._fetching.disk.remove(number):
            self._fetching.journal.removed(number)


def resident(row: Row) -> Resident:
    """What the policy wants to know of an object in the index."""
    return Resident(row.key, row.tenant, row.last, row.held, row.held, row.size or row.held)
