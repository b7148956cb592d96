"""Figures of a service: the document at ``/v1/stats`` and the page at ``/metrics``.

Both read each figure at the time of the request, where it is counted.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from wds_async._version import __version__
from wds_async.observe.metrics import CONTENT_TYPE, Labels, MetricsPage, add_origins, origin_rows
from wds_async.service.cache.entries import CacheStats
from wds_async.service.context import Context
from wds_async.service.peers import Peers, PeerStats

__all__ = ["CONTENT_TYPE", "metrics_page", "snapshot"]

_PLANS = 100
_origins = Labels()


def snapshot(context: Context, tenant: str | None = None) -> dict[str, Any]:
    """Return the figures of a service as plain data without secrets.

    ``tenant``: only what that tenant has caused and holds, without origins and cost, which are not counted by tenant.
    """
    meters = context.meters
    document = {
        "kind": "service",
        "name": socket.gethostname(),
        "version": __version__,
        "time": time.time(),
        "uptime_s": meters.uptime_s,
        "ready": not context.readiness.why_not,
        **(_figures(context) if tenant is None else _figures_of(context, tenant)),
        "slowest": [{"url": slow.url, "seconds": slow.seconds, "bytes": slow.bytes} for slow in meters.slowest(tenant)],
        "errors": [{"time": one.time, "url": one.url, "error": one.error} for one in meters.last_errors(tenant)],
        "plans": context.plans.as_list(tenant)[:_PLANS],
    }
    if tenant is not None:
        return document | {"tenant": tenant}
    limit = context.cost_limit
    cost = {"dollars": limit.dollars().as_list(), "limit": limit.limit, "spent": limit.spent().as_list()}
    return document | {"origins": origin_rows(context.traffic, Labels(), limit.meter), "cost": cost}


def _figures(context: Context) -> dict[str, dict[str, float]]:
    meters, stats, origins = context.meters, context.cache.statistics(), list(context.traffic.origins.values())
    counters: dict[str, float] = {
        "client_bytes": meters.client_bytes,
        "client_requests": meters.requests,
        **{f"origin_{name}": sum(getattr(one, name) for one in origins) for name in ("bytes", "requests", "retries")},
        "hedges": sum(origin.hedges for origin in origins),
        **{name: getattr(stats, name) for name in ("hit_bytes", "miss_bytes", "ahead_bytes", "evictions")},
        "errors": meters.failures,
        "refusals": meters.refusals,
    }
    gauges: dict[str, float] = {
        "clients": meters.clients,
        "connections": sum(origin.connections for origin in origins),
        "window_bytes": context.fetcher.held_bytes,
        "window_limit_bytes": context.config.memory_bytes,
        "cache_bytes": stats.bytes,
        "cache_limit_bytes": stats.limit_bytes,
        "entries": stats.entries,
    }
    return {"counters": counters, "gauges": gauges}


def _figures_of(context: Context, tenant: str) -> dict[str, dict[str, float]]:
    counts, cache = context.meters.of_tenant(tenant), context.cache
    stats = cache.statistics()
    counters: dict[str, float] = {
        "client_bytes": counts.bytes,
        "client_requests": counts.requests,
        **dict(zip(("hit_bytes", "miss_bytes", "ahead_bytes"), stats.by_tenant.get(tenant, (0, 0, 0)), strict=True)),
        "errors": counts.failures,
        "refusals": counts.refusals,
    }
    limit_bytes = int(stats.limit_bytes * cache.quotas.get(tenant, 1.0))
    gauges: dict[str, float] = {"cache_bytes": cache.held_by_tenant().get(tenant, 0), "cache_limit_bytes": limit_bytes}
    return {"counters": counters, "gauges": gauges}


def metrics_page(context: Context) -> bytes:
    """Return the page at ``/metrics``, of type `CONTENT_TYPE`. MissingExtra without prometheus_client."""
    page, limit = MetricsPage(), context.cost_limit
    context.meters.add_to(page)
    add_origins(page, context.traffic, _origins, limit.meter)
    dollars = float("inf") if limit.limit is None else limit.limit
    page.gauge("wds_cost_limit_dollars", "US dollars at which nothing more is fetched.", dollars)
    spent = limit.spent()
    bounds = [(("low",), spent.low), (("high",), spent.high)]
    page.gauge("wds_cost_spent_dollars", "US dollars that count towards the limit.", bounds, ("bound",))
    _add_cache(page, context.cache.statistics())
    page.gauge("wds_window_bytes", "Memory of parts on their way.", context.fetcher.held_bytes)
    page.gauge("wds_window_limit_bytes", "The most that they may take.", context.config.memory_bytes)
    page.gauge("wds_plans", "Plans of clients that are followed.", len(context.plans))
    page.counter("wds_plan_bytes", "Bytes fetched by plans.", context.plans.fetched_bytes)
    page.gauge("wds_orders", "Orders of epochs that loaders have announced.", len(context.orders))
    page.counter("wds_order_bytes", "Bytes fetched by them.", context.orders.fetched_bytes)
    _add_peers(page, context.peers)
    page.gauge("wds_ready", "1 while the service takes requests.", int(not context.readiness.why_not))
    page.gauge("wds_build_info", "The version in its label.", [((__version__,), 1)], ("version",))
    return page.text()


def _add_peers(page: MetricsPage, peers: Peers | None) -> None:
    members, down, stats = (0, 0, PeerStats()) if peers is None else (len(peers.ring.members), peers.down, peers.stats)
    page.gauge("wds_peers", "Members of the cluster, this service among them.", members)
    page.gauge("wds_peers_down", "Those that do not answer.", down)
    page.counter("wds_peer_received_bytes", "Bytes of chunks from other members.", stats.received_bytes)
    page.counter("wds_peer_sent_bytes", "Bytes of chunks to other members.", stats.sent_bytes)
    page.counter("wds_peer_passed", "Requests to a member that did not give the chunk.", stats.passed)


def _add_cache(page: MetricsPage, stats: CacheStats) -> None:
    page.counter("wds_cache_hit_bytes", "Bytes served from the cache.", stats.hit_bytes)
    page.counter("wds_cache_miss_bytes", "Bytes served that had to be fetched.", stats.miss_bytes)
    page.counter("wds_cache_ahead_bytes", "Bytes of the hits that a plan had fetched ahead.", stats.ahead_bytes)
    page.gauge("wds_cache_bytes", "Bytes that the cache holds.", stats.bytes)
    page.gauge("wds_cache_limit_bytes", "The most that it may hold.", stats.limit_bytes)
    page.gauge("wds_cache_free_bytes", "What the cache's file system has left.", stats.free_bytes)
    page.gauge("wds_cache_keep_free_bytes", "What of that is to be kept free.", stats.keep_free_bytes)
    page.gauge("wds_cache_entries", "Objects that the cache holds.", stats.entries)
    page.counter("wds_cache_evictions", "Objects that were dropped to make room.", stats.evictions)
    page.counter("wds_cache_evicted_bytes", "Their bytes.", stats.evicted_bytes)
    page.counter("wds_cache_disk_errors", "Faults of the cache's disk.", stats.disk_errors)
    page.counter("wds_cache_bad_chunks", "Chunks on disk that were not what was written.", stats.bad_chunks)
    page.counter("wds_cache_distrusted", "Copies of which a read came short or failed.", stats.distrusted)
    page.counter("wds_cache_scrubbed_bytes", "Bytes on disk compared in the background.", stats.scrubbed_bytes)
    page.counter("wds_cache_coalesced", "Reads that waited for another one's fetch.", stats.coalesced)
    page.counter("wds_cache_passed_bytes", "Bytes that were passed on without the disk.", stats.passed_bytes)
    page.counter("wds_cache_stale", "Requests answered from a copy that its store had not confirmed.", stats.stale)
    results = [((name,), getattr(stats, name)) for name in ("unchanged", "changed", "unanswered")]
    page.counter("wds_cache_revalidations", "Stores asked whether a copy is still theirs.", results, ("result",))
