"""Connections kept, given up and verified."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, Tls
from tests.transfer.reading import KIB, MIB, bytes_of, data, open_fds, outcomes, quick, snapshot
from wds_async.config import RetryPolicy, TransferConfig
from wds_async.errors import TransferError
from wds_async.transfer import connection
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters

PART = 256 * KIB


def test_connections_are_used_again(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(1000, i)) for i in range(200)]
    bytes_of(urls, quick(connections=8))
    assert origin.most_connections <= 8
    assert origin.connections <= 20  # those on which too much was asked for, before the first answer, were given up


def test_the_limit_of_connections_holds(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(100_000, i)) for i in range(50)]
    origin.behave(delay_s=0.005)
    bytes_of(urls, quick(connections=3))
    assert 2 <= origin.most_in_flight <= 3


@pytest.mark.parametrize("how", ["announced", "silent"])
def test_servers_that_hang_up_after_every_answer(origin: Origin, how: str) -> None:
    contents = [data(3 * PART, i) for i in range(8)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(hang_up=how)
    assert bytes_of(urls, quick(connections=2)) == contents
    ranges = [(request.path, request.range) for request in origin.requests]
    assert len(ranges) == len(set(ranges)), "something was asked for twice"


def test_a_connection_that_was_closed_while_idle_costs_nothing(origin: Origin) -> None:
    contents = [data(1000, i) for i in range(3)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(hang_up="silent")
    config = quick(retry=quick().retry.__class__(max_attempts=1))
    with open_shards(urls, config=config, lookahead=1) as reader:
        for shard, content in zip(reader, contents, strict=True):
            assert bytes(shard.read() or b"") == content
            assert shard.read() is None
            origin.wait_until(lambda server: server.open_connections == 0)


def test_tls_is_verified(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    content = data(5 * PART + 1)
    with Origin({"/x.tar": content}, tls=tls.server_context()) as origin:
        url = origin.url("x.tar")
        for direct in (True, False):
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            ((got, error),) = outcomes([url], quick(direct=direct))
            assert isinstance(error, TransferError)
            assert "certificate does not verify" in str(error)
            assert "SSL_CERT_FILE" in str(error)
            assert f"{url} at byte 0" in str(error)
            assert got == b""
            monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
            assert bytes_of([url], quick(direct=direct)) == [content]


def test_a_certificate_for_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Tls.create(tmp_path, "other.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(other.ca))
    with Origin({"/x.tar": b"x"}, tls=other.server_context()) as origin:
        ((got, error),) = outcomes([origin.url("x.tar")])
        assert isinstance(error, TransferError)
        assert "certificate does not verify" in str(error)
        assert got == b""
        assert not origin.requests


def test_faults_over_tls(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    contents = [data(2 * PART, i) for i in range(6)]
    with Origin(tls=tls.server_context(), seed=3) as origin:
        urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
        before = open_fds()
        origin.behave(probability=0.2, cut_after=10_000, cut="fin")
        origin.behave(probability=0.2, cut_after=10_000)
        origin.behave(probability=0.2, hang_up="silent")
        assert bytes_of(urls, quick(retry=quick().retry.__class__(max_attempts=30, base_s=0.001))) == contents
        origin.wait_until(lambda server: server.open_connections == 0)
        assert open_fds() <= before


def test_plain_http_where_tls_was_expected(origin: Origin) -> None:
    url = origin.add("x.tar", b"x").replace("http://", "https://")
    ((_, error),) = outcomes([url], quick(connect_timeout_s=0.2))
    assert isinstance(error, TransferError)
    assert "x.tar at byte 0" in str(error)


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/x.tar"
        with open_shards([url], config=quick(stall_timeout_s=300.0)) as reader:
            next(reader)


def test_a_slow_consumer_is_not_a_stall(origin: Origin) -> None:
    # A streamed answer pauses while nobody reads; that must neither break nor repeat it.
    content = data(4 * MIB)
    url = origin.add("x.tar", content)
    origin.behave(ignore_range=True)
    got = bytearray()
    with open_shards([url], config=quick(budget_bytes=1 * MIB, stall_timeout_s=0.2)) as reader:
        shard = next(reader)
        got += shard.read() or b""
        threading.Event().wait(2.5)  # longer than the stall timeout and the watch's interval together
        while (piece := shard.read()) is not None:
            got += piece
    assert got == content
    assert sum(request.range is None for request in origin.requests) == 1


def test_streamed_answers_leave_no_connection_behind(origin: Origin) -> None:
    contents = [data(400_000, i) for i in range(40)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(ignore_range=True)
    assert bytes_of(urls) == contents
    assert origin.most_connections <= 8


# -- names and addresses -------------------------------------------------------------------------------------------


class Loop(asyncio.SelectorEventLoop):
    """Its clock may be put forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Names:
    """A name service in the place of the threads: ``answers`` are addresses or the exception, one for each call."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def call(self, function: Any, host: str, port: int, **kwargs: Any) -> Any:
        assert function is socket.getaddrinfo
        await asyncio.sleep(0)
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]


def _connect(
    names: Names, scenario: Callable[[Loop, Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
) -> None:
    """Run ``scenario(loop, connect)``; ``connect`` makes a fresh connection to a server that listens on 127.0.0.1."""
    loop = Loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        origin = connection.Origin("http", "some.host", listening.getsockname()[1])
        pool = ConnectionPool(loop, names, TransferConfig())  # type: ignore[arg-type]

        async def connect() -> None:
            async with pool.connection(origin, fresh=True):
                pass

        async def run() -> None:
            try:
                await scenario(loop, connect)
            finally:
                pool.close()
                await pool.gone()

        try:
            loop.run_until_complete(run())
        finally:
            loop.close()


GONE = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_known_addresses_outlive_the_name_service() -> None:
    names = Names(["127.0.0.1"], GONE, GONE, ["127.0.0.1"])

    async def scenario(loop: Loop, connect: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await connect()
        assert names.asked == 1
        loop.ahead_s += 61
        await connect()
        await connect()
        assert names.asked == 2  # it is not asked at each connection while it fails
        loop.ahead_s += 6
        await connect()
        loop.ahead_s += 6
        await connect()
        assert names.asked == 4
        await connect()
        assert names.asked == 4

    _connect(names, scenario)


def test_a_name_is_asked_for_once_however_many_wait() -> None:
    names = Names(["127.0.0.1"])

    async def scenario(loop: Loop, connect: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*(connect() for _ in range(20)))
        assert names.asked == 1

    _connect(names, scenario)


def test_a_refused_address_is_left_out_while_there_are_others() -> None:
    names = Names(["127.0.0.2", "127.0.0.1", "127.0.0.3"], ["127.0.0.2"], GONE, ["127.0.0.1"])

    async def scenario(loop: Loop, connect: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for _ in range(6):
            await connect()
        assert names.asked == 1
        loop.ahead_s += 61
        with pytest.raises(OSError, match=r"127\.0\.0\.2"):  # all of them refuse: the name is asked about anew
            await connect()
        with pytest.raises(OSError, match=r"127\.0\.0\.2"):  # and the last one known is not forgotten
            await connect()
        loop.ahead_s += 6
        await connect()
        assert names.asked == 4

    _connect(names, scenario)


# -- before an origin has answered once ----------------------------------------------------------------------------


@contextlib.contextmanager
def _alerting() -> Iterator[int]:
    """A server that answers any handshake with a fatal alert of TLS; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    with client:
                        client.recv(4096)
                        client.sendall(b"\x15\x03\x03\x00\x02\x02\x28")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@contextlib.contextmanager
