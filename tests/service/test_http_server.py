"""Processes on this host: a plan that came by the Unix socket ends with its process."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, until
from wds_async.service import http_server


@pytest.fixture(autouse=True)
def linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_PROCESS_LINGER_S", 0.02)
    monkeypatch.setattr(http_server, "_LOOK_EVERY_S", 0.02)


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
