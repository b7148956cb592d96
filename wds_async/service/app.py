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
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from wds_async.errors import StorageError
from wds_async.redact import redact
from wds_async.service import buckets, objects, s3api
from wds_async.service.access import Access
from wds_async.service.handing import credentials
from wds_async.service.meters import CONTENT_TYPE, Meters
from wds_async.service.names import SCHEMES, Named, bucket_of, name_of
from wds_async.service.objects import SERVER, Asking
from wds_async.service.refusals import Refusal, as_json, as_xml, refusal_of

if TYPE_CHECKING:
    from wds_async.service.running import Service

__all__ = ["Front", "HttpLog"]

logger = logging.getLogger("wds_async")

_READING = frozenset({"GET", "HEAD"})
_OPEN = frozenset({"/healthz", "/readyz", "/v1/health", "/metrics"})
"""Answered without a token: kubelets and Prometheus have none."""
_APIS = {"s3": "s3", "url": "url", "gs": "short", "az": "short", "ais": "short"}
_V1 = {"objects": "ais", "buckets": "bucket", "plan": "plan"}
_ABSOLUTE = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_AUDITED = frozenset({400, 401, 403, 405, 414, 429})
"""What of the client's own doing is written down: a right that it has not, a name that is none, a write, too much."""
_LEFT = 499
"""What is counted where the client went before its answer was over (nginx's number for it)."""

_Handler = Callable[[web.BaseRequest, str, str], Awaitable[web.StreamResponse]]


