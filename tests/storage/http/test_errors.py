"""What refusals and broken connections are said to mean (statuses, exceptions, proxies as such: `test_http`)."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import errno
import math
import random
import socket
import ssl
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict, CIMultiDictProxy

from tests.servers.process import free_port
from wds_async.config import RetryPolicy
from wds_async.storage.base import Answer, Contradiction, Fault, ObjectReplaced, Verdict
from wds_async.storage.http.errors import (
    explain_exception,
    explain_status,
    retry_after_s,
    with_identity,
    with_port_hint,
)
from wds_async.transfer.connection import ConnectionBroken


def told(status: int, name: str = "no credentials", url: str = "https://h.example/x", body: bytes = b"") -> Fault:
    answer = Answer(status, {}, body)
    return with_identity(explain_status(answer), answer, name, url)


def test_without_credentials_all_ways_to_give_them_are_named() -> None:
    fault = told(401)
    assert fault.verdict is Verdict.DENIED
    assert fault.reason == "the server answered 401, asked with no credentials"
    assert "an entry for h.example in ~/.netrc" in fault.advice
    assert told(403).advice == fault.advice


def test_with_credentials_they_are_named() -> None:
    name = "the netrc entry for h.example"
    assert f"Check {name}: the server does not accept it" in told(401, name).advice
    assert told(403, name).advice == f"Check that {name} may read this object."
    assert told(404, name).reason == "the server answered 404"


def test_proxies() -> None:
    assert "HTTPS_PROXY=http://user:password@host:port" in told(407).advice
    assert "asked with" not in told(407).reason


@pytest.mark.parametrize(
    "body",
    [
        b"<html>400 The plain HTTP request was sent to HTTPS port</html>",
        b"Client sent an HTTP request to an HTTPS server.",
        b"Reason: You're speaking plain HTTP to an SSL-enabled server port. Instead use the HTTPS scheme",
    ],
)
def test_servers_that_say_that_they_speak_tls(body: bytes) -> None:
    assert told(400, url="http://h/x", body=body).reason == "the server speaks TLS on this port"
    assert "400" in told(400, url="https://h/x", body=body).reason


def tls_error(reason: str) -> ssl.SSLError:
    made = ssl.SSLError(1, f"[SSL: {reason}]")
    made.reason = reason
    return made


def guess(exn: Exception, url: str) -> str:
    return with_port_hint(explain_exception(exn), exn, url).advice


def test_guesses_about_the_port() -> None:
    assert "write http://" in guess(tls_error("WRONG_VERSION_NUMBER"), "https://h/x")
    assert "write http" not in guess(tls_error("DECRYPTION_FAILED"), "https://h/x")
    assert "write https://" in guess(ConnectionBroken("the server closed the connection"), "http://h/x")
    assert "write http" not in guess(ConnectionBroken("the server closed the connection"), "https://h/x")
    assert "write http" not in guess(ConnectionResetError("reset"), "http://h/x")


IN_AN_HOUR = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1), usegmt=True)


@pytest.mark.parametrize(
    ("text", "least", "most"),  # with names: processes that share the tests must call them alike, and the hour passes
    [
        ("7", 7, 7),
        ("1.5", 1.5, 1.5),
        ("0", 0, 0),
        ("9" * 300, 1e299, math.inf),
        pytest.param(IN_AN_HOUR, 60, 3600, id="in an hour"),
        pytest.param(IN_AN_HOUR.replace("GMT", "-0000"), 60, 3600, id="in an hour, without a zone"),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0, 0),
    ],
)
def test_what_retry_after_asks_for(text: str, least: float, most: float) -> None:
    found = retry_after_s({"retry-after": text})
    assert found is not None
    assert least <= found <= most
    assert RetryPolicy().delay_s(1, random.Random(1), found) <= RetryPolicy().cap_s


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-3", "1e9", "7 s", "\u0667", "Fri, 99 Foo 2026", "9" * 400, ", , ,"],
)
def test_what_it_cannot_mean(text: str) -> None:
    assert retry_after_s({"retry-after": text}) is None


@pytest.mark.parametrize("status", range(400, 600))
def test_every_refusal_has_one_meaning(status: int) -> None:
    fault = explain_status(Answer(status, {"retry-after": "3"}))
    again = status in (408, 409, 425, 429) or (status >= 500 and status not in (501, 505))
    assert fault.verdict.retryable is again
    assert fault.retry_after_s == (3 if again else None)
    assert fault.throttled is (status in (429, 503))


def wrapped(exn: OSError) -> aiohttp.ClientConnectorError:
    kinds: dict[type, Any] = {
        ssl.SSLCertVerificationError: aiohttp.ClientConnectorCertificateError,
        ssl.SSLError: aiohttp.ClientConnectorSSLError,
        socket.gaierror: aiohttp.ClientConnectorDNSError,
    }
    key: Any = ConnectionKey("h", 443, True, True, None, None, None)
    return kinds.get(type(exn), aiohttp.ClientConnectorError)(key, exn)


NETWORK: list[tuple[OSError, Verdict]] = [
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Verdict.TRANSIENT),
    (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), Verdict.TRANSIENT),
    (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), Verdict.TRANSIENT),
    (ConnectionResetError(errno.ECONNRESET, "reset"), Verdict.TRANSIENT),
    (BrokenPipeError(errno.EPIPE, "broken pipe"), Verdict.TRANSIENT),
    (OSError(errno.ENETUNREACH, "network unreachable"), Verdict.TRANSIENT),
    (OSError(errno.EHOSTUNREACH, "no route"), Verdict.TRANSIENT),
    (TimeoutError(errno.ETIMEDOUT, "timed out"), Verdict.STALLED),
    (tls_error("TLSV1_ALERT_INTERNAL_ERROR"), Verdict.TRANSIENT),
    (tls_error("UNEXPECTED_EOF_WHILE_READING"), Verdict.TRANSIENT),
    (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), Verdict.TRANSIENT),
    (ssl.SSLCertVerificationError(1, "self-signed certificate"), Verdict.FATAL),
]


@pytest.mark.parametrize(("exn", "verdict"), NETWORK)
def test_the_network_by_itself_and_in_aiohttps_words(exn: OSError, verdict: Verdict) -> None:
    assert explain_exception(exn).verdict is verdict
    assert explain_exception(wrapped(exn)).verdict is verdict


def test_the_rest_of_aiohttps_words() -> None:
    request: Any = aiohttp.RequestInfo("http://h", "GET", CIMultiDictProxy(CIMultiDict()), "http://h")  # type: ignore[arg-type]
    for exn, verdict in (
        (aiohttp.ServerDisconnectedError(), Verdict.TRANSIENT),
        (aiohttp.ClientPayloadError("not all of it"), Verdict.TRANSIENT),
        (aiohttp.ServerTimeoutError("late"), Verdict.STALLED),
        (aiohttp.ClientResponseError(request, (), status=400, message="not HTTP"), Verdict.TRANSIENT),
        (aiohttp.ClientResponseError(request, (), status=403), Verdict.DENIED),
        (aiohttp.ClientResponseError(request, (), status=404), Verdict.MISSING),
        (aiohttp.ClientHttpProxyError(request, (), status=407), Verdict.DENIED),
        (aiohttp.ClientHttpProxyError(request, (), status=503), Verdict.TRANSIENT),
    ):
        assert explain_exception(exn).verdict is verdict
    headers = CIMultiDict({"Retry-After": "9"})
    busy = explain_exception(aiohttp.ClientResponseError(request, (), status=429, headers=headers))
    assert (busy.verdict, busy.retry_after_s, busy.throttled) == (Verdict.TRANSIENT, 9, True)


def test_answers_that_contradict_and_objects_that_changed() -> None:
    wrong = explain_exception(Contradiction("asked for x"))
    assert (wrong.verdict, wrong.contradicts) == (Verdict.TRANSIENT, True)
    assert explain_exception(ObjectReplaced("it was x")).verdict is Verdict.CHANGED


@pytest.mark.parametrize(
    ("query", "status", "body"),
    [
        ("X-Amz-Signature=1", 403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"),
        (
            "Signature=1&Expires=2",
            403,
            b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
        ),
        (
            "X-Goog-Signature=1",
            400,
            b"<Error><Code>ExpiredToken</Code><Message>Request signature expired</Message></Error>",
        ),
        ("sig=1&se=2", 403, b"<Message>Signature not valid in the specified time frame</Message>"),
    ],
)
def test_a_signed_url_whose_time_is_over(query: str, status: int, body: bytes) -> None:
    fault = told(status, url=f"https://h.example/x?{query}", body=body)
    assert fault.verdict is Verdict.DENIED
    assert "its time is over" in fault.reason
    assert "made again" in fault.advice
    assert "that is refused" in told(403, url=f"https://h.example/x?{query}").reason
    assert "made again" not in told(400, url=f"https://h.example/x?{query}").advice


def test_a_dead_proxy_of_another_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fsspec's filesystem meets it with ``client_kwargs={"trust_env": True}``."""
    where = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("HTTP_PROXY", f"http://{where}")

    async def ask() -> None:
        async with aiohttp.ClientSession(trust_env=True) as session:
            await session.get("http://store.example/x.tar")

    with pytest.raises(aiohttp.ClientProxyConnectionError) as caught:
        asyncio.run(ask())
    fault = explain_exception(caught.value)
    assert fault.verdict is Verdict.TRANSIENT
    assert f"no connection to the proxy {where}: " in fault.reason
    assert "HTTPS_PROXY" in fault.advice
