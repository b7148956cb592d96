"""``wds-async doctor``: the bottleneck of a pipeline in one sentence, and the one knob to turn next."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wds_async.cli import shards, terminal
from wds_async.observe import doctor
from wds_async.observe.doctor import Examination
from wds_async.shardlists import spec

__all__ = ["command", "figures", "pipeline_of"]

_WORDS = {
    "waiting": "waiting for bytes",
    "working": "parsing, decoding, functions",
    "idle": "neither",
    "from_disk": "bytes from the disk",
}
_BAR = 24


@click.command("doctor")
@click.argument("given", metavar="SPEC...", nargs=-1, required=True)
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(0.1), help="How long to look.")
@click.option("--workers", default=0, show_default=True, type=click.IntRange(0), help="DataLoader workers.")
@click.option("--decode", help="Decode images so: rgb8, pil, torchrgb, …; without it fields stay bytes.")
@click.option(
    "--batch", default=64, show_default=True, type=click.IntRange(1), help="Samples that a worker hands over."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, given: tuple[str, ...], seconds: float, as_json: bool, **how: Any) -> None:
    """Find the bottleneck of a pipeline (network, store, CPU, hand-over, consumer, …) and the knob to turn next.

    SPEC is shards (paths, URLs, braces, a specification in YAML or JSON) or one package.module:function: its
    pipeline is read for some seconds, and nothing is done with the samples. Or it is the address of a running job
    (WDS_METRICS_PORT) or service: http://host:port or unix:/path. Then its counters are read twice, and it is left
    alone.

    In a program, print(loader.doctor()) says it of what was read so far.

    Example: wds-async doctor 'https://host/train-{000..009}.tar' --decode rgb8 --workers 4

    Example: wds-async doctor http://localhost:9090
    """
    if doctor.is_running(given[0]):
        if len(given) > 1:
            raise click.UsageError("one running job or service at a time")
        examination = doctor.examine_running(given[0], seconds)
    else:
        examination = doctor.examine(pipeline_of(given, **how), seconds)
    if as_json:
        click.echo(json.dumps(figures(examination), indent=2))
    else:
        _print(examination)


def pipeline_of(given: tuple[str, ...], *, workers: int, decode: str | None, batch: int) -> Any:
    """Return the pipeline to examine."""
    import wds_async  # noqa: PLC0415 (what a user would write)

    if any(spec.is_function(one) for one in given):
        if len(given) > 1:
            raise click.UsageError("module:function is examined alone: it takes no further SPEC")
        dataset: Any = wds_async.FluidWrapper(shards.made(given[0]))
    else:
        dataset = wds_async.WebDataset(shards.expand(given), shardshuffle=False, empty_check=False)
    if decode is not None:
        dataset = dataset.decode(decode)
    if not workers:
        return dataset
    batches = dataset.batched(batch, collation_fn=None)
    # As torch's own way would make tensors of them, and warn of it; the samples are what is measured.
    return wds_async.WebLoader(
        batches, batch_size=None, collate_fn=_as_it_is, num_workers=workers, persistent_workers=True
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def figures(examination: Examination) -> dict[str, Any]:
    """Return the diagnosis and the figures behind it, for JSON."""
    return {
        **examination.diagnosis.as_dict(),
        "seconds": round(examination.seconds, 3),
        "bytes_per_s": round(examination.bytes_per_s),
        "samples_per_s": round(examination.samples_per_s, 1),
        "figures": asdict(examination.figures),
    }


def _print(examination: Examination) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(terminal.line(examination.diagnosis.sentence))}[/]", soft_wrap=True)
    console.print(f"Next: [bold green]{escape(terminal.line(examination.diagnosis.knob))}[/]", soft_wrap=True)
    console.print(_table(examination))


def _table(examination: Examination) -> Table:
    drawn = Table.grid(padding=(0, 2))
    drawn.add_column(style="dim", justify="right")
    drawn.add_column()
    read = f"{shards.human(examination.bytes_per_s)}/s"
    if examination.figures.samples:
        read += f", {examination.samples_per_s:,.0f} samples/s"
    drawn.add_row("", "")
    drawn.add_row("read", f"{read} over {examination.seconds:.1f} s")
    for name, share in sorted(examination.diagnosis.shares.items(), key=lambda one: -one[1]):
        if share >= 0.005:
            bar = "━" * max(1, round(_BAR * share))
            drawn.add_row(_WORDS.get(name, name), f"[green]{bar}[/][dim]{'─' * (_BAR - len(bar))}[/] {share:.0%}")
    for name, text in _requests(examination):
        drawn.add_row(name, text)
    return drawn


def _requests(examination: Examination) -> list[tuple[str, str]]:
    """Return the rows about requests, where there were any."""
    figured = examination.figures
    if not figured.requests:
        return []
    rows = [("requests", f"{figured.requests:,.0f}, {figured.retries:,.0f} failed, {figured.throttled:,.0f} throttled")]
    good = max(1.0, figured.requests - figured.retries)
    if figured.head_s:
        rows.append(
            ("each", f"{1e3 * figured.head_s / good:,.0f} ms to its head, {1e3 * figured.body_s / good:,.0f} ms more")
        )
    if figured.connections_limit:
        rows.append(("connections", f"{figured.connections_limit:,.0f}"))
    return rows
