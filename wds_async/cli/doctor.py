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
from wds_async.observe.screen import bar
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
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True)
@click.option(
    "--seconds", default=10.0, show_default=True, type=click.FloatRange(0.1), help="Length of the measurement."
)
@click.option("--workers", default=0, show_default=True, type=click.IntRange(0), help="DataLoader workers.")
@click.option("--decode", help="Decode images as rgb8, pil, torchrgb, …. Default: fields stay bytes.")
@click.option(
    "--batch", default=64, show_default=True, type=click.IntRange(1), help="Samples that a worker hands over at a time."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, specs: tuple[str, ...], seconds: float, as_json: bool, **how: Any) -> None:
    """Find the bottleneck of a pipeline (network, store, CPU, hand-over, consumer, …) and one setting to change next.

    SPEC is shards (paths, URLs, braces, a specification in YAML or JSON) or one package.module:function, which returns
    a pipeline: it is read for some seconds, and the samples are discarded. SPEC may also be the address of a running
    job (WDS_METRICS_PORT) or service, http://host:port or unix:/path: then only its counters are read, twice.

    In a program, print(loader.doctor()) does the same for what has been read so far.

    Example: wds-async doctor 'https://host/train-{000..009}.tar' --decode rgb8 --workers 4

    Example: wds-async doctor http://localhost:9090
    """
    if doctor.is_running(specs[0]):
        if len(specs) > 1:
            raise click.UsageError("one running job or service at a time")
        examination = doctor.examine_running(specs[0], seconds)
    else:
        examination = doctor.examine(pipeline_of(specs, **how), seconds)
    if as_json:
        click.echo(json.dumps(figures(examination), indent=2))
    else:
        _print(examination)


def pipeline_of(specs: tuple[str, ...], *, workers: int, decode: str | None, batch: int) -> Any:
    """Return the pipeline to examine."""
    import wds_async  # noqa: PLC0415 (what a user would write)

    if any(spec.is_function(one) for one in specs):
        if len(specs) > 1:
            raise click.UsageError("module:function is examined alone: it takes no further SPEC")
        dataset: Any = wds_async.FluidWrapper(shards.made(specs[0]))
    else:
        dataset = wds_async.WebDataset(shards.expand(specs), shardshuffle=False, empty_check=False)
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
    console.print(f"Next: [bold green]{escape(terminal.line(examination.diagnosis.knob))}[/]\n", soft_wrap=True)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    read = f"{shards.human(examination.bytes_per_s)}/s"
    if examination.figures.samples:
        read += f", {examination.samples_per_s:,.0f} samples/s"
    grid.add_row("read", f"{read} over {examination.seconds:.1f} s")
    for name, share in sorted(examination.diagnosis.shares.items(), key=lambda one: -one[1]):
        if share >= 0.005:
            grid.add_row(_WORDS.get(name, name), bar(max(share, 1 / _BAR), _BAR).append(f" {share:.0%}"))
    counts = examination.figures
    if counts.requests:
        failed = f"{counts.retries:,.0f} failed, {counts.throttled:,.0f} throttled"
        grid.add_row("requests", f"{counts.requests:,.0f}, {failed}")
        if counts.head_s:
            ms = 1e3 / max(1.0, counts.requests - counts.retries)
            grid.add_row("each", f"{ms * counts.head_s:,.0f} ms to its head, {ms * counts.body_s:,.0f} ms more")
        if counts.connections_limit:
            grid.add_row("connections", f"{counts.connections_limit:,.0f}")
    console.print(grid)
