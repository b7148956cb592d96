"""``wds-async ls``: the samples or members of shards, or the objects and folders of a folder, one a line."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click

from wds_async.cli import shards, terminal
from wds_async.redact import redact
from wds_async.shardlists import spec
from wds_async.storage.base import Entry
from wds_async.storage.listing.expand import folder_entries, matches
from wds_async.urls import local_path, scheme

__all__ = ["command"]

_SORTED = 1000


@click.command("ls")
@click.argument("url", nargs=-1, required=True)
@click.option("--members", "as_members", is_flag=True, help="List tar members instead of samples.")
@click.option("--shards", "as_shards", is_flag=True, help="List the matching shards, not their samples.")
@click.option("-r", "--recursive", is_flag=True, help="For a folder: list all objects below it.")
@click.option("-n", "limit", type=click.IntRange(min=0), help="Stop after this many lines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    *, url: tuple[str, ...], as_members: bool, as_shards: bool, recursive: bool, limit: int | None, as_json: bool
) -> None:
    """List the samples of shards (key, fields with their sizes, shard, byte offset), or the contents of a folder.

    URL is a path or URL, with braces or wildcards for several shards, a dataset specification (.yaml, .json), or
    package.module:function, a function that returns a pipeline. No more is read than is listed.

    For a URL that ends with /, and for a local directory, its objects and folders are listed with size and time (UTC).
    With --shards, the shards that the URL matches are listed in the same way. Neither reads any shard.

    Example: wds-async ls 'https://host/train-{000..009}.tar' -n 5

    Example: wds-async ls s3://bucket/folder/
    """
    if as_members and (as_shards or recursive):
        raise click.UsageError("--members lists what is in shards: it takes no --shards and no --recursive")
    if as_shards and recursive:
        raise click.UsageError("--shards takes no --recursive; a pattern looks into folders with **/")
    folders = [None if as_members else _folder_of(name) for name in url]
    if as_shards:
        _show(_matching(url), below="", limit=limit, as_json=as_json)
    elif any(folders) or recursive:
        if not all(folders):
            others = ", ".join(repr(redact(name)) for name, folder in zip(url, folders, strict=True) if not folder)
            raise click.UsageError(f"{others}: no folder (a directory, or a URL that ends with /)")
        entries = itertools.chain.from_iterable(_within(name, recursive) for name in folders if name)
        _show(entries, below=(folders[0] or "") if len(folders) == 1 else "", limit=limit, as_json=as_json)
    else:
        rows = _members(url) if as_members else _samples(url)
        for row in itertools.islice(rows, limit):
            terminal.say(json.dumps(row) if as_json else _line(row))


def _members(specs: Iterable[str]) -> Iterator[dict[str, Any]]:
    for url, (name, data, offset) in shards.members(shards.expand(specs)):
        yield {"name": name, "bytes": len(data), "shard": redact(url), "offset": offset}


def _samples(specs: Iterable[str]) -> Iterator[dict[str, Any]]:
    for entry in shards.entries(specs):
        sizes = {name: len(data) for name, data in entry.fields.items()}
        yield {"key": entry.key, "fields": sizes, "shard": redact(entry.url), "offset": entry.offset}


def _line(row: dict[str, Any]) -> str:
    if "key" in row:
        what = "  ".join(f"{click.style(name, fg='cyan')} {shards.human(size)}" for name, size in row["fields"].items())
    else:
        what = shards.human(row["bytes"])
    offset = "" if row["offset"] is None else f" @{row['offset']}"
    where = click.style(f"{row['shard']}{offset}", dim=True)
    return f"{click.style(row.get('key', row.get('name')), bold=True)}  {what}  {where}"


# Folders: nothing of the data is read.


def _folder_of(name: str) -> str | None:
    """Return ``name`` with a final "/" if it is a directory or a URL that ends with "/", else None."""
    path = local_path(name)
    if path is not None:
        path = os.path.join(os.path.expanduser(path), "")
        return path if os.path.isdir(path) else None
    single = scheme(name) not in ("-", "pipe") and not set(name) & set("{*?")
    return name if single and name.endswith("/") else None


def _within(folder: str, recursive: bool) -> Iterator[Entry]:
    """Yield what is in a folder, or below it: a small folder sorted, subfolders first, a large one as it is listed."""
    with contextlib.closing(folder_entries(folder, recursive=recursive)) as entries:
        first = [] if recursive else list(itertools.islice(entries, _SORTED))
        if len(first) < _SORTED:
            first.sort(key=lambda entry: (not entry.url.endswith("/"), entry.url))
        yield from first
        yield from entries


def _matching(specs: Iterable[str]) -> Iterator[Entry]:
    """Yield the shards of URLs, patterns and specifications, with the size and time that a listing gives."""
    for name in specs:
        if spec.is_specification(name) or spec.is_function(name):
            yield from (Entry(url, None) for url in shards.expand([name]))
        else:
            yield from matches(name)


def _show(entries: Iterable[Entry], *, below: str, limit: int | None, as_json: bool) -> None:
    """Print one line an entry, its URL without the prefix ``below``, and on a terminal a last line with the sums."""
    objects = folders = total = 0
    for entry in itertools.islice(entries, limit):
        folder = entry.url.endswith("/")
        objects, folders, total = objects + (not folder), folders + folder, total + (entry.size or 0)
        when = None if entry.modified is None else datetime.datetime.fromtimestamp(entry.modified, datetime.UTC)
        if as_json:
            modified = when and when.isoformat(timespec="seconds")
            terminal.say(json.dumps({"url": redact(entry.url), "bytes": entry.size, "modified": modified}))
            continue
        size = "" if entry.size is None else shards.human(entry.size)
        name = redact(entry.url.removeprefix(below))
        name = click.style(name, fg="cyan", bold=True) if folder else name
        terminal.say(f"{size:>9}  {f'{when:%Y-%m-%d %H:%M}' if when else '':16}  {name}")
    if not as_json and sys.stdout.isatty():
        counts = [shards.counted(folders, "folder")] if folders else []
        cut = ", and perhaps more" if objects + folders == limit else ""
        text = f"{', '.join([*counts, shards.counted(objects, 'object')])}, {shards.human(total)}{cut}"
        click.echo(click.style(text, dim=True))
