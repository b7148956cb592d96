"""One block of a tar: checksum and fields of a header. Formats as in `parse`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

__all__ = ["BLOCK", "LOW_SUMS", "MAGIC", "checks", "number", "padded", "records", "text"]

BLOCK = 512
MAGIC = slice(257, 262)  # ``ustar`` stands here


class _Sums(dict[bytes, int]):
    """Map from a header's checksum field to what the low half of its Adler-32 must be.

    The low half is one plus the sum of all bytes, modulo 65521 (RFC 1950); a tar's checksum is the same
    sum with the checksum field counted as eight spaces. So C code sums the header.
    """

    def __missing__(self, field: bytes) -> int:
        try:
            low = (1 + number(field) - 8 * 32 + sum(field)) % 65521
        except ValueError:
            low = -1
        if len(self) >= 1 << 14:
            self.clear()
        self[field] = low
        return low


LOW_SUMS = _Sums()
"""Values of `zlib.adler32(header) & 0xFFFF` by the header's checksum field; -1 where that is no number."""


def checks(block: bytes) -> bool:
    """Return True for a header by its checksum, over unsigned or (old Sun and NeXT tars) signed bytes.

    One whose ``ustar`` stands some bytes beside its place is none: a header that lost its first byte has a good
    checksum where that byte and the next header's are the same digit, and reads as another name.
    """
    if block[MAGIC] != b"ustar" and b"ustar" in block[240:280]:
        return False
    if zlib.adler32(block) & 0xFFFF == LOW_SUMS[block[148:156]]:
        return True
    try:
        wanted = number(block[148:156])
    except ValueError:
        return False
    rest = block[:148] + b" " * 8 + block[156:]
    return wanted == sum(rest) - 256 * sum(byte > 127 for byte in rest)


def number(field: bytes) -> int:
    """Return a number field: octal digits, or GNU's base-256 (first byte 0x80, or 0xff for a negative one). Raises
    ``ValueError``."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def padded(size: int) -> int:
    """Return the bytes that data of ``size`` bytes takes in a tar: whole blocks."""
    return (size + BLOCK - 1) & -BLOCK


def text(field: bytes) -> str:
    """Return a text field up to its NUL; undecodable bytes become surrogates."""
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def records(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the ``length key=value`` lines of a PAX header, in order. Raises ``ValueError``."""
    pos = 0
    while pos < len(payload) and payload[pos]:
        space = payload.find(b" ", pos, pos + 20)
        digits = payload[pos:space]
        stop = pos + int(digits) if space > 0 and digits.isdigit() else 0
        key, equals, value = payload[space + 1 : stop - 1].partition(b"=")
        if not equals or stop > len(payload) or payload[stop - 1 : stop] != b"\n":
            raise ValueError(f"no record at its byte {pos}: {payload[pos : pos + 24]!r}")
        yield key, value
        pos = stop
