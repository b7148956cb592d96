"""What Google Cloud Storage means by an answer, and gcsfs by an exception: in our words, with what Google said."""

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
_USER_PROJECT = re.compile(r"UserProject(?:Invalid|Denied|AccountProblem)|User project specified", re.IGNORECASE)
_NO_BUCKET = re.compile(r"NoSuchBucket|specified bucket does not exist", re.IGNORECASE)
_STATUS_BEHIND = re.compile(r"\.?, [45]\d\d$")  # gcsfs puts it behind what Google says
_SHOWN = 240


def explain(outcome: Answer | BaseException, identity: GoogleIdentity, *, generation: str, renewable: bool) -> Fault:
    """``outcome`` as a `Fault`. ``generation`` is the one that the URL asks for; ``renewable`` says whether another
    token can be asked for, so that a 401 is worth another request."""
    if isinstance(outcome, RefusedAnswer):
        outcome = outcome.answer
    if isinstance(outcome, AuthFailed):
        return _explain_auth(outcome, identity)
    if isinstance(outcome, BaseException):
        answer = _answer_of(outcome)
        if answer is None:
            return _explain_missing(outcome, identity) or explain_foreign(outcome)
        outcome = answer
    return _explain_answer(outcome, identity, generation, renewable)


def explain_write(exn: BaseException, identity: str = "the credentials that write") -> Fault:
    """Explain an exception of gcsfs while it writes as ``identity``, as a `Fault`."""
    return explain(exn, _writer(identity), generation="", renewable=False)


def _writer(identity: str) -> GoogleIdentity:
    return GoogleIdentity(identity, credentials=None if identity.startswith("anonymous") else True)


def _explain_answer(answer: Answer, identity: GoogleIdentity, generation: str, renewable: bool) -> Fault:
    code, message = _said(answer)
    text = f"{code} {message}"
    said = f"Google Cloud Storage answered {answer.status} to {identity.who}" + (f": {message}" if message else "")
    status = answer.status
    if code in _RATE or status == 429 or (status == 403 and _RATE_WORDS.search(message)):
        advice = "Fewer connections (WDS_CONNECTIONS), or another time."
        return Fault(Verdict.TRANSIENT, said, advice, retry_after_s(answer.fields), throttled=True)
    if status in (400, 403) and _REQUESTER_PAYS.search(text):
        return Fault(Verdict.DENIED, said, "The requester pays for this bucket: pass storage_options="
                     "{'requester_pays': 'PROJECT'}, the project that is billed for it.")  # fmt: skip
    if status in (400, 403) and (_USER_PROJECT.search(text) or "serviceusage.services.use" in text):
        return Fault(Verdict.DENIED, said, "Name a project of yours that has billing and in which this identity has "
                     "the role Service Usage Consumer: storage_options={'requester_pays': 'PROJECT'}.")  # fmt: skip
    if status == 401 and identity.credentials is not None:
        verdict = Verdict.EXPIRED if renewable else Verdict.DENIED
        advice = "The token is invalid or has expired. Log in again (`gcloud auth application-default login`), or "
        return Fault(verdict, said, advice + "check the key file, and that it was not revoked.")
    if status in (401, 403) and identity.credentials is None:
        return _explain_nobody(said, identity)
    if status == 403:
        return Fault(Verdict.DENIED, said, _permission_advice(message, identity))
    if status == 404 and generation:
        gone = f"the object's generation {generation} is not there: it was replaced or deleted ({said})"
        return Fault(Verdict.CHANGED, gone, "Name the generation that is there now, or none.")
    if status == 404:
        return _explain_404(said, text)
    if status == 400:
        return Fault(Verdict.FATAL, said, "Check the bucket's name, and the project and options that were given.")
    fault = explain_status(answer)
    return fault if status == 412 else replace(fault, reason=said)


def _explain_404(said: str, text: str) -> Fault:
    if _NO_BUCKET.search(text):
        return Fault(
            Verdict.MISSING, f"there is no such bucket ({said})", "Check the bucket's name, gs://BUCKET/OBJECT."
        )
    if "No such object" in text or "NoSuchKey" in text:
        return Fault(Verdict.MISSING, f"there is no such object ({said})", "Check its name; `wds-async ls` shows them.")
    return Fault(Verdict.MISSING, said, "There is no such object or no such bucket: check both names.")


