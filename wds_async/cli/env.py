"""``wds-async env``: every environment variable that is read, its value, where that came from, what it does."""

from __future__ import annotations

import json
from typing import Any

import click

from wds_async import config, environment
from wds_async.redact import redact

__all__ = ["command", "rows"]


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(as_json: bool) -> None:
    """Show every environment variable that is read: value, origin, meaning.

    Unknown WDS_* names are warned about, with the nearest known name. A value that does not parse ends with
    status 2, after the table.

    Example: WDS_BUDGET=64M wds-async env
    """
    table = rows()
    strangers = environment.unknown_variables()
    if as_json:
        unknown = [{"name": name, "nearest": nearest} for name, nearest in strangers]
        click.echo(json.dumps({"variables": table, "unknown": unknown}, indent=2))
    else:
        _draw(table)
    for name, nearest in strangers:
        hint = f" (did you mean {nearest}?)" if nearest else ""
        text = f"warning: {name} is set but no setting has this name{hint}; only ${{{name[4:]}}} in a URL would read it"
        click.echo(click.style(text, fg="yellow"), err=True)
    bad = [row for row in table if row["error"]]
    for row in bad:
        click.echo(click.style(f"{row['name']} does not parse: {row['error']}", fg="red"), err=True)
    if bad:
        click.get_current_context().exit(2)


def rows() -> list[dict[str, Any]]:
    """One row a variable of `environment.VARIABLES`: name, value (secrets redacted), origin, meaning, error."""
    table = []
    for known in environment.VARIABLES:
        text = environment.variable(known.name)
        error = None
        if text:
            try:
                known.parse(text)
            except ValueError as exn:
                error = str(exn)
        table.append(
            {
                "name": known.name,
                "value": _safe(known, text) if text else _plain(known),
                "origin": "environment" if text else "default",
                "meaning": known.meaning,
                "error": error,
            }
        )
    return table


def _plain(known: environment.Variable) -> str:
    if known.name == "WDS_BUDGET":  # its default depends on the machine
        return str(config.default_budget_bytes())
    if known.default is None:
        return ""
    if isinstance(known.default, bool):
        return "1" if known.default else "0"
    return str(known.default)


def _safe(known: environment.Variable, text: str) -> str:
    """``text`` without what must not be seen: tokens, passwords, credentials inside URLs."""
    return "***" if known.secret else redact(text)


def _draw(table: list[dict[str, Any]]) -> None:
    width = max(len(row["name"]) for row in table)
    for row in table:
        given = row["origin"] == "environment"
        value = click.style(row["value"] or "(none)", fg="green" if given else None, dim=not given)
        click.echo(f"{click.style(row['name'].ljust(width), bold=given)}  {value}  [{row['origin']}]")
        click.echo(click.style(f"{'':{width}}  {row['meaning']}", dim=True))
