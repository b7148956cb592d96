"""``wds-async job``: the jobs below a folder: list them, show one, finish it, run again what failed."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import click

from wds_async.cli import running, terminal
from wds_async.cli.shards import counted
from wds_async.distributed.folder import FolderContents, JobFolder, job_url, output_folder
from wds_async.distributed.reopening import reopened, resharded
from wds_async.distributed.resharding import PLAN, SCATTER, ReshardJob
from wds_async.errors import ConfigError, JobFailed, ShardNotFound
from wds_async.redact import redact
from wds_async.storage.listing.expand import folder_entries

__all__ = ["command"]

_SHOWN = 20

_job = click.option("--job", help="Name of the job, where OUT has several.")


@click.group("job")
def command() -> None:
    """See the jobs that write below a folder, and end them.

    OUT is the folder that a job writes to, the OUTPUT that it was given, or a job's own folder (OUT/_wds/JOB).

    Example: wds-async job status s3://out/
    """


@command.command("ls")
@click.argument("out")
def ls(out: str) -> None:
    """List the jobs below OUT: tasks with a record, all tasks, failed ones, and whether the list of shards is written.

    Example: wds-async job ls s3://out/
    """
    jobs = list(_jobs(out))
    for url in jobs:
        terminal.say(_Found.of(url).line())
    if not jobs:
        raise ShardNotFound(f"{redact(out)}: no job has written there (no folder _wds with a job.json in it)")


@command.command("status")
@click.argument("out")
@_job
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def status(out: str, job: str | None, as_json: bool) -> None:
    """Show how far a job is, why tasks failed, and which have no record yet.

    Example: wds-async job status s3://out/ --job caption-v2
    """
    found = _Found.of(_one(out, job))
    if as_json:
        click.echo(json.dumps(found.values()))
        return
    terminal.say(found.line())
    for phase in found.phases:
        for text in phase.details():
            terminal.say(f"  {text}")
    if found.is_done and not found.complete:
        terminal.say(f"  all tasks are finished, and the list of shards is missing: wds-async job finish {redact(out)}")


@command.command("finish")
@click.argument("out")
@_job
def finish(out: str, job: str | None) -> None:
    """Write the list of shards of a job whose tasks all have a record. The runner of the last task does it by itself;
    this is for one that was ended just before.

    Example: wds-async job finish s3://out/
    """
    found = _Found.of(_one(out, job))
    if found.complete:
        terminal.say(f"{redact(found.url)}: finished before")
        return
    if not found.is_done:
        raise JobFailed(f"{found.line()}. Start the job again: it does what has no record")
    made = reopened(found.url)
    if isinstance(made, ReshardJob):
        made.run()  # no task is left, only the list, and the spill objects to be removed
    else:
        made.finish()
    terminal.say(f"{redact(found.url)}/finished.json")


@command.command("retry")
@click.argument("out")
@_job
@click.option("--unfinished", is_flag=True, help="Run every task without a record, and not only those that failed.")
@running.engine_options
@click.option("--dry-run", is_flag=True, help="Say what would be read, and start nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before the start. (Only a terminal is asked.)")
def retry(
    out: str,
    job: str | None,
    unfinished: bool,
    engine: str,
    cpus: float | None,
    workers: int | None,
    attempts: int,
    dry_run: bool,
    yes: bool,
) -> None:
    """Run the tasks of a job again that failed at every attempt.

    The function and its version are those that the job was started with; what the function does may be mended. The
    command that started the job does the same, and everything else that has no record.

    Example: wds-async job retry s3://out/ --engine ray
    """
    running.find_modules()
    url = _one(out, job)
    display = running.ProgressDisplay(url.rpartition("/")[2])
    made = reopened(url, engine=engine, attempts=attempts, on_progress=display, cpus=cpus, workers=workers)
    writes = f"{redact(made.folder.out) or 'the working directory'}"
    running.run_job(made, display, writes=writes, dry_run=dry_run, yes=yes, retry=not unfinished)


def _folder_of(out: str) -> str:
    """Return the folder of the outputs: ``out`` is that, or the template of their names."""
    return output_folder(out) if "{" in out else f"{out.rstrip('/')}/" if out not in ("", ".", "./") else ""


def _jobs(out: str) -> Iterator[str]:
    """Yield the folders of the jobs below ``out``, or the one that it is, or is a phase of."""
    if "_wds/" in out:
        whole = resharded(JobFolder(out))
        yield out.rstrip("/") if whole is None else whole.url
        return
    try:
        found = [entry.url for entry in folder_entries(f"{_folder_of(out)}_wds/") if entry.url.endswith("/")]
    except ShardNotFound:
        return
    yield from sorted(url.rstrip("/") for url in found)


def _one(out: str, job: str | None) -> str:
    """Return the folder of one job. ConfigError where there are several and ``job`` does not name one."""
    if job is not None:
        return job_url(_folder_of(out.partition("_wds/")[0]), job)
    jobs = list(_jobs(out))
    if not jobs:
        raise ShardNotFound(f"{redact(out)}: no job has written there (no folder _wds)")
    if len(jobs) > 1:
        names = ", ".join(url.rpartition("/")[2] for url in jobs)
        raise ConfigError(f"{redact(out)} has several jobs: {names}; name one with --job")
    return jobs[0]


@dataclass(frozen=True)
class _Phase:
    """A phase of a job, by its folder; ``title`` is "" for a job of one phase."""

    title: str
    folder: JobFolder
    kind: str
    tasks: int
    contents: FolderContents

    @classmethod
    def of(cls, title: str, folder: JobFolder) -> Self:
        document = folder.document()
        return cls(title, folder, str(document["work"].get("kind")), int(document["tasks"]), folder.contents())

    @property
    def missing(self) -> list[int]:
        """Numbers of the tasks that have no record and have not failed."""
        ended = self.contents.finished | self.contents.failed
        return [number for number in range(self.tasks) if number not in ended]

    @functools.cached_property
    def failed(self) -> dict[int, str]:
        """Errors of failed tasks, by number."""
        return dict(self.folder.failures(sorted(self.contents.failed)))

    def state(self) -> str:
        """Return how far the phase is, in words."""
        text = f"{self.title}{len(self.contents.finished):,} of {counted(self.tasks, 'task')} finished"
        return f"{text}, {len(self.contents.failed):,} failed" if self.contents.failed else text

    def details(self) -> Iterator[str]:
        """Yield a line for each failed task, and one for those without a record, with an end."""
        for number, error in list(self.failed.items())[:_SHOWN]:
            yield f"{self.title}task {number} failed: {error}"
        if len(self.failed) > _SHOWN:
            yield f"and {len(self.failed) - _SHOWN:,} more (--json has all)"
        if missing := self.missing:
            more = f" and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
            yield f"{self.title}no record yet: {', '.join(map(str, missing[:_SHOWN]))}{more}"

    def values(self) -> dict[str, Any]:
        """Return the same for JSON."""
        failed = {str(number): error for number, error in self.failed.items()}
        return {"tasks": self.tasks, "finished": len(self.contents.finished), "failed": failed, "missing": self.missing}


@dataclass(frozen=True)
class _Found:
    """A job as its folders show it: ``phases`` that have begun."""

    url: str
    phases: tuple[_Phase, ...]

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the job with the folder ``url``. ShardNotFound where there is none."""
        folder = JobFolder(url)
        if resharded(folder) is None:
            return cls(url, (_Phase.of("", folder),))
        names = {SCATTER: "first pass: ", PLAN: "plan: ", "": "second pass: "}
        folders = {title: JobFolder(f"{url}{suffix}") for suffix, title in names.items()}
        return cls(url, tuple(_Phase.of(title, one) for title, one in folders.items() if one.contents().begun))

    @property
    def complete(self) -> bool:
        """True once the list of shards is written."""
        return self.phases[-1].contents.complete

    @property
    def is_done(self) -> bool:
        """True once all tasks, of the last phase too, have a record."""
        last = self.phases[-1]
        return last.folder.url == self.url and len(last.contents.finished) == last.tasks

    def line(self) -> str:
        """Return the state of all phases in one line."""
        states = "; ".join(phase.state() for phase in self.phases)
        return f"{redact(self.url)}: {states}{', complete' if self.complete else ''}"

    def values(self) -> dict[str, Any]:
        """Return the same for JSON; a job in phases has what is of one of them in ``phases``."""
        values: dict[str, Any] = {"job": redact(self.url), "kind": self.phases[-1].kind, "complete": self.complete}
        if not self.phases[0].title:
            return {**values, **self.phases[0].values()}
        names = (phase.title.rstrip(": ") for phase in self.phases)
        phases = [{"name": name, **phase.values()} for name, phase in zip(names, self.phases, strict=True)]
        return {**values, "kind": "reshard", "phases": phases}
