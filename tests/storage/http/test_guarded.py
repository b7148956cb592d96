"""aiohttp kept to addresses that a guard lets pass, and redirects that it is asked about."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from wds_async.errors import AccessDenied
from wds_async.storage.base import Request, Verdict
from wds_async.storage.http.backend import HttpBackend, guarded_resolver, is_address, judge
from wds_async.storage.http.errors import explain_exception
from wds_async.storage.http.messages import redirected


class NoLoopback:
    """A guard that keeps off this machine; ``asked`` about hosts and their addresses."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def why_not(self, host: str, address: str) -> str:
        self.asked.append((host, address))
        return "it is this machine" if address.startswith("127.") or address == "::1" else ""

    def leads(self, start: str, target: str) -> None:
        if "evil" in target:
            raise AccessDenied(f"{start} redirects to evil")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.1", "2130706433", "fe80::1%eth0"])
def test_what_no_resolver_is_asked_about(host: str) -> None:
    assert is_address(host)


@pytest.mark.parametrize("host", ["localhost", "1.example", "a.1", ""])
def test_what_a_resolver_is_asked_about(host: str) -> None:
    assert not is_address(host) or host == ""


def test_a_resolver_whose_answers_are_judged() -> None:
    async def run() -> None:
        guard = NoLoopback()
        resolver = guarded_resolver(guard)
        with pytest.raises(AccessDenied, match="this machine"):
            await resolver.resolve("localhost", 80)
        assert guard.asked[0][0] == "localhost"
        await resolver.close()

    asyncio.run(run())
    judge(NoLoopback(), "host", "1.1.1.1")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "[::1]"])
def test_no_request_by_aiohttp_goes_where_it_may_not(host: str) -> None:
    async def run() -> None:
        connected = False

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connected
            connected = True
            writer.close()

        server = await asyncio.start_server(serve, ["127.0.0.1"], 0)
        port = server.sockets[0].getsockname()[1]
        backend = HttpBackend(guard=NoLoopback())
        with pytest.raises((AccessDenied, aiohttp.ClientError)) as caught:
            await backend.get(Request(f"http://{host}:{port}/x", guard=NoLoopback()))
        assert explain_exception(caught.value).verdict in (Verdict.DENIED, Verdict.TRANSIENT, Verdict.FATAL)
        assert not connected
        await backend.close()
        server.close()
        await server.wait_closed()

    asyncio.run(run())


def test_a_guards_word_is_final() -> None:
    fault = explain_exception(AccessDenied("no connection is made: it is private"))
    assert fault.verdict is Verdict.DENIED
    assert "private" in fault.reason


def test_redirects_are_asked_about_and_so_are_the_next_ones() -> None:
    request = Request("https://host/x", guard=NoLoopback())
    further = redirected(request, "https://other/y")
    assert further.guard is request.guard
    with pytest.raises(AccessDenied, match="evil"):
        redirected(further, "https://evil/")
    assert redirected(Request("https://host/x"), "https://evil/").url == "https://evil/"
