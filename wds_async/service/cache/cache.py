"""The cache of the service: objects in chunks on disk, looked up, revalidated and evicted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wds_async.errors import ConfigError, CostLimitReached, ShardNotFound, TransferError, WdsError
from wds_async.redact import redact
from wds_async.service.cache.disk import OpenFolder, free_bytes, open_folder, take_out_trash
from wds_async.service.cache.entries import CacheStats, ObjectEntry, resident
from wds_async.service.cache.fetching import ChunkFetcher, Piece, fetch, read
from wds_async.service.cache.index import CHUNK_BYTES, IndexRow, Totals, key_of
from wds_async.service.cache.open_entries import OpenEntries, Scrub, Verified
from wds_async.service.cache.origin import NO_CLIENT, Client, FetchScheduler, ObjectOrigin, UnlimitedScheduler, Urgency
from wds_async.service.cache.policy import Policy
from wds_async.service.cache.writeback import Disk, Journal
from wds_async.storage.base import Call
from wds_async.storage.http.messages import pins_version
from wds_async.transfer.ranges import Facts, Unranged

__all__ = ["CachedObject", "ChunkCache"]


logger = logging.getLogger("wds_async")
_FLUSH_EVERY_S, _ASK_AGAIN_S = 0.5, 10.0
_ROWS_AT_ONCE = 1000
_SHARES_EVERY = 20
"""Looks at whether there is too much in the cache, of which one is at what each tenant holds too."""
_SPACE_EVERY_S = 2.0
_MARGIN = 20
"""Of the space to be kept free, this fraction more is made free at once: so that it is not made byte by byte."""
_UNREACHABLE = (TransferError, CostLimitReached)


class CachedObject:
    """A reference to one object, as it was when it was opened; `release` it, or use it in a ``with``."""

    __slots__ = ("_cache", "_client", "_entry", "_released", "facts", "stale", "url")

    def __init__(self, cache: ChunkCache, entry: ObjectEntry, client: Client, *, stale: bool = False) -> None:
        self.url = entry.url
        self.facts = entry.facts
        self.stale = stale
        """Whether its freshness had lapsed, and its origin has not confirmed it since."""
        cache._stats.stale += stale
        self._cache = cache
        self._entry = entry
        self._client = client
        self._released = False
        entry.references += 1

    @property
    def size(self) -> int | None:
        """Bytes; None if that is unknown until it was read once."""
        return self._entry.chunks.size

    @property
    def fd(self) -> int:
        """The file, open for reading until `release`; -1 where nothing of it is on disk."""
        return -1 if self._entry.file is None else self._entry.file.fd

    @property
    def path(self) -> Path | None:
        """The file's path below the cache's folder; None where nothing of it is on disk."""
        return None if self._entry.file is None else self._entry.file.path

    @property
    def whole(self) -> bool:
        """Whether all of it is in the file, verified, and stays as long as the file is open."""
        return self._entry.chunks.settled and self._entry.file is not None

    @property
    def discovered(self) -> bool:
        """Whether only its first chunk is here, which came when it was opened and no reader has been charged for."""
        return self._entry.discovered

    def ready(self, start: int, stop: int) -> int:
        """Return the end of the bytes from ``start`` on that can be sent from the file (``start``: none). Does no
        I/O."""
        return self._entry.chunks.ready(start, stop)

    def served(self, count: int) -> None:
        """Count ``count`` bytes of what was `ready` as sent, for the counters and the cache policy."""
        self._cache.served(self._entry, count, self._client)

    def pieces(
        self, start: int = 0, stop: int | None = None, urgency: Urgency = Urgency.DEMAND
    ) -> AsyncGenerator[Piece, None]:
        """Yield bytes ``[start, stop)`` in order as they arrive, reading ahead. A piece is valid until the next one is
        requested. Close it by ``aclose``. Raises the tree's errors."""
        return read(self._entry, self._cache.fetching, self._client, start, stop, urgency)

    async def fetch(self, start: int = 0, stop: int | None = None, urgency: Urgency = Urgency.PLAN) -> int:
        """Bring bytes ``[start, stop)`` onto the disk and return how many are there, from ``start`` on: fewer than
        asked for if there is no room. Raises the tree's errors."""
        return await fetch(self._entry, self._cache.fetching, self._client, start, stop, urgency)

    def distrust(self) -> None:
        """Report that a read of the file came short, failed or was wrong: each chunk is verified again before it is
        served."""
        self._entry.chunks.distrust()
        self._cache.fetching.stats.distrusted += 1

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
class _Lookup:
    """A running lookup of an object, shared by all that wait for it."""

    task: asyncio.Task[tuple[ObjectEntry, bool]] | None = None
    waiting: int = 0
    asking: bool = False
    given_up: bool = False

    @property
    def over(self) -> bool:
        """Whether its result may not be shared any more: the entry of a finished lookup may be closed."""
        return self.given_up or (self.task is not None and self.task.done())

    @contextlib.contextmanager
    def at_origin(self) -> Iterator[None]:
        """Allow the lookup to be cancelled inside the ``with``, while its origin is asked: elsewhere it holds files and
        the index."""
        self.asking = True
        self.left()
        try:
            yield
        finally:
            self.asking = False

    def left(self) -> None:
        """Cancel the lookup if its last waiter has left."""
        if not self.waiting and self.asking and self.task is not None:
            self.given_up = True
            self.task.cancel()


