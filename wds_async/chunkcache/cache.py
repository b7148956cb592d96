"""The cache of a service: objects of any origin, in chunks, on one folder of this machine.

::

    cache = ChunkCache(Path("/nvme/cache"), 500 << 30, fetcher, call=threads.call)
    await cache.start()
    with await cache.open("s3://bucket/000.tar") as found:
        async for piece in found.pieces(0): ...  # OnDisk(fd, offset, count), or memory
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wds_async.chunkcache.chunks import CHUNK_BYTES
from wds_async.chunkcache.disk import Disk
from wds_async.chunkcache.entries import Entry, Reader
from wds_async.chunkcache.fetching import Fetching
from wds_async.chunkcache.folder import OpenFolder, open_folder, take_out_trash
from wds_async.chunkcache.index import Totals
from wds_async.chunkcache.journal import Journal
from wds_async.chunkcache.keys import key_of
from wds_async.chunkcache.origin import AnyTime, Origin, Turns, Urgency
from wds_async.chunkcache.pieces import Piece, fetch, read
from wds_async.chunkcache.policy import Policy, Resident
from wds_async.chunkcache.shelf import Shelf
from wds_async.chunkcache.stats import CacheStats
from wds_async.errors import CostLimitReached, ShardNotFound, TransferError
from wds_async.redact import redact
from wds_async.storage.base import Call
from wds_async.transfer.ranges import Unranged

__all__ = ["CacheStats", "CachedObject", "ChunkCache"]

logger = logging.getLogger("wds_async")

_FLUSH_EVERY_S, _ASK_AGAIN_S = 0.5, 10.0
_ROWS_AT_ONCE = 1000
_UNREACHABLE = (TransferError, CostLimitReached)


class CachedObject:
    """A reference to one object, as it was when it was opened; `release` it, or use it in a ``with``."""

    __slots__ = ("_cache", "_client", "_entry", "_released", "facts", "url")

    def __init__(self, cache: ChunkCache, entry: Entry, client: str) -> None:
        self.url = entry.url
        self.facts = entry.facts
        self._cache = cache
        self._entry = entry
        self._client = client
        self._released = False
        entry.references += 1

    @property
    def size(self) -> int | None:
        """Bytes; None where nobody knows before it was read once."""
        return self._entry.chunks.size

    @property
    def fd(self) -> int:
        """The file, open for reading until `release`; -1 where nothing of it is on disk."""
        return -1 if self._entry.file is None else self._entry.file.fd

    @property
    def whole(self) -> bool:
        """Whether all of it is in the file, was compared, and stays as it is while anybody has the file open."""
        return self._entry.chunks.settled and self._entry.file is not None

    @property
    def discovered(self) -> bool:
        """Whether nothing of it was here but its first chunk, which came when it was opened, for nobody yet."""
        return self._entry.discovered

    def ready(self, start: int, stop: int) -> int:
        """The end of what can be sent of the file from ``start`` on (``start``: nothing). It does no I/O."""
        return self._entry.chunks.ready(start, stop)

    def served(self, count: int) -> None:
        """So many bytes of what was `ready` have been sent: for the counters, and for what stays in the cache."""
        self._cache.served(self._entry, count)

    def pieces(
        self, start: int = 0, stop: int | None = None, urgency: Urgency = Urgency.DEMAND
    ) -> AsyncGenerator[Piece, None]:
        """Bytes ``[start, stop)`` in order, as they arrive; what comes next is fetched meanwhile. A piece is good until
        the next one is asked for. Leave it by ``aclose``. Raises the tree's errors."""
        return read(self._entry, self._cache.fetching, self._client, start, stop, urgency)

    async def fetch(self, start: int = 0, stop: int | None = None, urgency: Urgency = Urgency.PLAN) -> int:
        """Bring bytes ``[start, stop)`` onto the disk; how many are there then, from ``start`` on. Fewer than asked for
        where there is no place. Raises the tree's errors."""
        return await fetch(self._entry, self._cache.fetching, self._client, start, stop, urgency)

    def release(self) -> None:
        """Let go; idempotent."""
        if not self._released:
            self._released = True
            self._entry.references -= 1
            self._cache.fetching.settle(self._entry)

    def __enter__(self) -> CachedObject:
        return self

    def __exit__(self, *how: object) -> None:
        self.release()


@dataclass(eq=False, slots=True)
class _Look:
    """An object that is being found out about, and how many wait for that."""

    task: asyncio.Task[Entry] | None = None
    waiting: int = 0
    asking: bool = False
    given_up: bool = False

    @property
    def over(self) -> bool:
        """Whether nobody may join: what was found by one that is done may be closed by now."""
        return self.given_up or (self.task is not None and self.task.done())

    @contextlib.contextmanager
    def at_origin(self) -> Iterator[None]:
        """While its origin is asked. Only there it may be given up: elsewhere files and books are in its hands."""
        self.asking = True
        self.left()
        try:
            yield
        finally:
            self.asking = False

    def left(self) -> None:
        """Give it up, where nobody waits for it any more."""
        if not self.waiting and self.asking and self.task is not None:
            self.given_up = True
            self.task.cancel()


