"""A small HTTP/1.1 client whose bodies are received straight into the caller's memory (RFC 9112; ranges: RFC 9110 §14).

One `Connection` carries one exchange at a time. Only bodies with a ``Content-Length`` are read here; an answer framed
otherwise (chunked, until close) or compressed is seen in its `Head` and read another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import httptools

from wds_async.storage.base import Tls

__all__ = ["Connection", "ConnectionBroken", "Head", "Origin", "open_connection", "parse_head", "request_bytes"]

HEAD_LIMIT_BYTES, FIELDS_LIMIT = 64 << 10, 256
PACE_BYTES = 16 << 10
_EARLY_LIMIT_BYTES = 32 << 10
_LOW_WATER_BYTES = 512 << 10
_LOOK_CLOSELY_S = 1.0


class ConnectionBroken(ConnectionError):
    """The connection ended, or brought something that is not HTTP, before the answer was complete."""


class Origin(NamedTuple):
    """Scheme, host and port, or a Unix socket: what connections are pooled by, and what credentials must not leave."""

    scheme: str
    host: str
    port: int
    tls: Tls = Tls()
    socket: str = ""

    @classmethod
    def of(cls, url: str, tls: Tls | None = None, socket: str = "") -> Origin:
        """Return the origin of an ``http`` or ``https`` URL; ValueError for a malformed one. ``tls`` counts: a
        connection that was verified in one way is none for another. So does ``socket`` (`Request.socket`).
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an HTTP URL: {url!r}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, tls or Tls(), socket)

    @property
    def place(self) -> str:
        """Host and port, or socket, for messages."""
        return f"unix:{self.socket}" if self.socket else f"{self.host}:{self.port}"

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Head:
    """Status and header fields of an answer (names in lower case; of a repeated one the last, of Google's sums all)."""

    status: int
    fields: dict[str, str]
    keep_alive: bool

    @property
    def length(self) -> int | None:
        """The body's length where it is framed by ``Content-Length``."""
        if self.status in (204, 304):
            return 0
        text = self.fields.get("content-length", "")
        return int(text) if text.isascii() and text.isdigit() and "transfer-encoding" not in self.fields else None

    @property
    def encoded(self) -> bool:
        return self.fields.get("content-encoding", "identity").lower() not in ("", "identity")

    def content_range(self) -> tuple[int, int, int | None] | None:
        """Return ``(start, stop, total)`` of ``Content-Range: bytes a-b/total``, stop exclusive; total None for ``*``.

        ``bytes */total`` (of a 416) gives ``(0, 0, total)``; None where the field is missing or malformed.
        """
        unit, _, rest = self.fields.get("content-range", "").partition(" ")
        span, _, total_text = rest.strip().partition("/")
        try:
            total = None if total_text == "*" else int(total_text)
            if span == "*":
                return 0, 0, total
            first, _, last = span.partition("-")
            return (int(first), int(last) + 1, total) if unit.lower() == "bytes" else None
        except ValueError:
            return None


