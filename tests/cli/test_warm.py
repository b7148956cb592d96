"""``wds-async cache warm --service``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from wds_async.cli.warm import path_of, through_service
from wds_async.errors import ConfigError, TransferError
from wds_async.service.cache.upkeep import Warmed


class Service(BaseHTTPRequestHandler):
    """What of a service `through_service` speaks to."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, str]]
    plans: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.plans.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(200 if self.headers.get("Authorization") == "Bearer secret" else 401, b"{}")

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Wds-Client"], self.headers["Authorization"]))
        self._answer(404 if "none" in self.path else 200, b"x" * 1000)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[tuple[str, type[Service]]]:
    handler = type("Handler", (Service,), {"asked": [], "plans": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def test_each_is_asked_for_after_the_plan(service: tuple[str, type[Service]]) -> None:
    address, handler = service
    told: list[Warmed] = []
    urls = [f"s3://bucket/{number}.tar" for number in range(5)] + ["https://host/a?b=c", "gs://bucket/none.tar"]
    through_service(address, "secret", urls, told.append, at_once=3)
    assert handler.plans[0]["shards"] == urls
    assert {path for path, _, _ in handler.asked} == {path_of(url) for url in urls}
    assert {client for _, client, _ in handler.asked} == {handler.plans[0]["client"]}
    assert sorted(one.url for one in told if one.whole) == sorted(urls[:-1])
    (failed,) = (one for one in told if one.error)
    assert "HTTP 404" in failed.error


def test_paths() -> None:
    assert path_of("gs://bucket/a b/c.tar") == "/v1/objects/bucket/a%20b/c.tar?provider=gcp"
    assert path_of("https://host/a?b=c") == "/url/https%3A%2F%2Fhost%2Fa%3Fb%3Dc"


def test_no_service(service: tuple[str, type[Service]]) -> None:
    with pytest.raises(TransferError, match="--token-file"):
        through_service(service[0], "", ["s3://b/a"], print)
    with pytest.raises(TransferError, match="no service answers"):
        through_service("unix:/nowhere/socket", "", ["s3://b/a"], print)
    with pytest.raises(ConfigError, match="no address"):
        through_service("ftp://host", "", ["s3://b/a"], print)
