"""Counters of the engine, shared between the processes of one dataset through its `Board`.

The process that made the board counts in its own memory, every other one (a DataLoader worker, forked or spawned) in a
small mapped file. So each cell has one writer, nothing is locked, and the counts of a worker that dies are kept.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from wds_async.transfer.traffic import Traffic

__all__ = ["Board", "Boards", "Counters", "Stats", "alive", "idle_s", "temporary_folder"]

_LOOK_EVERY_S = 0.01
_REMOVALS = 3
"""Attempts to remove a folder: a process that is ending may leave a file in it meanwhile."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the counters, summed over processes (peaks are summed too: what a host must hold)."""

    bytes: float = 0
    """Shard bytes handed to the decoder."""
    wire_bytes: float = 0
    """Body bytes received, with those of hedges."""
    requests: float = 0
    retries: float = 0
    """Faults that were healed, or tried."""
    throttled: float = 0
    """Answers that throttle (429, 503 and the like); among the retries."""
    hedges: float = 0
    """Parts that were requested twice, because they were much slower than their peers."""
    hedged_bytes: float = 0
    """Bytes that came twice for it; among ``wire_bytes``."""
    samples: float = 0
    bad_samples: float = 0
    """Samples that a handler skipped, that damage cut, or that lost a member."""
    shards: float = 0
    """Shards that ended well."""
    bad_shards: float = 0
    """Shards that ended in an error."""
    passed_shards: float = 0
    """Shards of which a handler, or ``on_corrupt``, skipped the rest."""
    bad_bytes: float = 0
    """Bytes that were skipped: rests of shards, and gaps behind damage."""
    verified_shards: float = 0
    """Shards whose checksum was compared, and was right."""
    wait_s: float = 0
    """Seconds in which the consumer waited for bytes."""
    read_s: float = 0
    """Seconds in which a reader was open."""
    connections: float = 0
    connections_peak: float = 0
    connections_limit: float = 0
    """Limit on parts in flight now."""
    connections_most: float = 0
    """Upper bound of that limit (``WDS_CONNECTIONS``)."""
    slowdown: float = 0
    """Time of parts as a multiple of their best (summed over processes)."""
    window_bytes: float = 0
    """Slab bytes in flight or waiting for the consumer, now."""
    window_peak_bytes: float = 0
    budget_bytes: float = 0
    cache_hits: float = 0
    """Shards that were read from a disk cache."""
    cache_misses: float = 0
    """Shards that a disk cache did not have: read from their store, or behind the process that fetched them."""
    epochs: float = 0
    """Passes over the data that ran to their end."""
    processes: float = 0
    head_s: float = 0
    """Seconds from the requests of good parts to the heads of their answers, added up."""
    body_s: float = 0
    """Seconds from there to their last bytes, added up."""
    thread_s: float = 0
    """Seconds in which the threads that read had a reader open; once, however many readers a thread has."""
    cpu_s: float = 0
    """Share of ``thread_s`` in which they computed, or waited for a processor."""
    full_s: float = 0
    """Seconds in which a reader was open times the share of the byte budget that was taken."""
    batches: float = 0
    """Items that a loader took from its workers."""
    starved_s: float = 0
    """Seconds in which it waited for them, but for the first."""
    consumer_s: float = 0
    """Seconds between: what the program did with the items."""

    def as_dict(self) -> dict[str, float]:
        """Return the fields as a plain dict, for JSON."""
        return asdict(self)

    def __add__(self, other: Stats) -> Stats:
        return Stats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def bound_by(self) -> str:
        """Return a sentence that says whether the network or the consumer sets the pace."""
        if self.read_s <= 0 or self.bytes <= 0:
            return "nothing was read"
        share = self.wait_s / self.read_s
        percent = f"the consumer waited for bytes {min(share, 1.0):.0%} of the time"
        if share > 0.5:
            return f"bound by the network or the store: {percent}"
        if share < 0.1:
            return f"bound by the consumer (decoding, training): {percent}"
        return f"balanced: {percent}"


