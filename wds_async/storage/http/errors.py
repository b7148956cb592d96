"""Explanations of HTTP statuses and network exceptions.

Statuses are those of RFC 9110; which of them are worth another attempt follows the clouds' own guidance
(408, 409, 425, 429 and 5xx are, but not 501 and 505, which say that the server never will).
"""

from __future__ import annotations

import datetime
import email.utils
import errno
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import replace

from wds_async.config import proxy_for, proxy_variable
from wds_async.errors import AccessDenied
from wds_async.redact import redact
from wds_async.storage.base import Answer, Contradiction, Fault, ObjectReplaced, RedirectLoop, Verdict

__all__ = [
    "explain_exception",
    "explain_status",
    "retry_after_s",
    "with_identity",
    "with_place",
    "with_port_hint",
    "with_proxy",
]

_TRANSIENT = frozenset({408, 409, 425, 429, *range(500, 600)}) - {501, 505}
_SECONDS = re.compile(r"[0-9]{1,300}(\.[0-9]{1,20})?")
_PROXY_ADVICE = "The proxy wants credentials: HTTPS_PROXY=http://user:password@host:port."
# A signature of S3, CloudFront, GCS or Azure in a URL's query.
_SIGNATURE = re.compile(r"[?&](?:x-amz-signature|x-goog-signature|signature|sig)=[^&#]", re.IGNORECASE)
_SIGNED_ADVICE = (
    "Only its maker can renew it: have it made again, for longer, or read by the store's own scheme (s3://, "
    "gs://, az://) with credentials, which are renewed."
)
_CHECK_PROXY = "Check the proxy: HTTP_PROXY, HTTPS_PROXY, or what was given as trust_env."
_PROXY_UNREACHED = frozenset({"ClientProxyConnectionError", "ProxyConnectionError"})
_NO_URLS = frozenset({"InvalidUrlRedirectClientError", "NonHttpUrlRedirectClientError"})
# What OpenSSL calls bytes that are no TLS.
_NOT_TLS = frozenset({"HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "WRONG_VERSION_NUMBER"})


def explain_status(answer: Answer) -> Fault:
    """Return a status as a `Fault`, in words."""
    status = answer.status
    words = f"the server answered {status}{_excerpt(answer)}"
    if status in (404, 410):
        return Fault(Verdict.MISSING, words, "Check the URL, and that the object was not moved.")
    if status in (401, 403, 407):
        return Fault(Verdict.DENIED, words, "Check the credentials and the permission to read.")
    if status == 412:
        return Fault(Verdict.CHANGED, "the object was replaced while it was being read (412)", "Read it again.")
    if status in _TRANSIENT:
        wait_s, throttled = retry_after_s(answer.fields), status in (429, 503)
        return Fault(Verdict.TRANSIENT, words, "The server is overloaded or broken.", wait_s, throttled=throttled)
    return Fault(Verdict.FATAL, words)


def _excerpt(answer: Answer) -> str:
    text = re.sub(r"<[^>]*>|\s+", " ", answer.excerpt[:500].decode("utf-8", "replace"))
    text = " ".join(text.split())[:120]
    return f" ({text})" if text.isprintable() and text else ""


def retry_after_s(fields: Mapping[str, str]) -> float | None:
    """Return the seconds that ``Retry-After`` asks for (RFC 9110 §10.2.3), as seconds or a date; 0 for a date that is
    past. None if it is missing or is neither. The value may be absurd: the retry policy bounds it.
    """
    text = fields.get("retry-after", "").strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        until = email.utils.parsedate_to_datetime(text)
        if until.tzinfo is None:  # it was said in "-0000"
            until = until.replace(tzinfo=datetime.UTC)
        return max(0.0, until.timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def explain_exception(exn: BaseException) -> Fault:
    """Return a network exception as a `Fault`."""
    cause: BaseException = getattr(exn, "certificate_error", None) or getattr(exn, "os_error", None) or exn
    text = str(cause) or type(cause).__name__
    if isinstance(exn, ObjectReplaced):
        return Fault(Verdict.CHANGED, f"the object was replaced while it was being read: {exn}", "Read it again.")
    if isinstance(cause, AccessDenied):  # a guard's word
        return Fault(Verdict.DENIED, text)
    if isinstance(exn, Contradiction):
        return Fault(Verdict.TRANSIENT, text, "The server (or a proxy before it) is broken.", contradicts=True)
    if type(cause).__name__ in _NO_URLS:  # its text is what the server sent
        return Fault(Verdict.FATAL, "the server redirects to what is not HTTP: refused")
    if isinstance(cause, RedirectLoop):
        return Fault(Verdict.FATAL, text, "Check the URL, and how the server redirects.")
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Fault(
            Verdict.FATAL,
            f"the server's TLS certificate does not verify: {getattr(cause, 'verify_message', '') or text}",
            "Point SSL_CERT_FILE to the authority that signed it.",
        )
    if isinstance(cause, socket.gaierror):
        return Fault(Verdict.TRANSIENT, f"the host does not resolve: {text}", "Check the host's name and the DNS.")
    if _is_client_error(exn) and getattr(exn, "status", None) == 407:
        return Fault(Verdict.DENIED, "the proxy answered 407", _PROXY_ADVICE)
    if (refused := _refusal(exn)) is not None:
        return explain_status(refused)
    if type(exn).__name__ == "ClientProxyConnectionError":
        where = f"{getattr(exn, 'host', '')}:{getattr(exn, 'port', '')}"
        return Fault(Verdict.TRANSIENT, f"no connection to the proxy {where}: {text}", _CHECK_PROXY)
    if isinstance(cause, ConnectionRefusedError) or getattr(cause, "errno", None) == errno.ECONNREFUSED:
        return Fault(Verdict.TRANSIENT, "the connection was refused", "Check that the server runs on this port.")
    if isinstance(cause, TimeoutError):
        return Fault(
            Verdict.STALLED,
            text,
            "Check the server, the port and the network between; WDS_TIMEOUT is for how long it is tried.",
        )
    if isinstance(cause, OSError) or _is_client_error(exn):
        return Fault(Verdict.TRANSIENT, text, "Check the network and the server.")
    return Fault(Verdict.FATAL, f"{type(cause).__name__}: {text}")


def _refusal(exn: BaseException) -> Answer | None:
    """Return the answer that aiohttp made an exception of. It gives status 400 itself where it cannot parse an
    answer."""
    status = getattr(exn, "status", None)
    if type(exn).__name__ != "ClientResponseError" or not isinstance(status, int) or status <= 400:
        return None
    fields = getattr(exn, "headers", None) or {}
    return Answer(status, {str(name).lower(): str(value) for name, value in fields.items()})


def with_proxy(fault: Fault, exn: BaseException, url: str) -> Fault:
    """Return ``fault`` of the network with the proxy that the environment names for ``url``, and its variable; where
    there is no proxy, and for other faults, as it is."""
    if fault.verdict not in (Verdict.TRANSIENT, Verdict.STALLED) or fault.contradicts:
        return fault
    proxy = proxy_for(url)
    if proxy is None:
        return fault
    cause = getattr(exn, "os_error", None) or exn
    unreached = type(exn).__name__ in _PROXY_UNREACHED or isinstance(cause, ConnectionRefusedError | socket.gaierror)
    name, host = proxy_variable(url), urllib.parse.urlsplit(url).hostname
    shown = redact(proxy if "://" in proxy else f"http://{proxy}")
    how = "cannot be reached" if unreached else "is in the way"
    advice = f"Check the proxy, correct or unset {name}, or add {host} to NO_PROXY to connect directly."
    return replace(fault, reason=f"the proxy {shown} ({name}) {how}: {fault.reason}", advice=advice)


def with_place(fault: Fault, place: str, advice: str) -> Fault:
    """Return ``fault`` of the network with the ``place`` (a store and its endpoint) that was not reached, and the
    settings of that place; another fault as it is."""
    if fault.verdict not in (Verdict.TRANSIENT, Verdict.STALLED):
        return fault
    return replace(fault, reason=f"{place}: {fault.reason}", advice=f"{fault.advice} {advice}".strip())


def _is_client_error(exn: BaseException) -> bool:
    return any(cls.__module__.startswith("aiohttp") for cls in type(exn).__mro__)


def with_identity(fault: Fault, answer: Answer, name: str, url: str) -> Fault:
    """Return ``fault`` of an ``answer`` for ``url``; a refusal names the identity (``name``) and what may help."""
    plain = url.lower().startswith("http:")
    if answer.status in (400, 497) and plain and b"https" in answer.excerpt.lower():
        return replace(fault, reason="the server speaks TLS on this port", advice="Write https:// for it.")
    if answer.status == 407:
        return replace(fault, advice=_PROXY_ADVICE)
    if _SIGNATURE.search(url) and answer.status in (400, 401, 403):
        text = answer.excerpt.decode("utf-8", "replace").lower()
        lapsed = "expired" in text or "not valid in the specified time" in text
        if lapsed or fault.verdict is Verdict.DENIED:
            reason = f"{fault.reason}: the URL is signed, and {'its time is over' if lapsed else 'that is refused'}"
            return Fault(Verdict.DENIED, reason, _SIGNED_ADVICE)
    if fault.verdict is not Verdict.DENIED:
        return fault
    host = urllib.parse.urlsplit(url).hostname or "HOST"
    give = (
        f"user:password@ in the URL, an entry for {host} in ~/.netrc (or NETRC), or storage_options={{'https': "
        "{'token': …}} (also username and password, or headers)"
    )
    if name == "no credentials":
        advice = f"Give credentials: {give}."
    elif answer.status == 401:
        advice = f"Check {name}: the server does not accept it. Other credentials: {give}."
    else:
        advice = f"Check that {name} may read this object."
    return replace(fault, reason=f"{fault.reason}, asked with {name}", advice=advice)


def with_port_hint(fault: Fault, exn: BaseException, url: str) -> Fault:
    """Return ``fault`` of an exception, with a hint where ``http`` may have been taken for ``https``, or the
    reverse."""
    cause = getattr(exn, "os_error", None) or exn
    said = getattr(cause, "reason", None) if isinstance(cause, ssl.SSLError) else None
    if said in _NOT_TLS and url.lower().startswith("https:"):
        reason = f"what the server sent is no TLS ({said.lower().replace('_', ' ')})"
        return replace(fault, reason=reason, advice="Perhaps it speaks plain HTTP on this port: write http://.")
    broken = type(exn).__name__ in ("ConnectionBroken", "ServerDisconnectedError", "ClientResponseError")
    if broken and url.lower().startswith("http:"):
        return replace(fault, advice=f"{fault.advice} If it speaks TLS on this port, write https://.".lstrip())
    return fault
