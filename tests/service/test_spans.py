"""Which bytes a request asks for."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.service.refusals import Refusal
from wds_async.service.spans import Span, asked, beginning


@pytest.mark.parametrize(
    ("header", "first"),
    [(None, 0), ("bytes=7-", 7), (" Bytes = 7 - 9", 7), ("bytes=-7", 0), ("bytes=7-8,9-9", 0), ("items=7-8", 0)],
)
def test_where_it_begins_as_far_as_one_can_tell_without_the_size(header: str | None, first: int) -> None:
    assert beginning(header) == first


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", Span(0, 1)),
        ("bytes=2-4", Span(2, 5)),
        ("bytes=8-", Span(8, 10)),
        ("bytes=8-99", Span(8, 10)),
        ("bytes=-3", Span(7, 10)),
        ("bytes=-99", Span(0, 10)),
        ("BYTES = 1 - 2 ", Span(1, 3)),
    ],
)
def test_one_range(header: str, span: Span) -> None:
    assert asked(header, 10) == span
    assert span.content_range(10) == f"bytes {span.start}-{span.stop - 1}/10"


@pytest.mark.parametrize(
    "header", [None, "", "bytes=4-2", "bytes=0-1,4-5", "lines=1-2", "bytes=", "bytes=-", "bytes=a-b", "bytes=1٢-"]
)
def test_what_is_no_single_range_means_the_whole(header: str | None) -> None:
    assert asked(header, 10) is None


@pytest.mark.parametrize(("header", "size"), [("bytes=10-", 10), ("bytes=10-12", 10), ("bytes=-0", 10), ("bytes=0-", 0),
                                              ("bytes=-5", 0)])  # fmt: skip
def test_behind_the_end(header: str, size: int) -> None:
    with pytest.raises(Refusal) as caught:
        asked(header, size)
    assert caught.value.status == 416
    assert caught.value.fields == {"Content-Range": f"bytes */{size}"}


def test_numbers_that_nobody_means_cost_nothing() -> None:
    assert asked(f"bytes={'9' * 100_000}-", 10) is None


@given(st.text(max_size=30), st.integers(0, 1 << 50))
def test_whatever_comes_is_a_span_within_or_the_whole_or_416(text: str, size: int) -> None:
    for header in (text, f"bytes={text}"):
        with contextlib.suppress(Refusal):
            span = asked(header, size)
            assert span is None or 0 <= span.start < span.stop <= size