_NAMES = tuple(f.name for f in fields(Stats))
_CELLS = {name: i for i, name in enumerate(_NAMES)}
_ROW_BYTES = 8 * len(_NAMES)
_TRAFFIC = "traffic-"


class Counters:
    """One process's row of cells, by name: ``counters.add("bytes", n)``, ``counters.set("window_bytes", n)``.

    Each cell is written by one thread: the loop's, or the consumer's. ``traffic`` is counted by origin, by the loop;
    ``file`` is where it is left for the process that asks (None: it is this one).
    """

    def __init__(
        self,
        memory: mmap.mmap | bytearray | None = None,
        *,
        traffic: Traffic | None = None,
        file: Path | None = None,
    ) -> None:
        self._cells = memoryview(memory or bytearray(_ROW_BYTES))[:_ROW_BYTES].cast("d")
        self.set("processes", 1)
        self.traffic = traffic or Traffic()
        self._file = file
        self._left = ""

    def add(self, name: str, amount: float = 1) -> None:
        """Count ``amount`` more."""
        self._cells[_CELLS[name]] += amount

    def get(self, name: str) -> float:
        """Return the count of this process."""
        return float(self._cells[_CELLS[name]])

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._cells[_CELLS[name]] = value

    def peak(self, name: str, value: float) -> None:
        """Raise a gauge to ``value`` if that is more."""
        cell = _CELLS[name]
        self._cells[cell] = max(self._cells[cell], value)

    def values(self) -> list[float]:
        """Return the row, in the order of `Stats`' fields."""
        return list(self._cells)

    def leave_traffic(self) -> None:
        """Publish the traffic by origin for other processes, if it has changed."""
        if self._file is None or not self.traffic.origins:
            return
        text = json.dumps(self.traffic.as_dict())
        if text == self._left:
            return
        self._left, aside = text, self._file.with_suffix(".new")
        with contextlib.suppress(OSError):  # the folder went with the process that made it, or its disk is full
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, self._file)


class ThreadClock:
    """Time of the thread that reads, and how much of it the thread computed, counted in ``thread_s`` and ``cpu_s``.
    Several readers of one thread count each moment once: the time since the last look of any of them."""

    _last = threading.local()

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._thread = 0
        self._began = (0.0, 0.0)

    def look(self, at_once: bool = False) -> None:
        """Count what has passed since the last look, if that is more than 10 ms or ``at_once``. Called by the thread
        that reads, for each piece of memory."""
        now = time.perf_counter()
        if self._thread != threading.get_ident():  # the first look, or another thread reads on
            self._thread, self._began = threading.get_ident(), (now, _computed_s())
        then = max(self._began, getattr(self._last, "at", self._began))
        if now - then[0] < _LOOK_EVERY_S and not at_once:
            return
        self._last.at = now, _computed_s()
        self._counters.add("thread_s", now - then[0])
        self._counters.add("cpu_s", self._last.at[1] - then[1])

    def stop(self) -> None:
        """Count the rest, where the thread that reads closes its reader; nothing at the interpreter's end."""
        if self._thread == threading.get_ident() and not sys.is_finalizing():
            self.look(at_once=True)


