"""Requests on condition (RFC 9110 §13): ``If-Match`` and its kin, ``If-Range``, and what they are compared with."""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.service.archives import member_of
from wds_async.service.body_writer import BodyWriter
from wds_async.service.byte_ranges import ByteRange, first_byte, ranges_of
from wds_async.service.cache.cache import CachedObject
from wds_async.service.cache.origin import NO_CLIENT, Client
from wds_async.service.delivery import Delivery
from wds_async.service.http_messages import HttpRequest, HttpResponse
from wds_async.service.names import ObjectName
from wds_async.service.refusals import Refusal
from wds_async.service.send_fd import hand, log_handed, open_anew, wants_file

if TYPE_CHECKING:
    from wds_async.service.running import Service

__all__ = [
    "Exchange",
    "Validators",
    "answer",
    "body_of",
    "fields_of",
    "must_send",
    "names_another",
    "range_holds",
    "wants_revalidation",
]

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


def must_send(headers: Mapping[str, str], has: Validators) -> bool:
    """Whether the object is to be sent: False where the client has it already (304). ``headers`` are the request's
    headers. Refusal (412) where it is not the object that the client means."""
    if (wanted := headers.get("If-Match")) is not None:
        if not _listed(wanted, has.etag, strong=True):
            raise Refusal(412, f"the object is another one now: its ETag is {has.etag or 'unknown'}", "precondition")
    elif (since := _date(headers.get("If-Unmodified-Since"))) is not None:
        changed = _date(has.modified)
        if changed is not None and changed > since:
            raise Refusal(412, f"the object has changed since then, on {has.modified}", "precondition")
    if (known := headers.get("If-None-Match")) is not None:
        return not _listed(known, has.etag, strong=False)
    if (since := _date(headers.get("If-Modified-Since"))) is None:
        return True
    changed = _date(has.modified)
    return changed is None or changed > since


def wants_revalidation(headers: Mapping[str, str]) -> bool:
    """Whether the client wants the store's own answer, and no copy in its place (RFC 9111 §5.2.1)."""
    said = headers.get("Cache-Control")
    if said is None:
        said = headers.get("Pragma", "")
    return not {"no-cache", "max-age=0"}.isdisjoint(one.strip().lower() for one in said.split(","))


def names_another(headers: Mapping[str, str], has: Validators) -> bool:
    """Whether ``If-Match``, ``If-Unmodified-Since`` or ``If-Range`` means another version than the one at hand."""
    try:
        must_send({name: headers[name] for name in ("If-Match", "If-Unmodified-Since") if name in headers}, has)
    except Refusal:
        return True
    return not range_holds(headers.get("If-Range"), has)


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


logger = logging.getLogger("wds_async")
_NOT_HERE = {"etl_name": "ETLs", "etl_pipeline": "ETLs", "archregx": "matches within archives (archregx)"}


@dataclass(slots=True)
class Exchange:
    """A request, who makes it, and what has become of it: ``first_byte_at`` by the loop's clock (0.0: none yet), and
    the bytes ``sent`` of a body. ``api`` is the label that it is counted by."""

    request: HttpRequest
    api: str
    client: Client = NO_CLIENT
    named: ObjectName | None = None
    first_byte_at: float = 0.0
    sent: int = 0

    @property
    def url(self) -> str:
        """Of the object that it asks for; "" where it is for none."""
        return "" if self.named is None else self.named.url


def fields_of(held: CachedObject, api: str) -> dict[str, str]:
    """The head's fields of an object, asked for by ``api``: all but length, range, ``Date`` and ``Server``."""
    facts = held.facts
    has = Validators.of(facts.fields, facts.version)
    fields = {
        "Content-Type": facts.fields.get("content-type") or "application/octet-stream",
        "Accept-Ranges": "none" if held.size is None else "bytes",
    }
    if has.etag:
        fields["ETag"] = has.etag
    if has.modified:
        fields["Last-Modified"] = has.modified
    if version := facts.fields.get("ais-version"):
        fields["Ais-Version"] = version
    if value := facts.fields.get("ais-checksum-value"):
        fields["Ais-Checksum-Type"] = facts.fields.get("ais-checksum-type", "")
        fields["Ais-Checksum-Value"] = value
    elif facts.checksum is not None:
        fields["Ais-Checksum-Type"] = facts.checksum.algorithm
        fields["Ais-Checksum-Value"] = facts.checksum.digest.hex()
    if api == "ais":
        fields["Ais-Present"] = "true" if held.whole else "false"
    return fields


