"""What HTTP messages say and ask, whoever sends them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.base import Answer, Request
from wds_async.storage.http.auth import Identity

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "PLAIN_HEADERS",
    "REDIRECTS",
    "answer_of",
    "fields_of",
    "identity_of",
    "redirected",
    "same_object",
    "wire_url",
]

PLAIN_HEADERS = (("User-Agent", "wds-async"), ("Accept", "*/*"), ("Accept-Encoding", "identity"))
"""What every request says, whoever asks."""

_HARMLESS_HEADERS = frozenset(name.lower() for name, _ in PLAIN_HEADERS)
REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""Statuses whose ``Location`` is to be asked instead."""

_EXCERPT_BYTES = 4096


def identity_of(fields: Mapping[str, str], total: int | None) -> str:
    """What pins an object while it is read: its ETag, else ``Last-Modified`` and size, else the size."""
    if etag := fields.get("etag"):
        return f"etag {etag}"
    if version := fields.get("ais-version"):  # of AIStore, which gives no validators for its own buckets
        return f"version {version}, {'unknown size' if total is None else f'{total} bytes'}"
    modified = fields.get("last-modified")
    size = "unknown size" if total is None else f"{total} bytes"
    return f"modified {modified}, {size}" if modified else size


def same_object(one: str, other: str) -> bool:
    """Whether two identities may be those of one object. What only one of them says is no difference: a stream of
    unknown size, a generation that one way of reading shows and the other does not."""
    short, long = sorted((each.removesuffix("unknown size").removesuffix(", ") for each in (one, other)), key=len)
    return not short or long == short or long.startswith(f"{short}, ")


def wire_url(url: str) -> str:
    """``url`` as it stands in a request: what is escaped already stays as it is, or a signature would not fit."""
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return parts._replace(path=path, query=query, fragment="").geturl()


def redirected(request: Request, location: str) -> Request:
    """The request that a redirect asks for. When the origin changes, credentials stay behind (RFC 9110 §15.4), and
    with them every other header of the user's: any may be a secret. UrlError where it leads out of HTTP, AccessDenied
    where the request's guard forbids it."""
    target = urllib.parse.urljoin(request.url, location)
    parts = urllib.parse.urlsplit(target)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        led = Identity("", request.headers).hidden(redact(f"{parts.scheme}://{parts.hostname or ''}"))  # no more
        raise UrlError(f"{redact(request.url)} redirects to {led[:80]!r}, which is not HTTP: refused")
    target = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if request.guard is not None:
        request.guard.leads(request.url, target)
    headers, socket = request.headers, request.socket
    if _origin(target) != _origin(request.url):
        socket = ""
        headers = tuple((name, value) for name, value in headers if name.lower() in _HARMLESS_HEADERS)
    return replace(request, url=target, headers=headers, socket=socket)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


async def answer_of(response: aiohttp.ClientResponse) -> Answer:
    """What is not the bytes asked for, with the beginning of its body."""
    excerpt = (await response.content.read(_EXCERPT_BYTES)) if response.status >= 400 else b""
    return Answer(response.status, fields_of(response.headers), excerpt)


def fields_of(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's headers by lower-case names, the values of a repeated one joined (RFC 9110 §5.3): Google sends each
    checksum of an object in one of its own."""
    fields: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower()
        fields[key] = f"{fields[key]}, {value}" if key in fields else value
    return fields
