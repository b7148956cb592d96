"""Checksums, numbers and records of a block."""

from __future__ import annotations

import io
import tarfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.tar.blocks import BLOCK, LOW_SUMS, checks, number, padded, records, text


def header(name: str = "a.txt") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return stream.getvalue()[:BLOCK]


def test_sums_are_those_of_zlib() -> None:
    assert zlib.adler32(header()) & 0xFFFF == LOW_SUMS[header()[148:156]]
    assert LOW_SUMS[b"no octal"] == -1


@given(at=st.integers(0, 511), flip=st.integers(1, 255))
def test_a_changed_byte_does_not_check(at: int, flip: int) -> None:
    block = bytearray(header())
    assert checks(bytes(block))
    block[at] ^= flip
    assert not checks(bytes(block)) or 148 <= at < 156  # the blank behind the checksum's digits says nothing


def test_a_header_that_lost_its_first_byte_is_none() -> None:
    two = b"".join(header(name) for name in ("000.bin", "001.bin"))
    assert (two[148:149], two[156:157]) == (b"0", b"0")  # so that the sum is what it was
    assert not checks(two[1 : 1 + BLOCK])
    assert checks(two[BLOCK:])


def test_numbers() -> None:
    assert number(b"0000017\0") == number(b"    17 \0") == 15
    assert number(bytes(8)) == 0
    assert number(b"\x80" + bytes(6) + b"\5") == 5
    assert number(b"\xff" * 8) == -1
    with pytest.raises(ValueError, match="invalid literal"):
        number(b"0000018\0")


def test_padding() -> None:
    assert [padded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_text_ends_with_its_nul() -> None:
    assert text(b"a\xff\0b") == "a\udcff"


def test_records() -> None:
    assert dict(records(b"9 path=x\n13 mtime=1.5\n" + bytes(40))) == {b"path": b"x", b"mtime": b"1.5"}
    assert dict(records(b"")) == {}
    for wrong in (b"8 path=x\n", b"path=x\n", b"9 pathxx\n\n", b"99999999999999999999 a=b\n"):
        with pytest.raises(ValueError, match="no record at its byte 0"):
            list(records(wrong))
