"""Heads of requests as the fast lane reads them: plain GETs and HEADs of HTTP/1.1, and nothing that leaves a doubt.

What `read_head` does not take, aiohttp answers: it knows bodies, older versions, odd framing and what is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httptools

__all__ = ["HEAD_LIMIT_BYTES", "Head", "read_head", "span_of"]

HEAD_LIMIT_BYTES = 16 << 10
"""Of one head; a longer one is refused."""

# With one of these a request is more than its head.
_MORE = frozenset((b"content-length", b"expect", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
_CONDITIONS = frozenset((b"if-modified-since", b"if-none-match", b"if-range", b"if-unmodified-since"))
_SPAN = re.compile(rb"bytes=([0-9]{1,18})-([0-9]{0,18})")


@dataclass(slots=True)
class Head:
    """One request without a body. ``target`` begins with "/"; the names in ``fields`` are lower case, each once."""

    method: str
    target: bytes
    fields: dict[bytes, bytes]
    keep_alive: bool

    @property
    def conditional(self) -> bool:
        """Whether it depends on more than its bytes being there (``If-Match`` alone is no such condition)."""
        return not _CONDITIONS.isdisjoint(self.fields)


class _Collected:
    """What ``httptools`` calls back with."""

    __slots__ = ("fields", "twice", "url", "whole")

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}
        self.url = b""
        self.twice = self.whole = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.twice = self.twice or name in self.fields
        self.fields[name] = value

    def on_message_complete(self) -> None:
        self.whole = True


def read_head(raw: bytes) -> Head | None:
    """The head ``raw``, which ends with its empty line; None where another shall read it."""
    if raw.count(b"\n") != raw.count(b"\r\n") or b"\n " in raw or b"\n\t" in raw or not raw.isascii():
        return None
    found = _Collected()
    parser: Any = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(raw)
        method, version = parser.get_method(), parser.get_http_version()
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    fields = found.fields
    if method not in (b"GET", b"HEAD") or version != "1.1" or not found.whole or found.twice:
        return None
    if found.url[:1] != b"/" or b"host" not in fields or not _MORE.isdisjoint(fields):
        return None
    kept = fields.get(b"connection", b"keep-alive").lower()
    if kept not in (b"keep-alive", b"close"):
        return None
    return Head(method.decode("ascii"), found.url, fields, kept != b"close")


def span_of(text: bytes, size: int) -> tuple[int, int] | None:
    """``(start, stop)`` of ``bytes=a-b`` or ``bytes=a-`` of an object of ``size`` bytes; None for all others."""
    found = _SPAN.fullmatch(text)
    if found is None:
        return None
    start, last = int(found[1]), int(found[2] or size - 1)
    return (start, min(last + 1, size)) if start <= last and start < size else None
