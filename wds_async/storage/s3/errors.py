"""Errors of S3: the answer, its meaning, and what to set.

The codes are those of "Error responses" in Amazon's S3 API reference; MinIO, Ceph and R2 use the same.
"""

from __future__ import annotations

import calendar
import contextlib
import html
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from wds_async.redact import redact
from wds_async.storage.base import Answer, Fault, Verdict
from wds_async.storage.http.errors import explain_exception, explain_status, retry_after_s
from wds_async.storage.secrets import code_shown

__all__ = [
    "KEY_REFUSED",
    "REGION_CODES",
    "SESSION_OVER",
    "S3Refusal",
    "explain_client",
    "explain_foreign_s3",
    "explain_refusal",
    "refusal_of_answer",
    "refusal_of_exception",
]

REGION_CODES = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
                          "TemporaryRedirect", "301"})  # fmt: skip
SESSION_OVER = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
KEY_REFUSED = frozenset({"InvalidAccessKeyId", "InvalidToken"})
_EXPIRED = SESSION_OVER | {"RequestExpired"}
_THROTTLED = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "Throttling", "ThrottlingException",
     "RequestThrottled", "RequestThrottledException", "ThrottledException", "TooManyRequests",
     "TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded"}
)  # fmt: skip
_TRANSIENT = _THROTTLED | {"InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict"}
_WRITING = frozenset({"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"})
_SIGNED_FOR_S = 600.0
_TEXT_AT_MOST = 200

_GIVE = (
    "Give credentials as the AWS tools take them (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
    "`aws sso login`, a role of the machine), or storage_options={'s3': {'key': …, 'secret': …}}."
)
_ADVICE: Mapping[str, tuple[Verdict, str]] = {
    "NoSuchBucket": (Verdict.MISSING, "Check the bucket's name, and AWS_ENDPOINT_URL_S3 where it is not Amazon's."),
    "NoSuchKey": (Verdict.MISSING, "Check the key."),
    "NoSuchVersion": (Verdict.MISSING, "Check the versionId."),
    "MethodNotAllowed": (Verdict.MISSING, "That version is a delete marker: name one that holds the object."),
    "InvalidAccessKeyId": (Verdict.DENIED, "Check AWS_ACCESS_KEY_ID or the profile, and that AWS_ENDPOINT_URL_S3 names "
                           "the store that the key is of."),
    "SignatureDoesNotMatch": (Verdict.DENIED, "Check AWS_SECRET_ACCESS_KEY: it does not fit the access key; or a proxy "
                              "changed the request."),
    "InvalidToken": (Verdict.DENIED, "Check AWS_SESSION_TOKEN: it does not belong to the access key."),
    "InvalidObjectState": (Verdict.DENIED, "It is archived (Glacier): restore it (`aws s3api restore-object`) and "
                           "wait, or copy it to another class."),
    "AllAccessDisabled": (Verdict.DENIED, "The bucket was closed by its store."),
    "KeyTooLongError": (Verdict.MISSING, "Keys have at most 1024 bytes."),
    "InvalidBucketName": (Verdict.MISSING, "Check the bucket's name."),
    "InvalidURI": (Verdict.MISSING, "Check the key; S3 takes none that leaves the bucket by `..`."),
}  # fmt: skip
_DENIED_ADVICE = (
    "Allow s3:GetObject on it (and kms:Decrypt where the bucket encrypts with SSE-KMS). Without s3:ListBucket a key "
    "that does not exist looks like this. Where the reader pays: storage_options={'s3': {'requester_pays': True}}."
)
_LIST_ADVICE = (
    "Allow s3:ListBucket on the bucket. Where the reader pays: storage_options={'s3': {'requester_pays': True}}."
)
_LOGIN = "Log in again (`aws sso login`), or renew what AWS_PROFILE or the environment names."
_NETWORK = "Check the network, AWS_REGION and AWS_ENDPOINT_URL_S3."
# By the names of botocore's exceptions, which are not imported for them; the first of a class's line counts.
_CLIENT: Mapping[str, tuple[Verdict, str]] = {
    "NoCredentialsError": (Verdict.DENIED, _GIVE),
    "PartialCredentialsError": (Verdict.DENIED, "Set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."),
    "ProfileNotFound": (Verdict.DENIED, "Check AWS_PROFILE against `aws configure list-profiles`."),
    "ConfigParseError": (Verdict.DENIED, "Mend the file that AWS_CONFIG_FILE or AWS_SHARED_CREDENTIALS_FILE names."),
    "ConfigNotFound": (Verdict.DENIED, "Check AWS_CONFIG_FILE."),
    "InvalidConfigError": (Verdict.DENIED, "Mend the profile that AWS_PROFILE names."),
    "CredentialRetrievalError": (Verdict.DENIED, "Check the source of the credentials: a role, a command, a file."),
    "RefreshWithMFAUnsupportedError": (Verdict.DENIED, "Take a session of your own first; MFA cannot be asked here."),
    **dict.fromkeys(
        ("SSOError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError"), (Verdict.DENIED, _LOGIN)
    ),
    "MetadataRetrievalError": (Verdict.TRANSIENT, "Check the machine's or container's role."),
    "NoRegionError": (Verdict.FATAL, "Set AWS_REGION."),
    "InvalidRegionError": (Verdict.FATAL, "Set AWS_REGION to a region's name."),
    "MissingDependencyException": (Verdict.FATAL, 'Run: pip install "botocore[crt]".'),
    "EndpointConnectionError": (Verdict.TRANSIENT, _NETWORK),
    "ReadTimeoutError": (Verdict.STALLED, _NETWORK),
    "ConnectTimeoutError": (Verdict.STALLED, _NETWORK),
    "ProxyConnectionError": (Verdict.TRANSIENT, "Check the proxy: HTTPS_PROXY, or proxies in config_kwargs."),
    "IncompleteReadError": (Verdict.TRANSIENT, "Check the network."),
    "ResponseParserError": (Verdict.TRANSIENT, "The store, or what is before it, sent no whole answer."),
    "HTTPClientError": (Verdict.TRANSIENT, _NETWORK),
    "BotoCoreError": (Verdict.FATAL, "Check the URL, the profile and storage_options."),
}


