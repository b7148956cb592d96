"""Tar headers by the book: every kind of them, long names, PAX records, base-256 numbers, damage and the end.

`parse` reads the headers that nearly every member has by itself, and leaves all others to `Headers`. Formats as there.
"""

from __future__ import annotations

from collections.abc import Iterable

from wds_async.errors import CorruptShard, NotATar, TruncatedShard
from wds_async.tar.blocks import BLOCK, LOW_SUMS, checks, number, padded, records, text
from wds_async.tar.resync import seek
from wds_async.tar.source import ByteSource
from wds_async.tar.sparse import MAX_PIECES, PREFIX, Sparse, SparseRecords, old_sparse

__all__ = ["BLOCK", "LOW_SUMS", "Headers", "pass_over", "shown", "truncated"]

LONG_NAME_BYTES = 64 << 10  # a name longer than any file system's, so a header that claims it lies
PAX_BYTES = 64 << 20  # metadata of a member, and the map of a sparse one
MAX_EXTENSIONS = 64  # before one member; GNU and POSIX need two
SIZE_LIMIT = 1 << 63  # bytes: no file system has a larger file, and 8 EiB arrive nowhere

_ZEROS_BYTES = 8 << 10
_ZEROS_AT_MOST_BYTES = 1 << 30
_ZEROS_USUAL_BYTES = 64 << 10
_RECORDS_BYTES = (20 * BLOCK, 64 * BLOCK)  # what tar fills up with zeros at its end: usually, and as for tapes

_DATA = (b"0", b"\0", b"7", b"S")  # regular, regular as V7 writes it, contiguous, sparse
_NO_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, directories, fifos: whatever their size field holds
_DAMAGED = "the shard is damaged, write or copy it again"
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


