"""Limits on what reading may cost: of a training job (``WDS_COST_LIMIT``), and of a service (``cost_limit``).

Both compare the high end of a range of prices, because a limit that holds only where a guess was right is none. Both
look a few times a second, so what is fetched meanwhile, and what is in flight, comes on top.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wds_async import config, world
from wds_async.errors import CostLimitReached
from wds_async.observe.prices import FREE, Meter, PriceTable, Range, figures, meter_of_job, region_here
from wds_async.transfer.stats import Board, Counters
from wds_async.transfer.traffic import Traffic

if TYPE_CHECKING:
    from wds_async.transfer.reader import ShardReader

__all__ = ["CostLimit", "ServiceCostLimit", "enforce", "limit_of_job"]

logger = logging.getLogger("wds_async")

_LOOK_EVERY_S = 0.5
_LOOK_EVERY_BYTES = 16 << 20
_SERVICE_LOOKS_EVERY_S = 0.25
_NUMBER = struct.Struct("<d")
_limit: CostLimit | None = None


def limit_of_job() -> CostLimit | None:
    """Return the limit of this process and those that it starts; None without ``WDS_COST_LIMIT``. Raise ConfigError for
    a table of prices (``WDS_PRICES``) that cannot be read."""
    global _limit
    dollars = config.settings().cost_limit
    if dollars is None:
        return None
    if _limit is None or _limit.limit != dollars:
        _limit = CostLimit(dollars)
    return _limit


def enforce(reader: ShardReader, limit: CostLimit | None = None) -> None:
    """Stop ``reader`` with CostLimitReached once ``limit`` (default: `limit_of_job`) is spent."""
    limit = limit or limit_of_job()
    if limit is not None:
        limit.watch(reader.counters)
        reader.limit = limit


class CostLimit:
    """``limit`` US dollars for all ranks of a job: each rank may spend its share, together with its workers.

    Each process writes what it has spent into eight bytes of a file that all processes of the rank share, and stops
    where the sum reaches the rank's share. It looks twice a second and each time that 16 MiB more have come. A limit
    starts at nothing when the job is started again. It pickles and survives ``fork``: copies count as one.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._board = Board()  # for its folder, which is removed with the process that made it
        self._meter = meter_of_job()
        self._clock = clock
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._counted: list[Counters] = []
        self._cell: _Cell | None = None
        self._lock = threading.Lock()
        self._alone = False
        self.exhausted = False
        self._look_at = self._look_behind = float("-inf")

    def watch(self, counters: Counters) -> None:
        """Include what a reader of this process counts in ``counters``."""
        if self._pid != os.getpid():  # a forked child has spent nothing yet
            self._start()
        if all(other is not counters for other in self._counted):
            self._counted.append(counters)

    def check(self) -> None:
        """Raise CostLimitReached once the limit is spent. Called for each piece of memory that is read."""
        now, received = self._clock(), sum(counters.get("wire_bytes") for counters in self._counted)
        if now < self._look_at and received < self._look_behind and not self.exhausted:
            return
        self._look_at, self._look_behind = now + _LOOK_EVERY_S, received + _LOOK_EVERY_BYTES
        spent, share = self.spent(), self._share()
        self.exhausted = spent >= share
        if self.exhausted:
            raise CostLimitReached(self._message(spent, share))

    def over(self) -> None:
        """Write down what this process has spent: a reader has ended, and the process may end too."""
        if self._pid == os.getpid():
            self.spent()

    def spent(self) -> float:
        """Write down what this process has spent, and return the sum of all; this one's where no file can be
        written."""
        own = sum(self._meter.dollars(counters.traffic).high for counters in self._counted)
        if self._alone:
            return own
        try:
            with self._lock:  # a program may read in several threads
                if self._cell is None:
                    self._cell = _Cell(self._board.folder)
                return self._cell.put(own)
        except OSError as exn:
            self._alone = True
            logger.warning(
                "WDS_COST_LIMIT: processes cannot share what they have spent (%s), so each stops at its share of the "
                "limit, $%.4g",
                exn, self._share(),
            )  # fmt: skip
            return own

    def _share(self) -> float:
        here = world.place()
        return self.limit / here.world_size / (here.num_workers if self._alone else 1)

    def _message(self, spent: float, share: float) -> str:
        here, traffic = world.place(), Traffic()
        for counters in self._counted:
            traffic.merge(counters.traffic)
        whose = f": the share of rank {here.rank} of {here.world_size}, ${share:.4g}," if here.world_size > 1 else ""
        where = self._meter.region or "an unknown region: set WDS_REGION"
        own = figures(self._meter.by_origin(traffic), traffic)
        return (
            f"WDS_COST_LIMIT=${self.limit:g}{whose} is spent: up to ${spent:.4g} by the table of prices, seen from "
            f"{where}. This process alone: {own or 'nothing'}. Raise WDS_COST_LIMIT to go on; correct wrong prices or "
            "regions by WDS_PRICES and WDS_REGION; a cache (wds-async serve, WDS_CACHE) pays once"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "board": self._board, "meter": self._meter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        global _limit
        self.limit, self._board, self._meter = state["limit"], state["board"], state["meter"]
        self._clock = time.monotonic
        self._start()
        _limit = _limit or self  # a spawned worker spends its parent's


class _Cell:
    """This process's eight bytes in the file of all. A process that has ended leaves what it spent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "spent.cells"
        binary = getattr(os, "O_BINARY", 0)
        append = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | binary, 0o600)
        try:
            os.write(append, _NUMBER.pack(0.0))  # the place that it gets belongs to this process alone
            self._at = os.lseek(append, 0, os.SEEK_CUR) - _NUMBER.size
        finally:
            os.close(append)
        self._file = os.open(path, os.O_RDWR | binary)
        weakref.finalize(self, os.close, self._file)

    def put(self, dollars: float) -> float:
        """Write down what this process has spent so far, and return the sum of all."""
        os.lseek(self._file, self._at, os.SEEK_SET)
        os.write(self._file, _NUMBER.pack(dollars))
        size = os.lseek(self._file, 0, os.SEEK_END)
        os.lseek(self._file, 0, os.SEEK_SET)
        cells = os.read(self._file, size)
        whole = cells[: len(cells) - len(cells) % _NUMBER.size]
        return math.fsum(number for (number,) in _NUMBER.iter_unpack(whole))


class ServiceCostLimit:
    """Cost of a service's ``traffic`` since its first start, and a ``limit`` of dollars (None: no limit).

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
        self._traffic, self._clock, self._wall = traffic, clock, wall
        self._before = self._before_today = FREE
        self._at_midnight = FREE
        """Cost of this process's traffic when the day began."""
        self._day = self._today()
        self._use(table, region, limit, per_day)

    def _use(self, table: PriceTable, region: str, limit: float | None, per_day: bool) -> None:
        self.meter = Meter(table, region_here(region))
        self.limit, self.per_day = limit, per_day
        self.exhausted = False
        """True if the limit was reached; it stays so, or until the end of the day."""
        self._looked_at = float("-inf")

    def dollars(self) -> Range:
        """Return the cost of this process's traffic so far."""
        return self.meter.dollars(self._traffic)

    def configure(self, table: PriceTable, *, region: str = "", limit: float | None = None, per_day: bool) -> None:
        """Use these prices and this limit from now on. This process's traffic is priced anew, except that today's cost
        stays as it is for a limit of a day."""
        self._before_today = Range(*self.state()["today"])
        self._use(table, region, limit, per_day)
        self._at_midnight = self.dollars()

    def spent(self) -> Range:
        """Return what counts towards the limit: since the first start, or since midnight where it is for a day."""
        now = self._turn_day()
        return self._spent_today(now) if self.per_day else self._before + now

    def _spent_today(self, now: Range) -> Range:
        return self._before_today + now.since(self._at_midnight)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add what an earlier process has spent, from its `state`. Raise ValueError for an invalid one."""
        try:
            before, today, day = _range(state["total"]), _range(state["today"]), state["day"]
        except (KeyError, TypeError, ValueError) as exn:
            raise ValueError(f"{type(exn).__name__}: {exn}") from exn
        self._before, self._before_today = before, today if day == self._day else FREE

    def state(self) -> dict[str, Any]:
        """Return what was spent, for a later process, as JSON."""
        now = self._turn_day()
        return {"total": (self._before + now).as_list(), "day": self._day, "today": self._spent_today(now).as_list()}

    def check(self) -> None:
        """Raise CostLimitReached once the limit is reached: nothing more may be fetched."""
        if self.limit is None:
            return
        now = self._clock()
        if now - self._looked_at >= _SERVICE_LOOKS_EVERY_S and (self.per_day or not self.exhausted):
            self._looked_at = now
            if self.spent().high >= self.limit and not self.exhausted:
                self.exhausted = True
                logger.error("%s", self._message())
        if self.exhausted:
            raise CostLimitReached(self._message())

    def _message(self) -> str:
        origins = figures(self.meter.by_origin(self._traffic), self._traffic)
        since = f"; since its start: {origins}" if origins else ""
        day, again = ("a day ", ", wait until 00:00 UTC") if self.per_day else ("", "")
        return (
            f"cost_limit of ${self.limit:g} {day}is reached: {self.spent()} by the table of prices{since}. Nothing "
            f"more is fetched; cached shards are still served. Raise cost_limit and reload the service (SIGHUP){again};"
            " correct wrong prices by region and prices"
        )

    def _turn_day(self) -> Range:
        """Return the cost of the traffic so far; begin a new day where midnight has passed."""
        now, today = self.dollars(), self._today()
        if today != self._day:
            self._day, self._before_today, self._at_midnight = today, FREE, now
            if self.per_day:
                self.exhausted = False
        return now

    def _today(self) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(self._wall()))


def _range(value: Any) -> Range:
    low, high = (float(bound) for bound in value)
    if not 0 <= low <= high:
        raise ValueError(f"{value!r} is no range of dollars")
    return Range(low, high)
