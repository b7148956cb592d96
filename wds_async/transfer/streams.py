"""Streams: the whole body of an object in order, and the filling of slabs from any stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from wds_async.storage.base import Answer, ObjectReplaced, RefusedAnswer, Request, Stream
from wds_async.storage.http.messages import same_object, version_of
from wds_async.transfer.connection import Connection, ConnectionBroken, Head, Origin, request_bytes
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.part_request import RangesIgnored, excerpt_of, follow
from wds_async.transfer.window import Part

__all__ = ["DirectStream", "StreamReader"]

_BLOCK = 512  # of a tar
_SKIP_BYTES = 1 << 20


class DirectStream:
    """The whole of an object with a ``Content-Length``, zero-copy, paused between reads."""

    restartable = True

    def __init__(self, pool: ConnectionPool, request: Request) -> None:
        self._pool = pool
        self._request = request
        self._stack = contextlib.AsyncExitStack()
        self._connection: Connection | None = None
        self._rest = 0
        self._keep_alive = False
        self.fields: Mapping[str, str] = {}
        """Head of the answer, in lower case, once it is open."""

    async def open(self) -> str:
        request = self._request
        while (head := await self._exchange(request)).status != 200:
            assert self._connection is not None
            excerpt = await excerpt_of(self._connection, head)
            await self.close()
            if head.status // 100 != 3 or "location" not in head.fields:
                raise RefusedAnswer(Answer(head.status, head.fields, excerpt))
            request = follow(request, head.fields["location"])
        if head.length is None or head.encoded:
            await self.close()
            raise RangesIgnored
        self._rest, self._keep_alive, self.fields = head.length, head.keep_alive, head.fields
        return version_of(head.fields, head.length)

    async def _exchange(self, request: Request) -> Head:
        raw, origin = request_bytes(request.url, request.headers), Origin.of(request.url, request.tls, request.socket)
        for fresh in (False, True):
            connection = await self._stack.enter_async_context(self._pool.connection(origin, fresh=fresh))
            self._connection, self._rest = connection, -1  # a body that is not read: `close` aborts
            try:
                return await connection.exchange(raw, lambda head: memoryview(b""))
            except ConnectionBroken:
                await self.close()
                if connection.exchanges == 1:
                    raise  # a kept one, that the server closed meanwhile, is no fault
        raise AssertionError("a fresh connection has no exchange before this one")

    async def readinto(self, into: memoryview) -> int:
        assert self._connection is not None
        count = min(len(into), self._rest)
        if count:
            await self._connection.body(into[:count])
        self._rest -= count
        return count

    async def close(self) -> None:
        if self._connection is not None and (self._rest or not self._keep_alive):
            self._connection.abort()
        self._connection = None
        await self._stack.aclose()


class _ArchiveEnd:
    """Detector of a tar's end: two blocks of zeros."""

    def __init__(self) -> None:
        self._head = self._tail = b""

    def add(self, data: memoryview) -> None:
        """Take the next bytes."""
        if len(self._head) < _BLOCK:
            self._head += bytes(data[: _BLOCK - len(self._head)])
        self._tail = (self._tail + bytes(data[-2 * _BLOCK :]))[-2 * _BLOCK :]

    @property
    def missing(self) -> bool:
        """Whether it is a tar (POSIX or GNU) without its end; False for what is none, compressed tars among them."""
        return self._head[257:262] == b"ustar" and (len(self._tail) < 2 * _BLOCK or any(self._tail))


class StreamReader:
    """One shard's stream over all its attempts, started again where that is possible.

    An end that nothing confirms (see `Stream`) and that is not the end of a tar is taken for a fault, until another
    attempt has ended at the same byte."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._version: str | None = None
        self._position = 0
        self._archive: _ArchiveEnd | None = None
        self._ended_at = -1

    @property
    def version(self) -> str:
        """Version of the stream; "" before it was opened, and where there is none."""
        return self._version or ""

    @property
    def restartable(self) -> bool:
        """Whether another attempt can be made after a fault."""
        return self._stream is None or self._stream.restartable

    async def fill(
        self,
        part: Part,
        make: Callable[[], Stream],
        hurried: Callable[[], bool],
        opened: Callable[[Mapping[str, str]], None],
    ) -> bool:
        """Fill ``part`` from where it stands; True at the end of the stream. ``make`` returns the stream where it has
        to start (again): it may be another request by now. While the consumer waits (``hurried``) the part may stay
        short, so that a slow stream is not held back. ``opened`` takes the head of an answer."""
        view, offset = part.slab.view, part.start
        if self._stream is None or self._position != offset + part.filled:
            # Of what was read in ranges before, every byte must be of the same object; from the start there is none.
            pinned = part.shard.state.version if offset + part.filled else ""
            await self._start(make, offset + part.filled, pinned)
            opened(getattr(self._stream, "fields", {}))
        assert self._stream is not None
        try:
            while part.filled < part.slab.size:
                count = await self._stream.readinto(view[part.filled :])
                self._took(view[part.filled : part.filled + count])
                part.filled += count
                if count == 0:
                    self._end(part)
                    await self.close()
                    return True
                if hurried():
                    return False
        except BaseException:
            self._position = -1
            raise
        return False

    async def close(self) -> None:
        """Stop the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()

    async def _start(self, make: Callable[[], Stream], position: int, pinned: str) -> None:
        await self.close()
        stream = make()
        self._stream, self._position = stream, -1
        version = await stream.open()
        for former in (self._version or "", pinned):
            if not same_object(former, version):
                raise ObjectReplaced(f"it was {former} and is now {version}")
        self._version = version
        self._position = 0
        self._archive = _ArchiveEnd() if getattr(stream, "open_ended", False) else None
        scratch = memoryview(bytearray(min(_SKIP_BYTES, position)))
        while self._position < position:
            count = await stream.readinto(scratch[: min(len(scratch), position - self._position)])
            if count == 0:
                raise ConnectionError(f"the stream ended at byte {self._position}, before byte {position}")
            self._took(scratch[:count])
            await asyncio.sleep(0)

    def _took(self, data: memoryview) -> None:
        self._position += len(data)
        if self._archive is not None and len(data):
            self._archive.add(data)

    def _end(self, part: Part) -> None:
        """Judge the end of the stream. ConnectionError where it may be a cut, and was not confirmed yet."""
        in_doubt = self._archive is not None and self._archive.missing
        if in_doubt and self._ended_at != self._position:
            self._ended_at = self._position
            raise ConnectionError("the body has no length, and ended without the end of its archive")
        part.shard.state.end_stream(open_ended=self._archive is not None, in_doubt=in_doubt)
