"""Bodies that cannot be cut: started again where they broke, never mixed, never silently short."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers import Origin
from tests.servers.behaviour import short_etag
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick
from wds_async.errors import ObjectChanged, ShardNotFound, TransferError

PART = 256 * KIB
WAYS: list[dict[str, Any]] = [{"ignore_range": True}, {"chunked": True, "ignore_range": True}, {"gzip": True}]


@pytest.mark.parametrize("way", WAYS, ids=["length", "chunked", "gzip"])
@pytest.mark.parametrize("cut", ["reset", "fin"])
@pytest.mark.parametrize("after", [0, 1000, 500_000])
def test_a_broken_stream_goes_on_where_it_was(origin: Origin, way: dict[str, Any], cut: str, after: int) -> None:
    contents = [data(4 * PART + 3, i) for i in range(3)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(path="/1.tar", times=2, when=lambda r: r.range is None, cut_after=after, cut=cut, **way)
    origin.behave(**way)
    assert bytes_of(urls) == contents


@pytest.mark.parametrize("way", WAYS, ids=["length", "chunked", "gzip"])
def test_a_stream_that_always_breaks_is_one_error_behind_its_good_bytes(origin: Origin, way: dict[str, Any]) -> None:
    content = data(4 * PART)
    url, good = origin.add("x.tar", content), origin.add("good.tar", b"good")
    origin.behave(path="/x.tar", cut_after=300_000, **way)
    (got, error), following = outcomes([url, good])
    assert isinstance(error, TransferError)
    assert f"{url} at byte {len(got)}" in str(error)
    assert got == content[: len(got)]
    assert following == (b"good", None)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=["length", "chunked", "gzip"])
def test_a_stream_that_changes_between_attempts(origin: Origin, way: dict[str, Any], direct: bool) -> None:
    content = data(4 * PART)
    url = origin.add("x.tar", content)
    # Some bytes come, the connection breaks, and then the object is another one.
    origin.behave(times=2 if direct else 1, cut_after=600_000, etag='"one"', **way)
    origin.behave(etag='"two"', **way)
    ((got, error),) = outcomes([url], quick(direct=direct))
    assert isinstance(error, ObjectChanged) or (error is None and got == content)
    assert got == content[: len(got)]


def test_a_stream_that_became_shorter_is_not_complete(origin: Origin) -> None:
    content = data(4 * PART)
    url = origin.add("x.tar", content)
    same = {"headers": {"etag": None, "last-modified": None}, "ignore_range": True}
    origin.behave(when=lambda r: r.range is None, times=1, cut_after=600_000, **same)
    origin.behave(when=lambda r: r.range is None, body=content[:1000], **same)
    origin.behave(**same)
    ((got, error),) = outcomes([url])
    assert error is not None
    assert got == content[: len(got)]


@pytest.mark.parametrize("status", [500, 503, 429])
@pytest.mark.parametrize("direct", [True, False])
def test_an_error_page_is_never_read_as_the_shard(origin: Origin, status: int, direct: bool) -> None:
    contents = [data(2 * PART, i) for i in range(3)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(when=lambda r: r.range is None and r.path != "/0.tar", times=4, status=status, body=b"page" * 100)
    origin.behave(ignore_range=True)
    assert bytes_of(urls, quick(direct=direct, retry=quick().retry.__class__(max_attempts=9, base_s=0.001))) == contents


def test_an_unread_error_page_does_not_poison_its_connection(origin: Origin) -> None:
    contents = [data(2 * PART, i) for i in range(6)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    forged = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    origin.behave(path="/1.tar", when=lambda r: r.range is None, status=404, body=forged, rate_bytes_s=1000)
    origin.behave(ignore_range=True)
    found = outcomes(urls)
    assert isinstance(found[1][1], ShardNotFound)
    assert [got for got, _ in found] == [contents[0], b"", *contents[2:]]


def test_redirects_of_streams(origin: Origin) -> None:
    content = data(3 * PART)
    origin.add("real.tar", content)
    origin.behave(path="/alias.tar", redirect="/real.tar")
    origin.behave(ignore_range=True)
    assert bytes_of([origin.url("alias.tar")] * 3) == [content] * 3


@pytest.mark.parametrize("size", [4 * PART, 5 * PART])
@pytest.mark.parametrize("fields", [{}, {"etag": None}, {"etag": None, "last-modified": None}], ids=str)
def test_the_rest_of_another_object_by_a_server_that_no_longer_cuts(size: int, fields: dict[str, Any]) -> None:
    """Its identity is compared with that of the ranges that were read before: two objects are never put together."""
    old, new = data(4 * PART), data(size, 1)
    with Origin(etag_of=lambda content: f"W/{short_etag(content)}") as server:
        url = server.add("x.tar", old)
        server.behave(when=lambda request: (request.range or "").startswith("bytes=0-"), headers=fields)
        server.behave(ignore_range=True, content=lambda request, content: new, headers=fields)
        ((got, error),) = outcomes([url])
    if fields and size == len(old):
        assert error is None  # nothing tells them apart: one date, one size
    else:
        assert isinstance(error, ObjectChanged)
        assert got == old[: len(got)]
        assert got