class ChunkCache:
    """Objects in ``folder``, at most ``limit_bytes`` of them (None: no disk, everything is passed through).

    ``call`` runs what blocks on a thread. ``freshness_s``: how long an object's identity is taken for granted before
    its origin is asked again. ``quotas``: the share of the cache that a tenant may hold at most.
    """

    def __init__(
        self,
        folder: Path | None,
        limit_bytes: int,
        origin: Origin,
        *,
        call: Call,
        turns: Turns | None = None,
        freshness_s: float = 300.0,
        quotas: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        chunk_bytes: int = CHUNK_BYTES,
        most_idle: int = 256,
    ) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._call = call
        self._freshness_s = freshness_s
        self._quotas = quotas
        self._clock = clock
        self._wall = wall
        self._chunk_bytes = chunk_bytes
        self._most_idle = most_idle
        self._stats = CacheStats()
        self._looks: dict[str, _Look] = {}
        self._opened: OpenFolder | None = None
        self._books: asyncio.Task[None] | None = None
        self._cursor = (-1, -1)
        self._equip(origin, turns or AnyTime(), None)

    def _equip(self, origin: Origin, turns: Turns, opened: OpenFolder | None) -> None:
        totals = Totals(0, {}, 1, {}) if opened is None else opened.totals
        policy = Policy(
            self.limit_bytes,
            self._chunk_bytes,
            quotas=self._quotas,
            by_tenant=totals.by_tenant,
            entries=totals.entries,
            state=totals.state,
        )
        disk = Disk(None if opened is None else opened.data, self._call, self._stats, self._clock)
        journal = Journal(
            None if opened is None else opened.index,
            self._call,
            policy,
            clock=self._clock,
            wall=self._wall,
            next_id=totals.next_id,
            broken=opened.mark_broken if opened is not None else lambda: None,
        )
        self.fetching = Fetching(origin, turns, policy, disk, journal, self._stats)
        self._shelf = Shelf(self.fetching, opened, self._chunk_bytes, self._most_idle, self._clock, self._wall)

    # -- life

    async def start(self) -> None:
        """Take the folder. ConfigError where another process has it; where it cannot be written, objects are passed
        through, and that is said."""
        if self.folder is not None:
            try:
                self._opened = await self._call(open_folder, self.folder)
            except OSError as exn:
                self.fetching.disk.failed(exn, f"opening the cache {self.folder}")
        if self._opened is not None:
            self._equip(self.fetching.origin, self.fetching.turns, self._opened)
            self.fetching.start(self._take_out_trash())
            self._books = asyncio.get_running_loop().create_task(self._keep_books())

    async def close(self) -> None:
        """End fetches, write the index, let go of the folder; idempotent."""
        if self._books is not None:
            self._books.cancel()
            await asyncio.wait([self._books])
        await self.fetching.close()
        opened, self._opened = self._opened, None
        if opened is not None:
            await self.fetching.journal.flush()
            await self._call(opened.close)
        self._shelf.close()

    async def flush(self) -> None:
        """Write to the index what it does not know yet."""
        await self.fetching.journal.flush()

    async def _keep_books(self) -> None:
        """Twice a second: the index, and what the policy wants to know of it."""
        while True:
            policy = self.fetching.policy
            if policy.hungry:
                await self._remember()
            if policy.resident_bytes > policy.room_bytes and (excess := policy.excess()):
                self._shelf.evict(excess)
                continue
            await asyncio.sleep(_FLUSH_EVERY_S)
            await self.fetching.journal.flush()

    async def _take_out_trash(self) -> None:
        await self._call(take_out_trash, self.folder)

    async def _remember(self) -> None:
        """Tell the policy of the longest unused entries."""
        assert self._opened is not None
        policy = self.fetching.policy
        await self.fetching.journal.flush()
        try:
            rows = await self._call(self._opened.index.oldest, self._cursor, _ROWS_AT_ONCE)
        except sqlite3.Error as exn:
            self._shelf.index_failed(exn)
            rows = []
        if not rows:
            policy.all_told()
            return
        self._cursor = (rows[-1].last, rows[-1].id)
        policy.remember(
            (row.id, Resident(row.key, row.tenant, row.last, row.held, row.held, row.size or row.held))
            for row in rows
            if not self.fetching.journal.is_removed(row.id)
        )

    # -- opening

    async def open(
        self, url: str, *, client: str = "", tenant: str = "", key: str = "", start: int | None = 0
    ) -> CachedObject:
        """A reference to the object, whose facts are known and fresh. Raises the tree's errors.

        ``key``: what it is kept under, where that is not `key_of` the URL. ``start``: where reading will begin, so
        that its first answer can bring what is needed; None: nothing will be read.
        """
        key = key or key_of(url)
        while True:
            entry = self._shelf.get(key)
            if entry is None or not self._is_fresh(entry):
                entry = await self._look(key, url, client, tenant, start)
            if not entry.closed:
                return CachedObject(self, entry, client)

    def peek(self, url: str, *, client: str = "", key: str = "") -> CachedObject | None:
        """The object where it is known, open and fresh: at once, without I/O."""
        entry = self._shelf.get(key or key_of(url))
        if entry is None or entry.file is None or not self._is_fresh(entry):
            return None
        return CachedObject(self, entry, client)

    async def _look(self, key: str, url: str, client: str, tenant: str, start: int | None) -> Entry:
        """Find out about an object, once however many ask; given up when the last of them has left."""
        look = self._looks.get(key)
        if look is None or look.over:
            look = self._looks[key] = _Look()
            look.task = self.fetching.start(self._found(look, key, url, client, tenant, start))
            look.task.add_done_callback(lambda _: self._looks.pop(key) if self._looks.get(key) is look else None)
        assert look.task is not None
        look.waiting += 1
        try:
            return await asyncio.shield(look.task)
        finally:
            look.waiting -= 1
            look.left()

    async def _found(self, look: _Look, key: str, url: str, client: str, tenant: str, start: int | None) -> Entry:
        entry = self._shelf.get(key) or await self._shelf.load(key, url)
        if entry is None:
            return await self._discover(look, key, url, client, tenant, start)
        if self._is_fresh(entry) and self._freshness_s > 0:
            return entry
        try:
            with look.at_origin():
                async with self.fetching.turns.turn(client, Urgency.DEMAND, url):
                    facts = await self.fetching.origin.facts(url)
        except ShardNotFound:
            self._shelf.discard(entry)
            raise
        except _UNREACHABLE as exn:
            if not entry.chunks.whole or self._freshness_s <= 0:
                raise
            self._stats.stale += 1
            logger.warning("cache: %s: its origin cannot be asked, and the copy is served: %s", redact(url), exn)
            entry.checked = self._clock() - self._freshness_s + min(self._freshness_s, _ASK_AGAIN_S)
            return entry
        entry.url = url
        if facts.identity and facts.identity == entry.facts.identity and facts.size in (None, entry.facts.size):
            entry.checked = self._clock()
            self.fetching.journal.used(entry)
            return entry
        self._shelf.discard(entry)
        return self._shelf.put(self._shelf.new(key, url, facts, tenant))

    async def _discover(self, look: _Look, key: str, url: str, client: str, tenant: str, start: int | None) -> Entry:
        """An object that is not here: its facts, with its first chunk where reading begins in that."""
        fetching = self.fetching
        async with contextlib.AsyncExitStack() as stack:
            if start is not None and start < self._chunk_bytes and fetching.disk.usable:
                with contextlib.suppress(Unranged):
                    with look.at_origin():
                        async with fetching.turns.turn(client, Urgency.DEMAND, url):
                            part = await stack.enter_async_context(fetching.origin.part(url, 0, self._chunk_bytes))
                    entry = self._shelf.new(key, url, part.facts, tenant)
                    if not entry.in_order and entry.chunks.size and len(part.view) == entry.chunks.length(0):
                        await self._keep_first(entry, part.view, client)
                    return self._shelf.put(entry)
            with look.at_origin():
                async with fetching.turns.turn(client, Urgency.DEMAND, url):
                    facts = await fetching.origin.facts(url)
            return self._shelf.put(self._shelf.new(key, url, facts, tenant))

    async def _keep_first(self, entry: Entry, view: memoryview, client: str) -> None:
        reader = Reader(client, Urgency.DEMAND, until=1)
        self.fetching.enter(entry, reader, 0, len(view))
        entry.references += 1
        try:
            entry.discovered = await self.fetching.keep(entry, 0, view, wanted=True)
        finally:
            self.fetching.leave(entry, reader)
            entry.references -= 1

    def _is_fresh(self, entry: Entry) -> bool:
        return self._clock() - entry.checked < self._freshness_s and not entry.closed

    # -- what else is asked of it

    def served(self, entry: Entry, count: int) -> None:
        """See `CachedObject.served`."""
        self._stats.hit_bytes += count
        self._stats.hits += 1
        self.fetching.policy.served(entry.id, count)
        self.fetching.journal.used(entry)

    def remove(self, key: str) -> bool:
        """Forget an object that is in memory; who reads it goes on. Whether there was one."""
        entry = self._shelf.get(key)
        if entry is not None:
            self._shelf.discard(entry)
        return entry is not None

    def statistics(self) -> CacheStats:
        """The counters, and how much is there."""
        policy = self.fetching.policy
        return replace(
            self._stats,
            entries=policy.entries,
            bytes=policy.resident_bytes + policy.transit.bytes,
            limit_bytes=self.limit_bytes,
            transit_bytes=policy.transit.bytes,
            readers=self._shelf.readers,
        )
