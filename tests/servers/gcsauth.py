"""What fake-gcs-server leaves out, before it: bearer tokens, permissions, requester pays, and the token endpoint of
service accounts, which checks what it is sent. Errors are worded as the service words them."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.servers.quiet import QuietServer

__all__ = ["GcsAuth", "service_account_file"]

_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"


def service_account_file(path: Path, token_uri: str, email: str = "reader@p.iam.gserviceaccount.com") -> Any:
    """Write a key file that asks ``token_uri`` for its tokens; the key that verifies its signatures."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()).decode()
    content = {"type": "service_account", "project_id": "key-project", "private_key_id": "id",
               "private_key": pem, "client_email": email, "client_id": "1", "token_uri": token_uri}  # fmt: skip
    path.write_text(json.dumps(content))
    return key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)


class GcsAuth:
    """Use it as a context manager. ``good(token)`` says which bearer tokens hold; ``before(path, headers)`` may give a
    ``(status, kind, body)`` that is answered instead; ``requester_pays`` are buckets that ask for ``userProject``;
    ``public`` lets those in who show no token; ``page`` is the most that a page of a listing holds.
    ``seen`` are the requests' ``(path, authorization)``; ``key`` verifies what the token endpoint is sent."""

    def __init__(self, behind: str, good: Callable[[str], bool]) -> None:
        self.good = good
        self.before: Callable[[str, Any], tuple[int, str, bytes] | None] = lambda path, headers: None
        self.requester_pays: set[str] = set()
        self.public = False
        self.page = 0
        self.seen: list[tuple[str, str]] = []
        self.key: bytes = b""
        self.tokens_made = 0
        self.clock_off_s = 0
        self._behind = urllib.parse.urlsplit(behind).netloc
        self._server = QuietServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> GcsAuth:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def judge(self, path: str, headers: Any) -> tuple[int, str, bytes] | None:
        """The answer that refuses a request; None for one that may pass."""
        authorization = headers.get("Authorization") or ""
        self.seen.append((path, authorization))
        parts = urllib.parse.urlsplit(path)
        bucket = parts.path.partition("/b/")[2].partition("/")[0]
        if (chosen := self.before(path, headers)) is not None:
            return chosen
        if self.public and not authorization:
            return None
        if not authorization:
            words = (
                "Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object. "
                "Permission 'storage.objects.get' denied on resource (or it may not exist)."
            )
            return self.refusal(401, "required", words)
        if not self.good(authorization.removeprefix("Bearer ")):
            return self.refusal(401, "authError", "Invalid Credentials")
        if bucket in self.requester_pays and "userProject" not in urllib.parse.parse_qs(parts.query):
            words = "Bucket is a requester pays bucket but no user project provided."
            return self.refusal(400, "required", words)
        return None

    @staticmethod
    def refusal(status: int, reason: str, message: str) -> tuple[int, str, bytes]:
        """An error as the JSON API words it."""
        errors = [{"domain": "global", "reason": reason, "message": message}]
        body = {"error": {"code": status, "message": message, "errors": errors}}
        return status, "application/json", json.dumps(body).encode()

    def token(self, body: bytes) -> tuple[int, str, bytes]:
        """The token endpoint: the grant's signature and dates are checked by google-auth's own verifier."""
        from google.auth import exceptions, jwt

        form = dict(urllib.parse.parse_qsl(body.decode()))
        if form.get("grant_type") != _GRANT:
            return 400, "application/json", b'{"error": "unsupported_grant_type"}'
        try:
            payload = jwt.decode(form["assertion"], certs=self.key, audience=None)
            issued = payload["iat"] + self.clock_off_s
        except (ValueError, exceptions.GoogleAuthError):
            return 400, "application/json", b'{"error": "invalid_grant", "error_description": "Invalid JWT Signature."}'
        if abs(issued - datetime.datetime.now(datetime.UTC).timestamp()) > 300:
            said = (
                "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. "
                "Check your iat and exp values in the JWT claim."
            )
            return 400, "application/json", json.dumps({"error": "invalid_grant", "error_description": said}).encode()
        self.tokens_made += 1
        made = {"access_token": f"sa-marked-secret-{self.tokens_made}", "expires_in": 3600, "token_type": "Bearer"}
        return 200, "application/json", json.dumps(made).encode()

    def forward(self, path: str, headers: Any) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the server behind answers."""
        connection = http.client.HTTPConnection(self._behind, timeout=30)
        try:
            if self.page:
                path = path.replace("maxResults=1000", f"maxResults={self.page}")
            kept = {name: value for name, value in headers.items() if name.lower() in ("range", "if-match", "accept")}
            connection.request("GET", path, headers=kept)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _handler(double: GcsAuth) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            refused = double.judge(self.path, self.headers)
            if refused is not None:
                self._send(refused[0], [("Content-Type", refused[1])], refused[2])
                return
            self._send(*double.forward(self.path, self.headers))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, kind, answer = double.token(body)
            self._send(status, [("Content-Type", kind)], answer)

        def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            with contextlib.suppress(ConnectionError):  # who asked may have left
                self._say(status, headers, body)

        def _say(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    return Handler
