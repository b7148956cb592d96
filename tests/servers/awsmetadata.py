"""Where credentials come from on Amazon's machines: IMDSv2, the containers' endpoint, and STS, on one port.

Every answer gives new credentials, named by a counter, and tells ``issued`` of them.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

__all__ = ["AwsMetadata"]

_IMDS_TOKEN = "imds-token"
_CONTAINER_TOKEN = "container-token"


class AwsMetadata(http.server.ThreadingHTTPServer):
    """``issued(key, secret, token)`` is called for all credentials given out; they last ``lives_s``.
    The next ``busy`` clients are turned away by IMDS."""

    daemon_threads = True

    def __init__(self, issued: Callable[[str, str, str], Any], lives_s: float = 3600) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.issued, self.lives_s = issued, lives_s
        self.asked: list[str] = []
        self.busy = 0
        self.base = f"http://127.0.0.1:{self.server_port}"
        self.container_token = _CONTAINER_TOKEN
        self._lock = threading.Lock()
        self._count = 0
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> AwsMetadata:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def give(self, how: str) -> dict[str, str]:
        """New credentials, in the form of IMDS and containers."""
        with self._lock:
            self._count += 1
            self.asked.append(how)
            key, secret, token = (
                f"{prefix}{self._count:04d}" for prefix in ("ASIAROLE00000000", "hush-secret-", "hush-token-")
            )
        self.issued(key, secret, token)
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.lives_s))
        return {"Code": "Success", "AccessKeyId": key, "SecretAccessKey": secret, "Token": token, "Expiration": until}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: AwsMetadata

    def do_PUT(self) -> None:
        if self.server.busy:
            self.server.busy -= 1
            self._answer(503, "")
            return
        allowed = self.path == "/latest/api/token" and "x-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self._answer(200 if allowed else 400, _IMDS_TOKEN if allowed else "")

    def do_GET(self) -> None:
        if self.path == "/container":
            known = self.headers.get("authorization") == _CONTAINER_TOKEN
            self._answer(200 if known else 401, json.dumps(self.server.give("container")) if known else "{}")
            return
        roles = "/latest/meta-data/iam/security-credentials/"
        if self.headers.get("x-aws-ec2-metadata-token") != _IMDS_TOKEN:
            self._answer(401, "")
        elif self.path == roles:
            self._answer(200, "training-role")
        elif self.path == f"{roles}training-role":
            self._answer(200, json.dumps(self.server.give("imds")))
        else:
            self._answer(404, "")

    def do_POST(self) -> None:
        form = dict(urllib.parse.parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        action = form["Action"]
        if form.get("WebIdentityToken", "good") != "good":
            inner = "<Type>Sender</Type><Code>InvalidIdentityToken</Code><Message>Not that one</Message>"
            self._answer(400, f"<ErrorResponse><Error>{inner}</Error></ErrorResponse>")
            return
        given = self.server.give(action)
        inner = (
            f"<Credentials><AccessKeyId>{given['AccessKeyId']}</AccessKeyId><SecretAccessKey>{given['SecretAccessKey']}"
            f"</SecretAccessKey><SessionToken>{given['Token']}</SessionToken><Expiration>{given['Expiration']}</Expiration>"
            "</Credentials><AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/r/s</Arn><AssumedRoleId>A:s</AssumedRoleId>"
            "</AssumedRoleUser>"
        )
        self._answer(200, f"<{action}Response><{action}Result>{inner}</{action}Result></{action}Response>")

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-aws-ec2-metadata-token-ttl-seconds", "600")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silence."""
