"""What S3 says when it does not give the bytes, what that means, and what to set.

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

REGION_CODES = frozenset(
    {
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "TemporaryRedirect",
        "301",
    }
)
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
    "NoSuchBucket": (
        Verdict.MISSING,
        "Check the bucket's name and, for another store than Amazon's, AWS_ENDPOINT_URL_S3.",
    ),
    "NoSuchKey": (Verdict.MISSING, "Check the key."),
    "NoSuchVersion": (Verdict.MISSING, "Check the versionId."),
    "MethodNotAllowed": (Verdict.MISSING, "That version is a delete marker: name one that holds the object."),
    "InvalidAccessKeyId": (
        Verdict.DENIED,
        "Check AWS_ACCESS_KEY_ID or the profile, and that AWS_ENDPOINT_URL_S3 names the store that the key is of.",
    ),
    "SignatureDoesNotMatch": (
        Verdict.DENIED,
        "Check AWS_SECRET_ACCESS_KEY: it does not fit the access key; or a proxy changed the request.",
    ),
    "InvalidToken": (Verdict.DENIED, "Check AWS_SESSION_TOKEN: it does not belong to the access key."),
    "InvalidObjectState": (
        Verdict.DENIED,
        "It is archived (Glacier): restore it (`aws s3api restore-object`) and wait, or copy it to another class.",
    ),
    "AllAccessDisabled": (Verdict.DENIED, "The bucket was closed by its store."),
    "KeyTooLongError": (Verdict.MISSING, "Keys have at most 1024 bytes."),
    "InvalidBucketName": (Verdict.MISSING, "Check the bucket's name."),
    "InvalidURI": (Verdict.MISSING, "Check the key; S3 takes none that leaves the bucket by `..`."),
}
_DENIED_ADVICE = (
    "Allow s3:GetObject on it (and kms:Decrypt where the bucket encrypts with SSE-KMS). Without s3:ListBucket a key "
    "that does not exist looks like this. Where the reader pays: storage_options={'s3': {'requester_pays': True}}."
)
_LIST_ADVICE = (
    "Allow s3:ListBucket on the bucket. Where the reader pays: storage_options={'s3': {'requester_pays': True}}."
)
_LOGIN = "Log in again (`aws sso login`), or renew what AWS_PROFILE or the environment names."
_CLIENT: Mapping[str, tuple[Verdict, str]] = {
    "NoCredentialsError": (Verdict.DENIED, _GIVE),
    "PartialCredentialsError": (Verdict.DENIED, "Set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."),
    "ProfileNotFound": (Verdict.DENIED, "Check AWS_PROFILE against `aws configure list-profiles`."),
    "ConfigParseError": (Verdict.DENIED, "Mend the file that AWS_CONFIG_FILE or AWS_SHARED_CREDENTIALS_FILE names."),
    "ConfigNotFound": (Verdict.DENIED, "Check AWS_CONFIG_FILE."),
    "InvalidConfigError": (Verdict.DENIED, "Mend the profile that AWS_PROFILE names."),
    "CredentialRetrievalError": (Verdict.DENIED, "Check the source of the credentials: a role, a command, a file."),
    "RefreshWithMFAUnsupportedError": (Verdict.DENIED, "Take a session of your own first; MFA cannot be asked here."),
    "SSOError": (Verdict.DENIED, _LOGIN),
    "SSOTokenLoadError": (Verdict.DENIED, _LOGIN),
    "UnauthorizedSSOTokenError": (Verdict.DENIED, _LOGIN),
    "TokenRetrievalError": (Verdict.DENIED, _LOGIN),
    "MetadataRetrievalError": (Verdict.TRANSIENT, "Check the machine's or container's role."),
    "NoRegionError": (Verdict.FATAL, "Set AWS_REGION."),
    "InvalidRegionError": (Verdict.FATAL, "Set AWS_REGION to a region's name."),
    "MissingDependencyException": (Verdict.FATAL, 'Run: pip install "botocore[crt]".'),
    "EndpointConnectionError": (Verdict.TRANSIENT, "Check the network, AWS_REGION and AWS_ENDPOINT_URL_S3."),
    "ReadTimeoutError": (Verdict.STALLED, "Check the network, AWS_REGION and AWS_ENDPOINT_URL_S3."),
    "ProxyConnectionError": (Verdict.TRANSIENT, "Check the proxy: HTTPS_PROXY, or proxies in config_kwargs."),
    "IncompleteReadError": (Verdict.TRANSIENT, "Check the network."),
    "ResponseParserError": (Verdict.TRANSIENT, "The store, or what is before it, sent no whole answer."),
    "ConnectTimeoutError": (Verdict.STALLED, "Check the network, AWS_REGION and AWS_ENDPOINT_URL_S3."),
    "HTTPClientError": (Verdict.TRANSIENT, "Check the network, AWS_REGION and AWS_ENDPOINT_URL_S3."),
    "BotoCoreError": (Verdict.FATAL, "Check the URL, the profile and storage_options."),
}
"""By the names of botocore's exceptions, which are not imported for them; the first of a class's line that is here."""


@dataclass(frozen=True, slots=True)
class S3Refusal:
    """What a store answered: HTTP ``status`` (0 where unknown), its ``code`` and ``message``, the ``region`` that it
    names, ``operation`` where a client of its own asked, and the other elements of its error."""

    status: int
    code: str
    message: str
    region: str = ""
    operation: str = ""
    more: Mapping[str, str] | None = None
    wait_s: float | None = None
    """What ``Retry-After`` asks for."""

    def __str__(self) -> str:
        message = redact(" ".join(self.message.split()))[:_TEXT_AT_MOST].rstrip(".")
        told = message.isprintable() and message not in ("", "None", self.code)  # "None" is botocore's for nothing
        code = "" if self.code == str(self.status) else code_shown(self.code)
        return f"{self.status or ''} {code}".strip() + (f" ({message})" if told else "")


_ELEMENT = re.compile(r"<(\w+)>([^<]{0,500})</\1>")
_IN_ENDPOINT = re.compile(r"\bs3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d+)\.amazonaws\.")


def refusal_of_answer(answer: Answer) -> S3Refusal:
    """Return the XML of an error (its beginning will do) and the headers that go with it."""
    text = answer.excerpt.decode("utf-8", "replace")
    more = {name: html.unescape(value) for name, value in _ELEMENT.findall(text)} if "<Code>" in text else {}
    region = answer.fields.get("x-amz-bucket-region", "") or more.get("Region", "") or _in_endpoint(more)
    return S3Refusal(answer.status, more.get("Code", ""), more.get("Message", ""), code_shown(region), more=more,
                wait_s=retry_after_s(answer.fields))  # fmt: skip


def refusal_of_exception(exn: BaseException) -> S3Refusal | None:
    """Return the same, from botocore's ``ClientError`` among the causes of ``exn``."""
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


