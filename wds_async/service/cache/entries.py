"""One object of the cache, its readers and its running fetches, and the counters of the cache."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.service.cache.disk import DataFile
from wds_async.service.cache.index import Chunks, IndexRow
from wds_async.service.cache.origin import Client, Urgency
from wds_async.service.cache.policy import Resident
from wds_async.storage.base import Checksum
from wds_async.transfer.ranges import Facts

__all__ = [
    "BLOCK",
    "CacheStats",
    "ChunkFetch",
    "ObjectEntry",
    "ObjectReader",
    "StreamFetch",
    "cost",
    "facts_from",
    "facts_to",
    "resident",
]


BLOCK = 4096
"""What a file takes of a disk is a multiple of this."""


def cost(count: int) -> int:
    """Return the bytes of disk that ``count`` bytes take."""
    return -(-count // BLOCK) * BLOCK


@dataclass(eq=False, slots=True)
class ObjectReader:
    """A reader or prefetcher of a range. Chunks ``[first, until)`` are needed soon."""

    client: Client
    urgency: Urgency
    first: int = 0
    until: int = 0
    started: set[int] = field(default_factory=set)
    """Chunks whose fetch it began."""


class ChunkFetch:
    """One chunk that is being fetched and stored, or compared.

    ``readers`` want it, now or soon; ``holders`` wait for its bytes, or have them in hand. ``result`` is None if it
    lies on disk, else its bytes in memory, which are valid for a holder until `release`.
    """

    def __init__(self, number: int, urgency: Urgency, client: Client) -> None:
        self.number = number
        self.urgency = urgency
        self.client = client
        self.result: asyncio.Future[memoryview | None] = asyncio.get_running_loop().create_future()
        self.stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it lies on disk, once that is decided."""
        self.readers: set[ObjectReader] = set()
        self.holders: set[ObjectReader] = set()
        self.given_bytes = 0
        """Bytes of it that readers took from memory."""
        self.read_through = False
        """Whether a reader has taken it from memory to its end."""
        self.begun = False
        """Whether the request was sent: then it goes on for a while without readers."""
        self.arrived = False
        """Whether its bytes have come."""
        self.slot: Any = None
        self.task: asyncio.Task[None] | None = None
        self.left = asyncio.Event()
        """Set when the last reader, or the last holder, has left."""

    def join(self, reader: ObjectReader, urgency: Urgency) -> None:
        """Add a reader of this chunk; a more urgent one makes it come sooner."""
        self.readers.add(reader)
        if urgency < self.urgency:
            self.urgency = urgency
            if self.slot is not None and hasattr(self.slot, "hasten"):
                self.slot.hasten(urgency, reader.client)

    def release(self, reader: ObjectReader) -> None:
        """Note that ``reader`` does not use its bytes in memory any more."""
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
        if self.begun or self.task is None:
            return False
        self.task.cancel()
        return True


class StreamFetch:
    """The state of one object that is read from its start to its end into its file."""

    def __init__(self) -> None:
        self.next = 0
        """Number of the chunk that is written next."""
        self.moved = asyncio.Event()
        """Set when a reader has moved on: there may be room for the next chunk."""
        self.progress = asyncio.Condition()
        self.ended = False
        self.lost = False
        """Whether it was given up because the disk has no room: readers read on by themselves."""
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None

    async def past(self, number: int) -> None:
        """Wait until chunk ``number`` was written, or the object has ended. Raises what the origin raised."""
        async with self.progress:
            await self.progress.wait_for(lambda: self.next > number or self.ended)
        if self.error is not None and self.next <= number:
            raise self.error


