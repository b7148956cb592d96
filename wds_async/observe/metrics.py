"""Metrics pages for Prometheus, and the figures by origin that services and jobs share.

prometheus_client (extra ``service``) writes the page. It is loaded with the first page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from wds_async import packages
from wds_async.observe.prices import FREE, Meter, Range
from wds_async.redact import redact
from wds_async.transfer.traffic import BOUNDS_S, OTHERS, Traffic

__all__ = ["CONTENT_TYPE", "Labels", "MetricsPage", "add_origins", "origin_rows", "prometheus"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of a page's text."""
MOST_ORIGINS = 200
"""Origins with figures of their own; those that come later are one, `OTHERS`."""

Rows = Iterable[tuple[Sequence[str], float]]


class Labels:
    """Labels of names: the first ``limit`` have their own, the others are `OTHERS`, so that a page stays small whatever
    clients request."""

    def __init__(self, limit: int = MOST_ORIGINS) -> None:
        self._limit = limit
        self._labels: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return the label of ``name``: itself, without secrets, or `OTHERS`."""
        if name not in self._labels and len(self._labels) < self._limit:
            self._labels[name] = redact(name)
        return self._labels.get(name, OTHERS)

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
        self._library = prometheus()

    def counter(self, name: str, meaning: str, rows: Rows | float, labels: Sequence[str] = ()) -> None:
        """Add a counter; ``name`` without ``_total``. ``rows`` are values with those of their labels."""
        self._add(self._library.core.CounterMetricFamily(name, meaning, labels=labels), rows)

    def gauge(self, name: str, meaning: str, rows: Rows | float, labels: Sequence[str] = ()) -> None:
        """Add a gauge."""
        self._add(self._library.core.GaugeMetricFamily(name, meaning, labels=labels), rows)

    def histogram(
        self,
        name: str,
        meaning: str,
        bounds: Sequence[float],
        rows: Iterable[tuple[Sequence[str], Sequence[float], float]],
        labels: Sequence[str],
    ) -> None:
        """Add a histogram. ``rows``: labels, counts of the classes between ``bounds`` (one more than these), sum."""
        family = self._library.core.HistogramMetricFamily(name, meaning, labels=labels)
        for names, counts, summed in rows:
            buckets = zip([*map(str, bounds), "+Inf"], itertools.accumulate(counts), strict=True)
            family.add_metric(names, list(buckets), summed)
        self._families.append(family)

    def _add(self, family: Any, rows: Rows | float) -> None:
        for names, value in [((), rows)] if isinstance(rows, int | float) else rows:
            family.add_metric(names, value)
        self._families.append(family)

    def collect(self) -> list[Any]:
        """Return the families (called by prometheus_client)."""
        return self._families

    def text(self) -> bytes:
        """Return the page, as Prometheus reads it."""
        text: bytes = self._library.generate_latest(self)
        return text


_ORIGIN_COUNTERS = {
    "requests": "Requests to an origin, attempts included.",
    "bytes": "Body bytes received from an origin.",
    "retries": "Attempts after the first.",
    "throttled": "Answers that asked for fewer requests.",
    "hedges": "Parts that were asked for twice.",
    "errors": "Transfers that were given up.",
}


def add_origins(page: MetricsPage, traffic: Traffic, labels: Labels, meter: Meter) -> None:
    """Add the families of origins: requests, bytes, times and cost."""
    origins, label = labels.grouped(traffic).origins, ("origin",)
    for name, meaning in _ORIGIN_COUNTERS.items():
        page.counter(
            f"wds_origin_{name}", meaning, [((key,), getattr(one, name)) for key, one in origins.items()], label
        )
    connections = [((key,), one.connections) for key, one in origins.items()]
    page.gauge("wds_origin_connections", "Connections to an origin that are in use.", connections, label)
    times = [((key,), one.seconds.counts, one.seconds.total) for key, one in origins.items()]
    page.histogram("wds_origin_seconds", "From a request to its last byte.", BOUNDS_S, times, label)
    meaning = "US dollars that requests and traffic cost by the table of prices, at least and at most."
    cost = _cost_by_label(traffic, labels, meter).items()
    dollars = [((name, bound), getattr(price, bound)) for name, price in cost for bound in ("low", "high")]
    page.gauge("wds_cost_dollars", meaning, dollars, ("origin", "bound"))


def origin_rows(traffic: Traffic, labels: Labels, meter: Meter) -> dict[str, dict[str, Any]]:
    """Return each origin's figures for ``/v1/stats``."""
    cost = _cost_by_label(traffic, labels, meter)
    return {
        name: {
            **{counter: getattr(one, counter) for counter in (*_ORIGIN_COUNTERS, "connections")},
            "p50_s": one.seconds.quantile(0.5),
            "p99_s": one.seconds.quantile(0.99),
            "region": one.region,
            "dollars": cost.get(name, FREE).as_list(),
        }
        for name, one in labels.grouped(traffic).origins.items()
    }


def _cost_by_label(traffic: Traffic, labels: Labels, meter: Meter) -> dict[str, Range]:
    cost: dict[str, Range] = {}
    for name, dollars in meter.by_origin(traffic).items():
        label = labels(name)
        cost[label] = cost.get(label, FREE) + dollars
    return cost


def prometheus() -> Any:
    """Return the package prometheus_client. Raise MissingExtra where it is not installed."""
    packages.optional("prometheus_client.core", "the metrics page", "service")
    return packages.optional("prometheus_client", "the metrics page", "service")
