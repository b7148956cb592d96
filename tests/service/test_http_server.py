"""The server: bytes and their order, places, times, clients that behave badly, and processes on this host."""

from __future__ import annotations

import contextlib
import gc
import http.client
import itertools
import json
import random
import re
import select
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, Tls
from tests.service.serving import Inside, answers, ask, asked, dial, spoken, until
from tests.transfer.reading import MIB, data, open_fds
from wds_async.service import http_server
from wds_async.service.http_server import HEAD_LIMIT_BYTES, SERVER, HttpRequest

BIG = data(5 * MIB + 17)


SMALL = data(1000)


PLAN = json.dumps({"shards": ["ais://b/small.tar"]}).encode()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(http_server, "_PROCESS_LINGER_S", 0.02)
    monkeypatch.setattr(http_server, "_TLS_CLOSE_S", 0.2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, body in (("big.tar", BIG), ("small.tar", SMALL), ("none.tar", b"")):
        (folder / name).write_bytes(body)
    return folder


@pytest.fixture
def serving(files: Path, tmp_path: Path) -> Callable[..., Inside]:
    """Make a service of ``files`` with settings of its own."""

    def make(**settings: Any) -> Inside:
        given: dict[str, Any] = {"buckets": {"b": f"{files}/"}, "folder": tmp_path / "c", "socket": tmp_path / "s"}
        return Inside(**{**given, **settings})

    return make


@pytest.fixture
def service(serving: Callable[..., Inside]) -> Iterator[Inside]:
    """One that has all files in its cache."""
    with serving() as running:
        warm(running)
        yield running


def warm(service: Inside) -> None:
    for name in ("big.tar", "small.tar", "none.tar"):
        assert ask(f"{service.base}/ais/b/{name}")[0] == 200
    service.stored()


def count(service: Inside) -> int:
    return len(service.service.clients)


def refusals(service: Inside) -> dict[str, int]:
    return service.context.meters._refusals


# -- bytes and their order


@pytest.mark.parametrize("local", [False, True])
def test_bytes_of_all_kinds(service: Inside, local: bool) -> None:
    before = service.context.cache.statistics().hit_bytes
    with dial(service, local=local) as one:
        for _ in range(2):
            one.sendall(asked("/ais/b/big.tar"))
            assert answers(one, "GET")[0][2] == BIG
        one.sendall(asked("/ais/b/big.tar", Range="bytes=1000000-4999999"))
        [(status, fields, body)] = answers(one, "GET")
        assert (status, fields["content-range"]) == (206, f"bytes 1000000-4999999/{len(BIG)}")
        assert body == BIG[1_000_000:5_000_000]
        one.sendall(asked("/ais/b/none.tar"))
        assert answers(one, "GET")[0][::2] == (200, b"")
        one.sendall(asked("/ais/b/big.tar", "HEAD"))
        [(status, fields, body)] = answers(one, "HEAD")
        assert (status, fields["content-length"]) == (200, str(len(BIG)))
    service.quiet()
    assert service.context.cache.statistics().hit_bytes - before == 2 * len(BIG) + 4_000_000
    assert service.context.cache.statistics().readers == 0


@pytest.mark.parametrize("way", ["plain", "tls", "socket", "paced"])
def test_several_ranges_and_a_request_behind_them(serving: Callable[..., Inside], tls: Tls, way: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "tls": {"certificate": tls.cert, "key": tls.key},
        "paced": {"client_bytes_per_s": 50 * MIB},
    }
    spans = [(1_000_000, 3_999_999), (10, 19), (4_000_000, len(BIG) - 1)]
    with serving(**settings.get(way, {})) as service, contextlib.ExitStack() as stack:
        one: socket.socket = stack.enter_context(dial(service, local=way == "socket"))
        if way == "tls":
            one = stack.enter_context(tls.client_context().wrap_socket(one, server_hostname="localhost"))
        for _ in range(2):
            wanted = ",".join(f"{first}-{last}" for first, last in spans)
            one.sendall(asked("/ais/b/big.tar", Range=f"bytes={wanted}") + asked("/healthz"))
            [(status, fields, body), (after, _, _)] = answers(one, "GET", "GET")
            assert (status, after) == (206, 200)
            boundary = fields["content-type"].removeprefix("multipart/byteranges; boundary=").encode()
            pieces = [part.partition(b"\r\n\r\n")[2] for part in body.split(b"\r\n--" + boundary)[1:-1]]
            assert pieces == [BIG[first : last + 1] for first, last in spans]


def test_pipelined_requests_are_answered_in_order(service: Inside) -> None:
    rng = random.Random(3)
    spans = [(at := rng.randrange(len(BIG) - 400_000), at + rng.randrange(1, 400_000)) for _ in range(40)]
    raw = b"".join(asked("/ais/b/big.tar", Range=f"bytes={start}-{stop - 1}") for start, stop in spans)
    with dial(service) as one:
        writer = threading.Thread(target=one.sendall, args=(raw,))
        writer.start()
        got = answers(one, *["GET"] * 40)
        writer.join()
    assert [body for _, _, body in got] == [BIG[start:stop] for start, stop in spans]


def test_many_are_pipelined_behind_a_large_one(service: Inside) -> None:
    many = 4 * HEAD_LIMIT_BYTES // len(asked("/ais/b/small.tar"))
    with dial(service) as one:
        one.sendall(asked("/ais/b/big.tar"))
        writer = threading.Thread(target=one.sendall, args=(asked("/ais/b/small.tar") * many,))
        writer.start()
        got = answers(one, *["GET"] * (many + 1))
        writer.join()
    assert got[0][2] == BIG
    assert {body for _, _, body in got[1:]} == {SMALL}


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x02\x00\x01", b"get /ais HTTP/1.1\r\n\r\n"])
def test_what_is_no_request_is_answered_at_once(service: Inside, said: bytes) -> None:
    with dial(service) as one:
        one.sendall(said)
        [(status, fields, _)] = answers(one, "GET")
        assert (status, fields["server"]) == (400, SERVER)


def test_it_closes_if_the_client_wants_that(service: Inside) -> None:
    with dial(service) as one:
        one.sendall(asked("/ais/b/big.tar", Connection="close"))
        [(_, fields, body)] = answers(one, "GET")
        assert (fields["connection"], body) == ("close", BIG)
        assert one.recv(1) == b""


def test_a_client_that_closes_its_side_while_it_reads_gets_all_of_the_body(service: Inside) -> None:
    with dial(service, receive_bytes=64 << 10) as one:
        one.sendall(asked("/ais/b/big.tar"))
        first = one.recv(1000)
        one.shutdown(socket.SHUT_WR)
        got = first
        while piece := one.recv(MIB):
            got += piece
    assert got.endswith(BIG)


def test_clients_that_leave_in_the_middle_leave_nothing_behind(service: Inside) -> None:
    until(lambda: count(service) == 0)
    gc.collect()
    before = open_fds()
    for i in range(20):
        one = dial(service)
        one.sendall(asked("/ais/b/big.tar"))
        one.recv(1 + 1000 * i)
        if i % 2:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        one.close()
    until(lambda: count(service) == 0)
    service.quiet()
    assert service.context.cache.statistics().readers == 0
    assert service.context.meters.clients == 0
    assert open_fds() <= before


def test_random_clients_get_what_they_ask_for(service: Inside) -> None:
    """Objects, ranges, pages and bodies, in pieces of any size, on kept connections: all in order, all right."""

    def client(seed: int, failures: list[BaseException]) -> None:
        rng = random.Random(seed)
        try:
            with dial(service, local=bool(seed % 2)) as one:
                for _ in range(25):
                    kind = rng.choice(["range", "small", "page", "head", "post"])
                    start = rng.randrange(len(BIG) - 1)
                    stop = min(len(BIG), start + rng.choice([1, 1000, 70_000, 1 << 20]))
                    raw, method, wanted = {
                        "range": (asked("/ais/b/big.tar", Range=f"bytes={start}-{stop - 1}"), "GET", BIG[start:stop]),
                        "small": (asked("/ais/b/small.tar"), "GET", SMALL),
                        "page": (asked("/healthz"), "GET", b"alive\n"),
                        "head": (asked("/ais/b/big.tar", "HEAD"), "HEAD", b""),
                        "post": (asked("/v1/plan", "POST", PLAN), "POST", None),
                    }[kind]
                    cut = rng.randrange(len(raw) + 1)
                    one.sendall(raw[:cut])
                    if rng.random() < 0.3:
                        select.select([one], [], [], 0.002)
                    one.sendall(raw[cut:])
                    status, _, body = answers(one, method)[0]
                    assert status in (200, 206)
                    assert wanted is None or body == wanted
        except BaseException as exn:
            failures.append(exn)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=client, args=(seed, failures)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- HTTP/1.1 as others speak it


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\n\r\n",  # no host
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nrubbish\r\n",
        b"POST /v1/plan HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /healthz HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost/evil\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost@evil\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost#evil\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost:80x\r\n\r\n",
        b'GET /healthz HTTP/1.1\r\nHost: "\r\n\r\n',
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",  # obs-fold
        b"GET /healthz HTTP/1.1\r\nHost: localhost\nA: b\r\n\r\n",  # a bare LF
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\rc\r\n\r\n",  # a bare CR
        b"\x00" * 1000,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(service: Inside, head: bytes) -> None:
    got = spoken(service, asked("/healthz") + head)
    first, _, rest = got.partition(b"alive\n")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n"), "what came before it is answered"
    assert re.fullmatch(rb"HTTP/1\.1 400 .*", rest.partition(b"\r\n")[0])
    assert f"Server: {SERVER}\r\n".encode() in rest
    assert b"Connection: close\r\n" in rest
    assert rest.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "a_b.c-d.e.", "[::1]:80", "[fe80::1%25eth0]", "1.2.3.4:", ""]
)
def test_hosts_as_clients_send_them(service: Inside, host: str) -> None:
    assert ask(f"{service.base}/healthz", Host=host)[0] == 200


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"xchunked"])
def test_a_coding_of_a_body_that_is_not_known_is_501(service: Inside, coding: bytes) -> None:
    """A gzip body in chunks must not be taken for what it unpacks to (RFC 9112 §6.1)."""
    head = b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: " + coding + b"\r\n\r\n"
    got = spoken(service, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAN), PLAN) + asked("/healthz"))
    assert got.startswith(b"HTTP/1.1 501 ")
    assert got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "preface", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", b"GET /\r\n\r\n"]
)
def test_other_versions_are_refused(service: Inside, preface: bytes) -> None:
    assert spoken(service, preface)[:13] in (b"HTTP/1.1 505 ", b"HTTP/1.1 400 ")


