"""Bodies of answers: from memory or a file to a client, no faster than the client takes them.

Memory is shared by all clients: what one does not take within a moment goes to a temporary file, and the next piece is
requested when that is empty. Without room for the file it is dropped, and requested again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wds_async.environment import KIB, MIB
from wds_async.redact import redact
from wds_async.service.cache.cache import CachedObject
from wds_async.service.cache.fetching import DiskPiece, Piece
from wds_async.service.cache.origin import Urgency
from wds_async.service.http_server import HttpRequest
from wds_async.storage.base import Call
from wds_async.storage.filewriting import write_all

__all__ = ["BodyWriter", "CachedFileFault", "Delivery", "SpillFile"]

logger = logging.getLogger("wds_async")
_RUN_BYTES = 2 * MIB  # requested at once for a slow client: a chunk of the cache, without read-ahead
_TAKEN_SOON_S, _PATIENCE_S = 1.0, 0.5
_NOTHING = DiskPiece(-1, 0, 0)
_FAULTS_AT_MOST = 8  # of the disk, in one body
_SLICE_AT_LEAST, _SLICE_AT_MOST = 64 * KIB, 256 * KIB  # of what is copied: the most of one client in memory of its own
_QUICK_S, _SLOW_S = 0.25, 1.0
_TURN_BYTES = 2 * MIB  # sent to one client from a file before the others have their turn
_DISK_FAULTS = frozenset(
    getattr(errno, name) for name in ("EIO", "ESTALE", "ENXIO", "ENODEV", "EUCLEAN", "EBADMSG") if hasattr(errno, name)
)
_NO_SENDFILE = frozenset((errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP))
_MORE = getattr(socket, "MSG_MORE", 0)
"""With the head: it leaves with the first bytes of the file, or the kernel would wake the client for each."""


class CachedFileFault(ConnectionAbortedError):
    """A piece's file is too short or cannot be read. `Delivery.sent` counts what was sent before."""


class SpillFile:
    """A temporary file for the bytes that one client has not taken; in ``folder``, or where temporary files are."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: Any = None

    def put(self, view: memoryview) -> DiskPiece:
        """Overwrite the file with ``view``. OSError without room. Blocks."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder or None, buffering=0)  # noqa: SIM115 (see `close`)
        write_all(self._file.fileno(), view, 0)
        return DiskPiece(self._file.fileno(), 0, view.nbytes)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()


