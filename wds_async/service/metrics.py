"""Counters of a service's clients: answers, refusals, failures of origins and the slowest requests."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wds_async.observe.metrics import CONTENT_TYPE, Labels, MetricsPage
from wds_async.redact import redact
from wds_async.service.cache.origin import NO_CLIENT, Client

__all__ = ["BOUNDS_S", "CONTENT_TYPE", "Meters", "OriginFailure", "SlowRequest", "TenantMeters"]

access = logging.getLogger("wds_async.access")
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the classes of ``wds_request_seconds``; one class more is for what took longer."""
_SLOW, _ERRORS, _LABELS = 10, 20, 64
_SLOW_FOR_S = 600.0
_QUICK_S = 0.001  # is never among the slowest, and so costs nothing
_REFRESH_EVERY = 256  # answers
_TEXT_AT_MOST = 300


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A request with a late first byte; ``url`` without secrets, ``at`` by the meters' clock."""

    seconds: float
    bytes: int
    url: str
    at: float


@dataclass(frozen=True, slots=True)
class OriginFailure:
    """A failed request to an origin; ``time`` as of ``time.time``."""

    time: float
    url: str
    error: str


@dataclass(slots=True)
class _Answers:
    """Counters of one API and status."""

    count: int = 0
    bytes: int = 0
    total_s: float = 0.0
    seconds: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))


