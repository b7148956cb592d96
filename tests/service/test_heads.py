"""Heads that the fast lane reads, and those that leave a doubt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_async.service.heads import read_head, span_of

PLAIN = b"GET /v1/objects/b/x.tar?provider=gcp HTTP/1.1\r\nHost: h\r\nWds-Client: me\r\nRange: bytes=0-9\r\n\r\n"


def test_a_plain_head() -> None:
    head = read_head(PLAIN)
    assert head is not None
    assert (head.method, head.target, head.keep_alive) == ("GET", b"/v1/objects/b/x.tar?provider=gcp", True)
    assert head.fields == {b"host": b"h", b"wds-client": b"me", b"range": b"bytes=0-9"}


def test_head_and_close() -> None:
    head = read_head(b"HEAD /x HTTP/1.1\r\nHost: h\r\nConnection: Close\r\n\r\n")
    assert head is not None
    assert (head.method, head.keep_alive) == ("HEAD", False)


@pytest.mark.parametrize("name", ["If-None-Match", "If-Range", "If-Modified-Since", "if-unmodified-since", "If-Match"])
def test_conditions(name: str) -> None:
    head = read_head(f'GET /x HTTP/1.1\r\nHost: h\r\n{name}: "a"\r\n\r\n'.encode())
    assert head is not None
    assert head.conditional == (name != "If-Match")


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /x HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /x HTTP/1.0\r\nHost: h\r\n\r\n",
        b"GET /x\r\n\r\n",
        b"GET http://elsewhere/x HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /x HTTP/1.1\r\n\r\n",  # no host
        b"GET /x HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nRange: bytes=0-1\r\nrange: bytes=2-3\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, te\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nA: b\r\n folded\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nA: b\n\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nA: \xff\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nA: \x00\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
        b"get /x HTTP/1.1\r\nHost: h\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\n\r\nGET /y HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
def test_doubts(raw: bytes) -> None:
    assert read_head(raw) is None


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(PLAIN) - 5), st.binary(min_size=0, max_size=3))
def test_nothing_raises(at: int, other: bytes) -> None:
    head = read_head(PLAIN[:at] + other + PLAIN[at + 1 :])
    assert head is None or (head.target.startswith(b"/") and head.method in ("GET", "HEAD"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"bytes=0-0", (0, 1)),
        (b"bytes=0-9", (0, 10)),
        (b"bytes=90-", (90, 100)),
        (b"bytes=90-1000", (90, 100)),
        (b"bytes=99-99", (99, 100)),
        (b"bytes=100-", None),
        (b"bytes=5-4", None),
        (b"bytes=-5", None),
        (b"bytes=0-1,3-4", None),
        (b"bytes= 0-1", None),
        (b"Bytes=0-1", None),
        (b"items=0-1", None),
        (b"bytes=0-1 ", None),
        (b"bytes=+0-1", None),
        (b"bytes=0-9999999999999999999", None),
        (b"", None),
    ],
)
def test_spans(text: bytes, wanted: tuple[int, int] | None) -> None:
    assert span_of(text, 100) == wanted


def test_an_empty_object_has_no_span() -> None:
    assert span_of(b"bytes=0-0", 0) is None
    assert span_of(b"bytes=0-", 0) is None
