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
from wds_async.service.cache.fetching import ChunkFetcher, Piece, prefetch, prefetch_owned, read
from wds_async.service.cache.index import CHUNK_BYTES, IndexRow, Totals, key_of
from wds_async.service.cache.open_entries import OpenEntries, Scrub, Verified
from wds_async.service.cache.origin import (
    NO_CLIENT,
    ChunkRequest,
    Client,
    FetchScheduler,
    NodePart,
    Nodes,
    ObjectOrigin,
    UnlimitedScheduler,
    Urgency,
)
from wds_async.service.cache.policy import Future, Policy
from wds_async.service.cache.writeback import Disk, Journal
from wds_async.storage.base import Call
from wds_async.storage.http.messages import pins_version
from wds_async.transfer.ranges import Facts, Unranged

__all__ = ["CacheSettings", "CachedObject", "ChunkCache"]

logger = logging.getLogger("wds_async")
_FLUSH_EVERY_S, _ASK_AGAIN_S = 0.5, 10.0
_ROWS_AT_ONCE = 1000
_QUOTAS_EVERY = 20  # quotas are enforced with every so many flushes
_SPACE_EVERY_S = 2.0
_MARGIN = 20
"""Of the space to be kept free, this fraction more is made free at once: so that it is not made byte by byte."""
_UNREACHABLE = (TransferError, CostLimitReached)


