"""Prices of stores, and the cost of traffic by a table of list prices (``prices.yaml``, or the user's)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from wds_async.config import settings
from wds_async.environment import variable
from wds_async.errors import ConfigError
from wds_async.transfer.traffic import Traffic

__all__ = ["Meter", "Price", "PriceTable", "Range", "figures", "meter_of_job", "of_pipeline", "region_here", "total"]

GB = 1e9
"""Bytes of a priced GB. Some providers count 2^30, which is less money for the same bytes."""
_WAYS = ("same_region", "same_continent", "other_continent", "internet")
_SHOWN = 5
_SECTIONS = ("date", "stores", "hosts", "origins", "regions")
# A zone is a region with a letter behind it: us-central1-a, us-east-1a.
_ZONE = re.compile(r"(?<=\d)-?[a-z]$")


@dataclass(frozen=True, slots=True)
class Range:
    """US dollars from ``low`` to ``high``, both included; equal where the amount is known."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> Range:
        """Return the range multiplied by ``factor``."""
        return Range(self.low * factor, self.high * factor)

    def as_list(self) -> list[float]:
        """Return both ends, for JSON."""
        return [self.low, self.high]

    def __str__(self) -> str:
        low, high = (_dollars(bound) for bound in (self.low, self.high))
        return low if low == high else f"{low} to {high}"


FREE = Range(0.0, 0.0)


