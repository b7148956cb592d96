"""Members of archives (``?archpath=``): the place of each in its tar, cached for the archives that were used last."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from collections import OrderedDict
from contextlib import aclosing
from typing import Any

from wds_async.environment import MIB
from wds_async.redact import redact
from wds_async.service.cache.cache import CachedObject
from wds_async.service.cache.fetching import Piece
from wds_async.service.delivery import CachedFileFault
from wds_async.service.preconditions import ByteRange
from wds_async.service.refusals import Refusal
from wds_async.storage.base import Call
from wds_async.tar.index import scan

__all__ = ["Archives"]

logger = logging.getLogger("wds_async")
_PACKED = (".tgz", ".gz", ".xz", ".zst", ".bz2", ".lz4", ".zip")
_MOST_MEMBERS = 200_000
_SCANS_AT_ONCE = 2


class Archives:
    """Tables of members by the archive's URL and version; together at most ``most`` members, some 200 bytes each. Two
    archives are scanned at once: a scan costs a core's time, which other answers need."""

    def __init__(self, most: int = _MOST_MEMBERS) -> None:
        self._most, self._held = most, 0
        self._tables: OrderedDict[tuple[str, str], dict[str, ByteRange]] = OrderedDict()
        self._being_made: dict[tuple[str, str], asyncio.Lock] = {}
        self._scans = asyncio.Semaphore(_SCANS_AT_ONCE)

    async def member(self, held: CachedObject, name: str, call: Call) -> ByteRange:
        """Return the place of the member ``name`` in a plain tar. Refusal (404) if it has none, 501 for a compressed
        archive; `NotATar` and its kin for what is no tar."""
        path = held.url.partition("?")[0].lower()
        if path.endswith(_PACKED):
            words = (
                f"{redact(held.url)} is compressed: its members have no place of their own; store it as a plain .tar"
            )
            raise Refusal(501, words, "not-here")
        place = (await self.table(held, call)).get(name)
        if place is None:
            raise Refusal(404, f"{redact(held.url)}: archived file {name[:200]!r} does not exist", "missing")
        return place

    async def table(self, held: CachedObject, call: Call) -> dict[str, ByteRange]:
        """Return the members of an archive. An unknown one is read from end to end, once for all that wait."""
        key = held.url, held.facts.version
        lock = self._being_made.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if key in self._tables:
                    self._tables.move_to_end(key)
                    return self._tables[key]
                async with self._scans:
                    made = await _scanned(held, call)
                if held.facts.version and len(made) <= self._most:
                    self._keep(key, made)
                return made
        finally:
            if not lock.locked():
                self._being_made.pop(key, None)

    def _keep(self, key: tuple[str, str], made: dict[str, ByteRange]) -> None:
        self._tables[key] = made
        self._held += len(made)
        while self._held > self._most:
            _, gone = self._tables.popitem(last=False)
            self._held -= len(gone)


async def _scanned(held: CachedObject, call: Call) -> dict[str, ByteRange]:
    """Return the members of the tar; chunks on disk that cannot be read are fetched again."""
    try:
        return await _walked(held, call)
    except CachedFileFault as exn:
        logger.warning("%s: its copy on disk is compared and read again: %s", redact(held.url), exn)
        held.distrust()
        return await _walked(held, call)


async def _walked(held: CachedObject, call: Call) -> dict[str, ByteRange]:
    """Scan the tar on a thread, which requests one piece after the other from this loop."""
    loop = asyncio.get_running_loop()
    left = False
    source: Any = held.pieces(0, None)
    async with aclosing(source) as pieces:

        async def following() -> bytes | tuple[int, int, int] | None:
            piece: Piece | None = await anext(pieces, None)
            # Memory is valid until the next piece is requested, and the walk may hold two of them.
            if isinstance(piece, memoryview):
                return bytes(piece)
            return None if piece is None else (piece.fd, piece.offset, piece.count)

        waiting: list[concurrent.futures.Future[bytes | tuple[int, int, int] | None]] = []

        def read() -> memoryview | None:
            if left:
                return None
            waiting[:] = [asyncio.run_coroutine_threadsafe(following(), loop)]
            found = waiting[0].result()
            data = _file_bytes(*found) if isinstance(found, tuple) else found
            return None if data is None else memoryview(data)

        def walk() -> dict[str, ByteRange]:
            return {name: ByteRange(start, start + size) for name, start, size in scan(read, held.url)}

        try:
            members: dict[str, ByteRange] = await call(walk)
            return members
        finally:
            left = True
            for one in waiting:
                one.cancel()


def _file_bytes(fd: int, offset: int, count: int) -> bytes:
    data = bytearray()
    try:
        while len(data) < count:
            part = os.pread(fd, min(count - len(data), 8 * MIB), offset + len(data))
            if not part:
                raise CachedFileFault(f"it ended at byte {offset + len(data)}")
            data += part
    except OSError as exn:
        if isinstance(exn, CachedFileFault):
            raise
        raise CachedFileFault(f"at byte {offset + len(data)}: {exn.strerror}") from exn
    return bytes(data)
