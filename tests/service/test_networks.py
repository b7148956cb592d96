"""Clients on another machine's side of a real link: its rate is shared, it breaks, and it is left slowly."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.servers.link import Link
from tests.servers.process import required
from tests.service.serving import Inside, until
from tests.transfer.reading import MIB, data

BODY = data(12 * MIB)


@pytest.fixture(scope="module")
def built() -> Iterator[Link]:
    with required(), Link("160mbit") as link:
        yield link


@pytest.fixture
def link(built: Link) -> Iterator[Link]:
    yield built
    built.mend()
    built.shape("160mbit")


@pytest.fixture
def serving(link: Link, origin: Origin, tmp_path: Path) -> Callable[..., Inside]:
    origin.add("d/x.tar", BODY)
    given: dict[str, Any] = {"host": link.here, "allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}}

    def serve(**settings: Any) -> Inside:
        return Inside(**{**given, "folder": tmp_path / "cache", "private": True, **settings})

    return serve


class Client:
    """One connection from the other side, and the answer to one request for the shard."""

    def __init__(self, link: Link, port: int, name: str = "", receive_bytes: int | None = None) -> None:
        self._connection = http.client.HTTPConnection("service")
        self._socket = self._connection.sock = link.connect(port, receive_bytes)
        self._connection.request("GET", "/ais/b/x.tar", headers={"Wds-Client": name} if name else {})
        self._answer = self._connection.getresponse()
        self.got = bytearray()

    def read(self, count: int = 1 << 30) -> bytearray:
        """So many bytes more, or all that come."""
        while count > 0 and (piece := self._answer.read1(min(count, 256 << 10))):
            self.got += piece
            count -= len(piece)
        return self.got

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._answer.close()
        self._connection.close()
        assert self._socket.fileno() == -1


def test_each_client_has_its_share_whatever_its_connections(link: Link, serving: Callable[..., Inside]) -> None:
    """One with 32 connections, one with one; the link would carry ten of such shares."""
    share, burst, piece = 4 * MIB, MIB, 256 << 10
    link.shape("400mbit")
    with serving(client_bytes_per_s=share) as service, contextlib.ExitStack() as stack:
        modest = stack.enter_context(Client(link, service.port, "modest"))
        began = time.monotonic()
        greedy = [stack.enter_context(Client(link, service.port, "greedy")) for _ in range(32)]
        threads = [threading.Thread(target=_take, args=(one,)) for one in greedy]
        for thread in threads:
            thread.start()
        modest.read(7 * MIB)
        taken, took = sum(len(one.got) for one in greedy), time.monotonic() - began
        service.loop.call_soon_threadsafe(service.service.clients.close)
        for thread in threads:
            thread.join()
        assert bytes(modest.got) == BODY[: 7 * MIB]
        assert taken <= share * took + burst + piece, "its connections are counted together"
        assert taken <= 2 * 7 * MIB, "and take nothing of the other's"


def _take(client: Client) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        client.read()


@pytest.mark.parametrize("way", ["cold", "warm"])
def test_a_link_that_is_cut_and_comes_back(way: str, link: Link, serving: Callable[..., Inside]) -> None:
    with serving() as service:
        if way == "warm":
            read_once(link, service)
        with Client(link, service.port) as client:
            client.read(MIB)
            link.cut()
            time.sleep(0.3)  # as long as it is away, which nobody can wait for
            link.mend()
            assert bytes(client.read()) == BODY


@pytest.mark.parametrize("way", ["cold", "warm"])
def test_a_link_that_stays_cut_holds_no_connection(way: str, link: Link, serving: Callable[..., Inside]) -> None:
    with serving(send_timeout_s=0.5) as service:
        if way == "warm":
            read_once(link, service)
        with Client(link, service.port) as client:
            client.read(MIB)
            assert service.context.meters.clients >= 1
            link.cut()
            until(lambda: service.context.meters.clients == 0)
            assert len(service.context.in_flight) == 0
            until(lambda: service.context.fetcher.held_bytes == 0)
            link.mend()
            with contextlib.suppress(OSError, http.client.HTTPException):
                assert len(client.read()) < len(BODY)
        read_once(link, service)


def test_who_reads_slowly_from_afar_is_waited_for(link: Link, serving: Callable[..., Inside]) -> None:
    with serving(grace_s=60) as service:
        port = service.port
        with Client(link, port, receive_bytes=64 << 10) as client:
            client.read(MIB)
            link.shape("40mbit")
            ending = threading.Thread(target=service.stop)
            ending.start()
            until(lambda: not service.service._listening)
            with pytest.raises(ConnectionRefusedError):
                link.connect(port)
            client.read(2 * MIB)
            assert ending.is_alive()
            link.shape("400mbit")
            assert bytes(client.read()) == BODY
            ending.join(30)
            assert not ending.is_alive()


def read_once(link: Link, service: Inside) -> None:
    link.shape("1gbit")
    with Client(link, service.port) as client:
        assert bytes(client.read()) == BODY
    link.shape("160mbit")
