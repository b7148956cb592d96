"""``wds-async cat``: samples as lines, one field's bytes, or whole shards' bytes, to standard output."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click

from wds_async.cli import reordering, shards, terminal
from wds_async.errors import WdsError
from wds_async.redact import redact

__all__ = ["command"]

_WIDTH = 80


@click.command("cat")
@click.argument("url", nargs=-1, required=True)
@click.option("--key", help="Show only the sample with this key.")
@click.option("--field", "name", help="Write only the bytes of this field.")
@click.option("--raw", "as_raw", is_flag=True, help="Write the shards' own bytes, one after another.")
@click.option("-n", "limit", type=click.IntRange(min=0), help="Stop after this many samples.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("-o", "output", metavar="OUT", help="Write the samples of all shards to OUT, one after another.")
@reordering.size_options
@reordering.options
def command(
    *,
    url: tuple[str, ...],
    key: str | None,
    name: str | None,
    as_raw: bool,
    limit: int | None,
    as_json: bool,
    output: str | None,
    **options: Any,
) -> None:
    """Show samples in short, or write the bytes of a field or a shard to standard output, or with -o new shards.

    URL is a path or URL, with braces for several shards, a dataset specification (.yaml, .json), or
    package.module:function, a function that returns a pipeline (not with --raw).

    Example: wds-async cat train-000.tar --key 000042 --field jpg > 42.jpg

    Example: wds-async cat --raw https://host/train-000.tar | tar t

    OUT is one file, a template such as out/{000000..}.tar, or a folder; the options from --shards on are for -o.

    Example: wds-async cat 'train-{000..009}.tar' -o all.tar
    """
    if output is not None:
        if as_raw or key or name or as_json or limit is not None:
            raise click.UsageError("-o writes whole samples to shards: it takes no --key, --field, --raw, --json or -n")
        reordering.run("cat", url, output, **options)
        return
    if as_raw and (key or name or as_json or limit is not None):
        raise click.UsageError("--raw writes whole shards: it takes no --key, --field, --json or -n")
    if name and as_json:
        raise click.UsageError("--field writes bytes: it takes no --json")
    if as_raw:
        _write(shards.raw(shards.expand(url)))
        return
    entries = (entry for entry in shards.entries(url) if key is None or entry.key == key)
    chosen: Iterator[shards.ListedShard] = itertools.islice(entries, 1 if key is not None else limit)
    first = next(chosen, None)
    if first is None:
        if key is None and not name:
            return
        what = "no sample" if key is None else f"no sample with key {key!r}"
        raise WdsError(f"{what} in {', '.join(map(redact, url))}: `wds-async ls` shows which there are")
    chosen = itertools.chain([first], chosen)
    if name:
        _write(_field(entry, name.lower()) for entry in chosen)
    else:
        for entry in chosen:
            terminal.say(json.dumps(_object(entry)) if as_json else _line(entry))


def _write(pieces: Iterable[bytes | memoryview]) -> None:
    for piece in pieces:
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _field(entry: shards.ListedShard, name: str) -> bytes:
    if name in entry.fields:
        return entry.fields[name]
    raise WdsError(
        f"sample {entry.key!r} of {redact(entry.url)} (offset {entry.offset}) has no field {name!r}: "
        f"it has {', '.join(entry.fields)}"
    )


def _text(data: bytes) -> str | None:
    """Return the field as text where it is short and printable, None for anything else."""
    if len(data) > 4 * _WIDTH:
        return None
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode("utf-8")
        return text if all(c.isprintable() or c.isspace() for c in text) else None
    return None


def _object(entry: shards.ListedShard) -> dict[str, Any]:
    texts = {name: _text(data) for name, data in entry.fields.items()}
    fields = {
        name: {"bytes": len(data)} if texts[name] is None else {"bytes": len(data), "text": texts[name]}
        for name, data in entry.fields.items()
    }
    return {"key": entry.key, "fields": fields, "shard": redact(entry.url), "offset": entry.offset}


def _line(entry: shards.ListedShard) -> str:
    parts = [click.style(entry.key, bold=True)]
    for name, data in entry.fields.items():
        text = _text(data)
        shown = f"<{shards.human(len(data))}>" if text is None else " ".join(text.split())
        shown = shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + "…"
        parts.append(f"{click.style(name, fg='cyan')}={shown}")
    return "  ".join(parts)
