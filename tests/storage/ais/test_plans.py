"""Telling the service what comes: when, how often, and that nothing ever waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from wds_async.storage.ais import plans
from wds_async.storage.ais.plans import Announcer
from wds_async.storage.base import Request
from wds_async.storage.http.backend import HttpBackend


class Listener:
    """Takes messages at loopback: ``said`` has method, path, fields and body of each; ``status`` is what it answers,
    once ``open`` is set."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, dict[str, str], Any]] = []
        self.status = 200
        self.open = asyncio.Event()
        self.open.set()
        self.under_way = self.most = 0
        self.told = asyncio.Condition()

    async def start(self) -> Request:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return Request(f"http://127.0.0.1:{port}/v1/objects/b/x", (("Wds-Client", "me"), ("Authorization", "Bearer t")))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10), self.told:
            await self.told.wait_for(lambda: len(self.said) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        method, path, _ = head[0].split()
        async with self.told:
            self.said.append((method, path, fields, json.loads(body) if body else None))
            self.told.notify_all()
        await self.open.wait()
        self.under_way -= 1
        writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        writer.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_GATHER_S", (0.0, 0.0))


async def over(announcer: Announcer) -> None:
    """Return when no message is under way."""
    if announcer._task is not None:
        await asyncio.wait([announcer._task])


def run(work: Callable[[Announcer, Listener, Request], Any]) -> None:
    async def all_of_it() -> None:
        listener = Listener()
        request = await listener.start()
        client = HttpBackend()
        announcer = Announcer(client.send)
        async with asyncio.timeout(20):
            await work(announcer, listener, request)
            listener.open.set()
            await announcer.close()
            await client.close()
        listener._server.close()
        await listener._server.wait_closed()

    asyncio.run(all_of_it())


def test_what_is_ahead_and_not_begun_is_told_and_taken_back() -> None:
    async def work(announcer: Announcer, listener: Listener, request: Request) -> None:
        announcer.expect(["gs://b/1", "gs://b/2"])
        announcer.expect(["gs://b/3"])
        announcer.greet()
        announcer.begun("gs://b/1")
        announcer.tell(request)
        await listener.until(1)
        method, path, fields, body = listener.said[0]
        assert (method, path, fields["wds-client"], fields["authorization"]) == ("POST", "/v1/plan", "me", "Bearer t")
        assert body["shards"] == ["gs://b/2", "gs://b/3"]
        assert (body["client"], body["position"], body["ahead"]) == (announcer.client, 0, 2)
        await announcer.close()
        assert listener.said[1][:2] == ("DELETE", f"/v1/plan/{announcer.client.replace(':', '%3A')}")

    run(work)


def test_its_name_is_host_and_process() -> None:
    one, two = Announcer(HttpBackend().send), Announcer(HttpBackend().send)
    assert one.client == ""
    one.greet()
    two.greet()
    assert one.client.startswith(f"{socket.gethostname()}:{os.getpid()}")
    assert one.client != two.client
    before = one.client
    one.greet()
    assert one.client == before


def test_nobody_is_told_who_is_not_ours() -> None:
    async def work(announcer: Announcer, listener: Listener, request: Request) -> None:
        announcer.expect(["gs://b/1"])
        announcer.tell(request)
        await asyncio.sleep(0.01)
        await announcer.close()
        assert listener.said == []

    run(work)


def test_one_message_at_a_time_and_what_came_meanwhile_in_the_next() -> None:
    async def work(announcer: Announcer, listener: Listener, request: Request) -> None:
        listener.open.clear()
        announcer.greet()
        for i in range(20):
            announcer.expect([f"gs://b/{i}"])
            announcer.tell(request)
            if i == 0:
                await listener.until(1)
        announcer.begun("gs://b/0")
        listener.open.set()
        await listener.until(2)
        assert [len(said[3]["shards"]) for said in listener.said] == [1, 19]
        assert listener.most == 1

    run(work)


def test_a_fault_is_nobodys_business_and_it_is_left_alone() -> None:
    async def work(announcer: Announcer, listener: Listener, request: Request) -> None:
        listener.status = 500
        announcer.greet()
        announcer.expect(["gs://b/1"])
        announcer.tell(request)
        await listener.until(1)
        await over(announcer)
        announcer.expect(["gs://b/2"])
        announcer.tell(request)
        await asyncio.sleep(0.01)
        assert len(listener.said) == 1

    run(work)


def test_nobody_listens() -> None:
    async def work(announcer: Announcer, listener: Listener, request: Request) -> None:
        announcer.greet()
        announcer.expect(["gs://b/1"])
        announcer.tell(Request("http://127.0.0.1:9/x"))
        await over(announcer)

    run(work)


def test_what_is_remembered_has_an_end() -> None:
    async def work(announcer: Announcer, listener: Listener, request: Request) -> None:
        for i in range(10_000):
            announcer.expect([f"gs://b/{i}"])
        announcer.greet()
        announcer.tell(request)
        await listener.until(1)
        assert len(listener.said[0][3]["shards"]) == 512

    run(work)


def test_a_service_that_does_not_answer_holds_up_no_end() -> None:
    async def work(announcer: Announcer, listener: Listener, request: Request) -> None:
        listener.open.clear()
        announcer.greet()
        announcer.expect(["gs://b/1"])
        announcer.tell(request)
        await listener.until(1)
        async with asyncio.timeout(5):
            await announcer.close()

    run(work)
