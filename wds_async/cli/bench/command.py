"""``wds-async bench``: the speed and cost of reading shards here, and the number of workers to use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from wds_async import config, environment
from wds_async.cli import shards
from wds_async.cli.bench import chart
from wds_async.cli.bench.measure import Measurement, Moment, Outcome, measure
from wds_async.observe.screen import bar
from wds_async.shardlists import spec

__all__ = ["Advice", "command", "decided", "figures", "recommend", "table", "watched"]

_DECISIONS_SHOWN = 10
_NEAR = 0.95  # within the noise of such measurements
_WORTH = 1.10
_FULL = 0.9


@click.command("bench")
@click.argument("url", nargs=-1, required=True)
@click.option(
    "--workers", default="0", show_default=True, help="Number of DataLoader workers, or several numbers: 0,1,2,4."
)
@click.option(
    "--pipeline",
    default="raw",
    show_default=True,
    help="bytes: the engine alone; raw: undecoded samples; decode or decode:SPEC (rgb8, pil, torchrgb, …).",
)
@click.option("--seconds", default=10.0, show_default=True, help="Length of each measurement in seconds; 0: one pass.")
@click.option("--batch", default=64, show_default=True, help="Samples that a worker hands over at a time.")
@click.option("--budget", help="Byte budget per process, like WDS_BUDGET (128M).")
@click.option("--against", type=click.Choice(["webdataset"]), help="Also measure this library on the same shards.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw the table as a chart.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, url: tuple[str, ...], **options: Any) -> None:
    """Measure how fast shards can be read: bytes/s, samples/s, CPU seconds per GB, peak memory.

    URL is a path or URL, with braces for several shards, a dataset specification (.yaml, .json) whose shards are read,
    or one package.module:function, whose pipeline is measured as it is.

    Each measurement runs in a process of its own. Bytes are those of the samples' fields as stored. With several worker
    counts, a number of workers and a memory budget are recommended, with the reason. The engine chooses the number of
    connections; its decisions and their reasons are printed below the table.

    Example: wds-async bench 'https://host/train-{000..009}.tar' --workers 1,2,4 --png bench.png

    Example: wds-async bench 'data/train-{00..15}.tar' --against webdataset
    """
    counts = _counts(options["workers"])
    _check(options["pipeline"], counts)
    try:
        budget = environment.parse_bytes(options["budget"]) if options["budget"] else None
    except ValueError as exn:
        raise click.BadParameter(str(exn), param_hint="--budget") from exn
    function = any(spec.is_function(one) for one in url)
    if function and (len(url) > 1 or options["pipeline"] != "raw" or options["against"]):
        raise click.UsageError(
            "module:function is measured alone and as it is: it takes no further URL, --pipeline or --against"
        )
    sources = list(url) if function else shards.expand(url)
    same = {name: options[name] for name in ("pipeline", "batch", "seconds")}
    jobs = [
        Measurement(sources, library, workers=count, budget_bytes=budget, **same)
        for count in counts
        for library in ("wds_async", options["against"])
        if library
    ]
    outcomes = [_watched(job) for job in jobs]
    hint = recommend(outcomes, _watched) if len(counts) > 1 else None
    if options["as_json"]:
        answer: dict[str, Any] = {"rows": [figures(outcome) for outcome in outcomes]}
        click.echo(json.dumps(answer if hint is None else {**answer, "recommendation": asdict(hint)}, indent=2))
    else:
        _print(outcomes, hint)
    if options["png"]:
        chart.bench(outcomes, options["png"])
        click.echo(f"chart: {options['png']}", err=True)


def _check(pipeline: str, counts: list[int]) -> None:
    kind, _, image = pipeline.partition(":")
    if kind not in ("bytes", "raw", "decode"):
        raise click.BadParameter(f"{pipeline!r} is not bytes, raw, decode or decode:SPEC", param_hint="--pipeline")
    if image:
        from wds_async.decoding.images import imagehandler  # noqa: PLC0415 (numpy, which bench of bytes does without)

        try:
            imagehandler(image)
        except ValueError as exn:
            raise click.BadParameter(str(exn), param_hint="--pipeline") from exn
    if kind == "bytes" and any(counts):
        raise click.UsageError("--pipeline bytes measures the engine of one process: it takes --workers 0 only")


def _counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if min(counts) < 0:
        raise click.BadParameter(f"{text!r} is not a number or a list like 0,1,2,4", param_hint="--workers")
    return counts


def _watched(job: Measurement) -> Outcome:
    with watched(job) as watch:
        return measure(job, watch)


@contextmanager
def watched(job: Measurement) -> Iterator[Callable[[Moment], None]]:
    """Show a live view of ``job`` on stderr if that is a terminal; yield the function that takes each moment."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda moment: None
        return
    before: Moment | None = None
    with Live(_view(job, None, None), console=console, transient=True, refresh_per_second=8) as live:

        def watch(moment: Moment) -> None:
            nonlocal before
            live.update(_view(job, moment, before))
            before = moment

        yield watch


