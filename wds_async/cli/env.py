"""``wds-async env``: every environment variable with its value, origin and meaning."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import json
from typing import Any

import click

from wds_async import config, environment
from wds_async.redact import redact

__all__ = ["command", "markdown"]


@click.command("env")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--changed", is_flag=True, help="Show only variables that are set.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", "as_markdown", is_flag=True, hidden=True, help="The tables of docs/environment.md.")
def command(names: tuple[str, ...], changed: bool, as_json: bool, as_markdown: bool) -> None:
    """Show the environment variables that wds_async reads: value, origin, meaning.

    With NAMEs (whole names, or patterns such as 'AIS_*'), only those. For an unknown WDS_* name there is a warning that
    suggests the nearest known one. If a value cannot be parsed, the exit status is 2, after the table.

    Example: WDS_BUDGET=64M wds-async env --changed 'WDS_*'
    """
    if as_markdown:
        click.echo(markdown())
        return
    table = [_row(record) for record in environment.VARIABLES]
    for name in names:
        if not any(fnmatch.fnmatchcase(row["name"], name.upper()) for row in table):
            near = difflib.get_close_matches(name.upper(), [row["name"] for row in table], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"no variable is called {name}{hint}")
    if names:
        table = [row for row in table if any(fnmatch.fnmatchcase(row["name"], name.upper()) for name in names)]
    if changed:
        table = [row for row in table if row["origin"] == "environment"]
    unknown = environment.unknown_variables()
    if as_json:
        report = {"variables": table, "unknown": [{"name": name, "nearest": nearest} for name, nearest in unknown]}
        click.echo(json.dumps(report, indent=2))
    else:
        _draw(table)
    for name, nearest in unknown:
        hint = f" (did you mean {nearest}?)" if nearest else ""
        text = f"warning: {name} is set but no setting has this name{hint}; only ${{{name[4:]}}} in a URL would read it"
        click.echo(click.style(text, fg="yellow"), err=True)
    bad = [row for row in table if row["error"]]
    for row in bad:
        click.echo(click.style(f"{row['name']} does not parse: {row['error']}", fg="red"), err=True)
    if bad:
        click.get_current_context().exit(2)


def _row(record: environment.Variable) -> dict[str, Any]:
    """Return group, name, type, value (secrets redacted), origin, meaning and error."""
    text = environment.variable(record.name)
    error = None
    if text:
        value = "***" if record.type is environment.SECRET else redact(text)
        try:
            record.type.parse(text)
        except ValueError as exn:
            error = str(exn)
    elif record.name == "WDS_BUDGET":  # its default depends on the machine
        value = environment.shown_bytes(config.default_budget_bytes())
    else:
        value = record.shown_default
    return {
        "group": record.group,
        "name": record.name,
        "type": record.type.name,
        "value": value,
        "origin": "environment" if text else "default",
        "meaning": record.meaning,
        "error": error,
    }


def markdown() -> str:
    """Return all variables as Markdown, a table a group, for docs/environment.md."""
    lines: list[str] = []
    for group, records in itertools.groupby(environment.VARIABLES, lambda record: record.group):
        lines += [f"## {group}", "", "| variable | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{each.name}` | {each.type.name} | {each.shown_default} | {each.meaning} |" for each in records]
        lines.append("")
    return "\n".join(lines[:-1])


def _draw(table: list[dict[str, Any]]) -> None:
    width = max((len(row["name"]) for row in table), default=0)
    for group, members in itertools.groupby(table, lambda row: row["group"]):
        click.echo(click.style(f"{group}:", bold=True, underline=True))
        for row in members:
            is_set = row["origin"] == "environment"
            value = click.style(row["value"] or "(none)", fg="green" if is_set else None, dim=not is_set)
            click.echo(f"{click.style(row['name'].ljust(width), bold=is_set)}  {value}  [{row['origin']}]")
            click.echo(click.style(f"{'':{width}}  {row['meaning']}", dim=True))