def test_older_clients_and_their_connections(service: Inside) -> None:
    got = spoken(service, b"GET /healthz HTTP/1.0\r\n\r\n")
    assert b"Connection: close\r\n" in got
    with dial(service) as one:
        for _ in range(2):
            one.sendall(b"GET /ais/b/small.tar HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            [(status, fields, body)] = answers(one, "GET")
            assert (status, fields["connection"], body) == (200, "keep-alive", SMALL)


def test_a_body_in_chunks_with_a_trailer(service: Inside) -> None:
    head = b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (PLAN[:10], PLAN[10:]))
    with dial(service) as one:
        one.sendall(head + pieces + b"0\r\nHost: evil\r\nWds-Client: evil\r\n\r\n" + asked("/healthz"))
        got = answers(one, "POST", "GET")
    assert [status for status, _, _ in got] == [200, 200]
    assert {plan["client"] for plan in service.context.plans.as_list()} == {"127.0.0.1"}


def test_a_client_that_asks_whether_it_may_go_on(service: Inside) -> None:
    raw = asked("/v1/plan", "POST", PLAN, Expect="100-continue")
    with dial(service) as one:
        one.sendall(raw.removesuffix(PLAN))
        assert one.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        one.sendall(PLAN)
        assert answers(one, "POST")[0][0] == 200
    with dial(service) as one:  # it may not
        one.sendall(asked("/ais/b/x", "PUT", b"x" * 9, Expect="100-continue").removesuffix(b"x" * 9))
        assert answers(one, "PUT")[0][0] == 405


