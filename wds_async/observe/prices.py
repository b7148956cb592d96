"""What stores charge: a table of list prices (``prices.yaml``, or one of the user's), asked by origin and regions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from wds_async.environment import variable
from wds_async.errors import ConfigError

__all__ = ["Price", "PriceTable", "Range"]

GB = 1e9
"""Bytes of a priced GB. Some providers count 2^30, which is less money for the same bytes."""
_WAYS = ("same_region", "same_continent", "other_continent", "internet")
_SECTIONS = ("date", "stores", "hosts", "origins", "regions")
# A zone is a region with a letter behind it: us-central1-a, us-east-1a.
_ZONE = re.compile(r"(?<=\d)-?[a-z]$")


@dataclass(frozen=True, slots=True)
class Range:
    """From ``low`` to ``high``, both included; the same number twice where it is known."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> Range:
        """As many times as much."""
        return Range(self.low * factor, self.high * factor)

    def as_list(self) -> list[float]:
        """Both ends, for JSON."""
        return [self.low, self.high]

    def __str__(self) -> str:
        low, high = (_dollars(bound) for bound in (self.low, self.high))
        return low if low == high else f"{low} to {high}"


FREE = Range(0.0, 0.0)


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
        """This one with other prices in their place."""
        values = {name: _range(value, f"{where}: {name}") for name, value in given.items()}
        if strangers := set(values) - {"per_1000_requests", *_WAYS}:
            raise ConfigError(
                f"{where}: {min(strangers)!r} is no price; they are per_1000_requests, {', '.join(_WAYS)}"
            )
        ways = {**self.ways, **{way: values[way] for way in _WAYS if way in values}}
        return _Store(values.get("per_1000_requests", self.per_1000_requests), ways)

    def gigabyte(self, *ways: str) -> Range:
        """What a GB costs by one of these ways."""
        prices = [self.ways.get(way, self.ways.get("internet", FREE)) for way in ways]
        return Range(min(price.low for price in prices), max(price.high for price in prices))


@dataclass(frozen=True)
class PriceTable:
    """Prices by store, and what tells an origin's store and region. Values are US dollars."""

    date: str = ""
    stores: Mapping[str, _Store] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    regions: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path | None = None) -> Self:
        """The built-in table, with what the YAML file at ``path`` says in its place. ConfigError where that cannot be
        read or understood."""
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
        for name, said in _mapping(given.get("origins"), f"{where}: origins").items():
            origins[name] = _mapping(said, f"{where}: {name}")
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
        """What ``origin`` (``s3://bucket``, as `transfer.traffic.origin_of` names it) charges a machine in ``here``.
        ``region`` is the origin's; "" is unknown, and then the price goes from the lowest that it may be to the
        highest."""
        name = self.store_of(origin)
        store = self.stores.get(name, _Store(FREE, {}))
        own = self._own(origin)
        region = str(own.get("region", "")) or region
        store = store.changed({key: value for key, value in own.items() if key != "region"}, origin)
        gigabyte = store.gigabyte(*self._ways(name, _region(region), _region(here)))
        return Price(store.per_1000_requests.times(1 / 1000), gigabyte.times(1 / GB))

    def store_of(self, origin: str) -> str:
        """Whose prices those of ``origin`` are: a name in ``stores``."""
        scheme, _, rest = origin.partition("://")
        if scheme in ("http", "https"):
            host = rest.rpartition(":")[0] if re.search(r":\d+$", rest) else rest
            ends = [end for end in self.hosts if host == end or host.endswith(f".{end}")]
            return self.hosts[max(ends, key=len)] if ends else "http"
        if (scheme == "s3" and not _of_amazon()) or (scheme == "gs" and variable("STORAGE_EMULATOR_HOST")):
            return "own"
        return scheme if scheme in self.stores else "own"

    def _own(self, origin: str) -> Mapping[str, Any]:
        heads = [head for head in self.origins if origin.startswith(head)]
        return self.origins[max(heads, key=len)] if heads else {}

    def _ways(self, store: str, region: str, here: str) -> tuple[str, ...]:
        """Which of the ways from the store to this machine there may be."""
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
        """Provider and continent of a region; the longest beginning wins."""
        found = [
            (len(head), provider, continent)
            for provider, places in self.regions.items()
            for continent, heads in places.items()
            for head in heads
            if region.startswith(head)
        ]
        return max(found)[1:] if found else ("", "")


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
    if strangers := set(found) - set(_SECTIONS):
        raise ConfigError(
            f"the table of prices {where} has {min(strangers)!r}; its sections are {', '.join(_SECTIONS)}"
        )
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
