"""Which bytes of an object a request asks for: the header ``Range`` (RFC 9110 §14), one range of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wds_async.service.refusals import Refusal

__all__ = ["Span", "asked", "beginning"]

# 18 digits are an exabyte. What has more is no number that anybody means, and int() of thousands of digits takes long.
_ONE = re.compile(r"bytes\s*=\s*(?:([0-9]{1,18})\s*-\s*([0-9]{1,18})?|-\s*([0-9]{1,18}))\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[start, stop)``."""

    start: int
    stop: int

    def content_range(self, size: int) -> str:
        """The value of ``Content-Range``."""
        return f"bytes {self.start}-{self.stop - 1}/{size}"


def beginning(header: str | None) -> int:
    """The first byte of the range that ``header`` asks for; 0 where that depends on the object's size."""
    found = _ONE.fullmatch(header.strip()) if header else None
    return int(found[1]) if found is not None and found[1] is not None else 0


def asked(header: str | None, size: int) -> Span | None:
    """The span that ``header`` asks for of an object of ``size`` bytes, None for the whole of it.

    None also for what is no range of bytes, and for several ranges at once: a server may answer those with the whole
    object, and clients must take it. Refusal (416) for a range that begins behind the end.
    """
    found = _ONE.fullmatch(header.strip()) if header else None
    if found is None:
        return None
    if found[3] is not None:
        start, stop = max(0, size - int(found[3])), size
    else:
        start = int(found[1])
        if found[2] is not None and int(found[2]) < start:
            return None  # invalid, so it is to be ignored
        stop = size if found[2] is None else min(size, int(found[2]) + 1)
    if start >= stop:
        words = f"the range {header!r} begins behind the end of an object of {size} bytes"
        raise Refusal(416, words, "range", headers={"Content-Range": f"bytes */{size}"})
    return Span(start, stop)
