"""GET and HEAD of an object: its head, whether it is wanted, which bytes of it, and these as they arrive."""

from __future__ import annotations

import asyncio
import importlib
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from wds_async.chunkcache.cache import CachedObject
from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.service.archives import member_of
from wds_async.service.body import Body
from wds_async.service.conditions import Validators, judged, range_holds
from wds_async.service.delivery import Delivery
from wds_async.service.names import Named
from wds_async.service.refusals import Refusal
from wds_async.service.spans import Span, asked, beginning

if TYPE_CHECKING:
    from wds_async.service.running import Service

__all__ = ["SERVER", "Asking", "answer", "body_of", "fields_of"]

logger = logging.getLogger("wds_async")

SERVER = f"wds-async/{importlib.import_module('wds_async').__version__}"
"""The header ``Server`` of every answer, by which our own clients know us."""

_NOT_HERE = {"etl_name": "ETLs", "etl_pipeline": "ETLs", "archregx": "matches within archives (archregx)"}


@dataclass(slots=True)
class Asking:
    """A request, who makes it, and what has become of it: ``first_byte_at`` by the loop's clock (0.0: none yet), and
    the bytes ``sent`` of a body."""

    request: web.BaseRequest
    client: str = ""
    tenant: str = ""
    named: Named | None = None
    first_byte_at: float = 0.0
    sent: int = 0

    @property
    def url(self) -> str:
        """Of the object that it asks for; "" where it is for none."""
        return "" if self.named is None else self.named.url


def fields_of(held: CachedObject, api: str) -> dict[str, str]:
    """The head's fields of an object, asked for by ``api``: all but length, range, ``Date`` and ``Server``."""
    facts = held.facts
    has = Validators.of(facts.fields, facts.identity)
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


async def body_of(service: Service, request: web.BaseRequest) -> bytes:
    """The body of a request. Refusal (408) where it does not come within the time of a head; aiohttp's own (413) for
    one of more than a mebibyte."""
    try:
        async with asyncio.timeout(service.config.header_timeout_s):
            return await request.read()
    except TimeoutError:
        words = f"the request's body did not come within {service.config.header_timeout_s:g} s (header_timeout_s)"
        raise Refusal(408, words, "body", headers={"Connection": "close"}) from None


async def answer(service: Service, asking: Asking, named: Named) -> web.StreamResponse:
    """The object, sent. Refusal, or an error of the tree, as long as nothing of it was; after that whatever breaks it
    breaks the connection, so that no client takes a part for the whole."""
    for name, what in _NOT_HERE.items():
        if named.params.get(name):
            raise Refusal(501, f"{what} are AIStore's own; this service reads objects as they are stored", "not-here")
    request = asking.request
    begins = None if request.method == "HEAD" else beginning(request.headers.get("Range"))
    client, tenant = asking.client, asking.tenant
    with await service.cache.open(named.url, client=client, tenant=tenant, start=begins) as held:
        fields = {"Server": SERVER, **fields_of(held, named.api)}
        if named.params.get("archpath"):
            return await _member(service, asking, named, held, fields)
        has = Validators(fields.get("ETag", ""), fields.get("Last-Modified", ""))
        if not judged(request.headers, has):
            return web.Response(status=304, headers=fields)
        span = _span(request, held, has)
        if span is not None and held.size is not None:
            fields["Content-Range"] = span.content_range(held.size)
        return await _sent(service, asking, held, fields, span)


def _span(request: web.BaseRequest, held: CachedObject, has: Validators) -> Span | None:
    wanted = request.headers.get("Range")
    if wanted is None or held.size is None or request.method == "HEAD":  # a range has a meaning for GET alone
        return None
    return asked(wanted, held.size) if range_holds(request.headers.get("If-Range"), has) else None


async def _member(
    service: Service, asking: Asking, named: Named, held: CachedObject, fields: dict[str, str]
) -> web.StreamResponse:
    """A member of an archive. What its head says is the member's, so the archive's checksum and ETag are not in it."""
    if asking.request.headers.get("Range"):
        raise Refusal(501, "ranges of archived content are not served; read the archive's own range", "not-here")
    span = await member_of(service, held, named.params["archpath"])
    kept = {name: value for name, value in fields.items() if name in ("Server", "Last-Modified", "Ais-Version")}
    kept |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "none"}
    return await _sent(service, asking, held, kept, span, status=200)


async def _sent(
    service: Service,
    asking: Asking,
    held: CachedObject,
    fields: dict[str, str],
    span: Span | None,
    *,
    status: int | None = None,
) -> web.StreamResponse:
    request = asking.request
    response = web.StreamResponse(status=status or (200 if span is None else 206), headers=fields)
    start, stop = (0, held.size) if span is None else (span.start, span.stop)
    if stop is None:
        if request.version >= (1, 1) and request.method == "GET":
            response.enable_chunked_encoding()
    else:
        response.content_length = stop - start
    if request.method == "HEAD" or start == stop:
        await response.prepare(request)
        return response
    body = Body(service, held, start, stop)
    async with aclosing(body):
        await body.begin()  # until the first piece is there, what goes wrong has a status of its own
        writer = await response.prepare(request)
        assert writer is not None
        asking.first_byte_at = asyncio.get_running_loop().time()
        delivery = Delivery(
            request,
            writer,
            call=service.call,
            timeout_s=service.config.send_timeout_s,
            pace=service.pace_of(asking.client),
            plain=not response.chunked,
        )
        try:
            await body.send(delivery)
            if stop is not None and delivery.sent != stop - start:
                raise ConnectionAbortedError(f"{delivery.sent} bytes of {stop - start} came")
        except BaseException as exn:
            _broken(service, asking, held, start + delivery.sent, exn)
            if isinstance(exn, Exception):
                return response
            raise
        finally:
            asking.sent = delivery.sent
            delivery.close()
    await response.write_eof()
    return response


def _broken(service: Service, asking: Asking, held: CachedObject, at: int, exn: BaseException) -> None:
    """End the connection in the middle of the body, and say why where it is not the client's own doing."""
    if asking.request.transport is not None:
        asking.request.transport.abort()
    who = asking.client
    if isinstance(exn, WdsError):
        service.meters.failed(held.url, exn)
        logger.warning("%s: broken off at byte %d for %s: %s", redact(held.url), at, who, exn)
    elif isinstance(exn, TimeoutError):
        service.meters.refused("slow-client")
        words = "%s: %s took nothing for %.0f s (send_timeout_s): let go at byte %d"
        logger.info(words, redact(held.url), who, service.config.send_timeout_s, at)
    elif isinstance(exn, ConnectionAbortedError):
        logger.error("%s: broken off at byte %d for %s: %s", redact(held.url), at, who, exn)
    elif isinstance(exn, (ConnectionError, asyncio.CancelledError)):
        logger.debug("%s: %s left at byte %d", redact(held.url), who, at)
    else:
        logger.error("%s: broken off at byte %d for %s", redact(held.url), at, who, exc_info=exn)
