"""The HTTP server: requests and answers, connections and their limits, over TCP, TLS and Unix sockets alike."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import socket
import ssl
import struct
import time
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import httptools

from wds_async._version import __version__
from wds_async.service.limits import Counts
from wds_async.service.metrics import Meters
from wds_async.service.refusals import Refusal

__all__ = ["BODY_LIMIT_BYTES", "HEAD_LIMIT_BYTES", "SERVER", "ClientConnection", "ClientConnections", "HttpRequest",
           "HttpResponse", "json_response"]  # fmt: skip

logger = logging.getLogger("wds_async")
SERVER = f"wds-async/{__version__}"
"""The header ``Server`` of every answer, by which our own clients know us."""
BODY_LIMIT_BYTES = 1 << 20
"""Largest body of a request, unless the server has another limit; a longer one is answered 413."""
HEAD_LIMIT_BYTES = 16 << 10
"""Largest head of a request; a longer one is answered 431."""
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_date = functools.lru_cache(maxsize=2)(functools.partial(formatdate, usegmt=True))
_LOOK_EVERY_S = 1.0
_IDLE_S, _LINGER_S, _TLS_CLOSE_S = 75.0, 1.0, 5.0
_PROCESS_LINGER_S = 2.0  # a process that changes its connections has none for a moment
_RESERVED = 64
_PIPELINED = 16  # requests that wait behind the one that is answered; then nothing more is received
_BODY_AHEAD_BYTES = 16 << 10  # of a body that is not read yet; then nothing more is received
_HOST = re.compile(r"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+;=%-]*)(?::[0-9]*)?")
_UCRED = struct.Struct("3i")


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request. ``target`` is as it came; ``headers`` have lower-case names, and fields of one name are joined by a
    comma. ``keep_alive``: whether the connection stays open."""

    connection: ClientConnection
    method: str
    target: str
    headers: Mapping[str, str]
    version: str = "1.1"
    keep_alive: bool = True
    complete: bool = False
    """True if all of its body has come."""
    wanted: bool = False
    """True if its body is read."""
    _body: bytearray = field(default_factory=bytearray)
    _refusal: Refusal | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the target, decoded; of several by one name the last."""
        return dict(urllib.parse.parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    @property
    def chunked(self) -> bool:
        """True if a body of unknown length is sent in chunks; False if it ends with the connection."""
        return self.version != "1.0"

    @property
    def held_bytes(self) -> int:
        """Bytes of its body that are in memory."""
        return len(self._body)

    async def read(self, within_s: float) -> bytes:
        """Return the body. Refusal (413) if it is longer than the connection's limit, 408 if it takes too long."""
        if int(self.headers.get("content-length", "0")) > self.connection.body_limit_bytes:
            self._refuse_length()
        if not self._arrived.is_set():
            if self.chunked and self.headers.get("expect", "").lower() == "100-continue" and not self._body:
                self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wanted = True
            self.connection.receive()
            try:
                async with asyncio.timeout(within_s):
                    await self._arrived.wait()
            except TimeoutError:
                words = f"the request's body did not come within {within_s:g} s (header_timeout_s)"
                raise Refusal(408, words, "body") from None
        if self._refusal is not None:
            raise self._refusal
        return bytes(self._body)

    def feed(self, data: bytes) -> None:
        """Append bytes of the body."""
        if self._refusal is None:
            self._body += data
            if len(self._body) > self.connection.body_limit_bytes:
                self._refuse_length()

    def end(self) -> None:
        """Mark the body as complete."""
        self.complete = True
        self._arrived.set()

    def refuse(self, refusal: Refusal) -> None:
        """Drop the body; `read` raises ``refusal``."""
        self._refusal = refusal
        self._body.clear()
        self._arrived.set()

    def _refuse_length(self) -> None:
        self.refuse(Refusal(413, f"a body of more than {self.connection.body_limit_bytes} bytes", "body"))

    def head(self, status: int, fields: Mapping[str, str], length: int | None) -> bytes:
        """Return the head of an answer with a body of ``length`` bytes; None: in chunks, or to the connection's end for
        HTTP/1.0. ValueError for a field with a line break."""
        date = _date(int(time.time()))
        lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\nServer: {SERVER}\r\nDate: {date}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in fields.items()]
        if length is not None and status not in (204, 304):
            lines.append(f"Content-Length: {length}\r\n")
        elif length is None and self.chunked:
            lines.append("Transfer-Encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append("Connection: close\r\n")
        elif self.version == "1.0":
            lines.append("Connection: keep-alive\r\n")
        text = "".join(lines)
        if text.count("\n") != len(lines) + 2 or text.count("\r") != len(lines) + 2:
            raise ValueError("a header field of an answer holds a line break")
        return f"{text}\r\n".encode("utf-8", "surrogateescape")

    async def send(self, response: HttpResponse) -> None:
        """Send ``response``, unless that was done. ConnectionResetError if the client has gone."""
        if not response.sent:
            self.keep_alive = self.keep_alive and self.complete
            self.connection.write(response.to(self))
            await self.connection.drained()


class HttpResponse:
    """An answer whose ``body`` is in memory; text becomes UTF-8. ``sent``: it was sent already."""

    def __init__(
        self,
        status: int = 200,
        body: bytes | str = b"",
        headers: Mapping[str, str] | None = None,
        *,
        content_type: str = "",
        sent: bool = False,
    ) -> None:
        self.status, self.sent, self.headers = status, sent, dict(headers or {})
        if isinstance(body, str):
            body = body.encode("utf-8", "surrogateescape")
            content_type = f"{content_type or 'text/plain'}; charset=utf-8"
        self.body = body
        if content_type:
            self.headers.setdefault("Content-Type", content_type)

    def to(self, request: HttpRequest) -> bytes:
        """Return the bytes of the answer to ``request``: for a HEAD the head alone."""
        headers = self.headers
        length = int(headers.pop("Content-Length", len(self.body)))
        head = request.head(self.status, headers, length)
        return head if request.method == "HEAD" or self.status in (204, 304) else head + self.body


def json_response(value: object, status: int = 200) -> HttpResponse:
    """Return ``value`` as JSON."""
    return HttpResponse(status, json.dumps(value), content_type="application/json")


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the peer, as the kernel knows them; a process of another namespace is 0. -1 if
    the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return -1, -1, -1
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


class ClientConnections:
    """All connections of one service. Times are in seconds.

    ``answer`` answers one request. ``malformed`` makes the answer to what is no request, of a connection, by its status
    and the reason. At most ``clients`` connections, and ``of_address`` of them from one address (on the Unix socket: of
    one process). A handshake and a head have to come within ``header_s``, and a client has to take a byte within
    ``send_s``. ``tls`` secures TCP connections. ``left`` is called with the number of a process that has no connection
    to the Unix socket any more; processes of other containers, whose numbers are 0 or less, do not count.
    ``warns_of_root``: whether a client that is root can write to what it is handed.
    """

    def __init__(
        self,
        answer: Callable[[HttpRequest], Awaitable[None]],
        malformed: Callable[[ClientConnection, int, str], HttpResponse],
        meters: Meters,
        *,
        clients: int,
        of_address: int,
        header_s: float,
        send_s: float,
        tls: ssl.SSLContext | None = None,
        left: Callable[[int], None] = lambda process: None,
        body_limit_bytes: int = BODY_LIMIT_BYTES,
        warns_of_root: bool = True,
    ) -> None:
        self.answer, self.malformed, self.meters = answer, malformed, meters
        self.limit, self.header_s, self.send_s, self.tls = clients, header_s, send_s, tls
        self.scratch = memoryview(bytearray(HEAD_LIMIT_BYTES))
        """Buffer that all connections receive into: an idle one costs no buffer."""
        self.draining = False
        self.body_limit_bytes, self._of_address = body_limit_bytes, of_address
        self._open: dict[ClientConnection, None] = {}
        """Of those without a request, the longest idle comes first."""
        self._addresses, self._processes, self._reserved = Counts(), Counts(), 0
        self._left, self._left_at = left, dict[int, float]()
        self._timer: asyncio.TimerHandle | None = None
        self._warns_of_root = warns_of_root
        self._closed_one = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def listener(self, *, local: bool = False) -> Callable[[], ClientConnection]:
        """Return the protocol factory for ``loop.create_server``. ``local``: of the Unix socket."""
        return lambda: ClientConnection(self, local=local)

    def admit(self, connection: ClientConnection) -> bool:
        """Count a new connection; False if there is no place for it, not even a reserved one."""
        address, process = connection.address, connection.process
        room = self._has_room(self._addresses[address], self._of_address, address)
        if not (room and self._has_room(len(self._open) - self._reserved, self.limit)):
            connection.reserved = True
            if not self._has_room(self._reserved, _RESERVED, reserved=True):
                self.meters.refused("clients")
                return False
            self._reserved += 1
        else:
            self._addresses.add(1, address)
        self._open[connection] = None
        if process > 0:
            self._processes.add(1, process)
            self._left_at.pop(process, None)
        self.meters.clients += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)
        return True

    def discard(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed; idempotent."""
        if connection not in self._open:
            return
        del self._open[connection]
        if connection.reserved:
            self._reserved -= 1
        else:
            self._addresses.add(-1, connection.address)
        if (process := connection.process) > 0:
            self._processes.add(-1, process)
            if process not in self._processes:
                self._left_at[process] = asyncio.get_running_loop().time()
        self.meters.clients -= 1
        self._closed_one.set()

    def idle(self, connection: ClientConnection) -> None:
        """Note that ``connection`` has no request any more."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def warn_of_root(self, process: int) -> None:
        """Warn once that a client on the Unix socket runs as root: no file mode restricts it."""
        if self._warns_of_root:
            self._warns_of_root = False
            logger.warning(
                "process %d on the Unix socket runs as root: it can open each file that it is handed for writing, and "
                "so change what the cache serves. Run jobs as other users, hand files over from a read-only mount "
                "(hand_from), or give these jobs TCP in place of the socket",
                process,
            )

    def drain(self) -> None:
        """Close connections without a request; the others close after their answer."""
        self.draining = True
        for connection in list(self._open):
            connection.close_if_idle()

    async def gone(self, within_s: float) -> bool:
        """Wait until every connection is closed; False if some are open after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._open:
                    self._closed_one.clear()
                    await self._closed_one.wait()
        return not self._open

    def close(self) -> None:
        """Abort all connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._open):
            connection.abort()

    def _has_room(self, count: int, limit: int, address: str | None = None, *, reserved: bool = False) -> bool:
        """Close the longest idle connection (of ``address``, or of the ``reserved`` places) if ``count`` is at the
        limit; False if there is none."""
        if count < limit:
            return True
        for one in self._open:
            if one.reserved == reserved and address in (None, one.address) and one.idle:
                self.discard(one)
                one.abort()
                return True
        return False

    def _look(self) -> None:
        """Apply the time limits to each connection, and report processes that have left."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        # First, so that no fault at one connection ends the time limits of all.
        self._timer = loop.call_later(_LOOK_EVERY_S, self._look) if self._open or self._left_at else None
        for process in [process for process, at in self._left_at.items() if now - at >= _PROCESS_LINGER_S]:
            del self._left_at[process]
            self._left(process)
        for connection in list(self._open):
            connection.look(now)


class ClientConnection(asyncio.BufferedProtocol):
    """One connection, and the requests that come by it."""

    def __init__(self, connections: ClientConnections, *, local: bool) -> None:
        self.local = local  # by the Unix socket
        self.secure = connections.tls is not None and not local  # encrypted
        self.process, self.user, self.group = 0, -1, -1  # the client's, for the Unix socket; see `credentials`
        self.address = ""  # the client's address, or its process on the Unix socket
        self.reserved = False  # holds a reserved place: for one request of a health check or for metrics
        self.sending = False  # the body of an object is on its way
        self.files_logged = False  # the audit log names its process already
        self.body_limit_bytes = connections.body_limit_bytes
        self._connections, self._loop = connections, asyncio.get_running_loop()
        self._transport: Any = None
        self._own: socket.socket | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[HttpRequest | HttpResponse] = deque()
        self._over = self._deaf = self._half_closed = self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent, self._since = 0, self._loop.time()
        self._head_at: float | None = None  # since when a head is waited for
        self._head_bytes, self._in_head, self._parsed = 0, False, 0
        self._made: HttpRequest | None = None  # whose body is still coming
        self._target, self._fields, self._fields_bytes = b"", dict[str, str](), 0
        self._parser: Any = httptools.HttpRequestParser(self)

    # -- what an answer needs

    @property
    def closing(self) -> bool:
        """True if nothing more can be sent."""
        return self._over or self._transport.is_closing()

    @property
    def certificate(self) -> Any:
        """The client's certificate as ssl gives it; None without one."""
        return self._transport.get_extra_info("peercert")

    @property
    def own_socket(self) -> socket.socket:
        """Another descriptor of its socket, to send past the transport while `drained`. Not for TLS."""
        if self._own is None:
            self._own = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
            self._own.setblocking(False)
        return self._own

    def write(self, data: bytes) -> None:
        """Send bytes, or keep them until the client takes them. ConnectionResetError if it has gone."""
        if self.closing:
            raise ConnectionResetError("the client has gone")
        self._transport.write(data)

    @property
    def unsent(self) -> int:
        """Bytes that were written, and not taken yet."""
        return int(self._transport.get_write_buffer_size())

    async def drained(self) -> None:
        """Wait until no more is unsent than a small rest. ConnectionResetError if the client has gone."""
        await self._writable.wait()
        if self.closing:
            raise ConnectionResetError("the client has gone")

    def unbuffered(self) -> None:
        """Let `drained` wait for the last byte from now on."""
        # Over TLS asyncio would take an empty buffer for a full one, and wait.
        self._transport.set_write_buffer_limits(1 if self.secure else 0, 0)

    def receive(self) -> None:
        """Go on receiving, where that has paused."""
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    # -- what the service does with it

    @property
    def idle(self) -> bool:
        """True if it has no request and all responses have been sent."""
        return self._task is None and not self.unsent

    def close_if_idle(self) -> None:
        """Close it, unless a request is being answered."""
        if self._handshake is not None:
            self.abort()
        elif self.idle and not self._transport.is_closing():  # a second close breaks asyncio's transport of TLS
            self._transport.close()

    def abort(self) -> None:
        """Close it at once and cancel its request."""
        self._cancel_tasks()
        self.cut()

    def cut(self) -> None:
        """Close it within an answer, so that no client takes a part for the whole."""
        self._over = True
        self._transport.abort()

    def _cancel_tasks(self) -> None:
        for task in (self._task, self._handshake):
            if task is not None:
                task.cancel()

    def look(self, now: float) -> None:
        """Close it if the client exceeds a time limit."""
        limits, unsent = self._connections, self.unsent
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        if self._deaf and self.idle:
            if now - self._since > _LINGER_S:
                self.abort()
        elif self._head_at is not None and now - self._head_at > limits.header_s:
            limits.meters.refused("head")
            self.abort()
        elif unsent and now - self._since > limits.send_s:
            logger.info("%s took no byte of its answer for %g s (send_timeout_s): let go", self.address, limits.send_s)
            limits.meters.refused("slow-client")
            self.abort()
        elif self.idle and (limits.draining or now - self._since > _IDLE_S):
            self.close_if_idle()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self.local:
            self.process, self.user, self.group = credentials(transport.get_extra_info("socket"))
            if self.user == 0:
                self._connections.warn_of_root(self.process)
            self.address = f"process {self.process}"
        else:
            peer = transport.get_extra_info("peername")
            self.address = str(peer[0]) if peer else ""
        if not self._connections.admit(self):
            self.abort()
        elif self.secure:
            self._transport.pause_reading()
            self._handshake = self._loop.create_task(self._secure())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connections.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._deaf or self._over:
            return
        in_head, parsed = self._in_head, self._parsed
        if self._task is None and not self._waiting and self._head_at is None:
            self._head_at = self._loop.time()
        try:
            self._feed(self._connections.scratch[:nbytes])
        except httptools.HttpParserError as exn:
            self._refuse(400, type(exn).__name__)
        if self._in_head and (in_head or parsed == self._parsed):
            self._head_bytes += nbytes
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self._refuse(431, "a head of more than 16 KiB")
        made = self._made
        full = made is not None and not made.wanted and made.held_bytes > _BODY_AHEAD_BYTES
        if (full or len(self._waiting) > _PIPELINED) and not self._paused and self._handshake is None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool | None:
        """Treat the end of input as the client's leaving, unless a body is being sent: that is completed."""
        self._half_closed = self.sending and not self.secure
        return self._half_closed

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._writable.set()
        self._cancel_tasks()
        if self._own is not None:
            self._own.close()
            self._own = None
        self._connections.discard(self)

    # -- the parser's side

    def on_message_begin(self) -> None:
        """Begin to collect a head."""
        self._in_head, self._head_bytes = True, 0
        self._target, self._fields, self._fields_bytes = b"", {}, 0

    def on_url(self, url: bytes) -> None:
        """Append a piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header field; trailers are dropped."""
        if self._in_head:
            self._fields_bytes += len(name) + len(value) + 4
            key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
            before = self._fields.get(key)
            self._fields[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        """Queue the request: it can be answered while its body comes."""
        self._in_head, self._head_at = False, None
        if self._deaf:
            return
        fields, parser = self._fields, self._parser
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        host, coding = fields.get("host"), fields.get("transfer-encoding")
        if version not in ("1.0", "1.1"):
            self._refuse(505, f"HTTP/{version}")
        elif self._fields_bytes + len(self._target) > HEAD_LIMIT_BYTES:
            self._refuse(431, "a head of more than 16 KiB")
        elif (host is None and version == "1.1") or not _HOST.fullmatch(host or ""):
            self._refuse(400, "a request without a host, with several, or with one that is none")
        elif coding is not None and version == "1.0":
            self._refuse(400, "Transfer-Encoding in HTTP/1.0")
        elif coding is not None and coding.strip().lower() != "chunked":
            self._refuse(501, "a Transfer-Encoding that is not chunked")
        elif parser.should_upgrade() and (coding is not None or fields.get("content-length", "0") != "0"):
            self._refuse(400, "a body behind Upgrade; send it without that field")
        else:
            target, keep_alive = self._target.decode("utf-8", "surrogateescape"), parser.should_keep_alive()
            self._made = HttpRequest(self, method, target, fields, version, keep_alive and method != "CONNECT")
            self._queue(self._made)

    def on_body(self, data: bytes) -> None:
        """Append a piece of the body."""
        if self._made is not None:
            self._made.feed(data)

    def on_message_complete(self) -> None:
        """End the body."""
        self._parsed += 1
        if self._made is not None:
            self._made.end()
            self._made = None

    # -- inside

    async def _secure(self) -> None:
        limits = self._connections
        assert limits.tls is not None
        try:
            times: dict[str, Any] = {"ssl_handshake_timeout": limits.header_s, "ssl_shutdown_timeout": _TLS_CLOSE_S}
            secured = await self._loop.start_tls(self._transport, self, limits.tls, server_side=True, **times)
        except OSError as exn:
            logger.debug("TLS handshake with %s: %s", self.address, exn)
            limits.meters.refused("handshake")
            limits.discard(self)
        except BaseException:
            limits.discard(self)
            raise
        else:
            self._handshake = None
            if secured is not None:
                self._transport = secured
                self._serve_next()

    def _feed(self, data: memoryview) -> None:
        """Parse ``data``. No ``Upgrade`` is made: what follows is the next request. What follows CONNECT is dropped."""
        while data and not self._deaf:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as exn:
                data = data[exn.args[0] :]
                self._deaf = self._deaf or self._parser.get_method() == b"CONNECT"
                self._parser = httptools.HttpRequestParser(self)

    def _queue(self, item: HttpRequest | HttpResponse) -> None:
        self._waiting.append(item)
        self._serve_next()

    def _serve_next(self) -> None:
        """Begin to answer, unless an answer or the TLS handshake is in progress."""
        if self._task is None and self._handshake is None and self._waiting:
            self._task = self._loop.create_task(self._serve())

    async def _serve(self) -> None:
        """Answer the queued requests in order."""
        try:
            while self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, HttpResponse):
                    self._transport.write(item.to(HttpRequest(self, "GET", "", {}, keep_alive=False)))
                    self._close(linger=True)
                    return
                if len(self._waiting) <= _PIPELINED // 2:
                    self.receive()
                if self.reserved or self._connections.draining:
                    item.keep_alive = False
                await self._connections.answer(item)
                self.sending = False
                if not (item.keep_alive and item.complete) or self._half_closed or self._connections.draining:
                    self._close(linger=not item.complete)
                    return
        except Exception:
            logger.exception("the server itself failed at a request")
            self._transport.abort()
        finally:
            self._task, self._since = None, self._loop.time()
            self._connections.idle(self)
            if self._in_head and not self._over:
                self._head_at = self._since

    def _refuse(self, status: int, why: str) -> None:
        """Answer a malformed request, after those before it. A request with a malformed body has its own answer."""
        if self._deaf:
            return
        self._deaf, self._head_at = True, None
        if self._made is not None:
            self._made.refuse(Refusal(400, "the body is not framed as HTTP has it", "malformed"))
        else:
            self._queue(self._connections.malformed(self, status, why))

    def _close(self, *, linger: bool) -> None:
        """Close it once all is sent. ``linger``: discard input until then; closing at once would lose the answer for a
        client that is still sending."""
        self._deaf, self._in_head = True, False
        self._waiting.clear()
        self.receive()
        if linger and not self.secure and not self.unsent:
            with contextlib.suppress(OSError):  # it has gone meanwhile
                self._transport.write_eof()
        elif not self._transport.is_closing():
            self._transport.close()
