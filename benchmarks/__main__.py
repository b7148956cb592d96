"""``python -m benchmarks``: list the scenarios and peers, run some, install peers."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.bench import ROOT, load_scenarios
from benchmarks.environments import absence, install
from benchmarks.peer import load_peer, peer_names

__all__ = ["main"]


def show() -> None:
    """Print the scenarios, and the peers with what they read and whether they are installed."""
    console = Console(width=max(140, Console().width))
    table = Table(title="scenarios (--run)", title_justify="left")
    for title in ("name", "what it measures", "needs"):
        table.add_column(title)
    for name, one in sorted(load_scenarios().items()):
        table.add_row(name, one.what, one.needs)
    console.print(table)
    table = Table(title="peers (--peers)", title_justify="left")
    for title in ("name", "what it is", "tasks", "format", "schemes", "here"):
        table.add_column(title)
    for name in peer_names():
        peer = load_peer(name)
        table.add_row(
            name, peer.what, " ".join(peer.tasks), peer.format, " ".join(peer.schemes), absence(name) or "ready"
        )
    console.print(table)


def _named(names: str | None) -> tuple[str, ...]:
    """Return the peers of a list with commas; none for an empty one. Raises click.BadParameter for an unknown name."""
    chosen = tuple(name for name in (names or "").split(",") if name)
    for name in chosen:
        if name not in peer_names():
            raise click.BadParameter(f"no peer {name!r}; there are {', '.join(peer_names())}")
    return chosen


@click.command()
@click.option("--list", "listed", is_flag=True, help="Show the scenarios and the peers.")
@click.option("--run", "names", multiple=True, metavar="SCENARIO", help="Run it (may be given again).")
@click.option("--peers", metavar="A,B", help="Only these peers, beside the floors; nothing is saved.")
@click.option("--only", multiple=True, metavar="CASE", help="Only this case; nothing is saved.")
@click.option("--repeat", type=int, help="Turns of each peer; medians are reported.")
@click.option("--minutes", type=float, default=math.inf, help="After so long in a scenario, one turn of each peer.")
@click.option("--shards", type=int, help="Shards to read.")
@click.option("--quick", is_flag=True, help="Two small shards, one turn, nothing saved: does it run, not how fast.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write the results.")
@click.option(
    "--flame",
    "flames",
    multiple=True,
    metavar="SCENARIO",
    help="Draw where this library's time goes there, as docs/img/flame-SCENARIO.svg.",
)
@click.option("--install", "installed", metavar="A,B|all", help="Make the environments of these peers first.")
def main(
    listed: bool, names: tuple[str, ...], peers: str | None, only: tuple[str, ...],
    repeat: int | None, minutes: float, shards: int | None, quick: bool, path: Path | None,
    flames: tuple[str, ...], installed: str | None,
) -> None:  # fmt: skip
    """Measure wds_async beside its peers: see benchmarks/README.md."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers and peers end with a run that is cut short
    chosen, failures = _named(peers), 0
    for name in peer_names() if installed == "all" else _named(installed):
        try:
            install(name)
        except (subprocess.CalledProcessError, RuntimeError) as exn:
            click.echo(f"{name}: {exn}", err=True)
            failures += 1
    if listed or not (names or flames or installed):
        show()
    scenarios = load_scenarios()
    for name in (*names, *flames):
        if name not in scenarios:
            raise click.BadParameter(f"no scenario {name!r}; there are {', '.join(sorted(scenarios))}")
    for name in names:
        well = scenarios[name].command(
            quick=quick, repeat=repeat, shards=shards, peers=chosen or None, only=only, path=path, minutes=minutes
        )
        failures += not well
    for name in flames:
        picture = path or ROOT / "docs" / "img" / f"flame-{name}.svg"
        scenarios[name].command(
            quick=quick, repeat=1, shards=shards, peers=("wds_async",), only=only, path=None, flame=picture
        )
        click.echo(f"written: {picture}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
