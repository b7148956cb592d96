"""HTTP messages: headers, redirects, versions of objects."""

from __future__ import annotations

import contextlib
import email.utils
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.base import Answer, RedirectLoop, Request
from wds_async.storage.deadlines import with_deadline
from wds_async.storage.http.auth import Identity

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "PLAIN_HEADERS",
    "REDIRECTS",
    "answer_of",
    "fields_of",
    "modified_of",
    "pins_version",
    "redirected",
    "same_object",
    "version_like",
    "version_of",
    "wire_url",
]

PLAIN_HEADERS = (("User-Agent", "wds-async"), ("Accept", "*/*"), ("Accept-Encoding", "identity"))
"""Headers of every request."""

_HARMLESS_HEADERS = frozenset(name.lower() for name, _ in PLAIN_HEADERS)
REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""Statuses whose ``Location`` is to be asked instead."""

_REDIRECTS_AT_MOST = 10
_HOP_CHARACTERS = 160
_EXCERPT_BYTES, _EXCERPT_WITHIN_S = 4096, 1.0
_SIZE_ALONE = re.compile(r"(unknown size|\d+ bytes)?")


def version_of(fields: Mapping[str, str], total: int | None) -> str:
    """Return what pins an object while it is read: its ETag, else ``Last-Modified`` and size, else the size."""
    if etag := fields.get("etag"):
        return f"etag {etag}"
    if version := fields.get("ais-version"):  # of AIStore, which gives no validators for its own buckets
        return f"version {version}, {'unknown size' if total is None else f'{total} bytes'}"
    modified = fields.get("last-modified")
    size = "unknown size" if total is None else f"{total} bytes"
    return f"modified {modified}, {size}" if modified else size


def version_like(expected: str, version: str, fields: Mapping[str, str]) -> str:
    """Return the version that an answer's ``fields`` tell, in the form of ``expected``: listings of Google tell an
    object's generation. ``version`` (of `version_of`) where there is none of that form."""
    if expected.startswith("generation ") and (generation := fields.get("x-goog-generation")):
        return f"generation {generation}"
    return version


def pins_version(version: str) -> bool:
    """Return whether ``version`` (of `version_of`) holds a validator. A size alone is none: two versions may share
    it."""
    return _SIZE_ALONE.fullmatch(version) is None


def modified_of(fields: Mapping[str, str]) -> float | None:
    """Return ``Last-Modified`` in seconds since 1970; None if it is missing or malformed."""
    try:
        return email.utils.parsedate_to_datetime(fields["last-modified"]).timestamp()
    except (KeyError, ValueError):
        return None


def same_object(one: str, other: str) -> bool:
    """Return whether two identities may be those of one object. What only one of them says is no difference: a stream
    of unknown size, a generation that one way of reading shows and the other does not."""
    short, long = sorted((each.removesuffix("unknown size").removesuffix(", ") for each in (one, other)), key=len)
    return not short or long == short or long.startswith(f"{short}, ")


def wire_url(url: str) -> str:
    """Return ``url`` as it is written in a request: what is escaped already stays as it is, or a signature would not
    fit.
    """
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return parts._replace(path=path, query=query, fragment="").geturl()


def redirected(request: Request, location: str) -> Request:
    """Return the request that a redirect asks for. When the origin changes, credentials stay behind (RFC 9110 §15.4),
    and with them every other header of the user's: any may be a secret.

    UrlError where it leads out of HTTP; RedirectLoop where it leads back to a URL that has redirected here
    (`Request.hops`), or on after 10 redirects; AccessDenied where the request's guard forbids it.
    """
    target = urllib.parse.urljoin(request.url, location)
    parts, proofs = urllib.parse.urlsplit(target), Identity("", request.headers)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        led = proofs.hidden(redact(f"{parts.scheme}://{parts.hostname or ''}"))  # no more
        raise UrlError(f"{redact(request.url)} redirects to {led[:80]!r}, which is not HTTP: refused")
    target = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
    hops = (*request.hops, request.url)
    if target in hops or len(hops) > _REDIRECTS_AT_MOST:
        what = "in a circle" if target in hops else f"more than {_REDIRECTS_AT_MOST} times"
        shown = " → ".join(redact(hop)[:_HOP_CHARACTERS] for hop in (*hops, target))
        raise RedirectLoop(f"the server redirects {what}: {proofs.hidden(shown)}")
    if request.guard is not None:
        request.guard.leads(request.url, target)
    headers, socket = request.headers, request.socket
    if _origin(target) != _origin(request.url):
        socket = ""
        headers = tuple((name, value) for name, value in headers if name.lower() in _HARMLESS_HEADERS)
    return replace(request, url=target, headers=headers, socket=socket, hops=hops)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


async def answer_of(response: aiohttp.ClientResponse) -> Answer:
    """Return an unexpected answer with the beginning of its body."""
    excerpt = b""
    if response.status >= 400:
        with contextlib.suppress(TimeoutError):  # what the status says matters more than the page
            excerpt = await with_deadline(response.content.read(_EXCERPT_BYTES), _EXCERPT_WITHIN_S)
    return Answer(response.status, fields_of(response.headers), excerpt)


def fields_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a client's headers by lower-case names, the values of a repeated one joined (RFC 9110 §5.3): Google sends
    each checksum of an object in one of its own."""
    fields: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower()
        fields[key] = f"{fields[key]}, {value}" if key in fields else value
    return fields
