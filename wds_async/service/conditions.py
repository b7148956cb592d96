"""Requests on condition (RFC 9110 §13): ``If-Match`` and its kin, ``If-Range``, and what they are compared with."""

from __future__ import annotations

import email.utils
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from wds_async.service.refusals import Refusal

__all__ = ["Validators", "insists", "judged", "names_another", "range_holds"]

_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')


@dataclass(frozen=True, slots=True)
class Validators:
    """What an answer says of its object's version: ``etag`` with its quotes, ``modified`` as HTTP writes a date; "" for
    none."""

    etag: str = ""
    modified: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, str], identity: str) -> Validators:
        """The origin's own, exactly; where it gave no ETag, one made from what pins the object."""
        etag = fields.get("etag", "")
        if not etag and identity:
            etag = f'"wds-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"'
        return cls(etag, fields.get("last-modified", ""))


def judged(asked: Mapping[str, str], has: Validators) -> bool:
    """Whether the object is to be sent: False where the client has it already (304). ``asked`` are the request's
    headers. Refusal (412) where it is not the object that the client means."""
    if (wanted := asked.get("If-Match")) is not None:
        if not _listed(wanted, has.etag, strong=True):
            raise Refusal(412, f"the object is another one now: its ETag is {has.etag or 'unknown'}", "precondition")
    elif (since := _date(asked.get("If-Unmodified-Since"))) is not None:
        changed = _date(has.modified)
        if changed is not None and changed > since:
            raise Refusal(412, f"the object has changed since then, on {has.modified}", "precondition")
    if (known := asked.get("If-None-Match")) is not None:
        return not _listed(known, has.etag, strong=False)
    if (since := _date(asked.get("If-Modified-Since"))) is None:
        return True
    changed = _date(has.modified)
    return changed is None or changed > since


def insists(asked: Mapping[str, str]) -> bool:
    """Whether the client wants the store's own answer, and no copy in its place (RFC 9111 §5.2.1)."""
    said = asked.get("Cache-Control")
    if said is None:
        said = asked.get("Pragma", "")
    return not {"no-cache", "max-age=0"}.isdisjoint(one.strip().lower() for one in said.split(","))


def names_another(asked: Mapping[str, str], has: Validators) -> bool:
    """Whether ``If-Match``, ``If-Unmodified-Since`` or ``If-Range`` means another version than the one at hand."""
    try:
        judged({name: asked[name] for name in ("If-Match", "If-Unmodified-Since") if name in asked}, has)
    except Refusal:
        return True
    return not range_holds(asked.get("If-Range"), has)


def range_holds(condition: str | None, has: Validators) -> bool:
    """Whether ``If-Range`` lets the range stand; else the whole object is to be sent. A weak ETag proves nothing, and
    a date only where it is the very one."""
    if condition is None:
        return True
    condition = condition.strip()
    if condition.startswith(('"', "W/")):
        return condition == has.etag and not condition.startswith("W/")
    return bool(has.modified) and condition == has.modified


def _listed(header: str, etag: str, *, strong: bool) -> bool:
    """Whether ``etag`` is in a list of them. What the origin sends without quotes is compared as it stands."""
    if header.strip() == "*":
        return True
    if not etag or (strong and etag.startswith("W/")):
        return False
    tags = _TAG.findall(header) or [header.strip()]
    if strong:
        return etag in tags
    return etag.removeprefix("W/") in [tag.removeprefix("W/") for tag in tags]


def _date(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
