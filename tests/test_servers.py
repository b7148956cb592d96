"""The fixtures keep their promises: what the servers say and do is what the tests of the engine rely on."""

from __future__ import annotations

import http.client
import signal
import socket
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import leftover_threads
from tests.servers import BEFORE_HEAD, Nginx, Origin, Tls, make_shards
from tests.servers import process as programs

BODY = bytes(range(256)) * 40


@pytest.fixture
def data(origin: Origin) -> str:
    return origin.add("/data.tar", BODY)


class Client:
    """One keep-alive connection."""

    def __init__(self, origin: Origin) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", origin.port, timeout=10)

    def get(self, path: str = "/data.tar", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        self.connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        return self.connection.getresponse()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.close()


def raw(origin: Origin, request: bytes = b"GET /data.tar HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[bytes, bool]:
    """All bytes until the connection ends, and whether it ended with a reset."""
    got = b""
    with socket.create_connection(("127.0.0.1", origin.port), timeout=10) as sock:
        sock.sendall(request)
        try:
            while piece := sock.recv(65536):
                got += piece
        except ConnectionResetError:
            return got, True
    return got, False


@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [("bytes=0-0", 0, 1), ("bytes=5-9", 5, 10), ("bytes=10000-", 10000, 10240), ("bytes=-40", 10200, 10240),
     ("bytes=10239-99999", 10239, 10240)],
)  # fmt: skip
def test_origin_answers_a_range(origin: Origin, data: str, asked: str, first: int, end: int) -> None:
    with Client(origin) as client:
        response = client.get(Range=asked)
        assert response.status == 206
        assert response.headers["Content-Range"] == f"bytes {first}-{end - 1}/10240"
        assert response.read() == BODY[first:end]


def test_origin_compares_identities(origin: Origin, data: str) -> None:
    with Client(origin) as client:
        first = client.get()
        first.read()
        etag = first.headers["ETag"]
        for expected, status in ((etag, 200), ("*", 200), ('"other"', 412), (f"W/{etag}", 412)):
            response = client.get(If_Match=expected)
            response.read()
            assert response.status == status
        origin.add("/data.tar", b"replaced")
        response = client.get(If_Match=etag)
        response.read()
        assert response.status == 412


def test_origin_keeps_connections_and_counts(origin: Origin, data: str) -> None:
    with Client(origin) as client:
        for path, status in (("/data.tar", 200), ("/none.tar", 404), ("/data.tar", 200)):
            response = client.get(path)
            response.read()
            assert response.status == status
        head = client.get(method="HEAD")
        assert (head.headers["Content-Length"], head.read()) == ("10240", b"")
    assert origin.connections == 1
    assert [(r.method, r.path, r.connection) for r in origin.requests] == [
        ("GET", "/data.tar", 0), ("GET", "/none.tar", 0), ("GET", "/data.tar", 0), ("HEAD", "/data.tar", 0),
    ]  # fmt: skip
    origin.wait_until(lambda o: o.open_connections == 0)
    assert (origin.in_flight, origin.most_in_flight) == (0, 1)


def test_a_behaviour_takes_the_requests_it_names(origin: Origin, data: str) -> None:
    origin.add("/other.tar", b"x")
    origin.behave(path="/data*", status=503, skip=1, times=2, headers={"Retry-After": "1"})
    origin.behave(when=lambda request: "x-blocked" in request.headers, status=403)
    with Client(origin) as client:
        seen = []
        for path in ("/data.tar", "/other.tar", "/data.tar", "/data.tar", "/data.tar"):
            response = client.get(path)
            response.read()
            seen.append((response.status, response.headers["Retry-After"]))
        assert seen == [(200, None), (200, None), (503, "1"), (503, "1"), (200, None)]
        blocked = client.get(X_Blocked="1")
        blocked.read()
        assert blocked.status == 403
        origin.forget()
        response = client.get(X_Blocked="1")
        response.read()
        assert (response.status, len(origin.requests)) == (200, 1)


@pytest.mark.parametrize("how", ["reset", "fin"])
@pytest.mark.parametrize("after", [0, 1, 5000, 3_000_000])
def test_a_cut_comes_after_exactly_that_many_bytes(origin: Origin, how: str, after: int) -> None:
    origin.add("/data.tar", bytes(4_000_000))
    origin.behave(cut_after=after, cut=how)
    got, reset = raw(origin)
    assert reset is (how == "reset")
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"content-length: 4000000" in head
    assert len(body) == after


def test_a_stall_lasts_until_released(origin: Origin, data: str) -> None:
    origin.behave(path="/data.tar", stall_after=1000)
    with Client(origin) as client:
        response = client.get()
        assert response.read(1000) == BODY[:1000]
        client.connection.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.connection.sock.recv(1)
        assert (origin.in_flight, origin.most_in_flight) == (1, 1)
        origin.release()
        client.connection.sock.settimeout(10)
        rest = b""
        while len(rest) < len(BODY) - 1000:
            rest += client.connection.sock.recv(65536)
        assert rest == BODY[1000:]


def test_a_stalled_server_stops(data: str, origin: Origin) -> None:
    origin.behave(stall_after=BEFORE_HEAD)
    with Client(origin) as client:
        client.connection.request("GET", "/data.tar")
        origin.wait_until(lambda o: o.in_flight == 1)
        origin.stop()


def test_origin_speaks_tls(tls: Tls) -> None:
    with Origin({"/a": BODY}, tls=tls.server_context()) as origin:
        url = origin.url("/a")
        assert url.startswith("https://localhost:")
        with urllib.request.urlopen(url, timeout=10, context=tls.client_context()) as response:
            assert response.read() == BODY
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(url, timeout=10)


@pytest.mark.servers
def test_nginx_serves_ranges_and_logs_them(nginx: Callable[..., Nginx], tmp_path: Path) -> None:
    (tmp_path / "data.tar").write_bytes(BODY)
    server = nginx(tmp_path, access_log=True)
    asked = urllib.request.Request(server.url("data.tar"), headers={"Range": "bytes=5-9"})
    with urllib.request.urlopen(asked, timeout=10) as response:
        assert (response.status, response.read()) == (206, BODY[5:10])
    deadline = time.monotonic() + 20
    while not server.log() and time.monotonic() < deadline:
        time.sleep(0.002)
    (entry,) = server.log()
    assert (entry["uri"], entry["range"], entry["status"]) == ("/data.tar", "bytes=5-9", 206)


def test_shards_are_the_same_every_time(shards: Callable[..., list[Path]], tmp_path: Path) -> None:
    paths = shards(2, 3)
    assert [p.name for p in paths] == ["shard-000000.tar", "shard-000001.tar"]
    again = make_shards(tmp_path / "again", 2, 3)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in again]
    with tarfile.open(paths[1]) as archive:
        assert archive.getnames() == [f"{n:06d}.{f}" for n in (3, 4, 5) for f in ("png", "cls", "json")]


