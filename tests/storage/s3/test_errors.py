"""What S3 says becomes a verdict, who was refused, and what to set."""

from __future__ import annotations

import ssl
import time

import pytest

from wds_async.storage.base import Answer, Verdict
from wds_async.storage.s3.errors import explain_client, explain_refusal, refusal_of_answer, refusal_of_exception


def answer(status: int, code: str, message: str = "said", **elements: str) -> Answer:
    inner = {"Code": code, "Message": message, **elements}
    text = "".join(f"<{name}>{value}</{name}>" for name, value in inner.items())
    return Answer(status, {}, f"<?xml version='1.0'?><Error>{text}".encode())


@pytest.mark.parametrize(
    ("status", "code", "verdict", "advice"),
    [
        (404, "NoSuchBucket", Verdict.MISSING, "bucket's name"),
        (404, "NoSuchKey", Verdict.MISSING, "key"),
        (404, "NoSuchVersion", Verdict.MISSING, "versionId"),
        (405, "MethodNotAllowed", Verdict.MISSING, "delete marker"),
        (403, "AccessDenied", Verdict.DENIED, "s3:ListBucket"),
        (403, "AccessDenied", Verdict.DENIED, "requester_pays"),
        (403, "AccessDenied", Verdict.DENIED, "kms:Decrypt"),
        (403, "InvalidAccessKeyId", Verdict.DENIED, "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", Verdict.DENIED, "AWS_SECRET_ACCESS_KEY"),
        (400, "InvalidToken", Verdict.DENIED, "AWS_SESSION_TOKEN"),
        (400, "ExpiredToken", Verdict.EXPIRED, "aws sso login"),
        (403, "RequestExpired", Verdict.EXPIRED, "Log in"),
        (403, "InvalidObjectState", Verdict.DENIED, "restore"),
        (412, "PreconditionFailed", Verdict.CHANGED, ""),
        (503, "SlowDown", Verdict.TRANSIENT, "WDS_CONNECTIONS"),
        (500, "InternalError", Verdict.TRANSIENT, ""),
        (400, "RequestTimeout", Verdict.TRANSIENT, ""),
        (503, "SlowDownRead", Verdict.TRANSIENT, ""),
        (503, "ServiceUnavailable", Verdict.TRANSIENT, ""),
        (429, "TooManyRequests", Verdict.TRANSIENT, ""),
        (400, "Throttling", Verdict.TRANSIENT, ""),
        (409, "OperationAborted", Verdict.TRANSIENT, ""),
        (409, "ConditionalRequestConflict", Verdict.TRANSIENT, ""),
        (400, "TokenRefreshRequired", Verdict.EXPIRED, ""),
        (400, "InvalidRequest", Verdict.FATAL, ""),
        (501, "NotImplemented", Verdict.FATAL, ""),
    ],
)
def test_codes(status: int, code: str, verdict: Verdict, advice: str) -> None:
    refused = Answer(status, {"retry-after": "4"}, answer(status, code).excerpt)
    fault = explain_refusal(refusal_of_answer(refused), "access key AKIA…CDEF (environment)")
    assert (fault.verdict, fault.throttled) == (verdict, status in (429, 503) or code == "Throttling")
    assert fault.retry_after_s == (4 if verdict is Verdict.TRANSIENT else None)
    assert advice in fault.advice
    assert f"{status} {code}".strip() in fault.reason
    assert "AKIA…CDEF" in fault.reason
    assert ("replaced" in fault.reason) == (verdict is Verdict.CHANGED)


def test_an_object_under_a_key_of_its_owner() -> None:
    words = "The object was stored using a form of Server Side Encryption. The correct parameters must be provided"
    assert "SSECustomerKey" in explain_refusal(refusal_of_answer(answer(400, "InvalidRequest", words)), "x").advice


def test_a_clock_that_is_wrong_and_a_request_that_grew_old() -> None:
    now, old = (time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() - ago_s)) for ago_s in (0, 1200))
    skewed = answer(403, "RequestTimeTooSkewed", RequestTime=now, ServerTime="2031-01-01T00:00:00Z")
    fault = explain_refusal(refusal_of_answer(skewed), "x")
    assert fault.verdict is Verdict.DENIED
    assert now in fault.advice
    assert "2031-01-01T00:00:00Z" in fault.advice
    assert "clock" in fault.advice
    later = answer(403, "RequestTimeTooSkewed", RequestTime=now, ServerTime="2031-01-01T00:00:09Z")
    assert explain_refusal(refusal_of_answer(later), "x").reason == fault.reason  # attempts are counted by it
    slept = answer(403, "RequestTimeTooSkewed", RequestTime=old, ServerTime="2031-01-01T00:00:00Z")
    assert explain_refusal(refusal_of_answer(slept), "x").verdict is Verdict.EXPIRED


def test_anonymous_because_nothing_was_found() -> None:
    said = refusal_of_answer(answer(403, "AccessDenied", "Access Denied"))
    fault = explain_refusal(said, "anonymous", anonymous=True, missed=True)
    assert "no credentials were found" in fault.reason
    assert "anonymous reads are refused" in fault.reason
    assert "AWS_ACCESS_KEY_ID" in fault.advice
    assert "no credentials were found" not in explain_refusal(said, "anonymous", anonymous=True).reason


