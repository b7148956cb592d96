"""``wds-async diff``: what differs between two sets of shards."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from wds_async.cli import shards, terminal
from wds_async.tools.comparing import DiffCounts, Difference, compare

__all__ = ["command"]

_COLOURS = {"only in A": "red", "only in B": "green"}


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--fields", help="Compare these fields only: jpg,cls")
@click.option("--ignore", default="", help="Do not compare these fields: json")
@click.option("--ordered", is_flag=True, help="Report samples that are in another place too.")
@click.option("-n", "limit", type=click.IntRange(0), default=50, show_default=True, help="Show so many differences.")
@click.option("-q", "--quiet", is_flag=True, help="Show nothing, and stop at the first difference: the status tells.")
@click.option("--json", "as_json", is_flag=True, help="Print one object for each difference, and a summary; all.")
def command(
    *, a: str, b: str, fields: str | None, ignore: str, ordered: bool, limit: int, quiet: bool, as_json: bool
) -> None:
    """Compare the samples of the shards A and B by key, whatever shards they are in.

    The status is 0 if they are the same, 1 if they differ, 2 for a wrong command. All keys of A are held in memory:
    about 300 bytes a sample.

    Example: wds-async diff 'old/*.tar' 's3://bucket/new/*.tar' --ignore json
    """
    counts, found = DiffCounts(), 0
    names = [name for name in (fields or "").split(",") if name]
    for one in compare(
        shards.expand([a]), shards.expand([b]), counts, ordered=ordered, fields=names, ignore=ignore.split(",")
    ):
        found += 1
        if quiet:
            break
        if as_json:
            click.echo(json.dumps(asdict(one)))
        elif found <= limit:
            terminal.say(_line(one))
    if as_json:
        click.echo(json.dumps({**asdict(counts), "differences": found}))
    elif not quiet:
        more = f" ({found - limit:,} not shown: -n {found})" if found > limit else ""
        read = f"A has {shards.counted(counts.samples_a, 'sample')}, B {shards.counted(counts.samples_b, 'sample')}"
        click.echo(f"{read}: {shards.counted(found, 'difference')}{more}", err=True)
    click.get_current_context().exit(1 if found else 0)


def _line(one: Difference) -> str:
    kind = click.style(f"{one.kind:9}", fg=_COLOURS.get(one.kind, "yellow"))
    values = " → ".join(text for text in (one.a, one.b) if text)
    return f"{kind}  {click.style(one.key, bold=True)}{f'  {one.field}' if one.field else ''}  {values}"
