"""The limit of a training job's cost (``WDS_COST_LIMIT``), kept by all of its processes together.

Each process that reads writes down what it has spent, in eight bytes of a file that they share, looks at the others'
twice a second or more often, and stops where the sum reaches the limit.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wds_async import config, world
from wds_async.errors import CostLimitReached
from wds_async.observe.costs import figures, meter_of_job
from wds_async.transfer.reader import ShardReader
from wds_async.transfer.stats import Board, Counters
from wds_async.transfer.traffic import Traffic

__all__ = ["Purse", "purse", "spend"]

logger = logging.getLogger("wds_async")

_LOOK_EVERY_S = 0.5
_LOOK_EVERY_BYTES = 16 << 20
_NUMBER = struct.Struct("<d")
_purse: Purse | None = None


def purse() -> Purse | None:
    """The one of this process and those that it starts; None without ``WDS_COST_LIMIT``. ConfigError for a table of
    prices (``WDS_PRICES``) that cannot be read."""
    global _purse
    limit = config.settings().cost_limit
    if limit is None:
        return None
    if _purse is None or _purse.limit != limit:
        _purse = Purse(limit)
    return _purse


def spend(reader: ShardReader, of: Purse | None = None) -> None:
    """Let ``reader`` read while there is money left: of ``of``, else of this process's purse. Without a limit, nothing
    is counted."""
    of = of or purse()
    if of is not None:
        of.watch(reader.counters)
        reader.limit = of


class Purse:
    """``limit`` US dollars for all ranks of the run: each may spend its share, together with its workers.

    The high end of what traffic costs is compared, because a limit that holds only where a guess was right is none.
    What each process has in its window, and spends in half a second or in 16 MiB, may come on top. It counts from the
    start of the job: one that is started again begins at nothing. Pickles and survives ``fork``: then others spend of
    the same.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._board = Board()  # for its folder, which goes with the process that made it
        self._meter = meter_of_job()
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._counted: list[Counters] = []
        self._cell: _Cell | None = None
        self._lock = threading.Lock()
        self._alone = self._reached = False
        self._look_at = self._look_behind = float("-inf")

    def watch(self, counters: Counters) -> None:
        """Count what a reader of this process counts there."""
        if self._pid != os.getpid():  # a forked child has spent nothing yet
            self._begin()
        if all(known is not counters for known in self._counted):
            self._counted.append(counters)

    def check(self) -> None:
        """CostLimitReached once the job has spent its limit. Called for each piece of memory that is read; it looks
        twice a second, and each time that 16 MiB more have come."""
        now, came = self._clock(), sum(counters.get("wire_bytes") for counters in self._counted)
        if now < self._look_at and came < self._look_behind and not self._reached:
            return
        self._look_at, self._look_behind = now + _LOOK_EVERY_S, came + _LOOK_EVERY_BYTES
        spent, allowed = self._together(self._own()), self._allowed()
        self._reached = spent >= allowed
        if self._reached:
            raise CostLimitReached(self._words(spent, allowed))

    def over(self) -> None:
        """Write down what a reader has spent that has come to its end: its process may end too."""
        if self._pid == os.getpid():
            self._together(self._own())

    def _own(self) -> float:
        return sum(self._meter.dollars(counters.traffic).high for counters in self._counted)

    def _allowed(self) -> float:
        here = world.place()
        share = self.limit / here.world_size
        return share / here.num_workers if self._alone else share

    def _together(self, own: float) -> float:
        """What this process and all others have spent; its own alone where files cannot be had."""
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
                "WDS_COST_LIMIT: processes cannot tell each other what they have spent (%s), so each stops at its "
                "share of it, $%.4g",
                exn, self._allowed(),
            )  # fmt: skip
            return own

    def _words(self, spent: float, allowed: float) -> str:
        here, traffic = world.place(), Traffic()
        for counters in self._counted:
            traffic.merge(counters.traffic)
        whose = f": the share of rank {here.rank} of {here.world_size}, ${allowed:.4g}," if here.world_size > 1 else ""
        where = self._meter.region or "an unknown region: set WDS_REGION"
        own = figures(self._meter.by_origin(traffic), traffic)
        return (
            f"WDS_COST_LIMIT=${self.limit:g}{whose} is spent: up to ${spent:.4g} by the table of prices, seen from "
            f"{where}. This process alone: {own or 'nothing'}. Raise WDS_COST_LIMIT to go on; where prices or "
            "regions are wrong, say so (WDS_PRICES, WDS_REGION); a cache (wds-async serve, WDS_CACHE) pays once"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "board": self._board, "meter": self._meter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        global _purse
        self.limit, self._board, self._meter = state["limit"], state["board"], state["meter"]
        self._clock = time.monotonic
        self._begin()
        _purse = _purse or self  # a spawned worker spends of its parent's


class _Cell:
    """This process's eight bytes in the file of all. A process that has ended leaves what it spent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "spent.cells"
        binary = getattr(os, "O_BINARY", 0)
        append = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | binary, 0o600)
        try:
            os.write(append, _NUMBER.pack(0.0))  # where it lands nobody else writes
            self._at = os.lseek(append, 0, os.SEEK_CUR) - _NUMBER.size
        finally:
            os.close(append)
        self._file = os.open(path, os.O_RDWR | binary)
        weakref.finalize(self, os.close, self._file)

    def put(self, dollars: float) -> float:
        """Write down what this process has spent so far; the sum of all."""
        os.lseek(self._file, self._at, os.SEEK_SET)
        os.write(self._file, _NUMBER.pack(dollars))
        size = os.lseek(self._file, 0, os.SEEK_END)
        os.lseek(self._file, 0, os.SEEK_SET)
        held = os.read(self._file, size)
        whole = held[: len(held) - len(held) % _NUMBER.size]
        return math.fsum(number for (number,) in _NUMBER.iter_unpack(whole))
