"""Ranged reads against a server that answers in every way but the right one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Behaviour, Nginx, Origin
from tests.servers import Request as ServerRequest
from tests.servers.behaviour import Answer
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, spans
from wds_async.config import RetryPolicy
from wds_async.errors import ObjectChanged, ShardNotFound, StorageError, TransferError, UrlError
from wds_async.storage.base import Request
from wds_async.transfer.part_request import follow, unchunked

PART = 256 * KIB
"""The parts of `quick`; the first of a reader are smaller."""


@pytest.mark.parametrize("size", [0, 1, 511, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, PART - 1, PART, PART + 1, 5 * PART])
def test_every_size(origin: Origin, size: int) -> None:
    content = data(size)
    url = origin.add("x.tar", content)
    assert bytes_of([url, url]) == [content, content]


def test_ranges_cover_the_shard_once(origin: Origin) -> None:
    content = data(5 * PART + 77)
    url = origin.add("x.tar", content)
    assert bytes_of([url]) == [content]
    asked = sorted(spans(origin.requests))
    assert asked[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(asked))


def test_shards_of_different_sizes(origin: Origin) -> None:
    contents = [data(size, i) for i, size in enumerate([900_000, 0, 5, 1_500_000, 70_000, 2, 400_000, 0, 900_000])]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    assert bytes_of(urls) == contents


def test_an_answer_of_416_may_come_before_the_size_is_known(origin: Origin) -> None:
    # The last shard is guessed to be as long as the others; the part behind its end is answered first, and its 416
    # carries no identity.
    contents = [data(900_000, i) for i in range(9)] + [data(100_000, 9)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(path="/9.tar", when=lambda request: request.range.startswith("bytes=0-"), delay_s=0.1)
    assert bytes_of(urls) == contents
    assert len(spans(origin.requests, "/9.tar")) > 1, "nothing was asked for behind its end"


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(ignore_range=True),
        Behaviour(chunked=True),
        Behaviour(gzip=True),
        Behaviour(no_length=True),
        Behaviour(gzip=True, chunked=True),
        Behaviour(ignore_range=True, chunked=True),
        Behaviour(ignore_range=True, no_length=True),
        Behaviour(gzip=True, no_length=True),
        Behaviour(ignore_range=True, hang_up="announced"),
        Behaviour(ignore_range=True, headers={"connection": "close", "etag": None, "last-modified": None}),
    ],
    ids=lambda behaviour: " ".join(re.findall(r"(\w+)=True|hang_up='(\w+)'", repr(behaviour))[0]).strip(),
)
@pytest.mark.parametrize("size", [0, 10, 64 * KIB, 3 * PART + 5])
def test_servers_that_do_not_cut(origin: Origin, behaviour: Behaviour, size: int) -> None:
    contents = [data(size, i) for i in range(4)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(behaviour)
    assert bytes_of(urls) == contents


def no_total(request: ServerRequest, answer: Answer) -> None:
    """A 206 that does not tell the size of the object (RFC 9110 §14.4)."""
    if answer.status == 206:
        answer.headers["content-range"] = answer.headers["content-range"].partition("/")[0] + "/*"


def multipart(request: ServerRequest, answer: Answer) -> None:
    """A 206 in the form for several ranges, of one (RFC 9110 §15.3.7.2)."""
    if answer.status == 206:
        head = f"--edge\r\nContent-Range: {answer.headers.pop('content-range')}\r\n\r\n".encode()
        answer.body = head + bytes(answer.body) + b"\r\n--edge--\r\n"
        answer.headers |= {"content-type": "multipart/byteranges; boundary=edge"}
        answer.headers["content-length"] = str(len(answer.body))


def in_chunks(request: ServerRequest, answer: Answer) -> None:
    """A 206 without a length; but a 416 tells the size."""
    if answer.status == 206:
        del answer.headers["content-length"]
        answer.headers["transfer-encoding"] = answer.framing = "chunked"


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "aiohttp"])
@pytest.mark.parametrize("size", [0, 10, 64 * KIB, 3 * PART + 5])
@pytest.mark.parametrize("form", [no_total, multipart, in_chunks])
def test_lawful_answers_that_are_no_parts(form: Callable[..., None], size: int, direct: bool) -> None:
    """They are read in order, at the first attempt, or as they are by another client."""
    contents = [data(size, i) for i in range(4)]
    with Origin(dialect=form) as server:
        urls = [server.add(f"{i}.tar", content) for i, content in enumerate(contents)]
        assert bytes_of(urls, quick(direct=direct, retry=RetryPolicy(max_attempts=1))) == contents


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "aiohttp"])
def test_a_range_may_leave_out_a_size_that_is_known(direct: bool) -> None:
    content, seen = data(5 * PART), []

    def now_and_then(request: ServerRequest, answer: Answer) -> None:
        seen.append(request)
        if len(seen) > 1:
            no_total(request, answer)

    with Origin(dialect=now_and_then) as server:
        url = server.add("x.tar", content)
        assert bytes_of([url], quick(direct=direct, connections=1)) == [content]
        assert all(request.range is not None for request in server.requests)


@pytest.mark.parametrize("skip", range(7))
@pytest.mark.parametrize("how", [{"ignore_range": True}, {"gzip": True}, {"chunked": True}])
def test_one_answer_is_not_cut(origin: Origin, skip: int, how: dict[str, Any]) -> None:
    contents = [data(4 * PART + 3, i) for i in range(2)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(skip=skip, times=1, **how)
    assert bytes_of(urls) == contents


def test_an_uncut_answer_waits_for_slow_parts_before_it(origin: Origin) -> None:
    content = data(900_000)
    urls = [origin.add(f"{i}.tar", content) for i in range(10)]  # the last one's size is guessed
    origin.behave(path="/9.tar", when=lambda request: (request.range or "").startswith("bytes=0-"), delay_s=0.3)
    origin.behave(path="/9.tar", when=lambda request: bool(request.range), ignore_range=True, times=1)
    assert bytes_of(urls) == [content] * 10
    assert len(spans(origin.requests, "/9.tar")) > 1


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(shift=1),
        Behaviour(length_error=-1),
        Behaviour(headers={"content-range": None}),
        Behaviour(headers={"content-range": "bytes 0-9/*"}),
        Behaviour(headers={"content-range": "bytes nonsense"}),
        Behaviour(headers={"content-range": "items 0-9/10"}),
        Behaviour(headers={"content-length": "00x"}),
        Behaviour(length_error=5),
        Behaviour(status=206, body=b""),
        Behaviour(headers={"no colon\r\nin this line": "x"}),
    ],
)
def test_answers_that_contradict_the_request(origin: Origin, behaviour: Behaviour) -> None:
    content = data(3 * PART)
    url = origin.add("x.tar", content)
    origin.behave(behaviour, times=1)
    assert bytes_of([url]) == [content]  # once is healed
    origin.forget()
    origin.behave(behaviour)
    origin.files["/good.tar"] = b"good"
    ((got, error), good) = outcomes([url, origin.url("good.tar")])[:2]
    if behaviour.headers.get("content-length") == "00x":
        assert error is not None or got == content
    else:
        assert isinstance(error, TransferError)
        assert re.search(r"x\.tar at byte 0: .* after 3 attempts", str(error))
        assert got == b""
    del good


def test_a_range_that_is_shorter_than_asked_for_is_completed(origin: Origin) -> None:
    content = data(200_000)
    url = origin.add("x.tar", content)
    origin.behave(
        when=lambda request: request.range == "bytes=0-65535",
        status=206,
        body=content[:10_000],
        headers={"content-range": f"bytes 0-9999/{len(content)}", "etag": None},
    )
    (got, error), *_ = outcomes([url])
    if error is None:
        assert got == content
    else:  # the other answers carry an identity, this one did not
        assert isinstance(error, ObjectChanged)


def test_a_server_that_gives_little_at_a_time(origin: Origin) -> None:
    content = data(30_000)
    url = origin.add("x.tar", content)
    for start in range(0, 30_000, 5_000):
        origin.behave(
            when=lambda request, start=start: request.range.startswith(f"bytes={start}-"),
            status=206,
            body=content[start : start + 5_000],
            headers={"content-range": f"bytes {start}-{start + 4_999}/30000"},
        )
    assert bytes_of([url]) == [content]
    assert {start for start, _ in spans(origin.requests)} >= set(range(0, 30_000, 5_000))


# Identity


def test_if_match_is_sent_for_strong_etags_only(origin: Origin) -> None:
    content = data(5 * PART)
    url = origin.add("x.tar", content)
    assert bytes_of([url]) == [content]
    assert {request.headers.get("if-match") for request in origin.requests[3:]} != {None}
    assert "if-match" not in origin.requests[0].headers
    origin.forget()
    origin.behave(etag='W/"weak"')
    assert bytes_of([url]) == [content]
    assert all("if-match" not in request.headers for request in origin.requests)


@pytest.mark.parametrize("etag", ['W/"2"', '"2"', None])
def test_an_object_replaced_mid_read(origin: Origin, etag: str | None) -> None:
    content = data(8 * PART)
    url = origin.add("x.tar", content)
    origin.add("next.tar", b"next")
    headers = {"etag": etag} if etag else {"etag": None, "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
    origin.behave(when=lambda r: r.path == "/x.tar" and int(r.range[6:].split("-")[0]) >= 3 * PART, headers=headers)
    (got, error), following = outcomes([url, origin.url("next.tar")])
    assert isinstance(error, ObjectChanged)
    assert f"{url} at byte {len(got)}" in str(error)
    assert got == content[: len(got)]
    assert 0 < len(got) < len(content)
    assert following == (b"next", None)


def test_412_is_a_changed_object(origin: Origin) -> None:
    content = data(8 * PART)
    url = origin.add("x.tar", content)
    origin.behave(when=lambda request: "if-match" in request.headers, status=412)
    (got, error), *_ = outcomes([url])
    assert isinstance(error, ObjectChanged)
    assert got == content[: len(got)]


def test_an_object_that_grows_mid_read(origin: Origin) -> None:
    content = data(8 * PART)
    url = origin.add("x.tar", content)
    for etag in (None, 'W/"same"'):
        origin.forget()
        origin.behave(when=lambda r: int(r.range[6:].split("-")[0]) < 3 * PART, headers={"etag": etag})
        origin.behave(
            when=lambda r: int(r.range[6:].split("-")[0]) >= 3 * PART,
            status=206,
            body=b"x" * 1000,
            headers={"etag": etag, "content-range": f"bytes {3 * PART}-{3 * PART + 999}/{9 * PART}"},
        )
        (got, error), *_ = outcomes([url])
        assert isinstance(error, StorageError)
        assert got == content[: len(got)]


# Redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("relative", [True, False])
def test_redirects(origin: Origin, status: int, relative: bool) -> None:
    content = data(3 * PART)
    url = origin.add("data/real.tar", content)
    origin.behave(path="/alias.tar", status=status, redirect="data/real.tar" if relative else url)
    assert bytes_of([origin.url("alias.tar")] * 2) == [content] * 2


def test_a_redirect_is_kept_for_later_parts(origin: Origin) -> None:
    content = data(20 * PART)
    origin.add("real.tar", content)
    origin.behave(path="/alias.tar", redirect="/real.tar")
    assert bytes_of([origin.url("alias.tar")]) == [content]
    assert sum(request.path == "/alias.tar" for request in origin.requests) <= 8


def test_a_kept_redirect_that_expires_is_asked_for_again(origin: Origin) -> None:
    content = data(60 * PART)
    origin.add("one.tar", content)
    origin.add("two.tar", content)

    def expired(request: Any) -> bool:
        return sum(seen.path == "/one.tar" for seen in list(origin.requests)) > 12

    origin.behave(path="/alias.tar", when=expired, redirect="/two.tar")
    origin.behave(path="/alias.tar", redirect="/one.tar")
    origin.behave(path="/one.tar", when=expired, status=403, delay_s=0.05)  # several parts are in flight there
    assert bytes_of([origin.url("alias.tar")]) == [content]
    assert sum(request.path == "/one.tar" for request in origin.requests) > 14


def test_credentials_stay_with_their_origin() -> None:
    content = data(2 * PART)
    with Origin() as ours, Origin({"/x.tar": content}) as theirs:
        ours.behave(path="/cross.tar", redirect=theirs.url("x.tar"))
        ours.behave(path="/same.tar", redirect="/x.tar")
        ours.add("x.tar", content)
        base = ours.base.replace("http://", "http://user:pa%3Ass@")
        assert bytes_of([f"{base}/cross.tar", f"{base}/same.tar"]) == [content, content]
        assert {request.headers.get("authorization") for request in ours.requests} == {"Basic dXNlcjpwYTpzcw=="}
        assert theirs.requests
        assert all("authorization" not in request.headers for request in theirs.requests)


@pytest.mark.parametrize("streamed", [False, True])
def test_redirect_loops_end(origin: Origin, streamed: bool) -> None:
    origin.behave(path="/loop.tar", redirect="/loop.tar")
    urls = [origin.url("loop.tar")]
    if streamed:
        origin.behave(path="/first.tar", ignore_range=True)
        urls.insert(0, origin.add("first.tar", data(3 * PART)))
    error = outcomes(urls)[-1][1]
    assert isinstance(error, TransferError)
    loop = origin.url("loop.tar")
    assert f"{loop} at byte 0: the server redirects in a circle: {loop} → {loop}. Check" in str(error)
    asked = [request for request in origin.requests if request.path == "/loop.tar"]
    assert len(asked) == len({str(request.range) for request in asked})  # each part asked once


@pytest.mark.parametrize("direct", [True, False])
def test_a_redirect_loop_lists_its_hops_without_secrets(origin: Origin, direct: bool) -> None:
    origin.behave(path="/a.tar", redirect="/b.tar?X-Amz-Signature=TOPSECRET")
    origin.behave(path="/b.tar", redirect=origin.url("c.tar"))
    origin.behave(path="/c.tar", redirect="/b.tar?X-Amz-Signature=TOPSECRET#here")
    ((_, error),) = outcomes([origin.url("a.tar")], quick(direct=direct))
    assert "TOPSECRET" not in str(error)
    hops = re.findall(r"/([abc])\.tar", str(error).partition("in a circle")[2])
    assert hops == ["a", "b", "c", "b"]


@pytest.mark.parametrize("direct", [True, False])
def test_redirects_without_end_end(origin: Origin, direct: bool) -> None:
    for number in range(30):
        origin.behave(path=f"/{number}.tar", redirect=f"/{number + 1}.tar")
    ((_, error),) = outcomes([origin.url("0.tar")], quick(direct=direct))
    assert "redirects more than 10 times" in str(error)
    assert not any(request.path == "/12.tar" for request in origin.requests)


@pytest.mark.parametrize("direct", [True, False])
def test_a_kept_redirect_may_lead_back_to_where_it_came_from(origin: Origin, direct: bool) -> None:
    content = data(60 * PART)
    origin.add("a.tar", content)
    origin.add("b.tar", content)

    def moved_back(request: Any) -> bool:
        return sum(seen.path == "/b.tar" for seen in list(origin.requests)) > 12

    origin.behave(path="/a.tar", when=lambda request: not moved_back(request), redirect="/b.tar")
    origin.behave(path="/b.tar", when=moved_back, redirect="/a.tar")
    assert bytes_of([origin.url("a.tar")], quick(direct=direct)) == [content]
    assert sum(request.path == "/b.tar" for request in origin.requests) > 12


def test_a_redirect_to_another_scheme_is_refused_without_showing_secrets(origin: Origin) -> None:
    origin.behave(path="/x.tar", redirect="file:///etc/hostname")
    ((got, error),) = outcomes([origin.url("x.tar") + "?sig=TOPSECRET"])
    assert isinstance(error, UrlError)
    assert "redirects to 'file://', which is not HTTP" in str(error)
    assert "TOPSECRET" not in str(error)
    assert got == b""


def test_a_redirect_to_nowhere_names_the_shard(origin: Origin) -> None:
    origin.behave(path="/x.tar", redirect="/gone.tar")
    ((_, error),) = outcomes([origin.url("x.tar")])
    assert isinstance(error, ShardNotFound)
    assert "/x.tar at byte 0" in str(error)


def test_follow_compares_whole_origins() -> None:
    request = Request("https://a.example/x", (("Authorization", "s"), ("Cookie", "s"), ("Accept", "*/*")))
    assert follow(request, "/y").headers == request.headers
    for target in ("http://a.example/x", "https://a.example:444/x", "https://b.example/x", "//c.example/x"):
        assert follow(request, target).headers == (("Accept", "*/*"),)
    with pytest.raises(UrlError):
        follow(request, "ftp://a.example/x")


# Another server


@pytest.mark.servers
@pytest.mark.parametrize("options", [{}, {"ignore_ranges": True}, {"gzip": True}], ids=["plain", "whole", "gzip"])
def test_nginx(nginx: Callable[..., Nginx], tmp_path: Path, options: dict[str, Any]) -> None:
    contents = [data(size) for size in (0, 1, PART - 1, PART, PART + 1, 5 * PART, 0, 70_000)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.tar").write_bytes(content)
    server = nginx(tmp_path, **options)
    urls = [server.url(f"{number}.tar") for number in range(len(contents))]
    for direct in (True, False):
        assert bytes_of(urls, quick(direct=direct)) == contents
    ((_, error),) = outcomes([server.url("none.tar")])
    assert isinstance(error, ShardNotFound)


REFUSAL = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"


@pytest.mark.parametrize(
    "framing", [{}, {"chunked": True}, {"no_length": True}, {"chunked": True, "cut_after": len(REFUSAL)}], ids=str
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_is_quoted_however_it_is_framed(origin: Origin, framing: dict[str, Any], streamed: bool) -> None:
    url, good = origin.add("x.tar", data(1000)), origin.add("good.tar", b"good")
    origin.behave(path="/x.tar", status=403, body=REFUSAL.replace(b"<", b"(").replace(b">", b")"), **framing)
    if streamed:
        origin.behave(ignore_range=True)
    first = origin.add("first.tar", data(2 * PART))
    _, (got, error), following = outcomes([first, url, good])
    assert "RequestTimeTooSkewed" in str(error)
    assert (got, following) == (b"", (b"good", None))


def test_an_endless_refusal_is_not_read_to_its_end(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(status=403, body=b"why " * (4 << 20), chunked=True)
    ((_, error),) = outcomes([url])
    assert "why why" in str(error)
    assert len(str(error)) < 2000


@pytest.mark.parametrize("framing", [{"chunked": True}, {"no_length": True}], ids=str)
def test_a_refusal_that_is_slow_to_say_why_is_not_waited_for(origin: Origin, framing: dict[str, Any]) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(status=403, body=b"at first " + b"much later", stall_after=9, **framing)
    ((_, error),) = outcomes([url], quick(connections=1))
    assert "at first" in str(error)
    assert "later" not in str(error)
    origin.release()


@pytest.mark.parametrize(
    ("raw", "found", "whole"),
    [
        (b"", b"", False),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc", True),
        (b"3;ext=1\r\nabc\r\nA\r\n0123", b"abc0123", False),
        (b"3\r\nab", b"ab", False),
        (b"3\r\nabc\r\n", b"abc", False),
        (b"3\r\nabc\r\n2", b"abc", False),
        (b"-3\r\nabc", b"", True),
        (b"zz\r\nabc", b"", True),
        (b"ffffffffffff\r\nabc", b"", True),
    ],
)
def test_chunks_are_taken_apart_as_far_as_they_have_come(raw: bytes, found: bytes, whole: bool) -> None:
    assert unchunked(raw) == (found, whole)
