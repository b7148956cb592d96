"""``wds-async index``: count the samples of shards once, and write the counts down."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any

import click

from wds_async.cli import shards
from wds_async.indexed import index
from wds_async.storage.sink import publish_text
from wds_async.tar.index import shard_list
from wds_async.urls import local_path

__all__ = ["command"]


@click.command("index")
@click.argument("url", nargs=-1, required=True, metavar="SHARDS...")
@click.option("-o", "--output", default="-", help="The file or URL to write (default: standard output).")
@click.option("--name", help="A name for the dataset.")
@click.option("--base", help="URL of the folder where SHARDS given as relative paths will be.")
def command(*, url: tuple[str, ...], output: str, name: str | None, base: str | None) -> None:
    """Write a JSON index of SHARDS: how many samples and bytes each holds.

    ShardListDataset reads samples by number from it. All bytes of the shards are read once; an error names its shard
    and writes nothing. Local shards in the folder of the index, or below it, are named relative to it.

    Example: wds-async index 'https://host/train-{000..009}.tar' -o train.json
    """
    urls = shards.expand(url)
    with contextlib.ExitStack() as stack:
        each: Iterable[dict[str, Any]] = index.count_samples(urls)
        if sys.stderr.isatty():
            bar = click.progressbar(each, length=len(urls), label="shards", file=sys.stderr, show_pos=True)
            each = stack.enter_context(bar)
        counted = list(each)
    path = None if output == "-" else local_path(output)
    folder = None if path is None else os.path.dirname(os.path.abspath(path))
    placed = index.placed_shards(counted, base=base, folder=folder)
    text = shard_list(placed, name or "")
    if output == "-":
        click.echo(text, nl=False)
    else:
        publish_text(output, text)
    total = sum(shard["nsamples"] for shard in counted)
    size = sum(shard["filesize"] for shard in counted)
    counts = f"{shards.counted(len(counted), 'shard')}, {shards.counted(total, 'sample')}"
    click.echo(f"{counts}, {shards.human(size)}", err=True)
