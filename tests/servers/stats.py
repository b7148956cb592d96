"""A server of ``/v1/stats``, whose documents a test writes."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["StatsServer", "job", "service"]


class StatsServer:
    """Answers ``GET /v1/stats`` with ``document`` (or what it returns, called with the number of the request), by TCP
    or at the Unix ``socket``; a context manager. ``address`` is what `wds-async top` takes."""

    def __init__(
        self,
        document: dict[str, Any] | Callable[[int], dict[str, Any]] | bytes,
        *,
        socket: Path | None = None,
        port: int = 0,
        status: int = 200,
    ) -> None:
        self.asked = 0
        self.authorizations: list[str | None] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = document(outer.asked) if callable(document) else document
                outer.asked += 1
                outer.authorizations.append(self.headers["Authorization"])
                body = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status if self.path == "/v1/stats" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

            def address_string(self) -> str:
                return ""

        if socket is None:
            self._server: socketserver.BaseServer = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
            self.port = self._server.server_address[1]
            self.address = f"http://127.0.0.1:{self.port}"
        else:
            self._server = socketserver.ThreadingUnixStreamServer(str(socket), Handler)
            self.address = f"unix:{socket}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> StatsServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def service(read: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A service that has given ``read`` bytes to its clients, three quarters of them from its disk; a quarter had been
    fetched ahead."""
    origin = {"requests": 10, "bytes": read / 4, "retries": 1, "throttled": 0, "hedges": 2, "errors": 0}
    return {
        "kind": "service",
        "name": "node-1",
        "version": "1.0",
        "time": 1_700_000_000.0,
        "uptime_s": 100.0 + read / 1e9,
        "ready": True,
        "counters": {
            "client_bytes": read,
            "origin_bytes": read / 4,
            "hit_bytes": 3 * read / 4,
            "miss_bytes": read / 4,
            "ahead_bytes": read / 4,
        },
        "gauges": {
            "window_bytes": 48e6,
            "window_limit_bytes": 192e6,
            "cache_bytes": 4e10,
            "cache_limit_bytes": 1e11,
        },
        "origins": {"s3://bucket": {**origin, "connections": 7, "p50_s": 0.05, "p99_s": 2.5, "dollars": [0.5, 1.25]}},
        "slowest": [{"url": "s3://bucket/train-000042.tar", "seconds": 3.5, "bytes": 66e6}],
        "errors": [{"time": 1_700_000_000.0, "url": "s3://bucket/x", "error": "s3://bucket/x: refused (403)"}],
        "plans": [{"client": "trainer-0", "job": "4711", "shards": 1000, "done": 250, "ahead_bytes": 5e8}],
        "cost": {"dollars": [0.5, 1.25], "limit": None},
        **changes,
    }


def job(read: float = 0.0, **counters: Any) -> dict[str, Any]:
    """A training job with four workers that has read so many bytes; more of its ``counters``."""
    known = {"bytes": read, "samples": read / 1e5, "origin_bytes": read, "processes": 4.0, "batches": read / 1e6}
    gauges = {"window_bytes": 96e6, "window_limit_bytes": 512e6}
    document = service(read, kind="job", name="gpu-7", counters={**known, **counters}, gauges=gauges)
    return {**document, "plans": [], "slowest": [], "errors": []}
