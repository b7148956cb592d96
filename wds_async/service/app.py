"""From a request to its answer: who asks, what for, which room answers, and how a refusal looks to that kind of client.

===========================================  ==========================================================
``GET|HEAD /v1/objects/B/O?provider=``       an object, in AIStore's words (``/gs/B/O``, ``/az/…``, ``/ais/…`` too)
``GET|HEAD /s3/B/O``, ``/s3/B``, ``/s3``     objects, listings and buckets for clients of S3
``GET|HEAD /url/<escaped URL>``              any URL that is allowed
``GET|HEAD /v1/buckets/B``, ``/v1/buckets``  listings in AIStore's words
``GET /v1/health``, ``/v1/daemon?what=smap`` what AIStore's clients ask a cluster
``POST /v1/plan``, ``DELETE /v1/plan/NAME``  what a job will read
``GET /metrics /v1/stats /healthz /readyz``  for operators
===========================================  ==========================================================

What writes is refused (405).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wds_async.errors import StorageError
from wds_async.redact import redact
from wds_async.service import buckets, objects, s3api
from wds_async.service.http_messages import HttpRequest, HttpResponse, json_response
from wds_async.service.metrics import CONTENT_TYPE
from wds_async.service.names import SCHEMES, ObjectName, bucket_of, name_of
from wds_async.service.objects import Exchange
from wds_async.service.refusals import Refusal, as_json, as_xml, refusal_of

if TYPE_CHECKING:
    from wds_async.service.http_server import ClientConnection
    from wds_async.service.running import Service

__all__ = ["Router"]

logger = logging.getLogger("wds_async")
_READING = frozenset({"GET", "HEAD"})
_OPEN = frozenset({"/healthz", "/readyz", "/v1/health", "/metrics"})
"""Answered without a token, and by any name: kubelets and Prometheus have none, and ask by an address."""
_APIS = {"s3": "s3", "url": "url", "gs": "short", "az": "short", "ais": "short"}
_V1 = {"objects": "ais", "buckets": "bucket", "plan": "plan"}
_ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_AUDITED = frozenset({400, 401, 403, 405, 414, 429})
"""What of the client's own doing is written down: a right that it has not, a name that is none, a write, too much."""
_NAMES, _NAME_BYTES = 4096, 1024  # that are remembered, and the longest of them
_LEFT = 499
"""What is counted where the client went before its answer was over (nginx's number for it)."""
_Handler = Callable[[HttpRequest, str, str], Awaitable[HttpResponse]]


