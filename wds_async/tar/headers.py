"""Tar headers by the book: every kind of them, long names, PAX records, base-256 numbers, damage and the end.

`parse` reads the headers that nearly every member has by itself, and leaves all others to `Headers`. Formats as there.
"""

from __future__ import annotations

import zlib

from wds_async.errors import CorruptShard, NotATar, TruncatedShard
from wds_async.tar.source import Source

__all__ = ["BLOCK", "LOW_SUMS", "Headers", "pass_over", "shown", "truncated"]

BLOCK = 512
LONG_NAME_BYTES = 64 << 10  # a name longer than any file system's, so a header that claims it lies
PAX_BYTES = 1 << 20

_DATA = (b"0", b"\0", b"7")  # regular, regular as V7 writes it, contiguous
_NO_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, directories, fifos: whatever their size says
_KNOWN = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"<!doctype html", "an HTML page (an error or login page?)"),
    (b"<html", "an HTML page (an error or login page?)"),
    (b"<?xml", "an XML document (a store's error answer?)"),
    (b"<error", "an XML document (a store's error answer?)"),
    (b"{", "a JSON document (a store's error answer?)"),
    (b"version https://git-lfs", "a Git LFS pointer (run `git lfs pull`)"),
)


class _Sums(dict[bytes, int]):
    """From a header's checksum field to what the low half of its Adler-32 must be.

    The low half is one plus the sum of all bytes, modulo 65521 (RFC 1950); a tar's checksum is the same
    sum with the checksum field counted as eight spaces. So C code sums the header.
    """

    def __missing__(self, field: bytes) -> int:
        try:
            low = (1 + _number(field) - 8 * 32 + sum(field)) % 65521
        except ValueError:
            low = -1
        if len(self) >= 1 << 14:
            self.clear()
        self[field] = low
        return low


LOW_SUMS = _Sums()
"""What `zlib.adler32(header) & 0xFFFF` has to be, by the header's checksum field; -1 where that is no number."""


class Headers:
    """Reads whatever header comes next.

    ``shared`` holds the records of global PAX headers that change how later members are read.
    """

    __slots__ = ("shared", "source", "zeros_end")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.shared: dict[bytes, bytes] = {}
        self.zeros_end = -1  # where the last zero block ended

    def next(self, first: int) -> tuple[str, int, int] | None:
        """Name, size in bytes and offset of the next regular file, with the source at its data; ``None``
        at the end of the archive. ``first`` is the offset of an extension header that was read already and
        belongs to the next member, or -1."""
        source, extra = self.source, _Extra(first)
        while True:
            at = source.offset
            block = source.take(BLOCK)
            if len(block) < BLOCK or not block.strip(b"\0") or not _checks(block):
                if self._ends(block, at, extra):
                    return None
                continue
            kind = block[156:157]
            if extra.first < 0 and kind != b"g":  # a global header belongs to no member
                extra.first = at
            size = self._size(block, at) if kind not in _NO_DATA else 0
            if kind in (b"L", b"K", b"x", b"X", b"g"):
                self._extend(extra, kind, size, at)
                continue
            name, size = self._named(block, kind, size, extra)
            if kind in _DATA and not (kind == b"\0" and _text(block[:100]).endswith("/")):
                return name, size, extra.first
            if kind not in _NO_DATA and kind != b"\0":
                pass_over(source, (size + BLOCK - 1) & -BLOCK, extra.first)
            extra = _Extra(-1)

    def _ends(self, block: bytes, at: int, extra: _Extra) -> bool:
        """What a block that is no header means: True ends the archive, False reads on."""
        url = self.source.shown
        if extra.first >= 0:
            if len(block) < BLOCK:
                raise truncated(url, at + len(block), f"inside the headers of the member at byte {extra.first}")
            raise CorruptShard(
                f"{url}: no valid header at byte {at}, where the extension header at byte {extra.first} needs"
                " one; the shard is damaged, write or copy it again"
            )
        if len(block) == BLOCK and not block.strip(b"\0"):
            self.zeros_end = at + BLOCK
            return False
        if at and (not block or at == self.zeros_end):
            return True  # the end of the stream between two members, or what tape drives left behind
        if at == 0:
            raise NotATar(f"{url} at byte 0: {_guess(block)}; a shard is a tar, plain or compressed")
        if len(block) < BLOCK:
            raise truncated(url, at + len(block), f"inside the header at byte {at}")
        raise CorruptShard(
            f"{url}: the block at byte {at} is no tar header (wrong checksum) and follows no end-of-archive block;"
            f" it begins with {block[:16]!r}; the shard is damaged, write or copy it again"
        )

    def _size(self, block: bytes, at: int) -> int:
        try:
            size = _number(block[124:136])
        except ValueError:
            size = -1
        if size < 0:
            raise CorruptShard(f"{self.source.shown}: the header at byte {at} has the size {block[124:136]!r}")
        return size

    def _extend(self, extra: _Extra, kind: bytes, size: int, at: int) -> None:
        """Read the data of a GNU long name or a PAX header. The first that names a thing wins, and a global
        header gives what no other does, as in ``tarfile``."""
        limit = LONG_NAME_BYTES if kind in (b"L", b"K") else PAX_BYTES
        if size > limit:
            raise CorruptShard(
                f"{self.source.shown}: the extension header at byte {at} (type {kind.decode()!r}) says it holds"
                f" {size} bytes; more than {limit} are not believed"
            )
        payload = self.source.take(size)
        if len(payload) < size or self.source.skip(-size % BLOCK) < -size % BLOCK:
            raise truncated(self.source.shown, self.source.offset, f"inside the extension header at byte {at}")
        if kind == b"L":
            extra.records.setdefault(b"path", payload.partition(b"\0")[0])
        elif kind != b"K":
            try:
                records = _records(payload)
            except ValueError as exn:
                raise CorruptShard(f"{self.source.shown}: the PAX header at byte {at} is damaged: {exn}") from None
            kept = {key: records[key] for key in records if key in (b"path", b"size") or b"sparse" in key}
            if kind == b"g":
                self.shared.update(kept)
            else:
                extra.records = kept | extra.records

    def _named(self, block: bytes, kind: bytes, size: int, extra: _Extra) -> tuple[str, int]:
        """The member's name and size with all that extension headers say of it."""
        records = self.shared | extra.records
        name = _text(records[b"path"]).rstrip("/") if records.get(b"path") else _header_name(block)
        if kind == b"S" or any(key.startswith(b"GNU.sparse") for key in records):
            raise CorruptShard(
                f"{self.source.shown}: member {shown(name)} at byte {extra.first} is stored sparse, which is not"
                " read; pack the shard again without tar's --sparse"
            )
        if kind in _NO_DATA or not records.get(b"size"):
            return name, size
        digits = records[b"size"]
        if not digits.isdigit():
            raise CorruptShard(
                f"{self.source.shown}: member {shown(name)} at byte {extra.first} has the PAX size {digits!r}"
            )
        return name, int(digits[:30])


