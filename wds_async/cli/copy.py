"""``wds-async copy``: shards copied from one store to another."""

from __future__ import annotations

from typing import Any

import click

from wds_async.cli import running, terminal
from wds_async.storage.sink import publish_text
from wds_async.tools.copying import copy_shards

__all__ = ["command"]


@click.command("copy")
@click.argument("shards", nargs=-1, required=True, metavar="SHARDS...")
@click.argument("output", metavar="OUT/")
@click.option("--tree", is_flag=True, help="Keep the folders below the one that all have in common.")
@click.option("--sums", is_flag=True, help="Write OUT/SHA256SUMS when all are copied.")
@click.option("--job", default="copy", show_default=True, help="Name of the job, so of its folder.")
@running.engine_options
@running.start_options
def command(
    shards: tuple[str, ...], output: str, tree: bool, sums: bool, job: str, dry_run: bool, yes: bool, **options: Any
) -> None:
    """Copy SHARDS, byte for byte, into the folder OUT/ of any store. A copy appears when it is whole.

    Many are copied at once, in memory that is bounded. What a former run has finished is not copied again, and a shard
    that was replaced meanwhile is an error. The records have the CRC-32C of each copy.

    Example: wds-async copy 's3://in/train-{000..999}.tar' gs://out/train/ --sums
    """
    display = running.ProgressDisplay(job)
    made = copy_shards(list(shards), output, tree=tree, job=job, on_progress=display, **options)
    running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes)
    if sums and not dry_run:
        name = f"{made.folder.out}SHA256SUMS"
        publish_text(name, made.sums())
        terminal.say(name)
