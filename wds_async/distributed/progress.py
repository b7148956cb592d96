"""Progress of a job, and its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from wds_async.distributed.tasks import AttemptResult
from wds_async.observe.prices import FREE, Meter, Range
from wds_async.redact import redact
from wds_async.transfer.traffic import Traffic

__all__ = ["JobProgress", "JobStatus", "JobSummary", "Tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """Summary of one runner of a job. All counts but ``tasks``, ``before`` and ``done`` are of this run alone."""

    job: str
    """URL of the job's folder."""
    tasks: int
    """Tasks of the job."""
    before: int = 0
    """Tasks that had a record when the run began: skipped."""
    done: int = 0
    """Tasks finished in this run, by this runner or, first, by another."""
    elsewhere: int = 0
    """Those of ``done`` that another runner had committed first."""
    failures: tuple[tuple[int, str], ...] = ()
    """Number and last error of each task that failed in every attempt."""
    retried: int = 0
    """Attempts that ended in an error and were made again."""
    lost: int = 0
    """Attempts that ended with their process or machine."""
    samples_in: int = 0
    samples_out: int = 0
    dropped: int = 0
    """Samples for which the function gave none."""
    skipped: int = 0
    """Samples and shards that were passed over; the records' ledgers name them."""
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_read: int = 0
    """Bytes that came over the wire, with those of failed attempts."""
    requests: int = 0
    seconds: float = 0.0
    dollars: Range = FREE
    """Cost of reading in US dollars, from low to high."""

    @property
    def failed(self) -> int:
        """Tasks that failed in every attempt."""
        return len(self.failures)

    def __str__(self) -> str:
        parts = [f"{self.done:,} of {self.tasks:,} tasks done"]
        parts += [f"{self.before:,} were done before"] if self.before else []
        parts += [f"{self.elsewhere:,} by another runner"] if self.elsewhere else []
        parts += [f"{self.failed:,} failed"] if self.failures else []
        parts += [f"{self.retried + self.lost:,} attempts repeated"] if self.retried + self.lost else []
        out = f"{self.samples_in:,} samples in"
        out += f", {self.samples_out:,} out, {self.dropped:,} dropped" if self.samples_out or self.dropped else ""
        out += f", {self.skipped:,} passed over" if self.skipped else ""
        size = f"{_size(self.bytes_in)} in, {_size(self.bytes_out)} out in {self.seconds:,.1f} s"
        cost = f"; {self.requests:,} request{'' if self.requests == 1 else 's'}" if self.requests else ""
        cost += f", {self.dollars}" if self.requests and self.dollars != FREE else ""
        return f"{redact(self.job)}: {', '.join(parts)}; {out}; {size}{cost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress(JobSummary):
    """Progress of a job in this run."""

    pending: int = 0
    """Tasks of this runner that are neither finished nor failed."""
    running: int = 0
    """Tasks that are submitted to the engine."""
    ended: AttemptResult | None = None
    """The attempt that has just ended."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of a job, from its folder."""

    job: str
    tasks: int
    finished: int
    """Tasks with a record."""
    failed: tuple[tuple[int, str], ...]
    """Tasks without one that failed in every attempt of a runner: number and error."""
    complete: bool
    """True if ``finished.json`` is there."""

    def __str__(self) -> str:
        state = "complete" if self.complete else f"{len(self.failed):,} failed" if self.failed else "not complete"
        return f"{redact(self.job)}: {self.finished:,} of {self.tasks:,} tasks, {state}"


@dataclass
class Tally:
    """Sums over the attempts of a run."""

    job: str
    tasks: int
    meter: Meter
    before: int = 0
    done: int = 0
    elsewhere: int = 0
    retried: int = 0
    lost: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    began: float = field(default_factory=time.monotonic)

    def add(self, result: AttemptResult) -> None:
        """Count what an attempt has read and, if it was good, what it did."""
        self.traffic.merge(Traffic.of_dict(result.traffic))
        if (record := result.record) is None:
            return
        self.done += 1
        self.elsewhere += not result.first
        self._sum(samples_in=record.samples_in, samples_out=record.samples_out, dropped=record.dropped)
        self._sum(skipped=sum(entry.get("samples") or 1 for entry in record.skipped))
        self._sum(bytes_in=record.bytes_in, bytes_out=record.bytes_out)

    def _sum(self, **counts: int) -> None:
        for name, count in counts.items():
            self.sums[name] = self.sums.get(name, 0) + count

    def _values(self) -> dict[str, object]:
        return {
            "job": self.job,
            "tasks": self.tasks,
            "before": self.before,
            "done": self.done,
            "elsewhere": self.elsewhere,
            "failures": tuple(sorted(self.failures.items())),
            "retried": self.retried,
            "lost": self.lost,
            "seconds": time.monotonic() - self.began,
            "dollars": self.meter.dollars(self.traffic),
            "bytes_read": sum(one.bytes for one in self.traffic.origins.values()),
            "requests": sum(one.requests for one in self.traffic.origins.values()),
            **self.sums,
        }

    def summary(self) -> JobSummary:
        """Return what was done so far."""
        return JobSummary(**self._values())  # type: ignore[arg-type]

    def progress(self, pending: int, running: int, ended: AttemptResult | None) -> JobProgress:
        """Return the same while the job runs."""
        return JobProgress(**self._values(), pending=pending, running=running, ended=ended)  # type: ignore[arg-type]


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count:,} B"
