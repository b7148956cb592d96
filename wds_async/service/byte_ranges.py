"""Byte ranges of a request: the header ``Range`` (RFC 9110 §14), answered as nginx does.

A header of another unit is ignored. What is no list of ranges, holds a number of more than 63 bits, or lies behind the
end as a whole is answered 416. The whole object is sent if the ranges are more bytes than it has, or too many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from wds_async.service.refusals import Refusal

__all__ = ["RANGES_LIMIT", "ByteRange", "first_byte", "ranges_of"]

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
    found = _FIRST.match(header) if header else None
    return int(found[1]) if found is not None else 0


def ranges_of(header: str | None, size: int) -> tuple[ByteRange, ...]:
    """Return the spans that ``header`` asks for of an object of ``size`` bytes; none of them: the whole object.
    Refusal (416) for a header that is malformed, or asks only for what lies behind the end."""
    if header is None or header[: len(_UNIT)].lower() != _UNIT or len(header) == len(_UNIT):
        return ()
    spans: list[ByteRange] = []
    at = len(_UNIT)
    while True:
        found = _RANGE.match(header, at)
        if found is None:
            raise _refusal(f"the range {header[:100]!r} is malformed; write bytes=FIRST-LAST", size)
        first, last, count = (_number(text, size) for text in found.groups()[:3])
        if first is None:
            start, stop = max(0, size - (count or 0)), size
        else:
            start, stop = first, size if last is None else min(size, last + 1)
        if start < stop:
            spans.append(ByteRange(start, stop))
        elif start == 0:
            return ()  # the object is empty
        if not found[4]:
            break
        at = found.end()
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