class Headers:
    """Reader of whatever header comes next.

    ``shared`` holds the records of global PAX headers that change how later members are read. ``sparse`` tells how the
    member at ``sparse_at`` is expanded, the latest that is stored sparse.

    After a ``CorruptShard`` the source stands where `resync.resync` may go on: at the block that is no header, or
    behind what an impossible header says is its data.
    """

    __slots__ = ("began", "refused", "shared", "source", "sparse", "sparse_at", "zeros", "zeros_end")

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.shared: dict[bytes, bytes] = {}
        self.zeros = self.zeros_end = -1  # where the last zero blocks began and ended
        self.sparse = Sparse(0, [])
        self.sparse_at = -1
        self.refused: str | None = None  # the name of a member whose header was read, and is an error
        self.began = 0  # where this archive began, of several one after another

    def next(self, first: int) -> tuple[str, int, int] | None:
        """Return name, size in bytes and offset of the next regular file, with the source at its data; ``None`` at the
        end of the archive, and before a member that begins at ``source.bound`` or behind. ``first`` is the offset of an
        extension header that was read already and belongs to the next member, or -1."""
        source, extra = self.source, _Extra(first)
        while True:
            at = source.offset
            block = source.take(BLOCK)
            if len(block) < BLOCK or not block.strip(b"\0") or not checks(block):
                if self._ends(block, at, extra):
                    return None
                continue
            if at == self.zeros_end:
                self._begins_anew(block, at)
            if at >= source.bound and extra.first < 0:
                source.put_back(block)
                source.at_bound, source.with_globals = True, bool(self.shared)
                return None
            kind = block[156:157]
            if extra.first < 0 and kind != b"g":  # a global header belongs to no member
                extra.first = at
            size = self._size(block, at, extra) if kind not in _NO_DATA else 0
            if kind in (b"L", b"K", b"x", b"X", b"g"):
                self._extend(extra, kind, size, at)
                continue
            name, size = self._named(block, kind, size, extra)
            if kind in _DATA and not (kind == b"\0" and text(block[:100]).endswith("/")):
                return name, size, extra.first
            if kind not in _NO_DATA and kind != b"\0":
                pass_over(source, padded(size), extra.first)
            extra = _Extra(-1)

    def _ends(self, block: bytes, at: int, extra: _Extra) -> bool:
        """Return True where a block that is no header ends the archive, False to read on."""
        source = self.source
        whole, zero = len(block) == BLOCK, not block.strip(b"\0")
        if extra.first >= 0:
            if not whole:
                raise truncated(source, at + len(block), f"inside the headers of the member at byte {extra.first}")
            source.put_back(block)
            source.orphan = True
            needs = f"no valid header at byte {at}, where the extension header at byte {extra.first} needs one"
            raise source.error(CorruptShard, f"{needs}; {_DAMAGED}", extra.first)
        if whole and zero:
            self._pass_zeros(at)
            return False
        behind_zeros = at == self.zeros_end
        if at and (not block or (zero and behind_zeros)):
            self._end_of_stream(at, len(block))
            return True
        if at and behind_zeros:
            return self._is_left_behind(block, at)
        if at and not whole:
            raise truncated(source, at + len(block), f"inside the header at byte {at}")
        source.put_back(block)
        if not at:
            raise source.error(NotATar, f"at byte 0: {_guess(block)}; a shard is a tar, plain or compressed", 0)
        what = f"the block at byte {at} is no tar header (wrong checksum) and follows no end-of-archive block"
        raise source.error(CorruptShard, f"{what}; it begins with {block[:16]!r}; {_DAMAGED}", at)

    def _end_of_stream(self, at: int, rest: int) -> None:
        """The stream ends between two members, perhaps with ``rest`` zero bytes from ``at`` on. Raise TruncatedShard
        where an end-of-archive marker is required and missing; else note what is odd: few programs leave a tar so."""
        source, zeros = self.source, at - self.zeros if at == self.zeros_end else 0
        source.empty = zeros == at
        if zeros + rest < 2 * BLOCK and source.end_required is not None and source.end_required():
            where = (
                "without the two blocks of zeros that end an archive; the server gave no length, so that nothing shows"
                " whether more members follow, and the last sample may be incomplete; have it sent with its length"
            )
            raise truncated(source, at + rest, where)
        if at == source.start:  # nothing came: it begins at the end of its shard
            return
        if not zeros:
            source.doubt = f"it ends at byte {at}, behind a member, without the zeros that end an archive"
        elif zeros > _ZEROS_USUAL_BYTES:
            source.doubt = f"its last {zeros:,} bytes, from byte {at - zeros} on, are zeros"

    def _pass_zeros(self, at: int) -> None:
        if at != self.zeros_end:
            self.zeros = at
        source = self.source
        while source.end - source.pos >= _ZEROS_BYTES:
            if source.view[source.pos : source.pos + _ZEROS_BYTES].tobytes().strip(b"\0"):
                break
            source.pos += _ZEROS_BYTES
        self.zeros_end = source.offset
        if self.zeros_end - self.zeros > _ZEROS_AT_MOST_BYTES:
            why = "no archive has so many; a broken server sends them without end"
            raise self._hole(self.zeros, self.zeros_end, why)

    def _begins_anew(self, block: bytes, at: int) -> None:
        """Begin another archive behind zeros that ended one as programs end it (two blocks, or as many as fill a
        record). Any other number of them is a hole in the shard, and what it hides would be lost silently."""
        ends = at - self.zeros == 2 * BLOCK or any((at - self.began) % record == 0 for record in _RECORDS_BYTES)
        if self.zeros == 0 or (ends and at - self.zeros >= 2 * BLOCK):
            self.began = at
            return
        hole, self.zeros_end = self.zeros, -1
        self.source.put_back(block)
        raise self._hole(hole, at, "members go on behind them, and no archive ends so")

    def _is_left_behind(self, block: bytes, at: int) -> bool:
        """Return True where what follows zeros and is no header may be what tape drives leave behind an archive, which
        two blocks of zeros end. Else the zeros are a hole in the shard."""
        source, hole = self.source, self.zeros
        source.put_back(block)
        if hole and at - hole == BLOCK:
            why = "one block of zeros ends no archive, and what follows it is no header"
        elif seek(source):
            why = f"what follows them at byte {at} is no header, and at byte {source.offset} members go on"
        elif not hole:
            raise source.error(NotATar, f"at byte 0: {at} bytes of zeros, and no tar header behind them", 0)
        else:
            return True
        raise self._hole(hole, at, why)

    def _hole(self, hole: int, at: int, why: str) -> CorruptShard:
        what = f"zeros from byte {hole} to {at} stand where a member should: {why}"
        return self.source.error(CorruptShard, f"{what}; {_DAMAGED}", hole)

    def _size(self, block: bytes, at: int, extra: _Extra) -> int:
        try:
            size = number(block[124:136])
        except ValueError:
            size = -1
        if 0 <= size < SIZE_LIMIT:
            return size
        self.source.orphan = block[156:157] in (b"L", b"x", b"X")
        what = f"the header at byte {at} has the size {block[124:136]!r}"
        raise self.source.error(CorruptShard, what, extra.start(at))

    def _extend(self, extra: _Extra, kind: bytes, size: int, at: int) -> None:
        """Read the data of a GNU long name or a PAX header. The first that names a thing wins, and a global
        header gives what no other does, as in ``tarfile``."""
        source, own = self.source, kind != b"g"
        extra.count += own
        limit = LONG_NAME_BYTES if kind in (b"L", b"K") else PAX_BYTES
        if size > limit:
            source.orphan = own
            what = f"the extension header at byte {at} (type {kind.decode()!r}) says it holds {size} bytes"
            raise source.error(CorruptShard, f"{what}; more than {limit} are not believed", extra.start(at))
        payload = source.take(size)
        if len(payload) < size or source.skip(-size % BLOCK) < -size % BLOCK:
            raise truncated(source, source.offset, f"inside the extension header at byte {at}")
        if kind == b"L":
            extra.records.setdefault(b"path", payload.partition(b"\0")[0])
        elif kind != b"K":
            try:
                kept, sparse = _records_that_count(records(payload))
            except ValueError as exn:
                source.orphan = own
                what = f"the PAX header at byte {at} is damaged: {exn}"
                raise source.error(CorruptShard, what, extra.start(at)) from None
            if kind == b"g":
                self.shared.update(kept if sparse is None else {**kept, PREFIX: b""})
            else:
                extra.records = kept | extra.records
                extra.sparse = extra.sparse or sparse

    def _named(self, block: bytes, kind: bytes, size: int, extra: _Extra) -> tuple[str, int]:
        """Return the member's name and size, extension headers considered."""
        records = self.shared | extra.records
        path = (extra.sparse.name if extra.sparse is not None else b"") or records.get(b"path", b"")
        name = text(path).rstrip("/") if path else _header_name(block)
        more = self._sparse_blocks(block, extra.first) if kind == b"S" else b""
        try:
            if extra.count > MAX_EXTENSIONS:
                raise ValueError(f"has {extra.count} extension headers; more than {MAX_EXTENSIONS} are not believed")
            if kind not in _NO_DATA and records.get(b"size"):
                digits = records[b"size"]
                if not digits.isdigit() or len(digits) > 40 or int(digits) >= SIZE_LIMIT:
                    raise ValueError(f"has the PAX size {digits[:40]!r}")
                size = int(digits)
            if PREFIX in records:
                raise ValueError("is stored sparse as a global PAX header says, which is not read")
            if extra.sparse is not None or kind == b"S":
                self.sparse = old_sparse(block, more) if extra.sparse is None else extra.sparse.sparse()
                self.sparse_at = extra.first
        except ValueError as exn:
            self.source.rest = padded(size)
            self.refused = name
            what = f"member {shown(name)} at byte {extra.first} {exn}"
            raise self.source.error(CorruptShard, what, extra.first) from None
        return name, size

    def _sparse_blocks(self, block: bytes, first: int) -> bytes:
        """Return the rest of a sparse member's map, from the blocks behind its header; no more than `old_sparse`
        refuses."""
        blocks, size, more = [], 0, block[482]
        while more and size <= MAX_PIECES * 24:
            block = self.source.take(BLOCK)
            if len(block) < BLOCK:
                where = f"inside the sparse map of the member at byte {first}"
                raise truncated(self.source, self.source.offset, where)
            blocks.append(block[:504])
            size, more = size + 504, block[504]
        return b"".join(blocks)


