"""Plans for the service: their messages, how often they are sent, and that nothing ever waits for them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from wds_async.storage.ais import plans
from wds_async.storage.ais.plans import Announcer
from wds_async.storage.base import Request
from wds_async.storage.http.backend import HttpBackend


class PlanServer:
    """A server that keeps the method, path, headers and body of each message, and answers ``status`` once ``open`` is
    set; ``most`` messages were under way at once."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, Any, Any]] = []
        self.status, self.open = 200, asyncio.Event()
        self.open.set()
        self.under_way = self.most = 0
        self._arrived = asyncio.Condition()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        body = await request.json() if request.can_read_body else None
        async with self._arrived:
            self.messages.append((request.method, request.raw_path, request.headers, body))
            self._arrived.notify_all()
        await self.open.wait()
        self.under_way -= 1
        return web.json_response({}, status=self.status)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: len(self.messages) >= count)


Work = Callable[[Announcer, PlanServer, Request], Awaitable[None]]


def scenario(work: Work) -> Callable[[], None]:
    """A test that does ``work`` with an announcer, a server, and a request for that."""

    async def run() -> None:
        plan_server, client = PlanServer(), HttpBackend()
        announcer = Announcer(client.send)
        async with asyncio.timeout(20), RawTestServer(plan_server.handle) as server:
            headers = (("Wds-Client", "me"), ("Authorization", "Bearer t"))
            await work(announcer, plan_server, Request(str(server.make_url("/v1/objects/b/x")), headers))
            plan_server.open.set()
            await announcer.close()
            await client.close()

    return lambda: asyncio.run(run())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_GATHER_S", (0.0, 0.0))


async def over(announcer: Announcer) -> None:
    """Return when no message is under way."""
    if announcer._task is not None:
        await asyncio.wait([announcer._task])


@scenario
async def test_the_plan_is_sent_and_withdrawn(announcer: Announcer, server: PlanServer, request: Request) -> None:
    announcer.expect(["gs://b/1", "gs://b/2"])
    announcer.expect(["gs://b/3"])
    announcer.greet()
    announcer.begun("gs://b/1")
    announcer.tell(request)
    await server.until(1)
    method, path, headers, body = server.messages[0]
    assert (method, path, headers["Wds-Client"], headers["Authorization"]) == ("POST", "/v1/plan", "me", "Bearer t")
    assert body["shards"] == ["gs://b/2", "gs://b/3"]
    assert (body["client"], body["position"], body["ahead"]) == (announcer.client, 0, 2)
    await announcer.close()
    assert server.messages[1][:2] == ("DELETE", f"/v1/plan/{announcer.client.replace(':', '%3A')}")


def test_the_name_is_host_and_process() -> None:
    one, two = Announcer(HttpBackend().send), Announcer(HttpBackend().send)
    assert one.client == ""
    one.greet()
    two.greet()
    name = one.client
    assert name.startswith(f"{socket.gethostname()}:{os.getpid()}")
    assert name != two.client
    one.greet()
    assert one.client == name


@scenario
async def test_another_server_gets_no_plan(announcer: Announcer, server: PlanServer, request: Request) -> None:
    announcer.expect(["gs://b/1"])
    announcer.tell(request)
    await asyncio.sleep(0.01)
    await announcer.close()
    assert server.messages == []


@scenario
async def test_one_message_at_a_time(announcer: Announcer, server: PlanServer, request: Request) -> None:
    server.open.clear()
    announcer.greet()
    for i in range(20):
        announcer.expect([f"gs://b/{i}"])
        announcer.tell(request)
        if i == 0:
            await server.until(1)
    announcer.begun("gs://b/0")
    server.open.set()
    await server.until(2)
    assert [len(body["shards"]) for _, _, _, body in server.messages] == [1, 19]
    assert server.most == 1


@scenario
async def test_after_a_fault_the_service_is_left_alone(
    announcer: Announcer, server: PlanServer, request: Request
) -> None:
    server.status = 500
    announcer.greet()
    announcer.expect(["gs://b/1"])
    announcer.tell(request)
    await server.until(1)
    await over(announcer)
    announcer.expect(["gs://b/2"])
    announcer.tell(request)
    await asyncio.sleep(0.01)
    assert len(server.messages) == 1


@scenario
async def test_a_closed_port_is_no_error(announcer: Announcer, server: PlanServer, request: Request) -> None:
    announcer.greet()
    announcer.expect(["gs://b/1"])
    announcer.tell(Request("http://127.0.0.1:9/x"))
    await over(announcer)


@scenario
async def test_a_plan_is_bounded(announcer: Announcer, server: PlanServer, request: Request) -> None:
    for i in range(10_000):
        announcer.expect([f"gs://b/{i}"])
    announcer.greet()
    announcer.tell(request)
    await server.until(1)
    assert len(server.messages[0][3]["shards"]) == 512


@scenario
async def test_a_service_that_does_not_answer_delays_no_end(
    announcer: Announcer, server: PlanServer, request: Request
) -> None:
    server.open.clear()
    announcer.greet()
    announcer.expect(["gs://b/1"])
    announcer.tell(request)
    await server.until(1)
    async with asyncio.timeout(5):
        await announcer.close()
