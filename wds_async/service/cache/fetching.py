"""Reading of objects: chunks on disk or in memory, one fetch of each, and read-ahead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from wds_async.errors import ObjectChanged, ReaderClosed, TransferError
from wds_async.redact import redact
from wds_async.service.cache.entries import CacheStats, ChunkFetch, ObjectEntry, ObjectReader, StreamFetch, cost
from wds_async.service.cache.origin import Client, FetchScheduler, ObjectOrigin, Urgency
from wds_async.service.cache.policy import ChunkId, Policy
from wds_async.service.cache.writeback import Disk, Journal
from wds_async.transfer.ranges import Unranged

__all__ = [
    "AHEAD_CHUNKS",
    "ChunkFetcher",
    "DiskPiece",
    "Piece",
    "StreamFetch",
    "begin_stream",
    "fetch",
    "passed_stream",
    "read",
]


def begin_stream(entry: ObjectEntry, fetching: ChunkFetcher) -> StreamFetch:
    """Begin to read the object into its file."""
    flight = entry.stream = StreamFetch()
    flight.task = fetching.start(_run_stream(entry, fetching, flight))
    return flight


async def _run_stream(entry: ObjectEntry, fetching: ChunkFetcher, flight: StreamFetch) -> None:
    try:
        await _stream_to_disk(entry, fetching, flight)
    except asyncio.CancelledError:
        flight.lost = True
        raise
    except Exception as exn:
        flight.error = exn
    finally:
        flight.ended = True
        entry.stream = None
        async with flight.progress:
            flight.progress.notify_all()
        fetching.settle(entry)


async def _stream_to_disk(entry: ObjectEntry, fetching: ChunkFetcher, flight: StreamFetch) -> None:
    buffer, filled = memoryview(bytearray(entry.chunks.chunk_bytes)), 0
    async with _checked_stream(entry, fetching) as views:
        async for view in views:
            while len(view):
                count = min(len(view), len(buffer) - filled)
                buffer[filled : filled + count] = view[:count]
                filled, view = filled + count, view[count:]  # noqa: PLW2901 (what is left of it)
                if filled == len(buffer):
                    if not await _write_next(entry, fetching, flight, buffer):
                        return
                    filled = 0
    size = flight.next * len(buffer) + filled
    if filled and not await _write_next(entry, fetching, flight, buffer[:filled], size):
        return
    entry.ended(size)
    fetching.journal.used(entry)


async def _write_next(
    entry: ObjectEntry, fetching: ChunkFetcher, flight: StreamFetch, data: memoryview, size: int | None = None
) -> bool:
    """Write the next chunk; without room, wait until readers have moved on. False if it cannot be written at all."""
    if size is not None:
        entry.chunks.size = size
    while True:
        flight.moved.clear()
        if await fetching.keep(entry, flight.next, data, wanted=True):
            break
        waited_for = any(reader.first >= flight.next for reader in entry.readers)
        if waited_for or entry.gone or not fetching.disk.usable:
            entry.chunks.size = entry.facts.size
            flight.lost = True
            return False
        await flight.moved.wait()
    async with flight.progress:
        flight.next += 1
        flight.progress.notify_all()
    return True


async def passed_stream(
    entry: ObjectEntry, fetching: ChunkFetcher, reader: ObjectReader, start: int
) -> AsyncGenerator[memoryview, None]:
    """Yield the object from ``start`` on by a read of its own, without the disk."""
    async with fetching.scheduler.slot(reader.client, Urgency.DEMAND, entry.url):
        pass
    at = 0
    async with _checked_stream(entry, fetching) as views:
        async for view in views:
            skipped, at = max(0, start - at), at + len(view)
            if skipped < len(view):
                yield view[skipped:]


@contextlib.asynccontextmanager
async def _checked_stream(entry: ObjectEntry, fetching: ChunkFetcher) -> AsyncIterator[AsyncIterator[memoryview]]:
    """Open the object at its origin, in order. ObjectChanged if that has another version now."""
    async with fetching.origin.stream(entry.url) as (facts, views):
        if facts.version != entry.facts.version:
            entry.checked = float("-inf")
            url, was = redact(entry.url), entry.facts.version
            words = f"{url}: it was replaced: {was!r} was opened, {facts.version!r} is there now. Open it again."
            raise ObjectChanged(words).at(url, 0)
        yield views


AHEAD_CHUNKS = 16
"""Chunks of read-ahead: 32 MiB."""
_AHEAD_IN_MEMORY = 2
"""The same where they cannot be put on disk."""
_PIECE_CHUNKS = 8
_EVER = 1 << 62


@dataclass(frozen=True, slots=True)
class DiskPiece:
    """``count`` bytes at ``offset`` of the file that is open as ``fd``: to be sent by ``sendfile``, or read.

    Valid until the next piece is requested, or the object is released.
    """

    fd: int
    offset: int
    count: int


Piece = DiskPiece | memoryview
"""A memoryview is valid until the next piece is requested."""


async def read(
    entry: ObjectEntry, fetching: ChunkFetcher, client: Client, start: int, stop: int | None, urgency: Urgency
) -> AsyncGenerator[Piece, None]:
    """Yield bytes ``[start, stop)`` of an object, in order, as they arrive."""
    if entry.chunks.size is not None:
        stop = entry.chunks.size if stop is None else min(stop, entry.chunks.size)
    if stop is not None and start >= stop:
        return
    reader = ObjectReader(client, urgency)
    if entry.discovered:
        entry.discovered = False
        reader.started.add(0)
    reading = _PieceReader(entry, fetching, reader)
    fetching.enter(entry, reader, start, stop)
    try:
        async with contextlib.aclosing(reading.pieces(start, stop)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        fetching.leave(entry, reader)
        reading.count_request()


async def fetch(
    entry: ObjectEntry, fetching: ChunkFetcher, client: Client, start: int, stop: int | None, urgency: Urgency
) -> int:
    """Bring bytes ``[start, stop)`` onto the disk and return how many are there. Ends early without room for more."""
    reader = ObjectReader(client, urgency)
    if entry.discovered:
        entry.discovered = False
        fetching.fetched_ahead(entry, entry.chunks.length(0))
    fetching.enter(entry, reader, start, stop)
    try:
        if entry.in_order and not entry.chunks.whole:
            reader.until = _EVER
            stream = entry.stream or (begin_stream(entry, fetching) if _may_stream(entry, fetching) else None)
            if stream is not None:
                await stream.past(_EVER)
        elif entry.chunks.size is not None:
            await _fetch_chunks(entry, fetching, reader, start, min(stop or _EVER, entry.chunks.size))
    finally:
        fetching.leave(entry, reader)
    return entry.chunks.ready(start, stop or _EVER, on_probation=True) - start


async def _fetch_chunks(
    entry: ObjectEntry, fetching: ChunkFetcher, reader: ObjectReader, start: int, stop: int
) -> None:
    waiting: list[ChunkFetch] = []
    for number in entry.chunks.over(start, stop):
        if not fetching.disk.usable or entry.gone:
            return
        if not entry.chunks.trusted(number):
            waiting.append(fetching.flight(entry, number, reader, reader.urgency))
            if number in reader.started:
                fetching.fetched_ahead(entry, entry.chunks.length(number))
        if len(waiting) >= AHEAD_CHUNKS and not await _landed(waiting.pop(0), reader):
            return
    for flight in waiting:
        if not await _landed(flight, reader):
            return


async def _landed(flight: ChunkFetch, reader: ObjectReader) -> bool:
    """Wait for a chunk and return whether it is on disk."""
    try:
        return await asyncio.shield(flight.result) is None or await asyncio.shield(flight.stored)
    finally:
        flight.leave(reader)


def _may_stream(entry: ObjectEntry, fetching: ChunkFetcher) -> bool:
    return fetching.disk.usable and not entry.gone and not entry.chunks.numbers()


class _PieceReader:
    """One reader's pass over an object."""

    def __init__(self, entry: ObjectEntry, fetching: ChunkFetcher, reader: ObjectReader) -> None:
        self._entry = entry
        self._fetching = fetching
        self._reader = reader
        self._streams = False
        """Whether it reads what it made the origin give in order."""

    def count_request(self) -> None:
        """Count the read as a hit, or as a miss if anything had to be fetched for it."""
        stats = self._fetching.stats
        if self._streams or self._reader.started:
            stats.misses += 1
        else:
            stats.hits += 1

    async def pieces(self, start: int, stop: int | None) -> AsyncGenerator[Piece, None]:
        ways = self._in_order(start, stop) if self._entry.in_order else self._ranges(start, stop or 0)
        async with contextlib.aclosing(ways) as pieces:
            async for piece in pieces:
                yield piece

    async def _ranges(self, start: int, stop: int) -> AsyncGenerator[Piece, None]:
        entry, chunks = self._entry, self._entry.chunks
        while start < stop:
            number = start // chunks.chunk_bytes
            self._look_ahead(number, stop)
            if chunks.trusted(number):
                piece = self._on_disk(start, stop)
                yield piece
                self._given(start, piece.count)
                start += piece.count
                continue
            flight = self._fetching.flight(entry, number, self._reader, Urgency(self._reader.urgency))
            if number not in self._reader.started:
                self._fetching.stats.coalesced += 1
            flight.holders.add(self._reader)
            try:
                view = await asyncio.shield(flight.result)
                if view is not None:  # else it is on disk now
                    first = start - number * chunks.chunk_bytes
                    part = view[first : first + stop - start]
                    yield part
                    self._given(start, len(part), flight)
                    start += len(part)
            finally:
                flight.release(self._reader)
            flight.leave(self._reader)

    async def _in_order(self, start: int, stop: int | None) -> AsyncGenerator[Piece, None]:
        entry, chunks, fetching = self._entry, self._entry.chunks, self._fetching
        stream: StreamFetch | None = entry.stream
        while stop is None or start < stop:
            number = start // chunks.chunk_bytes
            self._reader.first, self._reader.until = number, _EVER
            fetching.moved(entry)
            if chunks.size is not None and start >= chunks.size:
                return
            if chunks.trusted(number):
                piece = self._on_disk(start, _EVER if stop is None else stop)
                yield piece
                self._given(start, piece.count)
                start += piece.count
                continue
            if number in chunks:  # from before: compared, and where it is bad, the object is read again, past the disk
                await fetching.compared(entry, number, self._reader)
                continue
            stream = entry.stream or stream
            if stream is None and _may_stream(entry, fetching):
                stream, self._streams = begin_stream(entry, fetching), True
            if stream is not None and number >= stream.next and not stream.ended:
                await stream.past(number)
                continue
            if stream is not None and stream.error is not None:
                raise stream.error
            break
        else:
            return
        self._streams = True
        async with contextlib.aclosing(passed_stream(entry, fetching, self._reader, start)) as views:
            async for view in views:
                part = view if stop is None else view[: stop - start]
                yield part
                self._given(start, len(part), passed=True)
                start += len(part)
                if stop is not None and start >= stop:
                    return

    def _look_ahead(self, number: int, stop: int) -> None:
        """Request the next chunks."""
        reader, entry = self._reader, self._entry
        on_disk = self._fetching.disk.usable and not entry.gone and self._fetching.policy.roomy(entry.id)
        last = -(-stop // entry.chunks.chunk_bytes)
        reader.first = number
        ahead_chunks = AHEAD_CHUNKS if on_disk else 1 if self._fetching.origin.crowded else _AHEAD_IN_MEMORY
        reader.until = min(last, number + ahead_chunks)
        if entry.chunks.settled:
            return
        for ahead in range(number, reader.until):
            if not entry.chunks.trusted(ahead):
                urgency = reader.urgency if ahead == number else max(reader.urgency, Urgency.AHEAD)
                self._fetching.flight(entry, ahead, reader, Urgency(urgency))

    def _on_disk(self, start: int, stop: int) -> DiskPiece:
        """Return the longest piece from ``start`` on that is on disk, within the reader's chunks if they may be
        evicted."""
        chunks = self._entry.chunks
        if not chunks.settled:
            until = min(start // chunks.chunk_bytes + _PIECE_CHUNKS, self._reader.until)
            stop = min(stop, until * chunks.chunk_bytes)
        assert self._entry.file is not None
        return DiskPiece(self._entry.file.fd, start, chunks.ready(start, stop, on_probation=True) - start)

    def _given(self, start: int, count: int, flight: ChunkFetch | None = None, *, passed: bool = False) -> None:
        """Account for ``count`` bytes that the reader has taken, from the memory of ``flight`` if one is given.
        ``passed``: they never lay on disk."""
        entry, fetching, chunks = self._entry, self._fetching, self._entry.chunks
        if flight is not None:
            passed = flight.stored.done() and not flight.stored.result()
            flight.given_bytes += count
            flight.read_through = flight.read_through or start + count >= chunks.bounds(flight.number)[1]
        fetching.policy.served(entry.id, count)
        fetched = count if self._streams else 0
        for number in chunks.over(start, start + count) if self._reader.started or chunks.on_probation else ():
            first, last = chunks.bounds(number)
            if number in self._reader.started and not self._streams:
                fetched += min(last, start + count) - max(first, start)
            if start + count >= last and number in chunks.on_probation:
                fetching.policy.probation.spend((entry.id, number))
        hit = count - fetched
        fetching.stats.given(self._reader.client.tenant, hit=hit, miss=fetched, ahead=fetching.take_ahead(entry, hit))
        fetching.stats.passed_bytes += count if passed else 0


_UNWANTED_S = 2.0
"""How long a running fetch without readers may take: it has cost a request already."""
_LOOK_EVERY_S = 0.2
_AHEAD_ENTRIES = 100_000
_LARGE = 8
"""Room is made for all of an object of which a range is read, unless it is larger than this fraction of the cache."""


class ChunkFetcher:
    """The state that all readers of one cache share. ``entries``: those in memory, by number. ``settle`` is called when
    an entry is released, ``remove`` with the numbers of evicted ones."""

    def __init__(
        self,
        origin: ObjectOrigin,
        scheduler: FetchScheduler,
        policy: Policy,
        disk: Disk,
        journal: Journal,
        stats: CacheStats,
    ) -> None:
        self.origin = origin
        self.scheduler = scheduler
        self.policy = policy
        self.disk = disk
        self.journal = journal
        self.stats = stats
        self.entries: dict[int, ObjectEntry] = {}
        self.settle: Callable[[ObjectEntry], None] = lambda entry: None
        self.remove: Callable[[Iterable[int]], None] = lambda numbers: None
        self._ahead: dict[int, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finishing: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run work beside the readers; `close` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def finish(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run short work that `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def close(self) -> None:
        """Cancel all fetches and wait for their end."""
        while self._tasks or self._finishing:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait([*self._tasks, *self._finishing])

    async def quiet(self) -> None:
        """Wait until no fetch is running."""
        while self._tasks or self._finishing:
            await asyncio.wait([*self._tasks, *self._finishing])

    async def finished(self) -> None:
        """Wait for the work that `finish` runs: removed files are gone."""
        if self._finishing:
            await asyncio.wait([*self._finishing])

    # -- readers

    def enter(self, entry: ObjectEntry, reader: ObjectReader, start: int, stop: int | None) -> None:
        """Register ``reader`` of bytes ``[start, stop)`` and make room for the entry."""
        before, entry.before = entry.before, None
        if not entry.gone:
            expected = entry.worth
            if expected > self.policy.room_bytes // _LARGE and not entry.chunks.settled and stop is not None:
                expected = entry.worth_of(start, stop)
            admission = self.policy.begin(
                entry.id, before, entry.key, entry.tenant, expected, partly=not entry.in_order
            )
            self.remove(admission.evicted)
            if admission.stays and entry.chunks.on_probation:
                for number in list(entry.chunks.on_probation):
                    entry.chunks.on_probation.discard(number)
                    self.journal.changed(entry, number)
        entry.readers.append(reader)

    def leave(self, entry: ObjectEntry, reader: ObjectReader) -> None:
        """Unregister a reader that has ended or given up."""
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

    def _abandon(self, entry: ObjectEntry, flight: ChunkFetch) -> None:
        """Cancel a fetch that had no readers for a while and has not arrived."""
        needed = flight.readers or flight.arrived or entry.flights.get(flight.number) is not flight
        if not needed and flight.task is not None:
            del entry.flights[flight.number]
            flight.task.cancel()

    def moved(self, entry: ObjectEntry) -> None:
        """Tell a stream that a reader has moved on."""
        if entry.stream is not None:
            entry.stream.moved.set()

    # -- chunks

    def fetched_ahead(self, entry: ObjectEntry, count: int) -> None:
        """Note that ``count`` bytes of ``entry`` are fetched before a reader wants them."""
        self._ahead[entry.id] = self._ahead.pop(entry.id, 0) + count
        if len(self._ahead) > _AHEAD_ENTRIES:  # most of these were evicted unread
            del self._ahead[next(iter(self._ahead))]

    def take_ahead(self, entry: ObjectEntry, count: int) -> int:
        """Return how many of the ``count`` bytes of ``entry`` that were there for a reader were fetched ahead, and are
        given for the first time."""
        noted = self._ahead.get(entry.id, 0)
        if noted > count:
            self._ahead[entry.id] = noted - count
        else:
            self._ahead.pop(entry.id, None)
        return min(noted, count)

    def flight(self, entry: ObjectEntry, number: int, reader: ObjectReader, urgency: Urgency) -> ChunkFetch:
        """Return the running fetch of a chunk, or begin one."""
        flight = entry.flights.get(number)
        if flight is None:
            flight = entry.flights[number] = ChunkFetch(number, urgency, reader.client)
            flight.task = self.start(self._fly(entry, flight, self._fetch))
            reader.started.add(number)
        flight.join(reader, urgency)
        return flight

    async def compared(self, entry: ObjectEntry, number: int, reader: ObjectReader) -> None:
        """Verify a chunk of an earlier process: trust or drop it."""
        flight = entry.flights.get(number)
        if flight is None:
            flight = entry.flights[number] = ChunkFetch(number, reader.urgency, reader.client)
            flight.task = self.start(self._fly(entry, flight, self._compare))
        flight.join(reader, reader.urgency)
        try:
            await asyncio.shield(flight.result)
        finally:
            flight.leave(reader)

    async def _fly(
        self, entry: ObjectEntry, flight: ChunkFetch, do: Callable[[ObjectEntry, ChunkFetch], Coroutine[Any, Any, None]]
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
                flight.result.exception()  # a fetch ahead may have no waiter
        finally:
            if not flight.stored.done():
                flight.stored.set_result(False)
            if entry.flights.get(flight.number) is flight:
                del entry.flights[flight.number]
            self.moved(entry)
            self.settle(entry)

    async def _fetch(self, entry: ObjectEntry, flight: ChunkFetch) -> None:
        number = flight.number
        if number in entry.chunks and await self._verified(entry, flight):
            flight.result.set_result(None)
            return
        start, stop = entry.chunks.bounds(number)
        flight.slot = self.scheduler.slot(flight.client, flight.urgency, entry.url)
        async with contextlib.AsyncExitStack() as stack:
            async with flight.slot:
                flight.begun = True
                part = await stack.enter_async_context(self.origin.part(entry.url, start, stop, entry.facts))
            if len(part.view) != stop - start:
                words = (
                    f"{len(part.view)} bytes came of {stop - start} at byte {start}, of an object of {entry.facts.size}"
                )
                raise TransferError(f"{redact(entry.url)}: {words}").at(redact(entry.url), start)
            await self._arrived(entry, flight, part.view)

    def first_chunk(
        self, entry: ObjectEntry, client: Client, view: memoryview, memory: contextlib.AsyncExitStack
    ) -> None:
        """Store the first chunk of ``entry``, which came with its facts, and hand it to the first reader meanwhile.
        ``memory`` is closed when ``view`` is free."""

        async def store(entry: ObjectEntry, flight: ChunkFetch) -> None:
            async with memory:
                self.enter(entry, opener, 0, len(view))
                try:
                    await self._arrived(entry, flight, view)
                finally:
                    self.leave(entry, opener)

        opener = ObjectReader(client, Urgency.DEMAND, until=1)
        flight = entry.flights[0] = ChunkFetch(0, Urgency.DEMAND, client)
        flight.begun = True
        flight.task = self.start(self._fly(entry, flight, store))

    async def _arrived(self, entry: ObjectEntry, flight: ChunkFetch, view: memoryview) -> None:
        """Hand the bytes of a chunk to its readers while they are written: no reader waits for the disk. Return when
        ``view`` is free."""
        number = flight.number
        flight.arrived = True
        flight.result.set_result(view)
        stored = await self.keep(entry, number, view, wanted=flight.urgency == Urgency.DEMAND)
        flight.stored.set_result(stored)
        if stored:
            if flight.read_through and number in entry.chunks.on_probation:
                self.policy.probation.spend((entry.id, number))
        else:
            self.stats.passed_bytes += flight.given_bytes
            await self._handed_round(flight)
        # A later reader finds it on disk, or fetches it again: it must not find a flight whose bytes are gone.
        del entry.flights[number]
        while flight.holders:
            flight.left.clear()
            await flight.left.wait()

    async def _handed_round(self, flight: ChunkFetch) -> None:
        """Hold the bytes of a chunk that could not be stored until no reader wants them. If memory is short, readers
        that have not come to it fetch it again: all would wait for each other."""
        while flight.readers:  # one may join between the last one's leaving and this task's waking
            flight.left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await flight.left.wait()
            if self.origin.crowded and not flight.holders:
                return

    async def _compare(self, entry: ObjectEntry, flight: ChunkFetch) -> None:
        await self._verified(entry, flight)
        flight.result.set_result(None)

    async def _verified(self, entry: ObjectEntry, flight: ChunkFetch) -> bool:
        """Return whether a chunk of an earlier process is good; drop it if not."""
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

    async def keep(self, entry: ObjectEntry, number: int, data: memoryview, *, wanted: bool) -> bool:
        """Write a chunk to disk; False if it may neither stay nor pass."""
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
        entry.chunks.add(number, crc, on_probation=not placed.stays)
        self.journal.changed(entry, number)
        return True

    def drop(self, entry: ObjectEntry, number: int) -> None:
        """Drop a bad chunk."""
        self.policy.lose(entry.id, number, cost(entry.chunks.length(number)))
        entry.chunks.drop(number)
        self.journal.changed(entry, number)

    def _needed(self, chunk: ChunkId) -> bool:
        entry = self.entries.get(chunk[0])
        return entry is not None and entry.needed(chunk[1])

    async def _punch(self, chunks: Iterable[ChunkId]) -> None:
        """Drop chunks that leave the probation segment, then give their blocks back."""
        dropped: list[tuple[ObjectEntry, int]] = []
        for identity, number in chunks:
            entry = self.entries.get(identity)
            if entry is not None and number in entry.chunks:
                entry.chunks.drop(number)
                self.journal.changed(entry, number)
                entry.punching[number] = asyncio.get_running_loop().create_future()
                dropped.append((entry, number))
        for entry, number in dropped:
            try:
                await self.disk.punch(entry, number)
            finally:
                entry.punching.pop(number).set_result(None)
                self.settle(entry)
