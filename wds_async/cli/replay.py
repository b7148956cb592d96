"""``wds-async replay``: the batch of a step, made again from a saved state, and the samples in it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wds_async.checkpoint.replay import Replayed, replayed
from wds_async.checkpoint.seen import SeenSample
from wds_async.cli import shards, states, terminal
from wds_async.errors import ConfigError, StateError
from wds_async.redact import redact

__all__ = ["command", "described"]

_SHOWN = 64


@click.command("replay")
@click.argument("state", nargs=-1, required=True)
@click.option("--step", type=click.IntRange(min=0), required=True, help="Step of the epoch, from 0.")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Rank whose batch it is; needed where states of several are given."
)
@click.option("--pipeline", "program", help="What makes the loader: module:function or file.py:function.")
@click.option("-o", "output", type=click.Path(dir_okay=False), help="Write the batch into this file, pickled.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a sample, and one for the batch last.")
def command(
    *, state: tuple[str, ...], step: int, rank: int | None, program: str | None, output: str | None, as_json: bool
) -> None:
    """Make the batch of a step again, byte for byte, from a saved state, and show the samples that are in it.

    STATE is a file with what state_dict() returned on one rank, merged, or the files of several ranks: JSON, or a
    checkpoint of torch.save that holds it. The step counts the batches of that rank since the epoch began, from 0,
    before the state or behind it. Shards are read, and your functions run, in this process.

    Example: wds-async replay checkpoint.pt --step 4213 --rank 3 --pipeline train.py:make_loader
    """
    if program is None:
        raise click.UsageError(
            "--pipeline is missing: name what makes the loader, as in --pipeline train.py:make_loader"
        )
    found = states.saved_states(state)
    one = next((one for one in found if rank in (None, one["place"][0])), found[0])
    made = replayed(states.program(program, one), found, step, rank)
    if output is not None:
        _write(output, made.batch)
    try:
        samples, untold = made.samples(), ""
    except StateError as exn:
        samples, untold = [], str(exn)
    batch: dict[str, Any] = {"step": made.step, "rank": made.rank, "world_size": made.world_size, "worker": made.worker}
    batch["batch"] = described(made.batch)
    if as_json:
        for sample in samples:
            click.echo(json.dumps(as_dict(sample)))
        click.echo(json.dumps(batch))
    else:
        _print(made, samples)
    if untold:
        click.echo(click.style(terminal.line(f"which samples it was made of: {untold}"), fg="yellow"), err=True)


def as_dict(sample: SeenSample) -> dict[str, Any]:
    """Return ``sample`` for JSON, without secrets in its URL."""
    return {**sample._asdict(), "url": redact(sample.url)}


def _write(output: str, batch: Any) -> None:
    try:
        with open(output, "wb") as file:
            pickle.dump(batch, file)
    except OSError as exn:
        raise ConfigError(f"{output}: {exn.strerror or exn}") from exn


def described(value: Any) -> Any:
    """Return what a batch is made of, for JSON: shapes and types, lengths of lists, sizes of bytes, texts in short."""
    if isinstance(value, Mapping):
        return {str(name): described(one) for name, one in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and value and all(map(_is_column, value))):
        return [described(one) for one in value]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list):
        return f"list of {len(value)}: {described(value[0])}, …" if value else "empty list"
    if isinstance(value, bytes | bytearray):
        return shards.human(len(value))
    return f"{value!r:.60}"


def _is_column(value: Any) -> bool:
    return isinstance(value, list) or hasattr(value, "shape")


def _print(made: Replayed, samples: list[SeenSample]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    worker = "" if made.worker is None else f", worker {made.worker}"
    title = f"step {made.step:,} of rank {made.rank} of {made.world_size}{worker}"
    console.print(f"[bold]{title}[/]: {shards.counted(len(samples), 'sample')}")
    table = table_of_samples()
    for sample in samples[:_SHOWN]:
        table.add_row(*(escape(terminal.line(text)) for text in columns(sample)))
    console.print(table)
    if len(samples) > _SHOWN:
        console.print(f"and {len(samples) - _SHOWN:,} more (--json lists all)")
    content = described(made.batch)
    named = dict(enumerate(content)) if isinstance(content, list) else content
    for name, text in (named if isinstance(named, dict) else {"batch": named}).items():
        console.print(f"  {escape(terminal.line(f'{name}: {text}'))}")


def table_of_samples(*, header: bool = True) -> Table:
    """Return a table for `columns`."""
    table = Table(box=None, pad_edge=False, show_header=header)
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("bytes", no_wrap=True)
    table.add_column("shard", style="dim", overflow="fold")
    return table


def columns(sample: SeenSample) -> tuple[str, str, str]:
    """Return key, bytes and shard of ``sample`` as text."""
    place = "" if sample.start is None else f"{sample.start}-{'' if sample.stop is None else sample.stop}"
    times = "" if sample.times == 1 else f" ({sample.times} times)"
    return sample.key or "", place + times, redact(sample.url)
