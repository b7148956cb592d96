"""Writing to AIStore: a PUT that its proxy redirects to the target, which also writes through to a cloud's bucket."""

from __future__ import annotations

import contextlib
import http.client
import urllib.parse
from collections.abc import Mapping
from dataclasses import replace
from typing import IO, Any

from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.ais.backend import explain_answer
from wds_async.storage.ais.urls import NOBODY, Place, cluster_for, read_token
from wds_async.storage.base import Answer, Fault, Tls, Verdict
from wds_async.storage.http.backend import tls_context
from wds_async.storage.http.errors import explain_exception
from wds_async.storage.http.messages import PLAIN_HEADERS
from wds_async.storage.secrets import Secrets
from wds_async.storage.upload import HttpSink

__all__ = ["AisSink"]

_REDIRECTS = frozenset({301, 302, 307, 308})
_BLOCK_BYTES = 1 << 20


class AisSink(HttpSink):
    """One object; it is gathered in a temporary file and sent at ``commit``, tried again like a read. ``options`` are
    those of reading (`aisurls.OPTIONS`). UrlError for a URL that names no object. Proxies of the environment are not
    used."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._cluster = cluster_for(url, options or {})
        place = Place.of(url)
        if not place.name or place.name.endswith("/") or place.query:
            raise UrlError(f"{redact(url)}: names no object to write; write ais://bucket/object")
        if self._cluster.socket:
            raise UrlError(
                f"{redact(url)}: the service at {self._cluster.endpoint} only reads; write to the store itself"
            )
        self._target = place.object_url(self._cluster.base)
        super().__init__(self._target)
        self.url = url
        self._who = NOBODY
        self._secrets = Secrets()

    def _attempt(self, file: IO[bytes], timeout_s: float) -> Fault | None:
        try:
            answer = self._exchange(file, timeout_s)
        except (OSError, http.client.HTTPException) as exn:
            fault = explain_exception(exn if isinstance(exn, OSError) else ConnectionError(str(exn)))
            return replace(fault, advice=f"Is AIStore's proxy at {self._cluster.endpoint} (AIS_ENDPOINT)?")
        if 200 <= answer.status < 300:
            return None
        if answer.status in _REDIRECTS:
            return Fault(Verdict.FATAL, f"a target of AIStore at {self._cluster.endpoint} redirected the upload again")
        return explain_answer(self._secrets.of_answer(answer), self._who, self._cluster.endpoint)

    def _exchange(self, file: IO[bytes], timeout_s: float) -> Answer:
        """The proxy is asked with an empty body, as AIStore's own client does (a front end may read the body that a
        length promises, before it answers), and says where to; the body goes to that target only, and the token only
        to the proxy."""
        token, _, self._who = read_token(self._cluster.token)
        self._secrets.add(token)
        headers = {**dict(PLAIN_HEADERS[:1]), "Content-Type": "application/octet-stream"}
        mine = {"Authorization": f"Bearer {token}"} if token else {}
        asked = {**headers, **mine, "Connection": "close"}
        answer = _put(self._target, asked, None, 0, self._cluster.tls, timeout_s)
        if answer.status not in _REDIRECTS or "location" not in answer.fields:
            # A single node may have taken the object itself, without a body: that is no success.
            return answer if answer.status >= 300 else Answer(502, {}, b"the proxy did not redirect the upload")
        target = urllib.parse.urljoin(self._target, answer.fields["location"])
        return _put(target, headers, file, self.offset, self._cluster.tls, timeout_s)


def _put(url: str, headers: dict[str, str], body: IO[bytes] | None, size: int, tls: Tls, timeout_s: float) -> Answer:
    parts = urllib.parse.urlsplit(url)
    options: dict[str, Any] = {"timeout": timeout_s, "blocksize": _BLOCK_BYTES}
    kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection
        options["context"] = tls_context(tls)
    target = urllib.parse.urlunsplit(("", "", parts.path, parts.query, ""))
    with contextlib.closing(kind(parts.hostname or "", parts.port, **options)) as connection:
        connection.connect()
        try:
            connection.request("PUT", target, body=body, headers={**headers, "Content-Length": str(size)})
        except (BrokenPipeError, ConnectionResetError):  # refused before it was read; the answer says why
            with contextlib.suppress(OSError, http.client.HTTPException):
                return _answer(connection)
            raise
        return _answer(connection)


def _answer(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    fields = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, fields, response.read(4096) if response.status >= 400 else b"")