class CachedObject:
    """A reference to one object as it was when it was opened; `release` it, or use it in a ``with``. ``stale``: its
    freshness had lapsed, and its origin has not confirmed it since."""

    def __init__(self, cache: ChunkCache, entry: ObjectEntry, client: Client, *, stale: bool = False) -> None:
        self.url = entry.url
        self.facts = entry.facts
        self.stale = stale
        self._cache = cache
        self._entry = entry
        self._client = client
        self._released = False
        cache.fetching.stats.stale += stale
        entry.references += 1

    @property
    def size(self) -> int | None:
        """Bytes; None if that is unknown until it was read once."""
        return self._entry.chunks.size

    @property
    def fd(self) -> int:
        """The file, open for reading until `release`; -1 if nothing of the object is on disk."""
        return -1 if self._entry.file is None else self._entry.file.fd

    @property
    def path(self) -> Path | None:
        """The file's path below the cache's folder; None if nothing of the object is on disk."""
        return None if self._entry.file is None else self._entry.file.path

    @property
    def whole(self) -> bool:
        """True if all of it is in the file, verified, and stays as long as the file is open."""
        return self._entry.chunks.settled and self._entry.file is not None

    @property
    def discovered(self) -> bool:
        """True if the cache has only the chunk that came when it was opened and is charged to no reader yet."""
        return self._entry.discovered >= 0

    @property
    def age_s(self) -> float:
        """Seconds since its version was confirmed."""
        return max(0.0, self._cache.age_s(self._entry))

    def has(self, number: int) -> bool:
        """Return whether a chunk is on disk and verified."""
        return number in self._entry.chunks.trusted

    def crc(self, number: int) -> int | None:
        """Return the CRC-32C of a chunk that is on disk."""
        return self._entry.chunks.crcs.get(number)

    def ready(self, start: int, stop: int) -> int:
        """Return the end of the bytes from ``start`` on that can be sent from the file (``start``: none); without
        I/O."""
        return self._entry.chunks.ready(start, stop)

    def served(self, count: int) -> None:
        """Count ``count`` bytes of what was `ready` as sent, for the counters and the cache policy."""
        fetching, entry = self._cache.fetching, self._entry
        fetching.stats.count_served(self._client.tenant, hit=count, ahead=fetching.take_ahead(entry, count))
        fetching.stats.hits += 1
        fetching.policy.served(entry.id, count)
        fetching.journal.used(entry)

    def pieces(
        self, start: int = 0, stop: int | None = None, urgency: Urgency = Urgency.DEMAND
    ) -> AsyncGenerator[Piece, None]:
        """Yield bytes ``[start, stop)`` in order as they arrive, reading ahead. A piece is valid until the next one is
        requested. Close it by ``aclose``. Raises the errors of `wds_async.errors`."""
        return read(self._entry, self._cache.fetching, self._client, start, stop, urgency)

    async def fetch(self, start: int = 0, stop: int | None = None, urgency: Urgency = Urgency.PLAN) -> int:
        """Bring bytes ``[start, stop)`` onto the disk and return how many are there, from ``start`` on: fewer if there
        is no room. Raises the errors of `wds_async.errors`."""
        return await prefetch(self._entry, self._cache.fetching, self._client, start, stop, urgency)

    def owned_bytes(self) -> int:
        """Return how many bytes of the chunks that are this node's are on disk."""
        chunks = self._entry.chunks
        numbers = self._entry.owned_numbers(self._cache.fetching.nodes)
        return sum(chunks.length(number) for number in numbers if number in chunks)

    async def fetch_owned(self, urgency: Urgency = Urgency.PLAN) -> bool:
        """Bring the chunks that are this node's onto the disk; False if there is no room for all of them. Raises the
        errors of `wds_async.errors`."""
        return await prefetch_owned(self._entry, self._cache.fetching, self._client, urgency)

    def distrust(self) -> None:
        """Report that a read of the file came short, failed or was wrong: each chunk is verified again before it is
        served."""
        self._entry.chunks.trusted.clear()
        self._cache.fetching.stats.distrusted += 1

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._entry.references -= 1
            self._cache.fetching.settle(self._entry)

    def __enter__(self) -> CachedObject:
        return self

    def __exit__(self, *how: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings that may change while the cache runs.

    A copy is served without its origin for ``freshness_s`` after its version was confirmed. Then a whole copy is served
    on as RFC 5861 has it: for ``stale_while_revalidate_s`` more at once, while its origin is asked in the background;
    for ``stale_if_error_s`` more if the origin, asked once, does not answer within ``revalidate_timeout_s``. So an
    object that was replaced may be served once more as it was. ``freshness_s=0`` turns both off. A copy that nothing
    pins (no ETag, no Last-Modified) is fetched anew while its origin answers.

    ``scrub_bytes_per_s``: how fast the copies on disk are compared with their checksums in the background; 0: not.
    """

    freshness_s: float = 300.0
    stale_while_revalidate_s: float = 3600.0
    stale_if_error_s: float = math.inf
    revalidate_timeout_s: float = 2.0
    scrub_bytes_per_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Lookup:
    """A running lookup of an object, shared by all that wait for it. It may be cancelled only while its origin is
    asked: elsewhere it holds files and the index."""

    task: asyncio.Task[tuple[ObjectEntry, bool]] | None = None
    waiting: int = 0
    asking: bool = False
    cancelled: bool = False

    @contextlib.contextmanager
    def at_origin(self) -> Iterator[None]:
        self.asking = True
        self.cancel_unwanted()
        try:
            yield
        finally:
            self.asking = False

    def cancel_unwanted(self) -> None:
        if not self.waiting and self.asking and self.task is not None:
            self.cancelled = self.task.cancel()


class ChunkCache:
    """Objects in ``folder``, at most ``limit_bytes`` of them (None: no disk, everything is passed through).

    ``call`` runs a blocking function on a thread. ``keep_free_bytes``: what the folder's file system keeps free,
    whatever uses it (``free`` returns how much is); below that nothing is written and the longest unused objects go.
    ``quotas``: the share of the cache that a tenant may hold at most. ``most_idle``: objects without readers whose
    files stay open. ``writers``: chunks that are written to disk at once. ``nodes``: other nodes, which are asked for
    their chunks before the store is. ``settings``: see `CacheSettings`.
    """

    def __init__(
        self,
        folder: Path | None,
        limit_bytes: int,
        origin: ObjectOrigin,
        *,
        call: Call,
        scheduler: FetchScheduler | None = None,
        keep_free_bytes: int = 0,
        free: Callable[[Path], int] = free_bytes,
        quotas: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        chunk_bytes: int = CHUNK_BYTES,
        most_idle: int = 256,
        writers: int = 4,
        nodes: Nodes | None = None,
        **settings: float,
    ) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.settings = CacheSettings(**settings)
        self._call = call
        self._keep_free_bytes = keep_free_bytes
        self._free = free
        self._free_bytes = 0
        self._clock = clock
        self._wall = wall
        self._chunk_bytes = chunk_bytes
        self._most_idle = most_idle
        self._writers = writers
        self._stats = CacheStats()
        self._nodes = nodes
        self._future: Future | None = None
        self._lookups: dict[tuple[str, bool, bool], _Lookup] = {}
        self._unanswering: set[str] = set()  # stores that did not answer when a copy was to be revalidated
        self._opened: OpenFolder | None = None
        self._upkeep: list[asyncio.Task[None]] = []
        self._scrubbing: asyncio.Task[None] | None = None
        self._cursor = (-1, -1)
        self._set_up(origin, scheduler or UnlimitedScheduler(), quotas or {}, Totals())

    def _set_up(
        self, origin: ObjectOrigin, scheduler: FetchScheduler, quotas: Mapping[str, float], totals: Totals
    ) -> None:
        opened = self._opened
        files, index, broken = None, None, lambda: None
        if opened is not None:
            files, index, broken = opened.files, opened.index, opened.mark_broken
        policy = Policy(self.limit_bytes, self._chunk_bytes, quotas, totals)
        policy.future = self._future
        disk = Disk(files, self._call, self._stats, self._clock, self._writers)
        journal = Journal(index, self._call, policy, self._clock, self._wall, totals.next_id, broken)
        self.fetching = ChunkFetcher(origin, scheduler, policy, disk, journal, self._stats, self._nodes)
        self._open_entries = OpenEntries(
            self.fetching, opened, self._chunk_bytes, self._most_idle, self._clock, self._wall
        )

    def configure(self, **settings: float) -> None:
        """Use these `CacheSettings` from now on, for present copies too. Another ``scrub_bytes_per_s`` begins the
        comparison with checksums anew."""
        before, self.settings = self.settings, replace(self.settings, **settings)
        if before.scrub_bytes_per_s != self.settings.scrub_bytes_per_s:
            self._restart_scrub()

    def foresee(self, future: Future) -> None:
        """Evict by ``future`` from now on, which tells when objects are needed next."""
        self._future = self.fetching.policy.future = future

    # -- life

    async def start(self) -> None:
        """Lock and open the folder. ConfigError if another process has it. If it cannot be written, objects are passed
        through, and a warning is logged."""
        if self.folder is None:
            return
        try:
            opened = self._opened = await self._call(open_folder, self.folder)
        except OSError as exn:
            self.fetching.disk.failed(exn, f"opening the cache {self.folder}")
            return
        self._set_up(self.fetching.origin, self.fetching.scheduler, self.quotas, opened.totals)
        self.fetching.start(self.fetching.disk.call(take_out_trash, self.folder))
        work = [self._flush_and_evict()]
        if self._keep_free_bytes > 0:
            await self._check_space(opened.path)
            work.append(self._watch_space(opened.path))
        self._upkeep = [asyncio.get_running_loop().create_task(one) for one in work]
        self._restart_scrub()

    async def close(self) -> None:
        """End fetches, write the index, unlock the folder; idempotent."""
        tasks = [*self._upkeep, *([self._scrubbing] if self._scrubbing is not None else [])]
        self._upkeep, self._scrubbing = [], None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.fetching.close()
        opened, self._opened = self._opened, None
        if opened is not None:
            await self.fetching.journal.flush()
            await self._call(opened.close)
        self._open_entries.close()

    @property
    def opened(self) -> bool:
        """True if this process has the folder now."""
        return self._opened is not None

    async def flush(self) -> None:
        await self.fetching.journal.flush()

    def verify(self, prefix: str = "") -> AsyncIterator[Verified]:
        """Compare every chunk of the objects whose key begins with ``prefix`` as the disk has them, and drop what is
        bad, so that it is fetched again. ConfigError without a folder."""
        return Scrub(self._folder().index, self._open_entries).all(prefix)

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

    @property
    def quotas(self) -> Mapping[str, float]:
        return self.fetching.policy.quotas

    def set_quotas(self, quotas: Mapping[str, float]) -> None:
        """Set the share of the cache that each tenant may hold; tenants above it lose their least recently used
        objects."""
        self.fetching.policy.quotas = dict(quotas)
        self._open_entries.evict(self.fetching.policy.excess())

    def held_by_tenant(self) -> dict[str, int]:
        """Return the bytes of disk that the objects of each tenant take or will take."""
        return self.fetching.policy.by_tenant

    def _folder(self) -> OpenFolder:
        if self._opened is None:
            raise ConfigError("this cache has no folder: nothing lies on a disk")
        return self._opened

    def _restart_scrub(self) -> None:
        if self._scrubbing is not None:
            self._scrubbing.cancel()
            self._scrubbing = None
        if self._opened is not None and self.settings.scrub_bytes_per_s > 0:
            scrub = Scrub(self._opened.index, self._open_entries).forever(self.settings.scrub_bytes_per_s)
            self._scrubbing = asyncio.get_running_loop().create_task(scrub, name="scrub")

    async def _flush_and_evict(self) -> None:
        """Write changes to the index, and enforce the limits, twice a second."""
        policy = self.fetching.policy
        for tick in itertools.count():
            if policy.needs_older_entries:
                await self._load_oldest()
            while excess := policy.excess(quotas=tick % _QUOTAS_EVERY == 0):
                self._open_entries.evict(excess)
                if policy.needs_older_entries:
                    await self._load_oldest()
            await asyncio.sleep(_FLUSH_EVERY_S)
            await self.fetching.journal.flush()

    async def _load_oldest(self) -> None:
        policy, journal = self.fetching.policy, self.fetching.journal
        await journal.flush()
        try:
            rows = await self._call(self._folder().index.oldest, self._cursor, _ROWS_AT_ONCE)
        except sqlite3.Error as exn:
            self._open_entries.index_failed(exn)
            rows = []
        if not rows:
            policy.no_older_entries()
            return
        self._cursor = (rows[-1].last, rows[-1].id)
        policy.add_older((row.id, resident(row)) for row in rows if not journal.is_removed(row.id))

    async def _watch_space(self, folder: Path) -> None:
        while True:
            await asyncio.sleep(_SPACE_EVERY_S)
            await self.fetching.finished()  # or files that are being removed would count
            await self._check_space(folder)

    async def _check_space(self, folder: Path) -> None:
        """Limit what may stay by the file system's free space, and write nothing while there is too little."""
        try:
            self._free_bytes = await self._call(self._free, folder)
        except OSError as exn:
            logger.debug("cache: the free space of %s is not known: %s", folder, exn)
            return
        spare, disk = self._free_bytes - self._keep_free_bytes, self.fetching.disk
        crowded = spare < 0
        self.fetching.policy.make_room(spare - crowded * (self._keep_free_bytes // _MARGIN))
        if crowded != disk.crowded:
            disk.crowded = crowded
            words = "too little: nothing is written, and old objects go" if crowded else "enough again"
            level = logging.WARNING if crowded else logging.INFO
            logger.log(level, "cache: the file system of %s has %d bytes left, of which %d are to be kept free: %s",
                       folder, self._free_bytes, self._keep_free_bytes, words)  # fmt: skip

    # -- lookup

    async def open(
        self, url: str, *, client: Client = NO_CLIENT, key: str = "", start: int | None = 0, insist: bool = False
    ) -> CachedObject:
        """Return a reference to the object, with known facts. Raises the errors of `wds_async.errors`.

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
                entry, stale = await self._shared_lookup(key, url, client, start, insist)
            if not entry.closed:
                return CachedObject(self, entry, client, stale=stale)

    def peek(self, url: str, *, client: Client = NO_CLIENT, key: str = "") -> CachedObject | None:
        """Return the object if it is open in memory and may be served now; without I/O."""
        entry = self._open_entries.get(key or key_of(url))
        if entry is None or entry.file is None or not self._usable(entry, url):
            return None
        return CachedObject(self, entry, client, stale=not self._is_fresh(entry))

    async def _shared_lookup(
        self, key: str, url: str, client: Client, start: int | None, insist: bool
    ) -> tuple[ObjectEntry, bool]:
        """Look an object up, once for all that wait. Return the entry, and whether it is stale."""
        number = 0 if start is None else start // self._chunk_bytes
        forwards = self._nodes is not None and not client.node and bool(self._nodes.candidates(key, number))
        which = key, insist, forwards  # a node must not wait for a lookup at another one
        lookup = self._lookups.get(which)
        if lookup is None or lookup.cancelled or (lookup.task is not None and lookup.task.done()):
            lookup = self._lookups[which] = _Lookup()
            lookup.task = self.fetching.start(self._look_up(lookup, key, url, client, start, insist))
            lookup.task.add_done_callback(functools.partial(self._forget_lookup, which, lookup))
        assert lookup.task is not None
        lookup.waiting += 1
        try:
            return await asyncio.shield(lookup.task)
        finally:
            lookup.waiting -= 1
            lookup.cancel_unwanted()

    def _forget_lookup(self, which: tuple[str, bool, bool], lookup: _Lookup, task: object) -> None:
        if self._lookups.get(which) is lookup:
            del self._lookups[which]

    async def _look_up(
        self, lookup: _Lookup, key: str, url: str, client: Client, start: int | None, insist: bool
    ) -> tuple[ObjectEntry, bool]:
        entry = self._open_entries.get(key) or await self._open_entries.load(key, url)
        if entry is None:
            return await self._discover(lookup, key, url, client, start), False
        if not insist and self._usable(entry, url):
            return entry, not self._is_fresh(entry)
        if_error = not insist and self._may_stand_in(entry, self.settings.stale_if_error_s)
        entry.references += 1  # it stays open
        try:
            with lookup.at_origin():
                if if_error:
                    facts = await self.fetching.origin.facts(url, deadline_s=self.settings.revalidate_timeout_s)
                else:
                    async with self.fetching.scheduler.slot(client, Urgency.DEMAND, url):
                        facts = await self.fetching.origin.facts(url)
        except ShardNotFound:
            self._replaced(entry)
            raise
        except _UNREACHABLE as exn:
            if not if_error:
                raise
            self._unanswered(entry, url, exn)
            return entry, True
        finally:
            entry.references -= 1
            self.fetching.settle(entry)
        return self._answered(entry, url, facts, client.tenant), False

    async def _discover(self, lookup: _Lookup, key: str, url: str, client: Client, start: int | None) -> ObjectEntry:
        """Return a new entry for an object that the cache does not have: its facts, and a chunk with them, the first if
        reading begins there. Another node may give it, and requests any chunk like that."""
        fetching = self.fetching
        async with contextlib.AsyncExitStack() as stack:
            if start is not None and fetching.disk.usable:
                number, of_node = start // self._chunk_bytes, None
                first = number * self._chunk_bytes
                if self._nodes is not None and not client.node:
                    with lookup.at_origin():
                        of_node = await self._from_node(self._nodes, key, url, number, client)
                if of_node is not None:
                    stack.callback(of_node.release)
                    await self._other_lookup(key)
                    return self._opened_with(
                        stack, key, url, client, number, of_node.view, of_node.facts, of_node.age_s
                    )
                if number == 0 or client.node:
                    with contextlib.suppress(Unranged):
                        with lookup.at_origin():
                            async with fetching.scheduler.slot(client, Urgency.DEMAND, url):
                                part = fetching.origin.part(url, first, first + self._chunk_bytes)
                                arrived = await stack.enter_async_context(part)
                        return self._opened_with(stack, key, url, client, number, arrived.view, arrived.facts)
            with lookup.at_origin():
                async with fetching.scheduler.slot(client, Urgency.DEMAND, url):
                    facts = await fetching.origin.facts(url)
            return self._opened_with(stack, key, url, client, 0, memoryview(b""), facts)

    async def _other_lookup(self, key: str) -> None:
        """Wait for a lookup of the same object that another node has caused, or its chunk would be fetched twice. That
        one asks no node, so it waits for none."""
        lookup = self._lookups.get((key, False, False))
        if lookup is not None and lookup.task is not None:
            lookup.waiting += 1
            try:
                await asyncio.wait((lookup.task,))
            finally:
                lookup.waiting -= 1
                lookup.cancel_unwanted()

    async def _from_node(self, nodes: Nodes, key: str, url: str, number: int, client: Client) -> NodePart | None:
        """Return a chunk of an object that this node does not know from the node whose it is, or None."""
        start = number * self._chunk_bytes
        stop = start + self._chunk_bytes
        wanted = ChunkRequest(url, key, number, start, stop, None, client, Urgency.DEMAND)
        for node in nodes.candidates(key, number):
            async with nodes.slot(client, Urgency.DEMAND, node):
                part = await nodes.request(node, wanted)
            if part is not None:
                return part
        return None

    def _opened_with(
        self,
        memory: contextlib.AsyncExitStack,
        key: str,
        url: str,
        client: Client,
        number: int,
        view: memoryview,
        facts: Facts,
        age_s: float = 0.0,
    ) -> ObjectEntry:
        """Return the entry for ``facts``, which came with chunk ``number``, perhaps: ``view``, which is free once
        ``memory`` was closed."""
        entry = self._open_entries.get(key)  # another lookup, of another node or for one, may have been faster
        if entry is None or entry.gone or (entry.facts.version, entry.facts.size) != (facts.version, facts.size):
            entry = self._open_entries.new(key, url, facts, client.tenant)
            entry.checked -= age_s
        chunks = entry.chunks
        came = not entry.in_order and chunks.size and len(view) > 0 and len(view) == chunks.length(number)
        if came and number not in chunks and number not in entry.fetches:
            if not chunks.numbers() and not entry.fetches:
                entry.discovered = number
            self.fetching.first_chunk(entry, number, client, view, memory.pop_all())
        return self._open_entries.put(entry)

    def age_s(self, entry: ObjectEntry) -> float:
        """Return how long ago the version of ``entry`` was confirmed, in seconds."""
        return self._clock() - entry.checked

    # -- freshness

    def _is_fresh(self, entry: ObjectEntry) -> bool:
        return self._clock() - entry.checked < self.settings.freshness_s and not entry.closed

    def _may_stand_in(self, entry: ObjectEntry, within_s: float) -> bool:
        """Return whether a copy may be served without its origin's answer: it is whole, and stale for no longer than
        ``within_s``."""
        if self.settings.freshness_s <= 0 or entry.closed or not entry.chunks.whole:
            return False
        return self._clock() - entry.checked - self.settings.freshness_s <= within_s

    def _usable(self, entry: ObjectEntry, url: str) -> bool:
        """Return whether a copy may be served at once; revalidate it in the background if its freshness has lapsed."""
        if self._is_fresh(entry):
            return True
        pinned = pins_version(entry.facts.version) and math.isfinite(entry.checked)
        waits = self._clock() < entry.ask_again_at
        if not (pinned and self._may_stand_in(entry, self.settings.stale_while_revalidate_s)):
            down = waits or not self.fetching.origin.reachable(url)
            if not (down and self._may_stand_in(entry, self.settings.stale_if_error_s)):
                return False
        if not waits and not entry.revalidating:
            entry.revalidating = True
            self.fetching.start(self._revalidate(entry, url))
        return True

    async def _revalidate(self, entry: ObjectEntry, url: str) -> None:
        entry.references += 1  # it stays open
        try:
            facts = await self.fetching.origin.facts(url, deadline_s=self.settings.revalidate_timeout_s)
        except ShardNotFound:
            self._replaced(entry)
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
        self._mark_store(url, answers=True)
        same = facts.version == entry.facts.version and facts.size in (None, entry.facts.size)
        if same and pins_version(facts.version) and not entry.gone:
            self._stats.unchanged += 1
            entry.url, entry.checked, entry.ask_again_at = url, self._clock(), float("-inf")
            self.fetching.journal.used(entry)
            return entry
        self._replaced(entry)
        return self._open_entries.put(self._open_entries.new(entry.key, url, facts, tenant))

    def _replaced(self, entry: ObjectEntry) -> None:
        self._stats.changed += 1
        self._open_entries.discard(entry)

    def _unanswered(self, entry: ObjectEntry, url: str, exn: WdsError) -> None:
        """Note that the origin of a copy did not answer, and ask it again only after a while."""
        self._stats.unanswered += 1
        entry.ask_again_at = self._clock() + min(self.settings.freshness_s, _ASK_AGAIN_S)
        if self._mark_store(url, answers=False):
            logger.warning("cache: %s: its origin does not answer, and copies are served: %s", redact(url), exn)

    def _mark_store(self, url: str, *, answers: bool) -> bool:
        """Note whether the store of ``url`` answers; True if that is new."""
        store = "/".join(url.split("/", 3)[:3])
        if answers != (store in self._unanswering):
            return False
        if answers:
            self._unanswering.discard(store)
            logger.info("cache: %s answers again", redact(store))
        else:
            self._unanswering.add(store)
        return True

    # -- counters

    def remove(self, key: str) -> bool:
        """Forget an object that is in memory, and return whether there was one. Its readers read on."""
        entry = self._open_entries.get(key)
        if entry is not None:
            self._open_entries.discard(entry)
        return entry is not None

    def statistics(self) -> CacheStats:
        policy = self.fetching.policy
        return replace(
            self._stats,
            evictions=policy.evictions,
            evicted_bytes=policy.evicted_bytes,
            entries=policy.entries,
            bytes=policy.resident_bytes + policy.probation.bytes,
            limit_bytes=self.limit_bytes,
            keep_free_bytes=self._keep_free_bytes,
            free_bytes=self._free_bytes,
            probation_bytes=policy.probation.bytes,
            readers=self._open_entries.readers,
        )
