"""``wds-async job``: the jobs below a folder: list them, show one, finish it, run again what failed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from wds_async.cli import running, terminal
from wds_async.cli.shards import counted
from wds_async.distributed.folder import FolderContents, JobFolder, job_url, output_folder
from wds_async.distributed.reopening import reopened
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
        folder = JobFolder(url)
        terminal.say(_line(folder, folder.contents(), int(folder.document()["tasks"])))
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
    folder = JobFolder(_one(out, job))
    document, contents = folder.document(), folder.contents()
    tasks = int(document["tasks"])
    failed = dict(folder.failures(sorted(contents.failed)))
    missing = [number for number in range(tasks) if number not in contents.finished and number not in failed]
    if as_json:
        values = {
            "job": redact(folder.url),
            "kind": document["work"].get("kind"),
            "tasks": tasks,
            "finished": len(contents.finished),
            "complete": contents.complete,
            "failed": {str(number): error for number, error in failed.items()},
            "missing": missing,
        }
        click.echo(json.dumps(values))
        return
    terminal.say(_line(folder, contents, tasks))
    for number, error in list(failed.items())[:_SHOWN]:
        terminal.say(f"  task {number} failed: {error}")
    if len(failed) > _SHOWN:
        terminal.say(f"  and {len(failed) - _SHOWN:,} more (--json has all)")
    if missing:
        names = ", ".join(map(str, missing[:_SHOWN]))
        terminal.say(f"  no record yet: {names}{f' and {len(missing) - _SHOWN:,} more' * (len(missing) > _SHOWN)}")
    if not contents.complete and len(contents.finished) == tasks:
        terminal.say(f"  all tasks are finished, and the list of shards is missing: wds-async job finish {redact(out)}")


@command.command("finish")
@click.argument("out")
@_job
def finish(out: str, job: str | None) -> None:
    """Write the list of shards of a job whose tasks all have a record. Whoever ends the last task does it by itself;
    this is for one that was ended just before.

    Example: wds-async job finish s3://out/
    """
    folder = JobFolder(_one(out, job))
    tasks, contents = int(folder.document()["tasks"]), folder.contents()
    if contents.complete:
        terminal.say(f"{redact(folder.url)}: finished before")
        return
    if len(contents.finished) < tasks:
        left = counted(tasks - len(contents.finished), "task")
        raise JobFailed(f"{redact(folder.url)}: {left} of {tasks:,} without a record; start the job again")
    reopened(folder.url).finish()
    terminal.say(f"{redact(folder.url)}/finished.json")


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
    """Yield the folders of the jobs below ``out``, or the one that it is."""
    if "_wds/" in out:
        yield out.rstrip("/")
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


def _line(folder: JobFolder, contents: FolderContents, tasks: int) -> str:
    state = f"{len(contents.finished):,} of {counted(tasks, 'task')} finished"
    state += f", {len(contents.failed):,} failed" if contents.failed else ""
    return f"{redact(folder.url)}: {state}{', complete' if contents.complete else ''}"
