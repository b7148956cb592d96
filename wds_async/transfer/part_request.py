"""One ranged GET of a part, straight into its slab, and the checks that make wrong bytes an error.

No answer is trusted: the status, the range and the length of every answer must be those asked for, and the version
that the first answer pinned must be that of each further one (RFC 9110 §13, §14).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from wds_async.storage.base import Answer, Contradiction, RefusedAnswer, Request
from wds_async.storage.http.messages import REDIRECTS, version_of
from wds_async.storage.http.messages import redirected as follow
from wds_async.transfer.connection import Connection, ConnectionBroken, Head, Origin, request_bytes
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.window import Part

__all__ = [
    "EXCERPT_BYTES",
    "NoSuchRange",
    "PartRequest",
    "RangesIgnored",
    "Redirected",
    "RequestObserver",
    "Successor",
    "excerpt_of",
    "follow",
    "get_part",
    "unchunked",
]

_SCRATCH_BYTES = 64 << 10
EXCERPT_BYTES = 4096
_EXCERPT_WITHIN_S = 1.0
_UNREAD_S = 2.0
"""Time for which a body may be left unread in its connection for want of memory."""
_HEXADECIMAL = re.compile(rb"[0-9A-Fa-f]{1,8}")


Learn = Callable[[Part, int, str, Mapping[str, str]], None]


class RangesIgnored(Exception):
    """The server answers with the whole object, or lawfully in a form that cannot be received into a slab (chunked,
    compressed, ``multipart/byteranges``), or does not tell the object's size: it must be streamed."""


class NoSuchRange(RangesIgnored):
    """416 without the object's size, which some stores leave out (RFC 9110 only asks for it): it ends at or before the
    part. At its beginning that means that it is empty, or not cut."""


class Redirected(Exception):
    """The answer names another place."""

    def __init__(self, location: str) -> None:
        super().__init__("redirected")  # where to may be signed, and this may be shown as a cause
        self.location = location


class Successor(Protocol):
    """Protocol: a hedge that has replaced its primary request (see `hedging.Hedge`)."""

    async def result(self) -> None: ...

    def abort(self) -> None: ...


class RequestObserver(Protocol):
    """Protocol: observer of running requests (see `hedging.HedgingController`)."""

    def started(self, request: PartRequest, connection: Connection, now: float) -> None: ...

    def ended(self, request: PartRequest) -> None: ...

    def succeeded(self, request: PartRequest, connection: Connection, now: float) -> None: ...


async def get_part(
    pool: ConnectionPool,
    request: Request,
    part: Part,
    learn: Learn,
    observe: Callable[[int, float, float], None],
    observer: RequestObserver | None = None,
) -> None:
    """Fill ``part`` from where it stands. ``learn(part, size, version, fields)`` takes what the answer says of the
    object, before a byte of it is taken; ``observe(bytes, seconds, now)`` the duration of a good answer.
    ``part.filled`` counts what arrived, also when this raises. A hedge of ``observer`` may replace the request."""
    primary, clock = PartRequest(request, part, learn, part.filled), asyncio.get_running_loop().time
    raw, excerpt = primary.encode(), b""
    head: Head | None = None
    for fresh in (False, True):
        async with pool.connection(primary.origin, fresh=fresh) as connection:
            primary.sent_at = sent_at = clock()
            if observer is not None:
                observer.started(primary, connection, sent_at)
            try:
                head = await connection.exchange(raw, primary.accept)
                if primary.waits:
                    await primary.receive(connection)
            except asyncio.CancelledError:
                if primary.successor is not None:
                    primary.successor.abort()
                raise
            except Exception as exn:
                # A kept connection that the server closed meanwhile is not a fault: try once more on a new one.
                if primary.successor is None:
                    if isinstance(exn, ConnectionBroken) and primary.status == 0 and connection.exchanges > 1:
                        connection.abort()
                        continue
                    raise
            finally:
                if primary.into_slab:
                    part.filled += connection.received
                if observer is not None:
                    observer.ended(primary)
            if head is not None and primary.successor is None:
                if primary.into_slab:
                    now = clock()
                    if not primary.waited:
                        observe(connection.received, now - sent_at, now)
                    if observer is not None:
                        observer.succeeded(primary, connection, now)
                framed = primary.framed
                excerpt = bytes(primary.scratch[:EXCERPT_BYTES]) if framed else await excerpt_of(connection, head)
                if not head.keep_alive or not framed:
                    connection.abort()
        break
    if primary.successor is not None:
        await primary.successor.result()
    elif head is not None:
        primary.check(head, excerpt)


