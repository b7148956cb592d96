"""What reading costs: traffic (`transfer.traffic`) priced by a table, forecasts, and a limit that is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wds_async.config import settings
from wds_async.environment import variable
from wds_async.errors import CostLimitReached
from wds_async.observe.prices import Price, PriceTable, Range
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
    """What ``traffic`` has cost since it began, and whether that, with what was spent before, is ``limit`` dollars
    (None: no limit).

    The high end of the range is compared: a limit that holds only if the guess about regions was right would be none.
    Looked at four times a second at most, so what is fetched meanwhile, and what is under way, comes on top.

    ``per_day``: the limit is for a day, which begins at midnight (UTC) by the clock ``wall``.
    """

    def __init__(
        self,
        traffic: Traffic,
        table: PriceTable,
        *,
        region: str = "",
        limit: float | None = None,
        per_day: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.limit = limit
        self.per_day = per_day
        self.reached = False
        """Whether it was reached; it stays so, or until the end of the day."""
        self._wall = wall
        self._before = self._before_today = Range(0.0, 0.0)
        self._day = self._today()
        self._at_midnight = Range(0.0, 0.0)
        """What the traffic of this process had cost when the day began."""
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

    def configure(self, table: PriceTable, *, region: str = "", limit: float | None = None, per_day: bool) -> None:
        """Use these prices and this limit from now on. What this process has spent is priced anew, except that what was
        spent today stays as it is for a limit of a day."""
        today = self.state()["today"]
        self._meter = Meter(table, region_here(region))
        self._before_today, self._at_midnight = Range(*today), self.dollars()
        self.limit, self.per_day, self.reached, self._looked_at = limit, per_day, False, float("-inf")

    def by_origin(self, traffic: Traffic) -> dict[str, Range]:
        """What each origin charges for ``traffic``."""
        return self._meter.by_origin(traffic)

    def spent(self) -> Range:
        """What counts towards the limit: since the first start, or since midnight where it is for a day."""
        now = self._turn_day()
        if self.per_day:
            return Range(
                self._before_today.low + max(0.0, now.low - self._at_midnight.low),
                self._before_today.high + max(0.0, now.high - self._at_midnight.high),
            )  # a bucket whose region becomes known was cheaper than was thought
        return self._before + now

    def restore(self, state: Mapping[str, Any]) -> None:
        """Count what an earlier process has spent too: its `state`. ValueError for what is none."""
        try:
            before, today = _range(state["total"]), _range(state["today"])
            self._before_today = today if state["day"] == self._day else Range(0.0, 0.0)
        except (KeyError, TypeError, ValueError) as exn:
            raise ValueError(f"{type(exn).__name__}: {exn}") from exn
        self._before = before

    def state(self) -> dict[str, Any]:
        """What was spent, for a later process; JSON."""
        now, day = self._turn_day(), self._at_midnight
        today = [self._before_today.low + now.low - day.low, self._before_today.high + now.high - day.high]
        return {"total": (self._before + now).as_list(), "day": self._day, "today": [max(0.0, part) for part in today]}

    def check(self) -> None:
        """CostLimitReached once the limit was reached: nothing more may be fetched."""
        if self.limit is None:
            return
        now = self._clock()
        if now - self._looked_at >= _LOOK_EVERY_S and (self.per_day or not self.reached):
            self._looked_at = now
            if self.spent().high >= self.limit and not self.reached:
                self.reached = True
                logger.error("%s", self._words())
        if self.reached:
            raise CostLimitReached(self._words())

    def _words(self) -> str:
        figured = figures(self._meter.by_origin(self._traffic), self._traffic)
        since = f"; since its start: {figured}" if figured else ""
        day, again = ("a day ", ", wait until 00:00 UTC") if self.per_day else ("", "")
        return (
            f"cost_limit of ${self.limit:g} {day}is reached: {self.spent()} by the table of prices{since}. Nothing "
            f"more is fetched; what is cached is served on. Raise cost_limit and reload the service (SIGHUP){again}; "
            "where these prices are wrong, set region and prices"
        )

    def _turn_day(self) -> Range:
        """What the traffic has cost so far; begin a new day where it is one."""
        now, today = self.dollars(), self._today()
        if today != self._day:
            self._day, self._before_today, self._at_midnight = today, Range(0.0, 0.0), now
            if self.per_day:
                self.reached = False
        return now

    def _today(self) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(self._wall()))


def _range(value: Any) -> Range:
    low, high = (float(bound) for bound in value)
    if not 0 <= low <= high:
        raise ValueError(f"{value!r} is no range of dollars")
    return Range(low, high)
