"""What reading costs: traffic (`transfer.traffic`) priced by a table, forecasts, and a limit that is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wds_async.config import settings
from wds_async.environment import variable
from wds_async.errors import CostLimitReached
from wds_async.pricetable import Price, PriceTable, Range
from wds_async.transfer.traffic import Traffic

__all__ = ["Meter", "Spending", "figures", "meter_of_job", "of_pipeline", "region_here", "total"]

logger = logging.getLogger("wds_async")

_LOOK_EVERY_S = 0.25
_SHOWN = 5


def total(ranges: Iterable[Range]) -> Range:
    """All of them together."""
    return sum(ranges, Range(0.0, 0.0))


def region_here(given: str = "") -> str:
    """The region that this machine is in: ``given``, else ``WDS_REGION``; "" where nobody says.

    ``AWS_REGION`` tells which region a program wants to talk to, on any machine in the world. It is believed only where
    Amazon itself has set it: in Lambda and ECS (``AWS_EXECUTION_ENV``), and in pods of EKS with a role of their own. No
    network is asked.
    """
    said = given or variable("WDS_REGION") or ""
    if not said and _set_by_amazon():
        said = variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or ""
    return said.strip()


def _set_by_amazon() -> bool:
    files = (variable("AWS_WEB_IDENTITY_TOKEN_FILE"), variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"))
    in_eks = any("eks.amazonaws.com/" in (file or "") for file in files)
    return in_eks or (variable("AWS_EXECUTION_ENV") or "").startswith("AWS_")


class Meter:
    """Turns traffic into US dollars. ``region``: where this machine is; "" is unknown (see `region_here`)."""

    def __init__(self, table: PriceTable, region: str = "") -> None:
        self.table = table
        self.region = region
        self._known: dict[tuple[str, str], Price] = {}

    def by_origin(self, traffic: Traffic) -> dict[str, Range]:
        """What each origin charges for it."""
        found = {}
        for name, counted in list(traffic.origins.items()):
            price = self._price(name, counted.region)
            found[name] = price.request.times(counted.requests) + price.byte.times(counted.bytes)
        return found

    def dollars(self, traffic: Traffic) -> Range:
        """What it costs altogether. Where regions are not known the range goes from nothing for the bytes to the
        highest price that there is."""
        return total(self.by_origin(traffic).values())

    def forecast(self, traffic: Traffic, done: float, whole: float) -> Range:
        """What the whole will have cost where ``done`` of ``whole`` (samples, bytes, epochs) cost this much.
        ValueError where nothing is done yet: nobody can say then."""
        if not done > 0:
            raise ValueError("nothing was read yet, so nobody knows what the rest will cost")
        return self.dollars(traffic).times(whole / done)

    def _price(self, origin: str, region: str) -> Price:
        key = (origin, region)
        if key not in self._known:
            self._known[key] = self.table.price(origin, region, self.region)
        return self._known[key]


def meter_of_job() -> Meter:
    """The meter that the environment sets up: ``WDS_PRICES``, and the region (`region_here`). ConfigError for a table
    that cannot be read."""
    known = settings()
    return Meter(PriceTable.load(known.prices), region_here(known.region))


def of_pipeline(pipeline: Any, samples: float | None = None) -> Range | None:
    """What the readers of ``pipeline`` have cost so far, in all of its processes; with ``samples``, what so many will
    have cost. None where nothing reads; ValueError for a forecast before anything was read."""
    traffic = pipeline.traffic()
    if traffic is None:
        return None
    meter = meter_of_job()
    if samples is None:
        return meter.dollars(traffic)
    return meter.forecast(traffic, pipeline.statistics().samples, samples)


def figures(dollars: Mapping[str, Range], traffic: Traffic) -> str:
    """The dearest origins in words: what each cost, and for what."""
    dearest = sorted(dollars, key=lambda name: -dollars[name].high)
    told = []
    for name in dearest[:_SHOWN]:
        counted = traffic.origins[name]
        where = counted.region or "region unknown"
        told.append(
            f"{name} ({where}) {dollars[name]} for {counted.requests:,} requests and {counted.bytes / 1e9:,.2f} GB"
        )
    if len(dearest) > _SHOWN:
        told.append(f"{len(dearest) - _SHOWN} more origins {total(dollars[name] for name in dearest[_SHOWN:])}")
    return "; ".join(told)


class Spending:
    """What ``traffic`` has cost since it began, and whether that is ``limit`` dollars (None: no limit).

    The high end of the range is compared: a limit that holds only if the guess about regions was right would be none.
    Looked at four times a second at most, so what is fetched meanwhile, and what is under way, comes on top.
    """

    def __init__(
        self,
        traffic: Traffic,
        table: PriceTable,
        *,
        region: str = "",
        limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.reached = False
        """Whether it was reached; it stays so."""
        self._traffic = traffic
        self._meter = Meter(table, region_here(region))
        self._clock = clock
        self._looked_at = float("-inf")

    @property
    def region(self) -> str:
        """Where this machine is taken to be."""
        return self._meter.region

    def dollars(self) -> Range:
        """What it has cost so far."""
        return self._meter.dollars(self._traffic)

    def by_origin(self, traffic: Traffic) -> dict[str, Range]:
        """What each origin charges for ``traffic``."""
        return self._meter.by_origin(traffic)

    def check(self) -> None:
        """CostLimitReached once the limit was reached: nothing more may be fetched."""
        if self.limit is None:
            return
        now = self._clock()
        if not self.reached and now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            if self.dollars().high >= self.limit:
                self.reached = True
                logger.error("%s", self._words())
        if self.reached:
            raise CostLimitReached(self._words())

    def _words(self) -> str:
        dollars = self._meter.by_origin(self._traffic)
        return (
            f"cost_limit of ${self.limit:g} is reached: {total(dollars.values())} by the table of prices "
            f"({figures(dollars, self._traffic)}). Nothing more is fetched; what is cached is served on. Raise "
            "cost_limit and restart the service; where these prices are wrong, set region and prices"
        )
