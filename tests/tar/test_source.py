"""Reading by count from pieces of reused memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.tar.test_parse import Feed
from wds_async.tar.source import ByteSource


@given(
    data=st.binary(max_size=300),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 90)), max_size=12),
)
def test_takes_and_skips_like_a_file(data: bytes, sizes: list[int], steps: list[tuple[bool, int]]) -> None:
    feed = Feed(data, sizes)
    source = ByteSource(feed, "u")
    at = 0
    for take, size in steps:
        expected = data[at : at + size]
        if take:
            assert source.take(size) == expected
        else:
            assert source.skip(size) == len(expected)
        at += len(expected)
        assert source.offset == at
    source.drop()
    feed.check()


@given(
    data=st.binary(max_size=300),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=12),
)
def test_what_is_put_back_comes_again(data: bytes, sizes: list[int], steps: list[tuple[int, int]]) -> None:
    feed = Feed(data, sizes)
    source = ByteSource(feed, "u")
    at = 0
    for size, back in steps:
        taken = source.take(size)
        assert taken == data[at : at + size]
        kept = max(len(taken) - back, 0)
        arrived = source.arrived
        source.put_back(taken[kept:])
        assert source.arrived == arrived == min(feed.at, len(data))
        at += kept
        assert source.offset == at
    assert source.take(1000) == data[at:]
    source.drop()
    feed.check()


def test_what_was_put_back_goes_with_the_piece() -> None:
    feed = Feed(b"abcdef", [4])
    source = ByteSource(feed, "u")
    source.put_back(source.take(5))
    source.drop()
    feed.check()
    assert source.take(9) == b""


def test_empty_pieces_are_passed_over_and_the_end_is_sticky() -> None:
    pieces = iter([memoryview(b""), memoryview(b"ab"), memoryview(b""), memoryview(b"c")])
    source = ByteSource(lambda: next(pieces, None), "u")
    assert source.take(9) == b"abc"
    assert source.take(1) == b""
    assert source.skip(1) == 0
    assert source.offset == 3


def test_a_lying_size_takes_no_memory() -> None:
    source = ByteSource(Feed(b"abc", [2]), "u")
    assert source.take(1 << 50) == b"abc"