def test_a_client_of_http_1_0_is_not_told_to_go_on(service: Inside) -> None:
    """It knows no answers before the answer (RFC 9110 §10.1.1)."""
    with dial(service) as one:
        one.sendall(b"POST /v1/plan HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(PLAN))
        until(lambda: len(service.context.in_flight) == 1)
        one.sendall(PLAN)
        assert answers(one, "POST")[0][0] == 200


def test_bodies_that_wait_for_their_turn_hold_little_memory(service: Inside) -> None:
    """A client that takes nothing of one answer could have a megabyte of each request behind it in memory."""
    plan = json.dumps({"shards": ["ais://b/small.tar"] * 10_000}).encode()
    with dial(service, receive_bytes=64 << 10) as one:
        one.sendall(asked("/ais/b/big.tar"))
        writer = threading.Thread(target=one.sendall, args=(asked("/v1/plan", "POST", plan) * 30,))
        writer.start()
        until(lambda: any(connection._paused for connection in service.service.clients._open))
        [connection] = service.service.clients._open
        bodies = [one for one in connection._waiting if isinstance(one, HttpRequest)]
        assert sum(one.held_bytes for one in bodies) <= 64 << 10
        got = answers(one, "GET", *["POST"] * 30)
        writer.join()
    assert got[0][2] == BIG
    assert [status for status, _, _ in got[1:]] == [200] * 30


@pytest.mark.parametrize("path", ["/ais/b/big.tar", "/v1/plan"])
def test_a_body_that_nobody_wants_is_not_waited_for(service: Inside, path: str) -> None:
    """A client that sends on while it is answered gets its answer, and not a connection that was reset."""
    method, status = ("PUT", b"405") if path != "/v1/plan" else ("POST", b"413")
    with dial(service) as one:
        one.sendall(
            asked(path, method, b"x").removesuffix(b"\r\n\r\nx").replace(b"Length: 1", b"Length: 999999999")
            + b"\r\n\r\n"
        )
        sent = 0
        while not select.select([one], [], [], 0)[0] and sent < 64 * MIB:
            sent += one.send(b"x" * 65536)
        assert one.recv(1 << 20).startswith(b"HTTP/1.1 " + status)
    until(lambda: count(service) == 0)


def test_an_upgrade_is_not_made(service: Inside) -> None:
    """Java's client asks for HTTP/2 by the first request of each connection, and goes on with HTTP/1.1."""
    upgrading = asked("/ais/b/small.tar", Connection="Upgrade, HTTP2-Settings", Upgrade="h2c")
    with dial(service) as one:
        for _ in range(2):
            one.sendall(upgrading)
            assert answers(one, "GET")[0][2] == SMALL
        one.sendall(upgrading * 3 + asked("/healthz"))
        assert [body for _, _, body in answers(one, *["GET"] * 4)] == [SMALL, SMALL, SMALL, b"alive\n"]
        one.sendall(asked("/healthz", Connection="Upgrade", Upgrade="h2c") + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert [status for status, _, _ in answers(one, "GET", "GET")] == [200, 400]
        assert one.recv(1) == b""


def test_nothing_behind_connect_is_a_request(service: Inside) -> None:
    got = spoken(service, b"CONNECT host:443 HTTP/1.1\r\nHost: localhost\r\n\r\n" + asked("/healthz"))
    assert got.startswith(b"HTTP/1.1 405 ")
    assert got.count(b"HTTP/1.1 ") == 1


def test_a_client_is_not_told_to_go_on_with_a_body_that_is_too_long(service: Inside) -> None:
    head = asked("/v1/plan", "POST", Expect="100-continue", Content_Length=str(2 * MIB))
    assert spoken(service, head).startswith(b"HTTP/1.1 413 ")


def test_rubbish_harms_nothing(service: Inside, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(5)
    whole = asked("/v1/plan", "POST", PLAN, Range="bytes=0-9") + asked("/ais/b/small.tar") + asked("/nothing", "HEAD")
    for _ in range(150):
        raw = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        with dial(service) as one:
            one.sendall(raw)
            one.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while one.recv(1 << 20):
                    pass
    until(lambda: count(service) == 0)
    assert "failed" not in caplog.text
    assert ask(f"{service.base}/ais/b/small.tar")[2] == SMALL


def test_a_field_of_an_answer_is_one_line(service: Inside) -> None:
    with dial(service) as one:
        one.sendall(asked("/healthz"))
        answers(one, "GET")
        [connection] = service.service.clients._open
        request = HttpRequest(connection, "GET", "/", {})
        for value in ("a\r\nSet-Cookie: b", "a\nb", "a\rb"):
            with pytest.raises(ValueError, match="line break"):
                request.head(200, {"ETag": value}, 0)


# -- times


def closed(connection: socket.socket) -> bool:
    """Whether the service closes it, within 20 s."""
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


BEFORE = {
    "at once": b"",
    "behind an empty line": b"\r\n",
    "behind two": b"\r\n\r\n",
    "after GET": asked("/healthz"),
    "after HEAD": asked("/ais/b/small.tar", "HEAD"),
    "after POST": asked("/v1/plan", "POST", PLAN),
    "after DELETE": asked("/v1/plan/x", "DELETE"),
    "after what is refused": asked("/nothing"),
}


@pytest.mark.parametrize(
    ("way", "before"),
    [*itertools.product(["plain"], BEFORE), *itertools.product(["tls", "local"], ["at once", "after GET"])],
)
def test_a_head_that_stops_coming_is_not_waited_for(
    serving: Callable[..., Inside], tls: Tls, way: str, before: str
) -> None:
    secured = {"certificate": tls.cert, "key": tls.key} if way == "tls" else {}
    with serving(header_timeout_s=0.3, **secured) as service, dial(service, local=way == "local") as raw:
        one = tls.client_context().wrap_socket(raw, server_hostname="localhost") if way == "tls" else raw
        with one:
            one.sendall(BEFORE[before])
            if BEFORE[before].strip():
                one.recv(1 << 20)
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
            assert closed(one)
        until(lambda: count(service) == 0)
        assert refusals(service)["head"] == 1


def test_a_head_that_trickles_or_came_in_part_with_the_last_one_is_not_waited_for(
    serving: Callable[..., Inside],
) -> None:
    with serving(header_timeout_s=0.3) as service:
        with dial(service) as trickling, pytest.raises(OSError):  # noqa: PT012 (each byte may be the one)
            while True:
                trickling.sendall(b"G")
                if select.select([trickling], [], [], 0.02)[0] and not trickling.recv(1000):
                    raise ConnectionResetError
        with dial(service) as pipelined:
            pipelined.sendall(asked("/healthz") + b"GET /healthz HT")
            assert closed(pipelined)


def test_a_handshake_that_never_ends_is_not_waited_for(serving: Callable[..., Inside], tls: Tls) -> None:
    with serving(header_timeout_s=0.3, certificate=tls.cert, key=tls.key) as service:
        for said in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            with dial(service) as one:
                one.sendall(said)
                until(lambda: count(service) == 1 or refusals(service).get("handshake", 0) > 0)
                assert closed(one)
        until(lambda: count(service) == 0)
        assert refusals(service) == {"handshake": 3}


def test_a_head_that_is_too_long(service: Inside) -> None:
    for end in (b"", b"\r\n\r\n"):
        with dial(service) as one:
            one.sendall(b"GET /ais/b/small.tar HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * HEAD_LIMIT_BYTES + end)
            [(status, fields, _)] = answers(one, "GET")
            assert (status, fields["server"]) == (431, SERVER)
            assert closed(one)
    until(lambda: count(service) == 0)
    with dial(service) as one:
        one.sendall(asked("/ais/b/small.tar", X="a" * (HEAD_LIMIT_BYTES - 500)))
        assert answers(one, "GET")[0][2] == SMALL


def test_a_large_body_is_no_head_that_is_too_long(service: Inside) -> None:
    plan = json.dumps({"shards": ["ais://b/small.tar"] * 5000}).encode()
    assert len(plan) > 4 * HEAD_LIMIT_BYTES
    with dial(service) as one:
        one.sendall(asked("/v1/plan", "POST", plan))
        assert answers(one, "POST")[0][0] == 200


def test_idle_connections_are_closed(serving: Callable[..., Inside], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_IDLE_S", 0.2)
    with serving() as service, dial(service) as fresh, dial(service) as used:
        used.sendall(asked("/healthz"))
        assert answers(used, "GET")[0][2] == b"alive\n"
        assert closed(fresh)
        assert closed(used)


def test_an_idle_client_that_does_not_end_tls_ends_no_time_limits(
    serving: Callable[..., Inside], tls: Tls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool of kept connections reads nothing: TLS's good-bye stays without an answer."""
    monkeypatch.setattr(http_server, "_IDLE_S", 0.1)
    monkeypatch.setattr(http_server, "_TLS_CLOSE_S", 1.0)
    with serving(certificate=tls.cert, key=tls.key, header_timeout_s=0.3) as service, dial(service) as raw:
        idle = tls.client_context().wrap_socket(raw, server_hostname="localhost")
        idle.sendall(asked("/healthz"))
        answers(idle, "GET")
        until(lambda: count(service) == 0)  # closed, though the client has not taken part
        with dial(service) as slow:
            assert closed(slow)
        idle.close()
    assert "Traceback" not in caplog.text
    assert [record for record in caplog.records if record.name == "asyncio" and record.levelname == "ERROR"] == []


@pytest.mark.parametrize("local", [False, True])
def test_clients_that_take_nothing_hold_up_no_other_and_are_let_go(serving: Callable[..., Inside], local: bool) -> None:
    with serving(send_timeout_s=0.5) as service:
        warm(service)
        stuck = [dial(service, local=local, receive_bytes=4096) for _ in range(20)]
        for one in stuck:
            one.sendall(asked("/ais/b/big.tar") * 3)
        with dial(service) as good:
            for _ in range(20):
                good.sendall(asked("/ais/b/big.tar"))
                assert answers(good, "GET")[0][2] == BIG
        until(lambda: count(service) == 0)
        assert service.context.cache.statistics().readers == 0
        for one in stuck:
            one.close()


def test_a_client_that_takes_nothing_of_a_page_is_let_go(serving: Callable[..., Inside]) -> None:
    with serving(send_timeout_s=0.3) as service, dial(service, receive_bytes=4096) as one:
        one.settimeout(0.2)
        with pytest.raises(OSError):  # noqa: PT012 (whichever fills the last buffer)
            while True:
                one.sendall(asked("/metrics") * 50)
        until(lambda: count(service) == 0)
        assert refusals(service)["slow-client"] == 1


# -- places


def test_the_longest_idle_connection_gives_way(serving: Callable[..., Inside]) -> None:
    with serving(clients=2, address_connections=2) as service:
        warm(service)
        until(lambda: count(service) == 0)
        with dial(service) as one, dial(service) as two:
            for each in (one, two, one):
                each.sendall(asked("/ais/b/small.tar"))
                assert answers(each, "GET")[0][2] == SMALL
            with dial(service) as three:
                three.sendall(asked("/ais/b/small.tar"))
                assert answers(three, "GET")[0][2] == SMALL
                assert closed(two)
                one.sendall(asked("/ais/b/small.tar"))
                assert answers(one, "GET")[0][2] == SMALL


@pytest.mark.parametrize("limit", ["clients", "address_connections"])
def test_places_for_health_checks_are_left_where_all_others_are_busy(
    serving: Callable[..., Inside], limit: str
) -> None:
    with serving(**{"clients": 9, "address_connections": 9, limit: 2}) as service, contextlib.ExitStack() as stack:
        warm(service)
        until(lambda: count(service) == 0)
        busy = [stack.enter_context(dial(service, receive_bytes=4096)) for _ in range(2)]
        for one in busy:
            one.sendall(asked("/ais/b/big.tar"))
        until(lambda: len(service.context.in_flight) == 2)
        for path in ("/healthz", "/readyz", "/v1/health", "/metrics"):
            with dial(service) as check:
                check.sendall(asked(path))
                [(status, fields, _)] = answers(check, "GET")
                assert (status, fields["connection"]) == (200, "close")
        with dial(service) as other:
            other.sendall(asked("/ais/b/small.tar"))
            [(status, fields, body)] = answers(other, "GET")
        assert (status, fields["retry-after"], fields["server"]) == (503, "1", SERVER)
        assert b"all connections are taken" in body
        assert refusals(service)["clients"] == 1
        for one in busy:
            assert answers(one, "GET")[0][2] == BIG


def test_reserved_places_are_no_way_around_the_limit(
    serving: Callable[..., Inside], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_RESERVED", 3)
    with serving(clients=1) as service:
        warm(service)
        until(lambda: count(service) == 0)
        with dial(service, receive_bytes=4096) as busy:
            busy.sendall(asked("/ais/b/big.tar"))
            until(lambda: len(service.context.in_flight) == 1)
            silent = [dial(service) for _ in range(30)]
            with dial(service) as check:
                check.sendall(asked("/healthz"))
                assert answers(check, "GET")[0][0] == 200
            until(lambda: count(service) <= 4)
            for one in silent:
                one.close()
            assert answers(busy, "GET")[0][2] == BIG


def test_one_address_does_not_take_the_places_of_others(serving: Callable[..., Inside]) -> None:
    with serving(clients=6, address_connections=3) as service:
        greedy = [dial(service) for _ in range(20)]
        until(lambda: count(service) == 3)
        with socket.create_connection(("127.0.0.1", service.port), 20, ("127.0.0.2", 0)) as other:
            other.sendall(asked("/healthz"))
            assert answers(other, "GET")[0][0] == 200
        for one in greedy:
            one.close()


def test_the_first_request_over_tls_may_come_with_the_end_of_the_handshake(
    serving: Callable[..., Inside], tls: Tls
) -> None:
    """As TLS 1.3 has it: the client's last message and its request are one segment."""
    with serving(certificate=tls.cert, key=tls.key) as service, dial(service) as raw:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = tls.client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(65536))
        client.write(asked("/ais/b/small.tar", Connection="close"))
        raw.sendall(outgoing.read())
        while piece := raw.recv(65536):
            incoming.write(piece)
        got = b""
        while not got.endswith(SMALL):
            got += client.read(65536)


# -- ending


@pytest.mark.parametrize("way", ["plain", "tls"])
def test_draining_lets_answers_end(serving: Callable[..., Inside], tls: Tls, way: str) -> None:
    secured = {"certificate": tls.cert, "key": tls.key} if way == "tls" else {}
    wrap = tls.client_context().wrap_socket

    def connected(service: Inside, receive_bytes: int = 0) -> socket.socket:
        raw = dial(service, receive_bytes=receive_bytes)
        return wrap(raw, server_hostname="localhost") if way == "tls" else raw

    with serving(**secured) as service, contextlib.ExitStack() as stack:
        idle, used, busy = (stack.enter_context(connected(service, size)) for size in (0, 0, 64 << 10))
        used.sendall(asked("/ais/b/big.tar"))
        assert answers(used, "GET")[0][2] == BIG
        busy.sendall(asked("/ais/b/big.tar"))
        until(lambda: len(service.context.in_flight) == 1)
        ending = threading.Thread(target=service.stop)
        ending.start()
        assert closed(idle)
        assert closed(used)
        assert answers(busy, "GET")[0][2] == BIG
        assert closed(busy)
        ending.join(20)
        assert not ending.is_alive()


def test_idle_connections_cost_one_descriptor(service: Inside) -> None:
    until(lambda: count(service) == 0)
    before = open_fds()
    idle = [dial(service) for _ in range(200)]
    until(lambda: count(service) == 200)
    assert open_fds() - before <= 2 * 200 + 2  # ours, and the service's in this process
    for one in idle:
        one.close()


_ANNOUNCE = """
    import http.client, json, socket, sys, time

    def say(name):
        one = http.client.HTTPConnection("localhost")
        one.sock = socket.socket(socket.AF_UNIX)
        one.sock.connect(sys.argv[1])
        one.request("POST", "/v1/plan", json.dumps({"shards": [sys.argv[2]]}), {"Wds-Client": name})
        assert one.getresponse().read()
        return one

    kept = say("first")
    say("second").close()   # as our loader does: a connection for each message, and others that stay
    print("said", flush=True)
    time.sleep(600)
"""


def test_a_plan_by_the_unix_socket_ends_with_its_process(origin: Origin, tmp_path: Path) -> None:
    origin.add("x.tar", b"x" * 100)
    path = tmp_path / "s"
    with Inside(allow=(origin.base + "/",), folder=tmp_path / "c", socket=path, plan_lifetime_s=3600) as service:
        target = f"{origin.base}/x.tar"
        others = [_announcing(path, target), _announcing(path, target)]
        try:
            stays = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
            stays.request("POST", "/v1/plan", json.dumps({"shards": [target]}), {"Wds-Client": "by-tcp"})
            assert stays.getresponse().read()
            stays.close()
            assert _planning(service, 3) == {"first", "second", "by-tcp"}
            others[0].kill()
            until(lambda: others[0].pid not in service.service.clients._processes)
            time.sleep(0.2)
            assert _planning(service, 3) == {"first", "second", "by-tcp"}
            others[1].kill()
            assert _planning(service, 1) == {"by-tcp"}
        finally:
            for other in others:
                other.kill()
                other.communicate()


def _announcing(path: Path, target: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(_ANNOUNCE), str(path), target]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"said\n"
    return process


def _planning(service: Inside, count: int) -> set[str]:
    """The clients that have a plan, once they are ``count``."""
    until(lambda: len(service.context.plans) == count)
    return {one["client"] for one in service.context.plans.as_list()}
