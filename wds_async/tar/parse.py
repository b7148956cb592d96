"""Parser of tars: from their bytes to their members.

Headers are read where they lie and a field's bytes are copied once. Nearly every header of a shard is a
plain file's (ustar or GNU, its name within 100 bytes), perhaps behind a PAX header that only gives times;
``members`` reads those itself, in about a microsecond. Everything else (other types, long names, base-256
numbers, blocks that cross pieces, damage, the end) is read by `headers.Headers`, in no hurry.

Formats: POSIX.1-2017 ``pax``, "ustar Interchange Format"; the GNU tar manual, "Basic Tar Format". Where they
leave room, what Python's ``tarfile`` reads is what is read here.
"""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from wds_async.errors import CorruptShard, FieldTooLarge
from wds_async.tar.blocks import BLOCK, LOW_SUMS, padded
from wds_async.tar.headers import Headers, pass_over, shown, truncated
from wds_async.tar.source import NOTHING, ByteSource, Read

__all__ = ["HEADER", "SIZES", "TIMES", "Member", "Read", "member_views", "members", "members_of"]

HEADER = struct.Struct("100s24x12s12x8sc188xc166x")
"""Fields of a header: name, size, checksum, type, first byte of the ustar prefix."""
TIMES = re.compile(rb"(?:[0-9]+ [acm]time=[-.0-9]+\n)+\0")
"""Data of a PAX header that only gives times."""


_NONE_YET: tuple[str | None, int | None] = (None, None)  # no name, no offset

Member = tuple[str, bytes, int]
"""A regular file of a tar: its name (UTF-8, undecodable bytes as surrogates), its bytes, and the offset in bytes,
in the uncompressed tar, of its first header block, extension headers included. A plain tuple: a named one costs a
tenth of the time that a small member takes."""

_Admit = Callable[[str], str | None] | None
_AnyMember = tuple[str, Any, int]


class _Sizes(dict[bytes, int]):
    """Map from a plain header's size field (octal, ended by NUL or a space) to the size; -1 for any other kind."""

    def __missing__(self, field: bytes) -> int:
        digits, last = field[:11], field[11:]
        size = int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") and last in (b"\0", b" ") else -1
        if len(self) >= 1 << 14:
            self.clear()
        self[field] = size
        return size


SIZES = _Sizes()
"""Size by the size field of a plain header; -1 for any other kind."""


def members(
    read: Read,
    url: str,
    *,
    admit: Callable[[str], str | None] | None = None,
    max_field_bytes: int = 2 << 30,
    end_required: Callable[[], bool] | None = None,
) -> Iterator[Member]:
    """Return the regular files of an uncompressed tar, in order.

    ``admit`` is given each name and returns the name to use, or ``None`` to pass over the data uncopied;
    without it all are read. A member of more than ``max_field_bytes`` (2 GiB) raises ``FieldTooLarge``
    before its data is read. Archives one after another are read on. The end of the stream between two members
    ends the shard quietly, unless ``end_required`` returns True (see `source.ByteSource`). So do bytes that are no
    header behind an end-of-archive (two blocks of zeros); but where a header is found among them, the zeros are a
    hole in the shard, and that is ``CorruptShard``.

    Members that are stored sparse are expanded; ``max_field_bytes`` bounds what they are then.

    Raises ``NotATar`` (no header at the start), ``CorruptShard`` (a bad header, or sparse map) and
    ``TruncatedShard``, each with ``url`` and the offset, also as attributes; and whatever ``read`` and ``admit``
    raise. No piece is referred to when the next one is asked for, nor when the iterator has ended or was closed.
    """
    return _walk(ByteSource(read, url, end_required), admit, max_field_bytes, keep=False)


def members_of(
    source: ByteSource,
    *,
    admit: Callable[[str], str | None] | None = None,
    max_field_bytes: int = 2 << 30,
) -> Iterator[Member]:
    """Return `members` of the rest of ``source``, which must stand at a header. Offsets are those of ``source``: in the
    whole tar, even if it begins in the middle of one. Global PAX headers that came before are not known there.

    After an error ``source`` still has its piece and its place, so that the shard can be read on: by `resync.resync`
    and then this function again after ``CorruptShard`` (or ``NotATar``), by this function alone after
    ``FieldTooLarge``, which passes that member over. Otherwise call ``source.drop()``. Global PAX headers are forgotten
    between two calls. It ends early at ``source.bound``.
    """
    return _walk(source, admit, max_field_bytes, keep=True)