class TenantMeters:
    """Counters of one tenant, with its last failures and slowest requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests = self.bytes = self.refusals = self.failures = 0
        self.errors: deque[OriginFailure] = deque(maxlen=_ERRORS)
        """The last failures, oldest first."""
        self.slow_from_s = _QUICK_S
        """Time above which a shard may be among the slowest."""
        self._slow: dict[str, SlowRequest] = {}
        self._clock = clock

    def note_slow(self, seconds: float, count: int, url: str) -> None:
        """Keep a request if it is among the slowest. "" is no URL."""
        kept = self._slow.get(url)
        if kept is not None and kept.seconds >= seconds and self._clock() - kept.at < _SLOW_FOR_S:
            return
        self._forget()
        if url and seconds > self.slow_from_s:
            self._slow[url] = SlowRequest(seconds, count, redact(url), self._clock())
            self._forget()

    def slowest(self) -> list[SlowRequest]:
        """Return the requests that took longest in the last ten minutes, the slowest first; each URL once."""
        self._forget()
        return list(self._slow.values())

    def _forget(self) -> None:
        horizon = self._clock() - _SLOW_FOR_S
        recent = [(slow.seconds, url) for url, slow in self._slow.items() if slow.at >= horizon]
        slowest = sorted(recent, reverse=True)[:_SLOW]
        self._slow = {url: self._slow[url] for _, url in slowest}
        self.slow_from_s = slowest[-1][0] if len(slowest) == _SLOW else _QUICK_S


class Meters:
    """The numbers of one service, counted on its loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clients = 0
        """Connections of clients that are open; who accepts them counts."""
        self.failures = 0
        """Number of failures of origins so far."""
        self.began = clock()
        self._clock = clock
        self._answers: dict[tuple[str, int], _Answers] = {}
        self._refusals: Counter[str] = Counter()
        self._tenants: dict[str, TenantMeters] = {}
        self._apis, self._reasons = Labels(_LABELS), Labels(_LABELS)

    def served(
        self, api: str, code: int, first_byte_s: float, count: int, url: str = "", client: Client = NO_CLIENT
    ) -> None:
        """Count an answer: its API (``"ais"``, ``"s3"``, …), its status, the seconds from the request to its first
        byte, and the bytes of its body. About a microsecond. ``wds_async.access`` logs a line at debug."""
        answers = self._answers.get((api, code)) or self._answers.setdefault((self._apis(api), code), _Answers())
        answers.count += 1
        answers.bytes += count
        answers.total_s += first_byte_s
        answers.seconds[bisect_left(BOUNDS_S, first_byte_s)] += 1
        tenant = self.of_tenant(client.tenant)
        if client is not NO_CLIENT:  # who was let in
            tenant.requests += 1
            tenant.bytes += count
        if first_byte_s > tenant.slow_from_s or not answers.count % _REFRESH_EVERY:
            tenant.note_slow(first_byte_s, count, url if code < 400 else "")
        if access.isEnabledFor(logging.DEBUG):
            fields = {"api": api, "status": code, "bytes": count, "first_byte_ms": round(1000 * first_byte_s, 3)}
            fields |= {"url": url, "client": str(client)}
            access.debug("answered", extra={name: value for name, value in fields.items() if value != ""})

    def of_tenant(self, tenant: str) -> TenantMeters:
        """Return the meters of one tenant, created on first use."""
        if tenant not in self._tenants:
            self._tenants[tenant] = TenantMeters(self._clock)
        return self._tenants[tenant]

    def refused(self, reason: str, client: Client = NO_CLIENT) -> None:
        """Count a refusal by a short reason, and for the client's tenant."""
        if client is not NO_CLIENT:
            self.of_tenant(client.tenant).refusals += 1
        self._refusals[self._reasons(reason)] += 1

    def failed(self, url: str, error: BaseException | str, client: Client = NO_CLIENT) -> None:
        """Keep a failure of an origin, for the tenant whose request failed."""
        self.failures += 1
        tenant = self.of_tenant(client.tenant)
        tenant.failures += 1
        tenant.errors.append(OriginFailure(time.time(), redact(url), redact(str(error))[:_TEXT_AT_MOST]))

    def last_errors(self, tenant: str | None = None) -> list[OriginFailure]:
        """Return the last failures of ``tenant`` (None: of all), oldest first."""
        return sorted((one for of in self._of(tenant) for one in of.errors), key=lambda one: one.time)[-_ERRORS:]

    def slowest(self, tenant: str | None = None) -> list[SlowRequest]:
        """Return the requests of ``tenant`` (None: of all) that took longest within ten minutes, the slowest first,
        each URL once for a tenant."""
        return sorted((one for of in self._of(tenant) for one in of.slowest()), key=lambda one: -one.seconds)[:_SLOW]

    def _of(self, tenant: str | None) -> list[TenantMeters]:
        return list(self._tenants.values()) if tenant is None else [self.of_tenant(tenant)]

    @property
    def uptime_s(self) -> float:
        """Seconds since these meters began."""
        return self._clock() - self.began

    @property
    def requests(self) -> int:
        """Number of answers."""
        return sum(answers.count for answers in self._answers.values())

    @property
    def client_bytes(self) -> int:
        """Bytes of the bodies of answers."""
        return sum(answers.bytes for answers in self._answers.values())

    @property
    def refusals(self) -> int:
        """Number of refusals."""
        return self._refusals.total()

    def add_to(self, page: MetricsPage) -> None:
        """Add these figures to the page at ``/metrics``."""
        answers = sorted(self._answers.items())
        by_code = [((api, str(code)), counts.count) for (api, code), counts in answers]
        page.counter("wds_requests", "Answers to clients.", by_code, ("api", "code"))
        by_api: dict[str, _Answers] = {}
        for (api, _), counts in answers:
            summed = by_api.setdefault(api, _Answers())
            summed.bytes += counts.bytes
            summed.total_s += counts.total_s
            summed.seconds = [a + b for a, b in zip(summed.seconds, counts.seconds, strict=True)]
        sizes = [((api,), counts.bytes) for api, counts in by_api.items()]
        page.counter("wds_client_bytes", "Bytes of answers' bodies.", sizes, ("api",))
        times = [((api,), counts.seconds, counts.total_s) for api, counts in by_api.items()]
        page.histogram("wds_request_seconds", "From a request to its first byte.", BOUNDS_S, times, ("api",))
        refusals = [((reason,), count) for reason, count in sorted(self._refusals.items())]
        page.counter("wds_refusals", "Requests that were not answered as asked.", refusals, ("reason",))
        page.gauge("wds_clients", "Connections of clients.", self.clients)
