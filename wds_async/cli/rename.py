"""``wds-async rename``: other names of fields, and other keys."""

from __future__ import annotations

import functools
from typing import Any

import click

from wds_async.cli import changing
from wds_async.tools.changes import renamed
from wds_async.tools.expressions import Expression

__all__ = ["command"]


@click.command("rename")
@click.argument("arguments", nargs=-1, required=True, metavar="SHARDS... OUT [NEW=OLD]...")
@click.option("--key", default="", help="Expression that gives the new key of a sample: json.id")
@changing.options
def command(arguments: tuple[str, ...], key: str, **options: Any) -> None:
    """Write the samples of SHARDS with fields renamed: NEW=OLD for each.

    OUT is a folder (out/: names as before), a template with {name}, {task} and {part}, or one file for all.

    Example: wds-async rename 'train-{000..009}.tar' renamed/ jpg=image.jpg json=meta.json
    """
    first = next((n for n, one in enumerate(arguments) if _is_renaming(one)), len(arguments))
    *shards, output = arguments[:first] or ("",)
    pairs = [one.split("=", 1) for one in arguments[first:]]
    names: dict[str, str] = dict(pair for pair in pairs if len(pair) == 2 and all(pair))
    if not shards or len(names) < len(pairs) or len(set(names.values())) < len(pairs):
        raise click.UsageError("give SHARDS, OUT, and behind them NEW=OLD for each field, each once: jpg=image.jpg")
    if not names and not key:
        raise click.UsageError("nothing to rename: give NEW=OLD, or --key")
    if key:
        Expression(key)
    changing.run("rename", tuple(shards), output, functools.partial(renamed, names=names, key=key), **options)


def _is_renaming(argument: str) -> bool:
    """Return whether ``argument`` is NEW=OLD and no URL or path."""
    new, equals, old = argument.partition("=")
    return bool(equals) and not {"/", ":", "?"} & set(new + old)