async def wait_for_memory(part: Part) -> None:
    """Return once ``part`` has memory: at once, unless it was started ahead of it."""
    if not part.backed:
        backed = asyncio.get_running_loop().create_future()
        part.on_memory = lambda: None if backed.done() else backed.set_result(None)
        await backed


async def excerpt_of(connection: Connection, head: Head) -> bytes:
    """Return the beginning of an error's body, of which nothing was read yet; b"" where it comes too slowly. The
    connection must be aborted after that."""
    if head.status < 400 or head.encoded:
        return b""
    chunked = head.fields.get("transfer-encoding", "").lower().endswith("chunked")
    most = EXCERPT_BYTES if head.length is None else min(head.length, EXCERPT_BYTES)

    def text(raw: bytes) -> tuple[bytes, bool]:
        return unchunked(raw) if chunked else (raw, False)

    def enough(raw: bytes) -> bool:
        content, whole = text(raw)
        return whole or len(content) >= most

    return text(await connection.beginning(enough, _EXCERPT_WITHIN_S))[0][:most]


def unchunked(raw: bytes) -> tuple[bytes, bool]:
    """Return the content of the chunks that have come (RFC 9112 §7.1), and whether they have an end (or are none)."""
    content, at = bytearray(), 0
    while (line_end := raw.find(b"\r\n", at)) >= 0:
        digits = raw[at:line_end].partition(b";")[0].strip()
        size = int(digits, 16) if _HEXADECIMAL.fullmatch(digits) else 0
        if size == 0:
            return bytes(content), True
        content += raw[line_end + 2 : line_end + 2 + size]
        at = line_end + 2 + size + 2
    return bytes(content), False


