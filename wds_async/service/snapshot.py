"""What ``/v1/stats`` says of a service: its figures as JSON, for `wds-async top` and whoever asks."""

from __future__ import annotations

import socket
import time
from typing import Any

from wds_async.exposition import Labels, origin_rows, version
from wds_async.service.meters import Observed

__all__ = ["snapshot"]

_PLANS = 100


def snapshot(service: Observed, tenant: str | None = None) -> dict[str, Any]:
    """Return the figures of ``service`` as of now, as plain data without secrets. ``tenant``: only what that tenant has
    caused and holds, and neither origins nor the cost, which are not counted by tenant; None: all."""
    meters = service.meters
    document = {
        "kind": "service",
        "name": socket.gethostname(),
        "version": version(),
        "time": time.time(),
        "uptime_s": meters.uptime_s,
        "ready": bool(service.ready),
        "counters": _counters(service) if tenant is None else _counters_of(service, tenant),
        "gauges": _gauges(service) if tenant is None else _gauges_of(service, tenant),
        "slowest": [{"url": slow.url, "seconds": slow.seconds, "bytes": slow.bytes} for slow in meters.slowest(tenant)],
        "errors": [{"time": one.time, "url": one.url, "error": one.error} for one in meters.last_errors(tenant)],
        "plans": service.plans.as_list(tenant)[:_PLANS],
    }
    if tenant is not None:
        return document | {"tenant": tenant}
    spending = service.spending
    cost = {"dollars": spending.dollars().as_list(), "limit": spending.limit, "spent": spending.spent().as_list()}
    return document | {"origins": origin_rows(service.traffic, Labels(), spending), "cost": cost}


def _counters(service: Observed) -> dict[str, float]:
    meters, origins = service.meters, list(service.traffic.origins.values())
    stats = service.cache.statistics()
    return {
        "client_bytes": meters.client_bytes,
        "client_requests": meters.requests,
        "origin_bytes": sum(origin.bytes for origin in origins),
        "origin_requests": sum(origin.requests for origin in origins),
        "origin_retries": sum(origin.retries for origin in origins),
        "hedges": sum(origin.hedges for origin in origins),
        "hit_bytes": stats.hit_bytes,
        "miss_bytes": stats.miss_bytes,
        "ahead_bytes": stats.ahead_bytes,
        "evictions": stats.evictions,
        "errors": meters.failures,
        "refusals": meters.refusals,
    }


def _gauges(service: Observed) -> dict[str, float]:
    stats = service.cache.statistics()
    return {
        "clients": service.meters.clients,
        "connections": sum(origin.connections for origin in list(service.traffic.origins.values())),
        "window_bytes": service.fetcher.held_bytes,
        "window_limit_bytes": service.config.memory_bytes,
        "cache_bytes": stats.bytes,
        "cache_limit_bytes": stats.limit_bytes,
        "entries": stats.entries,
    }


def _counters_of(service: Observed, tenant: str) -> dict[str, float]:
    counts = service.meters.of_tenant(tenant)
    hit_bytes, miss_bytes, ahead_bytes = service.cache.statistics().by_tenant.get(tenant, (0, 0, 0))
    return {
        "client_bytes": counts.bytes,
        "client_requests": counts.requests,
        "hit_bytes": hit_bytes,
        "miss_bytes": miss_bytes,
        "ahead_bytes": ahead_bytes,
        "errors": counts.failures,
        "refusals": counts.refusals,
    }


def _gauges_of(service: Observed, tenant: str) -> dict[str, float]:
    cache = service.cache
    return {
        "cache_bytes": cache.held_by_tenant().get(tenant, 0),
        "cache_limit_bytes": int(cache.statistics().limit_bytes * cache.quotas.get(tenant, 1.0)),
    }
