"""Checksums: the digests that are computed here, and what the heads of answers and the files beside shards say of them.

A checksum is compared only where it is surely that of the whole object as it arrives: not one of a part, not one of
parts' checksums (S3's composite ones), and not one of bytes that were unpacked on the way.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from wds_async.errors import MissingExtra
from wds_async.storage.base import Checksum

__all__ = [
    "FILES",
    "MANIFESTS",
    "Digest",
    "aistore",
    "amazon",
    "amazon_etag",
    "azure",
    "digest_of",
    "google",
    "google_object",
    "hugging_face",
    "in_file",
    "in_manifest",
    "representation",
]

FILES = ((".sha256", "sha256"), (".md5", "md5"))
"""Files of checksums beside ``SHARD``: the ending of the name, and the algorithm; the better one first."""
MANIFESTS = (("SHA256SUMS", "sha256"), ("MD5SUMS", "md5"))
"""Files of checksums in its folder."""

_BYTES = {"crc32c": 4, "crc32": 4, "xxhash": 8, "md5": 16, "sha1": 20, "sha256": 32, "sha512": 64}
_AMAZON = ("crc32c", "sha256", "sha1", "crc32")  # CRC-64/NVME has no well-kept package that takes our memory
_AIS_NAMES = {"xxhash2": "xxhash"}  # two implementations of XXH64, seed 0
_HTTP_NAMES = {"sha-512": "sha512", "sha-256": "sha256", "sha": "sha1", "md5": "md5", "crc32c": "crc32c"}
_LISTED = re.compile(r"\\?([0-9A-Fa-f]{32,128}) [ *](.+)")
_TAGGED = re.compile(r"\\?(MD5|SHA256) \((.+)\) = ([0-9A-Fa-f]{32,128})")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


class Digest(Protocol):
    """A sum in the making."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Add the next bytes."""
        ...

    def digest(self) -> bytes:
        """Return the sum of all so far, big-endian."""
        ...


class _Crc:
    """A CRC of 32 bits; ``function(data, value)`` goes on from ``value``."""

    def __init__(self, function: Callable[[bytes | bytearray | memoryview, int], int]) -> None:
        self._function, self._value = function, 0

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def digest_of(algorithm: str) -> Digest:
    """Return a new digest. `MissingExtra` where its package is not installed; ValueError for one that is not known
    here."""
    try:
        if algorithm == "crc32c":
            import crc32c  # noqa: PLC0415 (who reads files waits for none of these)

            return _Crc(crc32c.crc32c)
        if algorithm == "xxhash":
            import xxhash  # noqa: PLC0415 (an extra)

            return xxhash.xxh64()
    except ImportError as exn:
        what = 'pip install "wds-async[ais]"' if algorithm == "xxhash" else "pip install crc32c"
        raise MissingExtra(f"checksums of the kind {algorithm} need: {what}") from exn
    if algorithm == "crc32":
        return _Crc(zlib.crc32)
    if algorithm not in _BYTES:
        raise ValueError(f"{algorithm}: no checksum that is known here")
    return hashlib.new(algorithm, usedforsecurity=False)


# -- the heads of answers: ``fields`` in lower case


def google(fields: Mapping[str, str]) -> Checksum | None:
    """Return the checksum in an answer of Google: ``x-goog-hash``, which is that of the stored object in every answer,
    a range's too.
    """
    packed = fields.get("x-goog-stored-content-encoding", "identity").strip().lower() not in ("", "identity")
    if packed or not _as_stored(fields):
        return None
    said = dict(_pairs(fields.get("x-goog-hash", "")))
    return _first(said, ("crc32c", "md5"), "x-goog-hash")


def google_object(said: Mapping[str, object]) -> Checksum | None:
    """Return the checksum in the JSON API's description of an object."""
    if str(said.get("contentEncoding") or "identity") != "identity":
        return None
    values = {"crc32c": str(said.get("crc32c") or ""), "md5": str(said.get("md5Hash") or "")}
    return _first(values, ("crc32c", "md5"), "the object's description")


def amazon(fields: Mapping[str, str]) -> Checksum | None:
    """Return the checksum in an answer of S3: ``x-amz-checksum-…`` of a whole object. A range's answer has none, or
    that of a part.
    """
    kind = fields.get("x-amz-checksum-type", "FULL_OBJECT").strip().upper()
    if kind != "FULL_OBJECT" or not _of_all(fields) or not _as_stored(fields):
        return None
    said = {name: fields.get(f"x-amz-checksum-{name}", "") for name in _AMAZON}
    found = _first(said, _AMAZON, "")
    return found and Checksum(found.algorithm, found.digest, f"x-amz-checksum-{found.algorithm}")


def amazon_etag(fields: Mapping[str, str]) -> Checksum | None:
    """Return the checksum in an ETag of S3 that is an MD5: the ETag of an object that was put in one piece and not
    encrypted with keys of KMS or the customer's.
    """
    encrypted = fields.get("x-amz-server-side-encryption", "").startswith("aws:kms")
    if encrypted or "x-amz-server-side-encryption-customer-algorithm" in fields or not _as_stored(fields):
        return None
    return _hexadecimal("md5", fields.get("etag", "").strip('"'), "its ETag, an MD5")


