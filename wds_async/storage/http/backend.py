"""Plain web servers, and aiohttp for every store: redirects, index pages, ranges, streams.

Where the engine cannot send a request itself (a proxy, ``WDS_DIRECT=0``), aiohttp does. A program's `Guard` judges each
address immediately before it is connected to.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import html.parser
import io
import ipaddress
import socket
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wds_async.config import proxy_for
from wds_async.errors import AccessDenied, UrlError
from wds_async.storage.base import (
    Access,
    Answer,
    Backend,
    Call,
    Checksum,
    Description,
    Entry,
    Fault,
    Guard,
    Location,
    RefusedAnswer,
    Request,
    Stream,
    Tls,
)
from wds_async.storage.checked import CheckedRanges, Identify
from wds_async.storage.checksums import amazon, azure, google, representation
from wds_async.storage.deadlines import question_s, with_deadline
from wds_async.storage.fsspec_config import fsspec_configuration
from wds_async.storage.http.auth import (
    ANONYMOUS,
    HttpSettings,
    Identity,
    Netrc,
    identity_of_url,
    tls_context,
)
from wds_async.storage.http.errors import explain_exception, explain_status, with_identity, with_port_hint, with_proxy
from wds_async.storage.http.messages import (
    PLAIN_HEADERS,
    REDIRECTS,
    answer_of,
    fields_of,
    redirected,
    version_of,
    wire_url,
)
from wds_async.storage.http.puts import ONLY_NEW, created, put
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.preload import import_client
from wds_async.urls import split_web_url

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult

__all__ = [
    "HttpBackend",
    "HttpStream",
    "IndexPage",
    "RangeRequests",
    "always",
    "explain_exception",
    "explain_status",
    "guarded_resolver",
    "is_address",
    "judge",
    "version_of",
]


def judge(guard: Guard, host: str, address: str) -> None:
    """Raise AccessDenied if ``guard`` allows no connection of ``host`` to ``address``."""
    if why := guard.why_not(host, address):
        raise AccessDenied(f"no connection is made: {why}")


def is_address(host: str) -> bool:
    """Return whether ``host`` is an address, also in a short form (``127.1``) that sockets take: aiohttp resolves none
    of these."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.replace(".", "").isdigit()
    return True


def guarded_resolver(guard: Guard) -> AbstractResolver:
    """Return aiohttp's resolver, whose answers are judged. Call it within a running loop."""
    from aiohttp.abc import AbstractResolver  # noqa: PLC0415 (a slow import that a direct read never needs)
    from aiohttp.resolver import ThreadedResolver  # noqa: PLC0415

    class Guarded(AbstractResolver):
        def __init__(self) -> None:
            self._resolver = ThreadedResolver()

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            results = await self._resolver.resolve(host, port, family)
            for result in results:
                judge(guard, host, result["host"])
            return results

        async def close(self) -> None:
            await self._resolver.close()

    return Guarded()


# Escaped wherever they stand in a name: they would end it, or begin an escape.
_ESCAPED = frozenset("%?#/\\ \"<>'`")


