"""What refusals and broken connections are said to mean (statuses, exceptions, proxies as such: `test_http`)."""

from __future__ import annotations

import ssl

import pytest

from wds_async.storage.base import Answer, Fault, Verdict
from wds_async.storage.http.errors import explain_exception, explain_status, told_as_whom, told_of_the_port
from wds_async.transfer.connection import ConnectionBroken


def told(status: int, name: str = "no credentials", url: str = "https://h.example/x", body: bytes = b"") -> Fault:
    answer = Answer(status, {}, body)
    return told_as_whom(explain_status(answer), answer, name, url)


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
    return told_of_the_port(explain_exception(exn), exn, url).advice


def test_guesses_about_the_port() -> None:
    assert "write http://" in guess(tls_error("WRONG_VERSION_NUMBER"), "https://h/x")
    assert "write http" not in guess(tls_error("DECRYPTION_FAILED"), "https://h/x")
    assert "write https://" in guess(ConnectionBroken("the server closed the connection"), "http://h/x")
    assert "write http" not in guess(ConnectionBroken("the server closed the connection"), "https://h/x")
    assert "write http" not in guess(ConnectionResetError("reset"), "http://h/x")
