"""Errors of Google Cloud Storage: the meaning of its answers, and of gcsfs's exceptions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wds_async.redact import redact
from wds_async.storage.base import Answer, Fault, RefusedAnswer, Verdict
from wds_async.storage.gcs.credentials import HOW_TO_GIVE, AuthFailed, GoogleIdentity
from wds_async.storage.generic import explain_foreign
from wds_async.storage.http.errors import explain_status, retry_after_s

__all__ = ["explain", "explain_write"]

_PERMISSION = re.compile(r"\b(?:storage|serviceusage)\.[a-zA-Z]+\.[a-zA-Z]+\b")
_RATE = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "SlowDown"})
_RATE_WORDS = re.compile(r"exceeded the rate limit|rate limit exceeded|ratelimitexceeded", re.IGNORECASE)
_CLOCK = re.compile(r"invalid_grant.*(?:reasonable timeframe|\biat\b|\bexp\b|clock)", re.IGNORECASE)
_REQUESTER_PAYS = re.compile(r"requester pays|UserProjectMissing", re.IGNORECASE)
_USER_PROJECT = re.compile(
    r"UserProject(?:Invalid|Denied|AccountProblem)|User project specified|serviceusage\.services\.use", re.IGNORECASE
)
_NO_BUCKET = re.compile(r"NoSuchBucket|specified bucket does not exist", re.IGNORECASE)
_STATUS_BEHIND = re.compile(r"\.?, [45]\d\d$")  # gcsfs puts it behind Google's message
_MESSAGE_AT_MOST = 240
_CHECK_NAMES = "There is no such object or no such bucket: check both names."


def explain(outcome: Answer | BaseException, identity: GoogleIdentity, *, generation: str, renewable: bool) -> Fault:
    """Return ``outcome`` as a `Fault`. ``generation``: the one that the URL names; ``renewable``: another token can
    be requested, so that a 401 is worth another request."""
    if isinstance(outcome, RefusedAnswer):
        outcome = outcome.answer
    if isinstance(outcome, AuthFailed):
        return _explain_auth(outcome, identity)
    if isinstance(outcome, BaseException):
        answer = _answer_of(outcome)
        if answer is None and isinstance(outcome, FileNotFoundError):  # gcsfs drops Google's own reason
            return Fault(Verdict.MISSING, f"Google Cloud Storage has nothing there for {identity.who}", _CHECK_NAMES)
        if answer is None:
            return explain_foreign(outcome)
        outcome = answer
    return _explain_answer(outcome, identity, generation, renewable)


def explain_write(exn: BaseException, identity: str = "the credentials that write") -> Fault:
    """Explain an exception of gcsfs while it writes as ``identity``, as a `Fault`."""
    credentials = None if identity.startswith("anonymous") else True
    return explain(exn, GoogleIdentity(identity, credentials), generation="", renewable=False)


def _explain_answer(answer: Answer, identity: GoogleIdentity, generation: str, renewable: bool) -> Fault:
    code, message = _error_of(answer)
    status, text = answer.status, f"{code} {message}"
    reason = f"Google Cloud Storage answered {status} to {identity.who}" + (f": {message}" if message else "")
    if code in _RATE or status == 429 or (status == 403 and _RATE_WORDS.search(message)):
        advice = "Fewer connections (WDS_CONNECTIONS), or another time."
        return Fault(Verdict.TRANSIENT, reason, advice, retry_after_s(answer.fields), throttled=True)
    if status in (400, 403) and _REQUESTER_PAYS.search(text):
        return Fault(Verdict.DENIED, reason, "The requester pays for this bucket: pass storage_options="
                     "{'requester_pays': 'PROJECT'}, the project that is billed for it.")  # fmt: skip
    if status in (400, 403) and _USER_PROJECT.search(text):
        return Fault(Verdict.DENIED, reason, "Name a project of yours that has billing and in which this identity has "
                     "the role Service Usage Consumer: storage_options={'requester_pays': 'PROJECT'}.")  # fmt: skip
    if status in (401, 403) and identity.credentials is None:
        refused = "the bucket refuses anonymous reads"
        if identity.missed:
            refused = f"no credentials were found, and {refused}"
            reason = reason.replace(identity.who, "anonymous")
        return Fault(Verdict.DENIED, f"{refused} ({reason})", HOW_TO_GIVE)
    if status == 401:
        advice = "The token is invalid or has expired. Log in again (`gcloud auth application-default login`), or "
        verdict = Verdict.EXPIRED if renewable else Verdict.DENIED
        return Fault(verdict, reason, advice + "check the key file, and that it was not revoked.")
    if status == 403:
        return Fault(Verdict.DENIED, reason, _permission_advice(message, identity))
    if status == 404 and generation:
        gone = f"the object's generation {generation} is not there: it was replaced or deleted ({reason})"
        return Fault(Verdict.CHANGED, gone, "Name the generation that is there now, or none.")
    if status == 404 and _NO_BUCKET.search(text):
        return Fault(
            Verdict.MISSING, f"there is no such bucket ({reason})", "Check the bucket's name, gs://BUCKET/OBJECT."
        )
    if status == 404 and ("No such object" in text or "NoSuchKey" in text):
        advice = "Check its name; `wds-async ls` shows them."
        return Fault(Verdict.MISSING, f"there is no such object ({reason})", advice)
    if status == 404:
        return Fault(Verdict.MISSING, reason, _CHECK_NAMES)
    if status == 400:
        return Fault(Verdict.FATAL, reason, "Check the bucket's name, and the project and options that were given.")
    fault = explain_status(answer)
    return fault if status == 412 else replace(fault, reason=reason)


def _permission_advice(message: str, identity: GoogleIdentity) -> str:
    if "insufficient authentication scopes" in message.lower() or "Insufficient Permission" in message:
        return "Give the machine the scope devstorage.read_only (or cloud-platform), or use a key file."
    match = _PERMISSION.search(message)
    permission = match[0] if match else "storage.objects.get"
    role = "storage.objectViewer" if permission.endswith((".get", ".list")) else "storage.objectUser"
    return (
        f"{permission} is missing: grant {identity.account} the role roles/{role} on the bucket "
        "(and check the bucket's name: where it is not yours, a missing one looks the same)."
    )


def _explain_auth(exn: AuthFailed, identity: GoogleIdentity) -> Fault:
    text = str(exn)
    reason = f"{text} (as {identity.who})" if identity.who else text
    if _CLOCK.search(text):
        return Fault(Verdict.DENIED, reason, "This machine's clock is wrong: set it (NTP), tokens are dated.")
    if exn.retryable:
        return Fault(Verdict.TRANSIENT, reason, "Check that the token endpoint or metadata server can be reached.")
    if "invalid_grant" in text or "reauth" in text.lower():
        return Fault(Verdict.DENIED, reason, "The login or key is no longer valid: log in again with "
                     "`gcloud auth application-default login`, or make another key.")  # fmt: skip
    return Fault(Verdict.DENIED, reason, HOW_TO_GIVE)


def _answer_of(exn: BaseException) -> Answer | None:
    """Return the answer behind an exception of gcsfs: an ``HttpError``, or its own for 400 and 403."""
    text = str(exn)
    if type(exn).__name__ == "HttpError" and str(getattr(exn, "code", "")).isdigit():
        return Answer(int(exn.code), {}, str(getattr(exn, "message", "")).encode())  # type: ignore[attr-defined]
    if isinstance(exn, OSError) and text.startswith("Forbidden: "):
        return Answer(403, {}, text.partition("\n")[2].encode())
    if isinstance(exn, ValueError) and text.startswith("Bad Request: "):
        return Answer(400, {}, text.partition("\n")[2].encode())
    return Answer(400, {}, text.encode()) if isinstance(exn, ValueError) and "requester pays" in text else None


def _error_of(answer: Answer) -> tuple[str, str]:
    """Return the code and message of an error, from JSON, XML or plain text; the message is fit to be shown."""
    text = answer.excerpt.decode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        code, message = _error_of_json(text)
    elif "<Error>" in text:
        elements = dict(re.findall(r"<(Code|Message|Details)>(.*?)</", text, re.DOTALL))
        code = elements.get("Code", "")
        message = " ".join(elements[name] for name in ("Message", "Details") if name in elements)
    else:
        code, message = "", re.sub(r"<[^>]*>", " ", text)
    shown = "".join(c for c in " ".join(message.split()) if c.isprintable())[:_MESSAGE_AT_MOST]
    return code, _STATUS_BEHIND.sub("", redact(shown)).rstrip(".")


def _error_of_json(text: str) -> tuple[str, str]:
    try:
        error: Any = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        message = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)', text)  # an excerpt may end in the middle
        return "", message[1] if message else ""
    if not isinstance(error, Mapping):
        return "", str(error)
    errors = error.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], Mapping) else {}
    return str(first.get("reason", "")), str(error.get("message", ""))