def test_a_thread_left_behind_is_seen() -> None:
    before = set(threading.enumerate())
    gate = threading.Event()
    ours = threading.Thread(target=gate.wait, name="wds-async-loop", daemon=True)
    user = threading.Thread(target=gate.wait, name="left", daemon=False)
    tame = threading.Thread(target=gate.wait, name="tame", daemon=True)
    for thread in (ours, user, tame):
        thread.start()
    assert sorted(leftover_threads(before, 0.02)) == ["left", "wds-async-loop"]
    gate.set()
    assert leftover_threads(before) == []
    tame.join()


def test_a_process_ends_by_its_handle_and_says_when_it_is_ready(tmp_path: Path) -> None:
    said = tmp_path / "said"
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    running = programs.launch([sys.executable, "-c", stubborn], said)
    assert programs.until(running, lambda: said.stat().st_size > 0, 20)
    programs.stop(running, signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL
    programs.stop(running)  # harmless
    assert not programs.until(programs.launch([sys.executable, "-c", ""]), lambda: False, 20)


def test_a_server_that_is_required_is_no_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    for required, outcome in (("1", programs.ServerMissing), ("", pytest.skip.Exception)):
        monkeypatch.setenv("WDS_REQUIRE_SERVERS", required)
        with pytest.raises(outcome, match="apt-get install it"), programs.required():
            raise programs.ServerMissing("apt-get install it")
