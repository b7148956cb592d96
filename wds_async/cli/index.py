"""``wds-async index``: read the headers of shards once, and write down how many samples each holds, and where."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from wds_async.cli import shards, terminal
from wds_async.cli.running import ENGINES, ProgressDisplay, run_job
from wds_async.distributed.indexing import index as distributed_index
from wds_async.errors import ConfigError, ShardFormatError, WdsError
from wds_async.indexed import index, places
from wds_async.indexed.scan import ScannedShard, scan_shards, up_to_date
from wds_async.indexed.shardindex import ShardFacts, ShardIndex
from wds_async.redact import redact
from wds_async.storage.sink import publish, publish_text
from wds_async.tar.blocks import padded
from wds_async.tar.index import read_dali, shard_list
from wds_async.urls import local_path

__all__ = ["command", "progress_bar"]


@click.command("index")
@click.argument("url", nargs=-1, required=True, metavar="SHARDS...")
@click.option(
    "--kind", "kinds", type=click.Choice(["json", *places.KINDS]), multiple=True, default=["json"], show_default=True,
    help="json: one list of all shards. The others: a file for each shard, for DALI, Energon or IndexedDataset. With "
    "--engine, several may be made at once.",
)  # fmt: skip
@click.option(
    "-o", "--output", default="-",
    help="json: the file or URL to write (default: standard output). Other kinds: the folder for the files (default: "
    "each beside its shard).",
)  # fmt: skip
@click.option("--name", help="A name for the dataset (json).")
@click.option("--base", help="URL of the folder where SHARDS given as relative paths will be (json).")
@click.option("--again", is_flag=True, help="Read all shards, also those whose index is up to date.")
@click.option("--verbose", is_flag=True, help="Show every error, and not only the first of equal ones.")
@click.option("--dry-run", is_flag=True, help="Show how many shards would be read, and write nothing.")
@click.option(
    "--engine", type=click.Choice(ENGINES),
    help="Divide the shards into tasks for processes or machines: a job with records that is resumed anywhere.",
)  # fmt: skip
@click.option("--job", default="index", show_default=True, help="With --engine: name of the job, so of its folder.")
@click.option("--cpus", type=float, help="With --engine: CPUs of one task.  [default: 1]")
@click.option("--workers", type=int, help="With --engine local or rank: processes.")
@click.option("-y", "--yes", is_flag=True, help="With --engine: do not ask before the start.")
def command(
    *,
    url: tuple[str, ...],
    kinds: tuple[str, ...],
    output: str,
    name: str | None,
    base: str | None,
    again: bool,
    verbose: bool,
    dry_run: bool,
    engine: str | None,
    job: str,
    cpus: float | None,
    workers: int | None,
    yes: bool,
) -> None:
    """Write an index of SHARDS: how many samples each holds, and where they are.

    The shards are read once, many at a time; where their members are large, only the headers are requested. What a
    shard holds is kept in the cache folder (WDS_CACHE) with the shard's size and version, and a later run passes over
    shards that have not changed: one that was interrupted goes on. Shards with errors are listed at the end, and the
    status is 1; a json index is not written then.

    Local shards in the folder of a json index, or below it, are named relative to it.

    With --engine the work is a job, as of `wds-async map`: its records are in _wds/JOB beside the list (default:
    JOB.json in the folder that all shards share), and nothing is kept in the cache folder.

    Example: wds-async index 'https://host/train-{000..009}.tar' -o train.json

    Example: wds-async index 's3://in/{000000..099999}.tar' --kind json --kind wds --engine ray
    """
    if engine is not None:
        if base is not None:
            raise ConfigError("--base is for indexing without --engine; with it, name the list with -o")
        target = None if output == "-" else output
        how = {"kinds": kinds, "name": name or "", "job": job, "engine": engine, "cpus": cpus, "workers": workers}
        _run_as_job(shards.expand(url), target, dry_run, yes, overwrite=again, **how)
        return
    if len(kinds) > 1:
        raise ConfigError(f"--kind {' --kind '.join(kinds)}: one at a time, or several with --engine")
    (kind,) = kinds
    if kind != "json" and (name is not None or base is not None):
        raise ConfigError(f"--name and --base are for --kind json, not {kind}")
    urls = shards.expand(url)
    work = _Work(kind, list(dict.fromkeys(urls)), None if output == "-" else output)
    if not again:
        work.find()
    if dry_run:
        click.echo(f"{shards.counted(len(work.todo), 'shard')} would be read, {len(work.done)} are up to date")
        return
    work.write_known()
    work.read()
    if kind == "json" and not work.errors:
        _write_list([work.done[each] for each in urls], urls, output, name=name or "", base=base)
    for line in work.report(verbose):
        terminal.say(line, err=True)
    click.get_current_context().exit(1 if work.errors else 0)


def _run_as_job(urls: list[str], output: str | None, dry_run: bool, yes: bool, **how: Any) -> None:
    display = ProgressDisplay(how["job"])
    job = distributed_index(urls, output, on_progress=display, **how)
    run_job(job, display, writes=", ".join(how["kinds"]), dry_run=dry_run, yes=yes)


@dataclass
class _Work:
    """The shards to index, and what is known of them. ``done`` has those whose index is known, ``todo`` those that have
    to be read."""

    kind: str
    urls: list[str]
    folder: str | None
    done: dict[str, ShardFacts] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        per_shard = self.kind != "json"
        found = places.places(self.urls, self.kind, self.folder) if per_shard else []
        self.targets = dict(zip(self.urls, found, strict=per_shard))
        self.known = 0
        self.unwritten = False
        self._present: set[str] = set()
        self._kept = True

    @property
    def todo(self) -> list[str]:
        return [url for url in self.urls if url not in self.done and url not in self.errors]

    def find(self) -> None:
        """Find the shards whose index is up to date."""
        facts: dict[str, ShardFacts] = {}
        if self.kind == "json":
            facts = {url: cached for url in self.urls if (cached := places.cached_facts(url)) is not None}
        for (url, target), data in zip(self.targets.items(), places.read_files(self.targets.values()), strict=True):
            one = self._usable(url, target, data if isinstance(data, bytes) else None)
            if one is not None:
                facts[url] = one.facts
        self.done = {url: facts[url] for url, good in up_to_date(facts) if good}
        self.known = len(self.done)

    def _usable(self, url: str, target: str, data: bytes | None) -> ShardIndex | None:
        """Return the index of a shard from which its file, where ``data`` is, can be made without reading the shard.
        One that was learnt while training has no keys, and its last sample ends with the file."""
        if self.kind == "wds" and data is not None:
            with contextlib.suppress(ConfigError):
                one = ShardIndex.from_bytes(data, target)
                self._present.add(url)
                return one
        cached = places.cached_index(url)
        if cached is None or (cached.keys is None and self.kind != "wds"):
            return None
        if self.kind == "dali":
            fits = data is not None and _is_of(data.decode("utf-8", "surrogateescape"), cached)
            self._present |= {url} if fits else set()
            return cached if fits else None
        if self.kind == "energon" and cached.facts.plain and places.file_bytes(self.kind, cached, url) == data:
            self._present.add(url)
        return cached

    def write_known(self) -> None:
        """Write the files of the shards that need not be read, where they are missing or others."""
        for url in [url for url in self.done if url in self.targets and url not in self._present]:
            one = places.cached_index(url)
            if one is None:  # another process has removed it
                del self.done[url]
            else:
                self._publish(url, one)

    def read(self) -> None:
        """Read the other shards, and write each one's file as soon as it is known."""
        with progress_bar(len(self.urls), len(self.urls) - len(self.todo)) as advance:
            for scanned in scan_shards(self.todo, dali=self.kind == "dali", received=lambda n: advance(0, n)):
                self._take(scanned)
                advance(1, 0)

    def _take(self, scanned: ScannedShard) -> None:
        url, one = scanned.url, scanned.index
        if one is None:
            assert scanned.error is not None
            self.errors[url] = scanned.error
            return
        self.done[url] = one.facts
        if one.facts.version and self._kept:
            try:
                places.keep(one, url)
            except (OSError, WdsError) as exn:
                self._kept = False
                terminal.say(f"what was found is not kept: {exn}", err=True)
        if self.kind != "json":
            self._publish(url, one, scanned.dali)

    def _publish(self, url: str, one: ShardIndex, dali: str = "") -> None:
        """Write the file of one shard."""
        try:
            data = places.file_bytes(self.kind, one, url, dali)
        except WdsError as exn:
            self.errors[url] = exn
            return
        try:
            publish(self.targets[url], data)
        except (WdsError, OSError) as exn:
            self.errors[url] = exn
            self.unwritten = self.folder is None

    def report(self, verbose: bool) -> Iterator[str]:
        """Yield the lines of the end: what was found, and every error."""
        repeats = terminal.Repeats()
        for url, exn in self.errors.items():
            if verbose or not repeats.seen(str(exn), redact(url)):
                yield f"{click.style('error', fg='red', bold=True)}  {exn}"
        yield from repeats.lines()
        if self.unwritten:
            yield "indexes that cannot be written beside their shards go into a folder with -o FOLDER"
        found = [self.done[url] for url in self.urls if url in self.done]
        parts = [shards.counted(len(found), "shard"), shards.counted(sum(one.samples for one in found), "sample")]
        parts.append(shards.human(sum(one.size for one in found)))
        if self.known:
            parts.append(f"{self.known:,} up to date before")
        if self.errors:
            parts.append(shards.counted(len(self.errors), "error"))
        yield ", ".join(parts)


