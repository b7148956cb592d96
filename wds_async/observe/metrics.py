"""Metrics pages for Prometheus, and the figures by origin that services and jobs share.

prometheus_client (extra ``service``) writes the page. It is loaded with the first page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from wds_async import packages
from wds_async._version import __version__
from wds_async.observe.prices import Range, total
from wds_async.redact import redact
from wds_async.transfer.traffic import BOUNDS_S, OTHERS, Traffic

__all__ = ["CONTENT_TYPE", "Labels", "MetricsPage", "Priced", "add_origins", "origin_rows", "prometheus", "version"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of a page's text."""
MOST_ORIGINS = 200
"""Origins with figures of their own; those that come later are one, `OTHERS`."""

Rows = Iterable[tuple[Sequence[str], float]]


class Priced(Protocol):
    """Protocol: prices traffic (`prices.Meter`, `cost_limit.ServiceCostLimit`)."""

    def by_origin(self, traffic: Traffic) -> dict[str, Range]: ...


class Labels:
    """Labels of names: the first ``limit`` have their own, the others are `OTHERS`, so that a page stays small whatever
    clients request."""

    def __init__(self, limit: int = MOST_ORIGINS) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return the label of ``name``: itself, without secrets, or `OTHERS`."""
        label = self._known.get(name)
        if label is None:
            if len(self._known) >= self._limit:
                return OTHERS
            label = self._known[name] = redact(name)
        return label

    def grouped(self, traffic: Traffic) -> Traffic:
        """Return the same traffic by label."""
        grouped = Traffic()
        for name, counted in list(traffic.origins.items()):
            grouped.of(self(name)).merge(counted)
        return grouped


class MetricsPage:
    """Metric families in order, and their text."""

    def __init__(self) -> None:
        self._families: list[Any] = []
        self._core = prometheus().core

    def counter(self, name: str, meaning: str, rows: Rows | float, labels: Sequence[str] = ()) -> None:
        """Add a counter; ``name`` without ``_total``. ``rows`` are values with those of their labels."""
        self._add(self._core.CounterMetricFamily, name, meaning, rows, labels)

    def gauge(self, name: str, meaning: str, rows: Rows | float, labels: Sequence[str] = ()) -> None:
        """Add a gauge."""
        self._add(self._core.GaugeMetricFamily, name, meaning, rows, labels)

    def histogram(
        self,
        name: str,
        meaning: str,
        bounds: Sequence[float],
        rows: Iterable[tuple[Sequence[str], Sequence[float], float]],
        labels: Sequence[str],
    ) -> None:
        """Add a histogram. ``rows``: labels, counts of the classes between ``bounds`` (one more than these), sum."""
        family = self._core.HistogramMetricFamily(name, meaning, labels=labels)
        for names, counts, summed in rows:
            family.add_metric(names, _buckets(bounds, counts), summed)
        self._families.append(family)

    def text(self) -> bytes:
        """Return the page, as Prometheus reads it."""
        library = prometheus()
        registry = library.CollectorRegistry(auto_describe=False)
        registry.register(self)
        written: bytes = library.generate_latest(registry)
        return written

    def collect(self) -> Iterator[Any]:
        """Return the families (called by prometheus_client)."""
        yield from self._families

    def describe(self) -> Iterator[Any]:
        """Return nothing: the registry lives for one page."""
        return iter(())

    def _add(
        self, family: Callable[..., Any], name: str, meaning: str, rows: Rows | float, labels: Sequence[str]
    ) -> None:
        made = family(name, meaning, labels=labels)
        for names, value in [((), rows)] if isinstance(rows, int | float) else rows:
            made.add_metric(names, value)
        self._families.append(made)


def _buckets(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    summed, buckets = 0.0, []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        summed += count
        buckets.append((bound, summed))
    return buckets


def add_origins(page: MetricsPage, traffic: Traffic, labels: Labels, priced: Priced) -> None:
    """Add the families of origins: requests, bytes, times and cost."""
    shown = labels.grouped(traffic)

    def rows(field: str) -> Rows:
        return [((name,), getattr(counted, field)) for name, counted in shown.origins.items()]

    page.counter("wds_origin_requests", "Requests to an origin, attempts included.", rows("requests"), ("origin",))
    page.counter("wds_origin_bytes", "Body bytes received from an origin.", rows("bytes"), ("origin",))
    page.counter("wds_origin_retries", "Attempts after the first.", rows("retries"), ("origin",))
    page.counter("wds_origin_throttled", "Answers that asked for fewer requests.", rows("throttled"), ("origin",))
    page.counter("wds_origin_hedges", "Parts that were asked for twice.", rows("hedges"), ("origin",))
    page.counter("wds_origin_errors", "Transfers that were given up.", rows("errors"), ("origin",))
    page.gauge("wds_origin_connections", "Connections to an origin that are in use.", rows("connections"), ("origin",))
    timed = [((name,), counted.seconds.counts, counted.seconds.total) for name, counted in shown.origins.items()]
    page.histogram("wds_origin_seconds", "From a request to its last byte.", BOUNDS_S, timed, ("origin",))
    dollars: dict[tuple[str, str], float] = {}
    for name, cost in priced.by_origin(traffic).items():
        for bound in ("low", "high"):
            key = (labels(name), bound)
            dollars[key] = dollars.get(key, 0.0) + getattr(cost, bound)
    meaning = "US dollars that requests and traffic cost by the table of prices, at least and at most."
    page.gauge("wds_cost_dollars", meaning, dollars.items(), ("origin", "bound"))


def origin_rows(traffic: Traffic, labels: Labels, priced: Priced) -> dict[str, dict[str, Any]]:
    """Return each origin's figures for ``/v1/stats``."""
    cost: dict[str, list[Range]] = {}
    for name, dollars in priced.by_origin(traffic).items():
        cost.setdefault(labels(name), []).append(dollars)
    return {
        name: {
            "requests": counted.requests,
            "bytes": counted.bytes,
            "retries": counted.retries,
            "throttled": counted.throttled,
            "hedges": counted.hedges,
            "errors": counted.errors,
            "connections": counted.connections,
            "p50_s": counted.seconds.quantile(0.5),
            "p99_s": counted.seconds.quantile(0.99),
            "region": counted.region,
            "dollars": total(cost.get(name, [])).as_list(),
        }
        for name, counted in labels.grouped(traffic).origins.items()
    }


def prometheus() -> Any:
    """Return the package prometheus_client. Raise MissingExtra where it is not installed."""
    library = packages.optional("prometheus_client", "the metrics page", "service")
    packages.optional("prometheus_client.core", "the metrics page", "service")
    return library


def version() -> str:
    """Return the package's version."""
    return __version__
