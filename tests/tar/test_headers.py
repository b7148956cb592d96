"""Headers one by one, as `parse` and `index` ask for them; every kind of archive is read in test_parse.py."""

from __future__ import annotations

import io
import tarfile

import pytest

from tests.servers.shards import make_tar
from wds_async.errors import CorruptShard, NotATar, TruncatedShard
from wds_async.tar.headers import BLOCK, Headers, pass_over, shown
from wds_async.tar.resync import resync
from wds_async.tar.source import ByteSource

LONG = "d/" + "n" * 200


def archive(format: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as tar:
        for name, data in (("a.txt", b"one"), (LONG, b"x" * 700)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def source(data: bytes) -> ByteSource:
    pieces = iter([memoryview(data)])
    return ByteSource(lambda: next(pieces, None), "x.tar")


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


def test_where_a_bad_header_leaves_the_source() -> None:
    data = archive()[: 2 * BLOCK] + b"x" * BLOCK
    walked = source(data)
    headers = Headers(walked)
    headers.next(-1)
    pass_over(walked, BLOCK, 0)
    with pytest.raises(CorruptShard) as info:
        headers.next(-1)
    assert (info.value.shard, info.value.offset) == ("x.tar", 2 * BLOCK)
    assert walked.offset == 2 * BLOCK
    assert walked.take(BLOCK) == b"x" * BLOCK
    walked.drop()


def test_errors_know_their_place() -> None:
    for data, offset in ((archive()[: BLOCK + 3], BLOCK + 3), (archive()[: 2 * BLOCK + 9], 2 * BLOCK + 9)):
        walked = source(data)
        headers = Headers(walked)
        headers.next(-1)
        if offset > 2 * BLOCK:
            pass_over(walked, BLOCK, 0)
        with pytest.raises(TruncatedShard) as info:
            headers.next(-1) if offset > 2 * BLOCK else pass_over(walked, BLOCK, 0)
        assert (info.value.shard, info.value.offset) == ("x.tar", offset)
    with pytest.raises(NotATar) as begin:
        Headers(source(b"x" * BLOCK)).next(-1)
    assert begin.value.offset == 0


def test_a_name_is_shown_up_to_a_point() -> None:
    assert shown("n" * 300) == repr("n" * 200 + "…")


@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_a_hole_of_zeros_before_a_header_is_damage(blocks: int) -> None:
    """What it hides would be lost silently, and a sample might come without the fields that were there."""
    whole = make_tar([("a.txt", b"x" * 100), ("a.cls", b"x" * 512 * (blocks - 1)), ("b.txt", b"y")])
    hole = 2 * BLOCK
    headers = Headers(source(whole[:hole] + bytes(BLOCK * blocks) + whole[hole + BLOCK * blocks :]))
    assert headers.next(-1) == ("a.txt", 100, 0)
    pass_over(headers.source, BLOCK, 0)
    with pytest.raises(CorruptShard, match=f"zeros from byte {hole} to {hole + BLOCK * blocks}") as caught:
        headers.next(-1)
    assert caught.value.offset == hole
    assert resync(headers.source, since=hole) == BLOCK * blocks
    assert headers.next(-1) == ("b.txt", 1, hole + BLOCK * blocks)


@pytest.mark.parametrize("record", [2 * BLOCK, 20 * BLOCK, 64 * BLOCK])
def test_archives_that_end_as_programs_end_them_are_read_on(record: int) -> None:
    archive = make_tar([("a.txt", b"x" * 100)])[: 2 * BLOCK]
    ended = archive + bytes(2 * BLOCK if record == 2 * BLOCK else record - 2 * BLOCK)
    headers = Headers(source(ended * 3))
    for n in range(3):
        assert headers.next(-1) == ("a.txt", 100, n * len(ended))
        pass_over(headers.source, BLOCK, 0)
    assert headers.next(-1) is None
