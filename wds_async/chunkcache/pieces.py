"""What a reader is given, piece by piece, while what comes next is fetched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from wds_async.chunkcache.entries import Entry, Flight, Reader
from wds_async.chunkcache.fetching import Fetching
from wds_async.chunkcache.origin import Client, Urgency
from wds_async.chunkcache.streaming import StreamFlight, begin_stream, passed_stream

__all__ = ["AHEAD_CHUNKS", "OnDisk", "Piece", "fetch", "read"]

AHEAD_CHUNKS = 16
"""Chunks that are asked for ahead of a reader: 32 MiB."""
_AHEAD_IN_MEMORY = 2
"""The same where they cannot be put on disk."""
_PIECE_CHUNKS = 8
_EVER = 1 << 62


@dataclass(frozen=True, slots=True)
class OnDisk:
    """``count`` bytes at ``offset`` of the file that is open as ``fd``: to be sent by ``sendfile``, or read.

    Good until the next piece is asked for, or the object is released.
    """

    fd: int
    offset: int
    count: int


Piece = OnDisk | memoryview
"""A memoryview is good until the next piece is asked for."""


async def read(
    entry: Entry, fetching: Fetching, client: Client, start: int, stop: int | None, urgency: Urgency
) -> AsyncGenerator[Piece, None]:
    """Bytes ``[start, stop)`` of an object, in order, as they arrive."""
    if entry.chunks.size is not None:
        stop = entry.chunks.size if stop is None else min(stop, entry.chunks.size)
    if stop is not None and start >= stop:
        return
    reader = Reader(client, urgency)
    if entry.discovered:
        entry.discovered = False
        reader.started.add(0)
    reading = _Reading(entry, fetching, reader)
    fetching.enter(entry, reader, start, stop)
    try:
        async with contextlib.aclosing(reading.pieces(start, stop)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        fetching.leave(entry, reader)
        reading.count_request()


async def fetch(
    entry: Entry, fetching: Fetching, client: Client, start: int, stop: int | None, urgency: Urgency
) -> int:
    """Bring bytes ``[start, stop)`` onto the disk, and give nothing to anybody; how many of them are there then. It
    ends early where there is no place for more."""
    reader = Reader(client, urgency)
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
    return entry.chunks.ready(start, stop or _EVER, passing=True) - start


async def _fetch_chunks(entry: Entry, fetching: Fetching, reader: Reader, start: int, stop: int) -> None:
    waiting: list[Flight] = []
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


async def _landed(flight: Flight, reader: Reader) -> bool:
    """Whether the chunk is on disk now."""
    try:
        return await asyncio.shield(flight.result) is None or await asyncio.shield(flight.stored)
    finally:
        flight.leave(reader)


def _may_stream(entry: Entry, fetching: Fetching) -> bool:
    return fetching.disk.usable and not entry.gone and not entry.chunks.numbers()


class _Reading:
    """One reader's way through an object."""

    def __init__(self, entry: Entry, fetching: Fetching, reader: Reader) -> None:
        self._entry = entry
        self._fetching = fetching
        self._reader = reader
        self._streams = False
        """Whether it reads what it made the origin give in order."""

    def count_request(self) -> None:
        """One more read: a hit, where nothing had to be fetched for it."""
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
        stream: StreamFlight | None = entry.stream
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
        """Ask for the chunks that come next."""
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

    def _on_disk(self, start: int, stop: int) -> OnDisk:
        """As much as is there; of what may go while it is read no more than the reader holds."""
        chunks = self._entry.chunks
        if not chunks.settled:
            until = min(start // chunks.chunk_bytes + _PIECE_CHUNKS, self._reader.until)
            stop = min(stop, until * chunks.chunk_bytes)
        assert self._entry.file is not None
        return OnDisk(self._entry.file.fd, start, chunks.ready(start, stop, passing=True) - start)

    def _given(self, start: int, count: int, flight: Flight | None = None, *, passed: bool = False) -> None:
        """Account for ``count`` bytes that the reader has taken, from the memory of ``flight`` if one is given.
        ``passed``: they never lay on disk."""
        entry, fetching, chunks = self._entry, self._fetching, self._entry.chunks
        if flight is not None:
            passed = flight.stored.done() and not flight.stored.result()
            flight.given_bytes += count
            flight.read_through = flight.read_through or start + count >= chunks.bounds(flight.number)[1]
        fetching.policy.served(entry.id, count)
        fetched = count if self._streams else 0
        for number in chunks.over(start, start + count) if self._reader.started or chunks.passing else ():
            first, last = chunks.bounds(number)
            if number in self._reader.started and not self._streams:
                fetched += min(last, start + count) - max(first, start)
            if start + count >= last and number in chunks.passing:
                fetching.policy.transit.spend((entry.id, number))
        hit = count - fetched
        fetching.stats.given(self._reader.client.tenant, hit=hit, miss=fetched, ahead=fetching.take_ahead(entry, hit))
        fetching.stats.passed_bytes += count if passed else 0
