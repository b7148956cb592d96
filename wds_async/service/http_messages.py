"""Requests and answers of HTTP/1.1, as values: what a client sent, and what it is sent."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol

from wds_async._version import __version__
from wds_async.service.refusals import Refusal

__all__ = ["BODY_LIMIT_BYTES", "SERVER", "Fields", "HttpRequest", "HttpResponse", "RequestConnection", "json_response"]

SERVER = f"wds-async/{__version__}"
"""The header ``Server`` of every answer, by which our own clients know us."""
BODY_LIMIT_BYTES = 1 << 20
"""Largest body of a request, unless the server has another limit; a longer one is answered 413."""
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class RequestConnection(Protocol):
    """The connection of a request, as answers use it (`http_server.ClientConnection`)."""

    local: bool
    secure: bool
    process: int
    address: str
    reserved: bool
    sending: bool
    files_logged: bool

    @property
    def body_limit_bytes(self) -> int: ...
    @property
    def certificate(self) -> Any: ...
    @property
    def closing(self) -> bool: ...
    @property
    def own_socket(self) -> socket.socket: ...
    @property
    def unsent(self) -> int: ...
    def write(self, data: bytes) -> None: ...
    async def drained(self) -> None: ...
    def unbuffered(self) -> None: ...
    def receive(self) -> None: ...
    def cut(self) -> None: ...


class Fields(Mapping[str, str]):
    """Header fields of a request, case-insensitive. Fields of one name are joined by a comma."""

    __slots__ = ("_fields", "size")

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}
        self.size = 0
        """Bytes of its lines."""

    def add(self, name: bytes, value: bytes) -> None:
        """Add a field as it came over the wire."""
        self.size += len(name) + len(value) + 4
        key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
        before = self._fields.get(key)
        self._fields[key] = text if before is None else f"{before}, {text}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or ``default``."""
        return self._fields.get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class HttpRequest:
    """One request. ``target`` and ``headers`` are as they came; ``keep_alive``: whether the connection stays open."""

    __slots__ = (
        "_body",
        "_query",
        "_spoiled",
        "_waiter",
        "complete",
        "connection",
        "headers",
        "keep_alive",
        "method",
        "target",
        "version",
        "wanted",
    )

    def __init__(
        self, connection: RequestConnection, method: str, target: str, headers: Fields, *, keep_alive: bool = True
    ) -> None:
        self.connection, self.method, self.target, self.headers = connection, method, target, headers
        self.version, self.keep_alive = "1.1", keep_alive
        self.complete = False
        """Whether all of its body has come."""
        self.wanted = False
        """Whether its body is read."""
        self._body: bytearray | None = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._query: dict[str, str] | None = None
        self._spoiled = False

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the target, decoded; of several by one name the last."""
        if self._query is None:
            text = self.target.partition("?")[2]
            self._query = dict(urllib.parse.parse_qsl(text, keep_blank_values=True))
        return self._query

    async def read(self, within_s: float) -> bytes:
        """Return the body. Refusal (413) if it is longer than the connection's limit, 408 if it takes too long."""
        limit = self.connection.body_limit_bytes
        if int(self.headers.get("Content-Length", "0")) > limit:
            self._body = None
        if not self.complete and not self._spoiled and self._body is not None:
            if self.version != "1.0" and self.headers.get("Expect", "").lower() == "100-continue" and not self._body:
                self.connection.write(_CONTINUE)
            self.wanted = True
            self.connection.receive()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(within_s):
                    await self._waiter
            except TimeoutError:
                words = f"the request's body did not come within {within_s:g} s (header_timeout_s)"
                raise Refusal(408, words, "body") from None
        if self._spoiled:
            raise Refusal(400, "the body is not framed as HTTP has it", "malformed")
        if self._body is None:
            raise Refusal(413, f"a body of more than {limit} bytes", "body")
        return bytes(self._body)

    @property
    def held_bytes(self) -> int:
        """Bytes of its body that are in memory."""
        return len(self._body or b"")

    def feed(self, data: bytes) -> None:
        """Append bytes of the body."""
        if self._body is not None:
            self._body += data
            if len(self._body) > self.connection.body_limit_bytes:
                self._body = None
                self._wake()

    def end(self) -> None:
        """Mark the body as complete."""
        self.complete = True
        self._wake()

    def spoil(self) -> None:
        """Mark the body as malformed."""
        self._spoiled = True
        self._wake()

    def head(self, status: int, fields: Mapping[str, str], length: int | None) -> bytes:
        """Return the head of an answer with a body of ``length`` bytes; None: in chunks, or to the connection's end for
        HTTP/1.0. ValueError for a field with a line break."""
        lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\nServer: {SERVER}\r\nDate: {_date()}\r\n"]
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

    @property
    def chunked(self) -> bool:
        """Whether a body of unknown length is sent in chunks."""
        return self.version != "1.0"

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HttpResponse:
    """An answer whose body is in memory. ``text`` is a body in UTF-8. ``sent``: it was sent already."""

    __slots__ = ("body", "headers", "sent", "status")

    def __init__(
        self,
        status: int = 200,
        *,
        text: str | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        content_type: str = "",
        sent: bool = False,
    ) -> None:
        self.status, self.sent = status, sent
        self.body = body if text is None else text.encode("utf-8", "surrogateescape")
        self.headers = dict(headers or {})
        if content_type or text is not None:
            charset = "" if text is None else "; charset=utf-8"
            self.headers.setdefault("Content-Type", f"{content_type or 'text/plain'}{charset}")

    def to(self, request: HttpRequest) -> bytes:
        """Return the bytes of the answer to ``request``: for a HEAD the head alone."""
        headers = self.headers
        if "Content-Length" in headers:
            length = int(headers["Content-Length"])
            headers = {name: value for name, value in headers.items() if name != "Content-Length"}
        else:
            length = len(self.body)
        head = request.head(self.status, headers, length)
        return head if request.method == "HEAD" or self.status in (204, 304) else head + self.body


def json_response(value: object, status: int = 200) -> HttpResponse:
    """Return ``value`` as JSON."""
    return HttpResponse(status, text=json.dumps(value), content_type="application/json")


_now = (0, "")


def _date() -> str:
    """Return the header ``Date``; it is formatted once a second."""
    global _now
    second = int(time.time())
    if second != _now[0]:
        _now = second, formatdate(second, usegmt=True)
    return _now[1]
