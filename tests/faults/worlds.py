"""The columns: scripted servers that speak enough of each store's protocol to be read.

Signatures are not checked here, nor is anything listed. The faults are the same for all: what an answer of each store
looks like is a `dialect` over the same server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import struct
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.objects import Objects
from tests.servers.behaviour import Answer, Behaviour, Request
from tests.servers.origin import Origin

__all__ = ["Setting", "World", "world"]

BUCKET = "bucket"
_ACCOUNT, _KEY = "account", base64.b64encode(b"a key of the fault programme").decode()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a world is made with: an environment to write to, a folder, the two sides of TLS."""

    setenv: Callable[[str, str], None]
    folder: Any
    tls: Any
    checksums: bool = False
    """Whether the store says what its objects add up to, where it need not (for ``verify="always"``)."""


@dataclass(slots=True)
class World:
    """A running store. ``data`` is the server of the objects, at ``paths`` (by shard's name): faults go there."""

    name: str
    data: Origin
    urls: list[str]
    paths: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    direct: bool = True
    plain: bool = False
    """Whether it is a web server, where nothing is signed unless one has `sign`."""
    others: list[Origin] = field(default_factory=list)
    expired: Behaviour = Behaviour(status=403)  # noqa: RUF009 (frozen)
    """How the store says that a signature or token has lapsed."""

    def is_data(self, request: Request) -> bool:
        """Whether ``request`` asks for an object's bytes."""
        return request.method == "GET" and request.path in self.paths.values()

    def name_of(self, path: str) -> str:
        """The shard at ``path``."""
        return next(name for name, known in self.paths.items() if known == path)

    def sign(self) -> None:
        """Let a plain web server send its readers on to signed URLs, which are the ones that lapse."""
        signed = {path: f"/signed{path}" for path in self.paths.values()}

        def to_signed(request: Request) -> str:
            return f"{signed[request.path]}?signature={request.number}"

        self.data.behave(when=lambda request: request.path in signed, redirect=to_signed)
        self.data.files.update({new: self.data.files[old] for old, new in signed.items()})
        self.paths = {name: signed[path] for name, path in self.paths.items()}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        for origin in (self.data, *self.others):
            origin.stop()


def world(column: str, objects: Objects, setting: Setting) -> World:
    """The world of ``column``, running."""
    return _WORLDS[column](objects, setting)


# -- web servers ----------------------------------------------------------------------------------------------------


def _web(name: str, objects: Objects, setting: Setting, *, tls: ssl.SSLContext | None = None) -> World:
    paths = {shard: f"/shards/{shard}" for shard in objects.contents}
    data = _origin(objects, paths, tls=tls)
    if setting.checksums:
        for shard, content in objects.contents.items():
            data.files[f"{paths[shard]}.sha256"] = f"{hashlib.sha256(content).hexdigest()}  {shard}\n".encode()
    base = f"{'https' if tls else 'http'}://127.0.0.1:{data.port}"
    return World(name, data, [base + path for path in paths.values()], paths, plain=True)


def _http(objects: Objects, setting: Setting) -> World:
    return _web("http", objects, setting)


def _https(objects: Objects, setting: Setting) -> World:
    made = _web("https", objects, setting, tls=setting.tls.server_context())
    made.options = {"https": {"ca_file": str(setting.tls.ca)}}
    return made


# -- S3 -------------------------------------------------------------------------------------------------------------

_S3_CODES = {403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange",
             429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}  # fmt: skip


def _s3_error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>says {code}</Message></Error>'.encode()


def _s3_dialect(request: Request, answer: Answer) -> None:
    _error(answer, lambda status: _s3_error(_S3_CODES.get(status, "Unknown")), "application/xml")
    answer.headers["x-amz-request-id"] = f"{request.number:016X}"


