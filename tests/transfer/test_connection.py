"""The small HTTP client by itself, over plain TCP and TLS, on uvloop's loop and asyncio's."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.servers import Tls
from tests.transfer.reading import data
from wds_async.background import new_event_loop
from wds_async.transfer.connection import (
    FIELDS_LIMIT,
    HEAD_LIMIT_BYTES,
    PACE_BYTES,
    Connection,
    ConnectionBroken,
    Head,
    Origin,
    open_connection,
    parse_head,
    request_bytes,
)


class Server:
    """Answers each request on each connection with the next of ``answers``: pieces, each in a packet of its own."""

    def __init__(self, answers: list[list[bytes]], context: ssl.SSLContext | None = None) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self._context = context
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listening.close()
        self._thread.join(5)

    def _run(self) -> None:
        client, _ = self._listening.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            client = self._context.wrap_socket(client, server_side=True)
        with client:
            try:
                for pieces in self.answers:
                    head = b""
                    while not head.endswith(b"\r\n\r\n"):
                        got = client.recv(1)
                        if not got:
                            return
                        head += got
                    self.requests.append(head)
                    for piece in pieces:
                        client.sendall(piece)
                if self._context is not None:
                    client.unwrap()  # type: ignore[attr-defined]
            except OSError:
                pass


LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, new_event_loop]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    made = request.param()
    yield made
    made.close()


def _talk(
    loop: asyncio.AbstractEventLoop,
    answers: list[list[bytes]],
    scenario: Callable[[Connection], Coroutine[Any, Any, None]],
    tls: Tls | None = None,
) -> Server:
    server = Server(answers, tls.server_context() if tls else None)

    async def run() -> None:
        origin = Origin("https" if tls else "http", "localhost", server.port)
        context = tls.client_context() if tls else None
        connection = await open_connection(loop, origin, "127.0.0.1", context)
        try:
            async with asyncio.timeout(10):
                await scenario(connection)
        finally:
            connection.abort()
            await asyncio.sleep(0.01)

    try:
        loop.run_until_complete(run())
    finally:
        server.close()
    return server


def _head(length: int, status: int = 200, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{extra}\r\n".encode()


def _cuts(raw: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *at, len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "cuts",
    [[], [1], [10, 20], [39], [40], [41], [38, 39, 40, 41], [40, 1000], [100, 20_000, 100_000], [16_384], [33_000]],
)
def test_bodies_arrive_whatever_the_packets(
    loop: asyncio.AbstractEventLoop, tls: Tls, cuts: list[int], secure: bool
) -> None:
    content = data(200_000)
    raw = _head(len(content)) + content
    slab = bytearray(len(content))

    async def scenario(connection: Connection) -> None:
        for last in (False, True):
            slab[:] = bytes(len(slab))
            head = await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(slab))
            assert (head.status, head.length) == (200, len(content))
            assert connection.received == len(content)
            assert slab == content
            assert last or connection.reusable()

    _talk(loop, [_cuts(raw, cuts)] * 2, scenario, tls if secure else None)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("steps", [[1, 199_999], [50_000] * 4, [100_000, 100_000], [65_536, 65_536, 65_536, 3392]])
def test_a_body_is_read_in_steps(loop: asyncio.AbstractEventLoop, tls: Tls, steps: list[int], secure: bool) -> None:
    content = data(200_000)

    async def scenario(connection: Connection) -> None:
        await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(b""))
        got = b""
        for step in steps:
            await asyncio.sleep(0.005)  # the socket fills meanwhile, and reading pauses
            into = bytearray(step)
            await connection.body(memoryview(into))
            got += into
        assert got == content
        assert connection.reusable()
        await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(b""))

    _talk(loop, [[_head(len(content)) + content], [_head(0)]], scenario, tls if secure else None)


@pytest.mark.parametrize("secure", [False, True])
def test_what_arrived_before_a_break_is_counted(loop: asyncio.AbstractEventLoop, tls: Tls, secure: bool) -> None:
    content = data(100_000)
    slab = bytearray(200_000)

    async def scenario(connection: Connection) -> None:
        with pytest.raises(ConnectionBroken):
            await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(slab))
        assert connection.received == len(content)
        assert slab[: len(content)] == content
        assert not connection.reusable()
        await asyncio.sleep(0)  # by then the loop has closed its socket
        for size in (1, 1_000_000):
            with pytest.raises(ConnectionBroken):
                await connection.body(memoryview(bytearray(size)))

    _talk(loop, [[_head(200_000) + content]], scenario, tls if secure else None)


def test_bytes_that_nobody_asked_for(loop: asyncio.AbstractEventLoop) -> None:
    async def scenario(connection: Connection) -> None:
        slab = bytearray(5)
        await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(slab))
        assert slab == b"12345"
        await asyncio.sleep(0.02)
        assert not connection.reusable()

    _talk(loop, [[_head(5) + b"12345" + b"HTTP/1.1 200 smuggled\r\n\r\n"]], scenario)


def test_interim_answers_are_passed_over(loop: asyncio.AbstractEventLoop) -> None:
    async def scenario(connection: Connection) -> None:
        head = await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(bytearray(2)))
        assert head.status == 206

    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    _talk(loop, [[interim + _head(2, 206) + b"ab"]], scenario)


def test_what_accept_raises_is_raised(loop: asyncio.AbstractEventLoop) -> None:
    def refuse(head: Head) -> memoryview:
        raise LookupError(head.status)

    async def scenario(connection: Connection) -> None:
        with pytest.raises(LookupError):
            await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", refuse)
        assert not connection.reusable()

    _talk(loop, [[_head(5) + b"12345"]], scenario)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * (HEAD_LIMIT_BYTES + 1),
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (HEAD_LIMIT_BYTES // 25 + 700),
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (FIELDS_LIMIT + 2) + b"content-length: 0\r\n\r\n",
    ],
    ids=["ssh", "http2", "tls", "lengths", "endless", "nothing", "half", "interim", "fields"],
)
def test_what_is_not_http(loop: asyncio.AbstractEventLoop, raw: bytes) -> None:
    async def scenario(connection: Connection) -> None:
        with pytest.raises(ConnectionBroken):
            await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(bytearray(1)))

    _talk(loop, [[raw]], scenario)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("come", "said"),
    [
        (b"", "no byte arrived for 30 s"),
        (b"HTTP/1.1 200 OK\r\nA", "the answer's head was not complete within 30 s"),
        (_head(100_000) + b"x" * 500, "less than 16 KiB arrived within 30 s"),
    ],
    ids=["silence", "slow head", "trickle"],
)
def test_what_counts_as_a_stall(loop: asyncio.AbstractEventLoop, come: bytes, said: str) -> None:
    async def scenario(connection: Connection) -> None:
        slab = memoryview(bytearray(100_000))
        task = asyncio.ensure_future(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: slab))
        await asyncio.sleep(0)
        asked_at = connection.moved_at
        if come:  # each byte is one that moved, and renews nothing
            await _until(lambda: connection.moved_at > asked_at or connection.received > 0 or bool(connection._early))
            connection.moved_at = asked_at + 25
        assert connection.too_slow(asked_at + 29, 30) == ""
        if connection.received:
            assert connection.too_slow(connection._paced_at + 29.9, 30) == ""
        assert connection.too_slow(connection._paced_at + 30.1, 30) == said
        task.cancel()
        await asyncio.wait([task])
        assert connection.too_slow(asked_at + 1e6, 30) == ""  # nobody waits

    # The server waits for another request, and keeps the connection open meanwhile.
    _talk(loop, [[come] if come else [], []], scenario)


def test_sixteen_kib_are_progress(loop: asyncio.AbstractEventLoop) -> None:
    async def scenario(connection: Connection) -> None:
        slab = memoryview(bytearray(1_000_000))
        task = asyncio.ensure_future(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: slab))
        await _until(lambda: connection._body is not None)
        # What lies in the kernel below the low water mark is seen once nothing has moved for a second.
        at = connection._paced_at
        assert connection.too_slow(at + 5, 30) == ""
        await _until(lambda: connection.received >= PACE_BYTES)
        assert connection.too_slow(at + 20, 30) == ""
        marked_at = connection._paced_at
        assert marked_at >= at + 5
        assert connection.too_slow(marked_at + 29, 30) == ""
        assert connection.too_slow(marked_at + 31, 30).startswith("no byte")
        task.cancel()
        await asyncio.wait([task])

    _talk(loop, [[_head(1_000_000) + b"x" * PACE_BYTES], []], scenario)


def test_after_an_abort_nothing_is_written(loop: asyncio.AbstractEventLoop) -> None:
    slab = bytearray(100_000)

    async def scenario(connection: Connection) -> None:
        exchange = connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(slab))
        task = asyncio.ensure_future(exchange)
        await _until(lambda: connection.received > 0)
        connection.abort()
        slab[:] = bytes(len(slab))
        with pytest.raises(ConnectionBroken, match="aborted"):
            await task
        await asyncio.sleep(0.02)
        assert slab == bytes(len(slab))

    _talk(loop, [[_head(len(slab)) + b"x" * 10] + [b"y" * 1000] * 99, []], scenario)


def test_a_cancelled_exchange_writes_no_more(loop: asyncio.AbstractEventLoop) -> None:
    slab = bytearray(100_000)

    async def scenario(connection: Connection) -> None:
        task = asyncio.ensure_future(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(slab)))
        while not connection.received:  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        connection.abort()
        slab[:] = bytes(len(slab))
        await asyncio.sleep(0.05)
        assert slab == bytes(len(slab))

    _talk(loop, [[_head(len(slab)) + b"x" * 10] + [b"y" * 1000] * 99], scenario)


def test_heads() -> None:
    head = parse_head(b'HTTP/1.1 206 P\r\nETag: "a"\r\ncontent-range: bytes 5-9/100\r\nContent-Length: 5\r\n\r\n')
    assert (head.status, head.fields["etag"], head.length, head.keep_alive) == (206, '"a"', 5, True)
    assert head.content_range() == (5, 10, 100)
    assert not head.encoded
    assert not parse_head(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").keep_alive
    assert not parse_head(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n").keep_alive
    assert parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").length is None
    assert parse_head(b"HTTP/1.1 304 X\r\n\r\n").length == 0
    assert parse_head(b"HTTP/1.1 200 OK\r\nContent-Encoding: GZIP\r\n\r\n").encoded
    assert not parse_head(b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\n\r\n").encoded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-0/1", (0, 1, 1)),
        ("bytes 0-0/*", (0, 1, None)),
        ("bytes */7", (0, 0, 7)),
        ("BYTES 1-2/3", (1, 3, 3)),
        ("bytes 1-2", None),
        ("items 1-2/3", None),
        ("bytes a-b/c", None),
        ("", None),
    ],
)
def test_content_ranges(text: str, expected: object) -> None:
    assert Head(206, {"content-range": text}, True).content_range() == expected


def test_requests() -> None:
    raw = request_bytes("http://h:81/a b/ü%20?x=1 2&y=%41", [("A", "b")])
    assert raw == b"GET /a%20b/%C3%BC%20?x=1%202&y=%41 HTTP/1.1\r\nHost: h:81\r\nA: b\r\n\r\n"
    assert b"Host: [::1]:81\r\n" in request_bytes("http://[::1]:81/", [])
    assert b"Host: h\r\n" in request_bytes("https://h:443", [])
    assert request_bytes("http://h", []).startswith(b"GET / HTTP/1.1")
    with pytest.raises(ValueError, match="line break"):
        request_bytes("http://h/", [("A", "b\r\nEvil: yes")])


def test_origins() -> None:
    assert Origin.of("HTTPS://H.example/x") == Origin("https", "h.example", 443)
    assert Origin.of("http://u:p@h:80/") == Origin.of("http://h/")
    for url in ("ftp://h/", "http://", "/x"):
        with pytest.raises(ValueError, match="not an HTTP URL"):
            Origin.of(url)
