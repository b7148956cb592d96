"""SHA256SUMS: checksums of shards in a file, in the format of GNU ``sha256sum``.

A line has the digest in hexadecimal, two blanks (the second may be a star), and a name relative to the file's folder. A
name with a line feed, a carriage return or a backslash has these escaped, and a backslash stands before its line (GNU
coreutils, "cksum output modes").
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from wds_async.errors import ChecksumMismatch, ConfigError, WdsError
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.transfer.reader import open_shards

__all__ = ["FileDigest", "check", "digests", "read_sums", "sums_text"]

_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


@dataclass(frozen=True)
class FileDigest:
    """One shard: its bytes and SHA-256, or the ``error`` that it cannot be read for."""

    url: str
    bytes: int
    sha256: str
    error: WdsError | None = None


def digests(urls: Iterable[str], options: StorageOptions = NOTHING_GIVEN) -> Iterator[FileDigest]:
    """Yield the digest of each shard, as stored. Many parts are read at once, in memory that is bounded."""
    with open_shards(urls, options=options) as shards:
        for shard in shards:
            digest, size = hashlib.sha256(), 0
            try:
                while (piece := shard.read()) is not None:
                    digest.update(piece)
                    size += len(piece)
            except WdsError as exn:
                yield FileDigest(shard.url, size, "", exn)
                continue
            yield FileDigest(shard.url, size, digest.hexdigest())


def sums_text(sums: Mapping[str, str]) -> str:
    """Return the content of SHA256SUMS for names and digests, sorted by name."""
    return "".join(_line(name, sums[name]) for name in sorted(sums))


def _line(name: str, digest: str) -> str:
    escaped = "".join(_ESCAPES.get(letter, letter) for letter in name)
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"


def read_sums(text: str, where: str) -> dict[str, str]:
    """Return names and digests of a SHA256SUMS. ConfigError, with ``where`` and the line, for what is none, and for a
    name with two digests."""
    sums: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None:
            raise ConfigError(f"{redact(where)}: line {number} is no line of sha256sum: {line[:80]!r}")
        name = re.sub(r"\\(.)", lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), match[3])
        name = (name if match[1] else match[3]).removeprefix("./")
        if sums.setdefault(name, match[2].lower()) != match[2].lower():
            raise ConfigError(f"{redact(where)}: line {number}: {name!r} has two digests")
    return sums


def check(found: FileDigest, expected: str) -> ChecksumMismatch | None:
    """Return the error of a shard whose digest is not ``expected``."""
    if found.sha256 == expected:
        return None
    return ChecksumMismatch(
        f"{redact(found.url)}: its {found.bytes:,} bytes have the SHA-256 {found.sha256[:16]}…, not {expected[:16]}…: "
        "it was replaced or damaged; fetch it again, or write its checksum anew"
    ).at(redact(found.url), None)
