"""Reading of objects: chunks from disk or memory, one fetch of each for all readers, and read-ahead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from wds_async.errors import ObjectChanged, ReaderClosed, TransferError
from wds_async.redact import redact
from wds_async.service.cache.entries import CacheStats, ChunkFetch, ObjectEntry, ObjectReader, StreamFetch, cost
from wds_async.service.cache.origin import (
    ChunkRequest,
    Client,
    FetchedRange,
    FetchScheduler,
    ForwardedFetch,
    NodePart,
    Nodes,
    ObjectOrigin,
    Urgency,
)
from wds_async.service.cache.policy import ChunkId, Policy
from wds_async.service.cache.writeback import Disk, Journal
from wds_async.transfer.ranges import Unranged

__all__ = ["AHEAD_CHUNKS", "ChunkFetcher", "DiskPiece", "Piece", "prefetch", "prefetch_owned", "read"]

AHEAD_CHUNKS = 16  # chunks of read-ahead: 32 MiB
_AHEAD_IN_MEMORY = 2  # the same for what cannot be put on disk
_PIECE_CHUNKS = 8
_TO_THE_END = 1 << 62
_UNWANTED_S = 2.0  # how long a running fetch without readers may take: it has cost a request already
_LOOK_EVERY_S = 0.2
_AHEAD_ENTRIES = 100_000
_LARGE = 8  # room is made for all of an object of which a range is read, unless it exceeds this fraction of the cache


@dataclass(frozen=True, slots=True)
class DiskPiece:
    """``count`` bytes at ``offset`` of the open file ``fd``: to be sent by ``sendfile``, or read. Valid until the next
    piece is requested or the object is released."""

    fd: int
    offset: int
    count: int


Piece = DiskPiece | memoryview  # A memoryview is valid until the next piece is requested

Work = Callable[[ObjectEntry, ChunkFetch], Coroutine[Any, Any, None]]


@dataclass(eq=False)
class ChunkFetcher:
    """The state that all readers of one cache share. ``entries``: those in memory, by number. ``settle`` is called when
    an entry is released, ``remove`` with the numbers of evicted ones. ``nodes``: the other nodes, asked before the
    store."""

    origin: ObjectOrigin
    scheduler: FetchScheduler
    policy: Policy
    disk: Disk
    journal: Journal
    stats: CacheStats
    nodes: Nodes | None = None
    entries: dict[int, ObjectEntry] = field(default_factory=dict)
    settle: Callable[[ObjectEntry], None] = lambda entry: None
    remove: Callable[[Iterable[int]], None] = lambda numbers: None
    _ahead: dict[int, int] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _finishing: set[asyncio.Task[Any]] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run work beside the readers; `close` cancels it."""
        return _spawn(work, self._tasks)

    def finish(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run short work that `close` waits for."""
        _spawn(work, self._finishing)

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
        """Wait for the work that `finish` runs, such as the removal of files."""
        if self._finishing:
            await asyncio.wait([*self._finishing])

    # -- readers

    @property
    def crowded(self) -> bool:
        """True if parts of the store or of other nodes wait for memory."""
        return self.origin.crowded or (self.nodes is not None and self.nodes.crowded)

    def enter(self, entry: ObjectEntry, reader: ObjectReader, start: int, stop: int | None) -> None:
        """Register ``reader`` of bytes ``[start, stop)`` and make room for the entry."""
        indexed, entry.indexed = entry.indexed, None
        if not entry.gone:
            expected = entry.disk_bytes
            if expected > self.policy.room_bytes // _LARGE and not entry.chunks.settled and stop is not None:
                expected = entry.disk_bytes_with(start, stop)
            sharing: dict[str, Any] = {}
            if self.nodes is not None and entry.chunks.count is not None:
                whole, expected = expected, min(expected, self._owned_bytes(self.nodes, entry))
                sharing = {"owned": lambda n: self.owns(entry, n), "copy_size": 0 if reader.client.node else whole}
            partly = not entry.in_order
            placed = self.policy.begin(entry.id, indexed, entry.key, entry.tenant, expected, partly=partly, **sharing)
            self.remove(placed.evicted)
            if placed.stays:
                for number in list(entry.chunks.on_probation):
                    if placed.copied or self.owns(entry, number):
                        entry.chunks.on_probation.discard(number)
                        self.journal.changed(entry, number)
        entry.readers.append(reader)

    def owns(self, entry: ObjectEntry, number: int) -> bool:
        """Return whether a chunk is this node's to keep."""
        return self.nodes is None or entry.chunks.count is None or self.nodes.owns(entry.key, number)

    def _owned_bytes(self, nodes: Nodes, entry: ObjectEntry) -> int:
        """Return the bytes of disk of the chunks that are this node's, and of those that it has and keeps."""
        numbers = nodes.owned(entry.key, entry.chunks.count or 0)
        full = cost(entry.chunks.chunk_bytes) * len(numbers)
        last = (entry.chunks.count or 0) - 1
        if len(numbers) and numbers[-1] == last:
            full += cost(entry.chunks.length(last)) - cost(entry.chunks.chunk_bytes)
        return full

    def leave(self, entry: ObjectEntry, reader: ObjectReader) -> None:
        """Unregister a reader that has ended or given up."""
        entry.readers.remove(reader)
        for fetch in list(entry.fetches.values()):
            if fetch.leave(reader):
                del entry.fetches[fetch.number]
            elif not fetch.readers:
                asyncio.get_running_loop().call_later(_UNWANTED_S, self._abandon, entry, fetch)
        if entry.stream is not None and not entry.readers and entry.stream.task is not None:
            entry.stream.task.cancel()
        if not entry.gone:
            self.policy.end(entry.id)
            self.journal.used(entry)
        self.moved(entry)
        self.settle(entry)

    def _abandon(self, entry: ObjectEntry, fetch: ChunkFetch) -> None:
        """Cancel a fetch that had no readers for a while and has not arrived."""
        needed = fetch.readers or fetch.arrived or entry.fetches.get(fetch.number) is not fetch
        if not needed and fetch.task is not None:
            del entry.fetches[fetch.number]
            fetch.task.cancel()

    def moved(self, entry: ObjectEntry) -> None:
        """Notify a stream that a reader has moved on."""
        if entry.stream is not None:
            entry.stream.moved.set()

    # -- chunks

    def count_ahead(self, entry: ObjectEntry, count: int) -> None:
        """Note that ``count`` bytes of ``entry`` were fetched before a reader wants them."""
        self._ahead[entry.id] = self._ahead.pop(entry.id, 0) + count
        if len(self._ahead) > _AHEAD_ENTRIES:  # most of these were evicted unread
            del self._ahead[next(iter(self._ahead))]

    def take_ahead(self, entry: ObjectEntry, count: int) -> int:
        """Return how many of ``count`` bytes served of ``entry`` were fetched ahead and are served for the first
        time."""
        ahead = self._ahead.pop(entry.id, 0)
        if ahead > count:
            self._ahead[entry.id] = ahead - count
        return min(ahead, count)

    def fetch(
        self, entry: ObjectEntry, number: int, reader: ObjectReader, urgency: Urgency, work: Work | None = None
    ) -> ChunkFetch:
        """Join the running fetch of a chunk, or begin one (with ``work``: that in its place)."""
        fetch = entry.fetches.get(number)
        if fetch is not None and fetch.forwarded and reader.client.node:
            raise ForwardedFetch(f"{redact(entry.url)}: this chunk is being requested from another node")
        if fetch is None:
            fetch = self._begin(entry, ChunkFetch(number, urgency, reader.client), work or self._fetch)
            if work is None:
                reader.started.add(number)
        fetch.join(reader, urgency)
        return fetch

    async def verify(self, entry: ObjectEntry, number: int, reader: ObjectReader) -> None:
        """Compare a chunk of an earlier process with its checksum: trust or drop it."""

        async def compare(entry: ObjectEntry, fetch: ChunkFetch) -> None:
            await self._verified(entry, fetch)
            fetch.result.set_result(None)

        fetch = self.fetch(entry, number, reader, reader.urgency, compare)
        try:
            await asyncio.shield(fetch.result)
        finally:
            fetch.leave(reader)

    def first_chunk(
        self, entry: ObjectEntry, number: int, client: Client, view: memoryview, memory: contextlib.AsyncExitStack
    ) -> None:
        """Store the chunk of ``entry`` that came with its facts, while readers take it from memory. ``memory`` is
        closed when ``view`` is free."""

        async def store(entry: ObjectEntry, fetch: ChunkFetch) -> None:
            async with memory:
                start = number * entry.chunks.chunk_bytes
                self.enter(entry, opener, start, start + len(view))
                try:
                    await self._arrived(entry, fetch, view)
                finally:
                    self.leave(entry, opener)

        opener = ObjectReader(client, Urgency.DEMAND, first=number, until=number + 1)
        self._begin(entry, ChunkFetch(number, Urgency.DEMAND, client, begun=True), store)

    def _begin(self, entry: ObjectEntry, fetch: ChunkFetch, work: Work) -> ChunkFetch:
        entry.fetches[fetch.number] = fetch
        fetch.task = self.start(self._run(entry, fetch, work))
        return fetch

    async def _run(self, entry: ObjectEntry, fetch: ChunkFetch, work: Work) -> None:
        try:
            await work(entry, fetch)
        except asyncio.CancelledError:
            fetch.fail(ReaderClosed("the cache was closed while this was being fetched"))
            raise
        except Exception as exn:
            if isinstance(exn, Unranged):
                url, start = redact(entry.url), entry.chunks.bounds(fetch.number)[0]
                exn = ObjectChanged(f"{url} at byte {start}: ranges of it cannot be had any more").at(url, start)
            if isinstance(exn, ObjectChanged):
                entry.checked = float("-inf")
            fetch.fail(exn)
        finally:
            if not fetch.stored.done():
                fetch.stored.set_result(False)
            if entry.fetches.get(fetch.number) is fetch:
                del entry.fetches[fetch.number]
            self.moved(entry)
            self.settle(entry)

    async def _fetch(self, entry: ObjectEntry, fetch: ChunkFetch) -> None:
        if fetch.number in entry.chunks and await self._verified(entry, fetch):
            fetch.result.set_result(None)
            return
        start, stop = entry.chunks.bounds(fetch.number)
        async with contextlib.AsyncExitStack() as stack:
            part: FetchedRange | None = await self._from_node(entry, fetch, start, stop, stack)
            if part is None:
                fetch.slot = self.scheduler.slot(fetch.client, fetch.urgency, entry.url)
                async with fetch.slot:
                    fetch.begun = True
                    part = await stack.enter_async_context(self.origin.part(entry.url, start, stop, entry.facts))
            if (count := len(part.view)) != stop - start:
                url = redact(entry.url)
                raise TransferError(
                    f"{url}: {count} bytes came of {stop - start} at byte {start}, of an object of {entry.facts.size}"
                ).at(url, start)
            await self._arrived(entry, fetch, part.view)

    async def _from_node(
        self, entry: ObjectEntry, fetch: ChunkFetch, start: int, stop: int, memory: contextlib.AsyncExitStack
    ) -> NodePart | None:
        """Return a chunk from the node whose it is, to be released by ``memory``; None if the store is to be asked."""
        for node in () if self.nodes is None else self.nodes.candidates(entry.key, fetch.number):
            assert self.nodes is not None
            fetch.slot = self.nodes.slot(fetch.client, fetch.urgency, node)
            async with fetch.slot:
                if fetch.for_node:
                    return None
                fetch.begun = fetch.forwarded = True
                try:
                    wanted = ChunkRequest(
                        entry.url, entry.key, fetch.number, start, stop, entry.facts, fetch.client, fetch.urgency
                    )
                    part = await self.nodes.request(node, wanted)
                finally:
                    fetch.forwarded = False
            if part is not None:
                memory.callback(part.release)
                return part
        return None

    async def _arrived(self, entry: ObjectEntry, fetch: ChunkFetch, view: memoryview) -> None:
        """Hand the bytes of a chunk to its readers while they are written: no reader waits for the disk. Return when
        ``view`` is free."""
        number = fetch.number
        fetch.arrived = True
        fetch.result.set_result(view)
        stored = await self.keep(entry, number, view, wanted=fetch.urgency == Urgency.DEMAND)
        fetch.stored.set_result(stored)
        if not stored:
            self.stats.passed_bytes += fetch.served_bytes
            await self._passed_on(fetch)
        elif fetch.read_through:
            self.policy.probation.spend((entry.id, number))
        # A later reader finds it on disk, or fetches it again: it must not find a fetch whose bytes are gone.
        del entry.fetches[number]
        while fetch.holders:
            fetch.left.clear()
            await fetch.left.wait()

    async def _passed_on(self, fetch: ChunkFetch) -> None:
        """Hold the bytes of a chunk that could not be stored until no reader wants them. If memory is short, readers
        that have not come to it fetch it again: otherwise all would wait for each other."""
        while fetch.readers:  # one may join between the last one's leaving and this task's waking
            fetch.left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await fetch.left.wait()
            if self.crowded and not fetch.holders:
                return

    async def _verified(self, entry: ObjectEntry, fetch: ChunkFetch) -> bool:
        """Return whether a chunk of an earlier process is good; drop it if not."""
        number = fetch.number
        fetch.begun = fetch.arrived = True
        if await self.disk.compare(entry, number):
            entry.chunks.trusted.add(number)
            self.stats.verified += 1
            for reader in fetch.readers:
                reader.started.discard(number)
            return True
        self.drop_bad(entry, number)
        fetch.begun = fetch.arrived = False
        return False

    async def keep(self, entry: ObjectEntry, number: int, data: memoryview, *, wanted: bool) -> bool:
        """Write a chunk to disk; False if there is no place for it, or the disk refuses."""
        if entry.gone or not self.disk.usable:
            return False
        if (punching := entry.punching.get(number)) is not None:
            await asyncio.wait([punching])
        placed = self.policy.place(
            entry.id,
            number,
            cost(len(data)),
            wanted=wanted,
            grows=entry.facts.size is None,
            held=self._needed,
            owned=self.owns(entry, number),
        )
        if placed is None:
            return False
        self.remove(placed.evicted)
        await self._punch(placed.gone)
        crc = await self.disk.write(entry, number, data, lambda: self.crowded)
        if crc is None:
            self.policy.lose(entry.id, number, cost(len(data)))
            if entry.file is not None and entry.file.broken:
                self.remove([entry.id])  # the next reader has another file made
            return False
        entry.chunks.add(number, crc, on_probation=not placed.stays)
        self.journal.changed(entry, number)
        return True

    def drop_bad(self, entry: ObjectEntry, number: int) -> None:
        self.stats.bad_chunks += 1
        self.policy.lose(entry.id, number, cost(entry.chunks.length(number)))
        entry.chunks.drop(number)
        self.journal.changed(entry, number)

    def _needed(self, chunk: ChunkId) -> bool:
        entry = self.entries.get(chunk[0])
        return entry is not None and entry.needed(chunk[1])

    async def _punch(self, chunks: Iterable[ChunkId]) -> None:
        """Drop chunks that leave the probation segment, then give their blocks back."""
        dropped: list[tuple[ObjectEntry, int]] = []
        for entry_id, number in chunks:
            entry = self.entries.get(entry_id)
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


def _spawn(work: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


# -- ranges


async def read(
    entry: ObjectEntry, fetching: ChunkFetcher, client: Client, start: int, stop: int | None, urgency: Urgency
) -> AsyncGenerator[Piece, None]:
    """Yield bytes ``[start, stop)`` of an object, in order, as they arrive."""
    if entry.chunks.size is not None:
        stop = entry.chunks.size if stop is None else min(stop, entry.chunks.size)
    if stop is not None and start >= stop:
        return
    reader = _RangeReader(client, urgency, entry=entry, fetching=fetching)
    if entry.discovered >= 0:
        reader.started.add(entry.discovered)
        entry.discovered = -1
    fetching.enter(entry, reader, start, stop)
    try:
        async with contextlib.aclosing(
            reader.in_order(start, stop) if entry.in_order else reader.by_chunks(start, stop or 0)
        ) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        fetching.leave(entry, reader)
        missed = reader.streams or bool(reader.started)
        fetching.stats.misses += missed
        fetching.stats.hits += not missed


async def prefetch(
    entry: ObjectEntry, fetching: ChunkFetcher, client: Client, start: int, stop: int | None, urgency: Urgency
) -> int:
    """Bring bytes ``[start, stop)`` onto the disk and return how many are there. Ends early without room for more."""
    reader = ObjectReader(client, urgency)
    if entry.discovered >= 0:
        fetching.count_ahead(entry, entry.chunks.length(entry.discovered))
        entry.discovered = -1
    fetching.enter(entry, reader, start, stop)
    try:
        if entry.in_order and not entry.chunks.whole:
            reader.until = _TO_THE_END
            stream = entry.stream or _begin_stream(entry, fetching)
            if stream is not None:
                await stream.past(_TO_THE_END)
        elif entry.chunks.size is not None:
            stop_at = min(stop or _TO_THE_END, entry.chunks.size)
            await _prefetch_chunks(entry, fetching, reader, entry.chunks.over(start, stop_at))
    finally:
        fetching.leave(entry, reader)
    return entry.chunks.ready(start, stop or _TO_THE_END, on_probation=True) - start


async def prefetch_owned(entry: ObjectEntry, fetching: ChunkFetcher, client: Client, urgency: Urgency) -> bool:
    """Bring the chunks that are this node's onto the disk, and return True; False, without a request, if there is no
    room for them among those that stay."""
    if entry.in_order or not entry.chunks.size:
        return True
    reader, chunks = ObjectReader(client, urgency), entry.chunks
    if entry.discovered >= 0:
        fetching.count_ahead(entry, chunks.length(entry.discovered))
        entry.discovered = -1
    fetching.enter(entry, reader, 0, None)
    try:
        own = entry.owned_numbers(fetching.nodes)
        missing = [number for number in own if number not in chunks.trusted]
        new = [number for number in missing if number not in chunks and number not in entry.fetches]
        if sum(cost(chunks.length(number)) for number in new) > fetching.policy.reserved(entry.id):
            return False
        await _prefetch_chunks(entry, fetching, reader, missing)
    finally:
        fetching.leave(entry, reader)
    return all(number in chunks and number not in chunks.on_probation for number in own)


async def _prefetch_chunks(
    entry: ObjectEntry, fetching: ChunkFetcher, reader: ObjectReader, numbers: Iterable[int]
) -> None:
    waiting: list[ChunkFetch] = []
    for number in numbers:
        if not fetching.disk.usable or entry.gone:
            return
        if number not in entry.chunks.trusted:
            waiting.append(fetching.fetch(entry, number, reader, reader.urgency))
            if number in reader.started:
                fetching.count_ahead(entry, entry.chunks.length(number))
        if len(waiting) >= AHEAD_CHUNKS and not await _stored(waiting.pop(0), reader):
            return
    for fetch in waiting:
        if not await _stored(fetch, reader):
            return


async def _stored(fetch: ChunkFetch, reader: ObjectReader) -> bool:
    """Wait for a chunk and return whether it is on disk."""
    try:
        return await asyncio.shield(fetch.result) is None or await asyncio.shield(fetch.stored)
    finally:
        fetch.leave(reader)


@dataclass(eq=False, slots=True, kw_only=True)
class _RangeReader(ObjectReader):
    """One reader's pass over an object. ``streams``: it reads what it made the origin send in order."""

    entry: ObjectEntry
    fetching: ChunkFetcher
    streams: bool = False

    async def by_chunks(self, start: int, stop: int) -> AsyncGenerator[Piece, None]:
        """Yield bytes of an object that has ranges."""
        entry, chunks = self.entry, self.entry.chunks
        while start < stop:
            number = start // chunks.chunk_bytes
            self._look_ahead(number, stop)
            if number in chunks.trusted:
                piece = self._on_disk(start, stop)
                yield piece
                self._account(start, piece.count)
                start += piece.count
                continue
            fetch = self.fetching.fetch(entry, number, self, self.urgency)
            self.fetching.stats.coalesced += number not in self.started
            fetch.holders.add(self)
            try:
                view = await asyncio.shield(fetch.result)
                if view is not None:  # else it is on disk now
                    first = start - number * chunks.chunk_bytes
                    part = view[first : first + stop - start]
                    yield part
                    self._account(start, len(part), fetch)
                    start += len(part)
            finally:
                fetch.release(self)
            fetch.leave(self)

    async def in_order(self, start: int, stop: int | None) -> AsyncGenerator[Piece, None]:
        """Yield bytes of an object that is read from its beginning: behind its stream to the disk, or by a read of its
        own."""
        entry, chunks, fetching = self.entry, self.entry.chunks, self.fetching
        stream = entry.stream
        while stop is None or start < stop:
            number = start // chunks.chunk_bytes
            self.first, self.until = number, _TO_THE_END
            fetching.moved(entry)
            if chunks.size is not None and start >= chunks.size:
                return
            if number in chunks.trusted:
                piece = self._on_disk(start, _TO_THE_END if stop is None else stop)
                yield piece
                self._account(start, piece.count)
                start += piece.count
                continue
            if number in chunks:  # of an earlier process; if it is bad, the object is read again, past the disk
                await fetching.verify(entry, number, self)
                continue
            stream = entry.stream or stream
            if stream is None and (stream := _begin_stream(entry, fetching)) is not None:
                self.streams = True
            if stream is not None and number >= stream.next and not stream.ended:
                await stream.past(number)
                continue
            if stream is not None and stream.error is not None:
                raise stream.error
            break
        else:
            return
        self.streams = True
        async with contextlib.aclosing(_passed_stream(entry, fetching, self, start)) as views:
            async for view in views:
                part = view if stop is None else view[: stop - start]
                yield part
                self._account(start, len(part), passed=True)
                start += len(part)
                if stop is not None and start >= stop:
                    return

    def _look_ahead(self, number: int, stop: int) -> None:
        entry, fetching = self.entry, self.fetching
        self.first = number
        ahead_chunks = AHEAD_CHUNKS
        if not (fetching.disk.usable and not entry.gone and fetching.policy.roomy(entry.id)):
            ahead_chunks = 1 if fetching.crowded else _AHEAD_IN_MEMORY
        self.until = min(-(-stop // entry.chunks.chunk_bytes), number + ahead_chunks)
        if entry.chunks.settled:
            return
        for ahead in range(number, self.until):
            if ahead not in entry.chunks.trusted:
                fetching.fetch(entry, ahead, self, max(self.urgency, Urgency(ahead > number)))

    def _on_disk(self, start: int, stop: int) -> DiskPiece:
        """Return the longest piece from ``start`` on that is on disk, within the reader's chunks if they may be
        evicted."""
        chunks = self.entry.chunks
        if not chunks.settled:
            until = min(start // chunks.chunk_bytes + _PIECE_CHUNKS, self.until)
            stop = min(stop, until * chunks.chunk_bytes)
        assert self.entry.file is not None
        return DiskPiece(self.entry.file.fd, start, chunks.ready(start, stop, on_probation=True) - start)

    def _account(self, start: int, count: int, fetch: ChunkFetch | None = None, *, passed: bool = False) -> None:
        """Account for ``count`` bytes that the reader has taken, from the memory of ``fetch`` if there is one.
        ``passed``: they were never on disk."""
        entry, fetching, chunks = self.entry, self.fetching, self.entry.chunks
        stop = start + count
        if fetch is not None:
            passed = fetch.stored.done() and not fetch.stored.result()
            fetch.served_bytes += count
            fetch.read_through = fetch.read_through or stop >= chunks.bounds(fetch.number)[1]
        fetching.policy.served(entry.id, count)
        miss = count if self.streams else 0
        for number in chunks.over(start, stop) if self.started or chunks.on_probation else ():
            first, last = chunks.bounds(number)
            if number in self.started and not self.streams:
                miss += min(last, stop) - max(first, start)
            if stop >= last and number in chunks.on_probation:
                fetching.policy.probation.spend((entry.id, number))
        hit = count - miss
        fetching.stats.count_served(self.client.tenant, hit=hit, miss=miss, ahead=fetching.take_ahead(entry, hit))
        fetching.stats.passed_bytes += count if passed else 0


# -- objects that are read in order


def _begin_stream(entry: ObjectEntry, fetching: ChunkFetcher) -> StreamFetch | None:
    """Begin to read the object into its file, if it can be kept."""
    if not fetching.disk.usable or entry.gone or entry.chunks.numbers():
        return None
    stream = entry.stream = StreamFetch()
    stream.task = fetching.start(_run_stream(entry, fetching, stream))
    return stream


async def _run_stream(entry: ObjectEntry, fetching: ChunkFetcher, stream: StreamFetch) -> None:
    try:
        await _stream_to_disk(entry, fetching, stream)
    except Exception as exn:
        stream.error = exn
    finally:
        stream.ended = True
        entry.stream = None
        async with stream.progress:
            stream.progress.notify_all()
        fetching.settle(entry)


async def _stream_to_disk(entry: ObjectEntry, fetching: ChunkFetcher, stream: StreamFetch) -> None:
    buffer, filled = memoryview(bytearray(entry.chunks.chunk_bytes)), 0
    async with _checked_stream(entry, fetching) as views:
        async for view in views:
            while len(view):
                count = min(len(view), len(buffer) - filled)
                buffer[filled : filled + count] = view[:count]
                filled, view = filled + count, view[count:]  # noqa: PLW2901 (what is left of it)
                if filled == len(buffer):
                    if not await _write_next(entry, fetching, stream, buffer):
                        return
                    filled = 0
    size = stream.next * len(buffer) + filled
    entry.chunks.size = size
    if filled and not await _write_next(entry, fetching, stream, buffer[:filled]):
        entry.chunks.size = entry.facts.size
        return
    entry.ended(size)
    fetching.journal.used(entry)


async def _write_next(entry: ObjectEntry, fetching: ChunkFetcher, stream: StreamFetch, data: memoryview) -> bool:
    """Write the next chunk; without room, wait until readers have moved on. False if it cannot be written at all."""
    while True:
        stream.moved.clear()
        if await fetching.keep(entry, stream.next, data, wanted=True):
            break
        awaited = any(reader.first >= stream.next for reader in entry.readers)
        if awaited or entry.gone or not fetching.disk.usable:
            return False
        await stream.moved.wait()
    async with stream.progress:
        stream.next += 1
        stream.progress.notify_all()
    return True


async def _passed_stream(
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
            raise ObjectChanged(
                f"{url}: it was replaced: {was!r} was opened, {facts.version!r} is there now. Open it again."
            ).at(url, 0)
        yield views
