"""Digests, and what answers and files say: taken only where it is surely that of the whole object as it arrives."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping

import pytest

from wds_async.storage.base import Checksum
from wds_async.storage.checksums import (
    aistore,
    amazon,
    amazon_etag,
    azure,
    digest_of,
    google,
    google_object,
    hugging_face,
    in_file,
    in_manifest,
    representation,
)

NINE = b"123456789"
MD5, SHA256, SHA512 = (hashlib.new(name, NINE).digest() for name in ("md5", "sha256", "sha512"))
CRC32C = bytes.fromhex("e3069283")  # the check value of CRC-32/ISCSI
PART = {"content-range": "bytes 0-99/1000"}
ALL = {"content-range": "bytes 0-999/1000"}


def b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def said(found: Checksum | None) -> tuple[str, bytes] | None:
    return found and (found.algorithm, found.digest)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("crc32c", "e3069283"),
        ("crc32", f"{zlib.crc32(NINE):08x}"),
        ("md5", MD5.hex()),
        ("sha1", hashlib.sha1(NINE).hexdigest()),
        ("sha256", SHA256.hex()),
        ("sha512", SHA512.hex()),
        ("xxhash", "8cb841db40e6ae83"),  # XXH64 of these nine, seed 0
    ],
)
def test_digests_of_writable_pieces(algorithm: str, expected: str) -> None:
    digest = digest_of(algorithm)
    for piece in (NINE[:4], NINE[4:]):
        digest.update(memoryview(bytearray(piece)))
    assert digest.digest().hex() == expected


def test_an_unknown_digest() -> None:
    with pytest.raises(ValueError, match="crc64nvme"):
        digest_of("crc64nvme")


GOOGLE = f"crc32c={b64(CRC32C)},md5={b64(MD5)}"
AMAZON = {"x-amz-checksum-crc32c": b64(CRC32C), "x-amz-checksum-type": "FULL_OBJECT"}
ETAG = {"etag": f'"{MD5.hex()}"'}
AIS = {"ais-checksum-type": "crc32c", "ais-checksum-value": CRC32C.hex()}
REPR = {"repr-digest": f"unknown=:AAAA:, sha-512=:{b64(SHA512)}:, sha-256=:{b64(SHA256)}:"}
OF_CRC, OF_MD5, OF_SHA256 = ("crc32c", CRC32C), ("md5", MD5), ("sha256", SHA256)


@pytest.mark.parametrize(
    ("parse", "fields", "expected"),
    [
        (google, {"x-goog-hash": GOOGLE, **PART}, OF_CRC),
        (google, {"x-goog-hash": f"md5={b64(MD5)}, crc32c={b64(CRC32C)}"}, OF_CRC),
        (google, {"x-goog-hash": f"md5={b64(MD5)}"}, OF_MD5),
        (google, {"x-goog-hash": GOOGLE, "x-goog-stored-content-encoding": "identity"}, OF_CRC),
        (google, {"x-goog-hash": GOOGLE, "x-goog-stored-content-encoding": "gzip"}, None),
        (google, {"x-goog-hash": GOOGLE, "content-encoding": "gzip"}, None),
        (google, {"x-goog-hash": "crc32c=nonsense"}, None),
        (google, {"x-goog-hash": f"crc32c={b64(MD5)}"}, None),
        (google, {}, None),
        (amazon, AMAZON, OF_CRC),
        (amazon, {**AMAZON, **ALL}, OF_CRC),
        (amazon, {**AMAZON, **PART}, None),  # may be that of a part
        (amazon, {**AMAZON, "x-amz-checksum-type": "COMPOSITE"}, None),
        (amazon, {"x-amz-checksum-crc32c": f"{b64(CRC32C)}-3"}, None),
        (amazon, {"x-amz-checksum-sha256": b64(SHA256), "x-amz-checksum-crc64nvme": b64(bytes(8))}, OF_SHA256),
        (amazon, {"x-amz-checksum-crc64nvme": b64(bytes(8)), "x-amz-checksum-type": "FULL_OBJECT"}, None),
        (amazon_etag, ETAG, OF_MD5),
        (amazon_etag, {"etag": f'"{MD5.hex()}-2"'}, None),
        (amazon_etag, {**ETAG, "x-amz-server-side-encryption": "AES256"}, OF_MD5),
        (amazon_etag, {**ETAG, "x-amz-server-side-encryption": "aws:kms:dsse"}, None),
        (amazon_etag, {**ETAG, "x-amz-server-side-encryption-customer-algorithm": "AES256"}, None),
        (azure, {"x-ms-blob-content-md5": b64(MD5), "content-md5": b64(bytes(16)), **PART}, OF_MD5),
        (azure, {"content-md5": b64(MD5)}, OF_MD5),
        (azure, {"content-md5": b64(MD5), **PART}, None),  # the range's
        (aistore, AIS, OF_CRC),
        (aistore, {**AIS, **ALL}, OF_CRC),
        (aistore, {**AIS, **PART}, None),  # the range's, where the bucket is set so
        (aistore, {"ais-checksum-type": "xxhash2", "ais-checksum-value": "0" * 16}, ("xxhash", bytes(8))),
        (aistore, {"ais-checksum-type": "none", "ais-checksum-value": ""}, None),
        (representation, {**REPR, **PART}, OF_SHA256),
        (representation, {"digest": f"SHA-256={b64(SHA256)}"}, OF_SHA256),
        (representation, {**REPR, "content-encoding": "gzip"}, None),
        (representation, {"content-md5": b64(MD5)}, OF_MD5),
        (representation, {"content-md5": b64(MD5), **PART}, None),
        (hugging_face, {"x-linked-etag": f'"{SHA256.hex()}"'}, OF_SHA256),
        (hugging_face, {"x-linked-etag": '"94e66df8cd09d410c62d9e0dc59d3a884e458e05"'}, None),  # git's, of its blob
    ],
)
def test_heads(
    parse: Callable[[Mapping[str, str]], Checksum | None],
    fields: Mapping[str, str],
    expected: tuple[str, bytes] | None,
) -> None:
    assert said(parse(fields)) == expected


def test_descriptions_of_google() -> None:
    assert said(google_object({"crc32c": b64(CRC32C), "md5Hash": b64(MD5)})) == OF_CRC
    assert said(google_object({"md5Hash": b64(MD5)})) == OF_MD5
    assert google_object({"crc32c": b64(CRC32C), "contentEncoding": "gzip"}) is None
    assert google_object({}) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{SHA256.hex()}\n", True),
        (f"{SHA256.hex().upper()}  x.tar\r\n", True),
        (f"{SHA256.hex()} */elsewhere/x.tar\n", True),
        (f"SHA256 (x.tar) = {SHA256.hex()}\n", True),
        (f"\\{SHA256.hex()}  a\\nb\n", True),
        (f"{'0' * 64}  y.tar\n{SHA256.hex()}  ./x.tar\n", True),
        (f"{'0' * 64}  y.tar\n{SHA256.hex()}  z.tar\n", False),
        (f"{MD5.hex()}  x.tar\n", False),
        (f"MD5 (x.tar) = {MD5.hex()}\n", False),
        ("<html><body>not found</body></html>", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_a_file_beside(text: str, found: bool) -> None:
    assert said(in_file(text, "sha256", "x.tar", "x.tar.sha256")) == (OF_SHA256 if found else None)


def test_a_manifest() -> None:
    other = "f" * 64
    text = f"# made by hand\n{SHA256.hex()}  ./x.tar\n{other} *y z.tar\n\\{other}  a\\\\b\n{other}  t\n{'0' * 64}  t\n"
    found = in_manifest(text, "sha256", "SHA256SUMS")
    assert said(found["x.tar"]) == OF_SHA256
    assert found["x.tar"].source == "SHA256SUMS"
    assert set(found) == {"x.tar", "y z.tar", "a\\b"}  # of two sums for t neither is believed