class BodyWriter:
    """Bytes ``[start, stop)`` of an object (to its end if ``stop`` is None) on their way to one client."""

    def __init__(
        self,
        held: CachedObject,
        start: int,
        stop: int | None,
        *,
        call: Call,
        spill_folder: str,
        urgency: Urgency = Urgency.DEMAND,
    ) -> None:
        self._held, self._call, self._spill_folder, self._urgency = held, call, spill_folder, urgency
        self._at, self._stop = start, stop
        self._pieces: Any = None
        self._first: Piece | None = None
        self._spill: SpillFile | None = None
        self._faults = 0

    async def begin(self) -> None:
        """Wait for the first piece. Raises the tree's errors while the answer still can have another status."""
        held, stop = self._held, self._stop
        if stop is not None and held.fd >= 0 and not held.discovered and held.ready(self._at, stop) >= stop:
            return  # all of it is on disk, stays there, and was not just fetched for this body
        self._first = await self._requested(stop)

    async def _requested(self, stop: int | None) -> Piece | None:
        """Request the pieces up to ``stop``, and return the first."""
        self._pieces = self._held.pieces(self._at, stop, self._urgency)
        piece: Piece | None = await anext(self._pieces, None)
        return piece

    async def send(self, delivery: Delivery) -> None:
        """Send all of it. Raises what `Delivery.send` raises, and the tree's errors."""
        if self._pieces is None and self._stop is not None:
            before = delivery.sent
            try:
                if await self._from_disk(delivery, DiskPiece(self._held.fd, self._at, self._stop - self._at)):
                    return
            finally:
                self._held.served(delivery.sent - before)
            self._first = await self._requested(self._stop)
        piece, until = self._first, self._stop
        while True:
            rest: DiskPiece | None = None
            while piece is not None and rest is None:
                rest = await self._passed(delivery, piece)
                piece = await anext(self._pieces, None) if rest is None else None
            slow = False
            if rest is not None:  # nothing more is fetched until the client has taken it
                await self._pieces.aclose()
                began = asyncio.get_running_loop().time()
                await delivery.copy(rest)
                self._at += rest.count
                slow = asyncio.get_running_loop().time() - began >= _TAKEN_SOON_S
            if self._stop is None or self._at >= self._stop or (rest is None and self._at < (until or 0)):
                return  # at its end; or too early, which the caller sees by `Delivery.sent`
            until = min(self._stop, self._at + _RUN_BYTES - self._at % _RUN_BYTES) if slow else self._stop
            await self._pieces.aclose()
            piece = await self._requested(until)

    async def aclose(self) -> None:
        """Release the pieces and the temporary file."""
        if self._pieces is not None:
            await self._pieces.aclose()
        if self._spill is not None:
            self._spill.close()

    async def _from_disk(self, delivery: Delivery, piece: DiskPiece) -> bool:
        """Send a piece of the cached file. False if its rest cannot be read: then each chunk is verified, and bad ones
        are fetched again. CachedFileFault if that has not helped."""
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
        """Send a piece, and return what the client did not take of it, as a temporary file."""
        if not isinstance(piece, memoryview):
            return None if await self._from_disk(delivery, piece) else _NOTHING
        if self._stop is None or not self._held.facts.ranged:  # it cannot be requested again from the middle
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
        self._spill = self._spill or SpillFile(self._spill_folder)
        try:
            rest: DiskPiece = await self._call(self._spill.put, piece[taken:])
            return rest
        except OSError as exn:
            logger.debug("a slow client's rest has no place, and is fetched again: %s", exn.strerror)
            return _NOTHING


