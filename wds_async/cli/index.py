"""``wds-async index``: count the samples of shards once, and write the counts down."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any

import click

from wds_async import shardindex
from wds_async.cli import shards
from wds_async.errors import ConfigError
from wds_async.tar.index import shard_list

__all__ = ["command"]


@click.command("index")
@click.argument("url", nargs=-1, required=True, metavar="SHARDS...")
@click.option("-o", "--output", default="-", help="The file to write (default: standard output).")
@click.option("--name", help="A name for the data set.")
@click.option("--base", help="URL of the folder where SHARDS given as relative paths will be.")
def command(*, url: tuple[str, ...], output: str, name: str | None, base: str | None) -> None:
    """Write a JSON index of SHARDS: how many samples and bytes each holds.

    ShardListDataset reads samples by number from it. All bytes of the shards are read once; an error names its shard
    and writes nothing. Local shards in the folder of the index, or below it, are named relative to it.

    Example: wds-async index 'https://host/train-{000..009}.tar' -o train.json
    """
    found = shards.expand(url)
    with contextlib.ExitStack() as stack:
        each: Iterable[dict[str, Any]] = shardindex.count_samples(found)
        if sys.stderr.isatty():
            bar = click.progressbar(each, length=len(found), label="shards", file=sys.stderr, show_pos=True)
            each = stack.enter_context(bar)
        counted = list(each)
    folder = None if output == "-" else os.path.dirname(os.path.abspath(output))
    placed = shardindex.placed_shards(counted, base=base, folder=folder)
    with _opened(output) as file:
        file.write(shard_list(placed, name or ""))
    total = sum(shard["nsamples"] for shard in counted)
    size = sum(shard["filesize"] for shard in counted)
    click.echo(f"{len(counted)} shards, {total} samples, {shards.human(size)}", err=True)


@contextlib.contextmanager
def _opened(output: str) -> Iterator[IO[str]]:
    """Standard output, or a file that appears complete."""
    if output == "-":
        yield sys.stdout
        return
    temporary = f"{output}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            yield file
        os.replace(temporary, output)
    except OSError as exn:
        raise ConfigError(f"cannot write {output!r}: {exn.strerror}") from exn
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
