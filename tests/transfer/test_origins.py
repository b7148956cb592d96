"""Connections kept, given up and verified."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from tests.servers import Origin, Tls
from tests.transfer.reading import KIB, MIB, bytes_of, data, open_fds, outcomes, quick
from wds_async.errors import TransferError
from wds_async.transfer.reader import open_shards

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
        began = time.monotonic()
        with open_shards([url]) as reader:
            next(reader)
        assert time.monotonic() - began < 2


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
