"""``wds-async ls``: what is in the shards, one line a sample or a member."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import click

from wds_async.cli import shards
from wds_async.redact import redact

__all__ = ["command"]


@click.command("ls")
@click.argument("url", nargs=-1, required=True)
@click.option("--members", "as_members", is_flag=True, help="List tar members instead of samples.")
@click.option("-n", "limit", type=click.IntRange(min=0), help="Stop after this many lines.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(*, url: tuple[str, ...], as_members: bool, limit: int | None, as_json: bool) -> None:
    """List the samples of shards: key, fields with their sizes, shard, byte offset.

    URL is a path or URL, with brace notation where there are many, a dataset specification (.yaml, .json), or
    package.module:function that returns a pipeline: no more is fetched than is listed.

    Example: wds-async ls 'https://host/train-{000..009}.tar' -n 5
    """
    rows = _members(shards.expand(url)) if as_members else _samples(url)
    for row in itertools.islice(rows, limit):
        click.echo(json.dumps(row) if as_json else _line(row))


def _members(found: list[str]) -> Iterator[dict[str, Any]]:
    for url, (name, data, offset) in shards.members(found):
        yield {"name": name, "bytes": len(data), "shard": redact(url), "offset": offset}


def _samples(specs: Iterable[str]) -> Iterator[dict[str, Any]]:
    for entry in shards.entries(specs):
        sizes = {name: len(data) for name, data in entry.fields.items()}
        yield {"key": entry.key, "fields": sizes, "shard": redact(entry.url), "offset": entry.offset}


def _line(row: dict[str, Any]) -> str:
    if "key" in row:
        what = "  ".join(f"{click.style(name, fg='cyan')} {shards.human(size)}" for name, size in row["fields"].items())
        name = row["key"]
    else:
        what, name = shards.human(row["bytes"]), row["name"]
    offset = "" if row["offset"] is None else f" @{row['offset']}"
    where = click.style(f"{row['shard']}{offset}", dim=True)
    return f"{click.style(name, bold=True)}  {what}  {where}"
