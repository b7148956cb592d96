"""Shared by the commands that start jobs: their options, the words before the start, and the progress."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from wds_async.cli import terminal
from wds_async.cli.shards import counted, human
from wds_async.config import transfer_config
from wds_async.distributed.engines import ENGINES
from wds_async.distributed.jobs import Job
from wds_async.distributed.outputs import shard_name
from wds_async.distributed.progress import JobProgress, JobSummary
from wds_async.distributed.resharding import ReshardJob
from wds_async.distributed.tasks import AttemptResult, Input
from wds_async.errors import JobFailed
from wds_async.observe.prices import meter_of_job
from wds_async.redact import redact
from wds_async.storage.registry import locate
from wds_async.transfer.traffic import FILES, Traffic, origin_of

__all__ = [
    "ENGINES",
    "Estimate",
    "ProgressDisplay",
    "cost_of",
    "engine_options",
    "find_modules",
    "job_name",
    "run_job",
    "start_options",
]

_PLAIN_EVERY_S = 10.0

_ENGINE_OPTIONS = (
    click.option(
        "--engine", type=click.Choice(ENGINES), default="local", show_default=True,
        help="local: processes of this machine. rank: this process is one of WORLD_SIZE, and does every WORLD_SIZE-th "
        "task. ray, dask: a cluster.",
    ),
    click.option("--cpus", type=float, help="CPUs of one task.  [default: 1]"),
    click.option("--workers", type=int, help="local, rank: processes.  [default: CPUs of this machine / --cpus]"),
    click.option(
        "--attempts", type=click.IntRange(1), default=4, show_default=True, help="How often a task may fail."
    ),
)  # fmt: skip
_START_OPTIONS = (
    click.option("--overwrite", is_flag=True, help="Drop the records of another job of this name, and begin again."),
    click.option("--dry-run", is_flag=True, help="Say what would be read and written, and start nothing."),
    click.option("-y", "--yes", is_flag=True, help="Do not ask before the start. (Only a terminal is asked.)"),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where tasks run."""
    return functools.reduce(lambda inner, option: option(inner), reversed(_ENGINE_OPTIONS), command)


def start_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that starts a job."""
    return functools.reduce(lambda inner, option: option(inner), reversed(_START_OPTIONS), command)


def find_modules() -> None:
    """Let functions be named that are in the working directory, as by ``python -m``."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def job_name(command: str, output: str) -> str:
    """Return the name of the job of ``command`` that writes ``output``: for a single file its name is in it, so that
    the jobs of several files of one folder differ."""
    if "{" in output or output.endswith("/") or output in (".", ".."):
        return command
    return f"{command}-{re.sub('[^A-Za-z0-9._-]', '-', shard_name(output))}"