class Router:
    """Answers requests of one service; its connections call it with each."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._names: dict[tuple[str, str], ObjectName] = {}
        self._named_by = service.config
        self._pages: dict[str, _Handler] = {
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/v1/health": self._health,
            "/v1/daemon": self._daemon,
            "/v1/cluster": self._daemon,
            "/v1/buckets": self._buckets,
            "/metrics": self._metrics,
        }

    async def __call__(self, request: HttpRequest) -> None:
        """Answer ``request``, and count the answer."""
        loop = asyncio.get_running_loop()
        request.keep_alive = request.keep_alive and not self._service.draining
        host, path, query = _target(request)
        asking, began, status, response = Exchange(request, _api(path)), loop.time(), _LEFT, None
        try:
            try:
                response = await self._answered(asking, host, path, query)
            except (ConnectionResetError, BrokenPipeError):
                raise
            except Exception as exn:
                response = self._refused(asking, path, exn)
            if not response.sent:
                request.keep_alive = request.keep_alive and request.complete
                request.connection.write(response.to(request))
                await request.connection.drained()
            status = response.status
        except (ConnectionResetError, BrokenPipeError):  # the client has gone
            pass
        finally:
            first, count = asking.first_byte_at or loop.time(), asking.sent
            if response is not None and not response.sent and status != _LEFT:
                count = len(response.body)
            self._service.meters.served(asking.api, status, first - began, count, asking.url, asking.client)

    def malformed(self, connection: ClientConnection, status: int, why: str) -> HttpResponse:
        """Return the answer to what is no request. It is counted, and logged by its kind: it may hold a secret."""
        reason = "head" if status == 431 else "malformed"
        self._service.meters.refused(reason)
        refusal = Refusal(status, f"a request that is none: {why}", reason)
        self._service.access.refused(refusal, peer="" if connection.local else connection.address)
        return HttpResponse(status, text=as_json(refusal, "", ""), content_type="application/json")

    async def _answered(self, asking: Exchange, host: str, path: str, query: str) -> HttpResponse:
        request, api = asking.request, asking.api
        if path not in _OPEN:
            self._service.access.check_site(request.headers, host, local=request.connection.local)
        if request.connection.reserved and path not in _OPEN:
            words = "all places for connections are taken (clients; address_connections for those of one address)"
            raise Refusal(503, words, "clients", retry_after_s=1)
        if api == "s3" and query:
            s3api.check_query(request.query)
        planning = api == "plan" and request.method in ("POST", "DELETE")
        if request.method not in _READING and not planning:
            words = f"{request.method}: this service reads; write to the store itself"
            raise Refusal(405, words, "method", headers={"Allow": "GET, HEAD"})
        if path in _OPEN:
            return await self._pages[path](request, path, query)
        self._let_in(asking)
        service = self._service
        with service.in_flight.one(asking.client):
            if planning:
                return await self._plan(asking)
            if path == "/v1/stats":
                return json_response(service.snapshot(service.access.sees(asking.client)))
            if (page := self._pages.get(path)) is not None:
                return await page(request, path, query)
            return await self._read(asking, path, query, api)

    def _let_in(self, asking: Exchange) -> None:
        """Name the client and its tenant. Refusal (401) for who is not let in."""
        request, service = asking.request, self._service
        connection = request.connection
        query = request.query if service.config.tokens else {}
        peer, certificate = "" if connection.local else connection.address, connection.certificate
        asking.client = service.access.client(
            request.headers, peer, local=connection.local, query=query, certificate=certificate
        )

    async def _read(self, asking: Exchange, path: str, query: str, api: str) -> HttpResponse:
        service, request = self._service, asking.request
        if api == "s3" and path.rstrip("/") == "/s3":
            return await s3api.answer_buckets(service)
        if api == "bucket":
            return await buckets.answer_bucket(service, request, bucket_of(path, query, service.config))
        if api == "s3" and "/" not in path.removeprefix("/s3/").rstrip("/"):
            return await s3api.answer_bucket(service, request, bucket_of(path, query, service.config))
        asking.named = named = await self._named(path, query)
        if request.method == "GET":
            service.plans.heard(asking.client, named.url)
        return await objects.answer(service, asking, named)

    async def _named(self, path: str, query: str) -> ObjectName:
        """The object at ``path``, which may be read. Names are remembered: parsing one costs half of a request."""
        allowed, target = self._service.allowed, (path, query)
        if self._named_by is not self._service.config:  # its buckets may be others
            self._named_by = self._service.config
            self._names.clear()
        named = self._names.get(target)
        if named is None:
            named = name_of(path, query, self._service.config)
            if len(path) + len(query) <= _NAME_BYTES:
                if len(self._names) >= _NAMES:
                    self._names.clear()
                self._names[target] = named
        if not allowed.known(named):
            await allowed.admit(named)
        return named

    async def _plan(self, asking: Exchange) -> HttpResponse:
        plans, request = self._service.plans, asking.request
        if request.method == "DELETE":
            # A plan belongs to who announced it: the name in the path is only that of a client that says its own.
            plans.drop(asking.client)
            return HttpResponse(status=204)
        try:
            said = json.loads(await objects.body_of(self._service, request))
        except (ValueError, RecursionError):
            raise Refusal(400, 'a plan is JSON: {"shards": [URL, …], "ahead": 8, "position": 0}', "plan") from None
        process = request.connection.process
        bound = process if process > 0 else None
        return json_response(await plans.answer(said, client=asking.client, bound=bound))

    # -- pages --------------------------------------------------------------------------------------------

    async def _alive(self, request: HttpRequest, path: str, query: str) -> HttpResponse:
        return HttpResponse(text="alive\n")

    async def _ready(self, request: HttpRequest, path: str, query: str) -> HttpResponse:
        why = self._service.why_not_ready()
        return HttpResponse(text=f"{why or 'ready'}\n", status=503 if why else 200)

    async def _health(self, request: HttpRequest, path: str, query: str) -> HttpResponse:
        why = self._service.why_not_ready()
        if why:
            raise Refusal(503, why, "not-ready", retry_after_s=1)
        return HttpResponse()

    async def _daemon(self, request: HttpRequest, path: str, query: str) -> HttpResponse:
        return await buckets.answer_daemon(self._service, request)

    async def _buckets(self, request: HttpRequest, path: str, query: str) -> HttpResponse:
        return await buckets.answer_buckets(self._service, request)

    async def _metrics(self, request: HttpRequest, path: str, query: str) -> HttpResponse:
        body = self._service.meters.text(self._service)
        return HttpResponse(body=body, headers={"Content-Type": CONTENT_TYPE})

    # -- refusals -----------------------------------------------------------------------------------------

    def _refused(self, asking: Exchange, path: str, exn: Exception) -> HttpResponse:
        """The answer that says why there is none; counted, and written down."""
        service, request, refusal = self._service, asking.request, refusal_of(exn)
        service.meters.refused(refusal.reason, asking.client)
        if refusal.status == 500:
            logger.error("%s %s failed", request.method, redact(path), exc_info=exn)
        elif isinstance(exn, StorageError) and refusal.status != 404:
            service.meters.failed(asking.url, exn, asking.client)
            logger.warning("%s", refusal.message)
        if refusal.status in _AUDITED:
            self._audit(asking, refusal, path)
        return _shown(request, asking.api, path, _named(refusal, asking.named))

    def _audit(self, asking: Exchange, refusal: Refusal, path: str) -> None:
        address = "" if asking.request.connection.local else asking.request.connection.address
        known: dict[str, Any] = {"peer": address, "client": str(asking.client), "method": asking.request.method}
        self._service.access.refused(refusal, **known, path=path)


def _named(refusal: Refusal, named: ObjectName | None) -> Refusal:
    """``refusal`` with the object's name in AIStore's words, by which its clients tell a missing object from others."""
    if named is None or refusal.status != 404 or not named.bucket:
        return refusal
    scheme = SCHEMES.get(named.provider, named.provider)
    words = f"{scheme}://{named.bucket}/{named.object} does not exist: {refusal.message}"
    return replace(refusal, message=words)


def _shown(request: HttpRequest, api: str, path: str, refusal: Refusal) -> HttpResponse:
    fields = refusal.fields
    if request.method == "HEAD":
        if api != "s3":
            fields["Hdr-Error"] = as_json(refusal, request.method, path)
        return HttpResponse(status=refusal.status, headers=fields)
    if api == "s3":
        text = as_xml(refusal, path)
        return HttpResponse(status=refusal.status, text=text, headers=fields, content_type="application/xml")
    text = as_json(refusal, request.method, path)
    return HttpResponse(status=refusal.status, text=text, headers=fields, content_type="application/json")


def _target(request: HttpRequest) -> tuple[str, str, str]:
    """Return the host that a request names, and path and query as they came. A whole URL as a target is read as its
    path, because this is no proxy, and its host goes before ``Host`` (RFC 9112 §3.2.2)."""
    target, host = request.target, request.headers.get("Host", "")
    if not target.startswith("/") and (found := _ABSOLUTE.match(target)):
        target, host = target[found.end() :] or "/", found[1]
    path, _, query = target.partition("?")
    return host, path, query


def _api(path: str) -> str:
    """By which name requests for ``path`` are counted and answered."""
    first, _, rest = path[1:].partition("/")
    if first == "v1":
        second, _, more = rest.partition("/")
        return _V1.get(second, "admin") if more or second == "plan" else "admin"
    return _APIS.get(first, "admin")
