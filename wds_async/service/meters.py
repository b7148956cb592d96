"""What a service counts of its clients: plain numbers, which hot paths bump; and its page at ``/metrics``.

All else that the page shows (the cache, origins, plans, the cost) is read at the time of a scrape, where it is counted.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from wds_async.exposition import CONTENT_TYPE, Labels, Page, add_origins, version
from wds_async.redact import redact

__all__ = ["BOUNDS_S", "CONTENT_TYPE", "Failure", "Meters", "Observed", "Slow"]

access = logging.getLogger("wds_async.access")

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the classes of ``wds_request_seconds``; one class more is for what took longer."""

_SLOW, _ERRORS, _LABELS = 10, 20, 64
_SLOW_FOR_S = 600.0
_QUICK_S = 0.001  # is never among the slowest, and so costs nothing
_REFRESH_EVERY = 256  # answers
_TEXT_AT_MOST = 300


class Observed(Protocol):
    """A service, as its figures are read."""

    config: Any
    cache: Any
    fetcher: Any
    traffic: Any
    plans: Any
    spending: Any
    meters: Any

    @property
    def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Slow:
    """A request that took long to its first byte; ``url`` without secrets, ``at`` by the meters' clock."""

    seconds: float
    bytes: int
    url: str
    at: float


@dataclass(frozen=True, slots=True)
class Failure:
    """What an origin did not give; ``time`` as of ``time.time``."""

    time: float
    url: str
    error: str


class _Answers:
    """Those of one API and status."""

    __slots__ = ("bytes", "count", "seconds", "total_s")

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.total_s = 0.0
        self.seconds = [0] * (len(BOUNDS_S) + 1)


