"""PUTs by `http.client`, blocking: aiohttp repeats a PUT by itself where the connection breaks, and loses an answer
that comes before the body is read."""

from __future__ import annotations

import contextlib
import http.client
import urllib.parse
from collections.abc import Mapping
from typing import IO, Any

from wds_async.config import proxy_for
from wds_async.storage.base import Answer, RefusedAnswer, Request
from wds_async.storage.http.auth import ANONYMOUS, identity_of_url, tls_context
from wds_async.storage.http.messages import REDIRECTS, redirected

__all__ = ["ONLY_NEW", "PUT_REDIRECTS", "created", "put", "send_put"]

ONLY_NEW = {"If-None-Match": "*"}
"""The header of a PUT that creates, and replaces nothing (RFC 9110 §13.1.2)."""

PUT_REDIRECTS = REDIRECTS - {303}  # which asks for a GET
_BLOCK_BYTES = 1 << 20


def put(request: Request, body: IO[bytes], size: int, timeout_s: float, more: Mapping[str, str] = {}) -> Answer:
    """Send the ``size`` bytes of ``body`` to where redirects lead, with the headers that a PUT needs and ``more``
    (without secrets). Raise OSError or `RedirectLoop`. Blocks."""
    while True:
        body.seek(0)
        answer = send_put(request, body, size, timeout_s, more={**_needed_headers(request), **more})
        if answer.status not in PUT_REDIRECTS or "location" not in answer.fields:
            return answer
        request = redirected(request, answer.fields["location"])


def created(answer: Answer) -> bool:
    """Return whether the answer to a PUT with `ONLY_NEW` says that the object was created; False where there is one.
    Raise RefusedAnswer for others."""
    if 200 <= answer.status < 300:
        return True
    if answer.status == 412 or answer.fields.get("x-ms-error-code") == "BlobAlreadyExists":
        return False
    raise RefusedAnswer(answer)


def _needed_headers(request: Request) -> dict[str, str]:
    names = {name.lower() for name, _ in request.headers}
    host = urllib.parse.urlsplit(request.url).hostname or ""
    more = {} if "content-type" in names else {"Content-Type": "application/octet-stream"}
    if host.endswith(".blob.core.windows.net") and "x-ms-blob-type" not in names:
        # Azure requires the kind of blob that a PUT makes; a SAS URL is otherwise all that is needed.
        more["x-ms-blob-type"] = "BlockBlob"
    return more


def send_put(
    request: Request,
    body: IO[bytes] | None,
    size: int,
    timeout_s: float,
    *,
    more: Mapping[str, str] = {},
    proxied: bool = True,
) -> Answer:
    """Send one PUT with the ``size`` bytes of ``body``, through the environment's proxy where there is one, unless
    ``proxied`` is False. Return the answer, also one that comes before the body is read and closes the connection.
    Raise OSError. Blocks."""
    headers = {name: value for name, value in request.headers if name.lower() != "accept-encoding"}
    try:
        connection, target, of_proxy = _connect(request, timeout_s, proxy_for(request.url) if proxied else None)
        with contextlib.closing(connection):
            connection.connect()
            try:
                connection.request("PUT", target, body, {**headers, **more, **of_proxy, "Content-Length": str(size)})
            except (BrokenPipeError, ConnectionResetError):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    return _answer(connection)
                raise
            return _answer(connection)
    except http.client.HTTPException as exn:
        raise ConnectionError(str(exn)) from exn


def _connect(
    request: Request, timeout_s: float, proxy: str | None
) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """Return the connection, the target of the request, and the headers for the proxy."""
    parts = urllib.parse.urlsplit(request.url)
    options: dict[str, Any] = {"timeout": timeout_s, "blocksize": _BLOCK_BYTES}
    kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection
        options["context"] = tls_context(request.tls)
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    if proxy is None:
        return kind(parts.hostname or "", parts.port, **options), target, {}
    through = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    identity = identity_of_url(through) or ANONYMOUS
    more = {f"Proxy-{name}": value for name, value in identity.headers}
    connection = kind(through.hostname or "", through.port, **options)
    if parts.scheme == "https":
        connection.set_tunnel(parts.hostname or "", parts.port, headers=more)
        return connection, target, {}
    return connection, urllib.parse.urlunsplit((*parts[:2], parts.path or "/", parts.query, "")), more


def _answer(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    fields = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, fields, response.read(4096) if response.status >= 400 else b"")
