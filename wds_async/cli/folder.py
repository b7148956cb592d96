"""What is in folders, and which shards patterns match, as ``ls`` shows them; nothing of the data is read."""

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

__all__ = ["folder_of", "matched", "show", "within"]

_SORTED = 1000


def folder_of(given: str) -> str | None:
    """``given`` with a "/" at its end, if it is a folder: a URL that ends with "/", or a directory."""
    path = local_path(given)
    if path is not None:
        path = os.path.join(os.path.expanduser(path), "")
        return path if os.path.isdir(path) else None
    single = scheme(given) not in ("-", "pipe") and "{" not in given and "*" not in given
    return given if single and given.endswith("/") and "?" not in given else None


def within(folder: str, recursive: bool) -> Iterator[Entry]:
    """What is in a folder, or below it. A small one is sorted, folders first; of a large one no more is listed than is
    taken."""
    with contextlib.closing(folder_entries(folder, recursive=recursive)) as entries:
        first = [] if recursive else list(itertools.islice(entries, _SORTED))
        if len(first) < _SORTED:
            first.sort(key=lambda entry: (not entry.url.endswith("/"), entry.url))
        yield from first
        yield from entries


def matched(specs: Iterable[str]) -> Iterator[Entry]:
    """The shards that URLs, patterns and specifications stand for, with what a listing tells of them."""
    for given in specs:
        if spec.is_specification(given) or spec.is_function(given):
            yield from (Entry(url, None) for url in shards.expand([given]))
        else:
            yield from matches(given)


def show(entries: Iterable[Entry], *, below: str, limit: int | None, as_json: bool) -> None:
    """One line an entry, without ``below`` at the start of its URL; on a terminal a last line with what it comes to."""
    objects = folders = total = 0
    for entry in itertools.islice(entries, limit):
        folder = entry.url.endswith("/")
        objects, folders, total = objects + (not folder), folders + folder, total + (entry.size or 0)
        terminal.say(json.dumps(_row(entry)) if as_json else _line(entry, below))
    if not as_json and sys.stdout.isatty():
        cut = ", and perhaps more" if objects + folders == limit else ""
        counted = f"{_count(folders, 'folder')}, {_count(objects, 'object')}" if folders else _count(objects, "object")
        click.echo(click.style(f"{counted}, {shards.human(total)}{cut}", dim=True))


def _row(entry: Entry) -> dict[str, Any]:
    when = None if entry.modified is None else _when(entry.modified).isoformat(timespec="seconds")
    return {"url": redact(entry.url), "bytes": entry.size, "modified": when}


def _line(entry: Entry, below: str) -> str:
    name = redact(entry.url.removeprefix(below))
    size = "" if entry.size is None else shards.human(entry.size)
    when = "" if entry.modified is None else f"{_when(entry.modified):%Y-%m-%d %H:%M}"
    name = click.style(name, fg="cyan", bold=True) if name.endswith("/") else name
    return f"{size:>9}  {when:16}  {name}"


def _when(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