class Meters:
    """The numbers of one service, counted on its loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clients = 0
        """Connections of clients that are open; who accepts them counts."""
        self.errors: deque[Failure] = deque(maxlen=_ERRORS)
        """The last ones, oldest first."""
        self.failures = 0
        """How many there were."""
        self.began = clock()
        self._clock = clock
        self._answers: dict[tuple[str, int], _Answers] = {}
        self._refusals: dict[str, int] = {}
        self._slow: dict[str, Slow] = {}
        self._slow_from_s = _QUICK_S
        self._apis, self._reasons, self._origins = Labels(_LABELS), Labels(_LABELS), Labels()

    def served(self, api: str, code: int, first_byte_s: float, count: int, url: str = "", client: str = "") -> None:
        """Count an answer that is over: what it is of (``"ais"``, ``"s3"``, …), its status, the seconds from the
        request to its first byte, and the bytes of its body. About a microsecond. Where ``wds_async.access`` logs at
        debug, it gets a line."""
        try:
            answers = self._answers[api, code]
        except KeyError:
            answers = self._answers.setdefault((self._apis(api), code), _Answers())
        answers.count += 1
        answers.bytes += count
        answers.total_s += first_byte_s
        answers.seconds[bisect_left(BOUNDS_S, first_byte_s)] += 1
        if first_byte_s > self._slow_from_s or not answers.count % _REFRESH_EVERY:
            self._note_slow(first_byte_s, count, url if code < 400 else "")
        if access.isEnabledFor(logging.DEBUG):
            said = {"api": api, "status": code, "bytes": count, "first_byte_ms": round(1000 * first_byte_s, 3)}
            said |= {"url": url, "client": client}
            access.debug("answered", extra={name: value for name, value in said.items() if value != ""})

    def refused(self, reason: str) -> None:
        """Count a request that was not answered as asked, by a short word for why."""
        label = self._reasons(reason)
        self._refusals[label] = self._refusals.get(label, 0) + 1

    def failed(self, url: str, error: BaseException | str) -> None:
        """Keep what an origin did not give."""
        self.failures += 1
        self.errors.append(Failure(time.time(), redact(url), redact(str(error))[:_TEXT_AT_MOST]))

    def slowest(self) -> list[Slow]:
        """Those that took longest in the last ten minutes, the slowest first; each URL once."""
        self._forget()
        return list(self._slow.values())

    @property
    def uptime_s(self) -> float:
        """Seconds since these meters began."""
        return self._clock() - self.began

    @property
    def requests(self) -> int:
        """Answers so far."""
        return sum(answers.count for answers in self._answers.values())

    @property
    def client_bytes(self) -> int:
        """Bytes of their bodies."""
        return sum(answers.bytes for answers in self._answers.values())

    @property
    def refusals(self) -> int:
        """Requests that were not answered as asked."""
        return sum(self._refusals.values())

    def text(self, service: Observed) -> bytes:
        """The page at ``/metrics``, of type `CONTENT_TYPE`. MissingExtra where prometheus_client is not installed."""
        page = Page()
        self._add_clients(page)
        add_origins(page, service.traffic, self._origins, service.spending)
        page.gauge("wds_cost_limit_dollars", "US dollars at which nothing more is fetched.", _limit(service.spending))
        _add_cache(page, service.cache.statistics())
        page.gauge("wds_window_bytes", "Memory of parts on their way.", service.fetcher.held_bytes)
        page.gauge("wds_window_limit_bytes", "The most that they may take.", service.config.memory_bytes)
        page.gauge("wds_plans", "Plans of clients that are followed.", len(service.plans.as_list()))
        page.counter("wds_plan_bytes", "Bytes fetched by plans.", service.plans.fetched_bytes)
        page.gauge("wds_ready", "1 while the service takes requests.", int(service.ready))
        page.gauge("wds_build_info", "The version in its label.", [((version(),), 1)], ("version",))
        return page.text()

    def _add_clients(self, page: Page) -> None:
        answers = sorted(self._answers.items())
        by_code = [((api, str(code)), found.count) for (api, code), found in answers]
        page.counter("wds_requests", "Answers to clients.", by_code, ("api", "code"))
        by_api: dict[str, _Answers] = {}
        for (api, _), found in answers:
            summed = by_api.setdefault(api, _Answers())
            summed.bytes += found.bytes
            summed.total_s += found.total_s
            summed.seconds = [a + b for a, b in zip(summed.seconds, found.seconds, strict=True)]
        sizes = [((api,), found.bytes) for api, found in by_api.items()]
        page.counter("wds_client_bytes", "Bytes of answers' bodies.", sizes, ("api",))
        times = [((api,), found.seconds, found.total_s) for api, found in by_api.items()]
        page.histogram("wds_request_seconds", "From a request to its first byte.", BOUNDS_S, times, ("api",))
        refusals = [((reason,), count) for reason, count in sorted(self._refusals.items())]
        page.counter("wds_refusals", "Requests that were not answered as asked.", refusals, ("reason",))
        page.gauge("wds_clients", "Connections of clients.", self.clients)

    def _note_slow(self, seconds: float, count: int, url: str) -> None:
        known = self._slow.get(url)
        if known is not None and known.seconds >= seconds and self._clock() - known.at < _SLOW_FOR_S:
            return
        self._forget()
        if url and seconds > self._slow_from_s:
            self._slow[url] = Slow(seconds, count, redact(url), self._clock())
            self._forget()

    def _forget(self) -> None:
        horizon = self._clock() - _SLOW_FOR_S
        recent = [(slow.seconds, url) for url, slow in self._slow.items() if slow.at >= horizon]
        slowest = sorted(recent, reverse=True)[:_SLOW]
        self._slow = {url: self._slow[url] for _, url in slowest}
        self._slow_from_s = slowest[-1][0] if len(slowest) == _SLOW else _QUICK_S


def _limit(spending: Any) -> float:
    limit = spending.limit
    return float("inf") if limit is None else limit


def _add_cache(page: Page, stats: Any) -> None:
    page.counter("wds_cache_hit_bytes", "Bytes served from the cache.", stats.hit_bytes)
    page.counter("wds_cache_miss_bytes", "Bytes served that had to be fetched.", stats.miss_bytes)
    page.gauge("wds_cache_bytes", "Bytes that the cache holds.", stats.bytes)
    page.gauge("wds_cache_limit_bytes", "The most that it may hold.", stats.limit_bytes)
    page.gauge("wds_cache_entries", "Objects that the cache holds.", stats.entries)
    page.counter("wds_cache_evictions", "Objects that were dropped to make room.", stats.evictions)
    page.counter("wds_cache_evicted_bytes", "Their bytes.", stats.evicted_bytes)
    page.counter("wds_cache_disk_errors", "Faults of the cache's disk.", stats.disk_errors)
    page.counter("wds_cache_bad_chunks", "Chunks on disk that were not what was written.", stats.bad_chunks)
    page.counter("wds_cache_coalesced", "Reads that waited for another one's fetch.", stats.coalesced)
    page.counter("wds_cache_passed_bytes", "Bytes that were passed on without the disk.", stats.passed_bytes)
    page.counter("wds_cache_stale", "Requests answered from a copy whose store could not be asked.", stats.stale)
