"""What a scripted answer is: the request it saw, how it misbehaves, and the bytes it means to send."""

from __future__ import annotations

import email.utils
import fnmatch
import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["BEFORE_HEAD", "Answer", "Behaviour", "Request", "Sent", "answer", "short_etag"]

BEFORE_HEAD = -1
"""For `Behaviour.cut_after` and `Behaviour.stall_after`: before the first byte of the answer."""

LAST_MODIFIED = email.utils.formatdate(1_700_000_000, usegmt=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrived: ``number`` counts from 0 over the server, ``connection`` likewise;
    header names are lower-case; ``path`` is decoded and without the query."""

    number: int
    connection: int
    method: str
    target: str
    path: str
    headers: Mapping[str, str]

    @property
    def range(self) -> str | None:
        """The ``Range`` header, None where there is none."""
        return self.headers.get("range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How an answer differs from the right one, and which requests get it. Fields combine freely."""

    path: str = "*"
    """Shell pattern on the path."""
    when: Callable[[Request], bool] | None = None
    """A further condition."""
    skip: int = 0
    """Let this many matching requests pass first."""
    times: int | None = None
    """Then take this many; None takes all."""
    every: int = 1
    """Then take one of so many, the first of them; ``times`` counts those taken."""
    probability: float = 1.0
    """Of those, take this share, by the server's seeded random numbers."""
    then: Callable[[Request], None] | None = None
    """Called, on the server's loop, for each request that is taken, before it is answered."""

    status: int | None = None
    """Status; one of 400 or more comes with a small HTML page unless ``body`` is given."""
    body: bytes | None = None
    """This instead of the file (whole: its ranges are not looked at)."""
    headers: Mapping[str, str | None] = field(default_factory=dict)
    """Added to the answer's head or replaced there; None removes one."""
    redirect: str | Callable[[Request], str] | None = None
    """``Location``, absolute or not, or what gives it; the status is 302 unless given."""
    content: Callable[[Request, bytes], bytes] | None = None
    """Makes another object of the file's: its identity and its ranges are those of the other."""
    chunked: bool = False
    """Transfer-Encoding: chunked instead of a length."""
    bad_chunk: bool = False
    """Chunked, and behind the body something that is no size of a chunk, in a packet of its own; then the end."""
    gzip: bool = False
    """Content-Encoding: gzip, whether asked for or not; a range is not looked at."""
    ignore_range: bool = False
    """200 and the whole file."""
    shift: int = 0
    """206 of a range that begins and ends this many bytes later, and says so."""
    corrupt_at: int | None = None
    """The bits of the file's byte at this offset are turned over."""
    corrupt: Callable[[str, int, int], int | None] | None = None
    """The same for the byte that it chooses of what is sent: ``corrupt(path, first, end)`` is an offset in the file."""
    length_error: int = 0
    """Added to Content-Length; too long ends in FIN, too short leaves bytes over."""
    no_length: bool = False
    """Neither length nor chunks: the body ends with the connection."""
    etag: str | None = None
    """This identity (written with its quotes) in place of the file's."""
    change_etag: bool = False
    """A different identity in every answer."""

    delay_s: float = 0.0
    """Wait before the head."""
    rate_bytes_s: float | None = None
    """Trickle the body."""
    stall_after: int | None = None
    """Stop after so many bytes of the body, until `Origin.release`."""
    cut_after: int | None = None
    """Break the connection after so many bytes of the body (they do arrive), or `BEFORE_HEAD`."""
    cut: Literal["reset", "fin", "ragged"] = "reset"
    """How it breaks: a real RST, an orderly end, or an end of the connection without one of TLS."""
    hang_up: Literal["no", "announced", "silent"] = "no"
    """Close after the answer, with ``Connection: close`` or without a word."""
    deaf_s: float | None = None
    """No answer: every connection breaks and new ones are refused for so long; 0 for good. The port stays taken."""

    def matches(self, request: Request) -> bool:
        """Whether path and condition fit; counting is the server's."""
        return fnmatch.fnmatchcase(request.path, self.path) and (self.when is None or self.when(request))


@dataclass(slots=True)
class Answer:
    """The head and body to send; ``framing`` says how the client learns where the body ends."""

    status: int
    headers: dict[str, str]
    body: bytes | memoryview = b""
    framing: Literal["length", "chunked", "close"] = "length"
    whole: bytes | None = None
    """The object that the body is (a range) of, before any damage; None where it is something else."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of one request: the behaviour that it got, the ``status`` of its answer (0 for none), and the bytes
    of the body that were given to the network."""

    request: Request
    behaviour: Behaviour
    status: int
    body_bytes: int


def short_etag(content: bytes) -> str:
    """A strong identity of ``content``."""
    return f'"{hashlib.sha1(content).hexdigest()[:16]}"'


def answer(
    request: Request, content: bytes | None, behaviour: Behaviour, etag_of: Callable[[bytes], str] = short_etag
) -> Answer:
    """What ``behaviour`` makes of the right answer (RFC 9110, sections 13 and 14); ``etag_of`` gives identities."""
    if behaviour.redirect is not None:
        to = behaviour.redirect if isinstance(behaviour.redirect, str) else behaviour.redirect(request)
        made = Answer(behaviour.status or 302, {"location": to})
    elif behaviour.body is not None:
        made = Answer(behaviour.status or 200, {"content-type": "text/html"}, behaviour.body)
    elif behaviour.status is not None and behaviour.status >= 400:
        made = _page(behaviour.status)
    elif request.method not in ("GET", "HEAD"):
        made = _page(405)
    elif content is None:
        made = _page(404)
    else:
        if behaviour.content is not None:
            content = behaviour.content(request, content)
        made = _file(request, content, behaviour, etag_of)
        made.whole = content
        made.status = behaviour.status or made.status
    made.headers.setdefault("content-length", str(len(made.body) + behaviour.length_error))
    chunked = behaviour.chunked or behaviour.bad_chunk
    if chunked or behaviour.no_length:
        del made.headers["content-length"]
        made.framing = "chunked" if chunked else "close"
        if chunked:
            made.headers["transfer-encoding"] = "chunked"
    if behaviour.hang_up == "announced" or made.framing == "close":
        made.headers["connection"] = "close"
    for name, value in behaviour.headers.items():
        made.headers.pop(name.lower(), None)
        if value is not None:
            made.headers[name.lower()] = value
    if request.method == "HEAD":
        made.body = b""
    return made


def _page(status: int) -> Answer:
    page = b"<html><body><h1>%d</h1></body></html>\n" % status
    return Answer(status, {"content-type": "text/html"}, page)


def _file(request: Request, content: bytes, behaviour: Behaviour, etag_of: Callable[[bytes], str]) -> Answer:
    etag = behaviour.etag or etag_of(content)
    if behaviour.change_etag:
        etag = f'"{request.number:08d}"'
    headers = {
        "etag": etag,
        "last-modified": LAST_MODIFIED,
        "accept-ranges": "bytes",
        "content-type": "application/x-tar",
    }
    expected = request.headers.get("if-match")
    if expected is not None and expected != "*" and etag not in re.findall(r'(?<!W/)"[^"]*"', expected):
        return _page(412)
    flipped = behaviour.corrupt_at
    if behaviour.corrupt is not None:
        flipped = behaviour.corrupt(request.path, *(_span(request.range, len(content)) or (0, len(content))))
    if flipped is not None and flipped < len(content):
        damaged = bytearray(content)
        damaged[flipped] ^= 0xFF
        content = bytes(damaged)
    if behaviour.gzip:
        return Answer(200, {**headers, "content-encoding": "gzip"}, gzip.compress(content, 1))
    span = _span(request.range, len(content))
    if span is None or behaviour.ignore_range or request.headers.get("if-range", etag) != etag:
        return Answer(200, headers, content)
    first, end = span
    if first >= len(content):
        unsatisfied = _page(416)
        unsatisfied.headers["content-range"] = f"bytes */{len(content)}"
        return unsatisfied
    first, end = (min(edge + behaviour.shift, len(content)) for edge in (first, end))
    headers["content-range"] = f"bytes {first}-{end - 1}/{len(content)}"
    return Answer(206, headers, memoryview(content)[first:end])


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """``(first, end)`` of a single range; several ranges or nonsense count as no range at all."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return (max(0, size - int(last)), size) if int(last) else (size, size)
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size
