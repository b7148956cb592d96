"""Objects that can be read in order only, or whose ranges nobody could tell apart: read once, written down, and read
behind that by whoever wants them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from wds_async.chunkcache.entries import Entry, Reader
from wds_async.chunkcache.fetching import Fetching
from wds_async.chunkcache.origin import Urgency
from wds_async.errors import ObjectChanged
from wds_async.redact import redact

__all__ = ["StreamFlight", "begin_stream", "passed_stream"]


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
            if facts.identity != entry.facts.identity:
                entry.checked = float("-inf")
                raise _changed(entry, facts.identity)
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
        if facts.identity != entry.facts.identity:
            entry.checked = float("-inf")
            raise _changed(entry, facts.identity)
        async for view in views:
            skipped, at = max(0, start - at), at + len(view)
            if skipped < len(view):
                yield view[skipped:]


def _changed(entry: Entry, now: str) -> ObjectChanged:
    url = redact(entry.url)
    was = entry.facts.identity
    return ObjectChanged(f"{url}: it was replaced: {was!r} was opened, {now!r} is there now. Open it again.").at(url, 0)
