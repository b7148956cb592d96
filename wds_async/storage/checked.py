"""Ranges that another client reads, each answer checked as the engine checks its own: status, ``Content-Range``, length
and version. What a client does not show cannot be checked, so each store gives the answer as it came, with its head.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from wds_async.storage.base import Answer, Contradiction, ObjectReplaced
from wds_async.storage.deadlines import Progress, with_deadline

__all__ = ["CheckedRanges", "Identify", "Opened", "RangeGet"]

Opened = AbstractAsyncContextManager[tuple[Answer, AsyncIterator[bytes]]]
"""An answer below 400, or a 416, and its body in pieces. Leaving it ends the answer, also in the middle."""

RangeGet = Callable[[int, int, str], Opened]
"""``get(start, stop, etag)``: one GET of ``[start, stop)``, sent once, with ``If-Match`` unless ``etag`` is "". Raises
what the store's `classify` explains."""

Identify = Callable[[Mapping[str, str], int | None], str]
"""Function that returns the version of an object of so many bytes (None: unknown), from the fields of an answer."""


class CheckedRanges:
    """An object of ``size`` bytes; ``fields`` are those of the head of the first answer, lower case."""

    def __init__(
        self, get: RangeGet, identify: Identify, size: int, fields: Mapping[str, str], stall_timeout_s: float
    ) -> None:
        self.size, self.fields = size, fields
        self.version = identify(fields, size)
        self._get, self._identify, self._stall_s = get, identify, stall_timeout_s
        etag = fields.get("etag", "")
        self._etag = etag if etag.startswith('"') else ""  # a weak one never matches: If-Match compares strongly

    @classmethod
    async def of(cls, get: RangeGet, identify: Identify, stall_timeout_s: float) -> CheckedRanges | None:
        """Return the source after a request for its first byte, made in the same way as for a part. None if the server
        does not answer ranges or does not tell the size; raises what `RangeGet` raises, and `Contradiction`. A range is
        given up once nothing of its answer has come for ``stall_timeout_s`` seconds.
        """
        async with get(0, 1, "") as (answer, body):
            total = answer.fields.get("content-range", "").rpartition("/")[2]
            if answer.status not in (206, 416) or not (total.isascii() and total.isdigit()) or _encoded(answer):
                return None
            if answer.status == 206 and int(total):  # some answer so for an object that is empty
                _judge(answer, 0, 1, int(total))
                await _taken(body, 1)
            elif answer.status == 416 and int(total):
                raise Contradiction(f"asked for the first byte of {total}, the server answered 416")
        return cls(get, identify, int(total), answer.fields, stall_timeout_s)

    async def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``[start, stop)``, all of them. `ObjectReplaced`, `Contradiction`, TimeoutError, or what
        `RangeGet` raises."""
        progress = Progress()
        return await with_deadline(self._read(start, stop, progress), self._stall_s, "no byte arrived", progress)

    async def _read(self, start: int, stop: int, progress: Progress) -> bytes:
        async with self._get(start, stop, self._etag) as (answer, body):
            progress.made()
            total = answer.fields.get("content-range", "").rpartition("/")[2]
            if total.isascii() and total.isdigit() and int(total) != self.size:
                raise ObjectReplaced(f"it had {self.size} bytes and now has {total}")
            version = self._identify(answer.fields, self.size)
            if version != self.version:
                raise ObjectReplaced(f"it was {self.version} and is now {version}")
            _judge(answer, start, stop, self.size)
            return await _taken(body, stop - start, progress)


def _encoded(answer: Answer) -> bool:
    return answer.fields.get("content-encoding", "identity").lower() not in ("", "identity")


def _judge(answer: Answer, start: int, stop: int, size: int) -> None:
    """Raise `Contradiction` unless this is the head of ``[start, stop)``."""
    span, fields = f"bytes {start}-{stop - 1}", answer.fields
    got = fields.get("content-range", "no Content-Range")
    if answer.status != 206 or got.strip().lower() not in (f"{span}/{size}", f"{span}/*"):
        raise Contradiction(f"asked for {span} of {size}, the server answered {answer.status} with {_shown(got)}")
    length = fields.get("content-length", "")
    if length and length != str(stop - start):
        raise Contradiction(f"asked for {stop - start} bytes, the server's Content-Length is {_shown(length)}")
    if _encoded(answer):
        raise Contradiction("the server encoded a part of the object")


def _shown(text: str) -> str:
    return repr(text[:60]) if not text.isprintable() else text[:60]


async def _taken(body: AsyncIterator[bytes], count: int, progress: Progress | None = None) -> bytes:
    """Return ``count`` bytes, the whole of ``body``. `Contradiction` if it has more, or fewer."""
    pieces, size = [], 0
    async for piece in body:
        if progress is not None:
            progress.made()
        pieces.append(piece)
        size += len(piece)
        if size > count:
            break
    if size != count:
        raise Contradiction(f"asked for {count} bytes, {'more' if size > count else size} came")
    return b"".join(pieces)