async def body_of(service: Service, request: HttpRequest) -> bytes:
    """The body of a request. Refusal (408) if it does not come within the time of a head, 413 if it is too long."""
    try:
        async with asyncio.timeout(service.config.header_timeout_s):
            return await request.read()
    except TimeoutError:
        words = f"the request's body did not come within {service.config.header_timeout_s:g} s (header_timeout_s)"
        raise Refusal(408, words, "body") from None


async def answer(service: Service, asking: Exchange, named: ObjectName) -> HttpResponse:
    """The object, sent. Refusal, or an error of the tree, as long as nothing of it was; after that whatever breaks it
    breaks the connection, so that no client takes a part for the whole."""
    for name, what in _NOT_HERE.items():
        if named.params.get(name):
            raise Refusal(501, f"{what} are AIStore's own; this service reads objects as they are stored", "not-here")
    request = asking.request
    begins = None if request.method == "HEAD" else first_byte(request.headers.get("Range"))
    if wants_file(request):
        return await _handed(service, asking, named)
    insist = wants_revalidation(request.headers) or named.params.get("latest-ver", "").lower() in ("true", "1", "yes")
    while True:
        opened = service.cache.open(named.url, client=asking.client, start=begins, insist=insist)
        with await opened as held:
            fields = fields_of(held, named.api)
            has = Validators(fields.get("ETag", ""), fields.get("Last-Modified", ""))
            if held.stale and names_another(request.headers, has):
                insist = True  # the store may have the version that the client means
                continue
            if named.params.get("archpath"):
                return await _member(service, asking, named, held, fields)
            if not must_send(request.headers, has):
                return HttpResponse(status=304, headers=fields)
            spans = _spans(request, held, has)
            if len(spans) > 1 and held.size is not None:
                return await _several(service, asking, held, fields, spans, held.size)
            if spans and held.size is not None:
                fields["Content-Range"] = spans[0].content_range(held.size)
            start, stop = (spans[0].start, spans[0].stop) if spans else (0, held.size)
            return await _sent(service, asking, held, fields, [_Part(start, stop)], status=206 if spans else 200)


async def _handed(service: Service, asking: Exchange, named: ObjectName) -> HttpResponse:
    """The object's open file. 204 if not all of the object lies in it, or nothing is known of it yet."""
    held = None if named.params else service.cache.peek(named.url)
    if held is None:
        return HttpResponse(status=204)
    with held:
        if asking.request.headers["Wds-Hand"] == "bad":
            held.distrust()
        if held.size is None or not held.whole or held.ready(0, held.size) < held.size:
            return HttpResponse(status=204)
        fields = fields_of(held, named.api)
        try:
            own = open_anew(held) if service.read_only is None else service.read_only.open(held)
        except OSError as exn:
            logger.info("%s is not handed over, but sent: %s", redact(named.url), exn)
            return HttpResponse(status=204)
        if not hand(asking.request, own, held.size, fields):
            return HttpResponse(status=204)
        held.served(held.size)
        asking.api, asking.sent = "handed", held.size
    service.plans.heard(asking.client, named.url)
    log_handed(asking.request.connection, named.url)
    return HttpResponse(sent=True)


