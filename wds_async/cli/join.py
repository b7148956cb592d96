"""``wds-async join``: samples of several data sets with the same key as one."""

from __future__ import annotations

from typing import Any

import click

from wds_async.cli import reordering

__all__ = ["command"]


@click.command("join")
@click.argument("left", metavar="SHARDS")
@click.argument("right", nargs=-1, required=True, metavar="OTHERS...")
@click.argument("output", metavar="OUT")
@click.option(
    "--how", type=click.Choice(["inner", "left", "outer"]), default="inner", show_default=True,
    help="Drop samples without a partner (inner), keep those of SHARDS (left), or all (outer).",
)  # fmt: skip
@reordering.size_options
@reordering.options
def command(left: str, right: tuple[str, ...], output: str, **options: Any) -> None:
    """Write the samples of SHARDS with the fields that the sample of the same key has in OTHERS, in the order of the
    keys.

    A key may be in SHARDS once, and in OTHERS once, and no field in both. Sizes of new shards count the samples of
    SHARDS alone; with --how outer those of both, so that one joined of two counts as two. OUT is one file, a template
    such as out/{000000..}.tar, or a folder. To put data sets one behind the other, use cat -o; by key, sort.

    Example: wds-async join 'images/*.tar' 'captions/*.tar' both/ --how left

    Example: wds-async join 'part-a/*.tar' 'part-b/*.tar' merged/ --how outer
    """
    reordering.run("join", (left,), output, join=list(right), **options)
