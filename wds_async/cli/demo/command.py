"""``wds-async demo``: from nothing to a trained model, its data streamed over HTTP."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from wds_async import config
from wds_async.cli import shards
from wds_async.cli.bench import chart
from wds_async.cli.bench import command as bench
from wds_async.cli.bench.measure import Measurement, Outcome, measure
from wds_async.cli.demo.data import DemoPlan, DemoShards, prepare
from wds_async.cli.demo.server import serving
from wds_async.cli.demo.train import State, train

__all__ = ["command"]

_ACCURACY = 0.95
_MIB = 1 << 20


@click.command("demo")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the shards. Default: below the temporary folder.",
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), default="demo.png", show_default=True)
@click.option("--epochs", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="DataLoader workers.")
@click.option("--seconds", default=6.0, show_default=True, help="Seconds for each side of the comparison.")
@click.option("--quick", is_flag=True, help="Use tiny data and one epoch, only to see that it runs.")
def command(*, folder: Path | None, png: Path, epochs: int, workers: int, seconds: float, quick: bool) -> None:
    """Make images, serve them as an object store would, train on the stream, and compare with webdataset.

    The exit status is 1 if the test accuracy is not above 95 %. Later runs use the shards of the first one.

    Example: wds-async demo --png demo.png
    """
    started = time.monotonic()
    console = Console(stderr=True)
    plan = _plan(quick)
    data = _make(folder or Path(tempfile.gettempdir()) / f"wds-async-demo{'-quick' if quick else ''}", plan, console)
    with serving(data.folder) as base:
        console.print(f"[bold]2 · Serve[/]  {base}, 50 ms to the first byte, ranges and ETags")
        urls = [f"{base}/{name}" for name in data.train]
        tests = [f"{base}/{name}" for name in data.test]
        course, stats = _train((urls, tests), 1 if quick else epochs, workers, data, console)
        outcomes = _compare(urls, 0.4 if quick else seconds, console)
    chart.demo(course, outcomes, png)
    accuracy = course.tests[-1][1]
    good = accuracy > (0.5 if quick else _ACCURACY)
    console.print(f"[bold]5 · Chart[/]  {png}")
    console.print(f"[dim]{stats.bound_by()}[/]", highlight=False, soft_wrap=True)
    click.echo(f"test accuracy {accuracy:.1%}, {time.monotonic() - started:.0f} s in all")
    if not good:
        click.echo(click.style(f"the accuracy is not above {_ACCURACY:.0%}", fg="red"), err=True)
        click.get_current_context().exit(1)


def _plan(quick: bool) -> DemoPlan:
    if quick:
        return DemoPlan(train_bytes=6 * _MIB, shard_bytes=_MIB, test_images=200, pixels=64)
    budget = config.transfer_config().budget_bytes
    return DemoPlan(train_bytes=3 * max(budget, 128 * _MIB), shard_bytes=32 * _MIB, test_images=1000)


def _make(folder: Path, plan: DemoPlan, console: Console) -> DemoShards:
    with _progress(console) as bar:
        task = bar.add_task("[bold]1 · Images[/]", total=plan.train_bytes, info="")

        def show(written: int) -> None:
            bar.update(task, completed=written, info=shards.human(written))

        data = prepare(folder, plan, show)
    console.print(
        f"[bold]1 · Images[/]  {data.train_images:,} for training, {data.test_images:,} for the test, of other "
        f"digits: {shards.human(data.bytes)} in {len(data.train) + len(data.test)} shards, {data.folder}",
        highlight=False,
        soft_wrap=True,
    )
    return data


def _train(
    urls: tuple[list[str], list[str]], epochs: int, workers: int, data: DemoShards, console: Console
) -> tuple[chart.Course, Any]:
    began = time.monotonic()
    with _progress(console) as bar:
        task = bar.add_task("[bold]3 · Train[/]", total=epochs * data.train_images, info="starting workers …")

        def show(state: State) -> None:
            info = (
                f"epoch {state.epoch}  {state.samples_per_s:,.0f} samples/s  "
                f"[green]{state.bytes_per_s / 1e6:,.0f} MB/s[/]  loss {state.loss:.3f}"
            )
            bar.update(task, completed=state.samples, info=info)

        weight = data.bytes / (data.train_images + data.test_images)
        course, stats = train(*urls, epochs=epochs, workers=workers, sample_bytes=weight, show=show)
    seen, accuracy = course.tests[-1]
    console.print(
        f"[bold]3 · Train[/]  {seen:,} images in {time.monotonic() - began:.0f} s with {workers} workers, "
        f"test accuracy [bold green]{accuracy:.1%}[/]",
        highlight=False,
    )
    return course, stats


def _compare(urls: list[str], seconds: float, console: Console) -> list[Outcome]:
    outcomes = []
    for library in ("wds_async", "webdataset"):
        job = Measurement(urls, library=library, seconds=seconds)
        with bench.watched(job) as watch:
            outcomes.append(measure(job, watch))
    console.print(f"[bold]4 · Compare[/]  undecoded samples of the same shards, {seconds:g} s each:", highlight=False)
    console.print(bench.table(outcomes))
    return outcomes


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[info]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
