"""A service from its start to its end, as a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import ssl
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tests.servers import Origin
from tests.service.serving import Inside, Process, ask, until
from tests.transfer.reading import MIB, data
from wds_async.errors import ConfigError
from wds_async.service.running import CannotServe

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
        again.stored()
    origin.forget()
    with Inside(folder=tmp_path / "cache", private=True, **given) as again:
        assert any("1 objects" in line for line in again.service.summary())
        assert ask(f"{again.base}/ais/b/x.tar")[2] == body
        assert sum(sent.body_bytes for sent in origin.sent) == 0


def test_sighup_reloads_what_can_change(origin: Origin, tmp_path: Path) -> None:
    for name in ("a", "b"):
        origin.add(f"/{name}/x.tar", b"x")
    tokens, log = tmp_path / "tokens", tmp_path / "log"
    tokens.write_text("alpha\n")
    a, b = {"a": f"{origin.base}/a/"}, {"b": f"{origin.base}/b/"}
    folder = {"folder": tmp_path / "c", "log_file": log}
    with Process(tmp_path / "p", buckets=a) as it:
        assert ask(f"{it.base}/ais/a/x.tar")[0] == 200
        it.configure(buckets=b, tokens=tokens, clients=7, log_level="debug", client_requests=9, **folder)
        it.signal(signal.SIGHUP)
        until(lambda: log.exists() and "was read again" in log.read_text())
        assert "hold after a restart only: folder, clients\n" in log.read_text()
        assert ask(f"{it.base}/ais/b/x.tar")[0] == 401
        assert ask(f"{it.base}/ais/b/x.tar", Authorization="Bearer alpha")[0] == 200
        assert ask(f"{it.base}/ais/a/x.tar", Authorization="Bearer alpha")[0] in (403, 404)
        assert "access: answered" in log.read_text()
        rotated = log.rename(tmp_path / "log.1")
        it.configure(buckets=a, log="colourful", log_file=log)
        it.signal(signal.SIGHUP)
        until(lambda: "goes on with what it has: log: 'colourful'" in rotated.read_text())
        assert not log.exists()
        assert ask(f"{it.base}/ais/b/x.tar", Authorization="Bearer alpha")[0] == 200
        it.configure(buckets=a, log_file=log)
        it.signal(signal.SIGHUP)
        until(lambda: log.exists() and "was read again" in log.read_text())
        assert ask(f"{it.base}/ais/a/x.tar")[0] == 200


def test_a_reload_whose_log_cannot_be_opened_changes_nothing(origin: Origin, tmp_path: Path) -> None:
    origin.add("/a/x.tar", b"x")
    tokens, a = tmp_path / "tokens", {"a": f"{origin.base}/a/"}
    tokens.write_text("alpha\n")
    with Process(tmp_path / "p", buckets=a, log="json") as it:
        it.configure(tokens=tokens, log="human", log_level="debug", log_file=tmp_path / "nowhere" / "log")
        it.signal(signal.SIGHUP)
        until(lambda: "goes on with what it has: log_file" in it.said)
        assert ask(f"{it.base}/ais/a/x.tar")[0] == 200
        it.signal()
        assert it.wait() == 0
    assert {json.loads(line)["level"] for line in it.said.splitlines()} == {"info", "error"}


def test_sighup_before_the_start_is_complete_is_a_reload_behind_it(tmp_path: Path) -> None:
    it = Process(tmp_path)
    file = tmp_path / "serve.yaml"
    first = file.read_text()
    file.unlink()
    os.mkfifo(file)
    process = it.launch()
    with file.open("w") as fifo:  # from here on it reads its configuration
        it.signal(signal.SIGHUP)
        (tmp_path / "next").write_text(first + "log_level: debug\n")
        (tmp_path / "next").rename(file)
        fifo.write(first)
    until(lambda: "was read again" in it.said or process.poll() is not None)
    it.signal()
    assert it.wait() == 0
    assert it.said.index("listening at") < it.said.index("was read again")


def test_sighup_while_it_imports_ends_nothing(tmp_path: Path) -> None:
    script = tmp_path / "hung_up.py"
    script.write_text(
        "import os, runpy, signal, sys\n"
        "class HangsUp:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'wds_async.service.running':\n"
        "            os.kill(os.getpid(), signal.SIGHUP)\n"
        "sys.meta_path.insert(0, HangsUp())\n"
        "runpy.run_module('wds_async', run_name='__main__', alter_sys=True)\n"
    )
    with Process(tmp_path / "p", script=script) as it:
        it.signal()
        assert it.wait() == 0


def test_a_reload_changes_freshness_and_scrubbing(origin: Origin, tmp_path: Path) -> None:
    origin.add("/x.tar", data(100_000))
    with Inside(buckets={"b": f"{origin.base}/"}, folder=tmp_path / "c", private=True, scrub_bytes_per_s=0) as it:

        async def reload(**changed: float) -> list[str]:
            return it.service.reload(replace(it.context.config, **changed))

        assert ask(f"{it.base}/ais/b/x.tar")[0] == 200
        it.stored()
        asked = len(origin.sent)
        assert ask(f"{it.base}/ais/b/x.tar")[0] == 200
        assert len(origin.sent) == asked
        assert it.call(reload(freshness_s=0.0, scrub_bytes_per_s=1e9)) == []
        assert ask(f"{it.base}/ais/b/x.tar")[0] == 200
        assert len(origin.sent) > asked, "its store is asked each time now"
        until(lambda: it.context.cache.statistics().scrubbed_bytes == 100_000)
        it.call(reload(scrub_bytes_per_s=0.0))
        it.call(reload(scrub_bytes_per_s=5e8))
        until(lambda: it.context.cache.statistics().scrubbed_bytes == 200_000)


def test_sighup_reloads_certificates_and_prices(tmp_path: Path) -> None:
    prices = tmp_path / "prices"
    with Inside(certificate=cert(tmp_path)[0], key=cert(tmp_path)[1]) as it:

        async def reload() -> None:
            prices.write_text("stores: {s3: {internet: 0.05}}")
            config = replace(it.config, prices=str(prices), cost_limit=3.0, quotas=(("vision", 0.5),))
            it.service.reload(config)

        before = ssl.get_server_certificate(("127.0.0.1", it.port))
        cert(tmp_path)
        it.call(reload())
        assert ssl.get_server_certificate(("127.0.0.1", it.port)) != before
        assert it.context.cost_limit.limit == 3.0
        assert it.context.cache.quotas == {"vision": 0.5}
        prices.write_text("nonsense")

        async def refused() -> None:
            with pytest.raises(ConfigError):
                it.service.reload(replace(it.context.config, cost_limit=4.0))

        it.call(refused())
        assert it.context.cost_limit.limit == 3.0


def cert(folder: Path) -> tuple[str, str]:
    """A new certificate and its key."""
    pair = trustme.CA().issue_cert("localhost")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    pair.private_key_pem.write_to_path(key)
    certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    return str(certificate), str(key)


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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_service_that_would_ask_itself(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("AIS_ENDPOINT", f"http://{host}:{port}/")
    with pytest.raises(CannotServe, match="ask itself"), Inside(port=port):
        pass
    with Inside() as other:  # one that has another in front of it
        assert not other.service.readiness.why_not


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
        while not it.service.readiness.why_not:
            assert time.monotonic() < deadline
        assert b"has vanished" in ask(f"{it.base}/readyz")[2]
        folder.mkdir()  # its lock is another one: another service might have it
        while b"replaced" not in ask(f"{it.base}/readyz")[2]:
            assert time.monotonic() < deadline
        folder.rmdir()
        (tmp_path / "elsewhere").rename(folder)
        while it.service.readiness.why_not:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_folder_that_has_vanished_for_good_ends_it(origin: Origin, tmp_path: Path, how: str) -> None:
    origin.add("/x.tar", b"x" * 100_000)
    folder = tmp_path / "cache"
    settings = {"folder": folder, "buckets": {"b": f"{origin.base}/"}, "private": True, "grace_s": 5}
    impatient = tmp_path / "impatient.py"
    impatient.write_text(
        "import runpy, wds_async.service.running as running\n"
        "running._TEND_EVERY_S = running._VANISHED_S = 0.05\n"
        "runpy.run_module('wds_async', run_name='__main__', alter_sys=True)\n"
    )
    with Process(tmp_path / "p", script=impatient, **settings) as service:
        assert ask(f"{service.base}/ais/b/x.tar")[0] == 200
        folder.rename(tmp_path / "elsewhere")
        if how == "replaced":
            folder.mkdir()
        assert service.wait() == 1
        assert f"{folder} {'has vanished' if how == 'removed' else 'was replaced'}" in service.said
        assert "draining, then ending" in service.said
        assert "Traceback" not in service.said
        assert not folder.exists() or list(folder.iterdir()) == []  # nothing was written where another disk may lie


def test_clients_are_as_many_as_there_are_descriptors_for() -> None:
    with Inside(clients=10**9) as it:
        own = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert it.service.clients.limit == own // 4


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
