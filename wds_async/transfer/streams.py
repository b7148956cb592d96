"""Streams: the whole body of an object in order, and the filling of slabs from any stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from wds_async.errors import TruncatedShard
from wds_async.redact import redact
from wds_async.storage.base import Answer, ObjectReplaced, RefusedAnswer, Request, Stream
from wds_async.storage.http.messages import same_object, version_of
from wds_async.transfer.connection import Connection, ConnectionBroken, Head, Origin, request_bytes
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.part_request import RangesIgnored, excerpt_of, follow
from wds_async.transfer.window import Part, Shard

__all__ = ["DirectStream", "StreamReader", "span_behind_end"]

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
        """True if it is a tar (POSIX or GNU) without its end; False for anything else, compressed tars among them."""
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
        """True if another attempt can be made after a fault."""
        return self._stream is None or self._stream.restartable

    async def fill(
        self,
        part: Part,
        make: Callable[[], Stream],
        hurried: Callable[[], bool],
        opened: Callable[[str, Mapping[str, str]], None],
    ) -> bool:
        """Fill ``part`` from where it stands; True at the end of the stream, or of what is wanted of it. ``make``
        returns the stream where it has to start (again): it may be another request by now. While the consumer waits
        (``hurried``) the part may stay short, so that a slow stream is not held back. ``opened`` takes the version and
        the head of an answer."""
        offset, shard = part.start, part.shard
        view, stop = part.slab.view, shard.stop
        if stop is not None:
            view = view[: stop - offset]
        if self._stream is None or self._position != offset + part.filled:
            # Of what was read in ranges before, every byte must be of the same object; at the start there is none.
            pinned = shard.state.version if offset + part.filled > shard.start else ""
            await self._start(make, part, pinned, opened)
        assert self._stream is not None
        try:
            while part.filled < len(view):
                count = await self._stream.readinto(view[part.filled :])
                self._took(view[part.filled : part.filled + count])
                part.filled += count
                if count == 0:
                    self._end(part)
                    await self.close()
                    return True
                if hurried() and part.filled < len(view):
                    return False
        except BaseException:
            self._position = -1
            raise
        if self._position == stop:
            await self.close()
        return self._position == stop

    async def close(self) -> None:
        """Stop the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()

    async def _start(
        self,
        make: Callable[[], Stream],
        part: Part,
        pinned: str,
        opened: Callable[[str, Mapping[str, str]], None],
    ) -> None:
        """Start (again), and pass over what stands before ``part`` or has come of it already."""
        position = part.start + part.filled
        await self.close()
        stream = make()
        self._stream, self._position = stream, -1
        version = await stream.open()
        for former in (self._version or "", pinned):
            if not same_object(former, version):
                raise ObjectReplaced(f"it was {former} and is now {version}")
        self._version = version
        opened(version, getattr(stream, "fields", {}))
        self._position = 0
        self._archive = _ArchiveEnd() if getattr(stream, "open_ended", False) else None
        scratch = memoryview(bytearray(min(_SKIP_BYTES, position)))
        while self._position < position:
            count = await stream.readinto(scratch[: min(len(scratch), position - self._position)])
            if count == 0:
                if position == part.shard.start and self._is_end():
                    raise span_behind_end(part.shard, self._position)
                raise ConnectionError(f"the stream ended at byte {self._position}, before byte {position}")
            self._took(scratch[:count])
            await asyncio.sleep(0)

    def _took(self, data: memoryview) -> None:
        self._position += len(data)
        if self._archive is not None and len(data):
            self._archive.add(data)

    def _end(self, part: Part) -> None:
        """Judge the end of the stream. ConnectionError where it may be a cut, and was not confirmed yet."""
        if not self._is_end():
            raise ConnectionError("the body has no length, and ended without the end of its archive")
        shard = part.shard
        if shard.stop is not None and self._position <= shard.start:
            raise span_behind_end(shard, self._position)
        in_doubt = self._archive is not None and self._archive.missing
        shard.state.end_stream(open_ended=self._archive is not None, in_doubt=in_doubt)

    def _is_end(self) -> bool:
        """Return whether the end that has come is believed: one that may be a cut, at the second time only."""
        before, self._ended_at = self._ended_at, self._position
        return self._archive is None or not self._archive.missing or before == self._position


def span_behind_end(shard: Shard, size: int) -> TruncatedShard:
    """Return the error of a span that begins behind the ``size`` bytes of its object, or at their end although bytes
    are expected there."""
    shown = redact(shard.url)
    return TruncatedShard(
        f"{shown}: bytes from {shard.start} on were requested, and it has {size} bytes. It was cut or replaced since it"
        " had more; copy it again, or begin without the saved state or index that named this place."
    ).at(shown, size)
