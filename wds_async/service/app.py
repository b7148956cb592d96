"""Routing of requests: who asks, which route answers, and the form of a refusal for that kind of client.

===========================================  ==========================================================
``GET|HEAD /v1/objects/B/O?provider=``       an object, in AIStore's words (``/gs/B/O``, ``/az/…``, ``/ais/…`` too)
``GET|HEAD /s3/B/O``, ``/s3/B``, ``/s3``     objects, listings and buckets for clients of S3
``GET|HEAD /url/<escaped URL>``              any URL that is allowed
``GET|HEAD /v1/buckets/B``, ``/v1/buckets``  listings in AIStore's words
``GET /v1/health``, ``/v1/daemon?what=smap`` what AIStore's clients ask a cluster
``POST /v1/plan``, ``DELETE /v1/plan/NAME``  what a job will read
``GET /metrics /v1/stats /healthz /readyz``  for operators
===========================================  ==========================================================

Requests that would write are refused (405).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from wds_async.errors import StorageError
from wds_async.redact import redact
from wds_async.service import buckets, objects, s3api
from wds_async.service.context import Context, Exchange
from wds_async.service.http_messages import HttpRequest, HttpResponse, RequestConnection, json_response
from wds_async.service.names import SCHEMES, ObjectName, bucket_of, name_of
from wds_async.service.pages import CONTENT_TYPE, metrics_page, snapshot
from wds_async.service.refusals import Refusal, as_json, as_xml, refusal_of

__all__ = ["malformed", "serve"]

logger = logging.getLogger("wds_async")

_READING = frozenset({"GET", "HEAD"})
_OPEN = frozenset({"/healthz", "/readyz", "/v1/health", "/metrics"})
"""Answered without a token, and by any name: kubelets and Prometheus have none, and ask by an address."""
_APIS = {"s3": "s3", "url": "url", "gs": "short", "az": "short", "ais": "short"}
_V1 = {"objects": "ais", "buckets": "bucket", "plan": "plan"}
_ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_AUDITED = frozenset({400, 401, 403, 405, 414, 429})
"""Refusals that are the client's doing: no right, a malformed name, a write, too much."""
_NAMES, _NAME_BYTES = 4096, 1024  # most names that are kept, and the longest of them
_CLIENT_CLOSED = 499
"""Counted for a client that left before its answer was over (nginx's number for it)."""


async def serve(context: Context, request: HttpRequest) -> None:
    """Answer ``request`` and count the answer."""
    loop = asyncio.get_running_loop()
    request.keep_alive = request.keep_alive and not context.readiness.draining
    host, path, query = _target(request)
    exchange, began, status = Exchange(request, _api(path)), loop.time(), _CLIENT_CLOSED
    response: HttpResponse | None = None
    try:
        try:
            response = await _answer(context, exchange, host, path, query)
        except (ConnectionResetError, BrokenPipeError):
            raise
        except Exception as exn:
            response = _refused(context, exchange, path, exn)
        if not response.sent:
            request.keep_alive = request.keep_alive and request.complete
            request.connection.write(response.to(request))
            await request.connection.drained()
        status = response.status
    except (ConnectionResetError, BrokenPipeError):  # the client has gone
        pass
    finally:
        first, count = exchange.first_byte_at or loop.time(), exchange.sent
        if response is not None and not response.sent and status != _CLIENT_CLOSED:
            count = len(response.body)
        context.meters.served(exchange.api, status, first - began, count, exchange.url, exchange.client)


def malformed(context: Context, connection: RequestConnection, status: int, why: str) -> HttpResponse:
    """Return the answer to bytes that are no request. Only its kind is logged: the bytes may hold a secret."""
    reason = "head" if status == 431 else "malformed"
    context.meters.refused(reason)
    refusal = Refusal(status, f"a malformed request: {why}", reason)
    context.access.refused(refusal, peer="" if connection.local else connection.address)
    return HttpResponse(status, text=as_json(refusal, "", ""), content_type="application/json")


async def _answer(context: Context, exchange: Exchange, host: str, path: str, query: str) -> HttpResponse:
    request, api = exchange.request, exchange.api
    if path not in _OPEN:
        context.access.check_site(request.headers, host, local=request.connection.local)
    if request.connection.reserved and path not in _OPEN:
        words = "all connections are taken (clients; address_connections for those of one address)"
        raise Refusal(503, words, "clients", retry_after_s=1)
    if api == "s3" and query:
        s3api.check_query(request.query)
    planning = api == "plan" and request.method in ("POST", "DELETE")
    if request.method not in _READING and not planning:
        words = f"{request.method}: this service reads; write to the store itself"
        raise Refusal(405, words, "method", headers={"Allow": "GET, HEAD"})
    if path in _OPEN:
        return await _PAGES[path](context, exchange)
    _authenticate(context, exchange)
    with context.in_flight.one(exchange.client):
        if planning:
            return await _plan(context, exchange)
        if (page := _PAGES.get(path)) is not None:
            return await page(context, exchange)
        return await _read(context, exchange, path, query)


def _authenticate(context: Context, exchange: Exchange) -> None:
    """Name the client and its tenant. Refusal (401) without a valid token."""
    request, connection = exchange.request, exchange.request.connection
    exchange.client = context.access.client(
        request.headers,
        "" if connection.local else connection.address,
        local=connection.local,
        query=request.query if context.config.tokens else {},
        certificate=connection.certificate,
    )


