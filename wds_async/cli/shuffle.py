"""``wds-async shuffle``: all samples in a random order."""

from __future__ import annotations

from typing import Any

import click

from wds_async.cli import reordering

__all__ = ["command"]


@click.command("shuffle")
@click.argument("inputs", nargs=-1, required=True, metavar="SHARDS...")
@click.argument("output", metavar="OUT")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed, the same order.")
@reordering.size_options
@reordering.options
def command(inputs: tuple[str, ...], output: str, seed: int, **options: Any) -> None:
    """Write the samples of SHARDS in a random order: each permutation of all samples is as probable as any other.

    OUT is one file, a template such as out/{000000..000099}.tar, or a folder.

    Example: wds-async shuffle 's3://in/{000..999}.tar' 's3://out/{000000..000999}.tar' --seed 7
    """
    reordering.run("shuffle", inputs, output, shuffle=seed, **options)
