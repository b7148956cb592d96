"""Buckets in AIStore's protocol: which there are, what is in one, and what a client asks about the cluster."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
from typing import Any

from wds_async.service.context import Context, Exchange
from wds_async.service.http_server import HttpRequest, HttpResponse, json_response
from wds_async.service.names import ObjectName, url_of
from wds_async.service.refusals import Refusal
from wds_async.storage.ais.urls import PROVIDERS
from wds_async.storage.stores import usual_scheme
from wds_async.urls import scheme

__all__ = ["allowed_buckets", "answer_bucket", "answer_buckets", "answer_daemon", "check_bucket"]

_NO_RECURSION, _NO_DIRS = 1 << 11, 1 << 14
_IS_FOLDER, _IS_CACHED = 1 << 8, 1 << 6
_PAGE = 1000
_MSGPACK = "application/msgpack"
_SHORT = {"name": "n", "size": "s", "flags": "f", "version": "v"}


async def answer_bucket(context: Context, request: HttpRequest, named: ObjectName) -> HttpResponse:
    """Answer ``GET /v1/buckets/B`` with AIStore's message ``list``, or HEAD for a bucket that may be read."""
    if request.method == "HEAD":
        await check_bucket(context, named)
        return HttpResponse(headers={"Ais-Bucket-Props": json.dumps({"provider": named.provider, "present": True})})
    try:
        body = json.loads(await request.read(context.config.header_timeout_s) or b"{}")
        if body.get("action", "list") != "list":
            raise Refusal(405, f"action {str(body['action'])[:40]!r}: this service reads", "method")
        message = dict(body.get("value") or {})
        flags, most = int(message.get("flags") or 0), int(message.get("pagesize") or 0)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Refusal(400, 'the body is no message of AIStore: {"action": "list", "value": {…}}', "message") from None
    prefix, after = str(message.get("prefix") or ""), message.get("continuation_token") or message.get("start_after")
    await context.allowed.check(url_of(named.url, prefix))
    most, one_level = min(_PAGE, most or _PAGE), bool(flags & _NO_RECURSION)
    page = await context.listings.page(named.url, prefix, str(after or ""), most, one_level=one_level)
    entries = [
        {"name": line.name, "size": line.size or 0, "flags": _IS_FOLDER if line.folder else _IS_CACHED}
        for line in page.lines
        if not (line.folder and flags & _NO_DIRS)
    ]
    token = page.lines[-1].name if page.more else ""
    uuid = str(message.get("uuid") or hashlib.sha256(named.url.encode()).hexdigest()[:9])
    if _MSGPACK in request.headers.get("accept", "") and (msgpack := _msgpack()) is not None:
        short = [{_SHORT[key]: value for key, value in entry.items()} for entry in entries]
        packed = msgpack.packb({"UUID": uuid, "ContinuationToken": token, "Entries": short, "Flags": 0})
        return HttpResponse(body=packed, content_type=_MSGPACK)
    shown = [{**entry, "size": str(entry["size"])} for entry in entries]  # a string in AIStore's JSON
    return json_response({"uuid": uuid, "entries": shown, "continuation_token": token, "flags": 0})


def _msgpack() -> Any:
    """Return the package msgpack, whose form AIStore's own client reads; None if it is not installed."""
    try:
        return importlib.import_module("msgpack")
    except ImportError:
        return None


async def check_bucket(context: Context, named: ObjectName) -> None:
    """Raise Refusal if nothing of a bucket may be read. A bucket of which a part is allowed exists."""
    if (named.provider, named.bucket) not in allowed_buckets(context):
        await context.allowed.check(named.url)


def allowed_buckets(context: Context) -> list[tuple[str, str]]:
    """Return ``(provider, bucket)`` of the buckets that the configuration names, sorted, without asking a store."""
    names = {("ais", name) for name, _ in context.config.buckets}
    for prefix in context.config.allow:
        name = usual_scheme(scheme(prefix))
        bucket = prefix.partition("://")[2].partition("/")[0].rpartition("@")[2]
        if name in PROVIDERS and bucket:
            names.add((PROVIDERS[name], bucket))
    return sorted(names)


async def answer_buckets(context: Context, exchange: Exchange) -> HttpResponse:
    """Answer ``GET /v1/buckets?provider=``: the buckets that the configuration names."""
    provider = exchange.request.query.get("provider", "")
    only = PROVIDERS.get(provider, provider)
    rows = [{"name": b, "provider": p} for p, b in allowed_buckets(context) if only in ("", p)]
    return json_response(rows)


async def answer_daemon(context: Context, exchange: Exchange) -> HttpResponse:
    """Answer ``GET /v1/daemon?what=smap`` (and ``/v1/cluster``): a cluster of one node, both proxy and target."""
    request = exchange.request
    what = request.query.get("what", "")
    if what == "smap":
        proxy, target = _node(request, "proxy"), _node(request, "target")
        made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        nodes = {"pmap": {"wds-async": proxy}, "tmap": {"wds-async": target}, "proxy_si": proxy}
        return json_response({**nodes, "version": "1", "uuid": "wds-async", "creation_time": made})
    if what in ("node_status", "status", "stats", "sysinfo"):
        return json_response({"snode": _node(request, "target"), "cluster_info": {}, "status": "online"})
    raise Refusal(501, f"what={what[:40]!r} is a question for a whole AIStore; here is smap", "not-here")


def _node(request: HttpRequest, kind: str) -> dict[str, Any]:
    # The address by which this client came: the only one that is known to lead here.
    host = request.headers.get("host") or "localhost"
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    digest = int.from_bytes(hashlib.sha256(host.encode()).digest()[:8], "big")
    kind_of_url, usual_port = ("https", "443") if request.connection.secure else ("http", "80")
    net = {"node_hostname": name or host, "daemon_port": port or usual_port, "direct_url": f"{kind_of_url}://{host}"}
    nets = {"public_net": net, "intra_control_net": net, "intra_data_net": net}
    return {"daemon_id": "wds-async", "daemon_type": kind, "id_digest": digest, "flags": 0, **nets}
