"""The plain web server's backend: requests, explanations, and the way through aiohttp and proxies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http.server
import select
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Nginx, Origin, Tls
from tests.servers.process import free_port
from tests.storage.locations import location_of
from tests.transfer.reading import bytes_of, data, outcomes, quick
from wds_async.background import new_event_loop
from wds_async.errors import AccessDenied, TransferError, UrlError
from wds_async.storage.base import Answer, RefusedAnswer, Verdict
from wds_async.storage.http.backend import HttpBackend, explain_status
from wds_async.storage.options import Options
from wds_async.storage.sink import publish_text


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (401, Verdict.DENIED),
        (403, Verdict.DENIED),
        (404, Verdict.MISSING),
        (407, Verdict.DENIED),
        (408, Verdict.TRANSIENT),
        (410, Verdict.MISSING),
        (412, Verdict.CHANGED),
        (418, Verdict.FATAL),
        (425, Verdict.TRANSIENT),
        (429, Verdict.TRANSIENT),
        (500, Verdict.TRANSIENT),
        (501, Verdict.FATAL),
        (503, Verdict.TRANSIENT),
        (505, Verdict.FATAL),
        (599, Verdict.TRANSIENT),
    ],
)
def test_statuses(status: int, verdict: Verdict) -> None:
    fault = HttpBackend().explain(RefusedAnswer(Answer(status, {})))
    assert fault.verdict is verdict
    assert str(status) in fault.reason


def test_the_page_is_quoted_without_its_tags() -> None:
    fault = explain_status(Answer(403, {}, b"<html>\n<h1>No <b>entry</b></h1>" + b"x" * 900))
    assert fault.reason.startswith("the server answered 403 (No entry xxx")
    assert len(fault.reason) < 160
    assert explain_status(Answer(403, {}, b"\x00\xff\x1b[2J")).reason == "the server answered 403"


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("", None), ("soon", None), ("-3", None)])
def test_retry_after(text: str, seconds: float | None) -> None:
    assert explain_status(Answer(503, {"retry-after": text})).retry_after_s == seconds


def test_retry_after_as_a_date() -> None:
    assert explain_status(Answer(503, {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"})).retry_after_s == 0.0


@pytest.mark.parametrize(
    ("exn", "verdict", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), Verdict.TRANSIENT, "does not resolve"),
        (ConnectionRefusedError(111, "refused"), Verdict.TRANSIENT, "refused"),
        (ConnectionResetError(104, "reset"), Verdict.TRANSIENT, "reset"),
        (TimeoutError(), Verdict.STALLED, "TimeoutError"),
        (ssl.SSLError(1, "wrong version number"), Verdict.TRANSIENT, "wrong version"),
        (KeyError("x"), Verdict.FATAL, "KeyError"),
    ],
)
def test_exceptions(exn: Exception, verdict: Verdict, words: str) -> None:
    fault = HttpBackend().explain(exn)
    assert fault.verdict is verdict
    assert words in fault.reason


def test_the_request_of_a_url() -> None:
    request = HttpBackend().request("https://us%40er:p%3Aw@h.example:8443/a%2Fb?q=1#fragment")
    assert request.url == "https://h.example:8443/a%2Fb?q=1"
    assert dict(request.headers)["Authorization"] == "Basic dXNAZXI6cDp3"
    assert "Authorization" not in dict(HttpBackend().request("https://h/x").headers)


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://h:0/x", "http://h:65536/x", "https://[::1/x"])
def test_malformed_urls(url: str) -> None:
    with pytest.raises(UrlError, match="malformed URL"):
        HttpBackend().request(url)


def test_a_wrong_password_says_so(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(when=lambda request: "authorization" not in request.headers, status=401)
    assert bytes_of([url.replace("http://", "http://u:SECRET@")]) == [b"x"]
    origin.behave(status=401)
    for direct in (True, False):
        ((_, error),) = outcomes([url.replace("http://", "http://u:SECRET@")], quick(direct=direct))
        assert isinstance(error, AccessDenied)
        assert "SECRET" not in str(error)


class Proxy:
    """An HTTP proxy: absolute-form GETs and CONNECT, one thread a connection; ``seen`` are the request lines. Where it
    has a ``proof``, it answers 407 to a request without that ``Proxy-Authorization``."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.proof = ""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            first, _, rest = head.partition(b"\r\n")
            method, target, version = first.decode().split(" ")
            self.seen.append(first.decode())
            if self.proof and f"\r\nproxy-authorization: {self.proof}\r\n".lower().encode() not in head.lower():
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                with socket.create_connection((host, int(port))) as server:
                    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    self._pass_on(client, server)
                return
            parts = urllib.parse.urlsplit(target)
            with socket.create_connection((parts.hostname or "", parts.port or 80)) as server:
                line = f"{method} {parts.path}?{parts.query} {version}\r\nConnection: close\r\n".encode()
                server.sendall(line + rest)
                self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        while True:
            for end in select.select([client, server], [], [])[0]:
                piece = end.recv(65536)
                if not piece:
                    return
                (server if end is client else client).sendall(piece)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    running = Proxy()
    yield running
    running.close()