@dataclass
class Estimate:
    """The reading of a job, by what its plan knows: ``shards`` and ``bytes``, of which ``unknown`` shards have no known
    size, and the requests for them."""

    shards: int = 0
    bytes: int = 0
    unknown: int = 0

    def __post_init__(self) -> None:
        self.traffic = Traffic()
        self._part_bytes = transfer_config().part_bytes

    @classmethod
    def of(cls, inputs: Iterable[Input]) -> Self:
        """Return the estimate for reading all of ``inputs`` once."""
        estimate = cls()
        origins: dict[str, str] = {}
        for one in inputs:
            head = "/".join(one.url.split("/", 3)[:3]) if "://" in one.url else ""
            if head not in origins:
                origins[head] = origin_of(locate(one.url)) if head else FILES
            estimate._add(origins[head], one.size)
        return estimate

    def _add(self, origin: str, size: int | None) -> None:
        self.shards += 1
        self.unknown += size is None
        self.bytes += size or 0
        counts = self.traffic.of(origin)
        counts.requests += max(1, -(-(size or 0) // self._part_bytes))
        counts.bytes += size or 0

    def __str__(self) -> str:
        where = ", ".join(name for name in self.traffic.origins if name != FILES) or "this machine's files"
        size = human(self.bytes) if not self.unknown else f"at least {human(self.bytes)}"
        size += f" ({counted(self.unknown, 'size')} unknown)" if self.unknown else ""
        return f"{counted(self.shards, 'shard')}, {size}, from {where}{_cost(self.traffic, self.unknown)}"


def cost_of(buckets: Mapping[str, Sequence[int]]) -> str:
    """Return what it costs to read so many whole objects and bytes of each bucket, in words; "" for nothing."""
    traffic = Traffic()
    for bucket, (count, size) in buckets.items():
        sums = traffic.of(origin_of(locate(f"{bucket}/x")))
        sums.requests, sums.bytes = sums.requests + count, sums.bytes + size
    return _cost(traffic)


def _cost(traffic: Traffic, unknown: int = 0) -> str:
    """Return what ``traffic`` costs, in words; "" where it costs nothing or ``unknown`` sizes are not in it."""
    is_priced = not unknown and set(traffic.origins) - {FILES}
    return f", which costs {meter_of_job().dollars(traffic)}" if is_priced else ""


@dataclass(frozen=True)
class _Outlook:
    """The rest of a job: its ``state`` in words, whether that is ``nothing``, how many of the ``tasks`` known
    now are ``finished``, and ``lines`` of what it reads and writes."""

    state: str
    nothing: bool
    tasks: int
    finished: int
    lines: tuple[str, ...] = ()


def _outlook(job: Job, writes: str, retry: bool, source: Sequence[str]) -> _Outlook:
    contents = job.folder.contents()
    numbers = sorted(contents.failed) if retry else [n for n in range(len(job.tasks)) if n not in contents.finished]
    state = f"{len(numbers):,} of {counted(len(job.tasks), 'task')} to run, {len(contents.finished):,} finished"
    reads = source or [f"reads   {Estimate.of(one for number in numbers for one in job.tasks[number].inputs)}"]
    lines = (*reads, _writes(writes))
    return _Outlook(state, not numbers, len(job.tasks), len(contents.finished), lines)


def _writes(where: str) -> str:
    """Return the line that says where a job writes."""
    return f"writes  {redact(where)}{' (its cost is not known before)' if '://' in where else ''}"


def _outlook_of_reshard(job: ReshardJob, writes: str) -> _Outlook:
    """Return the outlook of two passes: the second reads what the first has written."""
    status = job.status()
    if status.complete:
        return _Outlook("finished before", True, status.tasks, status.finished)
    tasks, finished = job.first_pass.tasks, job.first_pass.folder.finished()
    numbers = [number for number in range(len(tasks)) if number not in finished]
    state = f"first pass: {len(numbers):,} of {counted(len(tasks), 'task')} to run, {len(finished):,} finished"
    first = Estimate.of(one for number in numbers for one in tasks[number].inputs)
    again = Estimate.of(
        Input(f"{job.folder.out}spill", sum(one.size or 0 for one in task.inputs) or None) for task in tasks
    )
    lines = [f"reads   {first}"] if numbers else []
    lines += [
        f"spills  about {human(again.bytes)} below {redact(job.folder.url)}/spill/ until the end, and reads that"
        f"{_cost(again.traffic, again.unknown)}",
        _writes(writes),
    ]
    return _Outlook(state, False, len(tasks), len(finished), tuple(lines))


def run_job(
    job: Job | ReshardJob,
    display: ProgressDisplay,
    *,
    writes: str,
    dry_run: bool,
    yes: bool,
    retry: bool = False,
    source: Sequence[str] = (),
) -> JobSummary | None:
    """Say what ``job``, which reports to ``display``, will do, ask on a terminal, run it, and print the summary, which
    is returned; None with ``dry_run``.
    ``source``: lines that say what is read, where the inputs of tasks do not tell."""
    outlook = _outlook_of_reshard(job, writes) if isinstance(job, ReshardJob) else _outlook(job, writes, retry, source)
    terminal.say(f"{display.name}: {outlook.state}", err=True)
    for line in () if outlook.nothing else outlook.lines:
        terminal.say(f"  {line}", err=True)
    terminal.say(f"  records {redact(job.folder.url)}", err=True)
    if dry_run:
        return None
    if not (outlook.nothing or yes) and _is_interactive():
        click.confirm("Start?", default=True, abort=True, err=True)
    display.expect(outlook.tasks, outlook.finished)
    try:
        with display:
            summary = job.retry() if retry else job.run()
    except KeyboardInterrupt:
        terminal.say(f"stopped, with {display.finished()}; the same command goes on from there", err=True)
        raise
    except JobFailed:
        if display.last is not None:
            terminal.say(str(display.last))
        raise
    terminal.say(str(summary))
    if summary.samples_in and summary.dropped and not summary.samples_out:
        terminal.say("no sample was left to write", err=True)
    return summary


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


class ProgressDisplay:
    """Progress of a job on standard error: a bar on a terminal, else a line every ten seconds. The first error of each
    kind stands above. A context manager; call it with each `JobProgress`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._console = Console(stderr=True)
        self._is_terminal = sys.stderr.isatty()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("tasks  {task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task(name, total=None, figures="")
        self.last: JobProgress | None = None
        """The latest that was shown."""
        self._repeats = terminal.Repeats()
        self._next_line = time.monotonic() + _PLAIN_EVERY_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def expect(self, tasks: int, finished: int) -> None:
        """Show how many tasks there are, before the first one has ended."""
        self._bar.update(self._task, total=tasks, completed=finished, figures="starting")

    def __call__(self, progress: JobProgress) -> None:
        """Show where the job is, or the phase of it that runs."""
        self.last = progress
        name, ended = _phase(self.name, progress), progress.before + progress.done
        figures = self.figures(progress)
        self._bar.update(self._task, description=name, total=progress.tasks, completed=ended, figures=figures)
        if (last := progress.ended) is not None and last.error:
            self._show(last, is_final=last.task in dict(progress.failures))
        if not self._is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _PLAIN_EVERY_S
            terminal.say(f"{name}: {ended:,} of {counted(progress.tasks, 'task')}, {figures}", err=True)

    def finished(self) -> str:
        """Return how many tasks have a record, in words."""
        task = self._bar.tasks[0]
        return f"{task.completed:,.0f} of {counted(int(task.total or 0), 'task')} of {task.description} finished"

    @staticmethod
    def figures(progress: JobProgress) -> str:
        """Return bytes a second, dollars, and what went wrong, in words."""
        parts = [f"{human(progress.bytes_in / max(progress.seconds, 1e-3))}/s", str(progress.dollars)]
        repeated = progress.retried + progress.lost
        parts += [f"{repeated:,} repeated"] if repeated else []
        parts += [f"{progress.failed:,} failed"] if progress.failures else []
        return ", ".join(parts)

    def _show(self, attempt: AttemptResult, *, is_final: bool) -> None:
        """Show an error that the task is run again for. (That of a task that fails is logged, and told at the end.)"""
        text = f"task {attempt.task}: {attempt.error}; it is run again"
        if is_final or self._repeats.seen(attempt.error, f"task {attempt.task}"):
            return
        if self._is_terminal:
            self._bar.console.print(Text(terminal.line(text), style="yellow"))
        else:
            terminal.say(text, err=True)


def _phase(name: str, progress: JobProgress) -> str:
    """Return the name of the job that reports: a job in phases has one for each."""
    return progress.job.rpartition("_wds/")[2] or name
