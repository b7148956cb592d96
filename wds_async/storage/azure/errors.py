"""Errors of Azure: codes of the Blob service, and exceptions of its clients.

The codes are those of its documentation ("Blob service error codes", "Common REST API error codes").
"""

from __future__ import annotations

import email.utils
import html
import re
import time
from dataclasses import replace

from wds_async.redact import redact
from wds_async.storage.base import Answer, Fault, Verdict
from wds_async.storage.http.errors import explain_exception, explain_status, retry_after_s
from wds_async.storage.secrets import code_shown

__all__ = [
    "answer_of",
    "code_of",
    "explain_answer",
    "explain_client",
    "explain_writing",
    "out_of_time",
    "unauthenticated",
]

_READ = "Give this identity the role Storage Blob Data Reader, or sign with sp=r (and sp=rl to list)."
_WRITE = "Give this identity the role Storage Blob Data Contributor, or sign with sp=rcw."
_SET = (
    "set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, or give this machine "
    "an identity."
)
_THROTTLED = frozenset({"ServerBusy", "TooManyRequests"})
_NETWORK = (
    "the account's firewall does not let this machine in, or the identity lacks the role Storage Blob Data Reader: "
    "allow its network, or use a private endpoint."
)
_NAME = "Check the container and the blob's name."

_LEASED = "It has a lease: break the lease, or wait."
_CODES: dict[str, tuple[Verdict, str]] = {
    "ContainerNotFound": (Verdict.MISSING, "Check the container's name, and that it is in this account."),
    "ContainerBeingDeleted": (Verdict.MISSING, "The container is being deleted."),
    "BlobNotFound": (Verdict.MISSING, "Check the blob's name; upper and lower case differ."),
    "ResourceNotFound": (Verdict.MISSING, _NAME),
    "InvalidResourceName": (Verdict.MISSING, "Containers have 3 to 63 lower-case letters, digits and hyphens."),
    "OutOfRangeInput": (Verdict.MISSING, "Containers have 3 to 63 letters, blobs at most 1,024."),
    "InvalidUri": (Verdict.MISSING, _NAME),
    "ContainerDisabled": (Verdict.DENIED, "An administrator has disabled the container."),
    **dict.fromkeys(
        ("AuthorizationPermissionMismatch", "InsufficientAccountPermissions", "UnauthorizedBlobOverwrite"),
        (Verdict.DENIED, _READ),
    ),
    "AuthorizationFailure": (Verdict.DENIED, _NETWORK[0].upper() + _NETWORK[1:]),
    **dict.fromkeys(
        (f"Authorization{kind}Mismatch" for kind in ("Protocol", "ResourceType", "Service", "SourceIP")),
        (
            Verdict.DENIED,
            "Make a signature for this service, container, protocol and address, with permission to read.",
        ),
    ),
    "KeyBasedAuthenticationNotPermitted": (
        Verdict.DENIED,
        "The account takes no keys and no signatures made with them: leave them out and use a managed identity, "
        "az login, or a client's ID and secret.",
    ),
    "AccountIsDisabled": (Verdict.DENIED, "The account is disabled: see its subscription."),
    "PublicAccessNotPermitted": (Verdict.DENIED, f"The account allows no anonymous reads: {_SET}"),
    "BlobArchived": (Verdict.FATAL, "Bring it back first, which takes hours: az storage blob set-tier --tier Hot."),
    "BlobBeingRehydrated": (Verdict.FATAL, "It is on its way back from the archive; try again when it has come."),
    "LeaseIdMissing": (Verdict.DENIED, _LEASED),
    "LeaseIdMismatchWithBlobOperation": (Verdict.DENIED, _LEASED),
    "ConditionNotMet": (Verdict.CHANGED, "Read it again."),
    "BlobModifiedWhileReading": (Verdict.CHANGED, "Read it again."),
    **dict.fromkeys(_THROTTLED, (Verdict.TRANSIENT, "The account's limits are reached: fewer readers at once.")),
    **dict.fromkeys(("InternalError", "OperationTimedOut"), (Verdict.TRANSIENT, "The service is busy or broken.")),
    "AccountBeingCreated": (Verdict.TRANSIENT, "The account is being made."),
}
_UNAUTHENTICATED = frozenset({"AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"})
_ANONYMOUS = f"A private container looks like this without credentials: {_SET}"
_ADVICE = {
    "key": "Check that AZURE_STORAGE_ACCOUNT_KEY (or the connection string) is of this account, and was not rotated.",
    "sas": "Make a new signature (AZURE_STORAGE_SAS_TOKEN, sas_token=), for this account and container, with sp=r.",
    "anonymous": _ANONYMOUS,
}
_SKEWED_S = 120.0


def code_of(answer: Answer) -> str:
    """Return Azure's error code, "" without one (the answer may be another server's)."""
    return code_shown(answer.fields.get("x-ms-error-code") or _element(answer, "Code"))


def unauthenticated(answer: Answer) -> bool:
    """Return whether Azure rejects the identity itself, and not its permissions."""
    code = code_of(answer)
    if code == "AuthorizationFailure":
        # Azurite calls a wrong or expired signature by the code that Azure has for its firewall, and an answer to HEAD
        # or one in chunks comes without its message.
        return "failed to authenticate" in (_element(answer, "Message") or "failed to authenticate")
    return code in _UNAUTHENTICATED or (answer.status == 401 and not code)


