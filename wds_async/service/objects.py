"""Answers with objects: whole, in ranges, members of archives, or the open file itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.service.cache.cache import CachedObject
from wds_async.service.cache.origin import Urgency
from wds_async.service.context import Context, Exchange
from wds_async.service.delivery import BodyWriter, Delivery
from wds_async.service.http_server import HttpResponse
from wds_async.service.names import ObjectName
from wds_async.service.preconditions import (
    ByteRange,
    Validators,
    first_byte,
    must_send,
    names_another,
    range_holds,
    ranges_of,
    wants_revalidation,
)
from wds_async.service.refusals import Refusal
from wds_async.service.send_fd import hand, log_handed, open_anew, wants_file

__all__ = ["BodyPart", "Pace", "answer", "fields_of", "send_parts"]

logger = logging.getLogger("wds_async")
Pace = Callable[[int], Awaitable[None]]
_NOT_HERE = {"etl_name": "ETLs", "etl_pipeline": "ETLs", "archregx": "matches within archives (archregx)"}


def fields_of(held: CachedObject, api: str) -> dict[str, str]:
    """Return the head's fields of an object for ``api``, without length, range, ``Date`` and ``Server``."""
    facts = held.facts
    has = Validators.of(facts.fields, facts.version)
    kind, value = facts.fields.get("ais-checksum-type", ""), facts.fields.get("ais-checksum-value", "")
    if not value and facts.checksum is not None:
        kind, value = facts.checksum.algorithm, facts.checksum.digest.hex()
    fields = {
        "Content-Type": facts.fields.get("content-type") or "application/octet-stream",
        "Accept-Ranges": "none" if held.size is None else "bytes",
        "ETag": has.etag,
        "Last-Modified": has.modified,
        "Ais-Version": facts.fields.get("ais-version", ""),
        "Ais-Checksum-Type": kind if value else "",
        "Ais-Checksum-Value": value,
    }
    if api == "ais":
        fields["Ais-Present"] = "true" if held.whole else "false"
    return {name: field for name, field in fields.items() if field}


async def answer(context: Context, exchange: Exchange, named: ObjectName) -> HttpResponse:
    """Send the object. Raises Refusal or an error of the tree before its first byte; a later error breaks the
    connection, so that no client takes a part for the whole."""
    for name, what in _NOT_HERE.items():
        if named.params.get(name):
            raise Refusal(501, f"{what} are AIStore's own; this service reads objects as they are stored", "not-here")
    request = exchange.request
    # A range has a meaning for GET alone.
    wanted = None if request.method == "HEAD" else request.headers.get("range")
    if wants_file(request):
        return await _handed(context, exchange, named)
    insist = wants_revalidation(request.headers) or named.params.get("latest-ver", "").lower() in ("true", "1", "yes")
    begins = None if request.method == "HEAD" else first_byte(wanted)
    while True:
        opened = context.cache.open(named.url, client=exchange.client, start=begins, insist=insist)
        with await opened as held:
            fields = fields_of(held, named.api)
            has = Validators(fields.get("ETag", ""), fields.get("Last-Modified", ""))
            if held.stale and names_another(request.headers, has):
                insist = True  # the store may have the version that the client means
                continue
            if named.params.get("archpath"):
                return await _member(context, exchange, named, held, fields)
            if not must_send(request.headers, has):
                return HttpResponse(304, headers=fields)
            spans: Sequence[ByteRange] = ()
            if wanted is not None and held.size is not None and range_holds(request.headers.get("if-range"), has):
                spans = ranges_of(wanted, held.size)
            if not spans or held.size is None:
                return await send_parts(context, exchange, held, fields, [BodyPart(0, held.size)])
            if len(spans) > 1:
                parts = _multipart(fields, spans, held.size)
            else:
                fields["Content-Range"] = spans[0].content_range(held.size)
                parts = [BodyPart(spans[0].start, spans[0].stop)]
            return await send_parts(context, exchange, held, fields, parts, status=206)


async def _handed(context: Context, exchange: Exchange, named: ObjectName) -> HttpResponse:
    """Hand over the object's open file. 204 if not all of the object lies in it, or it is unknown."""
    held = None if named.params else context.cache.peek(named.url)
    if held is None:
        return HttpResponse(204)
    with held:
        if exchange.request.headers["wds-hand"] == "bad":
            held.distrust()
        if held.size is None or not held.whole or held.ready(0, held.size) < held.size:
            return HttpResponse(204)
        try:
            own = open_anew(held) if context.read_only is None else context.read_only.open(held)
        except OSError as exn:
            logger.info("%s is not handed over, but sent: %s", redact(named.url), exn)
            return HttpResponse(204)
        if not hand(exchange.request, own, held.size, fields_of(held, named.api)):
            return HttpResponse(204)
        held.served(held.size)
        exchange.api, exchange.sent = "handed", held.size
    context.plans.heard(exchange.client, named.url)
    context.orders.heard(named.url)
    log_handed(exchange.request.connection, named.url)
    return HttpResponse(sent=True)


