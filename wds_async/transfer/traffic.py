"""Traffic by origin: requests, bytes, seconds, faults.

An origin is what is paid for or limited: a store with its bucket, or a host. One thread counts; others read plain
numbers, and sums of several processes (`Traffic.merge`, `Traffic.of_dict`).
"""

from __future__ import annotations

import re
import urllib.parse
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wds_async.storage.stores import load

if TYPE_CHECKING:  # counting needs no backend
    from wds_async.storage.base import Location

__all__ = ["BOUNDS_S", "FILES", "OTHERS", "Histogram", "OriginTraffic", "Traffic", "origin_of", "region_of"]

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0,
            30.0, 60.0)  # fmt: skip
"""Upper bounds of a histogram's classes; one class more is for what took longer."""
FILES = "file"
"""The origin of what is read from this host's file systems."""
OTHERS = "others"
"""The origin of all beyond the first thousand of a process."""

_MOST_ORIGINS = 1000
_PLAIN = {"local": FILES, "pipe": "pipe", "stdin": "stdin", "opener": "opener"}
_COUNTS = ("requests", "bytes", "retries", "throttled", "hedges", "hedged_bytes", "errors", "connections")
# Amazon's own endpoints say where they are; what only speaks its protocol does not.
_AMAZON = re.compile(
    r"(?:^|\.)s3(?:-fips|express-[a-z0-9-]+)?(?:\.dualstack)?[.-]([a-z]{2}(?:-[a-z]+)+-\d+)\.amazonaws\.com(?:\.cn)?$"
)


class Histogram:
    """Histogram of durations: ``counts`` by the classes of `BOUNDS_S`, and the ``total`` in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Return the seconds that the share ``q`` (0 to 1) took at most, interpolated between two bounds; beyond the
        last one that bound, 0 without any."""
        wanted, seen = q * self.count, 0
        for number, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                if number == len(BOUNDS_S):
                    return BOUNDS_S[-1]
                low = BOUNDS_S[number - 1] if number else 0.0
                return low + (BOUNDS_S[number] - low) * max(0.0, wanted - seen) / count
            seen += count
        return 0.0

    def merge(self, other: Histogram) -> None:
        """Add the counts of another."""
        self.counts[:] = (a + b for a, b in zip(self.counts, other.counts, strict=True))
        self.total += other.total


@dataclass(slots=True, eq=False)
class OriginTraffic:
    """Traffic of the origin ``name``, of this process or of several."""

    name: str = ""
    requests: int = 0
    """Requests for bytes of objects, repeated and second ones included; not those for credentials and listings. Of a
    file system: reads."""
    bytes: int = 0
    """Body bytes that came, with what came twice."""
    retries: int = 0
    """Faults that were healed, or tried."""
    throttled: int = 0
    """Answers that throttle; among the retries."""
    hedges: int = 0
    """Requests that were made a second time because the first was slow."""
    hedged_bytes: int = 0
    """Bytes that came twice for it; among the bytes."""
    errors: int = 0
    """Reads that were given up."""
    connections: int = 0
    """Requests under way now, each over a connection of its own."""
    seconds: Histogram = field(default_factory=Histogram)
    """From a request to the last byte of its answer, of good ones."""
    region: str = ""
    """Its region, as its provider names it; "" if unknown."""

    def merge(self, other: OriginTraffic) -> None:
        """Add the counts of another."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds.merge(other.seconds)
        self.region = self.region or other.region

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON and `Traffic.of_dict`."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        return counts | {"counts": list(self.seconds.counts), "seconds": self.seconds.total, "region": self.region}


class Traffic:
    """The origins of one process, by name: ``s3://bucket``, ``https://host``, ``file`` (see `origin_of`)."""

    def __init__(self) -> None:
        self.origins: dict[str, OriginTraffic] = {}

    def of(self, origin: str) -> OriginTraffic:
        """Return the counts of ``origin``; beyond a thousand of them, those of `OTHERS`."""
        traffic = self.origins.get(origin)
        if traffic is None:
            name = origin if len(self.origins) < _MOST_ORIGINS else OTHERS
            traffic = self.origins.setdefault(name, OriginTraffic(name))
        return traffic

    def merge(self, other: Traffic) -> None:
        """Add the counts of another."""
        for name, traffic in list(other.origins.items()):
            self.of(name).merge(traffic)

    def since(self, before: Mapping[str, Mapping[str, Any]]) -> Traffic:
        """Return what was counted since an earlier `as_dict` of the same."""
        passed = Traffic.of_dict(self.as_dict())
        for name, values in before.items():
            one = passed.origins[name]
            for count in _COUNTS:
                setattr(one, count, getattr(one, count) - values[count])
            one.seconds.counts[:] = (a - b for a, b in zip(one.seconds.counts, values["counts"], strict=True))
            one.seconds.total -= values["seconds"]
        return passed

    def __add__(self, other: Traffic) -> Traffic:
        total = Traffic()
        total.merge(self)
        total.merge(other)
        return total

    def hang_up(self) -> None:
        """Set the requests in flight to 0: the process that counted has ended."""
        for traffic in self.origins.values():
            traffic.connections = 0

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain data, for JSON and `of_dict`."""
        return {name: traffic.as_dict() for name, traffic in list(self.origins.items())}

    @classmethod
    def of_dict(cls, origins: Mapping[str, Mapping[str, Any]]) -> Traffic:
        """Return the traffic of an `as_dict`. KeyError or TypeError for anything else."""
        traffic = cls()
        for name, values in origins.items():
            one = traffic.origins[name] = OriginTraffic(name, region=str(values["region"]))
            for count in _COUNTS:
                setattr(one, count, int(values[count]))
            one.seconds.counts[:], one.seconds.total = map(int, values["counts"]), float(values["seconds"])
            if len(one.seconds.counts) != len(BOUNDS_S) + 1:
                raise TypeError(f"{len(one.seconds.counts)} classes of time")
        return traffic


def origin_of(location: Location) -> str:
    """Return the origin of the shard at ``location``: ``s3://bucket``, ``gs://bucket``, ``az://account/container``,
    ``ais://bucket``, ``hf://repository``, ``scheme://host`` (with the port where it is named), ``file``; no secrets."""
    if plain := _PLAIN.get(location.kind):
        return plain
    spec, target = location.spec, location.target
    if spec.origin:
        origin: str = load(spec.origin)(target, location.options)
        return origin
    host = target.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]
    if spec.buckets:
        return f"{spec.schemes[0]}://{host}"
    return f"{location.scheme}://{host.lower() if spec.guarded else host}"


def region_of(url: str) -> str:
    """Return the region in the host of a request's ``url``; "" without one."""
    match = _AMAZON.search(urllib.parse.urlsplit(url).hostname or "")
    return match[1] if match else ""