def _s3(objects: Objects, setting: Setting) -> World:
    paths = {shard: f"/{BUCKET}/{shard}" for shard in objects.contents}

    def etag_of(content: bytes) -> str:
        # That of an object which was put whole is its MD5, that of one in parts is nobody's checksum.
        return f'"{hashlib.md5(content).hexdigest()}{"" if setting.checksums else "-2"}"'

    data = _origin(objects, paths, etag_of=etag_of, dialect=_s3_dialect)
    for name, text in {
        "AWS_ENDPOINT_URL_S3": data.base,
        "AWS_ACCESS_KEY_ID": "AKIAFAULTS",
        "AWS_SECRET_ACCESS_KEY": "a secret of the fault programme",
        "AWS_SESSION_TOKEN": "session-0",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(setting.folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(setting.folder / "none"),
    }.items():
        setting.setenv(name, text)

    def renew(request: Request) -> None:  # as whoever keeps the environment's session alive does
        setting.setenv("AWS_SESSION_TOKEN", f"session-{request.number + 1}")

    expired = Behaviour(status=400, body=_s3_error("ExpiredToken"), then=renew)
    return World("s3", data, [f"s3://{BUCKET}/{shard}" for shard in paths], paths, expired=expired)


# -- Google ---------------------------------------------------------------------------------------------------------


def _gs_dialect(request: Request, answer: Answer) -> None:
    def error(status: int) -> bytes:
        reason = {429: "rateLimitExceeded", 503: "backendError"}.get(status, "reason")
        errors = [{"domain": "global", "reason": reason, "message": f"says {status}"}]
        return json.dumps({"error": {"code": status, "message": f"says {status}", "errors": errors}}).encode()

    _error(answer, error, "application/json")
    if answer.whole is not None:
        import google_crc32c

        crc = base64.b64encode(struct.pack(">I", google_crc32c.value(answer.whole))).decode()
        md5 = base64.b64encode(hashlib.md5(answer.whole).digest()).decode()
        answer.headers["x-goog-hash"] = f"crc32c={crc},md5={md5}"
        answer.headers["x-goog-generation"] = str(1_700_000_000_000_000 + answer.whole[-2000])


def _gs(objects: Objects, setting: Setting) -> World:
    paths = {shard: f"/download/storage/v1/b/{BUCKET}/o/{shard}" for shard in objects.contents}
    data = _origin(objects, paths, dialect=_gs_dialect)
    options = {"gs": {"endpoint_url": data.base, "token": _google_credentials()}}
    expired = Behaviour(status=401, body=b'{"error": {"code": 401, "message": "Invalid Credentials"}}')
    return World("gs", data, [f"gs://{BUCKET}/{shard}" for shard in paths], paths, options, expired=expired)


def _google_credentials() -> Any:
    from google.auth.credentials import Credentials

    class Renewing(Credentials):
        """Tokens without an end, that can be asked for again."""

        times = 0

        def refresh(self, request: Any) -> None:
            self.times += 1
            self.token = f"token-{self.times}"

    return Renewing()  # type: ignore[no-untyped-call] # google-auth is typed in parts


# -- Azure ----------------------------------------------------------------------------------------------------------

_AZURE_CODES = {403: "AuthorizationFailure", 404: "BlobNotFound", 412: "ConditionNotMet", 416: "InvalidRange",
                429: "TooManyRequests", 500: "InternalError", 503: "ServerBusy"}  # fmt: skip
_LAPSED = (
    b"<?xml version='1.0'?><Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate the request."
    b"</Message><AuthenticationErrorDetail>Signature not valid in the specified time frame</AuthenticationErrorDetail>"
    b"</Error>"
)


def _az(objects: Objects, setting: Setting) -> World:
    paths = {shard: f"/{_ACCOUNT}/{BUCKET}/{shard}" for shard in objects.contents}

    def dialect(request: Request, answer: Answer) -> None:
        code = _AZURE_CODES.get(answer.status, "Unknown")
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>says {code}</Message></Error>".encode()
        if _error(answer, lambda _: text, "application/xml"):
            answer.headers["x-ms-error-code"] = code
        answer.headers["x-ms-version"] = "2021-08-06"
        if answer.whole is not None and setting.checksums:
            answer.headers["x-ms-blob-content-md5"] = base64.b64encode(hashlib.md5(answer.whole).digest()).decode()

    data = _origin(objects, paths, dialect=dialect)
    known = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": _ACCOUNT,
        "AccountKey": _KEY,
        "BlobEndpoint": f"{data.base}/{_ACCOUNT}",
    }
    options = {"az": {"connection_string": "".join(f"{name}={text};" for name, text in known.items())}}
    expired = Behaviour(status=403, body=_LAPSED, headers={"x-ms-error-code": "AuthenticationFailed"})
    return World("az", data, [f"az://{BUCKET}/{shard}" for shard in paths], paths, options, expired=expired)


