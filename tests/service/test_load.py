"""Many clients, slow clients, clients of a dead store, and those who are refused: what they cost, and whom."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin
from tests.service.serving import Inside, Process, ask, until
from tests.transfer.reading import KIB, MIB, data

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured by /proc")

_TICKS = os.sysconf("SC_CLK_TCK")


class Crowd:
    """Sockets to one service, closed together."""

    def __init__(self, base: str) -> None:
        host, port = base.removeprefix("http://").split(":")
        self._address = host, int(port)
        self.sockets: list[socket.socket] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self.sockets:
            one.close()

    def come(self, target: str = "", *, take: int = 0, client: str = "", token: str = "") -> socket.socket:
        """One more, which asks for ``target``, takes so many bytes of its answer, and nothing after that."""
        one = socket.socket()
        self.sockets.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
        one.settimeout(30)
        one.connect(self._address)
        if target:
            who = f"Wds-Client: {client}\r\n" if client else ""
            who += f"Authorization: Bearer {token}\r\n" if token else ""
            one.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n{who}\r\n".encode())
        while take > 0:
            piece = one.recv(take)
            assert piece
            take -= len(piece)
        return one


@pytest.fixture
def other() -> Iterator[Origin]:
    with Origin() as origin:
        yield origin


def rss_bytes(process: Process) -> int:
    assert process.process is not None
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * KIB


def cpu_s(process: Process) -> float:
    assert process.process is not None
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@pytest.mark.parametrize("kept", [True, False], ids=["with a folder", "without"])
def test_idle_and_slow_connections_cost_little(kept: bool, origin: Origin, tmp_path: Path) -> None:
    body = data(6 * MIB)
    for name in ("warm", "cold"):
        origin.add(f"d/{name}.tar", body)
    settings: dict[str, Any] = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True}
    folder = tmp_path / "cache" if kept else ""
    with Process(tmp_path / "p", folder=folder, memory_bytes=32 * MIB, **settings) as it:
        for _ in range(3):
            assert ask(f"{it.base}/ais/b/warm.tar")[2] == body
        with Crowd(it.base) as crowd:
            before = rss_bytes(it)
            for number in range(300):
                crowd.come("/healthz" if number % 2 else "", take=10 if number % 2 else 0)
            for number in range(60):
                crowd.come(f"/ais/b/{'warm' if number % 2 else 'cold'}.tar", take=1000, client=f"slow-{number}")
            for _ in range(3):
                assert ask(f"{it.base}/ais/b/warm.tar")[2] == body
            grown = rss_bytes(it) - before
            assert grown < 360 * 64 * KIB + (0 if kept else 32 * MIB), "what is on its way is memory_bytes, and no more"
        assert ask(f"{it.base}/ais/b/cold.tar")[2] == body


def test_a_tenant_of_many_clients_leaves_connections_and_requests_to_others(origin: Origin, tmp_path: Path) -> None:
    origin.add("d/x.tar", data(MIB))
    for number in range(40):
        origin.add(f"d/{number}.tar", data(MIB))
        origin.behave(path=f"/d/{number}.tar", stall_after=BEFORE_HEAD)
    (tmp_path / "tokens").write_text("one many\ntwo few\n")
    settings: dict[str, Any] = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True}
    settings |= {"tokens": tmp_path / "tokens", "clients": 40, "address_connections": 40}
    with Inside(folder=tmp_path / "c", **settings) as service:
        with Crowd(service.base) as crowd:
            came = [crowd.come(f"/ais/b/{number}.tar", client=str(number), token="one") for number in range(40)]
            until(lambda: len(service.context.in_flight) >= 20)
            for one in came[20:]:
                assert one.recv(1000).startswith(b"HTTP/1.1 429 ")
            for _ in range(5):
                assert ask(f"{service.base}/ais/b/x.tar", Authorization="Bearer two")[0] == 200
            until(
                lambda: len(service.context.in_flight) == 20
            )  # the last answer of the other is counted a moment longer
        service.at_once.set()


@pytest.mark.parametrize("clients", [1, 100])
def test_clients_of_a_dead_store_take_nothing_from_others(
    clients: int, origin: Origin, other: Origin, tmp_path: Path
) -> None:
    """They ask a store that never answers for more than there are connections; another reads from a good one."""
    origin.behave(path="/dead/*", stall_after=BEFORE_HEAD)
    bodies = {f"{number}.tar": data(3 * MIB, number) for number in range(8)}
    for number in range(100):
        origin.add(f"dead/{number}.tar", b"x" * 3 * MIB)
    for name, body in bodies.items():
        other.add(f"d/{name}", body)
    other.latency_s = 0.02
    buckets = {"dead": f"{origin.base}/dead/", "good": f"{other.base}/d/"}
    with (
        Inside(buckets=buckets, private=True, folder=tmp_path / "cache", connections=32) as service,
        Crowd(service.base) as crowd,
    ):
        for number in range(100):
            crowd.come(f"/ais/dead/{number}.tar", client=f"dead-{number % clients}")
        until(lambda: len(service.context.in_flight) == 100)
        until(
            lambda: (
                service.context.cache.fetching.scheduler.running >= 32
                and service.context.cache.fetching.scheduler.waiting >= 68
            )
        )
        got: dict[str, bytes] = {}

        def read(name: str) -> None:
            got[name] = ask(f"{service.base}/ais/good/{name}", Wds_Client="good")[2]

        threads = [threading.Thread(target=read, args=(name,)) for name in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert got == bodies
        assert other.most_in_flight > 1, "by more than one connection"
        assert service.context.cache.fetching.scheduler.running >= 32, "while the dead one is waited for"
        until(lambda: len(service.context.in_flight) == 100)


def test_a_flood_of_refusals_costs_little(origin: Origin, tmp_path: Path) -> None:
    batch, batches, ways = 500, 3, 4  # 10 for 20,000: the same figures, in ten seconds
    target = "/url/https%3A%2F%2Fhost%2Fx%3Fsig%3DVERYSECRET"
    request = f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with Process(tmp_path, allow=(origin.base + "/",), log="json") as it, Crowd(it.base) as crowd:

        def flood(count: int) -> None:
            one = crowd.come()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
            for _ in range(count):
                seen = 0
                sender = threading.Thread(target=one.sendall, args=(request * batch,))
                sender.start()
                tail = b""
                while seen < batch:
                    piece = one.recv(MIB)
                    assert piece
                    seen += (tail + piece).count(b"HTTP/1.1 403")
                    tail = piece[-11:]
                sender.join()

        flood(1)
        memory, began = rss_bytes(it), time.monotonic()
        threads = [threading.Thread(target=flood, args=(batches,)) for _ in range(ways)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        count, took = batch * batches * ways, time.monotonic() - began
        assert rss_bytes(it) - memory < 8 * MIB
        lines = it.said.count("wds_async.audit")
        assert 0 < lines <= 2 * 100 + 10 * took + 20
        assert it.log.stat().st_size < 1000 * (lines + 20)
        assert "VERYSECRET" not in it.said
        counted = ask(f"{it.base}/metrics")[2].decode()
        assert f'wds_refusals_total{{reason="forbidden"}} {count + batch:.1f}' in counted
        it.signal()
        it.wait()
        assert "left out" in it.said


def test_a_flood_of_what_is_no_request_costs_little(origin: Origin, tmp_path: Path) -> None:
    with Process(tmp_path, allow=(origin.base + "/",)) as it, Crowd(it.base) as crowd:
        for _ in range(400):
            one = crowd.come()
            one.sendall(b"GET /gs/b/VERYSECRET\x01 HTTP/1.1\r\nHost: x\r\nHost : y\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(100)[9:12] in (b"400", b"")
            one.close()
            del crowd.sockets[-1]
        assert 100 <= it.said.count("reason=malformed") < 300
        assert it.said.count("\n") < 320
        assert "VERYSECRET" not in it.said