def _spans(request: HttpRequest, held: CachedObject, has: Validators) -> tuple[ByteRange, ...]:
    wanted = request.headers.get("Range")
    if wanted is None or held.size is None or request.method == "HEAD":  # a range has a meaning for GET alone
        return ()
    return ranges_of(wanted, held.size) if range_holds(request.headers.get("If-Range"), has) else ()


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes ``[start, stop)`` of an object (to its end if ``stop`` is None) in an answer, between ``before`` and
    ``after``."""

    start: int
    stop: int | None
    before: bytes = b""
    after: bytes = b""


async def _several(
    service: Service,
    asking: Exchange,
    held: CachedObject,
    fields: dict[str, str],
    spans: Sequence[ByteRange],
    size: int,
) -> HttpResponse:
    """Send several spans of an object as ``multipart/byteranges`` (RFC 9110 §14.6)."""
    boundary = secrets.token_hex(16)
    last = len(spans) - 1
    parts = [
        _Part(
            span.start,
            span.stop,
            f"\r\n--{boundary}\r\nContent-Type: {fields['Content-Type']}\r\n"
            f"Content-Range: {span.content_range(size)}\r\n\r\n".encode("utf-8", "surrogateescape"),
            f"\r\n--{boundary}--\r\n".encode() if n == last else b"",
        )
        for n, span in enumerate(spans)
    ]
    fields["Content-Type"] = f"multipart/byteranges; boundary={boundary}"
    return await _sent(service, asking, held, fields, parts, status=206)


async def _member(
    service: Service, asking: Exchange, named: ObjectName, held: CachedObject, fields: dict[str, str]
) -> HttpResponse:
    """A member of an archive. What its head says is the member's, so the archive's checksum and ETag are not in it."""
    if asking.request.headers.get("Range"):
        raise Refusal(501, "ranges of archived content are not served; read the archive's own range", "not-here")
    span = await member_of(service, held, named.params["archpath"])
    kept = {name: value for name, value in fields.items() if name in ("Last-Modified", "Ais-Version")}
    kept |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "none"}
    return await _sent(service, asking, held, kept, [_Part(span.start, span.stop)])


async def _sent(
    service: Service,
    asking: Exchange,
    held: CachedObject,
    fields: dict[str, str],
    parts: Sequence[_Part],
    *,
    status: int = 200,
) -> HttpResponse:
    request, length = asking.request, _length(parts)
    if request.method == "HEAD" or length == 0:
        return HttpResponse(status, headers=fields if length is None else {**fields, "Content-Length": str(length)})
    body, delivery = BodyWriter(service, held, parts[0].start, parts[0].stop), None
    try:
        await body.begin()  # until the first piece is there, what goes wrong has a status of its own
        pace, timeout_s = service.pace_of(asking.client), service.config.send_timeout_s
        delivery = Delivery(request, status, fields, length, call=service.call, timeout_s=timeout_s, pace=pace)
        request.connection.sending = True
        asking.first_byte_at = asyncio.get_running_loop().time()
        at = parts[0].start
        try:
            for part in parts:
                if part is not parts[0]:
                    await body.aclose()
                    body = BodyWriter(service, held, part.start, part.stop)
                    await body.begin()
                at = part.start - delivery.sent - len(part.before)
                if part.before:
                    await delivery.send(memoryview(part.before))
                await body.send(delivery)
                if part.stop is not None and at + delivery.sent != part.stop:
                    raise ConnectionAbortedError(f"it ended before byte {part.stop}")
                if part.after:
                    await delivery.send(memoryview(part.after))
            delivery.finish()
        except BaseException as exn:
            _broken(service, asking, held, at + delivery.sent, exn)
            if not isinstance(exn, Exception):
                raise
    finally:
        if delivery is not None:
            asking.sent = delivery.sent
            delivery.close()
        await body.aclose()
    return HttpResponse(status, sent=True)


def _length(parts: Sequence[_Part]) -> int | None:
    """Return the bytes of an answer's body; None if that is not known."""
    length = 0
    for part in parts:
        if part.stop is None:
            return None
        length += len(part.before) + part.stop - part.start + len(part.after)
    return length


def _broken(service: Service, asking: Exchange, held: CachedObject, at: int, exn: BaseException) -> None:
    """End the connection in the middle of the body, and say why where it is not the client's own doing."""
    asking.request.connection.cut()
    who = asking.client
    if isinstance(exn, WdsError):
        service.meters.failed(held.url, exn, asking.client)
        logger.warning("%s: broken off at byte %d for %s: %s", redact(held.url), at, who, exn)
    elif isinstance(exn, TimeoutError):
        service.meters.refused("slow-client", asking.client)
        words = "%s: %s took nothing for %.0f s (send_timeout_s): let go at byte %d"
        logger.info(words, redact(held.url), who, service.config.send_timeout_s, at)
    elif isinstance(exn, ConnectionAbortedError):
        logger.error("%s: broken off at byte %d for %s: %s", redact(held.url), at, who, exn)
    elif isinstance(exn, (ConnectionError, asyncio.CancelledError)):
        logger.debug("%s: %s left at byte %d", redact(held.url), who, at)
    else:
        logger.error("%s: broken off at byte %d for %s", redact(held.url), at, who, exc_info=exn)
