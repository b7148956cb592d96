"""Azure's places that hand out tokens to machines, as one small server: the metadata service of a virtual machine
(IMDS) and the identity endpoint of App Service. Their protocols are in Microsoft's documentation of managed identities.
"""

from __future__ import annotations

import base64
import http.server
import json
import secrets
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.quiet import QuietServer

__all__ = ["AzureMetadata", "azure_metadata_fixture"]


class AzureMetadata:
    """Gives tokens that are valid for ``lives_s``; ``given`` are those it gave. ``silent`` holds every answer back
    until it stops, ``status`` other than 200 refuses."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.asked: list[str] = []
        self.lives_s = 3600.0
        self.status = 200
        self.silent = False
        self.header = secrets.token_hex(8)
        """What App Service gives its programs as ``IDENTITY_HEADER``."""
        self._stopped = threading.Event()
        self._server: QuietServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def base(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def as_machine(self, environment: pytest.MonkeyPatch) -> None:
        """Be the metadata service of this machine."""
        environment.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", self.base)

    def as_app_service(self, environment: pytest.MonkeyPatch) -> None:
        """Be the identity endpoint of App Service."""
        environment.setenv("IDENTITY_ENDPOINT", f"{self.base}/msi/token")
        environment.setenv("IDENTITY_HEADER", self.header)

    def start(self) -> AzureMetadata:
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, found = double._answer(self.path, self.headers)
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _answer(self, path: str, headers: Any) -> tuple[int, dict[str, str]]:
        self.asked.append(path)
        if self.silent:
            self._stopped.wait(30)
        parts = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        machine = parts.path == "/metadata/identity/oauth2/token" and headers.get("Metadata") == "true"
        service = parts.path == "/msi/token" and headers.get("X-IDENTITY-HEADER") == self.header
        if not (machine or service) or "api-version" not in query:
            return 400, {"error": "invalid_request", "error_description": "Required metadata header not specified"}
        if self.status != 200:
            return self.status, {"error": "invalid_request", "error_description": "Identity not found"}
        if query.get("resource", "").rstrip("/") != "https://storage.azure.com":
            return 400, {"error": "invalid_resource"}
        expires = int(time.time() + self.lives_s)
        token = _token(expires)
        self.given.append(token)
        found = {"access_token": token, "expires_on": str(expires), "resource": query["resource"]}
        return 200, {**found, "expires_in": str(int(self.lives_s)), "token_type": "Bearer"}


def _token(expires: int) -> str:
    """A JSON web token whose signature is random."""
    now = int(time.time())
    claims = {
        "aud": "https://storage.azure.com",
        "iss": "https://sts.windows.net/ab1f708d-50f6-404c-a006-d71b2ac7a606/",
        **{"iat": now - 60, "nbf": now - 60, "exp": expires},
        "oid": "11059fcc-5514-4800-b5f8-49808b9cfab6",
    }
    parts = [json.dumps(part).encode() for part in ({"typ": "JWT", "alg": "RS256"}, claims)]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (*parts, secrets.token_bytes(32)))


@pytest.fixture(name="azure_metadata")
def azure_metadata_fixture() -> Iterator[AzureMetadata]:
    double = AzureMetadata().start()
    yield double
    double.stop()
