"""Chunks on their way into the cache: one fetch of each, however many readers want it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from wds_async.chunkcache.disk import Disk
from wds_async.chunkcache.entries import Entry, Flight, Reader, cost
from wds_async.chunkcache.journal import Journal
from wds_async.chunkcache.origin import Client, Origin, Turns, Urgency
from wds_async.chunkcache.policy import Policy
from wds_async.chunkcache.stats import CacheStats
from wds_async.chunkcache.transit import Chunk
from wds_async.errors import ObjectChanged, ReaderClosed, TransferError
from wds_async.redact import redact
from wds_async.transfer.ranges import Unranged

__all__ = ["Fetching"]

_UNWANTED_S = 2.0
"""How long a chunk that is under way, and that nobody wants any more, may take: it has cost a request already."""
_LOOK_EVERY_S = 0.2
_AHEAD_ENTRIES = 100_000
_LARGE = 8
"""Room is made for all of an object of which a range is read, unless it is larger than this fraction of the cache."""


class Fetching:
    """What the readers of one cache share. ``entries``: those in memory, by number. ``settle`` is called when somebody
    has let go of an entry, ``remove`` with the numbers of those that were evicted."""

    def __init__(
        self, origin: Origin, turns: Turns, policy: Policy, disk: Disk, journal: Journal, stats: CacheStats
    ) -> None:
        self.origin = origin
        self.turns = turns
        self.policy = policy
        self.disk = disk
        self.journal = journal
        self.stats = stats
        self.entries: dict[int, Entry] = {}
        self.settle: Callable[[Entry], None] = lambda entry: None
        self.remove: Callable[[Iterable[int]], None] = lambda numbers: None
        self._ahead: dict[int, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finishing: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it beside the readers, until `close` at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def finish(self, work: Coroutine[Any, Any, Any]) -> None:
        """The same, but `close` waits for it: it takes no time, and what it leaves undone would lie around."""
        task = asyncio.get_running_loop().create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def close(self) -> None:
        """End all that is on its way."""
        while self._tasks or self._finishing:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait([*self._tasks, *self._finishing])

    async def quiet(self) -> None:
        """Wait until nothing is on its way any more."""
        while self._tasks or self._finishing:
            await asyncio.wait([*self._tasks, *self._finishing])

    async def finished(self) -> None:
        """Wait until what `finish` runs now is over: files that are being removed are gone."""
        if self._finishing:
            await asyncio.wait([*self._finishing])

    # -- readers

    def enter(self, entry: Entry, reader: Reader, start: int, stop: int | None) -> None:
        """``reader`` begins to read bytes ``[start, stop)`` of the entry."""
        before, entry.before = entry.before, None
        if not entry.gone:
            expected = entry.worth
            if expected > self.policy.room_bytes // _LARGE and not entry.chunks.settled and stop is not None:
                expected = entry.worth_of(start, stop)
            admission = self.policy.begin(
                entry.id, before, entry.key, entry.tenant, expected, partly=not entry.in_order
            )
            self.remove(admission.evicted)
            if admission.stays and entry.chunks.passing:
                for number in list(entry.chunks.passing):
                    entry.chunks.passing.discard(number)
                    self.journal.changed(entry, number)
        entry.readers.append(reader)

    def leave(self, entry: Entry, reader: Reader) -> None:
        """It has read what it wanted, or will not go on."""
        entry.readers.remove(reader)
        for flight in list(entry.flights.values()):
            if flight.leave(reader):
                del entry.flights[flight.number]
            elif not flight.readers:
                asyncio.get_running_loop().call_later(_UNWANTED_S, self._abandon, entry, flight)
        if entry.stream is not None and not entry.readers and entry.stream.task is not None:
            entry.stream.task.cancel()
        if not entry.gone:
            self.policy.end(entry.id)
            self.journal.used(entry)
        self.moved(entry)
        self.settle(entry)

    def _abandon(self, entry: Entry, flight: Flight) -> None:
        """Nobody has wanted it for a while, and its origin has not given it: it may never."""
        wanted = flight.readers or flight.arrived or entry.flights.get(flight.number) is not flight
        if not wanted and flight.task is not None:
            del entry.flights[flight.number]
            flight.task.cancel()

    def moved(self, entry: Entry) -> None:
        """A reader has moved on."""
        if entry.stream is not None:
            entry.stream.moved.set()

    # -- chunks

    def fetched_ahead(self, entry: Entry, count: int) -> None:
        """Note that ``count`` bytes of ``entry`` are fetched before a reader wants them."""
        self._ahead[entry.id] = self._ahead.pop(entry.id, 0) + count
        if len(self._ahead) > _AHEAD_ENTRIES:  # most of these were evicted unread
            del self._ahead[next(iter(self._ahead))]

    def take_ahead(self, entry: Entry, count: int) -> int:
        """Return how many of the ``count`` bytes of ``entry`` that were there for a reader were fetched ahead, and are
        given for the first time."""
        noted = self._ahead.get(entry.id, 0)
        if noted > count:
            self._ahead[entry.id] = noted - count
        else:
            self._ahead.pop(entry.id, None)
        return min(noted, count)

    def flight(self, entry: Entry, number: int, reader: Reader, urgency: Urgency) -> Flight:
        """The fetch of a chunk that cannot be served yet: the one that is on its way, or a new one."""
        flight = entry.flights.get(number)
        if flight is None:
            flight = entry.flights[number] = Flight(number, urgency, reader.client)
            flight.task = self.start(self._fly(entry, flight, self._fetch))
            reader.started.add(number)
        flight.join(reader, urgency)
        return flight

    async def compared(self, entry: Entry, number: int, reader: Reader) -> None:
        """Compare a chunk that was there before this process; it is trusted then, or dropped."""
        flight = entry.flights.get(number)
        if flight is None:
            flight = entry.flights[number] = Flight(number, reader.urgency, reader.client)
            flight.task = self.start(self._fly(entry, flight, self._compare))
        flight.join(reader, reader.urgency)
        try:
            await asyncio.shield(flight.result)
        finally:
            flight.leave(reader)

    async def _fly(
        self, entry: Entry, flight: Flight, do: Callable[[Entry, Flight], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            await do(entry, flight)
        except asyncio.CancelledError:
            if not flight.result.done():
                flight.result.set_exception(ReaderClosed("the cache was closed while this was being fetched"))
                flight.result.exception()
            raise
        except Exception as exn:
            if isinstance(exn, Unranged):
                url, start = redact(entry.url), entry.chunks.bounds(flight.number)[0]
                exn = ObjectChanged(f"{url} at byte {start}: ranges of it cannot be had any more").at(url, start)
            if isinstance(exn, ObjectChanged):
                entry.checked = float("-inf")
            if not flight.result.done():
                flight.result.set_exception(exn)
                flight.result.exception()  # nobody may be waiting for what was fetched ahead
        finally:
            if not flight.stored.done():
                flight.stored.set_result(False)
            if entry.flights.get(flight.number) is flight:
                del entry.flights[flight.number]
            self.moved(entry)
            self.settle(entry)

    async def _fetch(self, entry: Entry, flight: Flight) -> None:
        number = flight.number
        if number in entry.chunks and await self._verified(entry, flight):
            flight.result.set_result(None)
            return
        start, stop = entry.chunks.bounds(number)
        flight.turn = self.turns.turn(flight.client, flight.urgency, entry.url)
        async with contextlib.AsyncExitStack() as stack:
            async with flight.turn:
                flight.begun = True
                part = await stack.enter_async_context(self.origin.part(entry.url, start, stop, entry.facts))
            if len(part.view) != stop - start:
                said = (
                    f"{len(part.view)} bytes came of {stop - start} at byte {start}, of an object of {entry.facts.size}"
                )
                raise TransferError(f"{redact(entry.url)}: {said}").at(redact(entry.url), start)
            await self._arrived(entry, flight, part.view)

    def first_chunk(self, entry: Entry, client: Client, view: memoryview, memory: contextlib.AsyncExitStack) -> None:
        """Store the first chunk of ``entry``, which came with its facts, and give it to its first reader meanwhile.
        ``memory`` is closed when ``view`` is not needed any more."""

        async def store(entry: Entry, flight: Flight) -> None:
            async with memory:
                self.enter(entry, opener, 0, len(view))
                try:
                    await self._arrived(entry, flight, view)
                finally:
                    self.leave(entry, opener)

        opener = Reader(client, Urgency.DEMAND, until=1)
        flight = entry.flights[0] = Flight(0, Urgency.DEMAND, client)
        flight.begun = True
        flight.task = self.start(self._fly(entry, flight, store))

    async def _arrived(self, entry: Entry, flight: Flight, view: memoryview) -> None:
        """Give the bytes of a chunk to those who wait for them, and store them meanwhile: no reader waits for the disk.
        Return when ``view`` is needed for neither."""
        number = flight.number
        flight.arrived = True
        flight.result.set_result(view)
        stored = await self.keep(entry, number, view, wanted=flight.urgency == Urgency.DEMAND)
        flight.stored.set_result(stored)
        if stored:
            if flight.read_through and number in entry.chunks.passing:
                self.policy.transit.spend((entry.id, number))
        else:
            self.stats.passed_bytes += flight.given_bytes
            await self._handed_round(flight)
        # A later reader finds it on disk, or fetches it again: it must not find a flight whose bytes are gone.
        del entry.flights[number]
        while flight.holders:
            flight.left.clear()
            await flight.left.wait()

    async def _handed_round(self, flight: Flight) -> None:
        """Hold the bytes of a chunk that could not be stored until no reader wants them. If memory is waited for, and
        its readers have not come to it yet, they fetch it again: all would wait for each other."""
        while flight.readers:  # one may join between the last one's leaving and this task's waking
            flight.left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await flight.left.wait()
            if self.origin.crowded and not flight.holders:
                return

    async def _compare(self, entry: Entry, flight: Flight) -> None:
        await self._verified(entry, flight)
        flight.result.set_result(None)

    async def _verified(self, entry: Entry, flight: Flight) -> bool:
        """Whether the chunk that was there before this process is good; else it is dropped."""
        number = flight.number
        flight.begun = flight.arrived = True
        if await self.disk.compare(entry, number):
            entry.chunks.trust(number)
            self.stats.verified += 1
            for reader in flight.readers:
                reader.started.discard(number)
            return True
        self.stats.bad_chunks += 1
        self.drop(entry, number)
        flight.begun = flight.arrived = False
        return False

    async def keep(self, entry: Entry, number: int, data: memoryview, *, wanted: bool) -> bool:
        """Write a chunk down, where it may stay or pass; False where it can do neither."""
        if entry.gone or not self.disk.usable:
            return False
        if (punching := entry.punching.get(number)) is not None:
            await asyncio.wait([punching])
        placed = self.policy.place(
            entry.id, number, cost(len(data)), wanted=wanted, grows=entry.facts.size is None, held=self._needed
        )
        if placed is None:
            return False
        self.remove(placed.evicted)
        await self._punch(placed.gone)
        crc = await self.disk.write(entry, number, data, lambda: self.origin.crowded)
        if crc is None:
            self.policy.lose(entry.id, number, cost(len(data)))
            if entry.file is not None and entry.file.broken:
                self.remove([entry.id])  # the next reader has another file made
            return False
        entry.chunks.add(number, crc, passing=not placed.stays)
        self.journal.changed(entry, number)
        return True

    def drop(self, entry: Entry, number: int) -> None:
        """A chunk is not good."""
        self.policy.lose(entry.id, number, cost(entry.chunks.length(number)))
        entry.chunks.drop(number)
        self.journal.changed(entry, number)

    def _needed(self, chunk: Chunk) -> bool:
        entry = self.entries.get(chunk[0])
        return entry is not None and entry.needed(chunk[1])

    async def _punch(self, chunks: Iterable[Chunk]) -> None:
        """Chunks leave the transit share: nobody finds them any more, then their blocks are given back."""
        found: list[tuple[Entry, int]] = []
        for identity, number in chunks:
            entry = self.entries.get(identity)
            if entry is not None and number in entry.chunks:
                entry.chunks.drop(number)
                self.journal.changed(entry, number)
                entry.punching[number] = asyncio.get_running_loop().create_future()
                found.append((entry, number))
        for entry, number in found:
            try:
                await self.disk.punch(entry, number)
            finally:
                entry.punching.pop(number).set_result(None)
                self.settle(entry)
