"""``wds-async reshard``: the samples of shards in other shards: shuffled, sorted, split, joined, or of another size."""

from __future__ import annotations

import click

from wds_async.cli import running
from wds_async.distributed.resharding import reshard
from wds_async.environment import ON_CORRUPT

__all__ = ["command"]


@click.command("reshard")
@click.argument("inputs", nargs=-1, required=True, metavar="SHARDS...")
@click.argument("output")
@click.option("--shuffle", type=int, metavar="SEED", help="Permute all samples.")
@click.option("--sort", metavar="KEY", help="__key__, or a function (module:function) of a sample that gives the key.")
@click.option(
    "--split", metavar="FUNCTION", help="Function that gives the name of a sample's split; OUTPUT has {split}."
)
@click.option("--join", multiple=True, metavar="SHARDS", help="Other shards, whose samples of the same key are added.")
@click.option(
    "--how", type=click.Choice(["inner", "left", "outer"]), default="inner", show_default=True,
    help="With --join: drop samples without a partner (inner), keep those of SHARDS (left), or all (outer).",
)  # fmt: skip
@click.option("--shards", type=click.IntRange(1), help="Number of new shards (of each split), equal by samples.")
@click.option("--maxcount", type=click.IntRange(1), help="Samples of a new shard.")
@click.option("--maxsize", help="Bytes of a new shard.  [default: 1G, if OUTPUT names no number of shards]")
@click.option("--memory", default="1GiB", show_default=True, help="Bytes that a task may use.")
@click.option("--version", default="", help="Change it when a function changes: then this is another job.")
@click.option("--on-corrupt", type=click.Choice(ON_CORRUPT), help="What to do about broken shards.")
@click.option("--job", default="reshard", show_default=True, help="Name of the job, so of its folder.")
@running.engine_options
@running.start_options
def command(
    inputs: tuple[str, ...],
    output: str,
    shuffle: int | None,
    sort: str | None,
    split: str | None,
    join: tuple[str, ...],
    how: str,
    shards: int | None,
    maxcount: int | None,
    maxsize: str | None,
    memory: str,
    version: str,
    on_corrupt: str | None,
    job: str,
    engine: str,
    cpus: float | None,
    workers: int | None,
    attempts: int,
    overwrite: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Write the samples of SHARDS, each exactly once, to new shards named by OUTPUT: as many as {000000..004095} names,
    or as many as there will be ({000000..}).

    Without --shuffle and --sort the order stays. The result depends on SHARDS and the options alone, and not on the
    engine.

    Every byte is read and written twice: spill objects are below OUT/_wds/JOB/spill until the end. The same command
    again goes on where it stopped.

    Example: wds-async reshard 's3://in/**/*.tar' 's3://out/train-{000000..004095}.tar' --shuffle 7 --engine ray
    """
    running.find_modules()
    display = running.ProgressDisplay(job)
    made = reshard(
        list(inputs),
        output,
        shuffle=shuffle,
        sort=sort,
        split=split,
        join=list(join) or None,
        how=how,
        shards=shards,
        maxcount=maxcount,
        maxsize=maxsize,
        memory=memory,
        version=version,
        on_corrupt=on_corrupt,
        job=job,
        engine=engine,
        cpus=cpus,
        workers=workers,
        attempts=attempts,
        overwrite=overwrite,
        on_progress=display,
    )
    running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes)
