"""``wds-async sort``: samples in the order of their keys, or of what an expression gives."""

from __future__ import annotations

import functools
from typing import Any

import click

from wds_async.cli import reordering
from wds_async.tools.expressions import Expression, value

__all__ = ["command"]


@click.command("sort")
@click.argument("inputs", nargs=-1, required=True, metavar="SHARDS...")
@click.argument("output", metavar="OUT")
@click.option("--by", default="key", show_default=True, help="Expression that gives what to sort by: json.width")
@click.option("--reverse", is_flag=True, help="The largest first.")
@reordering.size_options
@reordering.options
def command(inputs: tuple[str, ...], output: str, by: str, **options: Any) -> None:
    """Write the samples of SHARDS sorted: by their keys, or by what an expression on their fields gives.

    OUT is one file, a template such as out/{000000..}.tar, or a folder. Samples that are equal stay in their order.
    However many there are, a task takes no more than --memory: runs are sorted, written aside and merged.

    Example: wds-async sort 'train-{000..009}.tar' sorted.tar --by 'len(txt)' --reverse
    """
    Expression(by)
    chosen = "__key__" if by in ("key", "__key__") else functools.partial(value, expression=by)
    reordering.run("sort", inputs, output, sort=chosen, **options)
