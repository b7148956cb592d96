"""Recognition of shards by their first bytes, for files that others put into the cache."""

from __future__ import annotations

import os

__all__ = ["looks_like_shard"]

_BLOCK = 512
_COMPRESSED = (
    b"\x1f\x8b\x08",  # gzip, RFC 1952
    b"BZh",  # bzip2
    b"\xfd7zXZ\0",  # xz
    b"\x5d\0\0\x80\0",  # lzma, its elder
    b"\x28\xb5\x2f\xfd",  # zstd, RFC 8878
)
_CHECKSUM = slice(148, 156)


def looks_like_shard(path: str | os.PathLike[str]) -> bool:
    """Return whether the file begins with a tar header or like gzip, bzip2, xz, lzma or zstd.

    A header is recognised by its checksum, which every kind of tar has (POSIX ustar, GNU, and V7, which has no magic):
    the sum of all bytes, with its own field as blanks; old tars added them as signed numbers. Zeros are no shard: an
    archive without members is, but so begins a file whose data a crash took. OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(_BLOCK)
    if head.startswith(_COMPRESSED) or len(head) < _BLOCK:
        return head.startswith(_COMPRESSED)
    try:
        checksum = int(head[_CHECKSUM].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    blank = head[: _CHECKSUM.start] + b" " * 8 + head[_CHECKSUM.stop :]
    return checksum in (sum(blank), sum(byte - 256 if byte > 127 else byte for byte in blank))
