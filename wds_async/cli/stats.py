"""``wds-async stats``: what is in shards, in numbers and as a picture."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from wds_async.cli import running, shards, terminal
from wds_async.dataset import WebDataset
from wds_async.storage.sink import publish
from wds_async.tools.statistics import (
    FieldStatistics,
    ShardStatistics,
    StatsWork,
    contact_sheet,
    stats_job,
)

__all__ = ["command"]

_SHOWN = 8


@click.command("stats")
@click.argument("urls", nargs=-1, required=True, metavar="SHARDS...")
@click.option("-n", "limit", type=click.IntRange(1), help="Stop after so many samples.")
@click.option("--decode", is_flag=True, help="Decode every image to its end, not only its header.")
@click.option("--duplicates", metavar="FIELD", help="Find samples whose FIELD has the same bytes (100 bytes a sample).")
@click.option("--contact-sheet", "sheet", metavar="PNG", help="Draw a random choice of images.")
@click.option("--pictures", type=click.IntRange(1, 400), default=40, show_default=True, help="Images on the sheet.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of that choice.")
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
@click.option("--records", metavar="FOLDER/", help="Keep the records of tasks here, in any store; another run goes on.")
@click.option("--overwrite", is_flag=True, help="Drop the records of other shards or options, and begin again.")
@running.engine_options
def command(
    *,
    urls: tuple[str, ...],
    limit: int | None,
    decode: bool,
    duplicates: str | None,
    sheet: str | None,
    pictures: int,
    seed: int,
    as_json: bool,
    records: str | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Read SHARDS and report what is in them: fields with their sizes, classes, the names in documents, images with
    their formats and dimensions.

    One process reads them all, unless --workers, --engine or --records is given: then each shard is a task, and the
    report is the same. The records of tasks are in a temporary folder, or with --records in FOLDER/_wds/stats, which
    engines other than local need: all machines write there.

    The status is 1 if images cannot be read.

    Example: wds-async stats 'train-{000..009}.tar' --decode --duplicates jpg --contact-sheet train.png

    Example: wds-async stats 's3://in/*.tar' --decode --engine ray --records s3://out/
    """
    work = StatsWork(decode, duplicates, pictures if sheet else 0, seed)
    if options["engine"] == "local" and options["workers"] is options["cpus"] is records is None:
        found = ShardStatistics(**asdict(work))
        names = shards.expand(urls)
        dataset = WebDataset(names, shardshuffle=False, empty_check=False, nodesplitter=None, workersplitter=None)
        found.read(dataset if limit is None else dataset.slice(limit))
    elif limit is not None:
        raise click.UsageError("-n stops one process: it takes no --workers, --engine or --records")
    elif options["engine"] != "local" and records is None:
        raise click.UsageError(f"--engine {options['engine']} needs --records FOLDER/, where all machines can write")
    else:
        found, names = _run(urls, work, records, overwrite=overwrite, **options)
    if sheet is not None:
        publish(sheet, _sheet(found, names))
    if as_json:
        click.echo(json.dumps(_values(found)))
    else:
        _print(found)
        if sheet is not None:
            terminal.say(sheet)
    click.get_current_context().exit(1 if _bad(found) else 0)


def _run(
    urls: tuple[str, ...], work: StatsWork, records: str | None, **options: Any
) -> tuple[ShardStatistics, list[str]]:
    """Return what tasks count, and the names of the shards. Ranks but the first end here: that one reports."""
    display = running.ProgressDisplay("stats")
    with contextlib.ExitStack() as stack:
        folder = records or stack.enter_context(tempfile.TemporaryDirectory(prefix="wds-stats-"))
        job = stats_job(list(urls), folder, work, on_progress=display, **options)
        with display:
            job.run()
        if not job.leads:
            click.get_current_context().exit()
        return job.result(), [task.inputs[0].url for task in job.tasks]


def _bad(found: ShardStatistics) -> int:
    return sum(one.images.bad for one in found.fields.values() if one.images is not None)


