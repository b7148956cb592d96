"""One object in the cache: its facts, its chunks, its file, who reads it, what is on its way. State, no I/O."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wds_async.chunkcache.chunks import Chunks
from wds_async.chunkcache.files import DataFile
from wds_async.chunkcache.index import Row
from wds_async.chunkcache.origin import Client, Urgency
from wds_async.chunkcache.policy import Resident
from wds_async.storage.base import Checksum
from wds_async.transfer.ranges import Facts

if TYPE_CHECKING:
    from wds_async.chunkcache.streaming import StreamFlight

__all__ = ["BLOCK", "Entry", "Flight", "Reader", "cost", "facts_from", "facts_to"]

BLOCK = 4096
"""What a file takes of a disk is a multiple of this."""


def cost(count: int) -> int:
    """Bytes of disk for so many bytes."""
    return -(-count // BLOCK) * BLOCK


@dataclass(eq=False, slots=True)
class Reader:
    """Somebody who reads a range, or fetches it for later. Chunks ``[first, until)`` are needed soon."""

    client: Client
    urgency: Urgency
    first: int = 0
    until: int = 0
    started: set[int] = field(default_factory=set)
    """Chunks whose fetch it began."""


class Flight:
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
        self.readers: set[Reader] = set()
        self.holders: set[Reader] = set()
        self.given_bytes = 0
        """Bytes of it that readers took from memory."""
        self.read_through = False
        """Whether a reader has taken it from memory to its end."""
        self.begun = False
        """Whether the origin was asked: then it goes on for a while, whoever leaves."""
        self.arrived = False
        """Whether its bytes have come."""
        self.turn: Any = None
        self.task: asyncio.Task[None] | None = None
        self.left = asyncio.Event()
        """Set when the last reader, or the last holder, has left."""

    def join(self, reader: Reader, urgency: Urgency) -> None:
        """``reader`` wants this chunk too; where it is more urgent to it, it comes sooner."""
        self.readers.add(reader)
        if urgency < self.urgency:
            self.urgency = urgency
            if self.turn is not None and hasattr(self.turn, "hasten"):
                self.turn.hasten(urgency, reader.client)

    def release(self, reader: Reader) -> None:
        """``reader`` has no use for its bytes in memory any more."""
        self.holders.discard(reader)
        if not self.holders:
            self.left.set()

    def leave(self, reader: Reader) -> bool:
        """It does not any more. Whether this fetch is given up: nobody wants it, and it has not begun."""
        self.readers.discard(reader)
        self.release(reader)
        if self.readers:
            return False
        self.left.set()
        if self.begun or self.task is None:
            return False
        self.task.cancel()
        return True


class Entry:
    """An object as it is (or was) at its origin. ``gone``: it is in the cache no more, and is read by those that have
    it open; nothing is written for it any more."""

    def __init__(self, number: int, key: str, url: str, facts: Facts, tenant: str, chunk_bytes: int) -> None:
        self.id = number
        self.key = key
        self.url = url
        self.facts = facts
        self.tenant = tenant
        self.chunks = Chunks(facts.size, chunk_bytes)
        self.file: DataFile | None = None
        self.before: Resident | None = None
        """What the index says, until the policy was told."""
        self.checked = 0.0
        """When its identity was last asked for, by the cache's clock."""
        self.ask_again_at = float("-inf")
        """Until then its origin, which did not answer, is not asked again."""
        self.revalidating = False
        """Whether its origin is being asked while it is served."""
        self.references = 0
        self.readers: list[Reader] = []
        self.flights: dict[int, Flight] = {}
        self.punching: dict[int, asyncio.Future[None]] = {}
        self.stream: StreamFlight | None = None
        self.creating = asyncio.Lock()
        self.discovered = False
        """Whether its first chunk came with its facts, and no reader has been charged for it yet."""
        self.gone = False
        self.closed = False
        self.removed = False
        """Whether its file was, or is being, removed."""

    @property
    def in_order(self) -> bool:
        """Whether it is read from its beginning, once: ranges of it cannot be had, or nobody could tell whether they
        are of the same object."""
        return not self.facts.ranged or self.facts.size is None or not self.facts.identity

    @property
    def busy(self) -> bool:
        """Whether anybody reads or writes its file."""
        return bool(self.references or self.flights or self.readers or self.punching or self.stream)

    @property
    def worth(self) -> int:
        """Bytes of disk that all of it takes; 0 where its size is not known."""
        chunks = self.chunks
        if not chunks.size:
            return 0
        last = -(-chunks.size // chunks.chunk_bytes) - 1
        return last * cost(chunks.chunk_bytes) + cost(chunks.length(last))

    def worth_of(self, start: int, stop: int) -> int:
        """Bytes of disk of what is there, and of bytes ``[start, stop)``."""
        numbers = {*self.chunks.numbers(), *self.chunks.over(start, stop)}
        return sum(cost(self.chunks.length(number)) for number in numbers)

    @property
    def held(self) -> int:
        """Bytes of disk that its chunks take which stay."""
        chunks = self.chunks
        return sum(cost(chunks.length(n)) for n in chunks.numbers() if n not in chunks.passing)

    def needed(self, number: int) -> bool:
        """Whether a reader needs this chunk soon, or has it in hand."""
        return number in self.flights or any(reader.first <= number < reader.until for reader in self.readers)

    def ended(self, size: int) -> None:
        """It was read in order to its end, and its size is known."""
        self.chunks.size = size
        self.facts = replace(self.facts, size=size, ranged=False)

    def row(self, checked: float, used: float, last: int) -> Row:
        """For the index; ``checked`` and ``used`` in seconds since 1970."""
        facts = self.facts
        return Row(
            self.id, self.key, self.tenant, facts.identity, facts.size, facts.ranged, facts_to(facts), checked, used,
            last, self.held,
        )  # fmt: skip


def facts_to(facts: Facts) -> str:
    """What the index keeps of an object's facts beside its identity and size."""
    checksum = facts.checksum
    said = None if checksum is None else [checksum.algorithm, checksum.digest.hex(), checksum.source]
    return json.dumps({"fields": dict(facts.fields), "checksum": said}, separators=(",", ":"), sort_keys=True)


def facts_from(row: Row) -> Facts:
    """The facts of a row of the index. ValueError (or KeyError, TypeError) for what `facts_to` did not write."""
    given = json.loads(row.facts)
    said = given["checksum"]
    checksum = None if said is None else Checksum(said[0], bytes.fromhex(said[1]), said[2])
    return Facts(row.size, row.identity, dict(given["fields"]), checksum, row.ranged)
