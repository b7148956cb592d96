"""Routing of requests: who asks, which route answers, and the form of a refusal for that kind of client.

docs/service.md has the table of paths.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import quote

from wds_async.errors import StorageError
from wds_async.redact import redact
from wds_async.service import buckets, objects, peer_requests, s3api
from wds_async.service.context import Context, Exchange
from wds_async.service.http_server import ClientConnection, HttpRequest, HttpResponse, json_response
from wds_async.service.names import SCHEMES, ObjectName, bucket_of, name_of
from wds_async.service.pages import CONTENT_TYPE, metrics_page, snapshot
from wds_async.service.peers import PEER_NAME_FIELD
from wds_async.service.refusals import Refusal, as_json, as_xml, refusal_of

__all__ = ["malformed", "serve"]

logger = logging.getLogger("wds_async")

_OPEN = frozenset({"/healthz", "/readyz", "/v1/health", "/metrics"})
"""Answered without a token, and by any name: kubelets and Prometheus have none, and ask by an address."""
_APIS = {"s3": "s3", "url": "url", "gs": "short", "az": "short", "ais": "short"}
_V1 = {"objects": "ais", "buckets": "bucket", "plan": "plan", "peer": "peer"}
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
    try:
        try:
            response = await _answer(context, exchange, host, path, query)
        except (ConnectionResetError, BrokenPipeError):
            raise
        except Exception as exn:
            response = _refused(context, exchange, path, exn)
        await request.send(response)
        status, exchange.sent = response.status, exchange.sent or len(response.body)
    except (ConnectionResetError, BrokenPipeError):  # the client has gone
        pass
    finally:
        first_byte_s = (exchange.first_byte_at or loop.time()) - began
        context.meters.served(exchange.api, status, first_byte_s, exchange.sent, exchange.url, exchange.client)


def malformed(context: Context, connection: ClientConnection, status: int, why: str) -> HttpResponse:
    """Return the answer to bytes that are no request. Only its kind is logged: the bytes may hold a secret."""
    reason = "head" if status == 431 else "malformed"
    context.meters.refused(reason)
    refusal = Refusal(status, f"a malformed request: {why}", reason)
    context.access.audit.refused(refusal, peer="" if connection.local else connection.address)
    return HttpResponse(status, as_json(refusal, "", ""), content_type="application/json")


async def _answer(context: Context, exchange: Exchange, host: str, path: str, query: str) -> HttpResponse:
    request, api, connection = exchange.request, exchange.api, exchange.request.connection
    page = _PAGES.get(path)
    if path not in _OPEN:
        context.access.check_site(request.headers, host, local=connection.local)
        if connection.reserved:
            words = "all connections are taken (clients; address_connections for those of one address)"
            raise Refusal(503, words, "clients", retry_after_s=1)
    if api == "s3" and query:
        s3api.check_query(request.query)
    planning = api == "plan" and request.method in ("POST", "DELETE")
    if request.method not in ("GET", "HEAD") and not planning:
        words = f"{request.method}: this service reads; write to the store itself"
        raise Refusal(405, words, "method", headers={"Allow": "GET, HEAD"})
    if page is not None and path in _OPEN:
        return await page(context, exchange)
    exchange.client = context.access.client(
        request.headers,
        exchange.peer,
        local=connection.local,
        query=request.query if context.config.tokens else {},
        certificate=connection.certificate,
    )
    with context.in_flight.one(exchange.client):
        if planning:
            return await _plan(context, exchange)
        if page is not None:
            return await page(context, exchange)
        return await _read(context, exchange, path, query)


async def _read(context: Context, exchange: Exchange, path: str, query: str) -> HttpResponse:
    request, api = exchange.request, exchange.api
    if api == "peer":
        return await peer_requests.answer(context, exchange, path)
    if api == "s3" and path.rstrip("/") == "/s3":
        return await s3api.answer_buckets(context)
    if api == "bucket":
        return await buckets.answer_bucket(context, request, bucket_of(path, query, context.config))
    if api == "s3" and "/" not in path.removeprefix("/s3/").rstrip("/"):
        return await s3api.answer_bucket(context, request, bucket_of(path, query, context.config))
    exchange.named = named = await _named(context, path, query)
    if request.method == "GET":
        context.plans.heard(exchange.client, named.url)
        context.orders.heard(named.url)
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
    if isinstance(message, dict) and "order" in message:
        if "shards" not in message:
            await context.orders.announce(message["order"], exchange.client, relayed=bool(message.get("relayed")))
            return json_response({})
        context.orders.note(message["order"], exchange.client)
    process = request.connection.process
    bound = process if process > 0 else None
    return json_response(await context.plans.answer(message, client=exchange.client, bound=bound))


# -- pages ------------------------------------------------------------------------------------------------


async def _alive(context: Context, exchange: Exchange) -> HttpResponse:
    return HttpResponse(200, "alive\n")


async def _ready(context: Context, exchange: Exchange) -> HttpResponse:
    why, name = context.readiness.why_not, context.config.peer_name
    named = {PEER_NAME_FIELD: quote(name, safe="")} if name else {}
    return HttpResponse(503 if why else 200, f"{why or 'ready'}\n", named)


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
    method, refusal = exchange.request.method, refusal_of(exn)
    context.meters.refused(refusal.reason, exchange.client)
    if refusal.status == 500:
        logger.error("%s %s failed", method, redact(path), exc_info=exn)
    elif isinstance(exn, StorageError) and refusal.status != 404:
        context.meters.failed(exchange.url, exn, exchange.client)
        logger.warning("%s", refusal.message)
    if refusal.status in _AUDITED:
        client = str(exchange.client)
        context.access.audit.refused(refusal, peer=exchange.peer, client=client, method=method, path=path)
    named = exchange.named
    if named is not None and refusal.status == 404 and named.bucket:  # AIStore's clients look for this name
        scheme = SCHEMES.get(named.provider, named.provider)
        words = f"{scheme}://{named.bucket}/{named.object} does not exist: {refusal.message}"
        refusal = replace(refusal, message=words)
    fields, of_s3 = refusal.fields, exchange.api == "s3"
    if method != "HEAD" and of_s3:
        return HttpResponse(refusal.status, as_xml(refusal, path), fields, content_type="application/xml")
    text = as_json(refusal, method, path)
    if method != "HEAD":
        return HttpResponse(refusal.status, text, fields, content_type="application/json")
    return HttpResponse(refusal.status, headers=fields if of_s3 else {**fields, "Hdr-Error": text})


def _target(request: HttpRequest) -> tuple[str, str, str]:
    """Return the host that a request names, its path and its query as they came. For a whole URL as target the path
    counts, because this is no proxy, and its host precedes ``Host`` (RFC 9112 §3.2.2)."""
    target, host = request.target, request.headers.get("host", "")
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
