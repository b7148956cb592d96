"""The body of an answer, from the cache to the client, without holding memory for who takes it slowly.

Pieces that come from a disk cost nothing while a client takes its time. Pieces in memory (there is no cache, or no room
in it) are memory that all clients share: what one of them does not take within a moment goes to a file without a name,
and the next piece is asked for when that file is empty. Where there is no place for such a file, it is let go, and
asked for again when the client has taken what was sent: that costs the origin's bytes, and nobody's time.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from typing import TYPE_CHECKING, Any

from wds_async.environment import MIB
from wds_async.redact import redact
from wds_async.service.cache.cache import CachedObject
from wds_async.service.cache.fetching import DiskPiece, Piece
from wds_async.service.delivery import CachedFileFault, Delivery
from wds_async.storage.filewriting import write_all

if TYPE_CHECKING:
    from wds_async.service.running import Service

__all__ = ["BodyWriter", "SpillFile"]

logger = logging.getLogger("wds_async")
_RUN_BYTES = 2 * MIB
"""What is asked for at once for who is slow: a chunk of the cache, and nothing ahead of it."""
_QUICK_S = 1.0
_NOTHING = DiskPiece(-1, 0, 0)
_FAULTS_AT_MOST = 8
"""Of the disk, in one body."""


class SpillFile:
    """A file without a name that one client's rest lies in; in ``folder``, or where temporary files are."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: Any = None

    def put(self, view: memoryview) -> DiskPiece:
        """Write ``view`` in place of what was there before. OSError where there is no room for it. Blocks."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder or None, buffering=0)  # noqa: SIM115 (see `close`)
        write_all(self._file.fileno(), view, 0)
        return DiskPiece(self._file.fileno(), 0, view.nbytes)

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


class BodyWriter:
    """Bytes ``[start, stop)`` of an object (to its end where ``stop`` is None) on their way to one client."""

    def __init__(self, service: Service, held: CachedObject, start: int, stop: int | None) -> None:
        self._service, self._held = service, held
        self._at, self._stop = start, stop
        self._pieces: Any = None
        self._first: Piece | None = None
        self._spill: SpillFile | None = None
        self._faults = 0

    async def begin(self) -> None:
        """Wait for the first piece. The tree's errors, as long as there is nothing to be broken off."""
        if self._on_disk():
            return
        self._pieces = self._held.pieces(self._at, self._stop)
        self._first = await anext(self._pieces, None)

    async def send(self, delivery: Delivery) -> None:
        """All of it. What `Delivery.send` raises, and the tree's errors."""
        if self._pieces is None and self._stop is not None:
            before = delivery.sent
            try:
                if await self._from_disk(delivery, DiskPiece(self._held.fd, self._at, self._stop - self._at)):
                    return
            finally:
                self._held.served(delivery.sent - before)
            self._pieces = self._held.pieces(self._at, self._stop)
            self._first = await anext(self._pieces, None)
        piece, until = self._first, self._stop
        while True:
            rest: DiskPiece | None = None
            while piece is not None and rest is None:
                rest = await self._passed(delivery, piece)
                piece = await anext(self._pieces, None) if rest is None else None
            slow = rest is not None and not await self._emptied(delivery, rest)
            if self._stop is None or self._at >= self._stop or (rest is None and self._at < (until or 0)):
                return  # at its end; or too early, which whoever asked sees by what was sent
            until = min(self._stop, self._at + _RUN_BYTES - self._at % _RUN_BYTES) if slow else self._stop
            await self._pieces.aclose()
            self._pieces = self._held.pieces(self._at, until)
            piece = await anext(self._pieces, None)

    async def aclose(self) -> None:
        """Let go of everything."""
        if self._pieces is not None:
            await self._pieces.aclose()
        if self._spill is not None:
            self._spill.close()

    def _on_disk(self) -> bool:
        """Whether all of it lies on the disk, stays there, and was not fetched just now for this body."""
        held, stop = self._held, self._stop
        return stop is not None and held.fd >= 0 and not held.discovered and held.ready(self._at, stop) >= stop

    async def _from_disk(self, delivery: Delivery, piece: DiskPiece) -> bool:
        """Send a piece of the cached file. False where its rest cannot be read: then each chunk is compared with its
        checksum, and what is bad is fetched again. CachedFileFault where that has not helped."""
        before = delivery.sent
        try:
            await delivery.send(piece)
        except CachedFileFault as exn:
            self._at += delivery.sent - before
            self._faults += 1
            self._held.distrust()
            if self._stop is None or self._faults > _FAULTS_AT_MOST:
                raise
            logger.warning("%s: its copy on disk is read again where it is good, and fetched where not: %s",
                           redact(self._held.url), exn)  # fmt: skip
            return False
        self._at += piece.count
        return True

    async def _passed(self, delivery: Delivery, piece: Piece) -> DiskPiece | None:
        """Send a piece; what the client did not take of it, in a file."""
        if not isinstance(piece, memoryview):
            return None if await self._from_disk(delivery, piece) else _NOTHING
        if self._stop is None or not self._held.facts.ranged:  # it cannot be asked for again from the middle
            await delivery.send(piece)
            self._at += piece.nbytes
            return None
        taken = await delivery.offer(piece)
        self._at += taken
        if taken == piece.nbytes:
            return None
        stored = self._held.ready(self._at, self._at + piece.nbytes - taken)
        if stored > self._at:  # it came to the cache's disk meanwhile
            return DiskPiece(self._held.fd, self._at, stored - self._at)
        self._spill = self._spill or SpillFile(self._service.config.folder)
        try:
            return await self._service.call(self._spill.put, piece[taken:])
        except OSError as exn:
            logger.debug("a slow client's rest has no place, and is fetched again: %s", exn.strerror)
            return _NOTHING

    async def _emptied(self, delivery: Delivery, rest: DiskPiece) -> bool:
        """Send what was put aside, while nothing more is asked for; whether the client was quick about it."""
        await self._pieces.aclose()
        began = asyncio.get_running_loop().time()
        await delivery.copy(rest)
        self._at += rest.count
        return asyncio.get_running_loop().time() - began < _QUICK_S
