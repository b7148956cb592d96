"""What the commands that start jobs share: their options, what is said before the start, and the progress."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
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
from wds_async.distributed.progress import JobProgress
from wds_async.distributed.tasks import AttemptResult, Input
from wds_async.observe.prices import meter_of_job
from wds_async.redact import redact
from wds_async.storage.registry import locate
from wds_async.transfer.traffic import FILES, Traffic, origin_of

__all__ = ["ENGINES", "Estimate", "ProgressDisplay", "engine_options", "find_modules", "run_job", "start_options"]


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


@dataclass
class Estimate:
    """What a job will read, by what its plan knows: ``shards`` and ``bytes``, of which ``unknown`` shards have no known
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
        size += f" ({self.unknown:,} sizes unknown)" if self.unknown else ""
        is_priced = not self.unknown and set(self.traffic.origins) - {FILES}
        cost = f", which costs {meter_of_job().dollars(self.traffic)}" if is_priced else ""
        return f"{counted(self.shards, 'shard')}, {size}, from {where}{cost}"


def run_job(job: Job, display: ProgressDisplay, *, writes: str, dry_run: bool, yes: bool, retry: bool = False) -> None:
    """Say what ``job``, which reports to ``display``, will do, ask on a terminal, run it, and print the summary."""
    contents = job.folder.contents()
    numbers = sorted(contents.failed) if retry else [n for n in range(len(job.tasks)) if n not in contents.finished]
    reads = Estimate.of(one for number in numbers for one in job.tasks[number].inputs)
    say = functools.partial(terminal.say, err=True)
    todo = f"{counted(len(numbers), 'task')} of {len(job.tasks):,} to run"
    say(f"{display.name}: {todo}, {len(contents.finished):,} finished")
    if numbers:
        say(f"  reads   {reads}")
        say(f"  writes  {redact(writes)} (not priced)")
    say(f"  records {redact(job.folder.url)}")
    if dry_run:
        return
    if numbers and not yes and _is_interactive():
        click.confirm("Start?", default=True, abort=True, err=True)
    with display:
        summary = job.retry() if retry else job.run()
    terminal.say(str(summary))


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
            TextColumn(name),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("tasks  {task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task("", total=None, figures="")
        self._repeats = terminal.Repeats()
        self._next_line = time.monotonic() + _PLAIN_EVERY_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, progress: JobProgress) -> None:
        """Show where the job is."""
        ended = progress.before + progress.done
        figures = self.figures(progress)
        self._bar.update(self._task, total=progress.tasks, completed=ended, figures=figures)
        if (last := progress.ended) is not None and last.error:
            self._show(last)
        if not self._is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _PLAIN_EVERY_S
            line = f"{self.name}: {ended:,} of {progress.tasks:,} tasks, {figures}"
            terminal.say(line, err=True)

    @staticmethod
    def figures(progress: JobProgress) -> str:
        """Return bytes a second, dollars, and what went wrong, in words."""
        parts = [f"{human(progress.bytes_in / max(progress.seconds, 1e-3))}/s", str(progress.dollars)]
        repeated = progress.retried + progress.lost
        parts += [f"{repeated:,} repeated"] if repeated else []
        parts += [f"{progress.failed:,} failed"] if progress.failures else []
        return ", ".join(parts)

    def _show(self, attempt: AttemptResult) -> None:
        """Show an error that the task is run again for. (That of a task that fails is logged, and told at the end.)"""
        text = f"task {attempt.task}: {attempt.error}; it is run again"
        if attempt.permanent or self._repeats.seen(attempt.error, f"task {attempt.task}"):
            return
        if self._is_terminal:
            self._bar.console.print(Text(terminal.line(text), style="yellow"))
        else:
            terminal.say(text, err=True)