async def _read(context: Context, exchange: Exchange, path: str, query: str) -> HttpResponse:
    request, api = exchange.request, exchange.api
    if api == "s3" and path.rstrip("/") == "/s3":
        return await s3api.answer_buckets(context)
    if api == "bucket":
        return await buckets.answer_bucket(context, request, bucket_of(path, query, context.config))
    if api == "s3" and "/" not in path.removeprefix("/s3/").rstrip("/"):
        return await s3api.answer_bucket(context, request, bucket_of(path, query, context.config))
    exchange.named = named = await _named(context, path, query)
    if request.method == "GET":
        context.plans.heard(exchange.client, named.url)
    return await objects.answer(context, exchange, named)


async def _named(context: Context, path: str, query: str) -> ObjectName:
    """Return the object at ``path``, which may be read."""
    names = context.names
    named = names.get((path, query))
    if named is None:
        named = name_of(path, query, context.config)
        if len(path) + len(query) <= _NAME_BYTES:
            if len(names) >= _NAMES:
                names.clear()
            names[path, query] = named
    if not context.allowed.known(named):
        await context.allowed.admit(named)
    return named


async def _plan(context: Context, exchange: Exchange) -> HttpResponse:
    request = exchange.request
    if request.method == "DELETE":  # a plan belongs to its client, whatever name the path has
        context.plans.drop(exchange.client)
        return HttpResponse(status=204)
    try:
        message = json.loads(await request.read(context.config.header_timeout_s))
    except (ValueError, RecursionError):
        raise Refusal(400, 'a plan is JSON: {"shards": [URL, …], "ahead": 8, "position": 0}', "plan") from None
    process = request.connection.process
    bound = process if process > 0 else None
    return json_response(await context.plans.answer(message, client=exchange.client, bound=bound))


# -- pages ------------------------------------------------------------------------------------------------


async def _alive(context: Context, exchange: Exchange) -> HttpResponse:
    return HttpResponse(text="alive\n")


async def _ready(context: Context, exchange: Exchange) -> HttpResponse:
    why = context.readiness.why_not
    return HttpResponse(text=f"{why or 'ready'}\n", status=503 if why else 200)


async def _health(context: Context, exchange: Exchange) -> HttpResponse:
    if why := context.readiness.why_not:
        raise Refusal(503, why, "not-ready", retry_after_s=1)
    return HttpResponse()


async def _metrics(context: Context, exchange: Exchange) -> HttpResponse:
    return HttpResponse(body=metrics_page(context), headers={"Content-Type": CONTENT_TYPE})


async def _stats(context: Context, exchange: Exchange) -> HttpResponse:
    return json_response(snapshot(context, context.access.sees(exchange.client)))


_PAGES: dict[str, Callable[[Context, Exchange], Awaitable[HttpResponse]]] = {
    "/healthz": _alive,
    "/readyz": _ready,
    "/v1/health": _health,
    "/v1/daemon": buckets.answer_daemon,
    "/v1/cluster": buckets.answer_daemon,
    "/v1/buckets": buckets.answer_buckets,
    "/v1/stats": _stats,
    "/metrics": _metrics,
}


# -- refusals ---------------------------------------------------------------------------------------------


def _refused(context: Context, exchange: Exchange, path: str, exn: Exception) -> HttpResponse:
    """Return the answer that tells why there is no other; count and log it."""
    request, connection, refusal = exchange.request, exchange.request.connection, refusal_of(exn)
    context.meters.refused(refusal.reason, exchange.client)
    if refusal.status == 500:
        logger.error("%s %s failed", request.method, redact(path), exc_info=exn)
    elif isinstance(exn, StorageError) and refusal.status != 404:
        context.meters.failed(exchange.url, exn, exchange.client)
        logger.warning("%s", refusal.message)
    if refusal.status in _AUDITED:
        peer = "" if connection.local else connection.address
        context.access.refused(refusal, peer=peer, client=str(exchange.client), method=request.method, path=path)
    named = exchange.named
    if named is not None and refusal.status == 404 and named.bucket:  # AIStore's clients look for this name
        scheme = SCHEMES.get(named.provider, named.provider)
        words = f"{scheme}://{named.bucket}/{named.object} does not exist: {refusal.message}"
        refusal = replace(refusal, message=words)
    return _shown(request, exchange.api, path, refusal)


def _shown(request: HttpRequest, api: str, path: str, refusal: Refusal) -> HttpResponse:
    fields = refusal.fields
    if request.method == "HEAD":
        if api != "s3":
            fields["Hdr-Error"] = as_json(refusal, request.method, path)
        return HttpResponse(status=refusal.status, headers=fields)
    if api == "s3":
        text, content_type = as_xml(refusal, path), "application/xml"
    else:
        text, content_type = as_json(refusal, request.method, path), "application/json"
    return HttpResponse(status=refusal.status, text=text, headers=fields, content_type=content_type)


def _target(request: HttpRequest) -> tuple[str, str, str]:
    """Return the host that a request names, its path and its query as they came. For a whole URL as target the path
    counts, because this is no proxy, and its host precedes ``Host`` (RFC 9112 §3.2.2)."""
    target, host = request.target, request.headers.get("Host", "")
    if not target.startswith("/") and (absolute := _ABSOLUTE.match(target)):
        target, host = target[absolute.end() :] or "/", absolute[1]
    path, _, query = target.partition("?")
    return host, path, query


def _api(path: str) -> str:
    """Return the label by which requests for ``path`` are counted and answered."""
    first, _, rest = path[1:].partition("/")
    if first == "v1":
        second, _, more = rest.partition("/")
        return _V1.get(second, "admin") if more or second == "plan" else "admin"
    return _APIS.get(first, "admin")