class IndexPage(html.parser.HTMLParser):
    """Fed with the page of the folder ``url`` (which ends with "/"); ``page`` is its own URL, after redirects."""

    def __init__(self, url: str, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self._url, self._page = url, page
        parts = urllib.parse.urlsplit(page)
        self._origin, self._folder = parts[:2], urllib.parse.unquote(parts.path.rpartition("/")[0])
        self._seen: set[str] = set()
        self._entries: list[Entry] = []

    def take(self) -> list[Entry]:
        """Return the entries since the last call, in the page's order."""
        entries, self._entries = self._entries, []
        return entries

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href") if tag == "a" else None
        name = self._name(href.strip()) if href else ""
        if name and name not in self._seen:
            self._seen.add(name)
            self._entries.append(Entry(self._url + name, None))

    def _name(self, href: str) -> str:
        """Return the part of ``href`` below the folder's URL; "" for what does not lie directly in it."""
        try:
            target = urllib.parse.urlsplit(urllib.parse.urljoin(self._page, href))
        except ValueError:
            return ""
        slash = "/" if target.path.endswith("/") else ""
        folder, _, last = target.path.removesuffix("/").rpartition("/")
        if target[:2] != self._origin or urllib.parse.unquote(folder) != self._folder:
            return ""
        name = _shown(last)
        return name + slash if name not in ("", ".", "..") else ""


def _shown(name: str) -> str:
    """Return the name as a person writes it in a URL: decoded, but for what would then mean something else."""
    try:
        text = urllib.parse.unquote(name, errors="strict")
    except UnicodeDecodeError:  # bytes of another encoding: they can be asked for only as they stand
        return name
    return "".join(c if c.isprintable() and c not in _ESCAPED else urllib.parse.quote(c, safe="") for c in text)


_WANTED = {"Want-Repr-Digest": "sha-256=10, sha-512=5"}  # RFC 9530 §4
_INDEX_LIMIT_BYTES = 32 << 20
_INDEX_PIECE_BYTES = 64 << 10


async def _here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class HttpBackend(Backend):
    """Plain web servers.

    ``options``: ``headers``, ``token`` (bearer), ``username`` and ``password``, ``ca_file``, ``verify``,
    ``certificate``, ``key``, or fsspec's ``client_kwargs`` with ``headers``, ``auth`` and ``trust_env``; ConfigError
    for others. ``call`` runs a blocking function on a thread. ``guard`` judges redirects, and where aiohttp connects.
    """

    def __init__(
        self,
        options: Options = NO_OPTIONS,
        *,
        call: Call = _here,
        direct: bool = True,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
        guard: Guard | None = None,
    ) -> None:
        self._options, self._settings = options, HttpSettings.of(options)
        self._call, self._direct, self._guard = call, direct, guard
        self.timeouts_s = connect_timeout_s, stall_timeout_s
        self._netrc: Netrc | None = None
        self._sessions: dict[str, aiohttp.ClientSession] = {}  # by the path of a Unix socket, "" for TCP
        self._contexts: dict[Tls, ssl.SSLContext] = {}

    def prepare(self) -> None:
        """Read fsspec's configuration and the netrc file, once. Blocks."""
        if self._netrc is None:
            if configured := fsspec_configuration("http", "https"):
                self._settings = HttpSettings.of(self._options, configured)
            self._netrc = Netrc.read() if self._settings.environment else Netrc({})

    async def access(self, location: Location) -> Access:
        await self._prepared()
        return await self.read_by(self.request(location.target))

    async def read_by(self, request: Request) -> Access:
        """Return the engine's own ``request``, or aiohttp in its stead where that cannot be: by ranges that are
        checked, or in order from a server that does not cut."""
        return await self.by_aiohttp(always(request)) if self.why_not(request.url) else request

    async def by_aiohttp(self, request: Callable[[], Awaitable[Request]], identify: Identify = version_of) -> Access:
        """Return an access by aiohttp to the GET that ``request`` returns: checked ranges, or a stream from a server
        that ignores ranges."""
        ranges = await CheckedRanges.of(RangeRequests(self, request), identify, sum(self.timeouts_s))
        return self.streamed(await request()) if ranges is None else ranges

    def request(self, url: str) -> Request:
        """Return the GET for ``url``, with the credentials and headers that are known; fragments are dropped.

        `UrlError` for a URL without a host or with a port that is none.
        """
        parts = split_web_url(url)
        headers = {name.lower(): (name, value) for name, value in PLAIN_HEADERS}
        for name, value in (*self._settings.headers, *self.identity(url).headers):
            headers[name.lower()] = name, value
        netloc = parts.netloc.rpartition("@")[2]
        target = parts._replace(netloc=netloc, fragment="").geturl()
        return Request(target, tuple(headers.values()), tls=self._settings.tls, guard=self._guard)

    def identity(self, url: str) -> Identity:
        """Return the credentials for ``url``: of the options, the URL, or (once it was read) the netrc file."""
        parts = split_web_url(url)
        identity = self._settings.identity or identity_of_url(parts)
        if identity is None and self._netrc is not None:
            identity = self._netrc.identity(parts.hostname or "")
        return identity or ANONYMOUS

    def streamed(self, request: Request) -> Stream:
        return HttpStream(self, request)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        """Yield the links of the folder's index page that lead one level down; the size of a file is None (unknown)."""
        await self._prepared()
        response, page_url = await self.get(self.request(location.target))
        with contextlib.closing(response):
            if response.status != 200:
                raise RefusedAnswer(await answer_of(response))
            if response.content_type not in ("text/html", "application/xhtml+xml"):
                raise UrlError(f"{location.shown}: the server shows no index page; name the shards, with {{000..999}}")
            page, size = IndexPage(location.target, page_url), 0
            decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            async for piece in response.content.iter_chunked(_INDEX_PIECE_BYTES):
                size += len(piece)
                if size > _INDEX_LIMIT_BYTES:
                    raise UrlError(
                        f"{location.shown}: an index page of more than 32 MiB; name the shards, with {{000..999}}"
                    )
                page.feed(decode(piece))
                for entry in page.take():
                    yield entry
            page.close()
            for entry in page.take():
                yield entry

    async def describe(self, location: Location) -> Description:
        await self._prepared()
        request = self.request(location.target)
        parts = urllib.parse.urlsplit(request.url)
        why = self.why_not(request.url)
        also = [name for name, _ in self._settings.headers if name.lower() != "authorization"]
        identity = self.identity(location.target).described + (f", with the headers {', '.join(also)}" if also else "")
        return Description("HTTP", f"{parts.scheme}://{parts.netloc}", identity, not why, why)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        return self.explain(outcome, location.target)

    def explain(self, outcome: Answer | BaseException, url: str = "") -> Fault:
        """Explain the outcome of a request for ``url``."""
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        if not isinstance(outcome, Answer):
            fault = with_port_hint(explain_exception(outcome), outcome, url)
            return with_proxy(fault, outcome, url) if self._settings.environment else fault
        if not url:
            return explain_status(outcome)
        identity = self.identity(url)
        proofs = Identity("", (*identity.headers, *self._settings.headers))
        fault = with_identity(explain_status(outcome), outcome, identity.name, url)
        return replace(fault, reason=proofs.hidden(fault.reason))

    def renew(self, location: Location) -> None:
        self._netrc = None

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        """Return the checksum in an answer. Headers of cloud stores are known too, whose objects may be read by their
        plain URLs.
        """
        return google(fields) or amazon(fields) or azure(fields) or representation(fields)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        await self._prepared()
        return self.checksum(await self.head(self.request(location.target), _WANTED))

    async def create(self, location: Location, data: bytes) -> bool:
        await self._prepared()
        return await self.put_new(self.request(location.target), data)

    async def put_new(self, request: Request, data: bytes) -> bool:
        """PUT ``data`` where there is nothing (``If-None-Match: *``, RFC 9110 §13.1.2), to where redirects lead. Return
        False where the server has an object. Raise RefusedAnswer for other refusals."""
        return created(await self._call(put, request, io.BytesIO(data), len(data), self.timeouts_s[1], ONLY_NEW))

    async def remove(self, location: Location) -> None:
        await self._prepared()
        await self.delete(self.request(location.target), location.shown)

    async def delete(self, request: Request, shown: str) -> None:
        """DELETE an object, where redirects lead; one that is not there is no error. Raise UrlError where the server
        knows no DELETE, and RefusedAnswer."""
        while True:
            response = await self.send(request, method="DELETE")
            with contextlib.closing(response):
                answer = await answer_of(response)
            if answer.status in REDIRECTS and "location" in answer.fields:
                request = redirected(request, answer.fields["location"])
                continue
            if answer.status in (405, 501):
                raise UrlError(f"{shown}: its server removes nothing (DELETE was answered {answer.status})")
            if answer.status >= 300 and answer.status not in (404, 410):
                raise RefusedAnswer(answer)
            return

    async def head(
        self,
        request: Request,
        more: Mapping[str, str] = {},
        enough: Callable[[Mapping[str, str]], bool] = lambda fields: False,
    ) -> Mapping[str, str]:
        """Return the fields (lower case) of the answer to a HEAD after all redirects, or of the redirect that has
        ``enough`` of them. RefusedAnswer from 400 on."""
        while True:
            response = await self.send(request, more, method="HEAD")
            response.release()
            answer = Answer(response.status, fields_of(response.headers))
            if answer.status >= 400:
                raise RefusedAnswer(answer)
            if answer.status not in REDIRECTS or "location" not in answer.fields or enough(answer.fields):
                return answer.fields
            request = redirected(request, answer.fields["location"])

    async def get(self, request: Request, body: Any = None) -> tuple[aiohttp.ClientResponse, str]:
        """Return the answer by aiohttp after all redirects, and the URL that gave it. What another origin may not see
        is not sent there (aiohttp itself would hold back the one header ``Authorization``), but for ``body``."""
        while True:
            response = await self.send(request, body=body)
            if response.status not in REDIRECTS or "location" not in response.headers:
                return response, request.url
            response.release()
            request = redirected(request, response.headers["location"])

    async def send(
        self, request: Request, more: Mapping[str, str] = {}, body: Any = None, method: str = "GET"
    ) -> aiohttp.ClientResponse:
        """Return the answer to one request by aiohttp, a redirect too. ``more`` headers hold no secret; ``body`` is
        sent as JSON."""
        import yarl  # noqa: PLC0415 (comes with aiohttp)

        session = await self.session(request.socket)
        proxy, proof = (None, {}) if request.socket else self._proxy(request.url)
        target = yarl.URL(wire_url(request.url), encoded=True)
        if proxy is None and self._guard is not None and is_address(host := target.raw_host or ""):
            judge(self._guard, host, host)
        secure = target.scheme == "https"
        context = await self._context(request.tls) if secure else True
        # aiohttp's own time limit begins again with every byte of a head, and with every interim answer.
        async with asyncio.timeout(sum(self.timeouts_s)):
            return await session.request(
                method,
                target,
                headers={**dict(request.headers), **more, **({} if secure else proof)},
                json=body,
                allow_redirects=False,
                proxy=proxy,
                proxy_headers=proof if secure else None,
                ssl=context,
            )

    async def session(self, path: str = "") -> aiohttp.ClientSession:
        """Return the aiohttp session for what is not read directly, made at first use: of the Unix socket at ``path``,
        "" for TCP. It reads no environment: proxies are given with each request, and aiohttp's netrc would also use
        its ``default`` entry."""
        if path not in self._sessions:
            await self._call(import_client, "aiohttp")  # a slow import that a direct read never needs
        if path not in self._sessions:
            import aiohttp  # noqa: PLC0415 (loaded by now)

            connector: aiohttp.BaseConnector | None = aiohttp.UnixConnector(path) if path else None
            if self._guard is not None and not path:
                connector = aiohttp.TCPConnector(resolver=guarded_resolver(self._guard))
            self._sessions[path] = aiohttp.ClientSession(
                connector=connector, timeout=self.timeout(), read_bufsize=1 << 20
            )
        return self._sessions[path]

    def timeout(self) -> aiohttp.ClientTimeout:
        """Return aiohttp's timeouts: for a connection and for the next bytes; none for an answer as a whole."""
        import aiohttp  # noqa: PLC0415 (loaded by `session`)

        connect_s, stall_s = self.timeouts_s
        return aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=stall_s)

    async def close(self) -> None:
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _prepared(self) -> None:
        if self._netrc is None:
            await self._call(self.prepare)

    def why_not(self, url: str) -> str:
        """Return why ``url`` is not read by the engine's own requests; "" where it is."""
        if not self._direct:
            return "WDS_DIRECT=0"
        return "a proxy is in the way" if self._settings.environment and proxy_for(url) is not None else ""

    def _proxy(self, url: str) -> tuple[str | None, dict[str, str]]:
        """Return the proxy for ``url``, and what proves to it who we are. aiohttp's errors show the URL of a proxy
        whole, so userinfo is not left in it."""
        named = proxy_for(url) if self._settings.environment else None
        if named is None:
            return None, {}
        parts = urllib.parse.urlsplit(named if "://" in named else f"http://{named}")
        identity = identity_of_url(parts) or ANONYMOUS
        proxy = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        return proxy, {f"Proxy-{name}": value for name, value in identity.headers}

    async def _context(self, tls: Tls) -> ssl.SSLContext:
        # Not aiohttp's own: that is as old as its import, and so may be what it made of SSL_CERT_FILE.
        if tls not in self._contexts:
            self._contexts[tls] = await self._call(tls_context, tls)
        return self._contexts[tls]


