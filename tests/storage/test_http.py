"""The plain web server's backend: requests, explanations, and the way through aiohttp and proxies."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from tests.servers import Origin
from tests.transfer.reading import bytes_of, data, outcomes, quick
from wds_async.errors import AccessDenied, TransferError, UrlError
from wds_async.storage.base import Answer, RefusedAnswer, Verdict
from wds_async.storage.http import HttpBackend, explain_status, identity_of


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
    fault = HttpBackend().classify(RefusedAnswer(Answer(status, {})))
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


def test_what_pins_an_object() -> None:
    assert identity_of({"etag": '"1"', "last-modified": "x"}, 5) == 'etag "1"'
    assert identity_of({"last-modified": "x"}, 5) != identity_of({"last-modified": "x"}, 6)
    assert identity_of({}, 5) == "5 bytes"


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
    fault = HttpBackend().classify(exn)
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
    """An HTTP proxy: absolute-form GETs and CONNECT, one thread a connection; ``seen`` are the request lines."""

    def __init__(self) -> None:
        self.seen: list[str] = []
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
    assert len(proxy.seen) == len(origin.requests) == 3
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert bytes_of(urls) == contents
    assert len(proxy.seen) == 3


def test_a_proxy_that_is_down_is_named(origin: Origin, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.close()
    monkeypatch.setenv("http_proxy", proxy.url)
    ((_, error),) = outcomes([origin.add("x.tar", b"x")])
    assert isinstance(error, TransferError)
    assert "x.tar at byte 0" in str(error)