class Delivery:
    """An answer whose body comes in pieces: `send` them, `finish`, and `close`. ``length``: of the body; None if
    unknown. ``call`` runs a blocking function on a thread; ``pace`` waits until so many bytes may be sent."""

    def __init__(
        self,
        request: HttpRequest,
        status: int,
        fields: Mapping[str, str],
        length: int | None,
        *,
        call: Call,
        timeout_s: float,
        pace: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.sent = 0
        """Bytes of the body that are sent, or in the socket's buffer."""
        self._chunked = length is None and request.chunked
        if length is None and not self._chunked:
            request.keep_alive = False
        self._head = request.head(status, fields, length)
        self._connection, self._call = request.connection, call
        self._draining: asyncio.Future[None] | None = None
        self._timeout_s, self._pace = timeout_s, pace
        self._by_file = not self._chunked and not self._connection.secure
        self._slice = _SLICE_AT_MOST
        self._connection.unbuffered()  # pieces are memory that others wait for
        if pace is not None:  # the head waits for no turn
            self._connection.write(self._head)
            self._head = b""

    async def send(self, piece: Piece) -> None:
        """Send one piece. ConnectionError if the client has gone, TimeoutError if it takes no more, `CachedFileFault`
        if the piece's file fails."""
        if isinstance(piece, memoryview):
            await self._in_slices(piece.nbytes, lambda at, stop: self._written(bytes(piece[at:stop])))
        elif self._by_file:
            await self._send_file(piece.fd, piece.offset, piece.count)
        else:
            await self.copy(piece)

    async def offer(self, view: memoryview) -> int:
        """Send what the client takes of ``view`` without delay, and return how many bytes. They are sent or copied: the
        memory may be reused. Errors as of `send`."""
        at = 0
        while at < view.nbytes and await self._drained(_PATIENCE_S):
            stop = min(view.nbytes, at + _SLICE_AT_MOST)
            if self._pace is not None:
                await self._pace(stop - at)
            self._write(bytes(view[at:stop]))
            self.sent += stop - at
            at = stop
        return at

    async def copy(self, piece: DiskPiece) -> None:
        """Send a piece through memory: over TLS, in chunks, or from a file whose pages are about to change."""

        async def send_slice(at: int, stop: int) -> None:
            try:
                data = await self._call(os.pread, piece.fd, stop - at, piece.offset + at)
            except OSError as exn:
                raise CachedFileFault(f"at byte {piece.offset + at}: {exn.strerror}") from exn
            if len(data) != stop - at:
                raise CachedFileFault(f"it ended at byte {piece.offset + at + len(data)}")
            await self._written(data)

        await self._in_slices(piece.count, send_slice)

    def finish(self) -> None:
        """End the body: send the rest of its frame."""
        if self._chunked or self._head:
            self._write(b"")

    def close(self) -> None:
        """Cancel waiting for the client."""
        if self._draining is not None:
            self._draining.cancel()

    async def _drained(self, within_s: float) -> bool:
        """Return whether the socket takes all that was written within that time. ConnectionError if it is closed."""
        if self._draining is None:
            if not self._connection.unsent and not self._connection.closing:
                return True
            self._draining = asyncio.ensure_future(self._connection.drained())
        # Not cancelled where it takes longer: what waits behind it would be cancelled too.
        done, _ = await asyncio.wait({self._draining}, timeout=within_s)
        if not done:
            return False
        draining, self._draining = self._draining, None
        await draining
        return True

    async def _in_slices(self, count: int, send: Callable[[int, int], Awaitable[None]]) -> None:
        at, loop = 0, asyncio.get_running_loop()
        if not await self._drained(self._timeout_s):
            raise TimeoutError
        while at < count:
            stop = min(count, at + self._slice)
            if self._pace is not None:
                await self._pace(stop - at)
            began = loop.time()
            async with asyncio.timeout(self._timeout_s):
                await send(at, stop)
            took = loop.time() - began
            self.sent += stop - at
            at = stop
            if took < _QUICK_S:
                self._slice = min(_SLICE_AT_MOST, self._slice * 2)
            elif took > _SLOW_S:
                self._slice = max(_SLICE_AT_LEAST, self._slice // 2)

    def _write(self, data: bytes) -> None:
        """Write ``data`` together with the head, if that is unsent: the kernel would wake the client for each."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        head, self._head = self._head, b""
        self._connection.write(head + data if head else data)

    async def _written(self, data: bytes) -> None:
        self._write(data)
        await self._connection.drained()

    async def _send_file(self, fd: int, offset: int, count: int) -> None:
        """Send by ``sendfile``, past the transport, which goes on reading: a client's leaving is noticed meanwhile."""
        if not await self._drained(self._timeout_s):
            raise TimeoutError
        own, turn = self._connection.own_socket, 0
        while count:
            if not turn:
                turn = min(count, _TURN_BYTES if self._pace is None else _SLICE_AT_MOST)
                if self._pace is not None:
                    await self._pace(turn)
            if self._connection.closing:
                raise ConnectionResetError("the client has gone")
            try:
                if self._head:
                    self._head = self._head[own.send(self._head, _MORE) :]
                sent = 0 if self._head else os.sendfile(own.fileno(), fd, offset, turn)
                if not sent and not self._head:
                    raise CachedFileFault(f"it ended at byte {offset}")
            except BlockingIOError:
                sent = 0
            except OSError as exn:
                if exn.errno in _DISK_FAULTS:
                    raise CachedFileFault(f"at byte {offset}: {exn.strerror}") from exn
                if exn.errno not in _NO_SENDFILE:
                    raise
                await self.copy(DiskPiece(fd, offset, count))
                return
            offset, count, turn, self.sent = offset + sent, count - sent, turn - sent, self.sent + sent
            if count:
                await self._writable(own.fileno())

    async def _writable(self, fd: int) -> None:
        """Wait until the socket has room, after other tasks. TimeoutError if that takes too long."""
        loop = asyncio.get_running_loop()
        room = asyncio.Event()
        loop.add_writer(fd, room.set)
        try:
            async with asyncio.timeout(self._timeout_s):
                await room.wait()
        finally:
            loop.remove_writer(fd)
