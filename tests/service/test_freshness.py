"""Copies whose freshness has lapsed: served at once or on error, and never against what a client asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin
from tests.service.serving import Inside, ask, until
from tests.transfer.reading import KIB, data
from wds_async.config import RetryPolicy

OLD, NEW = data(300 * KIB), data(300 * KIB)[::-1]
SETTINGS = {"folder": "cache", "freshness_s": 1e-9, "revalidate_timeout_s": 0.3}
"""Copies whose freshness is over before the next request."""
PATIENT = {"retry": RetryPolicy()}
"""Reads wait five minutes for their store; `ask` gives up after half a minute."""


def fill(service: Inside, origin: Origin, count: int) -> list[str]:
    """The service's URLs of so many objects that it has whole."""
    for number in range(count):
        origin.add(f"/d/{number}.tar", OLD + bytes([number]))
    urls = [f"{service.base}/ais/b/{number}.tar" for number in range(count)]
    assert all(ask(url)[0] == 200 for url in urls)
    service.stored()
    return urls


def figures(service: Inside) -> Any:
    return service.context.cache.statistics()


@pytest.mark.parametrize("window_s", [0.0, 3600.0])
@pytest.mark.parametrize("fault", [{"stall_after": BEFORE_HEAD}, {"status": 503}], ids=["silent", "503"])
def test_a_store_that_is_away_delays_no_whole_copy(
    serve: Callable[..., Inside], origin: Origin, window_s: float, fault: dict[str, Any]
) -> None:
    service = serve(transfer=PATIENT, stale_while_revalidate_s=window_s)
    urls = fill(service, origin, 8)
    origin.forget()
    origin.behave(**fault)
    for _ in range(4):
        for number, url in enumerate(urls):
            status, _, body = ask(url)
            assert (status, body == OLD + bytes([number])) == (200, True)
    # The circuit breaker: three requests show that the store is down, then probes go out, and not one for each request.
    service.stored()
    assert len(origin.requests) <= 16
    assert figures(service).stale >= 32
    assert figures(service).unanswered > 0


def test_a_replaced_object_is_served_once_more_and_then_as_it_is(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve()
    (url,) = fill(service, origin, 1)
    origin.add("/d/0.tar", NEW)
    assert ask(url)[2] == OLD + b"\0"
    until(lambda: figures(service).changed == 1)
    assert ask(url)[2] == NEW
    page = ask(f"{service.base}/metrics")[2].decode()
    assert 'wds_cache_revalidations_total{result="changed"} 1.0' in page


def test_outside_the_window_the_store_is_asked_first(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve(stale_while_revalidate_s=0)
    (url,) = fill(service, origin, 1)
    origin.add("/d/0.tar", NEW)
    assert ask(url)[2] == NEW
    assert figures(service).stale == 0


@pytest.mark.parametrize(
    ("query", "fields"),
    [("", {"Cache-Control": "no-cache"}), ("", {"Cache-Control": "max-age=0, no-transform"}),
     ("", {"Pragma": "no-cache"}), ("?latest-ver=true", {})],
)  # fmt: skip
def test_who_insists_has_the_stores_own_answer(
    serve: Callable[..., Inside], origin: Origin, query: str, fields: dict[str, str]
) -> None:
    service = serve(freshness_s=3600)
    (url,) = fill(service, origin, 1)
    origin.add("/d/0.tar", NEW)
    assert ask(url)[2] == OLD + b"\0"
    assert ask(url + query, **fields)[2] == NEW
    origin.behave(status=503)
    assert ask(url + query, **fields)[0] == 502
    assert ask(url)[2] == NEW


def test_a_version_that_a_client_names_is_the_one_it_gets(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve()
    (url,) = fill(service, origin, 1)
    old = ask(url, "HEAD")[1]["etag"]
    origin.add("/d/0.tar", NEW)
    new = ask(f"{origin.base}/d/0.tar", "HEAD")[1]["etag"]
    # The copy is the old one still: whoever means that gets it, and whoever means the new one makes it be fetched.
    status, fields, body = ask(url, If_Match=new)
    assert (status, fields["etag"], body == NEW) == (200, new, True)
    assert ask(url, If_Match=old)[0] == 412


def test_a_stale_copy_is_the_version_that_it_says(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve(freshness_s=3600)
    (url,) = fill(service, origin, 1)
    old = ask(url, "HEAD")[1]["etag"]
    origin.add("/d/0.tar", NEW)
    status, fields, body = ask(url, If_Match=old, Range="bytes=0-99")
    assert (status, fields["etag"], body) == (206, old, OLD[:100])


@pytest.mark.parametrize("window_s", [0.0, 3600.0])
def test_what_no_validator_pins_is_fetched_anew(serve: Callable[..., Inside], origin: Origin, window_s: float) -> None:
    origin.behave(headers={"ETag": None, "Last-Modified": None})
    service = serve(stale_while_revalidate_s=window_s, transfer=PATIENT)
    (url,) = fill(service, origin, 1)
    origin.add("/d/0.tar", (OLD + b"\0")[::-1])  # as long as it was
    assert ask(url)[2] == (OLD + b"\0")[::-1]
    service.stored()
    origin.forget()
    origin.behave(stall_after=BEFORE_HEAD)
    assert ask(url)[2] == (OLD + b"\0")[::-1]  # better than nothing


def test_a_refusal_reaches_the_client_after_the_copy(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve()
    (url,) = fill(service, origin, 1)
    origin.behave(status=403)
    assert ask(url)[0] == 200
    until(lambda: ask(url)[0] == 403)


def test_a_removed_object_is_served_once_more_and_then_missing(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve()
    (url,) = fill(service, origin, 1)
    del origin.files["/d/0.tar"]
    assert ask(url)[0] == 200
    until(lambda: ask(url)[0] == 404)


def test_after_a_while_a_copy_is_no_answer(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve(stale_while_revalidate_s=0, stale_if_error_s=0)
    (url,) = fill(service, origin, 1)
    origin.behave(status=503)
    assert ask(url)[0] == 502
