"""Faults of a server, and what an attempt makes of them: healed byte for byte, or one error with the whole story."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin
from tests.transfer.reading import KIB, MIB, QUICK, bytes_of, data, open_fds, outcomes, quick, snapshot, spans
from wds_async.config import RetryPolicy
from wds_async.errors import AccessDenied, FetchTimeout, ObjectChanged, ShardNotFound, TransferError, UrlError
from wds_async.transfer.stats import Counters

PART = 256 * KIB


def _beginnings(origin: Origin, path: str) -> int:
    """How often the beginning of a shard was asked for; more parts may be asked for at the same time."""
    starts = ("bytes=0-", "None")
    return sum(request.path == path and str(request.range).startswith(starts) for request in origin.requests)


@pytest.mark.parametrize("cut", ["reset", "fin"])
@pytest.mark.parametrize("after", [0, 1, 1000, 60_000])
def test_a_break_is_healed_from_where_it_happened(origin: Origin, cut: str, after: int) -> None:
    content = data(6 * PART)
    url = origin.add("x.tar", content)
    origin.behave(cut_after=after, cut=cut, skip=1, times=1)
    counters = Counters()
    assert bytes_of([url], counters=counters) == [content]
    first: dict[int, int] = {}
    again: list[int] = []
    for start, stop in spans(origin.requests):
        if first.setdefault(stop, start) != start:
            again.append(start - first[stop])
    if after:
        assert again == [after]
    else:
        assert len(origin.requests) == len(first) + 1
    assert snapshot(counters).retries == 1
    assert snapshot(counters).wire_bytes == len(content)


def test_only_missing_bytes_are_asked_for_again(origin: Origin) -> None:
    content = data(PART)
    url = origin.add("x.tar", content)
    origin.behave(when=lambda request: request.range == "bytes=0-65535", cut_after=10_000)
    origin.behave(when=lambda request: request.range == "bytes=10000-65535", cut_after=20_000, cut="fin")
    assert bytes_of([url]) == [content]
    assert [span for span in spans(origin.requests) if span[1] == 65536] == [
        (0, 65536),
        (10_000, 65536),
        (30_000, 65536),
    ]


def test_a_line_that_always_breaks_goes_on_as_long_as_bytes_come(origin: Origin) -> None:
    content = data(60_000)
    url = origin.add("x.tar", content)
    origin.behave(cut_after=5_000)
    assert bytes_of([url]) == [content]
    assert sum(start < len(content) for start, _ in spans(origin.requests)) == 12


@pytest.mark.parametrize("cut", ["reset", "fin"])
@pytest.mark.parametrize("after", [BEFORE_HEAD, 0])
def test_a_break_without_a_byte_ends_after_the_attempts(origin: Origin, cut: str, after: int) -> None:
    url = origin.add("x.tar", data(60_000))
    good = origin.add("good.tar", b"good")
    origin.behave(path="/x.tar", cut_after=after, cut=cut)
    (got, error), following = outcomes([url, good])
    assert isinstance(error, TransferError)
    assert f"{url} at byte 0: " in str(error)
    assert "after 3 attempts" in str(error)
    assert (got, following) == (b"", (b"good", None))
    # A kept connection that breaks before its answer is tried once more for free.
    assert _beginnings(origin, "/x.tar") in (3, 4)


def test_good_bytes_come_before_the_error(origin: Origin) -> None:
    content = data(60_000)
    url = origin.add("x.tar", content)
    origin.behave(when=lambda request: request.range == "bytes=0-65535", cut_after=10_000)
    origin.behave(when=lambda request: request.range != "bytes=0-65535", status=500)
    ((got, error),) = outcomes([url])
    assert got == content[:10_000]
    assert "at byte 10000: the server answered 500" in str(error)


def test_a_server_that_closes_at_once(origin: Origin) -> None:
    origin.hang_up_at_once = True
    ((got, error),) = outcomes([origin.add("x.tar", b"x")])
    assert isinstance(error, TransferError)
    assert re.search(r"x.tar at byte 0: the (server closed|connection was lost).* after 3 attempts", str(error))
    assert got == b""


@pytest.mark.parametrize("after", [BEFORE_HEAD, 0, 10_000])
def test_a_stall_is_given_up_and_made_again(origin: Origin, after: int) -> None:
    content = data(200_000)
    url = origin.add("x.tar", content)
    origin.behave(stall_after=after, skip=1, times=1)
    assert bytes_of([url], quick(stall_timeout_s=0.3)) == [content]
    origin.release()


def test_a_stall_that_stays_is_a_timeout(origin: Origin) -> None:
    url = origin.add("x.tar", data(20_000))
    origin.behave(stall_after=BEFORE_HEAD)
    ((_, error),) = outcomes([url], quick(stall_timeout_s=0.2, retry=RetryPolicy(max_attempts=2, base_s=0.001)))
    origin.release()
    assert isinstance(error, FetchTimeout)
    assert "no byte arrived" in str(error)
    assert "WDS_TIMEOUT" in str(error)


@pytest.mark.parametrize(
    ("status", "kind", "attempts"),
    [
        (400, TransferError, 1),
        (401, AccessDenied, 1),
        (403, AccessDenied, 1),
        (404, ShardNotFound, 1),
        (408, TransferError, 3),
        (410, ShardNotFound, 1),
        (412, ObjectChanged, 1),
        (416, TransferError, 1),
        (425, TransferError, 3),
        (429, TransferError, 3),
        (500, TransferError, 3),
        (501, TransferError, 1),
        (503, TransferError, 3),
        (204, TransferError, 1),
        (304, TransferError, 1),
        (299, TransferError, 1),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_statuses(origin: Origin, status: int, kind: type[Exception], attempts: int, streamed: bool) -> None:
    url, good = origin.add("x.tar", data(3000)), origin.add("good.tar", b"good")
    origin.behave(path="/x.tar", status=status, body=None if status >= 400 else b"")
    urls = [url, good]
    if streamed:
        urls.insert(0, origin.add("first.tar", data(3 * PART)))
        origin.behave(path="/first.tar", ignore_range=True)
    (got, error), following = outcomes(urls)[-2:]
    assert type(error) is kind
    assert f"{url} at byte 0: " in str(error)
    assert f"{status}" in str(error)
    assert ("after 3 attempts" in str(error)) == (attempts == 3)
    assert (got, following) == (b"", (b"good", None))
    whole = status == 416 and not streamed  # it may be an empty object, which has no range: asked for once whole
    assert _beginnings(origin, "/x.tar") == attempts + whole


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_an_overloaded_server_recovers(origin: Origin, status: int) -> None:
    content = data(3 * PART)
    url = origin.add("x.tar", content)
    origin.behave(status=status, times=2)
    assert bytes_of([url]) == [content]


def test_retry_after_is_honoured_up_to_the_cap(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    first = {"when": lambda request: str(request.range).startswith("bytes=0-")}  # not the part behind its end
    origin.behave(status=429, headers={"retry-after": "100"}, times=1, **first)
    began = time.monotonic()
    assert bytes_of([url], quick(retry=RetryPolicy(max_attempts=3, base_s=0.001, cap_s=0.25))) == [b"x"]
    assert time.monotonic() - began > 0.2


def test_one_refusal_among_good_answers_is_tried_again_at_once(origin: Origin) -> None:
    """The last part, so that no other answer wakes it: it would sleep for its 300 s."""
    content = data(8 * PART)
    url = origin.add("x.tar", content)
    last = {"when": lambda request: str(request.range).startswith(f"bytes={7 * PART}-")}
    origin.behave(status=503, headers={"retry-after": "300"}, times=1, **last)
    origin.behave(status=429, headers={"retry-after": "300"}, skip=1, times=1, **last)
    patient = RetryPolicy(base_s=0.001, cap_s=300.0)
    assert bytes_of([url], quick(retry=patient, first_part_bytes=PART)) == [content]
    assert sum(str(request.range).startswith(f"bytes={7 * PART}-") for request in origin.requests) == 2


@pytest.mark.parametrize("value", ["Fri, 31 Dec 1999 23:59:59 GMT", "soon", "-1", "", "\u00b2"])
def test_retry_after_may_say_anything(origin: Origin, value: str) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(status=503, headers={"retry-after": value}, times=1)
    assert bytes_of([url]) == [b"x"]


def test_an_error_page_is_quoted(origin: Origin) -> None:
    origin.behave(status=403, body=b"<html><body>\n<h1>No entry</h1> for you\x00</body></html>")
    ((_, error),) = outcomes([origin.url("x.tar")])
    assert "403" in str(error)


def test_errors_come_in_stream_order(origin: Origin) -> None:
    contents = [data(100_000, i) for i in range(12)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    for number, status in ((2, 404), (3, 403), (7, 500), (11, 404)):
        origin.behave(path=f"/{number}.tar", status=status)
    found = outcomes(urls)
    assert [type(error).__name__ for _, error in found if error] == [
        "ShardNotFound",
        "AccessDenied",
        "TransferError",
        "ShardNotFound",
    ]
    for number, (got, error) in enumerate(found):
        assert got == (b"" if error else contents[number])
        if error:
            assert f"/{number}.tar at byte 0" in str(error)


def test_the_first_contact_ends_soon() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    urls = ["http://wds-async-no-such-host.invalid/x.tar?token=SECRET", f"http://127.0.0.1:{port}/y.tar"]
    (_, unresolved), (_, refused) = outcomes(urls)
    assert isinstance(unresolved, TransferError)
    assert "does not resolve" in str(unresolved)
    assert "SECRET" not in str(unresolved)
    assert isinstance(refused, TransferError)
    assert f"127.0.0.1:{port}/y.tar at byte 0: the connection was refused" in str(refused)


@pytest.mark.parametrize("url", ["http:///x.tar", "http://h:99999999/x.tar", "http://[::1/x.tar", "http://h:x/y.tar"])
def test_malformed_urls(url: str) -> None:
    (got, error), following = outcomes([url, "/nonexistent/x.tar"])
    assert isinstance(error, UrlError)
    assert url in str(error)
    assert isinstance(following[1], ShardNotFound)
    assert got == b""


def test_header_injection_is_refused(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    ((_, error),) = outcomes([url.replace("x.tar", "x.tar\r\nEvil: yes")])
    assert error is None or not origin.requests or all("evil" not in request.headers for request in origin.requests)


@pytest.mark.parametrize("name", ["a b.tar", "ü.tar", "a+b.tar", "a%20b.tar", "x=1&y.tar", "[a].tar", "a'(b)~.tar"])
@pytest.mark.parametrize("direct", [True, False])
def test_names_arrive_as_they_are_written(origin: Origin, name: str, direct: bool) -> None:
    content = data(1000)
    url = origin.add(name, content)
    assert bytes_of([url], quick(direct=direct)) == [content]
    assert origin.requests[0].path == "/" + name


@pytest.mark.parametrize(
    "behaviour",
    [
        {},
        {"ignore_range": True},
        {"chunked": True},
        {"gzip": True},
        {"no_length": True},
        {"status": 500, "times": 2},
        {"cut_after": 100_000, "times": 2},
        {"stall_after": 1000, "times": 0},
        {"redirect": "/0.tar", "when": lambda request: request.path == "/2.tar"},
    ],
    ids=lambda fields: "-".join(fields) or "right",
)
def test_both_ways_give_the_same_bytes(origin: Origin, behaviour: dict[str, Any]) -> None:
    contents = [data(size) for size in (3 * PART + 1, 0, 3 * PART + 1, 1)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    for direct in (True, False):
        origin.forget()
        origin.behave(**behaviour)
        assert bytes_of(urls, quick(direct=direct)) == contents
        assert {"/0.tar", "/1.tar", "/2.tar", "/3.tar"} == {request.path for request in origin.requests}


def test_random_faults_are_healed_without_a_leak() -> None:
    contents = [data(300_000, i) for i in range(20)]
    with Origin(seed=7) as origin:
        urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
        bytes_of(urls[:1])
        before = open_fds()
        origin.behave(probability=0.1, cut_after=50_000)
        origin.behave(probability=0.1, cut_after=BEFORE_HEAD)
        origin.behave(probability=0.1, status=503)
        origin.behave(probability=0.1, hang_up="silent")
        origin.behave(probability=0.1, delay_s=0.02)
        assert bytes_of(urls, quick(retry=RetryPolicy(max_attempts=50, base_s=0.001, cap_s=0.01))) == contents
        origin.wait_until(lambda server: server.open_connections == 0)
        assert open_fds() <= before


def test_permanent_faults_do_not_leak(origin: Origin) -> None:
    good = origin.add("good.tar", b"good")
    bytes_of([good])
    before = open_fds()
    for number, fields in enumerate(({"status": 500}, {"cut_after": 0}, {"shift": 3}, {"body": b"x" * 100_000})):
        origin.behave(path=f"/{number}.tar", **fields)
        origin.add(f"{number}.tar", data(1000))
    outcomes([origin.url(f"{i % 4}.tar") for i in range(40)] + [good], quick(retry=QUICK, budget_bytes=2 * MIB))
    origin.wait_until(lambda server: server.open_connections == 0)
    assert open_fds() <= before


@pytest.mark.parametrize("size", [0, 1, 300 * KIB])
def test_a_416_that_does_not_tell_the_size(origin: Origin, size: int) -> None:
    """As some stores answer: for an empty object, and for parts that were planned behind an object's end."""
    big, content = data(6 * MIB), data(size)
    urls = [origin.add("big.tar", big)] + [origin.add(f"x{n}.tar", content) for n in range(4)]
    origin.behave(
        path="/x*",
        when=lambda request: request.range is not None and int(request.range[6:].split("-")[0]) >= size,
        status=416,
        headers={"content-range": None},
    )
    assert bytes_of(urls, config=quick()) == [big] + [content] * 4


def test_one_whole_object_instead_of_a_range_changes_nothing(origin: Any) -> None:
    """A server that gave ranges had a bad moment: its shards are not read as streams from then on."""
    urls = [origin.add(f"{n}.tar", data(2 * MIB, seed=n)) for n in range(3)]
    origin.behave(ignore_range=True, when=lambda request: (request.range or "").startswith("bytes=6"), times=1)
    counters = Counters()
    assert bytes_of(urls, counters=counters) == [data(2 * MIB, seed=n) for n in range(3)]
    assert all(request.range for request in origin.requests)
    assert snapshot(counters).wire_bytes == 3 * 2 * MIB


def test_a_server_that_gives_ranges_no_more_is_read_in_order(origin: Any) -> None:
    url = origin.add("x.tar", data(2 * MIB))
    origin.behave(ignore_range=True, skip=2)
    assert bytes_of([url]) == [data(2 * MIB)]
