"""Ranges and conditions of a request (RFC 9110 §13 and §14), answered as nginx does.

A header of another unit is ignored; a malformed list, a number of more than 63 bits and a list wholly behind the end
are 416; the whole object is sent if the ranges are too many, or more bytes than it has."""

from __future__ import annotations

import email.utils
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from wds_async.service.refusals import Refusal

__all__ = [
    "ByteRange", "Validators", "first_byte", "must_send", "names_another", "range_holds", "ranges_of",
    "wants_revalidation",
]  # fmt: skip

RANGES_LIMIT = 200
"""Most ranges of one request; the whole object is sent for more."""
_UNIT = "bytes="
_FIRST = re.compile(r"bytes= *0*([0-9]{1,18}) *-", re.ASCII | re.IGNORECASE)
_RANGE = re.compile(r" *(?:([0-9]+) *- *(?:([0-9]+) *)?|-([0-9]+) *)(,|\Z)", re.ASCII)
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)``."""

    start: int
    stop: int

    def content_range(self, size: int) -> str:
        """Return the value of ``Content-Range``."""
        return f"bytes {self.start}-{self.stop - 1}/{size}"


def first_byte(header: str | None) -> int:
    """Return the first byte of the first range in ``header``; 0 if that depends on the object's size."""
    match = _FIRST.match(header) if header else None
    return int(match[1]) if match is not None else 0


def ranges_of(header: str | None, size: int) -> tuple[ByteRange, ...]:
    """Return the spans that ``header`` asks for of an object of ``size`` bytes; none of them: the whole object.
    Refusal (416) for a header that is malformed, or asks only for what lies behind the end."""
    if header is None or header[: len(_UNIT)].lower() != _UNIT or len(header) == len(_UNIT):
        return ()
    spans: list[ByteRange] = []
    at = len(_UNIT)
    while True:
        match = _RANGE.match(header, at)
        if match is None:
            raise _refusal(f"the range {header[:100]!r} is malformed; write bytes=FIRST-LAST", size)
        first, last, count = (_number(text, size) for text in match.groups()[:3])
        if first is None:
            start, stop = max(0, size - (count or 0)), size
        else:
            start, stop = first, size if last is None else min(size, last + 1)
        if start < stop:
            spans.append(ByteRange(start, stop))
        elif start == 0:
            return ()  # the object is empty
        if not match[4]:
            break
        at = match.end()
    if not spans:
        raise _refusal(f"the range {header[:100]!r} begins behind the end of an object of {size} bytes", size)
    if len(spans) > RANGES_LIMIT or sum(span.stop - span.start for span in spans) > size:
        return ()
    return tuple(spans)


def _number(text: str | None, size: int) -> int | None:
    if text is None:
        return None
    digits = text.lstrip("0") or "0"  # int() of thousands of digits takes long
    if len(digits) > len(str(_LARGEST)) or int(digits) > _LARGEST:
        raise _refusal(f"the range holds the number {text[:30]}, and the largest is {_LARGEST}", size)
    return int(digits)


def _refusal(words: str, size: int) -> Refusal:
    return Refusal(416, words, "range", headers={"Content-Range": f"bytes */{size}"})


_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')


@dataclass(frozen=True, slots=True)
class Validators:
    """Validators of an object's version: ``etag`` with its quotes, ``modified`` as an HTTP date; "" for none."""

    etag: str = ""
    modified: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, str], identity: str) -> Validators:
        """Return the origin's own; without an ETag, one made from the version."""
        etag = fields.get("etag", "")
        if not etag and identity:
            etag = f'"wds-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"'
        return cls(etag, fields.get("last-modified", ""))


def must_send(headers: Mapping[str, str], has: Validators) -> bool:
    """Return whether to send the object: False if the client has it already (304). Refusal (412) if it is not the
    object that the client means."""
    if (etags := headers.get("if-match")) is not None:
        if not _listed(etags, has.etag, strong=True):
            raise Refusal(412, f"the object is another one now: its ETag is {has.etag or 'unknown'}", "precondition")
    elif (since := _date(headers.get("if-unmodified-since"))) is not None:
        changed = _date(has.modified)
        if changed is not None and changed > since:
            raise Refusal(412, f"the object has changed since then, on {has.modified}", "precondition")
    if (etags := headers.get("if-none-match")) is not None:
        return not _listed(etags, has.etag, strong=False)
    if (since := _date(headers.get("if-modified-since"))) is None:
        return True
    changed = _date(has.modified)
    return changed is None or changed > since


def wants_revalidation(headers: Mapping[str, str]) -> bool:
    """Return whether the client wants the store's own answer, and no cached copy (RFC 9111 §5.2.1)."""
    directives = headers.get("cache-control", headers.get("pragma", ""))
    return not {"no-cache", "max-age=0"}.isdisjoint(one.strip().lower() for one in directives.split(","))


def names_another(headers: Mapping[str, str], has: Validators) -> bool:
    """Return whether ``If-Match``, ``If-Unmodified-Since`` or ``If-Range`` means another version than this one."""
    try:
        must_send({name: headers[name] for name in ("if-match", "if-unmodified-since") if name in headers}, has)
    except Refusal:
        return True
    return not range_holds(headers.get("if-range"), has)


def range_holds(condition: str | None, has: Validators) -> bool:
    """Return whether ``If-Range`` permits the range; else the whole object is sent. A weak ETag proves nothing, and a
    date only if it is equal."""
    if condition is None:
        return True
    condition = condition.strip()
    if condition.startswith(('"', "W/")):
        return condition == has.etag and not condition.startswith("W/")
    return bool(has.modified) and condition == has.modified


def _listed(header: str, etag: str, *, strong: bool) -> bool:
    """Return whether ``etag`` is in a list of ETags; unquoted ones are compared as they are."""
    if header.strip() == "*":
        return True
    if not etag or (strong and etag.startswith("W/")):
        return False
    tags = _TAG.findall(header) or [header.strip()]
    if strong:
        return etag in tags
    return etag.removeprefix("W/") in [tag.removeprefix("W/") for tag in tags]


def _date(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
