"""``wds-async seen``: the samples that a job had seen when its state was saved."""

from __future__ import annotations

import itertools
import json

import click
from rich.console import Console
from rich.markup import escape

from wds_async.checkpoint.seen import seen
from wds_async.cli import shards, states, terminal
from wds_async.cli.replay import as_dict, columns, table_of_samples

__all__ = ["command"]

_ROWS = 500


@click.command("seen")
@click.argument("state", nargs=-1, required=True)
@click.option("--pipeline", "program", help="What makes the loader: its workers' latest batches are counted, too.")
@click.option("--ranges", is_flag=True, help="List ranges of bytes, without reading the shards for keys.")
@click.option("-n", "limit", type=click.IntRange(min=0), help="Stop after this many lines.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(*, state: tuple[str, ...], program: str | None, ranges: bool, limit: int | None, as_json: bool) -> None:
    """List the samples that the job had seen in the epoch of a state, when it was saved: key, shard, bytes.

    STATE is a file with what state_dict() returned on one rank, merged, or the files of all ranks: JSON, or a
    checkpoint of torch.save that holds it. Samples that were held in buffers, or that workers had made ahead, are not
    listed. A sample that came more than once is listed once, with how often.

    Example: wds-async seen state-*.json --json > seen.jsonl
    """
    found = states.saved_states(state)
    pipeline = None if program is None else states.program(program, found[0])
    samples = itertools.islice(seen(found, pipeline, ranges=ranges), limit)
    if as_json:
        for sample in samples:
            click.echo(json.dumps(as_dict(sample)))
        return
    count = 0
    console = Console(highlight=False, soft_wrap=True)
    while rows := list(itertools.islice(samples, _ROWS)):
        table = table_of_samples(header=not count)
        for sample in rows:
            count += sample.times if not ranges else 1
            table.add_row(*(escape(terminal.line(text)) for text in columns(sample)))
        console.print(table)
    click.echo(shards.counted(count, "range" if ranges else "sample"), err=True)