def member_views(
    source: ByteSource,
    *,
    admit: Callable[[str], str | None] | None = None,
    max_field_bytes: int = 2 << 30,
) -> Iterator[tuple[str, memoryview | bytes, int]]:
    """Return `members_of`, with the bytes of most members as views of the current piece, for a reader that copies them
    to where it wants them. A view is valid until the next member is asked for."""
    return _walk(source, admit, max_field_bytes, keep=True, copies=False)


def _walk(source: ByteSource, admit: _Admit, limit: int, *, keep: bool, copies: bool = True) -> Iterator[_AnyMember]:
    """Yield `members`, written for speed: what the loop needs of ``source`` is in locals, ``end`` before the bound."""
    headers = _headers_behind(source)
    sums, sizes, unpack, adler32 = LOW_SUMS, SIZES, HEADER.unpack_from, zlib.adler32
    view, pos, end, first, plain = source.view, source.pos, min(source.end, source.bound - source.base), -1, b"0"
    last, offset = _NONE_YET
    try:
        while True:
            name: str | None = None
            if pos + BLOCK <= end:
                raw, field, checksum, kind, prefix = unpack(view, pos)
                if prefix == b"\0" and adler32(view[pos : pos + BLOCK]) & 0xFFFF == sums[checksum]:
                    size = sizes[field]
                    if kind == plain:
                        try:
                            name = raw.partition(b"\0")[0].decode()
                        except ValueError:
                            name = None
                    elif (
                        kind == b"x"
                        and first < 0 < size <= BLOCK
                        and (behind := pos + 2 * BLOCK) <= end
                        and TIMES.match(view, pos + BLOCK, behind)
                    ):
                        first, pos = source.base + pos, behind
                        continue
            if name is None or size < 0:
                source.pos, view = pos, NOTHING
                if (member := headers.next(first)) is None:
                    return
                (name, size, offset), view, pos = member, source.view, source.pos
                end = -1 if headers.sparse_at == offset else min(source.end, source.bound - source.base)
                plain = b"" if headers.shared else b"0"  # with global PAX records no header is plain
            else:
                offset, pos = (first if first >= 0 else source.base + pos), pos + BLOCK
            first = -1
            if admit is not None:
                last, name = name, admit(name)
            if name is not None and size > limit:
                raise _too_large(source, offset, name, size, limit)
            whole = (size + BLOCK - 1) & -BLOCK
            if pos + whole <= end:
                if name is not None:
                    yield name, view[pos : pos + size].tobytes() if copies else view[pos : pos + size], offset
                pos += whole
            else:
                source.pos, view = pos, NOTHING
                if name is not None:
                    yield name, _data(headers, size, name, offset, limit), offset
                    whole -= size
                pass_over(source, whole, offset)
                view, pos, end = source.view, source.pos, min(source.end, source.bound - source.base)
    except Exception as exn:
        _note_last_member(exn, headers, name if admit is None else last, offset)
        raise
    finally:
        if view is not NOTHING:
            source.pos, view = pos, NOTHING
        if not keep:
            source.drop()


def _headers_behind(source: ByteSource) -> Headers:
    rest, source.rest = source.rest, 0  # of a member that an error refused
    pass_over(source, rest, source.offset)
    return Headers(source)


def _note_last_member(exn: Exception, headers: Headers, name: str | None, offset: int | None) -> None:
    """Note the name and the offset of the last header on ``exn``: its data may be what is missing, and samples of other
    keys are whole."""
    with contextlib.suppress(AttributeError):  # an exception without a dict, of a program's own opener
        exn.last_member = headers.refused or name  # type: ignore[attr-defined]
        exn.last_header = getattr(exn, "offset", None) if headers.refused else offset  # type: ignore[attr-defined]


def _data(headers: Headers, size: int, name: str, offset: int, limit: int) -> bytes:
    """Return the bytes of a member that crosses pieces, or is stored sparse: then it is expanded."""
    source, sparse = headers.source, headers.sparse if headers.sparse_at == offset else None
    if sparse is not None and sparse.size > limit:
        raise _too_large(source, offset, name, size, limit, sparse.size)
    data = source.take(size)
    if len(data) < size:
        where = f"inside member {shown(name)} (header at byte {offset}): {size} bytes of data wanted, {len(data)} got"
        raise truncated(source, source.offset, where)
    try:
        return data if sparse is None else sparse.expand(data)
    except ValueError as exn:
        source.rest = -size % BLOCK
        raise source.error(CorruptShard, f"member {shown(name)} at byte {offset} {exn}", offset) from None


def _too_large(source: ByteSource, offset: int, name: str, size: int, limit: int, whole: int = 0) -> FieldTooLarge:
    source.rest = padded(size)
    what = f"member {shown(name)} at byte {offset} has {whole or size} bytes, above max_field_bytes={limit}"
    return source.error(FieldTooLarge, f"{what}; raise the limit if this is meant", offset)