def _is_of(text: str, one: ShardIndex) -> bool:
    """Return whether the text of DALI's index has the samples of ``one`` where that has them."""
    try:
        samples = read_dali(text)
    except (ConfigError, ShardFormatError):
        return False
    stops = [max(offset + padded(size) for _, offset, size in fields) for fields in samples]
    return stops == [one.stop(i) for i in range(len(one))]


def _write_list(found: list[ShardFacts], urls: list[str], output: str, *, name: str, base: str | None) -> None:
    counted: list[dict[str, Any]] = [
        {"url": url, "nsamples": one.samples, "filesize": one.size} for url, one in zip(urls, found, strict=True)
    ]
    path = None if output == "-" else local_path(output)
    folder = None if path is None else os.path.dirname(os.path.abspath(path))
    text = shard_list(index.placed_shards(counted, base=base, folder=folder), name)
    if output == "-":
        click.echo(text, nl=False)
    else:
        publish_text(output, text)


@contextlib.contextmanager
def progress_bar(total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; gives ``advance(shards, bytes)``."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("index"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("shards  {task.fields[read]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    received = 0
    with progress:
        task = progress.add_task("", total=total, completed=done, read="")

        def advance(count: int, size: int) -> None:
            nonlocal received
            received += size
            progress.update(task, advance=count, read=shards.human(received))

        yield advance