def _view(job: Measurement, now: Moment | None, before: Moment | None) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_row("", f"[bold]{job.library}[/] · {job.pipeline} · {shards.counted(job.workers, 'worker')}")
    if now is None:
        grid.add_row("", "starting …")
        return grid
    before = before or Moment(0.0, 0, 0, 0.0, 0)
    rate = (now.bytes - before.bytes) / (now.at_s - before.at_s)
    grid.add_row("now", f"[bold green]{shards.human(rate)}/s[/]")
    grid.add_row("mean", f"{shards.human(now.bytes / now.at_s)}/s · {now.samples / now.at_s:,.0f} samples/s")
    if now.bytes:
        grid.add_row("cost", f"{now.cpu_s / now.bytes * 1e9:.2f} CPU s/GB · {shards.human(now.resident_bytes)}")
    if now.budget_bytes:
        amounts = f" {shards.human(now.window_bytes)} of {shards.human(now.budget_bytes)}"
        grid.add_row("window", bar(now.window_bytes / now.budget_bytes, 24).append(amounts))
    if now.connections:
        grid.add_row("connections", f"{now.connections:.0f}")
    grid.add_row("time", f"{now.at_s:.1f} s" + (f" of {job.seconds:.0f} s" if job.seconds else ""))
    return grid


def _print(outcomes: list[Outcome], hint: Advice | None) -> None:
    console = Console(highlight=False)
    console.print(table(outcomes))
    for outcome in outcomes:
        if outcome.bound_by:
            workers = shards.counted(outcome.job.workers, "worker")
            console.print(f"[dim]{workers}:[/] {outcome.bound_by}", soft_wrap=True)
        for line in decided(outcome):
            console.print(f"[dim]{line}[/]", soft_wrap=True)
    if hint is not None:
        console.print(f"[bold green]Recommended:[/] {hint.text}", soft_wrap=True)


