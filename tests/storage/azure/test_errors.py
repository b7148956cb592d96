"""What Azure's answers and its clients' exceptions mean. The answers are as its documentation shows them."""

from __future__ import annotations

import email.utils
import ssl
import time
from dataclasses import replace

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)

from wds_async.storage.azure.errors import (
    answer_of,
    code_of,
    explain_answer,
    explain_client,
    out_of_time,
    unauthenticated,
)
from wds_async.storage.base import Answer, Fault, Verdict

BOM = "\ufeff"


def answer(status: int, code: str, message: str = "Words.", detail: str = "", *, header: bool = True) -> Answer:
    more = f"<AuthenticationErrorDetail>{detail}</AuthenticationErrorDetail>" if detail else ""
    text = (
        f'{BOM}<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{message}\n'
        f"RequestId:1\nTime:2026-11-22T00:00:00Z</Message>{more}</Error>"
    )
    date = email.utils.formatdate(usegmt=True)
    return Answer(status, {"date": date, **({"x-ms-error-code": code} if header else {})}, text.encode())


def explained(found: Answer, kind: str = "key", renewed: bool = False) -> Fault:
    return explain_answer(found, identity="account key of acc", kind=kind, renewed=renewed)


@pytest.mark.parametrize(
    ("status", "code", "verdict", "advice"),
    [
        (404, "BlobNotFound", Verdict.MISSING, "upper and lower case"),
        (404, "ContainerNotFound", Verdict.MISSING, "container's name"),
        (403, "AuthenticationFailed", Verdict.DENIED, "AZURE_STORAGE_ACCOUNT_KEY"),
        (403, "AuthorizationPermissionMismatch", Verdict.DENIED, "Storage Blob Data Reader"),
        (403, "AuthorizationFailure", Verdict.DENIED, "firewall"),
        (401, "InvalidAuthenticationInfo", Verdict.DENIED, ""),
        (403, "KeyBasedAuthenticationNotPermitted", Verdict.DENIED, "managed identity"),
        (409, "PublicAccessNotPermitted", Verdict.DENIED, "AZURE_STORAGE_ACCOUNT_KEY"),
        (409, "BlobArchived", Verdict.FATAL, "set-tier"),
        (409, "BlobBeingRehydrated", Verdict.FATAL, "archive"),
        (412, "ConditionNotMet", Verdict.CHANGED, ""),
        (412, "LeaseIdMissing", Verdict.DENIED, "lease"),
        (503, "ServerBusy", Verdict.TRANSIENT, "limits"),
        (500, "InternalError", Verdict.TRANSIENT, ""),
        (500, "OperationTimedOut", Verdict.TRANSIENT, ""),
        (400, "InvalidResourceName", Verdict.MISSING, "3 to 63"),
        (429, "TooManyRequests", Verdict.TRANSIENT, "limits"),
        (409, "AccountBeingCreated", Verdict.TRANSIENT, ""),
        (409, "BlobModifiedWhileReading", Verdict.CHANGED, ""),
        (409, "SnapshotsPresent", Verdict.FATAL, ""),
    ],
)
def test_codes(status: int, code: str, verdict: Verdict, advice: str) -> None:
    for header in (True, False):
        made = answer(status, code, header=header)
        fault = explained(replace(made, fields={**made.fields, "retry-after": "4"}))
        assert (fault.verdict, fault.throttled) == (verdict, status in (429, 503))
        assert fault.retry_after_s == (4 if verdict is Verdict.TRANSIENT else None)
        assert advice in fault.advice
        assert f"Azure answered {status} {code}".rstrip() in fault.reason
        assert "(Words)" in fault.reason
        assert "account key of acc" in fault.reason


def test_an_expired_signature_says_from_when_to_when() -> None:
    detail = "Signature not valid in the specified time frame: Start [Mon, 1 Jan] - Expiry [Tue, 2 Jan] - Current [Wed]"
    found = answer(403, "AuthenticationFailed", "Server failed to authenticate the request", detail)
    assert unauthenticated(found)
    assert out_of_time(found)
    assert explained(found, renewed=True).verdict is Verdict.EXPIRED
    fault = explained(found, "sas")
    assert fault.verdict is Verdict.DENIED
    assert "Start [Mon, 1 Jan] - Expiry [Tue, 2 Jan]" in fault.reason
    assert "new signature" in fault.advice


def test_what_was_signed_is_not_repeated() -> None:
    detail = "The MAC signature found in the HTTP request 'SIGNATURE' is not the same as any computed signature."
    found = answer(403, "AuthenticationFailed", "Server failed to authenticate sig=SIGNATURE", detail)
    assert not out_of_time(found)
    fault = explained(found)
    assert "SIGNATURE" not in f"{fault.reason} {fault.advice}"


def test_an_expired_token() -> None:
    found = answer(401, "InvalidAuthenticationInfo", "Lifetime validation failed. The token is expired.")
    assert unauthenticated(found)
    assert out_of_time(found)


def test_a_clock_that_is_off_is_named() -> None:
    late = email.utils.formatdate(time.time() + 7200, usegmt=True)
    fault = explained(Answer(403, {"date": late, "x-ms-error-code": "AuthenticationFailed"}))
    assert "behind Azure's" in fault.advice
    assert "clock" not in explained(Answer(403, {"x-ms-error-code": "AuthenticationFailed", "date": "x"})).advice


def test_anonymous_refusals_say_what_to_set() -> None:
    for status, code in ((404, "ResourceNotFound"), (409, "PublicAccessNotPermitted"), (403, "AuthorizationFailure")):
        fault = explained(answer(status, code), "anonymous")
        assert "AZURE_STORAGE_ACCOUNT_KEY" in fault.advice
        assert not fault.verdict.retryable


def test_exceptions_of_the_clients() -> None:
    refused = ServiceRequestError("no", error=ConnectionRefusedError(111, "refused"))
    assert explain_client(refused, identity="us").verdict is Verdict.TRANSIENT
    assert "refused" in explain_client(refused, identity="us").reason
    assert explain_client(ServiceRequestError("x"), identity="us").verdict is Verdict.TRANSIENT
    denied = explain_client(ClientAuthenticationError("AADSTS7000215: wrong\nTrace: 1"), identity="client ID i")
    assert denied.verdict is Verdict.DENIED
    assert denied.reason == "no token for client ID i: AADSTS7000215: wrong"
    assert explain_client(TimeoutError("late"), identity="us").verdict is Verdict.STALLED
    assert explain_client(ValueError("x"), identity="us").verdict is Verdict.FATAL


class Response:
    status_code = 404
    reason = "Not Found"
    headers = {"X-Ms-Error-Code": "BlobNotFound"}  # noqa: RUF012

    def text(self) -> str:
        raise ValueError("not read")


def test_the_answer_behind_an_exception() -> None:
    found = answer_of(HttpResponseError("x", response=Response()))
    assert found is not None
    assert (found.status, code_of(found)) == (404, "BlobNotFound")
    assert answer_of(HttpResponseError("x")) is None
    assert answer_of(OSError("x")) is None


def test_the_network_in_azures_words() -> None:
    for inner, verdict in (
        (OSError(101, "network unreachable"), Verdict.TRANSIENT),
        (ssl.SSLCertVerificationError(1, "self-signed certificate"), Verdict.FATAL),
        (ssl.SSLError(1, "tlsv1 alert internal error"), Verdict.TRANSIENT),
        (TimeoutError("late"), Verdict.STALLED),
    ):
        for kind in (ServiceRequestError, ServiceResponseError):
            assert explain_client(kind("x", error=inner), identity="us").verdict is verdict
