"""Headers one by one, as `parse` and `index` ask for them; every kind of archive is read in test_parse.py."""

from __future__ import annotations

import io
import tarfile
import zlib

import pytest

from wds_async.errors import CorruptShard, TruncatedShard
from wds_async.tar.headers import BLOCK, LOW_SUMS, Headers, pass_over, shown
from wds_async.tar.source import Source

LONG = "d/" + "n" * 200


def archive(format: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as tar:
        for name, data in (("a.txt", b"one"), (LONG, b"x" * 700)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def source(data: bytes) -> Source:
    pieces = iter([memoryview(data)])
    return Source(lambda: next(pieces, None), "x.tar")


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_each_next_header_with_the_place_of_its_data(format: int) -> None:
    data = archive(format)
    walked = source(data)
    headers, found = Headers(walked), []
    while (entry := headers.next(-1)) is not None:
        name, size, offset = entry
        found.append((name, data[walked.offset : walked.offset + size], offset))
        pass_over(walked, -(-size // BLOCK) * BLOCK, offset)
    assert found == [("a.txt", b"one", 0), (LONG, b"x" * 700, 2 * BLOCK)]
    walked.drop()


def test_an_extension_header_that_was_read_before_belongs_to_the_next_member() -> None:
    walked = source(archive()[: 2 * BLOCK] * 2)
    headers = Headers(walked)
    headers.next(-1)
    pass_over(walked, BLOCK, 0)
    assert headers.next(777) == ("a.txt", 3, 777)
    walked.drop()


def test_data_that_is_not_there_is_named_by_its_header() -> None:
    walked = source(archive()[: BLOCK + 100])
    Headers(walked).next(-1)
    with pytest.raises(TruncatedShard, match=r"x\.tar: the shard ends at byte 612, .*member at byte 0"):
        pass_over(walked, BLOCK, 0)
    walked.drop()


def test_an_extension_header_without_its_member() -> None:
    walked = source(archive()[2 * BLOCK : 4 * BLOCK] + b"\1" * BLOCK)
    with pytest.raises(CorruptShard, match="where the extension header at byte 0 needs one"):
        Headers(walked).next(-1)
    walked.drop()


def test_sums_are_those_of_zlib() -> None:
    header = archive()[:BLOCK]
    assert zlib.adler32(header) & 0xFFFF == LOW_SUMS[header[148:156]]
    assert LOW_SUMS[b"no octal"] == -1
    assert shown("n" * 300) == repr("n" * 200 + "…")
