"""Objects that can be read in order only, or whose ranges nobody could tell apart: read once, written down, and read
behind that by whoever wants them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wds_async.errors import ObjectChanged
from wds_async.redact import redact
from wds_async.service.cache.chunks import Chunks
from wds_async.service.cache.disk import DataFile, OpenFolder
from wds_async.service.cache.fetching import Fetching
from wds_async.service.cache.index import Row
from wds_async.service.cache.origin import Client, Urgency
from wds_async.service.cache.policy import Resident
from wds_async.storage.base import Checksum
from wds_async.transfer.ranges import Facts

if TYPE_CHECKING:
    pass

__all__ = [
    "BLOCK",
    "Entry",
    "Flight",
    "Reader",
    "Shelf",
    "StreamFlight",
    "begin_stream",
    "cost",
    "facts_from",
    "facts_to",
    "passed_stream",
    "resident",
]


class StreamFlight:
    """One object that is being read from its start to its end into its file."""

    def __init__(self, entry: Entry, fetching: Fetching) -> None:
        self.next = 0
        """The chunk that comes next."""
        self.moved = asyncio.Event()
        """Set when a reader, or the room that it waits for, has moved."""
        self.progress = asyncio.Condition()
        self.ended = False
        self.lost = False
        """Whether it was given up because the disk has no place for it: readers go on by themselves."""
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        self._entry = entry
        self._fetching = fetching

    async def run(self) -> None:
        """Read all of it."""
        try:
            await self._read()
        except asyncio.CancelledError:
            self.lost = True
            raise
        except Exception as exn:
            self.error = exn
        finally:
            self.ended = True
            self._entry.stream = None
            async with self.progress:
                self.progress.notify_all()
            self._fetching.settle(self._entry)

    async def past(self, number: int) -> None:
        """Wait until chunk ``number`` was written, or the object has ended. Raises what the origin raised."""
        async with self.progress:
            await self.progress.wait_for(lambda: self.next > number or self.ended)
        if self.error is not None and self.next <= number:
            raise self.error

    async def _read(self) -> None:
        entry = self._entry
        buffer, filled = memoryview(bytearray(entry.chunks.chunk_bytes)), 0
        async with self._fetching.origin.stream(entry.url) as (facts, views):
            if facts.version != entry.facts.version:
                entry.checked = float("-inf")
                raise _changed(entry, facts.version)
            async for view in views:
                while len(view):
                    count = min(len(view), len(buffer) - filled)
                    buffer[filled : filled + count] = view[:count]
                    filled, view = filled + count, view[count:]  # noqa: PLW2901 (what is left of it)
                    if filled == len(buffer):
                        if not await self._write(buffer):
                            return
                        filled = 0
        size = self.next * len(buffer) + filled
        if filled and not await self._write(buffer[:filled], size):
            return
        entry.ended(size)
        self._fetching.journal.used(entry)

    async def _write(self, data: memoryview, size: int | None = None) -> bool:
        """Write the next chunk; where there is no room, as soon as readers have moved on. False: it was lost."""
        entry, fetching = self._entry, self._fetching
        if size is not None:
            entry.chunks.size = size
        while True:
            self.moved.clear()
            if await fetching.keep(entry, self.next, data, wanted=True):
                break
            waited_for = any(reader.first >= self.next for reader in entry.readers)
            if waited_for or entry.gone or not fetching.disk.usable:
                entry.chunks.size = entry.facts.size
                self.lost = True
                return False
            await self.moved.wait()
        async with self.progress:
            self.next += 1
            self.progress.notify_all()
        return True


def begin_stream(entry: Entry, fetching: Fetching) -> StreamFlight:
    """Begin to read the object into its file."""
    flight = entry.stream = StreamFlight(entry, fetching)
    flight.task = fetching.start(flight.run())
    return flight


async def passed_stream(
    entry: Entry, fetching: Fetching, reader: Reader, start: int
) -> AsyncGenerator[memoryview, None]:
    """The object from ``start`` on, past the disk: a read of its own."""
    async with fetching.turns.turn(reader.client, Urgency.DEMAND, entry.url):
        pass
    at = 0
    async with fetching.origin.stream(entry.url) as (facts, views):
        if facts.version != entry.facts.version:
            entry.checked = float("-inf")
            raise _changed(entry, facts.version)
        async for view in views:
            skipped, at = max(0, start - at), at + len(view)
            if skipped < len(view):
                yield view[skipped:]


def _changed(entry: Entry, now: str) -> ObjectChanged:
    url = redact(entry.url)
    was = entry.facts.version
    return ObjectChanged(f"{url}: it was replaced: {was!r} was opened, {now!r} is there now. Open it again.").at(url, 0)


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
        return not self.facts.ranged or self.facts.size is None or not self.facts.version

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
            self.id, self.key, self.tenant, facts.version, facts.size, facts.ranged, facts_to(facts), checked, used,
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