class ChunkCache:
    """Objects in ``folder``, at most ``limit_bytes`` of them (None: no disk, everything is passed through).

    ``call`` runs what blocks on a thread. ``freshness_s``: how long an object's version is taken for granted before
    it is revalidated. ``quotas``: the share of the cache that a tenant may hold at most. ``writers``: chunks
    that are written to disk at once.

    When ``freshness_s`` has lapsed, a whole copy is served on as RFC 5861 has it: for ``stale_while_revalidate_s`` more
    at once, while its origin is asked behind it; for ``stale_if_error_s`` more where the origin, asked once, does not
    answer within ``revalidate_timeout_s``. So an object that was replaced may be served once more as it was.
    ``freshness_s=0`` turns both off. A copy that nothing pins (no ETag, no Last-Modified) is never served while its
    origin answers: it is fetched anew.

    ``scrub_bytes_per_s``: how fast what lies on disk is compared with its checksums in the background; 0: not at all.

    ``keep_free_bytes``: what the folder's file system keeps free, whatever uses it (``free`` tells how much is). Below
    that nothing is written and the longest unused objects go.
    """

    def __init__(
        self,
        folder: Path | None,
        limit_bytes: int,
        origin: ObjectOrigin,
        *,
        call: Call,
        scheduler: FetchScheduler | None = None,
        freshness_s: float = 300.0,
        stale_while_revalidate_s: float = 3600.0,
        stale_if_error_s: float = float("inf"),
        revalidate_timeout_s: float = 2.0,
        scrub_bytes_per_s: float = 0.0,
        keep_free_bytes: int = 0,
        free: Callable[[Path], int] = free_bytes,
        quotas: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        chunk_bytes: int = CHUNK_BYTES,
        most_idle: int = 256,
        writers: int = 4,
    ) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._call = call
        self._keep_free_bytes = keep_free_bytes
        self._free = free
        self._free_bytes = 0
        self._quotas = quotas
        self._clock = clock
        self._wall = wall
        self._chunk_bytes = chunk_bytes
        self._most_idle = most_idle
        self._writers = writers
        self._stats = CacheStats()
        self._looks: dict[tuple[str, bool], _Lookup] = {}
        self._away: set[str] = set()
        """Stores that did not answer when a copy was to be revalidated."""
        self._opened: OpenFolder | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self._scrubbing: asyncio.Task[None] | None = None
        self._scrub_bytes_per_s = 0.0
        self._cursor = (-1, -1)
        self.configure(
            freshness_s=freshness_s,
            stale_while_revalidate_s=stale_while_revalidate_s,
            stale_if_error_s=stale_if_error_s,
            revalidate_timeout_s=revalidate_timeout_s,
            scrub_bytes_per_s=scrub_bytes_per_s,
        )
        self._equip(origin, scheduler or UnlimitedScheduler(), None)

    def _equip(self, origin: ObjectOrigin, scheduler: FetchScheduler, opened: OpenFolder | None) -> None:
        totals = Totals(0, {}, 1, {}) if opened is None else opened.totals
        policy = Policy(
            self.limit_bytes,
            self._chunk_bytes,
            quotas=self._quotas,
            by_tenant=totals.by_tenant,
            entries=totals.entries,
            state=totals.state,
            pins=totals.pins,
        )
        disk = Disk(None if opened is None else opened.files, self._call, self._stats, self._clock, self._writers)
        journal = Journal(
            None if opened is None else opened.index,
            self._call,
            policy,
            clock=self._clock,
            wall=self._wall,
            next_id=totals.next_id,
            broken=opened.mark_broken if opened is not None else lambda: None,
        )
        self.fetching = ChunkFetcher(origin, scheduler, policy, disk, journal, self._stats)
        self._open_entries = OpenEntries(
            self.fetching, opened, self._chunk_bytes, self._most_idle, self._clock, self._wall
        )

    def configure(
        self,
        *,
        freshness_s: float,
        stale_while_revalidate_s: float,
        stale_if_error_s: float,
        revalidate_timeout_s: float,
        scrub_bytes_per_s: float,
    ) -> None:
        """Use these settings from now on, for the copies that are there too. Another ``scrub_bytes_per_s`` begins the
        comparison with checksums anew."""
        self._freshness_s = freshness_s
        self._while_revalidating_s = stale_while_revalidate_s
        self._if_error_s = stale_if_error_s
        self._revalidate_timeout_s = revalidate_timeout_s
        if scrub_bytes_per_s != self._scrub_bytes_per_s:
            self._scrub_bytes_per_s = scrub_bytes_per_s
            self._restart_scrub()

    # -- life

    async def start(self) -> None:
        """Lock and open the folder. ConfigError if another process has it. If it cannot be written, objects are passed
        through, and a warning is logged."""
        if self.folder is not None:
            try:
                self._opened = await self._call(open_folder, self.folder)
            except OSError as exn:
                self.fetching.disk.failed(exn, f"opening the cache {self.folder}")
        if self._opened is not None:
            self._equip(self.fetching.origin, self.fetching.scheduler, self._opened)
            self.fetching.start(self._take_out_trash())
            work = [self._keep_books()]
            if self._keep_free_bytes > 0:
                await self._look_at_space(self._opened.path)
                work.append(self._watch_space(self._opened.path))
            self._keeping = [asyncio.get_running_loop().create_task(one) for one in work]
            self._restart_scrub()

    async def close(self) -> None:
        """End fetches, write the index, unlock the folder; idempotent."""
        if self._scrubbing is not None:
            self._keeping.append(self._scrubbing)
            self._scrubbing = None
        for task in self._keeping:
            task.cancel()
        if self._keeping:
            await asyncio.wait(self._keeping)
        await self.fetching.close()
        opened, self._opened = self._opened, None
        if opened is not None:
            await self.fetching.journal.flush()
            await self._call(opened.close)
        self._open_entries.close()

    @property
    def opened(self) -> bool:
        """Whether its folder is this process's own now."""
        return self._opened is not None

    async def flush(self) -> None:
        """Write to the index what it does not know yet."""
        await self.fetching.journal.flush()

    def verify(self, prefix: str = "") -> AsyncIterator[Verified]:
        """Compare every chunk of the objects whose key begins with ``prefix`` as the disk has them, and drop what is
        bad, so that it is fetched again. ConfigError without a folder."""
        return self._scrub().all(prefix)

    async def evict(self, chosen: Callable[[str], bool]) -> list[IndexRow]:
        """Remove the objects whose key is ``chosen`` and return them. Their readers read on. ConfigError without a
        folder, or if its index cannot be read."""
        index, journal = self._folder().index, self.fetching.journal
        gone: list[IndexRow] = []
        last = ""
        try:
            await journal.flush()
            while rows := await self._call(index.following, "", last, _ROWS_AT_ONCE):
                some = [row for row in rows if chosen(row.key) and not journal.is_removed(row.id)]
                self._open_entries.evict_rows(some)
                gone += some
                last = rows[-1].key
        except sqlite3.Error as exn:
            raise ConfigError(f"{index.path}: the index cannot be read: {exn}") from exn
        await self.fetching.finished()
        await journal.flush()
        return gone

    async def pin(self, names: Iterable[str], *, pinned: bool = True) -> list[str]:
        """Never evict the objects with these keys or prefixes that end with "/" (``pinned`` False: evict them again as
        others). Return all pins. They are kept in the folder. ConfigError as of `evict`."""
        index = self._folder().index
        try:
            pins: list[str] = await self._call(functools.partial(index.pin, list(names), pinned=pinned))
        except sqlite3.Error as exn:
            raise ConfigError(f"{index.path}: the index cannot be written: {exn}") from exn
        self.fetching.policy.pin(pins)
        return pins

    def set_quotas(self, quotas: Mapping[str, float]) -> None:
        """Set the share of the cache that each tenant may hold; tenants above it lose their least recently used
        objects."""
        self._quotas = self.fetching.policy.quotas = dict(quotas)
        self._open_entries.evict(self.fetching.policy.excess())

    @property
    def quotas(self) -> Mapping[str, float]:
        """The share of the cache that each tenant may hold."""
        return self.fetching.policy.quotas

    def held_by_tenant(self) -> dict[str, int]:
        """Return the bytes of disk that the objects of each tenant take or will take."""
        return self.fetching.policy.by_tenant

    def _folder(self) -> OpenFolder:
        if self._opened is None:
            raise ConfigError("this cache has no folder: nothing lies on a disk")
        return self._opened

    def _scrub(self) -> Scrub:
        return Scrub(self._folder().index, self._open_entries, self.fetching, self._chunk_bytes)

    def _restart_scrub(self) -> None:
        """Scrub at the present rate, if there is one, once the folder is open."""
        if self._scrubbing is not None:
            self._scrubbing.cancel()
            self._scrubbing = None
        if self._opened is not None and self._scrub_bytes_per_s > 0:
            scrub = self._scrub().forever(self._scrub_bytes_per_s)
            self._scrubbing = asyncio.get_running_loop().create_task(scrub, name="scrub")

    async def _keep_books(self) -> None:
        for tick in itertools.count():
            policy = self.fetching.policy
            if policy.needs_older_entries:
                await self._remember()
            while excess := policy.excess(shares=tick % _SHARES_EVERY == 0):
                self._open_entries.evict(excess)
                if policy.needs_older_entries:
                    await self._remember()
            await asyncio.sleep(_FLUSH_EVERY_S)
            await self.fetching.journal.flush()

    async def _watch_space(self, folder: Path) -> None:
        while True:
            await asyncio.sleep(_SPACE_EVERY_S)
            await self.fetching.finished()  # or what goes already would be counted as there
            await self._look_at_space(folder)

    async def _look_at_space(self, folder: Path) -> None:
        """Keep the file system's free space: bound what may stay by it, and write nothing while there is too little."""
        try:
            self._free_bytes = await self._call(self._free, folder)
        except OSError as exn:
            logger.debug("cache: the free space of %s is not known: %s", folder, exn)
            return
        spare, disk = self._free_bytes - self._keep_free_bytes, self.fetching.disk
        crowded = spare < 0
        if crowded:
            spare -= self._keep_free_bytes // _MARGIN
        self.fetching.policy.make_room(spare)
        if crowded != disk.crowded:
            disk.crowded = crowded
            words = "too little: nothing is written, and old objects go" if crowded else "enough again"
            level = logging.WARNING if crowded else logging.INFO
            logger.log(level, "cache: the file system of %s has %d bytes left, of which %d are to be kept free: %s",
                       folder, self._free_bytes, self._keep_free_bytes, words)  # fmt: skip

    async def _take_out_trash(self) -> None:
        await self._call(take_out_trash, self.folder)

    async def _remember(self) -> None:
        """Load the least recently used entries of the index into the policy."""
        assert self._opened is not None
        policy = self.fetching.policy
        await self.fetching.journal.flush()
        try:
            rows = await self._call(self._opened.index.oldest, self._cursor, _ROWS_AT_ONCE)
        except sqlite3.Error as exn:
            self._open_entries.index_failed(exn)
            rows = []
        if not rows:
            policy.no_older_entries()
            return
        self._cursor = (rows[-1].last, rows[-1].id)
        policy.add_older((row.id, resident(row)) for row in rows if not self.fetching.journal.is_removed(row.id))

    # -- opening

    async def open(
        self,
        url: str,
        *,
        client: Client = NO_CLIENT,
        key: str = "",
        start: int | None = 0,
        insist: bool = False,
    ) -> CachedObject:
        """Return a reference to the object, with known facts. Raises the tree's errors.

        ``key``: the name in the cache, if not `key_of` the URL. ``start``: where reading will begin, so that the first
        request can bring facts and bytes; None: nothing will be read. ``insist``: wait for the origin's own answer,
        however fresh the copy is.
        """
        key = key or key_of(url)
        while True:
            entry = self._open_entries.get(key)
            if entry is not None and not insist and self._usable(entry, url):
                stale = not self._is_fresh(entry)
            else:
                entry, stale = await self._look(key, url, client, start, insist)
            if not entry.closed:
                return CachedObject(self, entry, client, stale=stale)

    def peek(self, url: str, *, client: Client = NO_CLIENT, key: str = "") -> CachedObject | None:
        """Return the object if it is open in memory and may be served now; without I/O."""
        entry = self._open_entries.get(key or key_of(url))
        if entry is None or entry.file is None or not self._usable(entry, url):
            return None
        return CachedObject(self, entry, client, stale=not self._is_fresh(entry))

    async def _look(
        self, key: str, url: str, client: Client, start: int | None, insist: bool
    ) -> tuple[ObjectEntry, bool]:
        """Find an object, once for all that wait; cancelled when the last of them has left. Return the entry, and
        whether it is a copy that its origin has not confirmed (``stale``)."""
        look = self._looks.get((key, insist))
        if look is None or look.over:
            look = self._looks[key, insist] = _Lookup()
            look.task = self.fetching.start(self._found(look, key, url, client, start, insist))
            look.task.add_done_callback(lambda _: self._forget_look((key, insist), look))
        assert look.task is not None
        look.waiting += 1
        try:
            return await asyncio.shield(look.task)
        finally:
            look.waiting -= 1
            look.left()

    def _forget_look(self, key: tuple[str, bool], look: _Lookup) -> None:
        if self._looks.get(key) is look:
            del self._looks[key]

    async def _found(
        self, look: _Lookup, key: str, url: str, client: Client, start: int | None, insist: bool
    ) -> tuple[ObjectEntry, bool]:
        entry = self._open_entries.get(key) or await self._open_entries.load(key, url)
        if entry is None:
            return await self._discover(look, key, url, client, start), False
        if not insist and self._usable(entry, url):
            return entry, not self._is_fresh(entry)
        copy = not insist and self._stands_in(entry, self._if_error_s)
        entry.references += 1  # it stays open
        try:
            with look.at_origin():
                if copy:
                    facts = await self.fetching.origin.facts(url, deadline_s=self._revalidate_timeout_s)
                else:
                    async with self.fetching.scheduler.slot(client, Urgency.DEMAND, url):
                        facts = await self.fetching.origin.facts(url)
        except ShardNotFound:
            self._vanished(entry)
            raise
        except _UNREACHABLE as exn:
            if not copy:
                raise
            self._unanswered(entry, url, exn)
            return entry, True
        finally:
            entry.references -= 1
            self.fetching.settle(entry)
        return self._answered(entry, url, facts, client.tenant), False

    # -- freshness

    def _is_fresh(self, entry: ObjectEntry) -> bool:
        return self._clock() - entry.checked < self._freshness_s and not entry.closed

    def _stands_in(self, entry: ObjectEntry, within_s: float) -> bool:
        """Return whether a copy may be served without its origin's answer: it is complete, and stale for no longer than
        ``within_s``."""
        if self._freshness_s <= 0 or entry.closed or not entry.chunks.whole:
            return False
        return self._clock() - entry.checked - self._freshness_s <= within_s

    def _usable(self, entry: ObjectEntry, url: str) -> bool:
        """Return whether a copy may be served at once; revalidate it in the background if its freshness has lapsed."""
        if self._is_fresh(entry):
            return True
        pinned = pins_version(entry.facts.version) and math.isfinite(entry.checked)
        waits = self._clock() < entry.ask_again_at
        if not (pinned and self._stands_in(entry, self._while_revalidating_s)):
            down = waits or not self.fetching.origin.reachable(url)
            if not (down and self._stands_in(entry, self._if_error_s)):
                return False
        if not waits and not entry.revalidating:
            entry.revalidating = True
            self.fetching.start(self._revalidate(entry, url))
        return True

    async def _revalidate(self, entry: ObjectEntry, url: str) -> None:
        """Ask the origin once about a copy that is served meanwhile."""
        entry.references += 1  # it stays open
        try:
            facts = await self.fetching.origin.facts(url, deadline_s=self._revalidate_timeout_s)
        except ShardNotFound:
            self._vanished(entry)
        except _UNREACHABLE as exn:
            self._unanswered(entry, url, exn)
        except WdsError as exn:
            logger.info("cache: %s: the next request asks its origin again: %s", redact(url), exn)
            entry.checked = float("-inf")  # and its client gets the error
        else:
            self._answered(entry, url, facts, entry.tenant)
        finally:
            entry.revalidating = False
            entry.references -= 1
            self.fetching.settle(entry)

    def _answered(self, entry: ObjectEntry, url: str, facts: Facts, tenant: str) -> ObjectEntry:
        """Return the entry for the origin's answer: the same one if it is unchanged, else a new one."""
        entry = self._open_entries.get(entry.key) or entry  # another request may have had its answer before
        self._mark(url, away=False)
        same = facts.version == entry.facts.version and facts.size in (None, entry.facts.size)
        if same and pins_version(facts.version) and not entry.gone:
            self._stats.unchanged += 1
            entry.url, entry.checked, entry.ask_again_at = url, self._clock(), float("-inf")
            self.fetching.journal.used(entry)
            return entry
        self._vanished(entry)
        return self._open_entries.put(self._open_entries.new(entry.key, url, facts, tenant))

    def _vanished(self, entry: ObjectEntry) -> None:
        """Drop a copy whose origin has another version, or none."""
        self._stats.changed += 1
        self._open_entries.discard(entry)

    def _unanswered(self, entry: ObjectEntry, url: str, exn: WdsError) -> None:
        """Note that the origin of a copy did not answer, and ask it again only after a while."""
        self._stats.unanswered += 1
        entry.ask_again_at = self._clock() + min(self._freshness_s, _ASK_AGAIN_S)
        if self._mark(url, away=True):
            logger.warning("cache: %s: its origin does not answer, and copies are served: %s", redact(url), exn)

    def _mark(self, url: str, *, away: bool) -> bool:
        """Note whether the store of ``url`` answers; True where that is new."""
        store = "/".join(url.split("/", 3)[:3])
        if away == (store in self._away):
            return False
        (self._away.add if away else self._away.discard)(store)
        if not away:
            logger.info("cache: %s answers again", redact(store))
        return True

    async def _discover(self, look: _Lookup, key: str, url: str, client: Client, start: int | None) -> ObjectEntry:
        """Return a new entry for an object that the cache does not have: its facts, and its first chunk if reading
        begins there."""
        fetching = self.fetching
        async with contextlib.AsyncExitStack() as stack:
            if start is not None and start < self._chunk_bytes and fetching.disk.usable:
                with contextlib.suppress(Unranged):
                    with look.at_origin():
                        async with fetching.scheduler.slot(client, Urgency.DEMAND, url):
                            part = await stack.enter_async_context(fetching.origin.part(url, 0, self._chunk_bytes))
                    entry = self._open_entries.new(key, url, part.facts, client.tenant)
                    if not entry.in_order and entry.chunks.size and len(part.view) == entry.chunks.length(0):
                        entry.discovered = True
                        fetching.first_chunk(entry, client, part.view, stack.pop_all())
                    return self._open_entries.put(entry)
            with look.at_origin():
                async with fetching.scheduler.slot(client, Urgency.DEMAND, url):
                    facts = await fetching.origin.facts(url)
            return self._open_entries.put(self._open_entries.new(key, url, facts, client.tenant))

    # -- counters and figures

    def served(self, entry: ObjectEntry, count: int, client: Client) -> None:
        """Count bytes that were sent of a file (`CachedObject.served`)."""
        self._stats.given(client.tenant, hit=count, ahead=self.fetching.take_ahead(entry, count))
        self._stats.hits += 1
        self.fetching.policy.served(entry.id, count)
        self.fetching.journal.used(entry)

    def remove(self, key: str) -> bool:
        """Forget an object that is in memory, and return whether there was one. Its readers read on."""
        entry = self._open_entries.get(key)
        if entry is not None:
            self._open_entries.discard(entry)
        return entry is not None

    def statistics(self) -> CacheStats:
        """Return the counters and the present sizes."""
        policy = self.fetching.policy
        return replace(
            self._stats,
            entries=policy.entries,
            bytes=policy.resident_bytes + policy.probation.bytes,
            limit_bytes=self.limit_bytes,
            keep_free_bytes=self._keep_free_bytes,
            free_bytes=self._free_bytes,
            probation_bytes=policy.probation.bytes,
            readers=self._open_entries.readers,
        )
