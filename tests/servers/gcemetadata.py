"""A double of the metadata server of Google's machines: tokens that expire, by its own protocol."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.servers.quiet import QuietServer

__all__ = ["EMAIL", "GceMetadata", "gce_metadata"]

EMAIL = "trainer@project-of-tests.iam.gserviceaccount.com"
_ACCOUNT = "/computeMetadata/v1/instance/service-accounts/"


class GceMetadata:
    """Use it as a context manager. A token holds for ``lifetime_s`` and is handed out for two thirds of it (Google's:
    until five minutes before its end), or until `expire`; ``requests`` are the paths asked for."""

    def __init__(self, lifetime_s: float = 3600.0) -> None:
        self.lifetime_s = lifetime_s
        self.requests: list[str] = []
        self.handed_out: list[str] = []
        self.broken = False
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                double._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> GceMetadata:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def token_requests(self) -> int:
        """How often a token was asked for."""
        return sum(path.startswith(_ACCOUNT + "default/token") for path in self.requests)

    def good(self, token: str) -> bool:
        """Whether a token is one of ours and holds."""
        return self._until.get(token, 0.0) > time.monotonic()

    def expire(self) -> None:
        """No token that was handed out holds any longer."""
        with self._lock:
            self._until.clear()

    def _token(self) -> tuple[str, float]:
        with self._lock:
            now = time.monotonic()
            token = self.handed_out[-1] if self.handed_out else ""
            if self._until.get(token, 0.0) <= now + self.lifetime_s / 3:
                token = f"ya29.marked-secret-{len(self.handed_out)}"
                self.handed_out.append(token)
                self._until[token] = now + self.lifetime_s
            return token, self._until[token] - now

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        self.requests.append(handler.path)
        if self.broken:
            return _send(handler, 503, b"down", "text/plain")
        if handler.headers.get("Metadata-Flavor") != "Google":
            return _send(handler, 403, b"missing Metadata-Flavor:Google header", "text/plain")
        if path.rstrip("/") in ("", "/computeMetadata"):
            return _send(handler, 200, b"computeMetadata/", "application/text")
        if path == "/computeMetadata/v1/project/project-id":
            return _send(handler, 200, b"project-of-tests", "application/text")
        if path in (_ACCOUNT + "default/", _ACCOUNT + EMAIL + "/"):
            info = {
                "aliases": ["default"],
                "email": EMAIL,
                "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
            }
            return _send(handler, 200, json.dumps(info).encode(), "application/json")
        if path in (_ACCOUNT + "default/token", _ACCOUNT + EMAIL + "/token"):
            token, left_s = self._token()
            body = {"access_token": token, "expires_in": left_s, "token_type": "Bearer"}
            return _send(handler, 200, json.dumps(body).encode(), "application/json")
        return _send(handler, 404, b"not found", "text/html")


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
    handler.send_response(status)
    handler.send_header("Metadata-Flavor", "Google")
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def gce_metadata(clean_google: pytest.MonkeyPatch) -> Iterator[GceMetadata]:
    """A machine of Google's: `GceMetadata`, and an environment that points to it."""
    from google.auth.compute_engine import _metadata

    with GceMetadata() as double:
        clean_google.delenv("NO_GCE_CHECK")
        clean_google.setenv("GCE_METADATA_HOST", double.address)
        clean_google.setenv("GCE_METADATA_IP", double.address)
        clean_google.setattr(_metadata, "_GCE_METADATA_HOST", double.address)  # read once, at its import
        yield double