class _Extra:
    """Records of the extension headers of the next member, their number, and where they began."""

    __slots__ = ("count", "first", "records", "sparse")

    def __init__(self, first: int) -> None:
        self.first = first
        self.count = int(first >= 0)
        self.records: dict[bytes, bytes] = {}
        self.sparse: SparseRecords | None = None

    def start(self, at: int) -> int:
        """Return the start of the member whose header, perhaps one of several, is at ``at``."""
        return at if self.first < 0 else self.first


def _records_that_count(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], SparseRecords | None]:
    """Return the records of a PAX header that change how a member is read, those of a sparse one apart. Raise
    ``ValueError``."""
    kept: dict[bytes, bytes] = {}
    sparse = SparseRecords()
    for key, value in pairs:
        if key in (b"path", b"size"):
            kept[key] = value
        elif key.startswith(PREFIX):
            sparse.add(key, value)
    for path in (kept.get(b"path", b""), sparse.name):
        if len(path) > LONG_NAME_BYTES:
            raise ValueError(f"a path of {len(path)} bytes; more than {LONG_NAME_BYTES} are not believed")
    return kept, sparse if sparse.any else None


def pass_over(source: ByteSource, size: int, offset: int) -> None:
    """Skip ``size`` bytes of the member whose header is at ``offset``; TruncatedShard where they are not there."""
    got = source.skip(size)
    if got < size:
        where = f"inside the data or padding of the member at byte {offset}: {size} bytes wanted, {got} got"
        raise truncated(source, source.offset, where)


def truncated(source: ByteSource, at: int, where: str) -> TruncatedShard:
    """Return the error of a shard that ends too early, ``at`` a byte."""
    return source.error(TruncatedShard, f"the shard ends at byte {at}, {where}; write or copy it again", at)


def _header_name(block: bytes) -> str:
    """Return the name field behind ustar's prefix; old GNU headers keep times where the prefix would be."""
    prefix = block[345:500] if block[257:265] != b"ustar  \0" else b""
    name = text(block[:100])
    return f"{text(prefix)}/{name}" if prefix[:1].strip(b"\0") else name


def shown(name: str) -> str:
    """Return a member's name for a message."""
    return repr(name if len(name) <= 200 else name[:200] + "…")


def _guess(block: bytes) -> str:
    """Describe the start of a stream that is no tar."""
    if not block:
        return "the shard is empty (0 bytes)"
    start = block.lstrip(b"\xef\xbb\xbf \t\r\n")[:32]
    for magic, what in _KNOWN:
        if start.startswith(magic) or start.lower().startswith(magic):
            return f"this looks like {what}, not like a tar; it begins with {block[:32]!r}"
    return f"no tar header at the start; it begins with {block[:32]!r}"
