"""The body of an answer, from the cache to the client, without holding memory for who takes it slowly.

Pieces that come from a disk cost nothing while a client takes its time. Pieces in memory (there is no cache, or no room
in it) are memory that all clients share: what one of them does not take within a moment goes to a file without a name,
and the next piece is asked for when that file is empty. Where there is no place for such a file, it is let go, and
asked for again when the client has taken what was sent: that costs the origin's bytes, and nobody's time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from typing import TYPE_CHECKING, Any

from wds_async.chunkcache.cache import CachedObject
from wds_async.chunkcache.pieces import OnDisk, Piece
from wds_async.environment import MIB
from wds_async.service.delivery import Delivery

if TYPE_CHECKING:
    from wds_async.service.running import Service

__all__ = ["Body", "Spill"]

logger = logging.getLogger("wds_async")

_RUN_BYTES = 2 * MIB
"""What is asked for at once for who is slow: a chunk of the cache, and nothing ahead of it."""
_QUICK_S = 1.0
_NOTHING = OnDisk(-1, 0, 0)


class Spill:
    """A file without a name that one client's rest lies in; in ``folder``, or where temporary files are."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: Any = None

    def put(self, view: memoryview) -> OnDisk:
        """Write ``view`` in place of what was there before. OSError where there is no room for it. Blocks."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder or None, buffering=0)  # noqa: SIM115 (see `close`)
        at = 0
        while at < view.nbytes:
            at += os.pwrite(self._file.fileno(), view[at:], at)
        return OnDisk(self._file.fileno(), 0, view.nbytes)

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


class Body:
    """Bytes ``[start, stop)`` of an object (to its end where ``stop`` is None) on their way to one client."""

    def __init__(self, service: Service, held: CachedObject, start: int, stop: int | None) -> None:
        self._service, self._held = service, held
        self._at, self._stop = start, stop
        self._pieces: Any = None
        self._first: Piece | None = None
        self._spill = Spill(service.config.folder)

    async def begin(self) -> None:
        """Wait for the first piece. The tree's errors, as long as there is nothing to be broken off."""
        self._pieces = self._held.pieces(self._at, self._stop)
        self._first = await anext(self._pieces, None)

    async def send(self, delivery: Delivery) -> None:
        """All of it. What `Delivery.send` raises, and the tree's errors."""
        piece, until = self._first, self._stop
        while True:
            rest: OnDisk | None = None
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
        self._spill.close()

    async def _passed(self, delivery: Delivery, piece: Piece) -> OnDisk | None:
        """Send a piece; what the client did not take of it, in a file."""
        if not isinstance(piece, memoryview):
            await delivery.send(piece)
            self._at += piece.count
            return None
        if self._stop is None or not self._held.facts.ranged:  # it cannot be asked for again from the middle
            await delivery.send(piece)
            self._at += piece.nbytes
            return None
        taken = await delivery.offer(piece)
        self._at += taken
        if taken == piece.nbytes:
            return None
        try:
            return await self._service.call(self._spill.put, piece[taken:])
        except OSError as exn:
            logger.debug("a slow client's rest has no place, and is fetched again: %s", exn.strerror)
            return _NOTHING

    async def _emptied(self, delivery: Delivery, rest: OnDisk) -> bool:
        """Send what was put aside, while nothing more is asked for; whether the client was quick about it."""
        await self._pieces.aclose()
        began = asyncio.get_running_loop().time()
        await delivery.copy(rest)
        self._at += rest.count
        return asyncio.get_running_loop().time() - began < _QUICK_S
