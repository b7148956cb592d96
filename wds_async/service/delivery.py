"""A body on its way to a client: from memory by writing, from a file by ``sendfile``, no faster than it is taken.

What a client has not taken lies in its socket's own buffer and nowhere else. A body goes out in slices, each of about
as much as the client takes in a second: who does not take one within the time allowed is let go.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from wds_async.environment import KIB, MIB
from wds_async.storage.base import Call

__all__ = ["Delivery", "Filed"]

_SLICE_AT_LEAST, _SLICE_AT_FIRST, _SLICE_AT_MOST = 64 * KIB, 512 * KIB, 16 * MIB
_QUICK_S, _SLOW_S = 0.25, 1.0
_READ_AT_ONCE = 64 * KIB
"""What is this short is read and sent along with the head: one system call for both, where a file takes two."""
_COPIED_BYTES = 256 * KIB
"""Most of a client's that lies in memory of its own: what a transport has not sent it keeps, without a copy."""
_PATIENCE_S = 0.5


class Filed(Protocol):
    """Bytes of a file that is open: ``count`` of them from ``offset`` on."""

    @property
    def fd(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def count(self) -> int: ...


class _File:
    """What the loop's ``sendfile`` wants of a file."""

    __slots__ = ("_fd",)

    mode = "rb"

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd


class Delivery:
    """The body of one answer whose head was prepared. ``call`` runs a blocking function on a thread; ``pace`` waits
    until so many bytes may go. ``plain``: whether bytes may pass the writer by (not where it cuts them into chunks)."""

    def __init__(
        self,
        request: web.BaseRequest,
        writer: AbstractStreamWriter,
        *,
        call: Call,
        timeout_s: float,
        pace: Callable[[int], Awaitable[None]] | None = None,
        plain: bool = True,
    ) -> None:
        assert request.transport is not None
        self.sent = 0
        """Bytes of the body that are sent, or in the socket's buffer."""
        self._transport, self._call = request.transport, call
        self._writer: Any = writer
        self._draining: asyncio.Future[None] | None = None
        self._timeout_s, self._pace = timeout_s, pace
        self._by_file = plain and self._transport.get_extra_info("sslcontext") is None
        self._slice = _SLICE_AT_FIRST
        # Without a buffer of its own the transport waits for the last byte: pieces are memory that others wait for.
        # 1 and not 0: over TLS asyncio would take an empty buffer for a full one, and wait.
        self._transport.set_write_buffer_limits(1, 0)

    async def send(self, piece: Filed | memoryview) -> None:
        """Send one piece. ConnectionError where the client has gone, TimeoutError where it takes no more."""
        if isinstance(piece, memoryview):
            await self._in_slices(piece.nbytes, lambda at, stop: self._write(bytes(piece[at:stop])), _COPIED_BYTES)
        elif not self._by_file or piece.count <= _READ_AT_ONCE:
            await self.copy(piece)
        else:
            headers: Any = getattr(self._writer, "send_headers", None)  # aiohttp before 3.12 has sent them
            if headers is not None:
                headers()
            await self._in_slices(piece.count, lambda at, stop: self._file(piece.fd, piece.offset + at, stop - at))

    async def offer(self, view: memoryview) -> int:
        """Send of ``view`` what the client takes without delay; how many bytes that was. They are sent, or copied: the
        memory may go. Errors as of `send`."""
        at = 0
        while at < view.nbytes and await self._drained(_PATIENCE_S):
            stop = min(view.nbytes, at + _COPIED_BYTES)
            if self._pace is not None:
                await self._pace(stop - at)
            await self._writer.write(bytes(view[at:stop]), drain=False)
            self.sent += stop - at
            at = stop
        return at

    async def copy(self, piece: Filed) -> None:
        """Send a piece by memory: over TLS, in chunks, or where the file's pages are soon to be others."""
        await self._in_slices(piece.count, lambda at, stop: self._copy(piece.fd, piece.offset + at, stop - at))

    def close(self) -> None:
        """Nothing more is sent."""
        if self._draining is not None:
            self._draining.cancel()

    async def _drained(self, within_s: float) -> bool:
        """Whether the socket has taken all that was written, waiting for so long. ConnectionError where it will not."""
        if self._draining is None:
            if not self._transport.get_write_buffer_size() and not self._transport.is_closing():
                return True
            self._draining = asyncio.ensure_future(self._writer.drain())
        # Not cancelled where it takes longer: what waits behind it would be cancelled too.
        done, _ = await asyncio.wait({self._draining}, timeout=within_s)
        if not done:
            return False
        draining, self._draining = self._draining, None
        await draining
        return True

    async def _in_slices(
        self, count: int, send: Callable[[int, int], Awaitable[None]], most: int = _SLICE_AT_MOST
    ) -> None:
        at, loop = 0, asyncio.get_running_loop()
        if self._pace is not None:
            most = min(
                most, _COPIED_BYTES
            )  # or a client would have seconds' worth at once, and then nothing for seconds
        if not await self._drained(self._timeout_s):
            raise TimeoutError
        while at < count:
            stop = min(count, at + min(self._slice, most))
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

    async def _write(self, data: bytes) -> None:
        await self._writer.write(data)
        await self._writer.drain()

    async def _copy(self, fd: int, offset: int, count: int) -> None:
        while count:
            wanted = min(count, _COPIED_BYTES)
            short = wanted <= _READ_AT_ONCE
            data = os.pread(fd, wanted, offset) if short else await self._call(os.pread, fd, wanted, offset)
            if not data:
                raise ConnectionAbortedError("the cached file ended early")
            await self._write(data)
            offset, count = offset + len(data), count - len(data)

    async def _file(self, fd: int, offset: int, count: int) -> None:
        loop = asyncio.get_running_loop()
        if self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        file: Any = _File(fd)
        try:
            sent = await loop.sendfile(self._transport, file, offset, count, fallback=False)
        except asyncio.SendfileNotAvailableError:  # not with this file system; or the client has just gone
            await self._copy(fd, offset, count)
            return
        if sent != count:
            raise ConnectionAbortedError("the cached file ended early")