@dataclass(frozen=True, slots=True)
class S3Refusal:
    """Error answer of a store: HTTP ``status`` (0 where unknown), ``code`` and ``message``, the ``region`` that it
    names, ``operation`` where botocore sent the request, the other elements of the error, and the seconds of
    ``Retry-After``."""

    status: int
    code: str
    message: str
    region: str = ""
    operation: str = ""
    more: Mapping[str, str] | None = None
    wait_s: float | None = None

    def __str__(self) -> str:
        message = redact(" ".join(self.message.split()))[:_TEXT_AT_MOST].rstrip(".")
        shown = message.isprintable() and message not in ("", "None", self.code)  # "None" is botocore's for nothing
        code = "" if self.code == str(self.status) else code_shown(self.code)
        return f"{self.status or ''} {code}".strip() + (f" ({message})" if shown else "")


_ELEMENT = re.compile(r"<(\w+)>([^<]{0,500})</\1>")
_IN_ENDPOINT = re.compile(r"\bs3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d+)\.amazonaws\.")


def refusal_of_answer(answer: Answer) -> S3Refusal:
    """Return the refusal of an answer, also where its XML is cut off."""
    text = answer.excerpt.decode("utf-8", "replace")
    more = {name: html.unescape(value) for name, value in _ELEMENT.findall(text)} if "<Code>" in text else {}
    region = answer.fields.get("x-amz-bucket-region", "") or more.get("Region", "") or _in_endpoint(more)
    return S3Refusal(answer.status, more.get("Code", ""), more.get("Message", ""), code_shown(region), more=more,
                wait_s=retry_after_s(answer.fields))  # fmt: skip


def refusal_of_exception(exn: BaseException) -> S3Refusal | None:
    """Return the refusal of botocore's ``ClientError`` among the causes of ``exn``; None without one."""
    for each in _causes(exn):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping) and isinstance(response.get("Error"), Mapping):
            error = {str(name): str(value) for name, value in response["Error"].items()}
            meta = response.get("ResponseMetadata") or {}
            headers = meta.get("HTTPHeaders") or {}
            region = headers.get("x-amz-bucket-region", "") or error.get("Region", "") or _in_endpoint(error)
            operation = str(getattr(each, "operation_name", ""))
            code, status = error.get("Code", ""), int(meta.get("HTTPStatusCode") or 0)
            wait_s = retry_after_s({"retry-after": str(headers.get("retry-after", ""))})
            return S3Refusal(status, code, error.get("Message", ""), code_shown(region), operation, error, wait_s)
    return None