class _Extra:
    """What extension headers have said about the member that comes next, and where they began."""

    __slots__ = ("first", "records")

    def __init__(self, first: int) -> None:
        self.first = first
        self.records: dict[bytes, bytes] = {}


def pass_over(source: Source, size: int, offset: int) -> None:
    """Skip ``size`` bytes of the member whose header is at ``offset``; TruncatedShard where they are not there."""
    got = source.skip(size)
    if got < size:
        where = f"inside the data or padding of the member at byte {offset}: {size} bytes wanted, {got} got"
        raise truncated(source.shown, source.offset, where)


def truncated(url: str, at: int, where: str) -> TruncatedShard:
    """The error of a shard that ends too early, ``at`` a byte."""
    return TruncatedShard(f"{url}: the shard ends at byte {at}, {where}; write or copy it again")


def _checks(block: bytes) -> bool:
    """Whether a block is a header by its checksum, over unsigned or (old Sun and NeXT tars) signed bytes."""
    if zlib.adler32(block) & 0xFFFF == LOW_SUMS[block[148:156]]:
        return True
    try:
        wanted = _number(block[148:156])
    except ValueError:
        return False
    rest = block[:148] + b" " * 8 + block[156:]
    return wanted == sum(rest) - 256 * sum(byte > 127 for byte in rest)


def _number(field: bytes) -> int:
    """A number field: octal digits, or GNU's base-256 (first byte 0x80, or 0xff for a negative one)."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _header_name(block: bytes) -> str:
    """The name field behind ustar's prefix; old GNU headers keep times where the prefix would be."""
    prefix = block[345:500] if block[257:265] != b"ustar  \0" else b""
    name = _text(block[:100])
    return f"{_text(prefix)}/{name}" if prefix[:1].strip(b"\0") else name


def _records(payload: bytes) -> dict[bytes, bytes]:
    """The ``length key=value`` lines of a PAX header. Raises ``ValueError``."""
    records, pos = {}, 0
    while pos < len(payload) and payload[pos]:
        space = payload.find(b" ", pos, pos + 20)
        digits = payload[pos:space]
        stop = pos + int(digits) if space > 0 and digits.isdigit() else 0
        key, equals, value = payload[space + 1 : stop - 1].partition(b"=")
        if not equals or stop > len(payload) or payload[stop - 1 : stop] != b"\n":
            raise ValueError(f"no record at its byte {pos}: {payload[pos : pos + 24]!r}")
        records[key] = value
        pos = stop
    return records


def shown(name: str) -> str:
    """A member's name for a message."""
    return repr(name if len(name) <= 200 else name[:200] + "…")


def _guess(block: bytes) -> str:
    """What the start of a stream that is no tar looks like."""
    if not block:
        return "the shard is empty (0 bytes)"
    start = block.lstrip(b"\xef\xbb\xbf \t\r\n")[:32]
    for magic, what in _KNOWN:
        if start.startswith(magic) or start.lower().startswith(magic):
            return f"this looks like {what}, not like a tar; it begins with {block[:32]!r}"
    return f"no tar header at the start; it begins with {block[:32]!r}"