def azure(fields: Mapping[str, str]) -> Checksum | None:
    """Return the checksum in an answer of Azure: the blob's MD5, which answers to ranges give in another header."""
    if not _as_stored(fields):
        return None
    found = _base64("md5", fields.get("x-ms-blob-content-md5", ""), "x-ms-blob-content-md5")
    if found is None and _of_all(fields):
        found = _base64("md5", fields.get("content-md5", ""), "Content-MD5")
    return found


def aistore(fields: Mapping[str, str]) -> Checksum | None:
    """Return the checksum in an answer of AIStore to a request for the whole object. A range's may be that of the range
    (``checksum.enable_read_range`` of the bucket), and the answer does not say which it is.
    """
    if not _of_all(fields):
        return None
    name = fields.get("ais-checksum-type", "").strip().lower()
    return _hexadecimal(_AIS_NAMES.get(name, name), fields.get("ais-checksum-value", ""), "Ais-Checksum-Value")


def representation(fields: Mapping[str, str]) -> Checksum | None:
    """Return the checksum in an answer of any HTTP server: ``Repr-Digest`` (RFC 9530 §3) and the older ``Digest`` (RFC
    3230), both of the whole even if a range is answered, and ``Content-MD5``, that of the answer's body.
    """
    if not _as_stored(fields):
        return None
    for name in ("repr-digest", "digest"):
        said = {_HTTP_NAMES.get(key.lower(), ""): value.strip(":") for key, value in _pairs(fields.get(name, ""))}
        if (found := _first(said, ("crc32c", "sha256", "sha512", "sha1", "md5"), name.title())) is not None:
            return found
    return _base64("md5", fields.get("content-md5", ""), "Content-MD5") if _of_all(fields) else None


def hugging_face(fields: Mapping[str, str]) -> Checksum | None:
    """Return the checksum in an answer of the Hugging Face hub: the ETag of a large file is its SHA-256."""
    etag = fields.get("x-linked-etag", "").removeprefix("W/").strip('"')
    return _hexadecimal("sha256", etag, "X-Linked-Etag")


def _as_stored(fields: Mapping[str, str]) -> bool:
    return fields.get("content-encoding", "identity").strip().lower() in ("", "identity")


def _of_all(fields: Mapping[str, str]) -> bool:
    """Return whether the answer's body is the whole object."""
    said = fields.get("content-range")
    found = re.fullmatch(r"bytes 0-(\d+)/(\d+)", said.strip()) if said is not None else None
    return said is None or (found is not None and int(found[1]) + 1 == int(found[2]))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for each in text.split(",") if text else ():
        name, _, value = each.strip().partition("=")
        yield name, value


def _first(said: Mapping[str, str], names: tuple[str, ...], source: str) -> Checksum | None:
    for name in names:
        if (text := said.get(name)) and (found := _base64(name, text, source)) is not None:
            return found
    return None


def _base64(algorithm: str, text: str, source: str) -> Checksum | None:
    try:
        digest = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return Checksum(algorithm, digest, source) if len(digest) == _BYTES.get(algorithm) else None


def _hexadecimal(algorithm: str, text: str, source: str) -> Checksum | None:
    text = text.strip()
    if not re.fullmatch(r"[0-9A-Fa-f]+", text) or len(text) != 2 * _BYTES.get(algorithm, 0):
        return None
    return Checksum(algorithm, bytes.fromhex(text), source)


# -- files beside shards


def in_file(text: str, algorithm: str, name: str, source: str) -> Checksum | None:
    """Return the checksum in the file beside the shard ``name``: a digest alone, or lines of coreutils, of which the
    one for ``name`` counts, or the only one."""
    words = text.split()
    if len(words) == 1 or not text.strip():
        return _hexadecimal(algorithm, words[0], source) if words else None
    lines = list(_lines(text, algorithm))
    if len(lines) == 1:
        return _hexadecimal(algorithm, lines[0][1], source)
    return in_manifest(text, algorithm, source).get(name)


def in_manifest(text: str, algorithm: str, source: str) -> dict[str, Checksum]:
    """Return the checksums in a folder's file, by name, but for names with two different ones."""
    said: dict[str, set[str]] = {}
    for name, digest in _lines(text, algorithm):
        said.setdefault(name.removeprefix("./"), set()).add(digest.lower())
    once = {name: digests.pop() for name, digests in said.items() if len(digests) == 1}
    return {name: Checksum(algorithm, bytes.fromhex(digest), source) for name, digest in once.items()}


def _lines(text: str, algorithm: str) -> Iterator[tuple[str, str]]:
    """Yield ``(name, digest)`` of each line, in either form of coreutils; a leading "\\" marks an escaped name."""
    for line in (each.strip("\ufeff ") for each in text.splitlines()):
        if found := _LISTED.fullmatch(line):
            name, digest = found[2], found[1]
        elif (found := _TAGGED.fullmatch(line)) and found[1].lower() == algorithm:
            name, digest = found[2], found[3]
        else:
            continue
        if line.startswith("\\"):
            name = re.sub(r"\\[\\nr]", lambda escaped: _ESCAPES[escaped[0]], name)
        if len(digest) == 2 * _BYTES[algorithm]:
            yield name, digest
