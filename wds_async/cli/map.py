"""``wds-async map``: a function over the samples of any number of shards, written to others."""

from __future__ import annotations

import click

from wds_async.cli import running
from wds_async.distributed.mapping import map_shards

__all__ = ["command"]


@click.command("map")
@click.argument("shards", nargs=-1, required=True, metavar="SHARDS...")
@click.argument("output")
@click.argument("function")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the function's randomness.")
@click.option("--version", default="", help="Change it when the function changes: then this is another job.")
@click.option("--maxsize", help="Begin another part beyond so many bytes of fields (500M, 1G).")
@click.option("--maxcount", type=int, help="Begin another part beyond so many samples.")
@click.option("--index", is_flag=True, help="Write DALI's index beside each new shard.")
@click.option(
    "--skip-errors", is_flag=True,
    help="Pass over samples and shards with errors; the task's record names them.  [default: the task fails]",
)  # fmt: skip
@click.option(
    "--inputs-per-task", type=click.IntRange(1), default=1, show_default=True, help="Shards that one task reads."
)
@click.option("--job", default="map", show_default=True, help="Name of the job, so of its folder.")
@running.engine_options
@running.start_options
def command(
    shards: tuple[str, ...],
    output: str,
    function: str,
    seed: int,
    version: str,
    maxsize: str | None,
    maxcount: int | None,
    index: bool,
    skip_errors: bool,
    inputs_per_task: int,
    job: str,
    engine: str,
    cpus: float | None,
    workers: int | None,
    attempts: int,
    overwrite: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Apply FUNCTION (module:function) to the samples of SHARDS, and write new shards named by OUTPUT, which has the
    fields {task} and {part}.

    FUNCTION takes a sample, a dict of bytes, and returns a sample, several, or None to drop it; or it is a stage of a
    pipeline. Modules of the working directory are found.

    One task reads one shard. A finished task has a record in _wds/JOB beside the new shards; the same command again
    does what has none. The status is 1 if a task has failed at every attempt; the others are finished then.

    Example: wds-async map 's3://in/train-{000..999}.tar' 's3://out/train-{task:06d}-{part:03d}.tar' steps:smaller
    """
    running.find_modules()
    display = running.ProgressDisplay(job)
    made = map_shards(
        list(shards),
        output,
        function,
        seed=seed,
        version=version,
        maxsize=maxsize,
        maxcount=maxcount,
        index=index,
        handler="wds_async.handlers:ignore_and_continue" if skip_errors else "wds_async.handlers:reraise_exception",
        inputs_per_task=inputs_per_task,
        job=job,
        engine=engine,
        cpus=cpus,
        workers=workers,
        attempts=attempts,
        overwrite=overwrite,
        on_progress=display,
    )
    running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes)
