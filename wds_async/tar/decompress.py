"""A compressed shard as the stream of its tar.

The format is told by the first bytes, never by the name. Whatever the ratio of compression, a piece that
comes out is bounded. Sources: RFC 1952 (gzip), RFC 8878 (zstd), the bzip2 and xz file formats.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from wds_async import zstd
from wds_async.errors import CorruptShard, FieldTooLarge, ShardFormatError, TruncatedShard
from wds_async.tar.blocks import BLOCK, checks
from wds_async.tar.source import ByteSource, Read

__all__ = ["compressed_by", "gunzip", "hands_through", "plain", "plain_span"]

PIECE_BYTES = 512 << 10  # the most that comes out at once
FEED_BYTES = 256 << 10  # the most that goes in at once: decompressors copy what they cannot use yet
_PEEK_BYTES = 10
_MEMORY_BYTES = 512 << 20  # the most that a stream may claim for its window (``zstd --long=29``)
_ADVICE = "write or copy the shard again"
_ZSTD = b"\x28\xb5\x2f\xfd"
_PACKED = re.compile(r"\.(tgz|tbz2?|txz|gz|bz2|xz|lzma|zst)($|[?#])")  # names of compressed shards, for a message
_BZ2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # a first block, or the end of an empty stream


class _Codec(Protocol):
    """The interface of ``bz2.BZ2Decompressor``, which ``lzma`` has too."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


def plain(read: Read, url: str) -> Read:
    """Return the stream of the uncompressed tar behind ``read``.

    The first bytes are read at once. gzip, bzip2, xz (and its elder, lzma) and zstd give a ``Read`` of
    decompressed pieces of at most 512 KiB; anything else is handed through, piece by piece, uncopied. Several
    compressed streams one after another are read on, and zero bytes after the last are passed over.

    The new ``Read`` raises ``CorruptShard`` where the compressed bytes are damaged and ``TruncatedShard``
    where they end early, with ``url`` and the compressed offset, also as attributes. A checksum that the stream ends
    with is checked there: what is damaged may have come out before. Windows above 512 MiB are refused.
    """
    through = _Through(read)
    head = through.peek(_PEEK_BYTES)
    source = ByteSource(through, url)
    match compressed_by(head):
        case "gzip":
            return _reader(_unpacked(source, "gzip", _Gunzip))
        case "bzip2":
            return _reader(_unpacked(source, "bzip2", bz2.BZ2Decompressor))
        case "xz":
            return _reader(_unpacked(source, "xz", functools.partial(lzma.LZMADecompressor, memlimit=_MEMORY_BYTES)))
        case "zstd":
            return _reader(_unzstd(source))
    return through


def hands_through(read: Read) -> bool:
    """Return whether ``read``, of `plain`, hands its stream through: it is not compressed."""
    return isinstance(read, _Through)


def plain_span(read: Read, url: str, start: int) -> Read:
    """Return the bytes of a plain tar from its header at byte ``start`` on, as they come from ``read``.

    The first block is read at once. ShardFormatError where it shows that the shard is compressed: no byte in the middle
    of such a one tells where a member begins. A block that is a header, or zeros, is never taken for compressed data.
    """
    through = _Through(read)
    head = through.peek(BLOCK)
    if not head.strip(b"\0") or (len(head) == BLOCK and checks(head)):
        return through
    what = compressed_by(head)
    if what is None and (start == 0 or not _PACKED.search(url.lower())):
        return through  # whatever it is: it is damage to the tar's reader
    raise ByteSource(through, url).error(
        ShardFormatError,
        f"{f'{what} data' if what else 'no tar header'} at byte {start}: compressed shards have no spans, since their"
        " members cannot be found by their place; read it whole, or pack it as a plain tar",
        start,
    )


def compressed_by(head: bytes) -> str | None:
    """Return the name of the compression whose data begin so, None for anything else."""
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    if head[:3] == b"BZh" and head[4:10] in _BZ2_BLOCKS:  # "BZh" alone may begin the name of a tar's first member
        return "bzip2"
    if head[:6] == b"\xfd7zXZ\0" or head[:5] == b"\x5d\0\0\x80\0":
        return "xz"
    return "zstd" if head[:4] == _ZSTD or _is_skippable(head[:4]) else None


class _Through:
    """A stream that can be looked into before it is read. The first piece is kept as it came, unless it is
    too short to tell: then the first few are copied together."""

    __slots__ = ("first", "read")

    def __init__(self, read: Read) -> None:
        self.read = read
        self.first: memoryview | None = None

    def peek(self, size: int) -> bytes:
        self.first = self.read()
        while self.first is not None and len(self.first) < size:
            start, self.first = bytes(self.first), None
            more = self.read()
            if more is None:
                self.first = memoryview(start) if start else None
                break
            self.first, more = memoryview(start + bytes(more)), None
        return b"" if self.first is None else bytes(self.first[:size])

    def __call__(self) -> memoryview | None:
        if self.first is not None:
            first, self.first = self.first, None
            return first
        return self.read()


