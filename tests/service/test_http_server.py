"""Processes on this host: who is connected, and who has gone; and that a plan goes with who announced it."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.servers import Origin
from tests.service.serving import Inside
from wds_async.service import http_server
from wds_async.service.http_server import PeerProcesses


@pytest.fixture(autouse=True)
def linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_PROCESS_LINGER_S", 0.02)


def test_a_process_has_gone_with_its_last_connection() -> None:
    async def run() -> None:
        gone: asyncio.Queue[int] = asyncio.Queue()
        here = PeerProcesses(gone.put_nowait)
        for process in (7, 7, 8, 0, -1):
            here.came(process)
        for process in (7, 0, -1, 9):
            here.went(process)
        assert here.known() == {7, 8}
        here.went(7)
        assert await gone.get() == 7
        assert (here.known(), gone.empty()) == ({8}, True)

    asyncio.run(run())


def test_who_comes_back_at_once_was_never_gone() -> None:
    gone: list[int] = []

    async def run() -> None:
        here = PeerProcesses(gone.append)
        here.came(7)
        here.went(7)
        here.came(7)
        await asyncio.sleep(0.05)
        here.went(7)
        here.close()
        await asyncio.sleep(0.05)
        assert gone == []

    asyncio.run(run())


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
            known, deadline = service.service.clients.peer_processes.known, time.monotonic() + 20
            while others[0].pid in known():
                assert time.monotonic() < deadline
                time.sleep(0.005)
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
    deadline = time.monotonic() + 20
    while True:
        found = {one["client"] for one in service.context.plans.as_list()}
        if len(found) == count or time.monotonic() > deadline:
            return found
        time.sleep(0.01)
