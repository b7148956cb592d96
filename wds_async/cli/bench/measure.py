"""Measurement of one read in a process of its own: wds_async's or webdataset's over the same shards.

The process reports a `Moment` five times a second and an `Outcome` at its end. Bytes are those of the samples'
fields as stored (before decoding), counted the same way for both libraries; CPU is user and system time of the
process and everything it started, from after the imports on; memory is resident memory of all of them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from wds_async import config, packages
from wds_async.cli import shards
from wds_async.errors import WdsError
from wds_async.shardlists import spec

__all__ = ["Measurement", "Moment", "Outcome", "ProcessTree", "measure", "peak_bytes"]

_TICK_S = 0.2
_GRACE_S = 5.0
_DECISIONS_KEPT = 200
_WEIGHT = "__weight__"


@dataclass(frozen=True)
class Measurement:
    """A read to measure: ``pipeline`` is ``bytes``, ``raw``, ``decode`` or ``decode:SPEC``; ``seconds`` 0 is one pass.

    ``urls`` are shards, or one ``module:function`` whose pipeline is read as it is.
    """

    urls: list[str]
    library: str = "wds_async"
    pipeline: str = "raw"
    workers: int = 0
    batch: int = 64
    seconds: float = 10.0
    budget_bytes: int | None = None


@dataclass(frozen=True)
class Moment:
    """The state ``at_s`` seconds after the start: totals so far, and the engine's gauges (0 for webdataset)."""

    at_s: float
    bytes: int
    samples: int
    cpu_s: float
    resident_bytes: int
    connections: int = 0
    window_bytes: int = 0
    budget_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """The end of a measured read. ``base_bytes`` is the memory after the imports, before reading.

    ``first_s`` passed before the first item (a sample, or a batch from a worker) came; the rates are of what came
    after it, so that starting DataLoader workers does not count against them.
    """

    job: Measurement
    wall_s: float
    first_s: float
    bytes: int
    samples: int
    cpu_s: float
    base_bytes: int
    peak_bytes: int
    first_bytes: int = 0
    first_samples: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    bound_by: str = ""
    moments: tuple[Moment, ...] = ()
    decisions: tuple[tuple[float, str], ...] = ()
    """Decisions of the reading process's engine on its connections: seconds after the start, and the reason. Those of
    DataLoader workers are not included."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self._rate(self.bytes, self.first_bytes)

    @property
    def samples_rate(self) -> float:
        """Samples a second."""
        return self._rate(self.samples, self.first_samples)

    @property
    def connections(self) -> int:
        """Parts that may be in flight, of all its processes together; 0 where nothing came over a network."""
        return round(self.stats.get("connections_limit", 0)) if self.stats.get("connections_peak") else 0

    def _rate(self, total: int, first: int) -> float:
        if total > first and self.wall_s > self.first_s:
            return (total - first) / (self.wall_s - self.first_s)
        return total / self.wall_s if self.wall_s else 0.0  # one item was all

    @property
    def cpu_s_per_gb(self) -> float:
        """Seconds of CPU for 1e9 bytes."""
        return self.cpu_s / self.bytes * 1e9 if self.bytes else 0.0


def measure(job: Measurement, watch: Callable[[Moment], None] = lambda moment: None) -> Outcome:
    """Run ``job`` in a new interpreter; ``watch`` is called with each `Moment`.

    Raise what the reading process met, as a `WdsError` where it was not one already.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, there), name=f"measure-{job.library}")
    process.start()
    there.close()
    moments: list[Moment] = []
    message: Any = None
    try:
        while isinstance(message := here.recv(), Moment):
            moments.append(message)
            watch(message)
        if isinstance(message, Outcome):
            return replace(message, moments=tuple(moments))
        raise message
    except EOFError:
        process.join()
        raise WdsError(f"the process that read with {job.library} died (status {process.exitcode})") from None
    finally:
        if message is None or isinstance(message, Moment):
            process.terminate()
        process.join(_GRACE_S)
        process.kill()
        process.join()
        here.close()


class _Decisions(logging.Handler):
    """The first `_DECISIONS_KEPT` log lines of the engine's connection control, each with its second."""

    def __init__(self) -> None:
        super().__init__()
        self._start = time.time()
        self.taken: list[tuple[float, str]] = []
        logger = logging.getLogger("wds_async.control")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.taken) < _DECISIONS_KEPT:
            self.taken.append((round(record.created - self._start, 3), record.getMessage()))


