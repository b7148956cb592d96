"""HTTP(S) by URL. Direct requests; aiohttp where a proxy is in the way, or a server streams what it should cut.

Statuses are those of RFC 9110; which of them are worth another attempt follows the clouds' own guidance
(408, 425, 429 and 5xx are, but not 501 and 505, which say that the server never will).
"""

from __future__ import annotations

import base64
import email.utils
import errno
import re
import socket
import ssl
import time
import urllib.parse
from typing import TYPE_CHECKING

from wds_async.config import proxy_for
from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.base import Access, Answer, Fault, RefusedAnswer, Request, Stream, Verdict

if TYPE_CHECKING:
    import aiohttp

__all__ = ["HttpBackend", "HttpStream", "explain_status", "identity_of"]

_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)}) - {501, 505}


def identity_of(fields: dict[str, str], total: int | None) -> str:
    """What pins an object while it is read: its ETag, else ``Last-Modified`` and size, else the size."""
    if etag := fields.get("etag"):
        return f"etag {etag}"
    modified = fields.get("last-modified")
    size = "unknown size" if total is None else f"{total} bytes"
    return f"modified {modified}, {size}" if modified else size


def explain_status(answer: Answer) -> Fault:
    """A status as a `Fault`, in words."""
    status = answer.status
    words = f"the server answered {status}{_excerpt(answer)}"
    if status in (404, 410):
        return Fault(Verdict.MISSING, words, "Check the URL, and that the object was not moved.")
    if status in (401, 403, 407):
        return Fault(Verdict.DENIED, words, "Check the credentials and the permission to read.")
    if status == 412:
        return Fault(Verdict.CHANGED, "the object was replaced while it was being read (412)", "Read it again.")
    if status in _TRANSIENT:
        return Fault(Verdict.TRANSIENT, words, "The server is overloaded or broken.", _retry_after(answer))
    return Fault(Verdict.FATAL, words)


def _excerpt(answer: Answer) -> str:
    text = re.sub(r"<[^>]*>|\s+", " ", answer.excerpt[:500].decode("utf-8", "replace"))
    text = " ".join(text.split())[:120]
    return f" ({text})" if text.isprintable() and text else ""


def _retry_after(answer: Answer) -> float | None:
    text = answer.fields.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    if text:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except ValueError:
            return None
    return None


class HttpBackend:
    """Plain web servers: no listing, no credentials but those in the URL (``user:password@``)."""

    def __init__(self, *, direct: bool = True, connect_timeout_s: float = 5.0, stall_timeout_s: float = 30.0) -> None:
        self._direct = direct
        self._timeouts_s = connect_timeout_s, stall_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def access(self, url: str) -> Access:
        request = self.request(url)
        if self._direct and proxy_for(request.url) is None:
            return request
        return self.streamed(request)

    def request(self, url: str) -> Request:
        """The GET for ``url``; userinfo becomes basic authorisation (RFC 7617), fragments are dropped.

        `UrlError` for a URL without a host or with a port that is none."""
        try:
            parts = urllib.parse.urlsplit(url)
            valid = bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise UrlError(f"{redact(url)!r}: a malformed URL; write http://host[:port]/path")
        headers = [("User-Agent", "wds-async"), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
        if parts.username is not None:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            headers.append(("Authorization", "Basic " + base64.b64encode(pair.encode()).decode("ascii")))
        netloc = parts.netloc.rpartition("@")[2]
        return Request(parts._replace(netloc=netloc, fragment="").geturl(), tuple(headers))

    def streamed(self, request: Request) -> Stream:
        return HttpStream(self, request)

    def classify(self, outcome: Answer | BaseException) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        if isinstance(outcome, Answer):
            return explain_status(outcome)
        return explain_exception(outcome)

    async def session(self) -> aiohttp.ClientSession:
        """The aiohttp session for what is not read directly, made at first use."""
        import aiohttp  # noqa: PLC0415 (a slow import that a direct read never needs)

        if self._session is None:
            connect_s, stall_s = self._timeouts_s
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=stall_s)
            # aiohttp's own context is as old as its import, and so may be what it made of SSL_CERT_FILE.
            connector = aiohttp.TCPConnector(ssl=ssl.create_default_context())
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, trust_env=True, read_bufsize=1 << 20
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def explain_exception(exn: BaseException) -> Fault:
    """A network exception as a `Fault`."""
    cause: BaseException = getattr(exn, "certificate_error", None) or getattr(exn, "os_error", None) or exn
    text = str(cause) or type(cause).__name__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Fault(
            Verdict.FATAL,
            f"the server's TLS certificate does not verify: {cause.verify_message or text}",
            "Point SSL_CERT_FILE to the authority that signed it.",
        )
    if isinstance(cause, socket.gaierror):
        return Fault(Verdict.TRANSIENT, f"the host does not resolve: {text}", "Check the host's name and the DNS.")
    if isinstance(cause, ConnectionRefusedError) or getattr(cause, "errno", None) == errno.ECONNREFUSED:
        return Fault(Verdict.TRANSIENT, "the connection was refused", "Check that the server runs on this port.")
    if isinstance(cause, TimeoutError):
        return Fault(
            Verdict.STALLED,
            text,
            "Check the server, the port and the network between; WDS_TIMEOUT is for how long it is tried.",
        )
    if isinstance(cause, OSError) or _is_client_error(exn):
        return Fault(Verdict.TRANSIENT, text, "Check the network and the server.")
    return Fault(Verdict.FATAL, f"{type(cause).__name__}: {text}")


def _is_client_error(exn: BaseException) -> bool:
    return any(cls.__module__.startswith("aiohttp") for cls in type(exn).__mro__)


class HttpStream:
    """The whole body through aiohttp: chunked, compressed, by a proxy. Decoded where it was encoded."""

    restartable = True

    def __init__(self, backend: HttpBackend, request: Request) -> None:
        self._backend = backend
        self._request = request
        self._response: aiohttp.ClientResponse | None = None
        self._chunk = memoryview(b"")

    async def open(self) -> str:
        session = await self._backend.session()
        response = await session.get(self._request.url, headers=dict(self._request.headers))
        self._response = response
        fields = {name.lower(): value for name, value in response.headers.items()}
        if response.status != 200:
            excerpt = (await response.content.read(500)) if response.status >= 400 else b""
            raise RefusedAnswer(Answer(response.status, fields, excerpt))
        return identity_of(fields, None)

    async def readinto(self, into: memoryview) -> int:
        assert self._response is not None
        if not self._chunk:
            self._chunk = memoryview(await self._response.content.readany())
        count = min(len(self._chunk), len(into))
        into[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

    async def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None
        self._chunk = memoryview(b"")
