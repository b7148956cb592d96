"""A service from its start to its end, as a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, Process, ask
from tests.transfer.reading import MIB, data
from wds_async.errors import ConfigError
from wds_async.service.listening import CannotServe

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AIS_", "WDS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def slow_read(base: str, path: str, first: threading.Event, go_on: threading.Event) -> bytes:
    """Take the first bytes of a body, then wait, then take the rest."""
    host, port = base.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.request("GET", path)
        answer = connection.getresponse()
        got = answer.read(1000)
        first.set()
        assert go_on.wait(30)
        return got + answer.read()
    finally:
        connection.close()


def test_sigterm_lets_a_transfer_end_and_exits_with_0(origin: Origin, tmp_path: Path) -> None:
    body = data(24 * MIB)
    origin.add("/d/x.tar", body)
    buckets, socket_path = {"b": f"{origin.base}/d/"}, tmp_path / "s"
    with Process(
        tmp_path / "p", buckets=buckets, allow=(origin.base,), folder=tmp_path / "c", socket=socket_path
    ) as it:
        assert "caching in" in it.said
        assert origin.base in it.said
        assert socket_path.exists()
        first, go_on, got = threading.Event(), threading.Event(), []
        reader = threading.Thread(target=lambda: got.append(slow_read(it.base, "/ais/b/x.tar", first, go_on)))
        reader.start()
        assert first.wait(30)
        it.signal(signal.SIGTERM)
        host, port = it.base.removeprefix("http://").split(":")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # it listens no more, while the transfer goes on
            try:
                socket.create_connection((host, int(port)), 1).close()
            except ConnectionRefusedError:
                break
            except OSError:  # caught in between
                pass
        else:
            raise AssertionError("it still listens")
        assert it.process is not None
        assert it.process.poll() is None
        go_on.set()
        reader.join(30)
        assert got == [body]
        assert it.wait() == 0
        assert not socket_path.exists()
        assert "Traceback" not in it.said
        assert "cut off" not in it.said


def test_a_second_signal_ends_at_once(origin: Origin, tmp_path: Path) -> None:
    origin.add("/d/x.tar", data(24 * MIB))
    with Process(tmp_path, buckets={"b": f"{origin.base}/d/"}, allow=(origin.base,), grace_s=600) as it:
        first, go_on = threading.Event(), threading.Event()

        def read() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                slow_read(it.base, "/ais/b/x.tar", first, go_on)

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(30)
        it.signal(signal.SIGTERM)
        it.signal(signal.SIGINT)
        assert it.wait() == 0
        assert "cut off" in it.said
        go_on.set()
        reader.join(30)


def test_what_was_cached_is_there_again_and_a_kill_harms_nothing(origin: Origin, tmp_path: Path) -> None:
    body = data(10 * MIB + 5)
    origin.add("/d/x.tar", body)
    given = {"buckets": {"b": f"{origin.base}/d/"}, "allow": (origin.base,), "freshness_s": float("inf")}
    with Process(tmp_path / "p", folder=tmp_path / "cache", **given) as it:
        assert ask(f"{it.base}/ais/b/x.tar")[2] == body
        it.signal(signal.SIGKILL)
        assert it.wait() == -signal.SIGKILL
    origin.forget()
    with Inside(folder=tmp_path / "cache", private=True, **given) as again:
        assert ask(f"{again.base}/ais/b/x.tar")[2] == body
        assert sum(sent.body_bytes for sent in origin.sent) <= len(body) + 1
    origin.forget()
    with Inside(folder=tmp_path / "cache", private=True, **given) as again:
        assert any("1 objects" in line for line in again.service.told())
        assert ask(f"{again.base}/ais/b/x.tar")[2] == body
        assert sum(sent.body_bytes for sent in origin.sent) == 0


def test_a_manager_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(30)
        with Process(tmp_path / "p", environ={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "40000"}, log="json") as it:
            assert manager.recv(100) == b"READY=1"
            assert manager.recv(100) == b"WATCHDOG=1"
            it.signal()
            while (said := manager.recv(100)) == b"WATCHDOG=1":
                pass
            assert said == b"STOPPING=1"
            assert it.wait() == 0
            assert [json.loads(line)["level"] for line in it.said.splitlines()]


def test_while_it_drains_it_is_not_ready() -> None:
    with Inside(drain_s=600) as it:
        assert ask(f"{it.base}/readyz")[::2] == (200, b"ready\n")
        ending = threading.Thread(target=it.stop)
        ending.start()
        deadline = time.monotonic() + 20
        while ask(f"{it.base}/readyz")[0] != 503:
            assert time.monotonic() < deadline
        status, fields, body = ask(f"{it.base}/readyz")
        assert (status, fields["connection"], body) == (503, "close", b"draining\n")
        assert ask(f"{it.base}/healthz")[0] == 200
        it.loop.call_soon_threadsafe(it.at_once.set)
        ending.join(30)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotServe, match=f"port {port}.*another process listens there"), Inside(port=port):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_service_that_would_ask_itself(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("AIS_ENDPOINT", f"http://{host}:{port}/")
    with pytest.raises(CannotServe, match="ask itself"), Inside(port=port):
        pass
    with Inside() as other:  # one that has another in front of it
        assert other.service.ready


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotServe, match="--folder"), Inside(folder=tmp_path / "file" / "cache"):
        pass
    with pytest.raises(ConfigError, match="tokens"), Inside(tokens=tmp_path / "nothing"):
        pass


def test_a_folder_that_goes_away_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.service.running._TEND_EVERY_S", 0.01)
    folder = tmp_path / "cache"
    with Inside(folder=folder) as it:
        folder.rename(tmp_path / "elsewhere")
        deadline = time.monotonic() + 20
        while it.service.ready:
            assert time.monotonic() < deadline
        assert b"out of reach" in ask(f"{it.base}/readyz")[2]
        folder.mkdir()  # its lock is another one: another service might have it
        while b"replaced" not in ask(f"{it.base}/readyz")[2]:
            assert time.monotonic() < deadline
        folder.rmdir()
        (tmp_path / "elsewhere").rename(folder)
        while not it.service.ready:
            assert time.monotonic() < deadline


def test_clients_are_as_many_as_there_are_descriptors_for() -> None:
    with Inside(clients=10**9) as it:
        own = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert it.service._lane.clients == own // 4


def test_without_descriptors_it_says_so_in_a_line_and_goes_on_when_there_are_some(tmp_path: Path) -> None:
    with Process(tmp_path) as it:
        assert it.process is not None
        host, port = it.base.removeprefix("http://").split(":")
        used = len(os.listdir(f"/proc/{it.process.pid}/fd"))
        before = resource.prlimit(it.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(it.process.pid, resource.RLIMIT_NOFILE, (used + 2, before[1]))
        waiting = [socket.create_connection((host, int(port)), timeout=30) for _ in range(20)]
        deadline = time.monotonic() + 20
        while "no connection can be taken" not in it.said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        resource.prlimit(it.process.pid, resource.RLIMIT_NOFILE, before)
        assert ask(f"{it.base}/healthz")[0] == 200
        resource.prlimit(it.process.pid, resource.RLIMIT_NOFILE, (used + 2, before[1]))
        more = [socket.create_connection((host, int(port)), timeout=30) for _ in range(20)]
        time.sleep(0.05)
        it.signal()  # while asyncio means to try again
        assert it.wait() == 0
        assert "Traceback" not in it.said
        assert it.said.count("no connection can be taken") == 1
        for one in (*waiting, *more):
            one.close()