def _computed_s() -> float:
    """Return the seconds in which this thread computed or waited for a processor, so that a busy machine does not make
    it look idle; the CPU time alone where the system does not tell the other."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            computed, waited, _ = file.read().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(computed) + int(waited)) / 1e9


def idle_s() -> float:
    """Return the seconds that the cores which this process may use were idle since the machine's start, added up; 0
    where the system does not tell."""
    try:
        usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        with open("/proc/stat") as file:
            cores = [fields for line in file if (fields := line.split()) and fields[0] in usable]
        return sum(int(idle) + int(waiting) for _, _, _, _, idle, waiting, *_ in cores) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return 0.0


class Board:
    """The shared scoreboard of one dataset: pickles, survives ``fork``, owns a folder only once another process
    counts. ``folder`` goes when the process that made the board drops it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.folder = temporary_folder() / f"{self._pid}-{uuid.uuid4().hex}"
        self._rows: dict[int, Counters] = {}
        # Below zero: at exit after multiprocessing has ended the workers, which would make the folder again.
        Finalize(self, _remove, (self.folder,), exitpriority=-1)

    def counters(self) -> Counters:
        """Return this process's row."""
        pid = os.getpid()
        if pid not in self._rows:
            # A forked child inherits the parent's row and must not count in its copy of it.
            self._rows = {pid: Counters() if pid == self._pid else _mapped_counters(self.folder, pid)}
        return self._rows[pid]

    def aside(self) -> Counters:
        """Return this process's row, for one that reads nothing itself: it is not among ``processes``."""
        fresh = os.getpid() not in self._rows
        counters = self.counters()
        if fresh:
            counters.set("processes", 0)
        return counters

    def total(self) -> Stats:
        """Return the sum over this process and every other that counted on this board, as of now."""
        own = self._rows.get(self._pid) if os.getpid() == self._pid else None
        rows = [own.values()] if own is not None else []
        with contextlib.suppress(OSError, ValueError):
            for path in self.folder.iterdir():
                # Other files are here: the ledger (lines of any length), the progress bar (longer ones than a row).
                row = b"" if path.suffix else path.read_bytes()
                if len(row) == _ROW_BYTES:
                    rows.append(list(memoryview(row).cast("d")))
        return Stats(*(sum(column) for column in zip(*rows, strict=True))) if rows else Stats()

    def traffic(self) -> Traffic:
        """Return the traffic of this process and every other that counted on this board: of others, as of a second
        ago, or the end of their last reader."""
        total, own = Traffic(), self._rows.get(os.getpid())
        if own is not None and os.getpid() == self._pid:
            total.merge(own.traffic)
        for path in self.folder.glob(f"{_TRAFFIC}*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                other = Traffic.of_dict(json.loads(path.read_text(encoding="utf-8")))
                if not alive(int(path.name.removeprefix(_TRAFFIC).partition("-")[0])):
                    other.hang_up()
                total.merge(other)
        return total

    def __getstate__(self) -> dict[str, Any]:
        return {"pid": self._pid, "folder": str(self.folder)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._pid, self.folder, self._rows = state["pid"], Path(state["folder"]), {}


class Boards:
    """The boards of several readers as one, for reading counts."""

    def __init__(self, boards: Iterable[Board]) -> None:
        self.boards = list(boards)

    @property
    def folder(self) -> Path:
        """Folder of the first, for notes of several processes."""
        return self.boards[0].folder

    def counters(self) -> Boards:
        """Return itself, for `values` alone."""
        return self

    def values(self) -> list[float]:
        """Return the sum of this process's rows, in the order of `Stats`' fields."""
        return [sum(column) for column in zip(*(board.counters().values() for board in self.boards), strict=True)]

    def total(self) -> Stats:
        """Return the sum over all boards and processes, as of now."""
        return sum((board.total() for board in self.boards), Stats())

    def traffic(self) -> Traffic:
        """Return the traffic over all boards and processes."""
        return sum((board.traffic() for board in self.boards), Traffic())


def temporary_folder() -> Path:
    """Return the folder of files that running processes of this user share."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"wds-async-{user}"


def _mapped_counters(folder: Path, pid: int) -> Counters:
    """Return counters in a file of ``folder``."""
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    if not folder.exists():
        _sweep(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / f"{pid}-{uuid.uuid4().hex[:8]}", "w+b") as file:
        file.truncate(_ROW_BYTES)
        row = mmap.mmap(file.fileno(), _ROW_BYTES)
    return Counters(row, file=folder / f"{_TRAFFIC}{pid}-{uuid.uuid4().hex[:8]}.json")


def _remove(folder: Path) -> None:
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):  # not `Path.exists`, which raises where this process has lost its rights
            return


def _sweep(parent: Path) -> None:
    """Remove folders of killed processes, a day after their end."""
    horizon = time.time() - 86400
    with contextlib.suppress(OSError, ValueError):
        for folder in parent.iterdir():
            pid = folder.name.partition("-")[0]
            if pid.isdecimal() and folder.stat().st_mtime < horizon and not alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def alive(pid: int) -> bool:
    """Return whether there is such a process; True where that is unknown."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