def _black_hole() -> Iterator[int]:
    """A port that answers no SYN: its queue is full; the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("place", "scheme", "connect_s", "allowed_s", "reason"),
    [
        (_alerting, "https", 10.0, 2.0, "(?i)alert|handshake"),  # at once, and later on a busy machine
        (_black_hole, "http", 0.2, 0.5, "no connection to 127.0.0.1"),
    ],
    ids=["alert", "black hole"],
)
def test_a_first_contact_that_fails_ends_soon(
    place: Callable[[], contextlib.AbstractContextManager[int]],
    scheme: str,
    connect_s: float,
    allowed_s: float,
    reason: str,
) -> None:
    patient = RetryPolicy(timeout_s=300.0, first_contact_s=allowed_s, base_s=0.01)
    with place() as port:
        url, config = f"{scheme}://127.0.0.1:{port}/x.tar", quick(connect_timeout_s=connect_s, retry=patient)
        ((_, error),) = outcomes([url], config)
    assert isinstance(error, TransferError)
    assert re.search(reason, str(error)), str(error)
    assert re.search(r" after \d+ attempts", str(error)), str(error)


def test_connections_that_all_died_while_idle_cost_no_attempt(origin: Origin) -> None:
    """As after a restart of the server: each kept connection ends with the next request on it."""
    contents = [data(6 * PART, i) for i in range(6)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    used: set[int] = set()

    def again(request: Any) -> bool:
        known = request.connection in used
        used.add(request.connection)
        return known

    origin.behave(when=again, cut_after=-1, cut="fin")
    counters = Counters()
    assert bytes_of(urls, quick(retry=RetryPolicy(max_attempts=1)), counters) == contents
    assert snapshot(counters).retries == 0
    assert len(used) > 6


def test_a_socket_has_no_name_to_ask_for(tmp_path: Path) -> None:
    loop = Loop()
    names = Names()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()

    async def run() -> None:
        pool = ConnectionPool(loop, names, TransferConfig())  # type: ignore[arg-type]
        origin = connection.Origin.of("http://localhost/x", socket=str(tmp_path / "s"))
        async with pool.connection(origin):
            pass
        assert pool.answered(origin)
        assert not pool.answered(connection.Origin.of("http://localhost/x"))
        pool.close()
        await pool.gone()

    loop.run_until_complete(run())
    loop.close()
    listening.close()
    assert names.asked == 0
