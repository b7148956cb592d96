"""What ``/v1/stats`` says of a service: its figures as JSON, for `wds-async top` and whoever asks."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict
from typing import Any

from wds_async.exposition import Labels, origin_rows, version
from wds_async.service.meters import Observed

__all__ = ["snapshot"]

_PLANS = 100


def snapshot(service: Observed) -> dict[str, Any]:
    """The figures of ``service`` as of now, as plain data without secrets."""
    meters, spending = service.meters, service.spending
    dollars, limit = spending.dollars(), spending.limit
    return {
        "kind": "service",
        "name": socket.gethostname(),
        "version": version(),
        "time": time.time(),
        "uptime_s": meters.uptime_s,
        "ready": bool(service.ready),
        "counters": _counters(service),
        "gauges": _gauges(service),
        "origins": origin_rows(service.traffic, Labels(), spending),
        "slowest": [{"url": slow.url, "seconds": slow.seconds, "bytes": slow.bytes} for slow in meters.slowest()],
        "errors": [asdict(failure) for failure in meters.errors],
        "plans": service.plans.as_list()[:_PLANS],
        "cost": {"dollars": dollars.as_list(), "limit": limit},
    }


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