def explain_refusal(refusal: S3Refusal, identity: str, *, anonymous: bool = False, missed: bool = False) -> Fault:
    """Return ``refusal`` of a request by ``identity`` as a `Fault`. ``anonymous``: without credentials; ``missed``:
    because none were found."""
    code, operation = refusal.code, refusal.operation
    words = f"S3 answered {refusal} to {identity}"
    if "AssumeRole" in operation or operation.startswith("GetRole"):
        verdict = Verdict.TRANSIENT if code in _TRANSIENT or refusal.status >= 500 else Verdict.DENIED
        return Fault(verdict, f"no credentials: {operation} was answered {refusal}", "Check the role and its trust.")
    if code == "PreconditionFailed" or refusal.status == 412:
        return Fault(Verdict.CHANGED, f"the object was replaced while it was being read: {words}", "Read it again.")
    if code in _EXPIRED or (code == "AccessDenied" and "request has expired" in refusal.message.lower()):
        return Fault(Verdict.EXPIRED, words, f"The session is over. {_LOGIN}")
    if code == "RequestTimeTooSkewed":
        return _skewed(refusal, words)
    if code in _TRANSIENT:
        advice = "The store is overloaded: use fewer connections (WDS_CONNECTIONS)."
        throttled = code in _THROTTLED or refusal.status in (429, 503)
        return Fault(Verdict.TRANSIENT, words, advice, refusal.wait_s, throttled=throttled)
    if code in _ADVICE:
        verdict, advice = _ADVICE[code]
        return Fault(verdict, words, advice)
    if code == "InvalidRequest" and "erver Side Encryption" in refusal.message:
        advice = "Give its key: storage_options={'s3': {'s3_additional_kwargs': {'SSECustomerKey': …}}}."
        return Fault(Verdict.DENIED, words, advice)
    if refusal.status not in (401, 403) and code not in ("AccessDenied", "403"):
        plain = explain_status(Answer(refusal.status or 400, {}))
        return replace(plain, reason=words, retry_after_s=refusal.wait_s if plain.verdict.retryable else None)
    lists = operation.startswith("List")
    anonymously = f"anonymous {'listing is' if lists else 'reads are'} refused"
    if missed:
        return Fault(Verdict.DENIED, f"no credentials were found, and {anonymously} (S3 answered {refusal})", _GIVE)
    if operation in _WRITING:
        return Fault(Verdict.DENIED, words, "Allow s3:PutObject and s3:AbortMultipartUpload on it.")
    if anonymous:
        return Fault(Verdict.DENIED, words, f"{anonymously.capitalize()}. {_GIVE}")
    return Fault(Verdict.DENIED, words, _LIST_ADVICE if lists else _DENIED_ADVICE)


def explain_client(exn: BaseException) -> Fault | None:
    """Explain an exception of botocore's own, for which nothing was answered; None for others."""
    if isinstance(exn, RecursionError):  # botocore follows its redirects by asking again, within the answer
        return Fault(Verdict.FATAL, "S3's client was redirected in a circle", _NETWORK)
    for each in _causes(exn):
        names = [cls.__name__ for cls in type(each).__mro__ if cls.__module__.startswith(("botocore", "aiobotocore"))]
        if "SSLError" in names:
            inner = getattr(each, "kwargs", {}).get("error")
            fault = explain_exception(inner if isinstance(inner, BaseException) else ConnectionError(str(each)))
            return replace(fault, reason=f"S3's client: {fault.reason}")
        for name in names:
            if name in _CLIENT:
                verdict, advice = _CLIENT[name]
                text = redact(" ".join(str(each).split()))[: 2 * _TEXT_AT_MOST].rstrip(".")
                return Fault(verdict, f"S3's client: {text or names[0]}", advice)
    return None


def explain_foreign_s3(exn: BaseException, identity: str = "the credentials in use") -> Fault | None:
    """Explain an exception of s3fs or botocore outside the backend, as ``identity``; None for another library's."""
    refusal = refusal_of_exception(exn)
    return explain_client(exn) if refusal is None else explain_refusal(refusal, identity)


def _skewed(refusal: S3Refusal, words: str) -> Fault:
    """Explain a request of another time: our clock is wrong, or the machine slept, unseen by ``time.monotonic``."""
    more = refusal.more or {}
    asked_at, now_there = more.get("RequestTime", ""), more.get("ServerTime", "")
    with contextlib.suppress(ValueError):
        if time.time() - calendar.timegm(time.strptime(asked_at, "%Y%m%dT%H%M%SZ")) > _SIGNED_FOR_S:
            return Fault(Verdict.EXPIRED, words, "The request had grown old.")
    here = asked_at or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    clocks = f"it is {here} on this machine and {now_there or 'another time'} at the store"
    # Not in the reason: attempts are counted by their reason, and each has another time.
    return Fault(Verdict.DENIED, words, f"Set this machine's clock (NTP): {clocks}.")


def _in_endpoint(more: Mapping[str, str]) -> str:
    region = _IN_ENDPOINT.search(more.get("Endpoint", ""))
    return region[1] if region else ""


def _causes(exn: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = exn
    for _ in range(10):
        if each is None:
            return
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