def decided(outcome: Outcome) -> list[str]:
    """Return the engine's decisions on its connections, a line each; of many only the first and the last."""
    lines = [f"  {at_s:6.2f} s  {text}" for at_s, text in outcome.decisions]
    if len(lines) > _DECISIONS_SHOWN:
        half = _DECISIONS_SHOWN // 2
        lines[half:-half] = [f"      …     {len(lines) - 2 * half} more (--json has them)"]
    return lines


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the measured figures of one outcome, in units that their names tell, for JSON."""
    return {
        **{name: getattr(outcome.job, name) for name in ("library", "pipeline", "workers")},
        "bytes": outcome.bytes,
        "samples": outcome.samples,
        "wall_s": round(outcome.wall_s, 3),
        "first_s": round(outcome.first_s, 4),
        "bytes_per_s": round(outcome.rate),
        "samples_per_s": round(outcome.samples_rate, 1),
        "cpu_s_per_gb": round(outcome.cpu_s_per_gb, 3),
        "peak_bytes": outcome.peak_bytes,
        "peak_bytes_above_import": outcome.peak_bytes - outcome.base_bytes,
        "bound_by": outcome.bound_by,
        "connections": outcome.connections,
        "decisions": [{"at_s": at_s, "text": text} for at_s, text in outcome.decisions],
        "stats": outcome.stats,
    }


def table(outcomes: list[Outcome]) -> Table:
    """Return the summary; where webdataset was measured beside ours, a row of ratios follows each pair."""
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    drawn.add_column("reader")
    for name in ("workers", "MB/s", "samples/s", "CPU s/GB", "peak memory", "first sample", "conns"):
        drawn.add_column(name, justify="right")
    ours: Outcome | None = None
    for outcome in outcomes:
        drawn.add_row(
            outcome.job.library,
            str(outcome.job.workers),
            f"{outcome.rate / 1e6:,.1f}",
            f"{outcome.samples_rate:,.0f}" if outcome.samples else "–",
            f"{outcome.cpu_s_per_gb:.2f}",
            shards.human(outcome.peak_bytes),
            f"{outcome.first_s * 1e3:,.0f} ms",
            str(outcome.connections or "–"),
        )
        if outcome.job.library == "wds_async":
            ours = outcome
        elif ours is not None:
            more = [(getattr(ours, name), getattr(outcome, name)) for name in ("rate", "samples_rate")]
            less = [(getattr(outcome, name), getattr(ours, name)) for name in ("cpu_s_per_gb", "peak_bytes", "first_s")]
            ratios = [f"{high / low:.1f} ×" if low else "–" for high, low in (*more, *less)]
            drawn.add_row("  better by", "", *ratios, style="green")
    return drawn


@dataclass(frozen=True)
class Advice:
    """Recommended ``workers`` and ``budget_bytes`` a process, and the reason."""

    workers: int
    budget_bytes: int
    text: str


def recommend(outcomes: list[Outcome], measure: Callable[[Measurement], Outcome]) -> Advice:
    """Recommend the fewest workers that come within 5 % of the fastest, and their memory budget.

    If their window was full, twice the budget is measured too, and recommended if it gives 10 % more. If they held
    less than half of it, the next power of two above what they held is recommended.
    """
    ours = [outcome for outcome in outcomes if outcome.job.library == "wds_async"]
    fastest = max(ours, key=lambda outcome: outcome.rate)
    good = [outcome for outcome in ours if outcome.rate >= _NEAR * fastest.rate]
    chosen = min(good, key=lambda outcome: outcome.job.workers)
    workers = shards.counted(chosen.job.workers, "worker")
    why = "the fastest of those tried"
    if chosen is not fastest:
        best = f"{shards.human(fastest.rate)}/s of {shards.counted(fastest.job.workers, 'worker')}"
        why = f"within 5 % of the {best}, for less memory"
    elif chosen.job.workers == max(outcome.job.workers for outcome in ours):
        why = "the most that was tried: more may be faster still"
    budget, reason = _budget(chosen, measure)
    text = f"{workers}, WDS_BUDGET={budget // environment.MIB}M. {workers} read {shards.human(chosen.rate)}/s, {why}."
    return Advice(chosen.job.workers, budget, f"{text} {reason}")


def _budget(chosen: Outcome, measure: Callable[[Measurement], Outcome]) -> tuple[int, str]:
    processes = max(1, chosen.job.workers)
    budget = int(chosen.stats.get("budget_bytes", 0)) // processes or config.DEFAULT_BUDGET_BYTES
    peak = int(chosen.stats.get("window_peak_bytes", 0)) // processes
    held = f"the window held at most {shards.human(peak)} of {shards.human(budget)} a process"
    if peak < budget // 2:
        enough = max(config.MIN_BUDGET_BYTES, 1 << max(peak - 1, 1).bit_length())
        return min(enough, budget), f"The budget is ample: {held}."
    if peak < _FULL * budget:
        return budget, f"The budget fits: {held}."
    more = measure(replace(chosen.job, budget_bytes=2 * budget))
    change = f"{shards.human(more.rate)}/s with twice the budget against {shards.human(chosen.rate)}/s"
    if more.rate >= _WORTH * chosen.rate:
        return 2 * budget, f"The window was full, and more memory helps: {change}."
    return budget, f"The window was full, but more memory does not help: {change}."