def out_of_time(answer: Answer) -> bool:
    """Return whether Azure's reason is the validity in time of the signature or token."""
    text = f"{_element(answer, 'AuthenticationErrorDetail')} {_element(answer, 'Message')}".lower()
    return any(words in text for words in ("not valid in the specified time", "lifetime validation failed", "expired"))


def explain_answer(answer: Answer, *, identity: str, kind: str, renewed: bool) -> Fault:
    """Explain an answer to ``identity`` (of an account's ``kind``). ``renewed``: another grant takes the place of the
    refused one."""
    code = code_of(answer)
    reason = f"Azure answered {answer.status}{f' {code}' if code else ''}{_message(answer)} to {identity}"
    if unauthenticated(answer):
        if renewed:
            return Fault(Verdict.EXPIRED, reason, _skew(answer) or _ADVICE.get(kind, ""))
        advice = _ADVICE.get(kind, "Check that identity, and its role Storage Blob Data Reader.")
        if code == "AuthorizationFailure":
            advice = f"{advice} If that is right: {_NETWORK}"
        return Fault(Verdict.DENIED, reason, _skew(answer) or advice)
    plain = explain_status(answer)
    # A conflict that has a name is a state which does not pass by itself, unless that is known.
    lasting = answer.status == 409 and code
    verdict, advice = _CODES.get(code, (Verdict.FATAL, "") if lasting else (plain.verdict, plain.advice))
    if kind == "anonymous" and answer.status in (403, 404, 409) and code not in ("BlobArchived", "BlobNotFound"):
        advice = _ANONYMOUS
    throttled = plain.throttled or code in _THROTTLED
    wait_s = retry_after_s(answer.fields) if verdict.retryable else None
    return Fault(verdict, reason, advice, wait_s, throttled=throttled)


def explain_client(exn: BaseException, *, identity: str) -> Fault:
    """Explain an exception of Azure's clients that no answer is behind, or of the network."""
    names = {cls.__name__ for cls in type(exn).__mro__}
    if "ClientAuthenticationError" in names:
        lines = str(exn).strip().splitlines() or [type(exn).__name__]
        advice = "Check that identity; for a client's secret also AZURE_STORAGE_TENANT_ID."
        return Fault(Verdict.DENIED, f"no token for {identity}: {redact(lines[0])[:300]}", advice)
    if names & {"ServiceRequestError", "ServiceResponseError", "IncompleteReadError"}:
        inner = getattr(exn, "inner_exception", None) or exn.__cause__
        return explain_exception(inner) if inner is not None else Fault(Verdict.TRANSIENT, str(exn))
    if "HttpResponseError" in names:
        return Fault(Verdict.TRANSIENT, redact(str(exn).partition("\n")[0])[:300])
    return explain_exception(exn)


def explain_writing(exn: BaseException, *, identity: str, kind: str = "") -> Fault:
    """Explain an exception of adlfs while a blob was being written, as ``identity`` of an account's ``kind``; the
    answer is somewhere behind it. Its own text is not to be shown, see `answer_of`."""
    behind: BaseException | None = exn
    while behind is not None:
        if (answer := answer_of(behind)) is not None:
            fault = explain_answer(answer, identity=identity, kind=kind, renewed=False)
            wanting = code_of(answer) in ("AuthorizationPermissionMismatch", "InsufficientAccountPermissions")
            return replace(fault, advice=_WRITE) if wanting else fault
        behind = behind.__cause__ or behind.__context__
    return explain_client(exn, identity=identity)


def answer_of(exn: BaseException) -> Answer | None:
    """Return the answer behind an exception of Azure's client. The exception itself is not to be shown: it repeats the
    signature that was sent."""
    response = getattr(exn, "response", None)
    status = getattr(response, "status_code", None)
    if response is None or not isinstance(status, int):
        return None
    fields = {str(name).lower(): str(value) for name, value in response.headers.items()}
    if code := getattr(exn, "error_code", None):
        fields.setdefault("x-ms-error-code", str(getattr(code, "value", code)))
    try:
        text = response.text()
    except Exception:  # a body that was not read
        text = ""
    return Answer(status, fields, text.encode("utf-8", "replace")[:4096])


def _element(answer: Answer, name: str) -> str:
    text = answer.excerpt.decode("utf-8", "replace")
    element = re.search(f"<{name}>(.*?)(?:</{name}>|$)", text, re.DOTALL)
    return html.unescape(element[1]).strip() if element else ""


def _message(answer: Answer) -> str:
    """Return the first line of its message, and the times of a signature in its detail, whose rest repeats what was
    signed."""
    first = (_element(answer, "Message").splitlines() or [""])[0].rstrip(". ")
    if not first and not code_of(answer):
        first = " ".join(re.sub(r"<[^>]*>|\s+", " ", answer.excerpt.decode("utf-8", "replace")).split())[:120]
    detail = _element(answer, "AuthenticationErrorDetail")
    times = re.search(r"Signature not valid in the specified time\s*frame.*", detail)
    message = redact("; ".join(filter(None, (first, times[0].rstrip(". ") if times else ""))))[:400]
    return f" ({message})" if message and message.isprintable() else ""


def _skew(answer: Answer) -> str:
    """Return advice about this machine's clock, where it is off."""
    try:
        theirs = email.utils.parsedate_to_datetime(answer.fields.get("date", "")).timestamp()
    except (TypeError, ValueError):
        return ""
    off_s = time.time() - theirs
    if abs(off_s) < _SKEWED_S:
        return ""
    return f"This machine's clock is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} Azure's: set it."
