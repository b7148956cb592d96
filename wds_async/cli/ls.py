"""``wds-async ls``: what is in the shards, one line a sample or a member."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import click

from wds_async.cli import folder, shards, terminal
from wds_async.redact import redact

__all__ = ["command"]


@click.command("ls")
@click.argument("url", nargs=-1, required=True)
@click.option("--members", "as_members", is_flag=True, help="List tar members instead of samples.")
@click.option("--shards", "as_shards", is_flag=True, help="List the shards that match, and not what is in them.")
@click.option("-r", "--recursive", is_flag=True, help="Of a folder: all objects, also those of the folders in it.")
@click.option("-n", "limit", type=click.IntRange(min=0), help="Stop after this many lines.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(
    *, url: tuple[str, ...], as_members: bool, as_shards: bool, recursive: bool, limit: int | None, as_json: bool
) -> None:
    """List the samples of shards: key, fields with their sizes, shard, byte offset. Or what is in a folder.

    URL is a path or URL, with braces or * where there are many, a dataset specification (.yaml, .json), or
    package.module:function that returns a pipeline: no more is fetched than is listed. Of a URL that ends with /, and
    of a directory, the objects and folders are listed, with size and time (UTC); and of what a pattern matches with
    --shards. Then nothing of the shards is read.

    Example: wds-async ls 'https://host/train-{000..009}.tar' -n 5

    Example: wds-async ls s3://bucket/folder/
    """
    if as_members and (as_shards or recursive):
        raise click.UsageError("--members lists what is in shards: it takes no --shards and no --recursive")
    found = [None if as_members else folder.folder_of(given) for given in url]
    if as_shards:
        if recursive:
            raise click.UsageError("--shards takes no --recursive; a pattern looks into folders with **/")
        folder.show(folder.matched(url), below="", limit=limit, as_json=as_json)
    elif any(found) or recursive:
        if not all(found):
            mixed = ", ".join(repr(redact(given)) for given, name in zip(url, found, strict=True) if not name)
            raise click.UsageError(f"{mixed}: no folder (a directory, or a URL that ends with /)")
        folders = [name for name in found if name]
        entries = itertools.chain.from_iterable(folder.within(name, recursive) for name in folders)
        folder.show(entries, below=folders[0] if len(folders) == 1 else "", limit=limit, as_json=as_json)
    else:
        rows = _members(shards.expand(url)) if as_members else _samples(url)
        for row in itertools.islice(rows, limit):
            terminal.say(json.dumps(row) if as_json else _line(row))


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