class ObjectEntry:
    """An object as it is (or was) at its origin. ``gone``: it is no longer in the cache; those that have it open read
    on, and nothing more is written for it."""

    def __init__(self, number: int, key: str, url: str, facts: Facts, tenant: str, chunk_bytes: int) -> None:
        self.id = number
        self.key = key
        self.url = url
        self.facts = facts
        self.tenant = tenant
        self.chunks = Chunks(facts.size, chunk_bytes)
        self.file: DataFile | None = None
        self.before: Resident | None = None
        """Its row of the index, until the policy has it."""
        self.checked = 0.0
        """When its version was last confirmed, by the cache's clock."""
        self.ask_again_at = float("-inf")
        """Until then its origin, which did not answer, is left alone."""
        self.revalidating = False
        """Whether it is revalidated in the background."""
        self.references = 0
        self.readers: list[ObjectReader] = []
        self.flights: dict[int, ChunkFetch] = {}
        self.punching: dict[int, asyncio.Future[None]] = {}
        self.stream: StreamFetch | None = None
        self.creating = asyncio.Lock()
        self.discovered = False
        """Whether its first chunk came with its facts, and no reader has been charged for it yet."""
        self.gone = False
        self.closed = False
        self.removed = False
        """Whether its file was, or is being, removed."""

    @property
    def in_order(self) -> bool:
        """Whether it is read from its beginning, once: it has no ranges, or nothing tells whether they belong to the
        same version."""
        return not self.facts.ranged or self.facts.size is None or not self.facts.version

    @property
    def busy(self) -> bool:
        """Whether its file is being read or written."""
        return bool(self.references or self.flights or self.readers or self.punching or self.stream)

    @property
    def worth(self) -> int:
        """Bytes of disk that all of it takes; 0 if its size is unknown."""
        chunks = self.chunks
        if not chunks.size:
            return 0
        last = -(-chunks.size // chunks.chunk_bytes) - 1
        return last * cost(chunks.chunk_bytes) + cost(chunks.length(last))

    def worth_of(self, start: int, stop: int) -> int:
        """Return the bytes of disk of its present chunks and of bytes ``[start, stop)``."""
        numbers = {*self.chunks.numbers(), *self.chunks.over(start, stop)}
        return sum(cost(self.chunks.length(number)) for number in numbers)

    @property
    def held(self) -> int:
        """Bytes of disk that its chunks take which stay."""
        chunks = self.chunks
        return sum(cost(chunks.length(n)) for n in chunks.numbers() if n not in chunks.on_probation)

    def needed(self, number: int) -> bool:
        """Return whether a reader needs this chunk soon, or holds its bytes."""
        return number in self.flights or any(reader.first <= number < reader.until for reader in self.readers)

    def ended(self, size: int) -> None:
        """Set the size of an object that was read in order to its end."""
        self.chunks.size = size
        self.facts = replace(self.facts, size=size, ranged=False)

    def row(self, checked: float, used: float, last: int) -> IndexRow:
        """Return its row of the index; ``checked`` and ``used`` in seconds since 1970."""
        facts = self.facts
        return IndexRow(
            self.id, self.key, self.tenant, facts.version, facts.size, facts.ranged, facts_to(facts), checked, used,
            last, self.held,
        )  # fmt: skip


def facts_to(facts: Facts) -> str:
    """Return an object's facts besides version and size as JSON for the index."""
    checksum = facts.checksum
    packed = None if checksum is None else [checksum.algorithm, checksum.digest.hex(), checksum.source]
    return json.dumps({"fields": dict(facts.fields), "checksum": packed}, separators=(",", ":"), sort_keys=True)


def facts_from(row: IndexRow) -> Facts:
    """Return the facts of a row of the index. ValueError (or KeyError, TypeError) if `facts_to` did not write it."""
    packed = json.loads(row.facts)
    checksum_fields = packed["checksum"]
    checksum = (
        None
        if checksum_fields is None
        else Checksum(checksum_fields[0], bytes.fromhex(checksum_fields[1]), checksum_fields[2])
    )
    return Facts(row.size, row.identity, dict(packed["fields"]), checksum, row.ranged)


def resident(row: IndexRow) -> Resident:
    """Return what the policy needs of a row of the index."""
    return Resident(row.key, row.tenant, row.last, row.held, row.held, row.size or row.held)


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, but for those from ``entries`` on, which are as it is now."""

    hit_bytes: int = 0
    """Given to readers that did not make the cache fetch them: they were there, or another's fetch was shared."""
    miss_bytes: int = 0
    """Given to the reader for which they were fetched."""
    ahead_bytes: int = 0
    """Of ``hit_bytes``: fetched for a plan, and given for the first time. The rest was in the cache, or shared."""
    hits: int = 0
    """Reads of which nothing had to be fetched."""
    misses: int = 0
    coalesced: int = 0
    """Chunks that a reader waited for and another's fetch brought."""
    evictions: int = 0
    evicted_bytes: int = 0
    verified: int = 0
    """Chunks from before that were compared with their checksum, and were good."""
    bad_chunks: int = 0
    """Chunks on disk that were not what was written; they were dropped, to be fetched again."""
    distrusted: int = 0
    """Copies of which a read came short or failed, here or at a client that had been handed the file."""
    scrubbed_bytes: int = 0
    """Read in the background and compared with their checksums."""
    disk_errors: int = 0
    passed_bytes: int = 0
    """Given to readers from memory: not through the disk."""
    stale: int = 0
    """Opened from a whole copy whose freshness had lapsed, before or without an answer of its origin."""
    unchanged: int = 0
    """Copies whose freshness had lapsed, and which their origin still had."""
    changed: int = 0
    """The same, but another version (or one that nothing pins) was there, or none any more."""
    unanswered: int = 0
    """The same, but the origin did not answer in time, or is known to be down."""
    entries: int = 0
    bytes: int = 0
    """On disk, those on probation too."""
    limit_bytes: int = 0
    keep_free_bytes: int = 0
    free_bytes: int = 0
    """Of the file system, as far as it is watched."""
    probation_bytes: int = 0
    readers: int = 0
    by_tenant: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """``hit_bytes``, ``miss_bytes`` and ``ahead_bytes`` of each tenant."""

    def given(self, tenant: str, *, hit: int = 0, miss: int = 0, ahead: int = 0) -> None:
        """Count bytes that were given to a reader of ``tenant``; those ``ahead`` are among the hits."""
        self.hit_bytes += hit
        self.miss_bytes += miss
        self.ahead_bytes += ahead
        before = self.by_tenant.get(tenant, (0, 0, 0))
        self.by_tenant[tenant] = before[0] + hit, before[1] + miss, before[2] + ahead
