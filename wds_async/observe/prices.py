"""Prices of stores, and the cost of traffic by a table of list prices (``prices.yaml``, or the user's)."""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from wds_async.config import settings
from wds_async.environment import variable
from wds_async.errors import ConfigError
from wds_async.transfer.traffic import Traffic

__all__ = ["FREE", "Meter", "Price", "PriceTable", "Range", "figures", "meter_of_job", "of_pipeline", "region_here"]

T = TypeVar("T")

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

    def __mul__(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)

    def since(self, before: Range) -> Range:
        """Return the change since ``before``, at least 0: once its region is known, traffic may turn out cheaper."""
        return Range(max(0.0, self.low - before.low), max(0.0, self.high - before.high))

    def as_list(self) -> list[float]:
        """Return both ends, for JSON."""
        return [self.low, self.high]

    def __str__(self) -> str:
        low, high = (_dollars(bound) for bound in (self.low, self.high))
        return low if low == high else f"{low} to {high}"


def _dollars(amount: float) -> str:
    if amount >= 0.1 or amount == 0:
        return f"${amount:,.2f}"
    return f"${amount:.2g}" if amount >= 1e-4 else f"${amount:.1e}"


FREE = Range(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars of one request, and of one byte that leaves the store."""

    request: Range
    byte: Range


@dataclass(frozen=True, slots=True)
class _Store:
    """Prices of a store; ``ways`` has dollars a GB, by `_WAYS`."""

    per_1000_requests: Range = FREE
    ways: Mapping[str, Range] = field(default_factory=dict)

    def changed(self, prices: Mapping[str, Any], where: str) -> _Store:
        """Return a copy with ``prices`` in place of its own."""
        ways = {name: _range(value, f"{where}: {name}") for name, value in prices.items()}
        requests = ways.pop("per_1000_requests", self.per_1000_requests)
        if unknown := set(ways) - set(_WAYS):
            raise ConfigError(f"{where}: {min(unknown)!r} is no price; they are per_1000_requests, {', '.join(_WAYS)}")
        return _Store(requests, {**self.ways, **ways})

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

    def _with(self, sections: Mapping[str, Any], where: str) -> Self:
        def section(name: str) -> dict[str, Any]:
            return _mapping(sections.get(name), f"{where}: {name}")

        stores = dict(self.stores)
        for name, prices in section("stores").items():
            stores[name] = stores.get(name, _Store()).changed(_mapping(prices, f"{where}: {name}"), f"{where}: {name}")
        hosts = {**self.hosts, **section("hosts")}
        for host, store in hosts.items():
            if store not in stores:
                raise ConfigError(f"{where}: hosts: {host} is of {store!r}, of which there are no prices")
        own = {name: _mapping(values, f"{where}: {name}") for name, values in section("origins").items()}
        for name, values in own.items():
            _Store().changed(_without_region(values), f"{where}: {name}")
        regions = dict(self.regions)
        for name, continents in section("regions").items():
            more = _mapping(continents, f"{where}: regions of {name}")
            prefixes = {continent: tuple(map(str, heads)) for continent, heads in more.items()}
            regions[name] = {**regions.get(name, {}), **prefixes}
        return type(self)(str(sections.get("date", self.date)), stores, hosts, {**self.origins, **own}, regions)

    def price(self, origin: str, region: str = "", here: str = "") -> Price:
        """Return what ``origin`` (``s3://bucket``, see `transfer.traffic.origin_of`) charges a machine in ``here``.
        ``region`` is the origin's; "" is unknown, and the price is then the range of all possible ones."""
        name = self.store_of(origin)
        own = _longest(self.origins, origin.startswith, {})
        store = self.stores.get(name, _Store()).changed(_without_region(own), origin)
        gigabyte = store.gigabyte(*self._ways(name, _region(str(own.get("region", "")) or region), _region(here)))
        return Price(store.per_1000_requests * (1 / 1000), gigabyte * (1 / GB))

    def store_of(self, origin: str) -> str:
        """Return the name in ``stores`` whose prices ``origin`` has."""
        scheme, _, rest = origin.partition("://")
        if scheme in ("http", "https"):
            host = re.sub(r":\d+$", "", rest)
            return _longest(self.hosts, lambda end: host == end or host.endswith(f".{end}"), "http")
        if (scheme == "s3" and not _of_amazon()) or (scheme == "gs" and variable("STORAGE_EMULATOR_HOST")):
            return "own"
        return scheme if scheme in self.stores else "own"

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
        """Return provider and continent of a region."""
        places = {
            head: (provider, continent)
            for provider, continents in self.regions.items()
            for continent, heads in continents.items()
            for head in heads
        }
        return _longest(places, region.startswith, ("", ""))


def _longest(rules: Mapping[str, T], matches: Callable[[str], bool], otherwise: T) -> T:
    """Return the value of the longest name that matches."""
    name = max(filter(matches, rules), key=len, default=None)
    return otherwise if name is None else rules[name]


def _without_region(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "region"}


def region_here(region: str = "") -> str:
    """Return the region of this machine: ``region``, else ``WDS_REGION``, else "" (unknown). No request is made.

    ``AWS_REGION`` counts only where Amazon itself has set it: in Lambda and ECS (``AWS_EXECUTION_ENV``), and in pods of
    EKS with a role of their own. Elsewhere it is the region that a program talks to, from any machine in the world.
    """
    region = region or variable("WDS_REGION") or ""
    files = (variable("AWS_WEB_IDENTITY_TOKEN_FILE"), variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"))
    in_eks = any("eks.amazonaws.com/" in (file or "") for file in files)
    if not region and (in_eks or (variable("AWS_EXECUTION_ENV") or "").startswith("AWS_")):
        region = variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or ""
    return region.strip()


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
            key = (name, counted.region)
            if key not in self._prices:
                self._prices[key] = self.table.price(*key, self.region)
            dollars[name] = self._prices[key].request * counted.requests + self._prices[key].byte * counted.bytes
        return dollars

    def dollars(self, traffic: Traffic) -> Range:
        """Return the sum over all origins. Where regions are unknown it spans from no charge for bytes to the highest
        price."""
        return sum(self.by_origin(traffic).values(), FREE)


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
    dollars = meter_of_job().dollars(traffic)
    if samples is None:
        return dollars
    done: float = pipeline.statistics().samples
    if not done:
        raise ValueError("nothing was read yet, so the cost of the rest cannot be estimated")
    return dollars * (samples / done)


def figures(dollars: Mapping[str, Range], traffic: Traffic) -> str:
    """Return the five dearest origins in words: the cost of each, and for how much traffic."""
    dearest = sorted(dollars, key=lambda name: -dollars[name].high)
    parts = []
    for name in dearest[:_SHOWN]:
        counted = traffic.origins[name]
        amount = f"{counted.requests:,} requests and {counted.bytes / 1e9:,.2f} GB"
        parts.append(f"{name} ({counted.region or 'region unknown'}) {dollars[name]} for {amount}")
    if len(dearest) > _SHOWN:
        rest = sum((dollars[name] for name in dearest[_SHOWN:]), FREE)
        parts.append(f"{len(dearest) - _SHOWN} more origins {rest}")
    return "; ".join(parts)


def _region(name: str) -> str:
    return _ZONE.sub("", name.strip().lower())


def _of_amazon() -> bool:
    endpoint = variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL") or ""
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    return not endpoint or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


@functools.cache
def _built_in() -> Mapping[str, Any]:
    text = Path(__file__).with_name("prices.yaml").read_text(encoding="utf-8")
    return _parsed(text, "prices.yaml")


def _parsed(text: str, where: str) -> Mapping[str, Any]:
    import yaml  # noqa: PLC0415 (only where prices are needed)

    try:
        sections = _mapping(yaml.safe_load(text), f"the table of prices {where}")
    except yaml.YAMLError as exn:
        raise ConfigError(f"the table of prices {where} is no YAML: {exn}") from exn
    if unknown := set(sections) - set(_SECTIONS):
        raise ConfigError(f"the table of prices {where} has {min(unknown)!r}; its sections are {', '.join(_SECTIONS)}")
    return sections


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be names with values, not {value!r:.60}")
    return {str(name): each for name, each in (value or {}).items()}


def _range(value: Any, where: str) -> Range:
    try:
        low, high = (float(bound) for bound in (value if isinstance(value, list) else (value, value)))
        if not 0 <= low <= high:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {value!r} is no price; write dollars, 0 or more, or [lowest, highest]") from None
    return Range(low, high)