@pytest.mark.parametrize(
    ("fields", "elements", "region"),
    [
        ({"x-amz-bucket-region": "eu-north-1"}, {}, "eu-north-1"),
        ({}, {"Region": "eu-west-1"}, "eu-west-1"),
        ({}, {"Endpoint": "b.s3.ap-south-1.amazonaws.com"}, "ap-south-1"),
        ({}, {"Endpoint": "b.s3-us-west-2.amazonaws.com"}, "us-west-2"),
        ({}, {"Endpoint": "minio.example.com"}, ""),
    ],
)
def test_the_region_that_an_answer_names(fields: dict[str, str], elements: dict[str, str], region: str) -> None:
    made = answer(301, "PermanentRedirect", **elements)
    assert refusal_of_answer(Answer(301, fields, made.excerpt)).region == region


def test_what_is_not_xml_is_not_quoted() -> None:
    said = refusal_of_answer(Answer(403, {}, b"\x00<html><b>No</b>"))
    assert (said.code, said.message) == ("", "")
    assert "\x1b" not in str(refusal_of_answer(answer(403, "AccessDenied", "\x1b[2J")))


def test_exceptions_of_botocore() -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    refused = exceptions.ClientError(
        {
            "Error": {"Code": "AuthorizationHeaderMalformed", "Message": "no", "Region": "eu-west-1"},
            "ResponseMetadata": {"HTTPStatusCode": 400, "HTTPHeaders": {}},
        },
        "GetObject",
    )
    outer = PermissionError("no")
    outer.__cause__ = refused
    said = refusal_of_exception(outer)
    assert said is not None
    assert (said.status, said.code, said.region, said.operation) == (
        400,
        "AuthorizationHeaderMalformed",
        "eu-west-1",
        "GetObject",
    )
    assert refusal_of_exception(ValueError("x")) is None
    for exn, verdict, advice in (
        (exceptions.NoCredentialsError(), Verdict.DENIED, "AWS_PROFILE"),
        (exceptions.PartialCredentialsError(provider="env", cred_var="x"), Verdict.DENIED, "both"),
        (exceptions.ProfileNotFound(profile="none"), Verdict.DENIED, "AWS_PROFILE"),
        (exceptions.UnauthorizedSSOTokenError(), Verdict.DENIED, "aws sso login"),
        (exceptions.EndpointConnectionError(endpoint_url="http://x"), Verdict.TRANSIENT, "AWS_ENDPOINT_URL_S3"),
        (exceptions.ReadTimeoutError(endpoint_url="http://x"), Verdict.STALLED, "network"),
        (exceptions.MissingDependencyException(msg="crt"), Verdict.FATAL, "botocore[crt]"),
        (exceptions.ParamValidationError(report="bad bucket"), Verdict.FATAL, "URL"),
    ):
        fault = explain_client(exn)
        assert fault is not None
        assert fault.verdict is verdict
        assert advice in fault.advice
    assert explain_client(ValueError("x")) is None


def test_a_role_that_may_not_be_assumed() -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    exn = exceptions.ClientError({"Error": {"Code": "AccessDenied", "Message": "not you"}}, "AssumeRoleWithWebIdentity")
    said = refusal_of_exception(exn)
    assert said is not None
    fault = explain_refusal(said, "x")
    assert fault.verdict is Verdict.DENIED
    assert "AssumeRoleWithWebIdentity" in fault.reason
    assert "not you" in fault.reason


def test_a_signature_that_expired_in_words() -> None:
    said = refusal_of_answer(answer(403, "AccessDenied", "Request has expired"))
    assert explain_refusal(said, "x").verdict is Verdict.EXPIRED


def test_retry_after_of_botocores_exception() -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    meta = {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": "6"}}
    said = refusal_of_exception(
        exceptions.ClientError({"Error": {"Code": "SlowDown"}, "ResponseMetadata": meta}, "GetObject")
    )
    assert said is not None
    fault = explain_refusal(said, "x")
    assert (fault.verdict, fault.retry_after_s, fault.throttled) == (Verdict.TRANSIENT, 6, True)


def test_botocores_words_for_the_network() -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    parsers = pytest.importorskip("botocore.parsers")
    at = {"endpoint_url": "http://x"}
    certificate = ssl.SSLCertVerificationError(1, "self-signed certificate")
    alert = ssl.SSLError(1, "tlsv1 alert internal error")
    for exn, verdict in (
        (exceptions.EndpointConnectionError(**at), Verdict.TRANSIENT),
        (exceptions.ConnectTimeoutError(**at), Verdict.STALLED),
        (exceptions.ReadTimeoutError(**at), Verdict.STALLED),
        (exceptions.ConnectionClosedError(**at), Verdict.TRANSIENT),
        (exceptions.ProxyConnectionError(proxy_url="http://p"), Verdict.TRANSIENT),
        (exceptions.ResponseStreamingError(error="reset"), Verdict.TRANSIENT),
        (exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), Verdict.TRANSIENT),
        (parsers.ResponseParserError("no XML"), Verdict.TRANSIENT),
        (exceptions.SSLError(error=certificate, **at), Verdict.FATAL),
        (exceptions.SSLError(error=alert, **at), Verdict.TRANSIENT),
        (exceptions.SSLError(error="alert", **at), Verdict.TRANSIENT),
    ):
        fault = explain_client(exn)
        assert fault is not None
        assert fault.verdict is verdict, exn
