"""One object of the cache, its readers and running fetches, and the counters of the cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.service.cache.disk import DataFile
from wds_async.service.cache.index import Chunks, IndexRow
from wds_async.service.cache.origin import Client, Nodes, Urgency
from wds_async.service.cache.policy import Resident
from wds_async.storage.base import Checksum
from wds_async.transfer.ranges import Facts

__all__ = ["BLOCK", "CacheStats", "ChunkFetch", "ObjectEntry", "ObjectReader", "StreamFetch", "cost", "facts_of_row",
           "resident"]  # fmt: skip

BLOCK = 4096  # disks allocate files in multiples of this


def cost(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


@dataclass(eq=False, slots=True)
class ObjectReader:
    """A reader or prefetcher of a range, which needs chunks ``[first, until)`` soon and has ``started`` to fetch
    some."""

    client: Client
    urgency: Urgency
    first: int = 0
    until: int = 0
    started: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class ChunkFetch:
    """One chunk that is being fetched and stored, or verified.

    ``readers`` want it now or soon; ``holders`` wait for its bytes or use them. ``result``: None if the chunk is on
    disk, else its bytes in memory, valid for a holder until `release`. ``stored``: whether it is on disk in the end.
    """

    number: int
    urgency: Urgency
    client: Client
    result: asyncio.Future[memoryview | None] = field(default_factory=asyncio.Future)
    stored: asyncio.Future[bool] = field(default_factory=asyncio.Future)
    readers: set[ObjectReader] = field(default_factory=set)
    holders: set[ObjectReader] = field(default_factory=set)
    served_bytes: int = 0  # bytes of it that readers took from memory
    read_through: bool = False  # whether a reader took it from memory to its end
    begun: bool = False  # whether the request was sent: then it goes on for a while without readers
    forwarded: bool = False  # whether another node was asked for it, and has not answered
    arrived: bool = False
    slot: Any = None
    task: asyncio.Task[None] | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last reader or the last holder has left

    @property
    def for_node(self) -> bool:
        """True if another node waits for it: it is fetched from the store."""
        return self.client.node or any(reader.client.node for reader in self.readers)

    def join(self, reader: ObjectReader, urgency: Urgency) -> None:
        """Add a reader; a more urgent one hastens the fetch."""
        self.readers.add(reader)
        if urgency < self.urgency:
            self.urgency = urgency
            if hasattr(self.slot, "hasten"):
                self.slot.hasten(urgency, reader.client)

    def release(self, reader: ObjectReader) -> None:
        """Note that ``reader`` does not use the bytes in memory any more."""
        self.holders.discard(reader)
        if not self.holders:
            self.left.set()

    def leave(self, reader: ObjectReader) -> bool:
        """Remove a reader. Cancel a fetch without readers that has not begun, and return whether it was."""
        self.readers.discard(reader)
        self.release(reader)
        if self.readers:
            return False
        self.left.set()
        return not self.begun and self.task is not None and self.task.cancel()

    def fail(self, exn: Exception) -> None:
        """End without a result, unless there is one already."""
        if not self.result.done():
            self.result.set_exception(exn)
            self.result.exception()  # read-ahead may have no waiter


@dataclass(eq=False, slots=True)
class StreamFetch:
    """An object that is being read from start to end into its file; chunk ``next`` is written next."""

    next: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a reader has moved on: there may be room for the next chunk."""
    progress: asyncio.Condition = field(default_factory=asyncio.Condition)
    ended: bool = False
    error: Exception | None = None
    task: asyncio.Task[None] | None = None

    async def past(self, number: int) -> None:
        """Wait until chunk ``number`` was written or the object has ended. Raise the origin's error."""
        async with self.progress:
            await self.progress.wait_for(lambda: self.next > number or self.ended)
        if self.error is not None and self.next <= number:
            raise self.error