def test_a_proxy_of_the_environment_is_used(origin: Origin, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [data(300_000, i) for i in range(3)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    assert bytes_of(urls) == contents
    asked = len(origin.requests)
    assert len(proxy.seen) == asked > 3
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert bytes_of(urls) == contents
    assert len(proxy.seen) == asked


def test_a_proxy_that_wants_credentials(
    origin: Origin, proxy: Proxy, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.proof = "Basic dTpTRUNSRVQ="  # u:SECRET
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    with Origin(tls=tls.server_context()) as secure:
        urls = [origin.add("x.tar", b"x"), secure.add("y.tar", b"y")]
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url.replace("http://", "http://u:SECRET@"))
        assert bytes_of(urls) == [b"x", b"y"]
        assert not any("proxy-authorization" in request.headers for request in secure.requests)
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url.replace("http://", "http://u:SECRETS@"))
        for _, error in outcomes(urls):
            assert isinstance(error, AccessDenied)
            assert "407" in str(error)
            assert "HTTPS_PROXY=http://user:password@host:port" in str(error)
            assert "SECRET" not in str(error)


def test_signed_urls_arrive_as_they_were_signed(origin: Origin) -> None:
    signed = "?X-Sig=a%2Bb%2Fc%3D%3D&name=%27x%27*~%21&plus=a+b&d=%C3%A9&e=%7E"
    url = origin.add("x%25 y.tar", b"x") + signed
    for direct in (True, False):
        assert bytes_of([url], quick(direct=direct)) == [b"x"]
    assert len({request.target for request in origin.requests}) == 1
    assert origin.requests[0].target.endswith(signed)


@pytest.mark.parametrize("direct", [True, False])
def test_redirects_without_end(origin: Origin, direct: bool) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(redirect="/x.tar")
    ((_, error),) = outcomes([url], quick(direct=direct))
    assert isinstance(error, TransferError)
    assert "redirects in a circle" in str(error)
    origin.forget()
    origin.behave(redirect="ftp://h/x.tar")
    ((_, error),) = outcomes([url], quick(direct=direct))
    assert isinstance(error, UrlError)
    assert "which is not HTTP" in str(error)


@pytest.mark.parametrize("direct", [True, False])
def test_a_port_that_speaks_the_other_way(nginx: Callable[..., Nginx], tls: Tls, tmp_path: Path, direct: bool) -> None:
    url = nginx(tmp_path).url("x.tar").replace("http:", "https:")
    ((_, error),) = outcomes([url], quick(direct=direct))
    assert isinstance(error, TransferError)
    assert "is no TLS" in str(error)
    assert "write http://" in str(error)
    with Origin(tls=tls.server_context()) as secure:
        ((_, error),) = outcomes([secure.add("x.tar", b"x").replace("https:", "http:")], quick(direct=direct))
    assert isinstance(error, TransferError)
    assert "write https://" in str(error)


@pytest.mark.parametrize("direct", [True, False])
def test_nginx_says_that_it_speaks_tls(nginx: Callable[..., Nginx], tls: Tls, tmp_path: Path, direct: bool) -> None:
    (tmp_path / "x.tar").write_bytes(b"x")
    url = nginx(tmp_path, tls=(tls.cert, tls.key)).url("x.tar").replace("https:", "http:")
    ((_, error),) = outcomes([url], quick(direct=direct))
    assert isinstance(error, TransferError)
    assert "the server speaks TLS on this port. Write https://" in str(error)


# -- index pages ------------------------------------------------------------------------------------------------


def listed(url: str, **options: Any) -> list[str]:
    async def collect() -> list[str]:
        backend = HttpBackend(Options(options))
        try:
            return [entry.url.removeprefix(url) async for entry in backend.entries(location_of(url))]
        finally:
            await backend.close()

    return asyncio.run(collect())


NAMES = ["a b.tar", "é.tar", "100%.tar", "q?x=1.tar", "h#1.tar", "x-000.tar", "x-{1}.tar", "sub"]
SHOWN = ["100%25.tar", "a%20b.tar", "h%231.tar", "q%3Fx=1.tar", "sub/", "x-000.tar", "x-{1}.tar", "é.tar"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "f" / "sub").mkdir(parents=True)
    for name in NAMES[:-1]:
        (tmp_path / "f" / name).write_text(name)
    (tmp_path / "f" / "sub" / "deep.tar").write_text("deep")
    return tmp_path


def readable(url: str, names: list[str]) -> None:
    """Each name that is shown can be read, and is that file."""
    files = [name for name in names if not name.endswith("/")]
    assert bytes_of([url + name for name in files]) == [urllib.parse.unquote(name).encode() for name in files]


def test_nginxs_index(nginx: Callable[..., Nginx], folder: Path) -> None:
    url = nginx(folder, extra="autoindex on;").url("f/")
    assert sorted(listed(url)) == SHOWN
    assert listed(f"{url}sub/") == ["deep.tar"]
    readable(url, listed(url))
    with pytest.raises(RefusedAnswer, match="404"):
        listed(f"{url}none/")


def test_pythons_index(folder: Path) -> None:
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/f/"
        assert sorted(listed(url)) == SHOWN
        readable(url, listed(url))
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_an_index_is_asked_for_with_credentials(origin: Origin) -> None:
    origin.add("f/", b"")
    origin.behave(path="/f/", body=b"<a href='x.tar'>x</a>")
    assert listed(origin.url("f/"), token="t") == ["x.tar"]
    assert origin.requests[0].headers["authorization"] == "Bearer t"


def test_what_is_no_index(origin: Origin) -> None:
    url = origin.add("f/", b"a tar")
    with pytest.raises(UrlError, match="no index page"):
        listed(url)
    page = b"<a href='x'>x</a>" + b" " * (33 << 20)
    origin.behave(path="/f/", body=page)
    with pytest.raises(UrlError, match="more than 32 MiB"):
        listed(url)


def test_a_proxy_that_is_down_is_named(origin: Origin, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.close()
    monkeypatch.setenv("WDS_RETRIES", "1")
    monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("http://", "http://u:SECRET@"))
    ((_, error),) = outcomes([origin.add("x.tar", b"x")])
    assert isinstance(error, TransferError)
    assert "x.tar at byte 0: the proxy http://" in str(error)
    assert f"@{proxy.url.removeprefix('http://')} (HTTP_PROXY) cannot be reached: " in str(error)
    assert "correct or unset HTTP_PROXY, or add 127.0.0.1 to NO_PROXY" in str(error)
    assert "SECRET" not in str(error)
    monkeypatch.setenv("http_proxy", "nosuch.invalid:3128")
    ((_, error),) = outcomes([origin.url("x.tar")])
    assert "the proxy http://nosuch.invalid:3128 (http_proxy) cannot be reached: " in str(error)
    with pytest.raises(TransferError, match=r"the proxy http://nosuch.invalid:3128 \(http_proxy\) cannot be reached"):
        publish_text(origin.url("y.txt"), "x")


def test_a_proxy_that_refuses_or_stays_silent_is_named(
    origin: Origin, proxy: Proxy, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    monkeypatch.setenv("https_proxy", proxy.url)
    url = f"https://127.0.0.1:{free_port()}/x.tar"  # the proxy cannot connect there, and hangs up
    ((_, error),) = outcomes([url])
    assert f"the proxy {proxy.url} (https_proxy) is in the way: " in str(error)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{silent.getsockname()[1]}")
        ((_, error),) = outcomes([origin.url("x.tar")], quick(connect_timeout_s=0.2, stall_timeout_s=0.2))
        assert f"the proxy http://127.0.0.1:{silent.getsockname()[1]} (http_proxy) is in the way: " in str(error)


# -- bodies that are left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_a_body_that_is_left_is_aborted_and_a_read_one_keeps_its_connection(
    tls: Tls, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    content = data(300_000)

    async def read(backend: HttpBackend, url: str, rest: bool) -> bytes:
        stream = backend.streamed(backend.request(url))
        await stream.open()
        into, got = memoryview(bytearray(1 << 16)), b""
        while count := await stream.readinto(into):
            got += bytes(into[:count])
            if not rest:
                break
        await stream.close()
        await stream.close()  # again is harmless
        return got

    with Origin(tls=tls.server_context() if secure else None) as origin:
        url = origin.add("x.tar", content)
        origin.behave(path="/held.tar", body=bytes(64 << 20))

        async def run() -> None:
            backend = HttpBackend()
            assert await read(backend, url, rest=True) == content
            assert await read(backend, url, rest=True) == content
            assert origin.connections == 1  # it was kept
            assert await read(backend, origin.url("held.tar"), rest=False)
            assert await read(backend, url, rest=True) == content
            assert origin.connections == 2  # the one that was left was not
            assert await read(backend, origin.url("held.tar"), rest=False)
            await backend.close()

        asyncio.run(run())
        gc.collect()  # a transport that is left open is a ResourceWarning, which fails the test
        origin.wait_until(lambda server: server.open_connections == 0)


@pytest.mark.parametrize("secure", [False, True])
def test_a_body_that_is_left_needs_its_loop_no_more(tls: Tls, monkeypatch: pytest.MonkeyPatch, secure: bool) -> None:
    """An engine that ends may close its loop at once: TLS that was to be ended in order stayed open then."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    with Origin(tls=tls.server_context() if secure else None) as origin:
        origin.behave(path="/held.tar", body=bytes(64 << 20))

        async def leave() -> None:
            backend = HttpBackend()
            stream = backend.streamed(backend.request(origin.url("held.tar")))
            await stream.open()
            await stream.readinto(memoryview(bytearray(1 << 16)))
            await stream.close()
            (await backend.session()).detach()  # or it would warn that it was not closed

        loop = new_event_loop()
        loop.run_until_complete(leave())
        loop.close()
        gc.collect()  # a transport that is left open is a ResourceWarning, which fails the test
        origin.wait_until(lambda server: server.open_connections == 0)