class _HeadFields:
    """Collects what ``httptools`` calls back with."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self.fields[key] = f"{self.fields[key]}, {text}" if key == "x-goog-hash" in self.fields else text


def parse_head(raw: bytes) -> Head:
    """Return the head of an answer from ``raw``, which ends with its empty line; `ConnectionBroken` if it is not
    HTTP/1.x.
    """
    collected = _HeadFields()
    parser = httptools.HttpResponseParser(collected)
    if raw.count(b"\n") > FIELDS_LIMIT + 2:
        raise ConnectionBroken(f"more than {FIELDS_LIMIT} header fields")
    try:
        parser.feed_data(raw)
    except httptools.HttpParserError as exn:
        raise ConnectionBroken(f"the answer is not HTTP/1.1: {exn}") from exn
    return Head(parser.get_status_code(), collected.fields, bool(parser.should_keep_alive()))


def request_bytes(url: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the bytes of a ``GET`` for ``url`` with ``headers``; ValueError if a header would break the line."""
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = "?" + urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?") if parts.query else ""
    lines = [f"GET {path}{query} HTTP/1.1", f"Host: {Origin.of(url).host_header}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError(f"a header for {parts.netloc} contains a line break")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection(asyncio.BufferedProtocol):
    """One keep-alive connection. ``received`` counts body bytes of the current exchange: they are in the
    caller's memory already when an exchange fails, so that the next attempt goes on behind them. ``moved_at`` is when
    something came last, ``gap_s`` the longest time between two arrivals of the current body."""

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: Origin, held: set[Connection] | None = None) -> None:
        self.origin = origin
        self.received = self.exchanges = self._paced_bytes = self._head_bytes = 0
        self.moved_at = self._paced_at = loop.time()
        self.gap_s = 0.0
        self._looked = False
        self._loop = loop
        self._held = set() if held is None else held
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._low_water = 1
        # A memoryview: asyncio's TLS writes to slices of it, and a slice of a bytearray would be a copy.
        self._scratch = memoryview(bytearray(16 << 10))
        self._early = bytearray()
        self._accept: Callable[[Head], memoryview] | None = None
        self._head: Head | None = None
        self._body: memoryview | None = None
        self._paused = False
        self._waiter: asyncio.Future[Any] | None = None
        self._broken: BaseException | None = None

    async def exchange(self, request: bytes, accept: Callable[[Head], memoryview]) -> Head:
        """Send a request, pass the answer's head to ``accept`` and receive the body into the memory it returns.

        ``accept`` runs on the loop as soon as the head is there, so that the body's first bytes need no other place;
        what it raises is raised here. It may return less than the whole body: `body` receives the rest, and a
        connection whose body is left unread must be aborted. 1xx answers are passed over.
        """
        assert self._transport is not None
        if self._broken is not None:
            raise self._broken
        self.exchanges += 1
        self.received = self._paced_bytes = self._head_bytes = 0
        self.moved_at = self._paced_at = self._loop.time()
        self.gap_s, self._looked = 0.0, False
        self._set_low_water(0)
        self._accept = accept
        self._early.clear()
        self._transport.write(request)
        return cast(Head, await self._wait())

    async def shake_hands(self, plain: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Go on in TLS over ``plain``, the transport that was made.

        It comes second, so that the transport below it is ours to abort: cancelled within a handshake, uvloop would
        say good-bye on a loop that is closed by then. Aborted, the handshake ends by itself in the next turn.
        """
        handshake = asyncio.ensure_future(self._start_tls(plain, tls))
        handshake.add_done_callback(self._shaken)
        try:
            await asyncio.shield(handshake)
        except BaseException:
            self.abort()
            raise
        if self._broken is not None:
            raise self._broken

    async def _start_tls(self, plain: asyncio.Transport, tls: ssl.SSLContext) -> asyncio.Transport | None:
        if self._broken is not None or plain.is_closing():
            raise self._broken or ConnectionBroken("the server closed the connection")
        return await self._loop.start_tls(plain, self, tls, server_hostname=self.origin.host)

    async def body(self, into: memoryview) -> None:
        """Receive the next ``len(into)`` bytes of the body; `ConnectionBroken` if it ends before."""
        self.moved_at = self._paced_at = self._loop.time()
        self._paced_bytes = self.received
        self._aim(into)
        if self._paused and self._transport is not None and self._broken is None:
            self._paused = False
            self._transport.resume_reading()
        if self._body is not None:
            await self._wait()

    async def beginning(self, enough: Callable[[bytes], bool], within_s: float) -> bytes:
        """Return the bytes behind the head as they come, framing and all, until they are ``enough``, or fill 32 KiB, or
        the time or the connection is over. For a body of which the rest is not read: the connection must be aborted.
        """
        with contextlib.suppress(OSError):  # a broken connection, a stalled one, and the end of the time
            async with asyncio.timeout(within_s):
                while len(self._early) < _EARLY_LIMIT_BYTES and not enough(bytes(self._early)):
                    await self._wait()
        return bytes(self._early)

    def too_slow(self, now: float, allowed_s: float) -> str:
        """Return why this exchange counts as stalled, or "": its head has to be complete within ``allowed_s`` seconds,
        and 16 KiB or the rest to come within each that follow. A stream that waits for memory does not stall."""
        if self._waiter is None or self.received - self._paced_bytes >= PACE_BYTES:
            self._paced_at, self._paced_bytes = now, self.received
        if now - self._paced_at <= allowed_s:
            if now - self.moved_at > _LOOK_CLOSELY_S:
                self.look_closely()
            return ""
        if now - self.moved_at > allowed_s:
            return f"no byte arrived for {allowed_s:g} s"
        few = "less than 16 KiB arrived" if self._accept is None else "the answer's head was not complete"
        return f"{few} within {allowed_s:g} s"

    def look_closely(self) -> bool:
        """Take what comes, however little: a slow line would look like a dead one. False where that is so already."""
        before = self._low_water
        self._set_low_water(0)
        self._looked = before > 1
        return self._looked

    def reusable(self) -> bool:
        """Return whether another exchange may follow: the connection is open, and no unrequested bytes have arrived."""
        transport = self._transport
        return self._broken is None and transport is not None and not transport.is_closing() and not self._early

    def abort(self) -> None:
        """Drop the connection now; after this no byte is written to the caller's memory."""
        self._body = None
        if self._transport is not None:
            self._transport.abort()
        self._fail(ConnectionBroken("aborted"))

    def stall(self, reason: str) -> None:
        """Abort, with a timeout for the waiter."""
        self._fail(TimeoutError(reason))
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._held.add(self)
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")

    def _shaken(self, handshake: asyncio.Future[asyncio.Transport | None]) -> None:
        upper = None if handshake.cancelled() or handshake.exception() else handshake.result()
        if upper is None or upper.is_closing():  # one whose plain transport was aborted ends without an exception
            # Not every loop calls this for a connection whose handshake failed.
            self._loop.call_soon(self.connection_lost, None)
        elif self._broken is not None:  # aborted meanwhile
            upper.abort()
        else:
            self._transport = upper

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._body is None else self._body

    def buffer_updated(self, nbytes: int) -> None:
        if self._broken is not None:  # aborted: nothing is to be judged or kept any more
            return
        now, before = self._loop.time(), self.moved_at
        if self._looked:  # these bytes lay in the kernel: when they came is not known
            self._looked = False
        else:
            self.moved_at = now
        body = self._body
        if body is None:
            self._early += self._scratch[:nbytes]
            if self._accept is not None:
                self._read_head(self._accept)
                return
            if len(self._early) >= _EARLY_LIMIT_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
            self._done(self._head)  # for `beginning`
            return
        self.gap_s = max(self.gap_s, now - before)
        self.received += nbytes
        rest = len(body) - nbytes
        self._body = body[nbytes:] if rest else None  # not released: uvloop still holds the buffer here
        if rest == 0:
            self._done(self._head)
        elif rest <= self._low_water:
            self._set_low_water(rest)

    def eof_received(self) -> bool:
        tls = self.origin.scheme == "http" and bytes(self._early[:2]) == b"\x15\x03"  # an alert of TLS
        self._fail(ConnectionBroken(f"the server closed the connection{': it speaks TLS' if tls else ''}"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self)
        reason = f"the connection was lost: {exc}" if exc else "the server closed the connection"
        self._fail(ConnectionBroken(reason))

    def _read_head(self, accept: Callable[[Head], memoryview]) -> None:
        while (end := self._early.find(b"\r\n\r\n") + 4) > 3:
            raw = bytes(memoryview(self._early)[:end])
            del self._early[:end]
            self._head_bytes += end
            try:
                self._head = parse_head(raw)
                if self._head.status < 200:  # it counts for the limit all the same
                    continue
                self._accept = None
                self._paced_at = self.moved_at
                self._aim(accept(self._head))
            except Exception as exn:
                self._fail(exn)
                return
            if self._body is None:
                self._done(self._head)
            return
        if self._head_bytes + len(self._early) > HEAD_LIMIT_BYTES:
            self._fail(ConnectionBroken(f"the answer's head is longer than {HEAD_LIMIT_BYTES} bytes"))

    def _aim(self, into: memoryview) -> None:
        """Direct the body's next ``len(into)`` bytes to ``into``, beginning with what came early."""
        early = min(len(self._early), len(into))
        if early:
            into[:early] = memoryview(self._early)[:early]
            del self._early[:early]
            self.received += early
        if early < len(into):
            self._body = into[early:]
            self._set_low_water(len(self._body))

    async def _wait(self) -> Head | None:
        if self._broken is not None:
            raise self._broken
        self._waiter = self._loop.create_future()
        try:
            return cast("Head | None", await self._waiter)
        finally:
            self._waiter = self._accept = self._body = None

    def _done(self, head: Head | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(head)

    def _fail(self, exn: BaseException) -> None:
        self._broken = self._broken or exn
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._broken)

    def _set_low_water(self, rest: int) -> None:
        """Wake the loop once for many segments: each wake costs the GIL (SO_RCVLOWAT, tcp(7))."""
        wanted = min(_LOW_WATER_BYTES, rest) if rest > _LOW_WATER_BYTES // 8 else 1
        if self.origin.scheme == "https" or self.origin.socket or wanted == self._low_water or self._low_water < 0:
            return
        if self._broken is not None:  # its socket may be closed
            return
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        except (OSError, AttributeError):  # a system without it wakes more often
            self._low_water = -1
        else:
            self._low_water = wanted


async def open_connection(
    loop: asyncio.AbstractEventLoop,
    origin: Origin,
    address: str,
    tls: ssl.SSLContext | None,
    held: set[Connection] | None = None,
) -> Connection:
    """Connect to ``address`` (numeric: names are resolved on a thread beforehand; or a socket's path). ``held`` has the
    connection as long as the loop has a transport for it, which is some turns longer than until it was closed."""
    connection = Connection(loop, origin, held)
    try:
        if origin.socket:
            await loop.create_unix_connection(lambda: connection, address)
            return connection
        plain, _ = await loop.create_connection(lambda: connection, address, origin.port)
    except BaseException as exn:
        connection.connection_lost(exn if isinstance(exn, Exception) else None)  # uvloop does not say so to all
        raise
    if tls is not None:
        await connection.shake_hands(plain, tls)
    return connection
