"""``wds-async split``: shards of another size, or several sets of shards."""

from __future__ import annotations

import functools
from typing import Any

import click

from wds_async.cli import reordering
from wds_async.tools.changes import split_by, split_randomly, weights_of
from wds_async.tools.expressions import Expression

__all__ = ["command"]


@click.command("split")
@click.argument("inputs", nargs=-1, required=True, metavar="SHARDS...")
@click.argument("output", metavar="OUT")
@click.option("--by", help="Expression that gives the name of a sample's split; None drops the sample.")
@click.option("--weights", help="Names and shares, as in train=0.9,val=0.1. A key is always in the same split.")
@click.option("--seed", type=int, default=0, show_default=True, help="With --weights: another seed, other splits.")
@reordering.size_options
@reordering.options
def command(
    inputs: tuple[str, ...], output: str, by: str | None, weights: str | None, seed: int, **options: Any
) -> None:
    """Write the samples of SHARDS to shards of another size, or with --by or --weights to several sets of shards.

    OUT is a folder, or a template such as out/{000000..}.tar, which has {split} where there are several sets. Samples
    stay in their order.

    Example: wds-async split all.tar parts/ --maxcount 10000

    Example: wds-async split 'all/*.tar' 'out/{split}-{0000..}.tar' --weights train=0.9,val=0.1
    """
    if by is not None and weights is not None:
        raise click.UsageError("--by and --weights are two ways to split: give one of them")
    chosen = None
    if by is not None:
        Expression(by)
        chosen = functools.partial(split_by, expression=by)
    elif weights is not None:
        chosen = functools.partial(split_randomly, weights=weights_of(weights), seed=seed)
    reordering.run("split", inputs, output, split=chosen, **options)
