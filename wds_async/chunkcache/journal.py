"""What the index is to be told: collected, and written together, so that no reader waits for it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable

from wds_async.chunkcache.chunks import PAGE
from wds_async.chunkcache.entries import Entry
from wds_async.chunkcache.index import Batch, Index
from wds_async.chunkcache.policy import Policy
from wds_async.storage.base import Call

__all__ = ["Journal"]

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
