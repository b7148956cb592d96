"""Objects of a real service, of origins that are right and that are not."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, ask, until
from tests.transfer.reading import KIB, MIB, data
from wds_async.service.http_server import SERVER

BODY = data(5 * MIB + 123)
QUICK_STALL = {"stall_timeout_s": 0.2}


@pytest.fixture(params=["disk", "memory"])
def service(request: pytest.FixtureRequest, origin: Origin, serve: Callable[..., Inside]) -> Inside:
    """One with a folder, and one without."""
    origin.add("/d/x.tar", BODY)
    return serve(folder="cache") if request.param == "disk" else serve()


def test_an_object_and_its_head(service: Inside, origin: Origin) -> None:
    url = f"{service.base}/ais/b/x.tar"
    for _ in range(2):  # cold and warm
        status, fields, body = ask(url)
        assert (status, body == BODY) == (200, True)
        expected = {
            "content-length": str(len(BODY)),
            "etag": origin_etag(origin),
            "last-modified": "Tue, 14 Nov 2023 22:13:20 GMT",
            "accept-ranges": "bytes",
            "server": SERVER,
        }
        assert expected.items() <= fields.items()
        status, head, nothing = ask(url, "HEAD")
        assert (status, nothing) == (200, b"")
        assert expected.items() <= head.items()


def origin_etag(origin: Origin) -> str:
    return ask(f"{origin.base}/d/x.tar", "HEAD")[1]["etag"]


def test_conditions(service: Inside) -> None:
    url = f"{service.base}/ais/b/x.tar"
    tag = ask(url, "HEAD")[1]["etag"]
    status, fields, body = ask(url, If_None_Match=tag)
    assert (status, body, fields["etag"]) == (304, b"", tag)
    assert ask(url, If_Match='"other"')[0] == 412
    assert ask(url, If_Match=tag, Range="bytes=0-4")[::2] == (206, BODY[:5])
    assert ask(url, If_Range='"other"', Range="bytes=0-4")[::2] == (200, BODY)
    assert ask(url, If_Range=tag, Range="bytes=0-4")[0] == 206


def test_an_empty_object(service: Inside, origin: Origin) -> None:
    origin.add("/d/empty", b"")
    assert ask(f"{service.base}/ais/b/empty")[::2] == (200, b"")
    assert ask(f"{service.base}/ais/b/empty", "HEAD")[1]["content-length"] == "0"


def test_a_server_without_ranges_or_length(service: Inside, origin: Origin) -> None:
    origin.behave(ignore_range=True, chunked=True)
    url = f"{service.base}/ais/b/x.tar"
    assert ask(url)[::2] == (200, BODY)
    status, _, body = ask(url, Range="bytes=0-4")
    assert (status, body) in ((200, BODY), (206, BODY[:5]))  # the latter once the cache knows its length


def test_the_first_bytes_come_before_the_last_ones_are_there(serve: Callable[..., Inside], origin: Origin) -> None:
    origin.add("/d/x.tar", BODY)
    origin.behave(stall_after=100 * KIB, when=lambda r: (r.range or "").startswith(f"bytes={2 * MIB}-"))
    running = serve()
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("GET", "/ais/b/x.tar")
    answer = connection.getresponse()
    first = answer.read(2 * MIB)
    assert first == BODY[: 2 * MIB]
    origin.release()
    assert answer.read() == BODY[2 * MIB :]
    connection.close()


@pytest.mark.parametrize("chunked", [False, True])
def test_an_origin_that_fails_ends_the_connection_and_never_a_body_short(
    serve: Callable[..., Inside], origin: Origin, chunked: bool
) -> None:
    origin.add("/d/x.tar", BODY)
    if chunked:
        origin.behave(ignore_range=True, chunked=True, cut_after=3 * MIB)
    else:
        origin.behave(status=403, when=lambda r: (r.range or "").startswith(f"bytes={4 * MIB}-"))
    running = serve()
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(f"{running.base}/ais/b/x.tar")
    until(lambda: not len(running.context.in_flight))
    assert running.context.meters.failures == 1


def test_what_is_wrong_before_the_first_byte_has_its_status(serve: Callable[..., Inside], origin: Origin) -> None:
    origin.add("/d/x.tar", BODY)
    running = serve(transfer=QUICK_STALL)
    assert ask(f"{running.base}/ais/b/nope")[0] == 404
    origin.behave(path="/d/denied", status=403)
    assert ask(f"{running.base}/ais/b/denied")[0] == 403
    origin.behave(path="/d/broken", status=500)
    status, _, body = ask(f"{running.base}/ais/b/broken")
    assert status == 502
    assert b"after 3 attempts" in body
    origin.behave(path="/d/mute", stall_after=-1)
    assert ask(f"{running.base}/ais/b/mute")[0] == 504


def test_an_origin_whose_chunk_size_is_rubbish(serve: Callable[..., Inside], origin: Origin) -> None:
    """aiohttp would wait for ever, and so would the service's client."""
    origin.add("/d/x.tar", BODY)
    running = serve(transfer={"stall_timeout_s": 0.2, "connect_timeout_s": 1.0})
    origin.behave(times=20, body=b"", bad_chunk=True)
    assert ask(f"{running.base}/ais/b/x.tar")[0] == 504
    origin.forget()
    origin.behave(ignore_range=True, bad_chunk=True, cut_after=3 * MIB, cut="fin")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(f"{running.base}/ais/b/x.tar")
    running.quiet()
    origin.forget()
    assert ask(f"{running.base}/ais/b/x.tar")[2] == BODY