@dataclass(eq=False, slots=True)
class ObjectEntry:
    """An object as it is (or was) at its origin. ``gone``: it is no longer in the cache; its readers read on, and
    nothing more is written."""

    id: int
    key: str
    url: str
    facts: Facts
    tenant: str
    chunks: Chunks
    file: DataFile | None = None
    indexed: Resident | None = None  # its row of the index, until the policy has it
    checked: float = 0.0  # when its version was last confirmed, by the cache's clock
    ask_again_at: float = float("-inf")  # when its origin, which did not answer, is asked again
    revalidating: bool = False
    references: int = 0
    readers: list[ObjectReader] = field(default_factory=list)
    fetches: dict[int, ChunkFetch] = field(default_factory=dict)
    punching: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    stream: StreamFetch | None = None
    creating: asyncio.Lock = field(default_factory=asyncio.Lock)
    discovered: int = -1  # the chunk that came with its facts and is not charged to a reader yet; -1: none
    gone: bool = False
    closed: bool = False
    removed: bool = False  # whether its file was, or is being, removed

    @property
    def in_order(self) -> bool:
        """True if it can only be read from its beginning: it has no ranges, or nothing pins their version."""
        return not self.facts.ranged or self.facts.size is None or not self.facts.version

    @property
    def busy(self) -> bool:
        return bool(self.references or self.fetches or self.readers or self.punching or self.stream)

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk that all of it takes; 0 if its size is unknown."""
        chunks = self.chunks
        if not chunks.size:
            return 0
        last = -(-chunks.size // chunks.chunk_bytes) - 1
        return last * cost(chunks.chunk_bytes) + cost(chunks.length(last))

    def disk_bytes_with(self, start: int, stop: int) -> int:
        """Return the bytes of disk of its present chunks and of bytes ``[start, stop)``."""
        numbers = {*self.chunks.numbers(), *self.chunks.over(start, stop)}
        return sum(cost(self.chunks.length(number)) for number in numbers)

    @property
    def held(self) -> int:
        """Bytes of disk of its chunks that stay."""
        chunks = self.chunks
        return sum(cost(chunks.length(n)) for n in chunks.numbers() if n not in chunks.on_probation)

    def owned_numbers(self, nodes: Nodes | None) -> Sequence[int]:
        """Return the numbers of its chunks that are this node's; its size is known."""
        count = self.chunks.count or 0
        return range(count) if nodes is None else nodes.owned(self.key, count)

    def needed(self, number: int) -> bool:
        """Return whether a reader needs this chunk soon, or holds its bytes."""
        return number in self.fetches or any(reader.first <= number < reader.until for reader in self.readers)

    def ended(self, size: int) -> None:
        """Set the size of an object that was read in order to its end."""
        self.chunks.size = size
        self.facts = replace(self.facts, size=size, ranged=False)

    def row(self, checked: float, used: float, last: int) -> IndexRow:
        """Return its row of the index; ``checked`` and ``used`` in seconds since 1970."""
        facts, checksum = self.facts, self.facts.checksum
        packed = None if checksum is None else [checksum.algorithm, checksum.digest.hex(), checksum.source]
        text = json.dumps({"fields": dict(facts.fields), "checksum": packed}, separators=(",", ":"), sort_keys=True)
        return IndexRow(
            self.id, self.key, self.tenant, facts.version, facts.size, facts.ranged, text, checked, used, last,
            self.held,
        )  # fmt: skip


def facts_of_row(row: IndexRow) -> Facts:
    """Return the facts of a row of the index. ValueError (or KeyError, TypeError) if it is damaged."""
    packed = json.loads(row.facts)
    checksum = packed["checksum"]
    if checksum is not None:
        checksum = Checksum(checksum[0], bytes.fromhex(checksum[1]), checksum[2])
    return Facts(row.size, row.identity, dict(packed["fields"]), checksum, bool(row.ranged))


def resident(row: IndexRow) -> Resident:
    """Return what the policy needs of a row of the index."""
    return Resident(row.key, row.tenant, row.last, row.held, row.held, row.size or row.held)


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; from ``entries`` on, present values."""

    hit_bytes: int = 0  # served without a fetch of the reader's own: from the cache, or by sharing another's fetch
    miss_bytes: int = 0  # served to the reader for which they were fetched
    ahead_bytes: int = 0  # of hit_bytes: prefetched by a plan, and served for the first time
    hits: int = 0  # reads of which nothing had to be fetched
    misses: int = 0
    coalesced: int = 0  # chunks that one reader waited for and another's fetch brought
    evictions: int = 0
    evicted_bytes: int = 0
    verified: int = 0  # chunks of an earlier process that matched their checksum
    bad_chunks: int = 0  # chunks on disk that did not match their checksum; they were dropped, to be fetched again
    distrusted: int = 0  # copies of which a read came short or failed, here or at a client that has the file
    scrubbed_bytes: int = 0  # read in the background and compared with their checksums
    disk_errors: int = 0
    passed_bytes: int = 0  # served from memory, not through the disk
    stale: int = 0  # served from a whole copy whose freshness had lapsed, without its origin's answer
    unchanged: int = 0  # revalidations that confirmed the copy
    changed: int = 0  # revalidations that found another version, one that nothing pins, or none
    unanswered: int = 0  # revalidations that the origin did not answer in time
    entries: int = 0
    bytes: int = 0  # on disk, probation included
    limit_bytes: int = 0
    keep_free_bytes: int = 0
    free_bytes: int = 0  # of the file system, as far as it is watched
    probation_bytes: int = 0
    readers: int = 0
    by_tenant: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """``hit_bytes``, ``miss_bytes`` and ``ahead_bytes`` of each tenant."""

    def count_served(self, tenant: str, *, hit: int = 0, miss: int = 0, ahead: int = 0) -> None:
        """Count bytes served to a reader of ``tenant``; those ``ahead`` are among the hits."""
        self.hit_bytes += hit
        self.miss_bytes += miss
        self.ahead_bytes += ahead
        before = self.by_tenant.get(tenant, (0, 0, 0))
        self.by_tenant[tenant] = before[0] + hit, before[1] + miss, before[2] + ahead
