"""What Google Cloud Storage means, as it words it."""

from __future__ import annotations

import json

import pytest
from gcsfs.retry import HttpError

from wds_async.storage.base import Answer, Fault, RefusedAnswer, Verdict
from wds_async.storage.gcs.credentials import AuthFailed, GoogleIdentity
from wds_async.storage.gcs.errors import explain, explain_write

NOBODY = GoogleIdentity("anonymous (no credentials were found)", missed=True)
MEANT = GoogleIdentity("anonymous (token='anon')")
SOMEBODY = GoogleIdentity("service account a@b.iam.gserviceaccount.com (storage_options)", credentials=object())


def json_error(status: int, reason: str, message: str, **fields: str) -> Answer:
    errors = [{"domain": "global", "reason": reason, "message": message}]
    body = json.dumps({"error": {"code": status, "message": message, "errors": errors}}, indent=1)
    return Answer(status, {name.replace("_", "-"): value for name, value in fields.items()}, body.encode())


def xml_error(status: int, code: str, message: str, details: str = "") -> Answer:
    more = f"<Details>{details}</Details>" if details else ""
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>"
    return Answer(status, {}, body.encode())


def text_error(status: int, message: str) -> Answer:
    return Answer(status, {"content-type": "text/html; charset=UTF-8"}, message.encode())


def told(outcome: Answer | BaseException, identity: GoogleIdentity = SOMEBODY, generation: str = "") -> Fault:
    return explain(outcome, identity, generation=generation, renewable=False)


CASES = [
    (json_error(404, "notFound", "The specified bucket does not exist."), Verdict.MISSING, "no such bucket", "BUCKET"),
    (xml_error(404, "NoSuchBucket", "The specified bucket does not exist."), Verdict.MISSING, "no such bucket", ""),
    (text_error(404, "No such object: bkt/x.tar"), Verdict.MISSING, "no such object (", "wds-async ls"),
    (xml_error(404, "NoSuchKey", "The specified key does not exist."), Verdict.MISSING, "no such object (", "its name"),
    (text_error(404, "Not Found"), Verdict.MISSING, "Not Found", "both names"),
    (json_error(401, "authError", "Invalid Credentials"), Verdict.DENIED, "Invalid Credentials", "Log in again"),
    (
        json_error(403, "forbidden", "a@b does not have storage.objects.list access to the bucket."),
        Verdict.DENIED,
        "service account a@b.iam.gserviceaccount.com (storage_options): a@b does not have",
        "storage.objects.list is missing",
    ),
    (xml_error(403, "AccessDenied", "Access denied.", "a@b does not have storage.objects.get access"), Verdict.DENIED,
     "Access denied. a@b does not", "grant service account a@b.iam.gserviceaccount.com the role roles/storage.object"),
    (json_error(403, "insufficientPermissions", "Request had insufficient authentication scopes."), Verdict.DENIED,
     "scopes", "devstorage.read_only"),
    (json_error(400, "required", "Bucket is a requester pays bucket but no user project provided."), Verdict.DENIED,
     "requester pays", "'requester_pays': 'PROJECT'"),
    (xml_error(400, "UserProjectMissing", "Bucket is a requester pays bucket."), Verdict.DENIED, "pays", "billed"),
    (json_error(400, "invalid", "User project specified in the request is invalid."), Verdict.DENIED, "invalid",
     "Service Usage Consumer"),
    (json_error(403, "forbidden", "a@b does not have serviceusage.services.use access to the project."),
     Verdict.DENIED, "serviceusage", "Service Usage Consumer"),
    (json_error(429, "rateLimitExceeded", "Slow down."), Verdict.TRANSIENT, "Slow down", "WDS_CONNECTIONS"),
    (json_error(403, "userRateLimitExceeded", "Rate Limit Exceeded"), Verdict.TRANSIENT, "Rate Limit", ""),
    (json_error(503, "backendError", "Backend Error"), Verdict.TRANSIENT, "503", ""),
    (text_error(500, ""), Verdict.TRANSIENT, "500", ""),
    (xml_error(408, "RequestTimeout", "Late."), Verdict.TRANSIENT, "Late", ""),
    (json_error(412, "conditionNotMet", "Precondition Failed"), Verdict.CHANGED, "replaced while", "Read it again"),
    (json_error(400, "invalid", "Invalid bucket name: 'B'"), Verdict.FATAL, "Invalid bucket name", "bucket's name"),
    (HttpError({"code": 401, "message": "Invalid Credentials"}), Verdict.DENIED, "Invalid Credentials", "Log in"),
    (HttpError({"code": 503, "message": "Backend"}), Verdict.TRANSIENT, "503", ""),
    (OSError("Forbidden: https://h/o\na@b does not have storage.objects.get access"), Verdict.DENIED, "a@b", "get is"),
    (ValueError("Bad Request: https://h/o\nUser project specified in the request is invalid."), Verdict.DENIED,
     "invalid", "Service Usage Consumer"),
    (ValueError("Bucket is requester pays. Set `requester_pays=True`"), Verdict.DENIED, "pays", "'requester_pays'"),
    (FileNotFoundError("b/x"), Verdict.MISSING, "nothing there", "both names"),
    (ConnectionRefusedError(111, "x"), Verdict.TRANSIENT, "refused", "port"),
    (TimeoutError("slow"), Verdict.STALLED, "slow", "WDS_TIMEOUT"),
    (AuthFailed("RefreshError: invalid_grant: Invalid JWT: Token must be in a reasonable timeframe. Check your iat"),
     Verdict.DENIED, "reasonable timeframe", "clock"),
    (AuthFailed("RefreshError: invalid_grant: Token has been expired or revoked."), Verdict.DENIED, "revoked", "log"),
    (AuthFailed("TransportError: down", retryable=True), Verdict.TRANSIENT, "down", "metadata server"),
    (AuthFailed("no file"), Verdict.DENIED, "no file", "GOOGLE_APPLICATION_CREDENTIALS"),
]  # fmt: skip