def total(ranges: Iterable[Range]) -> Range:
    """Return the sum of ``ranges``."""
    return sum(ranges, FREE)


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars of one request, and of one byte that leaves the store."""

    request: Range
    byte: Range


@dataclass(frozen=True, slots=True)
class _Store:
    per_1000_requests: Range
    ways: Mapping[str, Range]
    """Dollars a GB, by `_WAYS`."""

    def changed(self, given: Mapping[str, Any], where: str) -> _Store:
        """Return a copy with the ``given`` prices in place of its own."""
        values = {name: _range(value, f"{where}: {name}") for name, value in given.items()}
        if unknown := set(values) - {"per_1000_requests", *_WAYS}:
            raise ConfigError(f"{where}: {min(unknown)!r} is no price; they are per_1000_requests, {', '.join(_WAYS)}")
        ways = {**self.ways, **{way: values[way] for way in _WAYS if way in values}}
        return _Store(values.get("per_1000_requests", self.per_1000_requests), ways)

    def gigabyte(self, *ways: str) -> Range:
        """Return the price of a GB that takes one of these ways."""
        prices = [self.ways.get(way, self.ways.get("internet", FREE)) for way in ways]
        return Range(min(price.low for price in prices), max(price.high for price in prices))


@dataclass(frozen=True)
class PriceTable:
    """Prices by store in US dollars, and the rules that map an origin to its store and region."""

    date: str = ""
    stores: Mapping[str, _Store] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    regions: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path | None = None) -> Self:
        """Return the built-in table, overridden by the YAML file at ``path``. Raise ConfigError for a file that cannot
        be read or is invalid."""
        table = cls()._with(_built_in(), "prices.yaml")
        if path is None or not str(path):
            return table
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as exn:
            raise ConfigError(f"the table of prices {path} cannot be read: {exn} (WDS_PRICES, prices)") from exn
        return table._with(_parsed(text, str(path)), str(path))

    def _with(self, given: Mapping[str, Any], where: str) -> Self:
        stores = dict(self.stores)
        for name, prices in _mapping(given.get("stores"), f"{where}: stores").items():
            before = stores.get(name, _Store(FREE, {}))
            stores[name] = before.changed(_mapping(prices, f"{where}: {name}"), f"{where}: {name}")
        hosts = {**self.hosts, **_mapping(given.get("hosts"), f"{where}: hosts")}
        for host, store in hosts.items():
            if store not in stores:
                raise ConfigError(f"{where}: hosts: {host} is of {store!r}, of which there are no prices")
        origins = {**self.origins}
        for name, own in _mapping(given.get("origins"), f"{where}: origins").items():
            origins[name] = _mapping(own, f"{where}: {name}")
            prices = {key: value for key, value in origins[name].items() if key != "region"}
            _Store(FREE, {}).changed(prices, f"{where}: {name}")
        regions = {**self.regions}
        for name, places in _mapping(given.get("regions"), f"{where}: regions").items():
            found = _mapping(places, f"{where}: regions of {name}")
            regions[name] = {
                **regions.get(name, {}),
                **{place: tuple(map(str, heads)) for place, heads in found.items()},
            }
        return type(self)(str(given.get("date", self.date)), stores, hosts, origins, regions)

    def price(self, origin: str, region: str = "", here: str = "") -> Price:
        """Return what ``origin`` (``s3://bucket``, see `transfer.traffic.origin_of`) charges a machine in ``here``.
        ``region`` is the origin's; "" is unknown, and the price is then the range of all possible ones."""
        name = self.store_of(origin)
        store = self.stores.get(name, _Store(FREE, {}))
        own = self._overrides(origin)
        region = str(own.get("region", "")) or region
        store = store.changed({key: value for key, value in own.items() if key != "region"}, origin)
        gigabyte = store.gigabyte(*self._ways(name, _region(region), _region(here)))
        return Price(store.per_1000_requests.times(1 / 1000), gigabyte.times(1 / GB))

    def store_of(self, origin: str) -> str:
        """Return the name in ``stores`` whose prices ``origin`` has."""
        scheme, _, rest = origin.partition("://")
        if scheme in ("http", "https"):
            host = rest.rpartition(":")[0] if re.search(r":\d+$", rest) else rest
            ends = [end for end in self.hosts if host == end or host.endswith(f".{end}")]
            return self.hosts[max(ends, key=len)] if ends else "http"
        if (scheme == "s3" and not _of_amazon()) or (scheme == "gs" and variable("STORAGE_EMULATOR_HOST")):
            return "own"
        return scheme if scheme in self.stores else "own"

    def _overrides(self, origin: str) -> Mapping[str, Any]:
        heads = [head for head in self.origins if origin.startswith(head)]
        return self.origins[max(heads, key=len)] if heads else {}

    def _ways(self, store: str, region: str, here: str) -> tuple[str, ...]:
        """Return the possible ways from the store to this machine."""
        if not here:
            return _WAYS
        provider, continent = self._place(here)
        if provider != store:
            return ("internet",)
        if not region:
            return _WAYS[:3]
        if region == here:
            return ("same_region",)
        other = self._place(region)
        if other[0] != store or not continent:
            return _WAYS[1:3]
        return ("same_continent",) if other[1] == continent else ("other_continent",)

    def _place(self, region: str) -> tuple[str, str]:
        """Return provider and continent of a region; the longest matching prefix wins."""
        found = [
            (len(head), provider, continent)
            for provider, places in self.regions.items()
            for continent, heads in places.items()
            for head in heads
            if region.startswith(head)
        ]
        return max(found)[1:] if found else ("", "")


def region_here(given: str = "") -> str:
    """Return the region of this machine: ``given``, else ``WDS_REGION``, else "" (unknown). No network is asked.

    ``AWS_REGION`` counts only where Amazon itself has set it: in Lambda and ECS (``AWS_EXECUTION_ENV``), and in pods of
    EKS with a role of their own. Elsewhere it is the region that a program talks to, from any machine in the world.
    """
    region = given or variable("WDS_REGION") or ""
    if not region and _set_by_amazon():
        region = variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or ""
    return region.strip()


def _set_by_amazon() -> bool:
    files = (variable("AWS_WEB_IDENTITY_TOKEN_FILE"), variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"))
    in_eks = any("eks.amazonaws.com/" in (file or "") for file in files)
    return in_eks or (variable("AWS_EXECUTION_ENV") or "").startswith("AWS_")


class Meter:
    """Cost of traffic in US dollars. ``region``: of this machine, "" is unknown (see `region_here`)."""

    def __init__(self, table: PriceTable, region: str = "") -> None:
        self.table = table
        self.region = region
        self._prices: dict[tuple[str, str], Price] = {}

    def by_origin(self, traffic: Traffic) -> dict[str, Range]:
        """Return what each origin charges for ``traffic``."""
        dollars = {}
        for name, counted in list(traffic.origins.items()):
            price = self._price(name, counted.region)
            dollars[name] = price.request.times(counted.requests) + price.byte.times(counted.bytes)
        return dollars

    def dollars(self, traffic: Traffic) -> Range:
        """Return the sum over all origins. Where regions are unknown it spans from no charge for bytes to the highest
        price."""
        return total(self.by_origin(traffic).values())

    def forecast(self, traffic: Traffic, done: float, whole: float) -> Range:
        """Return the cost of ``whole`` (samples, bytes, epochs) where ``done`` of them caused ``traffic``. Raise
        ValueError where nothing is done yet."""
        if not done > 0:
            raise ValueError("nothing was read yet, so the cost of the rest cannot be estimated")
        return self.dollars(traffic).times(whole / done)

    def _price(self, origin: str, region: str) -> Price:
        key = (origin, region)
        if key not in self._prices:
            self._prices[key] = self.table.price(origin, region, self.region)
        return self._prices[key]


def meter_of_job() -> Meter:
    """Return the meter that the environment sets up: ``WDS_PRICES``, and the region (`region_here`). Raise ConfigError
    for a table that cannot be read."""
    own = settings()
    return Meter(PriceTable.load(own.prices), region_here(own.region))


def of_pipeline(pipeline: Any, samples: float | None = None) -> Range | None:
    """Return the cost of the readers of ``pipeline`` so far, in all of its processes; with ``samples``, the forecast
    for so many. None where nothing reads; ValueError for a forecast before anything was read."""
    traffic = pipeline.traffic()
    if traffic is None:
        return None
    meter = meter_of_job()
    if samples is None:
        return meter.dollars(traffic)
    return meter.forecast(traffic, pipeline.statistics().samples, samples)


def figures(dollars: Mapping[str, Range], traffic: Traffic) -> str:
    """Return the five dearest origins in words: the cost of each, and for how much traffic."""
    dearest = sorted(dollars, key=lambda name: -dollars[name].high)
    parts = []
    for name in dearest[:_SHOWN]:
        counted = traffic.origins[name]
        where = counted.region or "region unknown"
        parts.append(
            f"{name} ({where}) {dollars[name]} for {counted.requests:,} requests and {counted.bytes / 1e9:,.2f} GB"
        )
    if len(dearest) > _SHOWN:
        parts.append(f"{len(dearest) - _SHOWN} more origins {total(dollars[name] for name in dearest[_SHOWN:])}")
    return "; ".join(parts)


def _region(name: str) -> str:
    return _ZONE.sub("", name.strip().lower())


def _of_amazon() -> bool:
    endpoint = variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL") or ""
    host = endpoint.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0]
    return not endpoint or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _dollars(amount: float) -> str:
    return (
        f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.2g}" if amount >= 1e-4 else f"${amount:.1e}"
    )


@functools.cache
def _built_in() -> Mapping[str, Any]:
    import importlib.resources  # noqa: PLC0415 (only where prices are asked for)

    text = importlib.resources.files("wds_async.observe").joinpath("prices.yaml").read_text(encoding="utf-8")
    return _parsed(text, "prices.yaml")


def _parsed(text: str, where: str) -> Mapping[str, Any]:
    import yaml  # noqa: PLC0415 (only where prices are asked for)

    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as exn:
        raise ConfigError(f"the table of prices {where} is no YAML: {exn}") from exn
    found = _mapping(given, f"the table of prices {where}")
    if unknown := set(found) - set(_SECTIONS):
        raise ConfigError(f"the table of prices {where} has {min(unknown)!r}; its sections are {', '.join(_SECTIONS)}")
    return found


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: must be names with values, not {given!r:.60}")
    return {str(name): value for name, value in given.items()}


def _range(given: Any, where: str) -> Range:
    bounds: Iterable[Any] = given if isinstance(given, list) else (given, given)
    try:
        low, high = (float(bound) for bound in bounds)
        if not 0 <= low <= high:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {given!r} is no price; write dollars, 0 or more, or [lowest, highest]") from None
    return Range(low, high)