def _was_closed(tls: Any) -> bool:
    """Return whether the peer has ended TLS by a ``close_notify`` (RFC 8446 §6.1). aiohttp takes any end of a
    connection for the end of a body without a length, but one without that may be a cut (RFC 9112 §9.8)."""
    try:
        tls.read(1)
    except ssl.SSLZeroReturnError:
        return True
    except ssl.SSLError:  # it waits for more
        pass
    return False


class HttpStream:
    """The whole body through aiohttp: chunked, compressed, by a proxy. Decoded where it was encoded."""

    restartable = True

    def __init__(self, backend: HttpBackend, request: Request) -> None:
        self._backend, self._request = backend, request
        self._response: aiohttp.ClientResponse | None = None
        self._chunk = memoryview(b"")
        self._opened = 0
        self._tls: Any = None
        self.open_ended = False
        """True if the body has neither a length nor chunks: then it ends with the connection."""
        self.fields: Mapping[str, str] = {}
        """Of the answer's head, in lower case, once it is open."""

    async def open(self) -> str:
        self._opened += 1
        return await with_deadline(self._open(self._opened), question_s(*self._backend.timeouts_s))

    async def _open(self, number: int) -> str:
        response, _ = await self._backend.get(self._request)
        if number != self._opened:  # it was abandoned meanwhile
            response.close()
            raise ConnectionError("closed")
        self._response = response
        if response.status != 200:
            raise RefusedAnswer(await answer_of(response))
        self.fields = fields_of(response.headers)
        chunked = "chunked" in self.fields.get("transfer-encoding", "").lower()
        self.open_ended = not chunked and "content-length" not in self.fields
        transport = response.connection and response.connection.transport
        self._tls = transport.get_extra_info("ssl_object") if transport else None
        return version_of(self.fields, None)

    async def readinto(self, into: memoryview) -> int:
        assert self._response is not None
        if not self._chunk:
            content, stall_s = self._response.content, self._backend.timeouts_s[1]
            chunk = content.read_nowait()  # what has come already needs no deadline
            self._chunk = memoryview(chunk or await with_deadline(content.readany(), stall_s, "no byte arrived"))
            if not self._chunk and self.open_ended and self._tls is not None and not _was_closed(self._tls):
                raise ConnectionResetError("the server closed the connection without ending TLS (no close_notify)")
        count = min(len(self._chunk), len(into))
        into[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

    async def close(self) -> None:
        self._opened += 1
        if self._response is not None:
            connection = self._response.connection  # None once the body was read to its end
            if connection is not None and connection.transport is not None:
                connection.transport.abort()  # TLS would say good-bye, perhaps on a loop that is closed by then
            self._response.close()
            self._response = None
        self._chunk = memoryview(b"")


def always(request: Request) -> Callable[[], Awaitable[Request]]:
    """Return a coroutine function that returns ``request``."""

    async def same() -> Request:
        return request

    return same


_MOVED_AWAY = frozenset({401, 403, 404, 410})
"""Answers of a redirect's target that may have expired."""


class RangeRequests:
    """GETs of ranges by aiohttp, a `checked.RangeGet`. ``request`` returns the GET that is valid now; where it
    ``keeps_redirect``, later ranges go straight to the redirect's target, until that refuses."""

    def __init__(self, client: HttpBackend, request: Callable[[], Awaitable[Request]]) -> None:
        self._client, self._request = client, request
        self._moved: Request | None = None

    @contextlib.asynccontextmanager
    async def __call__(self, start: int, stop: int, etag: str) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        more = {"Range": f"bytes={start}-{stop - 1}", **({"If-Match": etag} if etag else {})}
        kept, request = self._moved, await self._request()
        response = await self._client.send(kept or request, more)
        if kept is not None and response.status in (*_MOVED_AWAY, *REDIRECTS):
            response.close()
            if self._moved is kept:
                self._moved = None
            response = await self._client.send(request, more)
        try:
            while response.status in REDIRECTS and "location" in response.headers:
                response.close()
                request = redirected(request, response.headers["location"])
                response = await self._client.send(request, more)
                if request.keeps_redirect and response.status == 206:
                    self._moved = replace(request, hops=())
            answer = await answer_of(response)
            if answer.status >= 300 and answer.status != 416:
                raise RefusedAnswer(answer)
            yield answer, response.content.iter_any()
        finally:
            response.close()  # of an answer that was read to its end the connection is kept
