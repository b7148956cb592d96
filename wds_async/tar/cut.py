"""Rule of the cut: which samples of a tar belong to a span of its bytes, so that several readers share one shard.

A shard is cut anywhere, without an index. Every sample belongs to one span:

* A member stands where its first header block is, extension headers included.
* The sample that holds the first member at or behind a cut belongs to the span on the left, and so does all before it.
* The reader on the right finds the next header at the cut from bytes alone (`Restart`): from `LOOKBACK_BYTES` before
  the cut it goes to the first block that is a header, and from there from header to header. It drops the sample that
  the first member makes, and takes those behind it.
* A span in which no member begins owns nothing.

The reader on the left comes to the same place by the true chain of headers. It makes the same search on the bytes that
pass by (`CutWatch`), and raises ShardCutError where the two differ, as in a member that is a tar itself. So each sample
is given exactly once, or an error is raised; see the document on the design for the proof.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from wds_async.errors import ShardCutError
from wds_async.tar.blocks import BLOCK, number, padded
from wds_async.tar.parse import Member
from wds_async.tar.resync import is_header
from wds_async.tar.source import ByteSource, Read

__all__ = ["LOOKBACK_BYTES", "CutSpan", "CutWatch", "Restart", "SpanMembers"]

LOOKBACK_BYTES = 64 << 10
"""Bytes before a cut from which headers are searched for: as long a name as is believed. With a longer extension header
the two sides differ, which is found."""

_MAGIC = b"ustar"
_MAGIC_AT = 257
_EXTENSIONS = b"xXLK"
_GLOBAL = b"g"
_NO_DATA = b"123456"


@dataclass(frozen=True, slots=True)
class CutSpan:
    """Bytes of a plain tar: from ``start`` to the first of ``cuts``, or to its end without any. The further ``cuts``
    are all those behind it in this shard, in order. ``at`` is the offset of a sample of this span to go on from."""

    start: int = 0
    cuts: tuple[int, ...] = ()
    at: int | None = None

    @property
    def stop(self) -> int | None:
        """Offset of the next span; None for the last span of a shard."""
        return self.cuts[0] if self.cuts else None

    @property
    def first_byte(self) -> int:
        """The first byte that its reader needs."""
        if self.at is None:
            return _lookback(self.start) if self.start else 0
        return self.at if self.stop is None or self.at >= self.stop else min(self.at, _lookback(self.stop))


def _lookback(cut: int) -> int:
    return padded(max(0, cut - LOOKBACK_BYTES))


class Restart:
    """Search for the next header at ``cut`` or behind it, and before ``stop``, from bytes alone.

    `feed` it the bytes of the tar in order, from `LOOKBACK_BYTES` before the cut on or earlier. ``found`` is the offset
    of the header, and ``block`` the header itself; ``found`` is None while there is none. ``over``: no more bytes are
    needed. Only blocks at multiples of 512 bytes are taken for headers, as they stand in every tar that is not damaged.
    """

    __slots__ = ("_at", "_extended", "_held", "_seeking", "block", "cut", "found", "over", "stop")

    def __init__(self, cut: int, stop: int = sys.maxsize) -> None:
        self.cut, self.stop = cut, stop
        self.found: int | None = None
        self.block = b""
        self.over = False
        self._at = _lookback(cut)  # the next byte that is looked at
        self._held = b""  # those that have come of the block there
        self._seeking = True
        self._extended = False  # the block at `_at` belongs to a member that began before it

    def feed(self, piece: memoryview, base: int) -> None:
        """Look at ``piece``, whose first byte stands at ``base``."""
        skip = self._at + len(self._held) - base
        if self.over or skip >= len(piece):
            return
        data, pos = self._held + piece[max(0, skip) :], 0
        while True:
            if self._seeking:
                pos = _next_header(data, pos)
            if self._at + pos >= self.stop:
                self.over = True
                return
            block = data[pos : pos + BLOCK]
            if len(block) < BLOCK:
                break
            if not is_header(block):
                self._seeking, self._extended = True, False
                pos += BLOCK
            elif self._at + pos >= self.cut and not self._extended:
                self.found, self.block, self.over = self._at + pos, block, True
                return
            else:
                self._seeking = False
                pos += BLOCK + self._data_size(block)
        self._at, self._held = self._at + pos, block

    def _data_size(self, block: bytes) -> int:
        """Return how many bytes follow a header before the next one."""
        kind = block[156:157]
        if kind not in _GLOBAL:  # which belongs to no member
            self._extended = kind in _EXTENSIONS
        return 0 if kind in _NO_DATA else padded(number(block[124:136]))


def _next_header(data: bytes, pos: int) -> int:
    """Return where the first header from ``pos`` on stands in ``data``, else where the last block that is not whole."""
    hit = data.find(_MAGIC, pos + _MAGIC_AT)
    while hit >= 0:
        at = hit - _MAGIC_AT
        if at % BLOCK == 0 and len(block := data[at : at + BLOCK]) == BLOCK and is_header(block):
            return at
        hit = data.find(_MAGIC, hit + 1)
    return max(pos, len(data) & -BLOCK)


class CutWatch:
    """The searches that the readers behind ``cuts`` make, made on the bytes that pass by on the left of them."""

    def __init__(self, cuts: Sequence[int]) -> None:
        self._cuts = cuts
        self._searches: list[Restart] = []

    def feed(self, piece: memoryview, base: int) -> None:
        """Look at ``piece``, whose first byte stands at ``base``."""
        cuts, end = self._cuts, base + len(piece)
        while (n := len(self._searches)) < len(cuts) and _lookback(cuts[n]) < end:
            self._searches.append(Restart(*cuts[n : n + 2]))
        for search in self._searches:
            search.feed(piece, base)

    def differing(self, at: int | None) -> Restart | None:
        """Return the first search, of the cuts up to ``at``, that ends elsewhere than the true chain of headers: at its
        next header, ``at``, which has passed by; None is the end of the tar."""
        for search in self._searches:
            if at is not None and search.cut > at:
                return None
            if search.found != (at if at is not None and at < search.stop else None):
                return search
        return None


class SpanMembers:
    """The members of the samples that a span owns, for one reading of it.

    ``key_of`` gives the key of a member's name, None for what belongs to no sample. A source of ``members`` reads by
    `watched`, gives the bytes from ``span.first_byte`` on, and goes on behind the span as far as is needed.
    """

    def __init__(self, span: CutSpan, key_of: Callable[[str], str | None]) -> None:
        self.span = span
        self._key_of = key_of
        self._watch: CutWatch | None = CutWatch(span.cuts) if span.cuts else None
        self._base = span.first_byte
        self._begun = self._behind = False
        self._dropping = span.start > 0 and span.at is None
        self._dropped: str | None = None
        self._last: str | None = None
        self.end: int | None = None
        """Offset of the first sample of the span behind it, once it is known."""
        if span.at is not None and span.stop is not None and span.at >= span.stop:
            self._watch, self._behind = None, True  # compared before the sample that came before

    def watched(self, read: Read) -> Read:
        """Return ``read`` with its pieces looked at as they pass."""

        def watching() -> memoryview | None:
            piece = read()
            if piece is not None and self._watch is not None:
                self._watch.feed(piece, self._base)
                self._base += len(piece)
            return piece

        return watching

    def members(self, source: ByteSource, parse: Callable[[ByteSource], Iterator[Member]]) -> Iterator[Member]:
        """Yield the members of ``source`` as ``parse`` reads them; again after an error, from where it stands.

        Raises ShardCutError where a reader behind this span does not come to the same place.
        """
        return itertools.chain.from_iterable(self._in_turn(source, parse))

    def _in_turn(
        self, source: ByteSource, parse: Callable[[ByteSource], Iterator[Member]]
    ) -> Iterator[Iterable[Member]]:
        if not self._begun:
            self._begun = True
            if self.span.at is not None:
                source.skip(self.span.at - source.offset)
            elif self.span.start and not _go_to_restart(
                source, Restart(self.span.start, self.span.stop or sys.maxsize)
            ):
                return
        if not self._behind:
            source.bound, source.at_bound = self.span.stop or sys.maxsize, False
            inside = parse(source)
            if self._dropping:
                yield from self._behind_dropped(inside)
            yield inside
            if self.span.stop is None:
                return
            self._compare(source)
            self._behind = True
            if not source.at_bound:
                return
        source.bound = sys.maxsize
        yield self._last_sample(parse(source))

    def _behind_dropped(self, members: Iterator[Member]) -> Iterator[Iterable[Member]]:
        """Pass over the sample of the first member, which is the left neighbour's; yield the member behind it."""
        for member in members:
            key = self._key_of(member[0])
            if key is None:
                continue
            if self._dropped is None:
                self._dropped = key
            elif key != self._dropped:
                self._dropping = False
                yield (member,)
                return

    def _last_sample(self, members: Iterator[Member]) -> Iterator[Member]:
        """Yield the members of the sample that holds the first member behind the span."""
        for member in members:
            key = self._key_of(member[0])
            if key is not None:
                if self._dropping:
                    if self._dropped in (None, key):  # it is the left neighbour's own last sample
                        return
                    self._dropping = False
                if self._last is None:
                    self._last = key
                elif key != self._last:
                    self.end = member[2]
                    return
            if not self._dropping:
                yield member

    def _compare(self, source: ByteSource) -> None:
        """Raise ShardCutError where a reader behind this span begins elsewhere than where ``source`` stands."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        at = source.offset if source.at_bound else None
        search = watch.differing(at)
        stop, cause = self.span.stop, ""
        if search is not None:
            stop = search.cut
            there = "no header" if search.found is None else f"a header at byte {search.found}"
            here = "no member follows" if at is None else f"the next member is at byte {at}"
            cause = f"its bytes there show {there}, and {here}. Perhaps a member is a tar itself"
        elif source.at_bound and source.with_globals:
            cause = "a global PAX header gives names or sizes of the members behind it"
        if cause:
            raise ShardCutError(
                f"{source.shown}: cannot be cut at byte {stop}: {cause}. Make indexes of the shards (`wds-async index"
                ' --kind wds`) and give index=True, or leave out split="bytes"'
            ).at(source.shown, stop)


def _go_to_restart(source: ByteSource, search: Restart) -> bool:
    """Move ``source`` to the header that ``search`` finds; False where there is none."""
    while not search.over:
        if source.pos == source.end and not source.fill():
            return False
        search.feed(source.view[source.pos : source.end], source.offset)
        source.pos = source.end
    if search.found is None:
        return False
    source.pos = max(0, search.found - source.base)
    if search.found < source.base:  # its first bytes were in the piece before
        source.put_back(search.block[: source.base - search.found])
    return True