def test_an_object_that_was_replaced(serve: Callable[..., Inside], origin: Origin, tmp_path: Path) -> None:
    origin.add("/d/x.tar", BODY)
    running = serve(freshness_s=0, folder="cache")
    url = f"{running.base}/ais/b/x.tar"
    status, before, body = ask(url)
    assert body == BODY
    origin.add("/d/x.tar", BODY[::-1])
    status, after, body = ask(url)
    assert (status, body == BODY[::-1], after["etag"] != before["etag"]) == (200, True, True)
    assert ask(url, If_Match=before["etag"])[0] == 412


def test_an_object_that_is_replaced_while_it_is_read_breaks_off(serve: Callable[..., Inside], origin: Origin) -> None:
    origin.add("/d/x.tar", BODY)
    fourth = f"bytes={4 * MIB}-"
    origin.behave(etag='"another"', when=lambda r: (r.range or "").startswith(fourth))
    running = serve()
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(f"{running.base}/ais/b/x.tar")


def test_who_leaves_gives_up_what_only_it_wanted(
    serve: Callable[..., Inside], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wds_async.service.cache.fetching._UNWANTED_S", 0.1)
    origin.add("/d/x.tar", BODY)
    origin.behave(stall_after=1000)
    running = serve()
    with socket.create_connection(("127.0.0.1", running.port), 10) as client:
        client.sendall(b"GET /ais/b/x.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        origin.wait_until(lambda o: o.in_flight > 1)  # what it waits for, and what comes next
        assert len(running.context.in_flight) == 1
    until(lambda: not len(running.context.in_flight))
    origin.wait_until(lambda o: o.in_flight == 0)


def test_a_paced_client(serve: Callable[..., Inside], origin: Origin) -> None:
    origin.add("/d/x.tar", BODY)
    running = serve(client_bytes_per_s=20e6)
    began = time.monotonic()
    for _ in range(2):
        assert ask(f"{running.base}/ais/b/x.tar")[2] == BODY
    assert time.monotonic() - began > 0.2  # 10.5 MB, of which 5 may go at once


def test_members_of_archives(serve: Callable[..., Inside], origin: Origin) -> None:
    from tests.servers.shards import make_tar

    origin.add("/d/t.tar", make_tar([("a.txt", b"one"), ("deep/b.bin", BODY), ("c.txt", b"")]))
    running = serve()
    url = f"{running.base}/v1/objects/b/t.tar"
    status, fields, body = ask(f"{url}?archpath=deep/b.bin")
    assert (status, body == BODY, fields["content-length"]) == (200, True, str(len(BODY)))
    assert "etag" not in fields  # it is the archive's
    assert ask(f"{url}?archpath=a.txt")[2] == b"one"
    assert ask(f"{url}?archpath=c.txt")[::2] == (200, b"")
    assert ask(f"{url}?archpath=a.txt", "HEAD")[1]["content-length"] == "3"
    status, _, body = ask(f"{url}?archpath=nope.txt")
    assert (status, b"archived file 'nope.txt' does not exist" in body) == (404, True)
    assert ask(f"{url}?archpath=a.txt", Range="bytes=0-1")[0] == 501


def test_what_is_aistores_alone(service: Inside) -> None:
    url = f"{service.base}/v1/objects/b/x.tar"
    for query in ("etl_name=up", "archregx=a&archmode=wdskey"):
        status, _, body = ask(f"{url}?{query}")
        assert (status, b"AIStore's own" in body) == (501, True)


def test_nothing_is_written_where_the_disk_is_to_be_kept_free(
    serve: Callable[..., Inside], origin: Origin, tmp_path: Path
) -> None:
    origin.add("/d/x.tar", BODY)
    service = serve(folder="cache", keep_free="100%")
    for _ in range(2):
        assert ask(f"{service.base}/ais/b/x.tar")[2] == BODY
    assert not [path for path in (tmp_path / "cache" / "data").rglob("*") if path.is_file()]
    page = ask(f"{service.base}/metrics")[2].decode()
    assert "wds_cache_bytes 0.0" in page


def test_one_client_may_have_so_many_under_way(serve: Callable[..., Inside], origin: Origin) -> None:
    origin.add("/d/x.tar", BODY)
    origin.behave(stall_after=1000)
    running = serve(client_requests=1)
    with socket.create_connection(("127.0.0.1", running.port), 10) as client:
        client.sendall(b"GET /ais/b/x.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: len(running.context.in_flight) == 1)
        status, fields, _ = ask(f"{running.base}/ais/b/x.tar")
        assert (status, fields["retry-after"]) == (429, "1")
        assert ask(f"{running.base}/healthz")[0] == 200
        origin.release()