class Front:
    """Answers requests of one service; ``await front(request)`` is what `aiohttp.web.Server` calls."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pages: dict[str, _Handler] = {
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/v1/health": self._health,
            "/v1/daemon": self._daemon,
            "/v1/cluster": self._daemon,
            "/v1/stats": self._stats,
            "/v1/buckets": self._buckets,
            "/metrics": self._metrics,
        }

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        path, query = _target(request)
        api, began, status = _api(path), loop.time(), _LEFT
        asking = Asking(request)
        try:
            response = await self._answered(asking, path, query, api)
            status = response.status
        except (ConnectionResetError, BrokenPipeError):  # the client has gone: this answer goes nowhere
            response = web.Response(status=_LEFT)
        except Exception as exn:
            response = self._refused(asking, api, path, exn)
            status = response.status
        finally:
            first, count = asking.first_byte_at or loop.time(), asking.sent
            if not count and status != _LEFT and isinstance(response, web.Response):
                count = response.content_length or 0
            self._service.meters.served(api, status, first - began, count, asking.url, asking.client)
        if not response.prepared:
            response.headers["Server"] = SERVER
        if self._service.draining:
            response.force_close()
        return response

    async def _answered(self, asking: Asking, path: str, query: str, api: str) -> web.StreamResponse:
        request = asking.request
        planning = api == "plan" and request.method in ("POST", "DELETE")
        if request.method not in _READING and not planning:
            words = f"{request.method}: this service reads; write to the store itself"
            raise Refusal(405, words, "method", headers={"Allow": "GET, HEAD"})
        if path in _OPEN:
            return await self._pages[path](request, path, query)
        self._let_in(asking)
        with self._service.underway.one(asking.client):
            if planning:
                return await self._plan(asking)
            if (page := self._pages.get(path)) is not None:
                return await page(request, path, query)
            return await self._read(asking, path, query, api)

    def _let_in(self, asking: Asking) -> None:
        """Name the client and its tenant. Refusal (401) for who is not let in."""
        request, transport = asking.request, asking.request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        fields = {name.lower(): value for name, value in request.headers.items()}
        peer, certificate = transport.get_extra_info("peername"), transport.get_extra_info("peercert")
        local = not isinstance(peer, tuple)
        said: dict[str, Any] = {"local": local, "query": request.query, "certificate": certificate}
        who = self._service.access.who(fields, "" if local else peer[0], **said)
        asking.client, asking.tenant = who.client, who.tenant

    async def _read(self, asking: Asking, path: str, query: str, api: str) -> web.StreamResponse:
        service, request = self._service, asking.request
        if api == "s3" and path.rstrip("/") == "/s3":
            return await s3api.answer_buckets(service)
        if api == "bucket":
            return await buckets.answer_bucket(service, request, bucket_of(path, query, service.config))
        if api == "s3" and "/" not in path.removeprefix("/s3/").rstrip("/"):
            return await s3api.answer_bucket(service, request, bucket_of(path, query, service.config))
        named: Named = name_of(path, query, service.config)
        asking.named = named
        if not service.allowed.known(named):
            await service.allowed.admit(named)
        if request.method == "GET":
            service.plans.heard(asking.client, named.url)
        return await objects.answer(service, asking, named)

    async def _plan(self, asking: Asking) -> web.Response:
        plans, request = self._service.plans, asking.request
        if request.method == "DELETE":
            # A plan belongs to who announced it: the name in the path is only that of a client that says its own.
            plans.drop(asking.client)
            return web.Response(status=204)
        try:
            said = json.loads(await objects.body_of(self._service, request))
        except (ValueError, RecursionError):
            raise Refusal(400, 'a plan is JSON: {"shards": [URL, …], "ahead": 8, "position": 0}', "plan") from None
        bound = _process(request)
        return web.json_response(await plans.answer(said, client=asking.client, tenant=asking.tenant, bound=bound))

    # -- pages --------------------------------------------------------------------------------------------

    async def _alive(self, request: web.BaseRequest, path: str, query: str) -> web.Response:
        return web.Response(text="alive\n")

    async def _ready(self, request: web.BaseRequest, path: str, query: str) -> web.Response:
        why = self._service.why_not_ready()
        return web.Response(text=f"{why or 'ready'}\n", status=503 if why else 200)

    async def _health(self, request: web.BaseRequest, path: str, query: str) -> web.Response:
        why = self._service.why_not_ready()
        if why:
            raise Refusal(503, why, "not-ready", retry_after_s=1)
        return web.Response()

    async def _daemon(self, request: web.BaseRequest, path: str, query: str) -> web.Response:
        return await buckets.answer_daemon(self._service, request)

    async def _buckets(self, request: web.BaseRequest, path: str, query: str) -> web.Response:
        return await buckets.answer_buckets(self._service, request)

    async def _stats(self, request: web.BaseRequest, path: str, query: str) -> web.Response:
        return web.json_response(self._service.snapshot())

    async def _metrics(self, request: web.BaseRequest, path: str, query: str) -> web.Response:
        body = self._service.meters.text(self._service)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    # -- refusals -----------------------------------------------------------------------------------------

    def _refused(self, asking: Asking, api: str, path: str, exn: Exception) -> web.StreamResponse:
        """The answer that says why there is none; counted, and written down."""
        if isinstance(exn, web.HTTPException):
            exn = Refusal(exn.status, exn.text or exn.reason, "body")
        service, request, refusal = self._service, asking.request, refusal_of(exn)
        service.meters.refused(refusal.reason)
        if refusal.status == 500:
            logger.error("%s %s failed", request.method, redact(path), exc_info=exn)
        elif isinstance(exn, StorageError) and refusal.status != 404:
            service.meters.failed(asking.url, exn)
            logger.warning("%s", refusal.message)
        if refusal.status in _AUDITED:
            self._audit(asking, refusal, path)
        return _shown(request, api, path, _named(refusal, asking.named))

    def _audit(self, asking: Asking, refusal: Refusal, path: str) -> None:
        request = asking.request
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        address = peer[0] if isinstance(peer, tuple) else ""
        known: dict[str, Any] = {"peer": address, "client": asking.client, "method": request.method}
        self._service.access.refused(refusal, **known, path=path)


class HttpLog(logging.LoggerAdapter[logging.Logger]):
    """The log of aiohttp's server. It writes each request that is none down with a traceback, and with what was sent,
    which may hold a secret; here that is a refusal like others, whose line names the sender and the kind of mistake."""

    def __init__(self, meters: Meters, access: Access) -> None:
        super().__init__(logger, {})
        self._meters, self._access = meters, access

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            self._meters.refused("malformed")
            refusal = Refusal(400, f"a request that is none: {type(exc_info).__name__}", "malformed")
            self._access.refused(refusal, peer=str(args[0] or "") if args else "")
        else:
            self.error(msg, *args, exc_info=exc_info, **kwargs)


def _named(refusal: Refusal, named: Named | None) -> Refusal:
    """``refusal`` with the object's name in AIStore's words, by which its clients tell a missing object from others."""
    if named is None or refusal.status != 404 or not named.bucket:
        return refusal
    scheme = SCHEMES.get(named.provider, named.provider)
    words = f"{scheme}://{named.bucket}/{named.object} does not exist: {refusal.message}"
    return replace(refusal, message=words)


def _shown(request: web.BaseRequest, api: str, path: str, refusal: Refusal) -> web.Response:
    fields = refusal.fields
    if request.method == "HEAD":
        if api != "s3":
            fields["Hdr-Error"] = as_json(refusal, request.method, path)
        return web.Response(status=refusal.status, headers=fields)
    if api == "s3":
        text = as_xml(refusal, path)
        return web.Response(status=refusal.status, text=text, headers=fields, content_type="application/xml")
    text = as_json(refusal, request.method, path)
    return web.Response(status=refusal.status, text=text, headers=fields, content_type="application/json")


def _process(request: web.BaseRequest) -> int | None:
    """Which process of this host asks, by the Unix socket; None for others, and where the kernel does not tell."""
    own = request.transport.get_extra_info("socket") if request.transport is not None else None
    if own is None or own.family != getattr(socket, "AF_UNIX", None):
        return None
    process = credentials(own)[0]
    return process if process > 0 else None


def _target(request: web.BaseRequest) -> tuple[str, str]:
    """Path and query as they came. A whole URL as a target (RFC 9112 §3.2.2) is its path: this is no proxy."""
    target = request.raw_path
    if not target.startswith("/"):
        target = _ABSOLUTE.sub("", target, count=1) or "/"
    path, _, query = target.partition("?")
    return path, query


def _api(path: str) -> str:
    """By which name requests for ``path`` are counted and answered."""
    first, _, rest = path[1:].partition("/")
    if first == "v1":
        second, _, more = rest.partition("/")
        return _V1.get(second, "admin") if more or second == "plan" else "admin"
    return _APIS.get(first, "admin")
