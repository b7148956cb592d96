"""``wds-async filter``: the samples for which an expression is true."""

from __future__ import annotations

import functools
from typing import Any

import click

from wds_async.cli import changing
from wds_async.tools.changes import filtered
from wds_async.tools.expressions import Expression

__all__ = ["command"]


@click.command("filter")
@changing.arguments
@click.argument("expression")
@click.option("--invert", is_flag=True, help="Keep the samples for which it is not true.")
@changing.options
def command(shards: tuple[str, ...], output: str, expression: str, invert: bool, **options: Any) -> None:
    """Write the samples of SHARDS for which EXPRESSION is true to new shards.

    OUT is a folder (out/: names as before), a template with {name}, {task} and {part}, or one file for all.

    In EXPRESSION a field is named by its name: json.width > 256, cls in (3, 7), len(txt) > 10, size(jpg) < 1e6,
    width(jpg) >= 224, has("json") and json.lang == "en", fraction(key) < 0.1, matches("^a/", key).

    Example: wds-async filter 'train-{000..009}.tar' large/ 'json.width > 256'
    """
    Expression(expression)
    changing.run("filter", shards, output, functools.partial(filtered, expression=expression, invert=invert), **options)