def explain_refusal(said: S3Refusal, identity: str, *, anonymous: bool = False, asked: bool = True) -> Fault:
    """``said`` as a `Fault`, for who asked as ``identity``. ``anonymous``: because no credentials were found, unless
    ``asked`` for that."""
    words = f"S3 answered {said} to {identity}"
    if "AssumeRole" in said.operation or said.operation.startswith("GetRole"):
        again = Verdict.TRANSIENT if said.code in _TRANSIENT or said.status >= 500 else Verdict.DENIED
        return Fault(again, f"no credentials: {said.operation} was answered {said}", "Check the role and its trust.")
    if said.code == "PreconditionFailed" or said.status == 412:
        return Fault(Verdict.CHANGED, f"the object was replaced while it was being read: {words}", "Read it again.")
    if said.code in _EXPIRED or (said.code == "AccessDenied" and "request has expired" in said.message.lower()):
        return Fault(Verdict.EXPIRED, words, f"The session is over. {_LOGIN}")
    if said.code == "RequestTimeTooSkewed":
        return _skewed(said, words)
    if said.code in _TRANSIENT:
        advice = "The store is overloaded: use fewer connections (WDS_CONNECTIONS)."
        throttled = said.code in _THROTTLED or said.status in (429, 503)
        return Fault(Verdict.TRANSIENT, words, advice, said.wait_s, throttled=throttled)
    if said.code in _ADVICE:
        verdict, advice = _ADVICE[said.code]
        return Fault(verdict, words, advice)
    if said.code == "InvalidRequest" and "erver Side Encryption" in said.message:
        return Fault(
            Verdict.DENIED,
            words,
            "Give its key: storage_options={'s3': {'s3_additional_kwargs': {'SSECustomerKey': …}}}.",
        )
    if said.status in (401, 403) or said.code in ("AccessDenied", "403"):
        lists = said.operation.startswith("List")
        refused = f"anonymous {'listing is' if lists else 'reads are'} refused"
        if anonymous and not asked:
            return Fault(Verdict.DENIED, f"no credentials were found, and {refused} (S3 answered {said})", _GIVE)
        if said.operation in _WRITING:
            return Fault(Verdict.DENIED, words, "Allow s3:PutObject and s3:AbortMultipartUpload on it.")
        if anonymous:
            return Fault(Verdict.DENIED, words, f"{refused.capitalize()}. {_GIVE}")
        return Fault(Verdict.DENIED, words, _LIST_ADVICE if lists else _DENIED_ADVICE)
    plain = explain_status(Answer(said.status or 400, {}))
    return replace(plain, reason=words, retry_after_s=said.wait_s if plain.verdict.retryable else None)


def explain_client(exn: BaseException) -> Fault | None:
    """Explain an exception of botocore's own, for which nothing was answered; None for others."""
    if isinstance(exn, RecursionError):  # botocore follows its redirects by asking again, within the answer
        return Fault(
            Verdict.FATAL, "S3's client was redirected in a circle", "Check AWS_ENDPOINT_URL_S3 and AWS_REGION."
        )
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
    """Return what an exception of s3fs or botocore means to ``identity`` outside the backend; None where it is another
    library's."""
    said = refusal_of_exception(exn)
    return explain_client(exn) if said is None else explain_refusal(said, identity)


def _skewed(said: S3Refusal, words: str) -> Fault:
    """Either our clock is wrong, or the request is old: a machine that slept does not notice in ``time.monotonic``."""
    more = said.more or {}
    asked_at, now_there = more.get("RequestTime", ""), more.get("ServerTime", "")
    with contextlib.suppress(ValueError):
        if time.time() - calendar.timegm(time.strptime(asked_at, "%Y%m%dT%H%M%SZ")) > _SIGNED_FOR_S:
            return Fault(Verdict.EXPIRED, words, "The request had grown old.")
    here = asked_at or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    clocks = f"it is {here} on this machine and {now_there or 'another time'} at the store"
    # Not in the reason: attempts are counted by their reason, and each has another time.
    return Fault(Verdict.DENIED, words, f"Set this machine's clock (NTP): {clocks}.")


def _in_endpoint(more: Mapping[str, str]) -> str:
    found = _IN_ENDPOINT.search(more.get("Endpoint", ""))
    return found[1] if found else ""


def _causes(exn: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = exn
    for _ in range(10):
        if each is None:
            return
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