def _main(job: Measurement, report: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    # By an exception, so that DataLoader workers are ended too; of themselves they may hang on a full queue.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        report.send(_read(job, report))
    except Exception as exn:
        error = exn if isinstance(exn, WdsError) else WdsError(f"{job.library}: {type(exn).__name__}: {exn}")
        report.send(error)
    report.close()


@dataclass
class _Tally:
    """Counts of what has been read; written by the reading thread, read by any."""

    bytes: int = 0
    samples: int = 0
    first_s: float = 0.0
    first_bytes: int = 0
    first_samples: int = 0


def _read(job: Measurement, report: Connection) -> Outcome:
    source, total = _SOURCES[job.library](job)
    base, processes = peak_bytes(), ProcessTree()
    cpu, start = processes.cpu_s(), time.monotonic()
    tally, decisions = _Tally(), _Decisions()
    peak = base
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_TICK_S):
            at_s, resident, stats = time.monotonic() - start, processes.resident_bytes(), total()
            peak = max(peak, resident)
            gauges = () if stats is None else (stats.connections, stats.window_bytes, stats.budget_bytes)
            report.send(Moment(at_s, tally.bytes, tally.samples, processes.cpu_s() - cpu, resident, *gauges))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        _drain(source, job, tally, start)
        wall = time.monotonic() - start
    finally:
        done.set()
        watcher.join()
    stats = total()
    del source
    gc.collect()  # ends workers and pipes, so that their CPU is known
    return Outcome(
        job=job,
        wall_s=wall,
        **vars(tally),
        cpu_s=processes.cpu_s() - cpu,
        base_bytes=base,
        peak_bytes=max(peak, peak_bytes()),
        stats={} if stats is None else stats.as_dict(),
        bound_by="" if stats is None else stats.bound_by(),
        decisions=tuple(decisions.taken),
    )


def _drain(source: Iterable[Any], job: Measurement, tally: _Tally, start: float) -> None:
    """Read pass after pass until the time is over; one pass where ``seconds`` is 0."""
    end = math.inf
    while True:
        before = tally.samples, tally.bytes
        for item in source:
            for sample in item if isinstance(item, list) else (item,):
                if isinstance(sample, memoryview):
                    tally.bytes += len(sample)
                    continue
                tally.samples += 1
                if isinstance(sample, dict):
                    tally.bytes += sample.get(_WEIGHT) or _weight(sample)
            if not tally.first_s:
                tally.first_s = time.monotonic() - start
                tally.first_bytes, tally.first_samples = tally.bytes, tally.samples
                end = start + tally.first_s + job.seconds if job.seconds else math.inf
            if time.monotonic() > end:
                return
        if not job.seconds or (tally.samples, tally.bytes) == before:
            return


def _weight(sample: dict[str, Any]) -> int:
    size = 0
    for value in sample.values():
        if value.__class__ is bytes:
            size += len(value)
    return size


def _weigh(sample: dict[str, Any]) -> dict[str, Any]:
    """Add the stored size of the sample's fields; a stage before decoding."""
    return {**sample, _WEIGHT: _weight(sample)}


def _stages(library: Any, dataset: Any, job: Measurement) -> Any:
    if job.pipeline.startswith("decode"):
        dataset = dataset.map(_weigh).decode(job.pipeline.partition(":")[2] or "rgb8")
    if not job.workers:
        return dataset
    if job.batch:
        dataset = dataset.batched(job.batch, collation_fn=None)
    return library.WebLoader(dataset, batch_size=None, num_workers=job.workers, persistent_workers=True)


_Source = tuple[Iterable[Any], Callable[[], Any]]  # what to iterate, and how to ask for the counters


def _ours(job: Measurement) -> _Source:
    import wds_async  # noqa: PLC0415 (each process imports what it measures, and no more)

    transfer = {} if job.budget_bytes is None else {"budget_bytes": job.budget_bytes}
    if job.pipeline == "bytes":
        from wds_async.transfer.stats import Board  # noqa: PLC0415

        board, settings = Board(), config.transfer_config(**transfer)
        return _Views(lambda: shards.raw(job.urls, config=settings, stats=board.counters())), board.total
    if spec.is_function(job.urls[0]):
        dataset: Any = wds_async.FluidWrapper(shards.made(job.urls[0]))
    else:
        dataset = wds_async.WebDataset(job.urls, shardshuffle=False, empty_check=False, transfer=transfer)
    return _stages(wds_async, dataset, job), dataset.statistics


@dataclass
class _Views:
    """An iterable that calls ``begin`` anew for each pass."""

    begin: Callable[[], Iterator[memoryview]]

    def __iter__(self) -> Iterator[memoryview]:
        return self.begin()


def _theirs(job: Measurement) -> _Source:
    import webdataset  # noqa: PLC0415

    dataset = webdataset.WebDataset(job.urls, shardshuffle=False, empty_check=False)
    return _stages(webdataset, dataset, job), lambda: None


_SOURCES = {"wds_async": _ours, "webdataset": _theirs}


class ProcessTree:
    """CPU time and memory of this process and its living children. Raise MissingExtra where psutil is not installed."""

    def __init__(self) -> None:
        self._psutil = packages.optional("psutil", "measuring", "bench")
        self._process = self._psutil.Process()

    def cpu_s(self) -> float:
        """Return user and system seconds, children that have ended and were waited for included."""
        times = self._process.cpu_times()
        total = time.process_time() + times.children_user + times.children_system  # finer than times.user
        for child in self._process.children(recursive=True):
            with contextlib.suppress(self._psutil.NoSuchProcess):
                total += sum(child.cpu_times()[:4])
        return float(total)

    def resident_bytes(self) -> int:
        """Return the resident memory, pages that processes share counted for each."""
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(self._psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


def peak_bytes() -> int:
    """Return the most that this process alone has been resident.

    From ``VmHWM`` on Linux: ``ru_maxrss`` also holds the size of its parent, from before ``exec``.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource  # noqa: PLC0415 (POSIX only)
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