# -- AIStore --------------------------------------------------------------------------------------------------------


def _ais(objects: Objects, setting: Setting) -> World:
    paths = {shard: f"/v1/objects/{BUCKET}/{shard}" for shard in objects.contents}

    def dialect(request: Request, answer: Answer) -> None:
        _error(answer, lambda status: json.dumps({"message": f"says {status}", "status": status}).encode(), "text/json")
        if answer.whole is not None:  # buckets of its own have no ETag, but versions
            answer.headers.pop("etag", None)
            answer.headers["ais-version"] = str(1 + answer.whole[-2000])
            answer.headers["ais-checksum-type"] = "md5" if setting.checksums else "xxhash2"
            answer.headers["ais-checksum-value"] = hashlib.md5(answer.whole).hexdigest()[
                : 32 if setting.checksums else 16
            ]

    target, proxy = _origin(objects, paths, dialect=dialect), Origin(dialect=dialect).start()

    def to_target(request: Request) -> str:
        query = urllib.parse.urlsplit(request.target).query
        return f"{target.base}{request.path}?{query}&pid=p1"

    proxy.behave(redirect=to_target, status=301)
    token = setting.folder / "auth.token"
    token.write_text(json.dumps({"token": "a token of the fault programme"}))
    setting.setenv("AIS_ENDPOINT", proxy.base)
    setting.setenv("AIS_AUTHN_TOKEN_FILE", str(token))
    expired = Behaviour(status=401, body=b'{"message": "token expired", "status": 401}')
    urls = [f"ais://{BUCKET}/{shard}" for shard in paths]
    return World("ais", target, urls, paths, others=[proxy], expired=expired)


def _by_another_client(make: Callable[[Objects, Setting], World], name: str) -> Callable[[Objects, Setting], World]:
    """The same store with ``WDS_DIRECT=0``."""

    def made(objects: Objects, setting: Setting) -> World:
        world = make(objects, setting)
        world.name, world.direct = name, False
        return world

    return made


_WORLDS: dict[str, Callable[[Objects, Setting], World]] = {
    "http": _http,
    "https": _https,
    "s3": _s3,
    "gs": _gs,
    "az": _az,
    "ais": _ais,
    "aiohttp": _by_another_client(_http, "aiohttp"),
    "s3fs": _by_another_client(_s3, "s3fs"),
    "gcsfs": _by_another_client(_gs, "gcsfs"),
    "az_aiohttp": _by_another_client(_az, "az_aiohttp"),
    "ais_aiohttp": _by_another_client(_ais, "ais_aiohttp"),
}


def _origin(objects: Objects, paths: dict[str, str], **options: Any) -> Origin:
    return Origin({path: objects.contents[shard] for shard, path in paths.items()}, **options).start()


def _error(answer: Answer, text: Callable[[int], bytes], kind: str) -> bool:
    """Put a page of the plain server in a store's words. False where there is none."""
    if answer.status < 400 or (answer.body and not bytes(answer.body).startswith(b"<html><body><h1>")):
        return False
    if answer.body:
        answer.body = text(answer.status)
        answer.headers["content-length"] = str(len(answer.body))
    answer.headers["content-type"] = kind
    return True