@pytest.mark.parametrize(("outcome", "verdict", "reason", "advice"), CASES)
def test_each_outcome(outcome: Answer | BaseException, verdict: Verdict, reason: str, advice: str) -> None:
    fault = told(outcome)
    assert fault.verdict is verdict
    assert reason in fault.reason
    assert advice in fault.advice
    assert not fault.reason.endswith(".")
    if isinstance(outcome, Answer):
        assert told(RefusedAnswer(outcome)) == fault


def test_a_token_is_renewed_where_it_can_be() -> None:
    refused = json_error(401, "authError", "Invalid Credentials")
    assert explain(refused, SOMEBODY, generation="", renewable=True).verdict is Verdict.EXPIRED
    assert explain(refused, NOBODY, generation="", renewable=False).verdict is Verdict.DENIED


@pytest.mark.parametrize("status", [401, 403])
def test_nobody(status: int) -> None:
    refused = json_error(status, "required", "Anonymous caller does not have storage.objects.get access.")
    missed, meant = told(refused, NOBODY), told(refused, MEANT)
    assert missed.verdict is meant.verdict is Verdict.DENIED
    assert "no credentials were found, and the bucket refuses anonymous reads" in missed.reason
    assert "no credentials were found" not in meant.reason
    assert "token='anon'" in meant.reason


def test_a_generation_that_is_gone() -> None:
    fault = told(text_error(404, "No such object: bkt/x.tar"), generation="12")
    assert fault.verdict is Verdict.CHANGED
    assert "generation 12 is not there: it was replaced or deleted" in fault.reason


def test_writing() -> None:
    fault = explain_write(OSError("Forbidden: https://h/o\na@b does not have storage.objects.create access"))
    assert fault.verdict is Verdict.DENIED
    assert "storage.objects.create is missing" in fault.advice
    assert "roles/storage.objectUser" in fault.advice
    assert explain_write(HttpError({"code": 401, "message": "Invalid Credentials"})).verdict is Verdict.DENIED


def test_what_is_shown_is_short_and_clean() -> None:
    reason = told(json_error(400, "invalid", "a\x1b[31m?token=marked-secret&" + "long " * 500)).reason
    assert "marked" not in reason
    assert "\x1b" not in reason
    assert len(reason) < 500
    cut = Answer(403, {}, json_error(403, "forbidden", "x" * 300).excerpt[:120])
    assert "xxx" in told(cut).reason
    for strange in (b"", b"\xff\xfe", b"{", b"[]", b'{"error": "words"}', b'{"error": {"errors": []}}'):
        assert told(Answer(403, {}, strange)).verdict is Verdict.DENIED


RATE = "The object b/o exceeded the rate limit for object mutation operations"


@pytest.mark.parametrize(
    ("answer", "verdict", "throttled"),
    [
        (json_error(429, "rateLimitExceeded", "Slow.", retry_after="4"), Verdict.TRANSIENT, True),
        (json_error(403, "userRateLimitExceeded", "Slow.", retry_after="4"), Verdict.TRANSIENT, True),
        (Answer(403, {"retry-after": "4"}, RATE.encode()), Verdict.TRANSIENT, True),
        (json_error(500, "internalError", "Oops", retry_after="4"), Verdict.TRANSIENT, False),
        (json_error(409, "conflict", "The bucket is being made", retry_after="4"), Verdict.TRANSIENT, False),
        (json_error(403, "dailyLimitExceeded", "Daily Limit Exceeded"), Verdict.DENIED, False),
    ],
)
def test_what_asks_for_fewer_requests(answer: Answer, verdict: Verdict, throttled: bool) -> None:
    fault = told(answer)
    assert (fault.verdict, fault.throttled) == (verdict, throttled)
    assert fault.retry_after_s == (4 if verdict is Verdict.TRANSIENT else None)