@dataclass(frozen=True, slots=True)
class BodyPart:
    """Bytes ``[start, stop)`` of an object (to its end if ``stop`` is None) in an answer, between ``before`` and
    ``after``."""

    start: int
    stop: int | None
    before: bytes = b""
    after: bytes = b""


def _multipart(fields: dict[str, str], spans: Sequence[ByteRange], size: int) -> list[BodyPart]:
    """Return several spans of an object as ``multipart/byteranges`` (RFC 9110 §14.6), with its type in ``fields``."""
    boundary = secrets.token_hex(16)
    parts = []
    for span in spans:
        lines = f"Content-Type: {fields['Content-Type']}\r\nContent-Range: {span.content_range(size)}\r\n\r\n"
        before = f"\r\n--{boundary}\r\n{lines}".encode("utf-8", "surrogateescape")
        after = f"\r\n--{boundary}--\r\n".encode() if span is spans[-1] else b""
        parts.append(BodyPart(span.start, span.stop, before, after))
    fields["Content-Type"] = f"multipart/byteranges; boundary={boundary}"
    return parts


async def _member(
    context: Context, exchange: Exchange, named: ObjectName, held: CachedObject, fields: dict[str, str]
) -> HttpResponse:
    """Send a member of an archive, without the archive's checksum and ETag."""
    if exchange.request.headers.get("range"):
        raise Refusal(501, "ranges of archived content are not served; read the archive's own range", "not-here")
    span = await context.archives.member(held, named.params["archpath"], context.call)
    kept = {name: value for name, value in fields.items() if name in ("Last-Modified", "Ais-Version")}
    kept |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "none"}
    return await send_parts(context, exchange, held, kept, [BodyPart(span.start, span.stop)])


async def send_parts(
    context: Context,
    exchange: Exchange,
    held: CachedObject,
    fields: dict[str, str],
    parts: Sequence[BodyPart],
    *,
    status: int = 200,
    urgency: Urgency = Urgency.DEMAND,
    pace: Pace | None = None,
) -> HttpResponse:
    """Send ``parts`` of an object, after ``fields`` and their length. ``pace`` waits until so many bytes may go; by
    default as the client's limits have it."""
    request, length = exchange.request, None
    if parts[-1].stop is not None:
        length = sum(len(part.before) + (part.stop or 0) - part.start + len(part.after) for part in parts)
    if request.method == "HEAD" or length == 0:
        return HttpResponse(status, headers=fields if length is None else {**fields, "Content-Length": str(length)})
    body, delivery = _body(context, held, parts[0], urgency), None
    try:
        await body.begin()  # until the first piece is there, what goes wrong has a status of its own
        pace, timeout_s = pace or context.rate_limit.of(exchange.client), context.config.send_timeout_s
        delivery = Delivery(request, status, fields, length, call=context.call, timeout_s=timeout_s, pace=pace)
        request.connection.sending = True
        exchange.first_byte_at = asyncio.get_running_loop().time()
        at = parts[0].start
        try:
            for part in parts:
                if part is not parts[0]:
                    await body.aclose()
                    body = _body(context, held, part, urgency)
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
            _broken(context, exchange, held, at + delivery.sent, exn)
            if not isinstance(exn, Exception):
                raise
    finally:
        if delivery is not None:
            exchange.sent = delivery.sent
            delivery.close()
        await body.aclose()
    return HttpResponse(status, sent=True)


def _body(context: Context, held: CachedObject, part: BodyPart, urgency: Urgency) -> BodyWriter:
    folder = context.config.folder
    return BodyWriter(held, part.start, part.stop, call=context.call, spill_folder=folder, urgency=urgency)


def _broken(context: Context, exchange: Exchange, held: CachedObject, at: int, exn: BaseException) -> None:
    """End the connection within the body, and log why if it is not the client's doing."""
    exchange.request.connection.cut()
    shown, who = redact(held.url), exchange.client
    if isinstance(exn, WdsError):
        context.meters.failed(held.url, exn, who)
        logger.warning("%s: broken off at byte %d for %s: %s", shown, at, who, exn)
    elif isinstance(exn, TimeoutError):
        context.meters.refused("slow-client", who)
        limit_s = context.config.send_timeout_s
        logger.info("%s: %s took nothing for %.0f s (send_timeout_s): let go at byte %d", shown, who, limit_s, at)
    elif isinstance(exn, ConnectionAbortedError):
        logger.error("%s: broken off at byte %d for %s: %s", shown, at, who, exn)
    elif isinstance(exn, (ConnectionError, asyncio.CancelledError)):
        logger.debug("%s: %s left at byte %d", shown, who, at)
    else:
        logger.error("%s: broken off at byte %d for %s", shown, at, who, exc_info=exn)