def _explain_nobody(said: str, identity: GoogleIdentity) -> Fault:
    if identity.missed:
        said = said.replace(f"{identity.who}", "anonymous")  # that none were found need not be said twice
        said = f"no credentials were found, and the bucket refuses anonymous reads ({said})"
    else:
        said = f"the bucket refuses anonymous reads ({said})"
    return Fault(Verdict.DENIED, said, HOW_TO_GIVE)


def _permission_advice(message: str, identity: GoogleIdentity) -> str:
    if "insufficient authentication scopes" in message.lower() or "Insufficient Permission" in message:
        return "Give the machine the scope devstorage.read_only (or cloud-platform), or use a key file."
    found = _PERMISSION.search(message)
    permission = found[0] if found else "storage.objects.get"
    role = "storage.objectViewer" if permission.endswith((".get", ".list")) else "storage.objectUser"
    return (
        f"{permission} is missing: grant {identity.account} the role roles/{role} on the bucket "
        "(and check the bucket's name: where it is not yours, a missing one looks the same)."
    )


def _explain_auth(exn: AuthFailed, identity: GoogleIdentity) -> Fault:
    text = str(exn)
    said = f"{text} (as {identity.who})" if identity.who else text
    if _CLOCK.search(text):
        return Fault(Verdict.DENIED, said, "This machine's clock is wrong: set it (NTP), tokens are dated.")
    if exn.retryable:
        return Fault(Verdict.TRANSIENT, said, "Check that the token endpoint or metadata server can be reached.")
    if "invalid_grant" in text or "reauth" in text.lower():
        return Fault(Verdict.DENIED, said, "The login or key is no longer valid: log in again with "
                     "`gcloud auth application-default login`, or make another key.")  # fmt: skip
    return Fault(Verdict.DENIED, said, HOW_TO_GIVE)


def _explain_missing(exn: BaseException, identity: GoogleIdentity) -> Fault | None:
    """Return the fault of a missing object; gcsfs drops Google's own reason."""
    if not isinstance(exn, FileNotFoundError):
        return None
    said = f"Google Cloud Storage has nothing there for {identity.who}"
    return Fault(Verdict.MISSING, said, "There is no such object or no such bucket: check both names.")


def _answer_of(exn: BaseException) -> Answer | None:
    """Return the answer behind an exception of gcsfs: ``HttpError`` with its code, and what it makes of 400 and 403."""
    text = str(exn)
    if type(exn).__name__ == "HttpError" and str(getattr(exn, "code", "")).isdigit():
        return Answer(int(exn.code), {}, str(getattr(exn, "message", "")).encode())  # type: ignore[attr-defined]
    if isinstance(exn, OSError) and text.startswith("Forbidden: "):
        return Answer(403, {}, text.partition("\n")[2].encode())
    if isinstance(exn, ValueError) and text.startswith("Bad Request: "):
        return Answer(400, {}, text.partition("\n")[2].encode())
    if isinstance(exn, ValueError) and "requester pays" in text:
        return Answer(400, {}, text.encode())
    return None


def _said(answer: Answer) -> tuple[str, str]:
    """Return the code and message of an error, from JSON, XML or plain text; the message is fit to be shown."""
    text = answer.excerpt.decode("utf-8", "replace")
    code, message = "", text
    if text.lstrip().startswith("{"):
        code, message = _from_json(text)
    elif "<Error>" in text:
        found = dict(re.findall(r"<(Code|Message|Details)>(.*?)</", text, re.DOTALL))
        code = found.get("Code", "")
        message = " ".join(found[name] for name in ("Message", "Details") if name in found)
    else:
        message = re.sub(r"<[^>]*>", " ", text)
    message = " ".join(message.split())
    shown = "".join(c for c in message if c.isprintable())[:_SHOWN]
    return code, _STATUS_BEHIND.sub("", redact(shown)).rstrip(".")


def _from_json(text: str) -> tuple[str, str]:
    try:
        error: Any = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        found = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)', text)  # an excerpt may end in the middle
        return "", found[1] if found else ""
    if not isinstance(error, Mapping):
        return "", str(error)
    errors = error.get("errors") or [{}]
    first = errors[0] if isinstance(errors, list) and isinstance(errors[0], Mapping) else {}
    return str(first.get("reason", "")), str(error.get("message", ""))