def _sheet(found: ShardStatistics, names: list[str]) -> bytes:
    sizes: Counter[tuple[int, int]] = Counter()
    for one in found.fields.values():
        sizes.update(one.images.sizes if one.images is not None else {})
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    shown = len(found.pictures.items)
    title = f"{names[0].rpartition('/')[2]}{more}: {shown} of {shards.counted(found.samples, 'sample')}"
    return contact_sheet(found.pictures, sizes, title)


def _print(found: ShardStatistics) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    table = Table(title_justify="left")
    for name in ("field", "samples", "bytes", "smallest", "median", "99 %", "largest", "largest is"):
        table.add_column(name, justify="left" if name in ("field", "largest is") else "right")
    for one in sorted(found.fields.values(), key=lambda one: one.name):
        sizes = (one.size_bytes, one.least, one.quantile(0.5), one.quantile(0.99), one.most)
        share = "" if one.count == found.samples else f" ({one.count / found.samples:.1%})"
        cells = (one.name, f"{one.count:,}{share}", *map(shards.human, sizes), one.largest)
        table.add_row(*map(terminal.line, cells))
    if found.fields:
        console.print(table, markup=False)
    for one in found.fields.values():
        for line in _details(one):
            terminal.say(line)
    if found.duplicates:
        terminal.say(f"{shards.counted(found.duplicates, 'duplicate')}:")
        for key, place, other in found.repeated:
            terminal.say(f"  {key} ({place}) is {other}")
    if len(found.kinds) > 1:
        kinds = "; ".join(f"{count:,} have {', '.join(kind) or 'none'}" for kind, count in found.kinds.most_common(5))
        terminal.say(f"samples with different fields: {kinds}")
    read = f"{shards.counted(len(found.shards), 'shard')}, {shards.counted(found.samples, 'sample')}"
    terminal.say(f"{read}, {shards.human(found.bytes)} in fields")


def _details(one: FieldStatistics) -> Iterator[str]:
    """Yield lines on the values or images of a field."""
    if one.found:
        kind = "classes" if one.extension not in ("json", "jsn") else "names"
        few = ", ".join(f"{value} {count:,}" for value, count in one.found.most_common(_SHOWN))
        more = f", and {len(one.found) - _SHOWN:,} more" if len(one.found) > _SHOWN else ""
        yield f"{one.name}: {len(one.found):,} {kind}: {few}{more}"
    if (images := one.images) is not None:
        few = ", ".join(f"{kind} {count:,}" for kind, count in images.formats.most_common(_SHOWN))
        least, most = ("×".join(map(str, size)) for size in (images.least, images.most))
        yield f"{one.name}: {few}; {len(images.sizes):,} sizes from {least} to {most}"
        if images.bad:
            yield f"{one.name}: {shards.counted(images.bad, 'unreadable image')}:"
            yield from (f"  {key} ({place}): {reason}" for key, place, reason in images.unreadable)


def _values(found: ShardStatistics) -> dict[str, Any]:
    """Return the statistics for JSON."""
    fields = {}
    for name, one in sorted(found.fields.items()):
        row: dict[str, Any] = {"samples": one.count, "bytes": one.size_bytes, "least": one.least, "most": one.most}
        row |= {"median": one.quantile(0.5), "p99": one.quantile(0.99), "largest": one.largest}
        if one.found:
            row["values"] = dict(one.found.most_common())
        if one.images is not None:
            sizes = {f"{wide}x{high}": count for (wide, high), count in one.images.sizes.most_common(1000)}
            bad = [dict(zip(("key", "place", "reason"), each, strict=True)) for each in one.images.unreadable]
            row |= {"formats": dict(one.images.formats), "sizes": sizes, "unreadable": one.images.bad, "first": bad}
        fields[name] = row
    repeated = [dict(zip(("key", "place", "same_as"), each, strict=True)) for each in found.repeated]
    return {
        "shards": len(found.shards), "samples": found.samples, "bytes": found.bytes, "fields": fields,
        "duplicates": found.duplicates, "first_duplicates": repeated,
    }  # fmt: skip
