"""Requests and answers of HTTP/1.1, as values: what a client sent, and what it is sent."""

from __future__ import annotations

import asyncio
import functools
import json
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

from wds_async._version import __version__
from wds_async.service.refusals import Refusal

if TYPE_CHECKING:
    from wds_async.service.http_server import ClientConnection

__all__ = ["BODY_LIMIT_BYTES", "SERVER", "HttpRequest", "HttpResponse", "json_response"]

SERVER = f"wds-async/{__version__}"
"""The header ``Server`` of every answer, by which our own clients know us."""
BODY_LIMIT_BYTES = 1 << 20
"""Largest body of a request, unless the server has another limit; a longer one is answered 413."""
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_date = functools.lru_cache(maxsize=2)(functools.partial(formatdate, usegmt=True))


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
    """Whether all of its body has come."""
    wanted: bool = False
    """Whether its body is read."""
    _body: bytearray = field(default_factory=bytearray)
    _refusal: Refusal | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the target, decoded; of several by one name the last."""
        return dict(urllib.parse.parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    @property
    def chunked(self) -> bool:
        """Whether a body of unknown length is sent in chunks, and not to the connection's end."""
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
