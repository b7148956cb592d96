"""The pieces of one stream, read by count.

A piece is memory that the engine uses again: it is valid only until the next one is asked for. ``ByteSource`` keeps it
in an attribute (never in a local of a frame that an exception could keep alive), so that ``drop`` lets go of it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TypeVar

from wds_async.errors import ShardFormatError
from wds_async.redact import redact

__all__ = ["NOTHING", "ByteSource", "Read"]

Read = Callable[[], memoryview | None]
"""Gives the next piece of a stream: bytes (format ``B``, one or more of them) that are valid until the
next call, then ``None`` at the end and ever after."""

NOTHING = memoryview(b"")
"""The piece before the first and after the last."""

E = TypeVar("E", bound=ShardFormatError)


class ByteSource:
    """A stream of pieces with a position.

    ``view`` is the current piece, ``pos`` and ``end`` are positions in it, and ``base`` is the offset of its first byte
    in the stream, in bytes. ``start`` is the offset of the first byte that ``read`` gives: other than 0 where a tar is
    read from its middle on.

    For reading on behind an error: ``rest`` is how many bytes of a member that was refused come next, and ``orphan``
    says that an extension header was, so that the next member lacks its own name or size. ``doubt``: what was odd about
    the end, if anything. ``empty``: the archive has ended, and has no members.

    For a span of a tar (see `cut`): `parse.members_of` ends before the first member that begins at ``bound`` or behind.
    ``at_bound`` says that it has, and ``with_globals`` that global PAX headers before it change how members are read.

    ``end_required`` is called when the stream ends between two members of a tar that has no end-of-archive marker (two
    blocks of zeros). If it returns True, because the length of the stream was never known, that end is a
    ``TruncatedShard``; by default it ends the shard.
    """

    __slots__ = (
        "_shown",
        "after",
        "at_bound",
        "base",
        "bound",
        "doubt",
        "empty",
        "end",
        "end_required",
        "orphan",
        "pos",
        "read",
        "rest",
        "start",
        "url",
        "view",
        "with_globals",
    )

    def __init__(self, read: Read, url: str, end_required: Callable[[], bool] | None = None, start: int = 0) -> None:
        self.read = read
        self.url = url
        self._shown: str | None = None
        self.end_required = end_required
        self.view = NOTHING
        self.pos = 0
        self.end = 0
        self.start = self.base = start
        self.after: memoryview | None = None  # what is left of the piece that was interrupted by `put_back`
        self.rest = 0
        self.orphan = False
        self.doubt = ""
        self.empty = False
        self.bound = sys.maxsize
        self.at_bound = self.with_globals = False

    @property
    def shown(self) -> str:
        """The URL without secrets. Made once: to look for secrets costs more than a header."""
        if self._shown is None:
            self._shown = redact(self.url)
        return self._shown

    @property
    def offset(self) -> int:
        """Offset of the next byte in the stream."""
        return self.base + self.pos

    @property
    def arrived(self) -> int:
        """Offset behind the bytes of the stream that have come so far, all of the current piece included."""
        return self.base + self.end + (0 if self.after is None else len(self.after))

    def error(self, kind: type[E], message: str, offset: int) -> E:
        """Return the error of the shard at ``offset``, a byte in it."""
        return kind(f"{self.shown}: {message}").at(self.shown, offset)

    def fill(self) -> bool:
        """Go on to the next piece, once the current one is used up; False at the end of the stream."""
        self.base += self.end
        if self.after is not None:
            self.view, self.after = self.after, None
            self.pos, self.end = 0, len(self.view)
            return True
        self.drop()
        piece = self.read()
        while piece is not None and not len(piece):
            piece = self.read()
        if piece is None:
            return False
        self.view = piece
        self.end = len(piece)
        return True

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only where the stream ends. Each byte is copied once, and no more
        memory is taken than bytes have arrived, whatever ``size`` claims."""
        if self.end - self.pos >= size:
            start = self.pos
            self.pos += size
            return self.view[start : self.pos].tobytes()
        joined = io.BytesIO()
        while size:
            if self.pos == self.end:
                if not self.fill():
                    break
                continue
            step = min(size, self.end - self.pos)
            joined.write(self.view[self.pos : self.pos + step])
            self.pos += step
            size -= step
        return joined.getvalue()

    def skip(self, size: int) -> int:
        """Pass over ``size`` bytes; returns how many there were, fewer only where the stream ends."""
        left = size
        while left:
            if self.pos == self.end:
                if not self.fill():
                    break
                continue
            step = min(left, self.end - self.pos)
            self.pos += step
            left -= step
        return size - left

    def put_back(self, data: bytes) -> None:
        """Take back ``data``, the bytes that were taken last: they come next again, as a piece of their own where they
        came from pieces before the current one."""
        size = len(data)
        if self.pos >= size:
            self.pos -= size
            return
        self.base = self.offset - size
        if self.after is not None:
            data += self.view[self.pos : self.end]
        elif self.pos < self.end:
            self.after = self.view[self.pos : self.end]
        self.view = memoryview(data)
        self.pos, self.end = 0, len(data)

    def drop(self) -> None:
        """Let go of the current piece; the position goes with it, ``base`` stays."""
        self.view = NOTHING
        self.after = None
        self.pos = self.end = 0
