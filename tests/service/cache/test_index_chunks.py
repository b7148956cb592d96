"""Which chunks are there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wds_async.service.cache.index import PAGE, Chunks


def test_counts_and_bounds() -> None:
    chunks = Chunks(2500, 1000)
    assert chunks.count == 3
    assert [chunks.bounds(number) for number in range(3)] == [(0, 1000), (1000, 2000), (2000, 2500)]
    assert chunks.length(2) == 500
    assert list(chunks.over(999, 2001)) == [0, 1, 2]
    assert list(chunks.over(5, 5)) == []
    assert Chunks(0, 1000).settled
    assert Chunks(None, 1000).count is None
    assert not Chunks(None, 1000).whole


def test_there_trusted_and_settled() -> None:
    chunks = Chunks(2500, 1000)
    chunks.load([(0, Chunks(2500, 1000).page(0))])
    chunks.add(0, 7)
    chunks.add(2, 9, on_probation=True)
    assert (chunks.ready(10, 9999), chunks.ready(2100, 9999), chunks.ready(2100, 9999, on_probation=True)) == (
        1000, 2100, 2500,
    )  # fmt: skip
    chunks.add(1, 8)
    assert chunks.whole
    assert not chunks.settled
    chunks.on_probation.clear()
    assert chunks.settled
    chunks.drop(1)
    assert 1 not in chunks
    assert not chunks.whole


@given(st.sets(st.integers(0, 3 * PAGE)), st.integers(0, 3 * PAGE))
def test_pages_bring_back_what_stays(numbers: set[int], passing: int) -> None:
    chunks = Chunks((3 * PAGE + 1) * 10, 10)
    for number in numbers:
        chunks.add(number, number * 31, on_probation=number == passing)
    again = Chunks(chunks.size, 10)
    again.load((page, chunks.page(page)) for page in range(4))
    assert again.numbers() == sorted(numbers - {passing})
    assert all(again.crc(number) == number * 31 and not again.trusted(number) for number in again.numbers())


@given(st.sets(st.integers(0, 20)), st.integers(0, 210), st.integers(0, 250))
def test_ready_is_what_is_there_in_a_row(numbers: set[int], start: int, count: int) -> None:
    chunks = Chunks(205, 10)
    for number in numbers:
        chunks.add(number, 0)
    there = {at for number in numbers for at in range(*chunks.bounds(number))}
    end = start
    while end < min(start + count, 205) and end in there:
        end += 1
    assert chunks.ready(start, start + count) == end


def test_nonsense_in_a_page_is_passed_over() -> None:
    chunks = Chunks(2500, 1000)
    chunks.load([(0, b"\x00\x00abcd\x63\x00abcd\x01"), (9, b"")])
    assert chunks.numbers() == [0]
