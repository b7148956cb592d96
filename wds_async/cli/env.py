"""``wds-async env``: every environment variable that is read, its value, where that came from, what it does."""

from __future__ import annotations

import difflib
import fnmatch
import json
from typing import Any

import click

from wds_async import config, environment
from wds_async.redact import redact

__all__ = ["command", "rows"]


@click.command("env")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--changed", is_flag=True, help="Only variables that are set.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(names: tuple[str, ...], changed: bool, as_json: bool) -> None:
    """Show the environment variables that are read: value, origin, meaning.

    With NAMEs (whole, or patterns such as 'AIS_*') only those. Unknown WDS_* names are warned about, with the nearest
    known name. A value that does not parse ends with status 2, after the table.

    Example: WDS_BUDGET=64M wds-async env --changed 'WDS_*'
    """
    table = rows()
    for name in names:
        if not any(fnmatch.fnmatchcase(row["name"], name.upper()) for row in table):
            near = difflib.get_close_matches(name.upper(), [row["name"] for row in table], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"no variable is called {name}{hint}")
    if names:
        table = [row for row in table if any(fnmatch.fnmatchcase(row["name"], name.upper()) for name in names)]
    if changed:
        table = [row for row in table if row["origin"] == "environment"]
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
    """One row a variable of `environment.VARIABLES`: its group, name, value (secrets redacted), origin, meaning and
    error."""
    table, group = [], ""
    for known in environment.VARIABLES:
        group = environment.GROUPS.get(known.name, group)
        text = environment.variable(known.name)
        error = None
        if text:
            try:
                known.parse(text)
            except ValueError as exn:
                error = str(exn)
        table.append(
            {
                "group": group,
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
        return environment.shown_bytes(config.default_budget_bytes())
    if known.default is None:
        return ""
    if isinstance(known.default, bool):
        return "1" if known.default else "0"
    return environment.shown_bytes(known.default) if known.parse is environment.parse_bytes else str(known.default)


def _safe(known: environment.Variable, text: str) -> str:
    """``text`` without what must not be seen: tokens, passwords, credentials inside URLs."""
    return "***" if known.secret else redact(text)


def _draw(table: list[dict[str, Any]]) -> None:
    width = max((len(row["name"]) for row in table), default=0)
    group = ""
    for row in table:
        if row["group"] != group:
            group = row["group"]
            click.echo(click.style(f"{group}:", bold=True, underline=True))
        given = row["origin"] == "environment"
        value = click.style(row["value"] or "(none)", fg="green" if given else None, dim=not given)
        click.echo(f"{click.style(row['name'].ljust(width), bold=given)}  {value}  [{row['origin']}]")
        click.echo(click.style(f"{'':{width}}  {row['meaning']}", dim=True))
