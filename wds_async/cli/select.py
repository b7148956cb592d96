"""``wds-async select``: some fields of each sample."""

from __future__ import annotations

import functools
from typing import Any

import click

from wds_async.cli import changing
from wds_async.tools.changes import selected

__all__ = ["command"]


@click.command("select")
@changing.arguments
@click.argument("fields")
@click.option("--drop", is_flag=True, help="Drop these fields and keep all others.")
@click.option("--optional", is_flag=True, help="Do without fields that a sample lacks.  [default: an error]")
@changing.options
def command(shards: tuple[str, ...], output: str, fields: str, drop: bool, optional: bool, **options: Any) -> None:
    """Write the samples of SHARDS with only the named FIELDS, separated by commas; patterns (seg.*) are allowed.

    OUT is a folder (out/: names as before), a template with {name}, {task} and {part}, or one file for all.

    Example: wds-async select 'train-{000..009}.tar' small/ jpg,cls
    """
    names = [name for name in fields.split(",") if name]
    if not names:
        raise click.UsageError("FIELDS names no field: write for example jpg,cls")
    chosen = functools.partial(selected, fields=names, drop=drop, optional=optional)
    changing.run("select", shards, output, chosen, **options)
