"""The way from damage to the next header.

A header has ``ustar`` at its byte 257, as in all tars of the last thirty years, a good checksum and good fields. It is
looked for at every byte, not at every 512th: where bytes were lost or added, all that follows is shifted. Headers of V7
(without ``ustar``) are not found. Where the damaged header is that of a member that is itself a plain tar, its members
are taken for members of the shard.
"""

from __future__ import annotations

from wds_async.tar.blocks import BLOCK, MAGIC, checks, number, padded, records
from wds_async.tar.source import ByteSource

__all__ = ["is_header", "resync", "seek"]

_MAGIC = b"ustar"
_WINDOW_BYTES = 64 << 10  # what is looked through at once
_NUMBERS = (slice(100, 108), slice(108, 116), slice(116, 124), slice(124, 136), slice(136, 148))  # mode … mtime
_SIZE = slice(124, 136)
_EXTENSIONS = b"xXgLK"
_KINDS = b"01234567\0SDMNV" + _EXTENSIONS  # POSIX's, and those of GNU, Solaris and star
_FULL = 99  # bytes: a name field as full as this may hold the beginning of a longer name


def resync(source: ByteSource, since: int | None = None) -> int | None:
    """Go on from where a ``CorruptShard`` left ``source`` to the next valid header: `parse.members_of` reads on there.

    Returns how many bytes were passed over since the byte ``since`` (the error's ``offset``; where the source stands
    unless given), or None at the end of the stream. Memory is bounded; what ``source.read`` raises is raised.

    The header found may be an extension header, which belongs to the member behind it. A member whose extension header
    is among what is damaged is passed over too: its true name or size was there.
    """
    since = source.offset if since is None else since
    return source.offset - since if seek(source) else None


def seek(source: ByteSource) -> bool:
    """Go to the next valid header, perhaps the one where ``source`` stands; False at the end of the stream."""
    left, source.rest = source.rest, 0
    orphan, source.orphan = source.orphan, False
    source.skip(left)
    seen, at = source.take(_WINDOW_BYTES), 0  # candidates begin at `at`; what lies before it was looked at
    while True:
        hit = seen.find(_MAGIC, at + MAGIC.start)
        at = hit - MAGIC.start if hit >= 0 else max(at, len(seen) - MAGIC.start - len(_MAGIC) + 1)
        if hit < 0 or at + BLOCK > len(seen):
            more = source.take(_WINDOW_BYTES)
            if not more:
                return False
            kept = max(at - BLOCK, 0)
            seen, at = seen[kept:] + more, at - kept
            continue
        block = seen[at : at + BLOCK]
        if not is_header(block):
            at += 1
            continue
        if block[156] in _EXTENSIONS or not (orphan or _lost_its_name(block, seen[max(at - BLOCK, 0) : at])):
            source.put_back(seen[at:])
            return True
        orphan = False
        source.put_back(seen[at + BLOCK :])
        source.skip(0 if block[156] in b"123456" else padded(number(block[_SIZE])))
        seen, at = source.take(_WINDOW_BYTES), 0


def is_header(block: bytes) -> bool:
    """Return whether a block is a header that can be believed: its checksum, its type and all its numbers are good."""
    if not block[0] or block[156] not in _KINDS or not checks(block):
        return False
    try:
        return all(-1 << 63 < number(block[field]) < 1 << 63 for field in _NUMBERS) and number(block[_SIZE]) >= 0
    except ValueError:
        return False


def _lost_its_name(block: bytes, before: bytes) -> bool:
    """Return True for a header whose name or size an extension header gave, of which only the data, the block
    ``before``, or nothing is left: tars write what fits of a long name into the header, and ``?`` for what is not
    ASCII."""
    name = block[:100].partition(b"\0")[0]
    if b"?" in name or (len(name) >= _FULL and not block[345]):
        return True
    try:
        extension = dict(records(before))
    except ValueError:
        return False
    return b"path" in extension or b"size" in extension
