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
from wds_async.service.cache.fetching import DiskPiece, Piece
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
        self._most = most
        self._tables: OrderedDict[tuple[str, str], dict[str, ByteRange]] = OrderedDict()
        self._being_made: dict[tuple[str, str], asyncio.Lock] = {}
        self._scans = asyncio.Semaphore(_SCANS_AT_ONCE)

    async def member(self, held: CachedObject, name: str, call: Call) -> ByteRange:
        """Return the place of the member ``name`` in a plain tar. Refusal (404) if it has none, 501 for a compressed
        archive; `NotATar` and its kin for what is no tar."""
        path = held.url.partition("?")[0].lower()
        if path.endswith(_PACKED):
            words = "is compressed: its members have no place of their own; store it as a plain .tar"
            raise Refusal(501, f"{redact(held.url)} {words}", "not-here")
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
                    try:
                        made = await _walked(held, call)
                    except CachedFileFault as exn:
                        logger.warning("%s: its copy on disk is compared and read again: %s", redact(held.url), exn)
                        held.distrust()
                        made = await _walked(held, call)
                if held.facts.version and len(made) <= self._most:
                    self._tables[key] = made
                    while sum(map(len, self._tables.values())) > self._most:
                        self._tables.popitem(last=False)
                return made
        finally:
            if not lock.locked():
                self._being_made.pop(key, None)


async def _walked(held: CachedObject, call: Call) -> dict[str, ByteRange]:
    """Scan the tar on a thread, which requests one piece after the other from this loop."""
    loop = asyncio.get_running_loop()
    left = False
    source: Any = held.pieces(0, None)
    async with aclosing(source) as pieces:

        async def following() -> bytes | DiskPiece | None:
            piece: Piece | None = await anext(pieces, None)
            # Memory is valid until the next piece is requested, and the walk may hold two of them.
            return bytes(piece) if isinstance(piece, memoryview) else piece

        waiting: list[concurrent.futures.Future[bytes | DiskPiece | None]] = []

        def read() -> memoryview | None:
            if left:
                return None
            waiting[:] = [asyncio.run_coroutine_threadsafe(following(), loop)]
            piece = waiting[0].result()
            data = _file_bytes(piece) if isinstance(piece, DiskPiece) else piece
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


def _file_bytes(piece: DiskPiece) -> bytes:
    data = bytearray()
    while len(data) < piece.count:
        at = piece.offset + len(data)
        try:
            part = os.pread(piece.fd, min(piece.count - len(data), 8 * MIB), at)
        except OSError as exn:
            raise CachedFileFault(f"at byte {at}: {exn.strerror}") from exn
        if not part:
            raise CachedFileFault(f"it ended at byte {at}")
        data += part
    return bytes(data)
