"""Reading by count from pieces of reused memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.tar.source import ByteSource


class Feed:
    """Pieces of ``data`` in one block of memory that is used again, as the engine does; fails where somebody
    still refers to the piece before."""

    def __init__(self, data: bytes, sizes: Iterator[int]) -> None:
        self.left, self.sizes = data, sizes
        self.block = bytearray()
        self.last: weakref.ref[memoryview] | None = None

    def __call__(self) -> memoryview | None:
        self.check()
        if not self.left:
            return None
        size = next(self.sizes)
        self.block[:], self.left = self.left[:size], self.left[size:]
        view = memoryview(self.block)
        self.last = weakref.ref(view)
        return view

    def check(self) -> None:
        assert self.last is None or self.last() is None, "a piece is still referred to"
        self.block.append(0)  # BufferError where a part of it is


def endless(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


@given(
    data=st.binary(max_size=300),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 90)), max_size=12),
)
def test_takes_and_skips_like_a_file(data: bytes, sizes: list[int], steps: list[tuple[bool, int]]) -> None:
    feed = Feed(data, endless(sizes))
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
    feed = Feed(data, endless(sizes))
    source = ByteSource(feed, "u")
    at = 0
    for size, back in steps:
        taken = source.take(size)
        assert taken == data[at : at + size]
        kept = max(len(taken) - back, 0)
        arrived = source.arrived
        source.put_back(taken[kept:])
        assert source.arrived == arrived == len(data) - len(feed.left)
        at += kept
        assert source.offset == at
    assert source.take(1000) == data[at:]
    source.drop()
    feed.check()


def test_what_was_put_back_goes_with_the_piece() -> None:
    feed = Feed(b"abcdef", endless([4]))
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
    source = ByteSource(Feed(b"abc", endless([2])), "u")
    assert source.take(1 << 50) == b"abc"


def test_errors_of_the_stream_pass() -> None:
    def read() -> memoryview | None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        ByteSource(read, "u").take(1)


def test_shows_no_secret() -> None:
    assert "hush" not in ByteSource(lambda: None, "https://h/x.tar?X-Amz-Signature=hush").shown
