"""``wds-async reshard``: the samples of any number of shards in other shards: shuffled, sorted, split, joined."""

from __future__ import annotations

import click

from wds_async.cli import running
from wds_async.distributed.resharding import reshard

__all__ = ["command"]


@click.command("reshard")
@click.argument("shards", nargs=-1, required=True, metavar="SHARDS...")
@click.argument("output")
@click.option("--shuffle", type=int, metavar="SEED", help="A permutation of all samples.")
@click.option("--sort", metavar="KEY", help="__key__, or module:function from sample to a value.")
@click.option(
    "--split", metavar="FUNCTION", help="module:function from sample to a name for {split} in OUTPUT, or None."
)
@click.option("--join", multiple=True, metavar="SHARDS", help="Another data set: samples of one key become one.")
@click.option("--how", type=click.Choice(["inner", "left"]), default="inner", show_default=True,
              help="--join: drop samples of SHARDS without a partner, or keep them.")  # fmt: skip
@click.option("--number", type=int, help="How many shards to write.  [default: as many as OUTPUT names]")
@click.option("--maxsize", help="Bytes of a shard instead (500M, 1G).  [default: 1G, if OUTPUT names no number]")
@click.option("--maxcount", type=int, help="Samples of a shard instead.")
@click.option("--memory", default="1GiB", show_default=True, help="Of one task.")
@click.option("--version", default="", help="Change it when a function changes: then this is another job.")
@click.option("--job", default="reshard", show_default=True, help="Name of the job, so of its folder.")
@running.engine_options
@running.start_options
def command(
    shards: tuple[str, ...],
    output: str,
    shuffle: int | None,
    sort: str | None,
    split: str | None,
    join: tuple[str, ...],
    how: str,
    number: int | None,
    maxsize: str | None,
    maxcount: int | None,
    memory: str,
    version: str,
    job: str,
    engine: str,
    cpus: float | None,
    workers: int | None,
    attempts: int,
    overwrite: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Write the samples of SHARDS, each once, to the shards that OUTPUT names: {000000..000099} for a hundred,
    {000000..} for as many as it takes.

    Without --shuffle and --sort they stay in their order. The result depends on shards and options alone, not on
    engine and memory. All bytes are written twice: what lies between is in _wds/JOB beside the new shards until the
    end. The same command again goes on where it stopped.

    Example: wds-async reshard 's3://in/**/*.tar' 's3://out/s-{000000..004095}.tar' --shuffle 7 --engine ray
    """
    running.find_modules()
    display = running.ProgressDisplay("reshard")
    made = reshard(
        list(shards),
        output,
        shuffle=shuffle,
        sort=sort,
        split=split,
        join=list(join) or None,
        how=how,
        shards=number,
        maxsize=maxsize,
        maxcount=maxcount,
        memory=memory,
        version=version,
        job=job,
        engine=engine,
        cpus=cpus,
        workers=workers,
        attempts=attempts,
        overwrite=overwrite,
        on_progress=display,
    )
    running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes)
