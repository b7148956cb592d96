"""Error responses of the service, with their statuses: AIStore's JSON, or XML for clients of S3."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from wds_async import errors
from wds_async.redact import redact

__all__ = ["Refusal", "as_json", "as_xml", "refusal_of", "shown_path", "xml_text"]

NODE = "wds-async"
"""Name of the service where AIStore names the node that answered."""
_STATUSES: tuple[tuple[type[BaseException], int, str], ...] = (
    (errors.ShardNotFound, 404, "missing"),
    (errors.AccessDenied, 403, "origin-denied"),
    (errors.UnsafeContent, 403, "forbidden"),
    (errors.UrlError, 400, "url"),
    (errors.ObjectChanged, 409, "changed"),
    (errors.CostLimitReached, 402, "cost"),  # no client tries a 402 again: asking once more changes nothing
    (errors.FetchTimeout, 504, "origin-timeout"),
    (errors.ChecksumMismatch, 502, "origin-checksum"),
    (errors.StorageError, 502, "origin"),
    (errors.ShardFormatError, 422, "no-archive"),
    (errors.MissingExtra, 501, "extra"),
    (errors.ReaderClosed, 503, "closing"),
    (errors.ConfigError, 500, "settings"),
    (errors.WdsError, 500, "error"),
)
"""The tree's errors, the narrower before the wider: status, and the label that they are counted by."""
_S3_CODES = {
    304: "NotModified", 400: "InvalidRequest", 401: "AccessDenied", 403: "AccessDenied", 404: "NoSuchKey",
    405: "MethodNotAllowed", 412: "PreconditionFailed", 416: "InvalidRange", 429: "SlowDown", 501: "NotImplemented",
    503: "ServiceUnavailable",
}  # fmt: skip
_MESSAGE_AT_MOST, _PATH_AT_MOST = 2000, 400
_DECODINGS = 2  # /url/ escapes a URL whose own path and query are escaped


@dataclass(eq=False)
class Refusal(Exception):
    """An answer other than the requested one. ``message`` is shown to the client, so it holds no secret; ``reason`` is
    a short label for metrics; ``retry_after_s`` becomes ``Retry-After``; ``code`` is S3's, if not the usual."""

    status: int
    message: str
    reason: str = ""
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str = ""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    @property
    def fields(self) -> dict[str, str]:
        """Its headers, ``Retry-After`` among them."""
        later = {} if self.retry_after_s is None else {"Retry-After": str(max(1, round(self.retry_after_s)))}
        return {**self.headers, **later}


def refusal_of(exn: BaseException) -> Refusal:
    """Return an exception as a refusal: with its message if it is of the tree, else only as 500."""
    if isinstance(exn, Refusal):
        return exn
    for kind, status, reason in _STATUSES:
        if isinstance(exn, kind):
            return Refusal(status, redact(str(exn))[:_MESSAGE_AT_MOST], reason)
    if isinstance(exn, TimeoutError):
        return Refusal(504, "not within the time allowed", "timeout")
    return Refusal(500, f"the service itself failed ({type(exn).__name__}); its log says how", "internal")


def shown_path(path: str) -> str:
    """Return a request's path (and query) for people: as it came, or where it holds a secret or a control character,
    escaped or not, decoded and with that hidden. Cut where it is long."""
    spellings = [path[: 4 * _PATH_AT_MOST]]
    for _ in range(_DECODINGS):
        spellings.append(urllib.parse.unquote(spellings[-1]).replace(" ", "%20"))  # a space would end a password
    secret = any(redact(text) != text for text in spellings)
    text = redact(spellings[-1] if secret else path[: 4 * _PATH_AT_MOST]).replace(" ", "%20")
    return text[:_PATH_AT_MOST] + ("…" if len(text) > _PATH_AT_MOST else "")


def as_json(refusal: Refusal, method: str, path: str) -> str:
    """Return the refusal in AIStore's form, one line: ``{"message", "status", …}``. ``path`` is without the query."""
    path, message, status = shown_path(path), refusal.message, refusal.status
    document = {"message": message, "method": method, "url_path": path, "remote_addr": "", "caller": "", "node": NODE}
    return json.dumps({**document, "status": status})


def as_xml(refusal: Refusal, path: str) -> str:
    """Return the refusal in S3's form."""
    code = refusal.code or _S3_CODES.get(refusal.status, "InternalError")
    parts = (("Code", code), ("Message", refusal.message), ("Resource", shown_path(path)), ("RequestId", NODE))
    inner = "".join(f"<{name}>{xml_text(text)}</{name}>" for name, text in parts)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'


_NO_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def xml_text(text: str) -> str:
    """Return ``text`` for XML; control characters, which it cannot hold, are replaced."""
    return escape(_NO_XML.sub("\N{REPLACEMENT CHARACTER}", text))