def _reader(pieces: Iterator[bytes]) -> Read:
    def read() -> memoryview | None:
        piece = next(pieces, None)
        return None if piece is None else memoryview(piece)

    return read


class _Gunzip:
    """``zlib.decompressobj`` with the interface of the others."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail  # gzip's trailer waits there until all output is out

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes:
        return self._zlib.decompress(data or self._zlib.unconsumed_tail, max_length)


def _unpacked(source: ByteSource, what: str, new: Callable[[], _Codec]) -> Iterator[bytes]:
    """Yield the unpacked bytes of gzip, bzip2 or xz streams, one after another."""
    try:
        data = _feed(source)
        while data:
            codec = new()
            while not codec.eof:
                if not data and codec.needs_input:
                    data = _feed(source)
                    if not data:
                        raise _truncated(source, what)
                try:
                    out = codec.decompress(data, PIECE_BYTES)
                except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as exn:
                    raise _corrupt(source, what, exn) from exn
                data = b""
                if out:
                    yield out
            data = codec.unused_data.lstrip(b"\0")  # streams may be padded with zeros
            while not data and (data := _feed(source)):
                data = data.lstrip(b"\0")
    finally:
        source.drop()


def _feed(source: ByteSource) -> bytes:
    """Return the next bytes of the current piece, or of the next one; empty at the end."""
    if source.pos == source.end and not source.fill():
        return b""
    return source.take(min(FEED_BYTES, source.end - source.pos))


def _unzstd(source: ByteSource) -> Iterator[bytes]:
    """Unpack zstd frames block by block: a block holds at most 128 KiB, so what comes out is bounded, and where the
    frame ends is known (zstandard's own readers end quietly on a cut stream)."""
    damaged = zstd.error_class()
    try:
        while magic := source.take(4):
            if not magic.strip(b"\0"):
                continue
            if _is_skippable(magic):
                size = int.from_bytes(_need(source, 4), "little")
                if source.skip(size) < size:
                    raise _truncated(source, "zstd")
            elif magic == _ZSTD:
                frame = zstd.decompressor(_MEMORY_BYTES)
                for part in _zstd_parts(source):
                    try:
                        out = frame.decompress(part)
                    except damaged as exn:
                        raise _corrupt(source, "zstd", exn) from exn
                    if out:
                        yield out
            elif len(magic) < 4:
                raise _truncated(source, "zstd")
            else:
                raise _corrupt(source, "zstd", f"{magic!r} where a frame should begin")
    finally:
        source.drop()


def _zstd_parts(source: ByteSource) -> Iterator[bytes]:
    """Yield a frame behind its magic number as its header and blocks (RFC 8878, 3.1.1)."""
    descriptor = _need(source, 1)
    flags = descriptor[0]
    single = flags >> 5 & 1
    size = (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
    yield _ZSTD + descriptor + _need(source, size)
    last = 0
    while not last:
        head = _need(source, 3)
        bits = int.from_bytes(head, "little")
        last, kind, size = bits & 1, bits >> 1 & 3, bits >> 3
        tail = 4 if last and flags & 4 else 0  # the content's checksum
        yield head + _need(source, (1 if kind == 1 else size) + tail)


def _is_skippable(magic: bytes) -> bool:
    return magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5


def _need(source: ByteSource, size: int) -> bytes:
    data = source.take(size)
    if len(data) < size:
        raise _truncated(source, "zstd")
    return data


def _truncated(source: ByteSource, what: str) -> TruncatedShard:
    why = f"the {what} stream ends early, after {source.offset} compressed bytes; {_ADVICE}"
    return source.error(TruncatedShard, why, source.offset)


def _corrupt(source: ByteSource, what: str, why: object) -> CorruptShard:
    text = f"the {what} stream is damaged, found at or before compressed byte {source.offset}: {why}; {_ADVICE}"
    if "memory" in str(why).lower():  # in the words of lzma and zstandard
        most = f"{_MEMORY_BYTES >> 20} MiB of memory"
        text = f"the {what} stream wants more than {most}: {why}; pack the shard with a smaller window"
    return source.error(CorruptShard, text, source.offset)


def gunzip(data: bytes, limit: int = 2 << 30) -> bytes:
    """Unpack a field, one or several gzip streams and perhaps zeros behind them, like `gzip.decompress`, and with its
    errors; but FieldTooLarge above ``limit`` bytes (2 GiB), of which no more are unpacked."""
    parts, left = [], limit
    while data:
        if data[:2] != b"\x1f\x8b":
            raise gzip.BadGzipFile(f"Not a gzipped file ({data[:2]!r})")
        codec = zlib.decompressobj(16 + zlib.MAX_WBITS)
        part = codec.decompress(data, left + 1)
        left -= len(part)
        if left < 0:
            raise FieldTooLarge(f"a gzip field holds more than {limit} bytes; raise the limit if it is meant")
        if not codec.eof:
            raise EOFError("the gzip stream ends early")
        parts.append(part)
        data = codec.unused_data.lstrip(b"\0")
    return parts[0] if len(parts) == 1 else b"".join(parts)
