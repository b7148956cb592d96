"""Ranges by aiohttp: where a redirect leads, and back (under faults: `tests/storage/test_checked.py`)."""

from __future__ import annotations

import asyncio

import pytest

from tests.servers.origin import Origin
from wds_async.storage.base import RedirectLoop, Request
from wds_async.storage.checked import CheckedRanges
from wds_async.storage.http.backend import HttpBackend, RangeRequests, always
from wds_async.storage.http.messages import version_of


async def parts(request: Request, count: int, failing: int = -1, origin: Origin | None = None) -> bytes:
    client = HttpBackend()
    try:
        ranges = await CheckedRanges.of(RangeRequests(client, always(request)), version_of, 30.0)
        assert ranges is not None
        got = b""
        for at in range(count):
            if at == failing and origin is not None:
                origin.behave(path="/cdn", times=1, status=403)
            got += await ranges.read(at, at + 1)
        return got
    finally:
        await client.close()


@pytest.mark.parametrize(("keeps", "asked"), [(True, 1), (False, 5)])
def test_a_redirect_is_kept_where_it_may(origin: Origin, keeps: bool, asked: int) -> None:
    origin.add("cdn", b"0123")
    origin.behave(path="/hub", redirect="/cdn")
    assert asyncio.run(parts(Request(origin.url("hub"), keeps_redirect=keeps), 4)) == b"0123"
    assert len([request for request in origin.requests if request.path == "/hub"]) == asked


def test_a_place_that_expired_is_asked_for_anew(origin: Origin) -> None:
    origin.add("cdn", b"0123")
    origin.behave(path="/hub", redirect="/cdn")
    assert asyncio.run(parts(Request(origin.url("hub")), 4, 2, origin)) == b"0123"
    assert len([request for request in origin.requests if request.path == "/hub"]) == 2


def test_proofs_stay_at_their_origin_and_the_range_does_not(origin: Origin) -> None:
    origin.add("cdn", b"0123")
    origin.behave(path="/hub", redirect=origin.url("cdn").replace("127.0.0.1", "localhost"))
    asyncio.run(parts(Request(origin.url("hub"), (("Authorization", "secret"),)), 1))
    seen = [request.headers for request in origin.requests if request.path == "/cdn"]
    assert seen
    assert all("authorization" not in headers and "range" in headers for headers in seen)


def test_a_circle(origin: Origin) -> None:
    origin.behave(redirect="/round")
    with pytest.raises(RedirectLoop, match=r"in a circle: .*/x → .*/round → .*/round"):
        asyncio.run(parts(Request(origin.url("x")), 1))