class PartRequest:
    """GET of a part's bytes from ``offset`` on: encodes the request, judges the head and gives the body its memory."""

    def __init__(self, request: Request, part: Part, learn: Learn, offset: int) -> None:
        self.request = request
        self.origin = Origin.of(request.url, request.tls, request.socket)
        self.part = part
        self.learn = learn
        self.offset = offset
        self.sent_at = self.headed_at = 0.0
        """Times when it was sent, and when the head of its answer was complete."""
        self.successor: Successor | None = None
        """Hedge that has replaced it."""
        self.status = 0
        self.framed = True
        self.into_slab = False
        self.waits = self.waited = False
        """True if its body waits, or has waited, for the part's memory."""
        self.length = 0
        self.scratch = memoryview(b"")

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that it requests."""
        return self.part.stop - self.part.start - self.offset

    def replace(self, successor: Successor) -> None:
        """Have a hedge receive the rest."""
        self.successor = successor

    def encode(self) -> bytes:
        """Return the request as it is sent."""
        part, headers = self.part, [*self.request.headers]
        headers.append(("Range", f"bytes={part.start + self.offset}-{part.stop - 1}"))
        etag = part.shard.state.etag
        if etag.startswith('"'):  # a weak one never matches: If-Match compares strongly
            headers.append(("If-Match", etag))
        return request_bytes(self.request.url, headers)

    def accept(self, head: Head) -> memoryview:
        """Return the memory for the body; raise what the head means where it is not for the part."""
        self.status = head.status
        self.headed_at = asyncio.get_running_loop().time()
        if head.status == 206:
            return self._accept_range(head)
        if head.status == 200:
            return self._accept_whole(head)
        if head.status == 416 and (span := head.content_range()) is not None and span[2] is not None:
            self.learn(self.part, span[2], "", {})  # a 416 need not carry the validators (RFC 9110 §15.5.17)
            if self.part.start < span[2]:
                raise Contradiction(
                    f"the server answers that byte {self.part.start} lies behind the end ({span[2]} bytes)"
                )
        return self._accept_other(head)

    def check(self, head: Head, excerpt: bytes) -> None:
        """Raise what the answer means where it is not the part; its body has been read."""
        if head.status in (200, 206) or (head.status == 416 and self.part.dropped):
            return
        if self.request.follows and head.status in REDIRECTS and "location" in head.fields:
            raise Redirected(head.fields["location"])
        if head.status == 416 and self.part.start == 0 and self.part.shard.size == 0:
            return
        if head.status == 416 and self.part.shard.size is None:
            raise NoSuchRange
        raise RefusedAnswer(Answer(head.status, head.fields, excerpt))

    def _accept_range(self, head: Head) -> memoryview:
        span, part = head.content_range(), self.part
        start = part.start + self.offset
        multipart = head.fields.get("content-type", "").lower().startswith("multipart/")
        if head.encoded or head.length is None or (multipart and span is None):
            raise RangesIgnored
        if span is None:
            raise Contradiction(f"206 without a usable Content-Range ({head.fields.get('content-range', 'none')!r})")
        if span[0] != start or span[1] - span[0] != head.length:
            got = f"bytes {span[0]} to {span[1]} in {head.length}"
            raise Contradiction(f"asked for bytes from {start}, the server sent {got}")
        total = part.shard.size if span[2] is None else span[2]  # "*": it does not tell (RFC 9110 §14.4)
        if total is None:
            raise RangesIgnored
        self._learn(head, total)
        if span[1] > part.stop:
            raise Contradiction(f"asked for bytes up to {part.stop}, the server sent up to {span[1]}")
        if span[1] == start:
            raise Contradiction("an empty range")
        return self._slab(head.length)

    def _accept_whole(self, head: Head) -> memoryview:
        part = self.part
        length = head.length
        room, stop = part.slab.size or part.stop - part.start, part.shard.stop
        if part.start or self.offset or length is None or head.encoded or length > room:
            raise RangesIgnored
        if stop is not None and length > stop:  # more than what is wanted of it
            raise RangesIgnored
        self._learn(head, length)
        return self._slab(length)

    def _accept_other(self, head: Head) -> memoryview:
        length = head.length
        self.framed = length is not None and length <= _SCRATCH_BYTES
        self.scratch = memoryview(bytearray(length if self.framed and length else 0))
        return self.scratch

    def _slab(self, length: int) -> memoryview:
        self.into_slab, self.length = True, length
        if not self.part.backed:
            if self.part.dropped:
                raise Contradiction("a range behind the end that it names")
            self.waits = self.waited = True
            return memoryview(b"")
        return self.part.slab.view[self.offset : self.offset + length]

    async def receive(self, connection: Connection) -> None:
        """Receive the body that had no memory when its head came. The end of its connection is no fault: servers close
        what is left unread for long, and so does this. The part stays short then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNREAD_S):
                await wait_for_memory(self.part)
        if not self.part.backed:  # the request that memory waits for may need this one's place at the server
            connection.abort()
            await wait_for_memory(self.part)
        self.waits = False
        self.sent_at = self.headed_at = asyncio.get_running_loop().time()
        with contextlib.suppress(ConnectionBroken):
            await connection.body(self.part.slab.view[self.offset : self.offset + self.length])

    def _learn(self, head: Head, total: int) -> None:
        self.learn(self.part, total, version_of(head.fields, total), head.fields)
