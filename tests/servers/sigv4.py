"""A store that believes nothing but Signature Version 4, recomputed here from Amazon's description of it
("Authenticating requests (AWS Signature Version 4)", S3 API reference), and that answers in S3's words.

Path style only. It is itself checked with botocore as the client (``tests/clouds/test_s3.py``).
"""

from __future__ import annotations

import calendar
import hashlib
import hmac
import http.server
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["Account", "Seen", "SignedStore", "signature_of"]

_MAX_SKEW_S = 900.0


@dataclass
class Account:
    """What an access key may do. ``uses``: after so many requests its ``token`` has expired."""

    secret: str
    token: str = ""
    uses: int | None = None


@dataclass(frozen=True)
class Seen:
    """A request, and what was answered; ``key`` is the access key that signed it."""

    target: str
    headers: Mapping[str, str]
    key: str
    status: int

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass(frozen=True)
class _Refused(Exception):
    status: int
    code: str
    message: str
    elements: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def _quoted(text: str, safe: str = "") -> str:
    return urllib.parse.quote(text, safe=f"-_.~{safe}")


def signature_of(
    method: str, target: str, headers: Mapping[str, str], names: str, scope: str, date: str, secret: str, payload: str
) -> str:
    """The signature that a request ought to have; ``headers`` by names in lower case."""
    path, _, query = target.partition("?")
    pairs = [urllib.parse.unquote(text).partition("=") for text in query.split("&") if text]
    canonical_query = "&".join(sorted(f"{_quoted(n)}={_quoted(v)}" for n, _, v in pairs if n != "X-Amz-Signature"))
    lines = [f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names.split(";")]
    canonical = "\n".join(
        [method, _quoted(urllib.parse.unquote(path), "/"), canonical_query, "".join(lines), names, payload]
    )
    day, region, service, last = scope.split("/")
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, last):
        key = _hmac(key, part)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return _hmac(key, f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{digest}").hex()


class SignedStore(http.server.ThreadingHTTPServer):
    """``objects``: bytes by ``(bucket, key)`` or ``(bucket, key, version)``. ``regions``: the buckets that are only
    served in their own region, and how others are told ("malformed" or "redirect" in ``elsewhere``). ``chunked``: whole
    objects only, in chunks. Buckets of S3 Express (``…--x-s3``) give sessions, and nothing without one."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.objects: dict[tuple[str, ...], bytes] = {}
        self.accounts: dict[str, Account] = {}
        self.public: set[str] = set()
        self.payer: set[str] = set()
        self.regions: dict[str, str] = {}
        self.elsewhere = "malformed"
        self.ahead_s = 0.0
        self.chunked = False
        self.script: list[tuple[int, str, dict[str, str]]] = []
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self.base = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> SignedStore:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no news."""

    def check(self, method: str, target: str, headers: Mapping[str, str]) -> str:
        """The access key that signed a request ("" for nobody); `_Refused` where it may not."""
        name = urllib.parse.unquote(target.partition("?")[0]).lstrip("/").partition("/")[0]
        query = dict(urllib.parse.parse_qsl(target.partition("?")[2], keep_blank_values=True))
        if "authorization" in headers:
            found = re.fullmatch(
                r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^,]+), ?SignedHeaders=([^,]+), ?Signature=(\w+)",
                headers["authorization"],
            )
            if found is None:
                raise _Refused(400, "InvalidArgument", "Unsupported Authorization Type")
            key, scope, names, given = found.groups()
            date, token = headers.get("x-amz-date", ""), headers.get("x-amz-security-token", "")
            token = token or headers.get("x-amz-s3session-token", "")
            payload, lives_s = headers.get("x-amz-content-sha256", ""), _MAX_SKEW_S
        elif "X-Amz-Signature" in query:
            key, _, scope = query["X-Amz-Credential"].partition("/")
            names, given, date = query["X-Amz-SignedHeaders"], query["X-Amz-Signature"], query["X-Amz-Date"]
            token, payload = query.get("X-Amz-Security-Token", ""), "UNSIGNED-PAYLOAD"
            lives_s = float(query["X-Amz-Expires"])
        elif name in self.public:
            return ""
        else:
            raise _Refused(403, "AccessDenied", "Access Denied")
        if name.endswith("--x-s3") and "session" not in query and not key.startswith("ASIAEXPRESS"):
            raise _Refused(403, "AccessDenied", "A session is needed")
        account = self._account(key, token)
        self._check_time(date, lives_s)
        self._check_region(name, scope.split("/")[1])
        unsigned = {n for n in headers if n == "host" or n.startswith("x-amz-")} - set(names.split(";"))
        if unsigned:
            raise _Refused(
                403, "AccessDenied", f"There were headers present in the request which were not signed {unsigned}"
            )
        if signature_of(method, target, headers, names, scope, date, account.secret, payload) != given:
            raise _Refused(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.")
        if name in self.payer and headers.get("x-amz-request-payer") != "requester":
            raise _Refused(403, "AccessDenied", "Access Denied")
        return key

    def session(self) -> bytes:
        """What S3's CreateSession gives."""
        with self.lock:
            number = len(self.accounts)
            key, secret, token = f"ASIAEXPRESS{number:09d}", f"hush-session-{number}", f"hush-session-token-{number}"
            self.accounts[key] = Account(secret, token)
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300))
        given = {"SessionToken": token, "SecretAccessKey": secret, "AccessKeyId": key, "Expiration": until}
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in given.items())
        return f"<CreateSessionResult><Credentials>{inner}</Credentials></CreateSessionResult>".encode()

    def _account(self, key: str, token: str) -> Account:
        account = self.accounts.get(key)
        if account is None:
            raise _Refused(
                403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist.", {"AWSAccessKeyId": key}
            )
        if token != account.token:
            raise _Refused(
                400, "InvalidToken", "The provided token is malformed or otherwise invalid.", {"Token-0": token}
            )
        with self.lock:
            if account.uses is not None:
                account.uses -= 1
                if account.uses < 0:
                    raise _Refused(400, "ExpiredToken", "The provided token has expired.", {"Token-0": token})
        return account

    def _check_time(self, date: str, lives_s: float) -> None:
        now = time.time() + self.ahead_s
        if abs(now - calendar.timegm(time.strptime(date, "%Y%m%dT%H%M%SZ"))) > lives_s:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
            raise _Refused(
                403,
                "RequestTimeTooSkewed",
                "The difference between the request time and the current time is too large.",
                {"RequestTime": date, "ServerTime": stamp, "MaxAllowedSkewMilliseconds": "900000"},
            )

    def _check_region(self, bucket: str, region: str) -> None:
        right = self.regions.get(bucket, region)
        if right == region:
            return
        if self.elsewhere == "malformed":
            words = f"The authorization header is malformed; the region '{region}' is wrong; expecting '{right}'"
            raise _Refused(400, "AuthorizationHeaderMalformed", words, {"Region": right})
        words = "The bucket you are attempting to access must be addressed using the specified endpoint."
        elements = {"Endpoint": f"{bucket}.s3-{right}.amazonaws.com", "Bucket": bucket}
        raise _Refused(301, "PermanentRedirect", words, elements, {"x-amz-bucket-region": right})


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SignedStore

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        store, key = self.server, ""
        try:
            key = store.check(self.command, self.path, headers)
            with store.lock:
                scripted = store.script.pop(0) if store.script else None
            if scripted is not None:
                raise _Refused(scripted[0], scripted[1], scripted[1], {}, scripted[2])
            status, fields, body = self._object(headers)
        except _Refused as refused:
            status, body = refused.status, _error(refused)
            fields = {"Content-Type": "application/xml", **refused.headers}
        with store.lock:
            store.seen.append(Seen(self.path, headers, key, status))
        self.send_response(status)
        if status < 300 and self.server.chunked:
            self._send_chunked(fields, body)
            return
        for name, value in {"Content-Length": str(len(body)), **fields}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _object(self, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        path, _, query = self.path.partition("?")
        bucket, _, key = urllib.parse.unquote(path)[1:].partition("/")
        version = dict(urllib.parse.parse_qsl(query)).get("versionId")
        objects = self.server.objects
        if query == "session":
            return 200, {"Content-Type": "application/xml"}, self.server.session()
        if bucket not in {name[0] for name in objects}:
            raise _Refused(404, "NoSuchBucket", "The specified bucket does not exist", {"BucketName": bucket})
        data = objects.get((bucket, key, version) if version else (bucket, key))
        if data is None:
            raise _Refused(404, "NoSuchKey", "The specified key does not exist.", {"Key": key})
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        if headers.get("if-match", etag) != etag:
            raise _Refused(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        fields = {"ETag": etag, "Last-Modified": "Fri, 20 Nov 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if (span := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))) is None or self.server.chunked:
            return 200, fields, data
        first, last = int(span[1]), min(int(span[2]), len(data) - 1)
        if first >= len(data):
            raise _Refused(416, "InvalidRange", "not satisfiable", {}, {"Content-Range": f"bytes */{len(data)}"})
        return 206, {**fields, "Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1]

    def _send_chunked(self, fields: Mapping[str, str], body: bytes) -> None:
        for name, value in {**fields, "Transfer-Encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(body), 100_000):
            chunk = body[start : start + 100_000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: Any) -> None:
        """Silence."""


def _error(refused: _Refused) -> bytes:
    inner = {"Code": refused.code, "Message": refused.message, **refused.elements, "RequestId": "1"}
    text = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in inner.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{text}</Error>'.encode()
