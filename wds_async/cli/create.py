"""``wds-async create``: shards from a folder, a table or a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import click
from rich.console import Console

from wds_async.cli import running, terminal
from wds_async.redact import redact
from wds_async.storage.registry import locate
from wds_async.tools.create.job import FORMATS, create_shards
from wds_async.tools.create.tables import TableColumns
from wds_async.tools.create.work import CreateJob

__all__ = ["command"]


@click.command("create")
@click.argument("output", metavar="OUT")
@click.argument("source", metavar="[SOURCE]", default="-")
@click.option("--format", type=click.Choice(FORMATS), help="What SOURCE is.  [default: by its name; of '-': recipe]")
@click.option(
    "--imagefolder", is_flag=True, help="The first folder below SOURCE is the class: field cls, by sorted names."
)
@click.option("--classes", metavar="FILE", help="Names of classes: a JSON list, or one a line.  [default: all folders]")
@click.option("--numbered", is_flag=True, help="Of a folder: keys are numbers.  [default: names of files]")
@click.option("--field", "fields", multiple=True, metavar="FIELD=COLUMN", help="Write a column's value as a field.")
@click.option("--file", "files", multiple=True, metavar="FIELD=COLUMN", help="Write the file that a column names.")
@click.option("--url", "urls", multiple=True, metavar="FIELD=COLUMN", help="Write what the URL in a column gives.")
@click.option(
    "--json", "jsons", multiple=True, metavar="FIELD=COLUMN,…", help="Write columns as one JSON object; *: all others."
)
@click.option("--key", metavar="COLUMN", help="Column of the keys.  [default: the number of the row]")
@click.option("--allow-pipe", is_flag=True, help="Run the commands of a recipe on standard input.")
@click.option("--skip-errors", is_flag=True, help="Leave out what cannot be read, and name it in JOB-errors.jsonl.")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Give up a URL after so long without a byte.  [default: WDS_TIMEOUT; 30 with --skip-errors]",
)  # fmt: skip
@click.option("--shuffle", type=int, metavar="SEED", help="Permute all samples.")
@click.option("--maxsize", help="Bytes of fields in a shard (500M, 1G).  [default: 1G]")
@click.option("--maxcount", type=click.IntRange(1), help="Samples in a shard.  [default: 10000 if sizes are unknown]")
@click.option("--index", is_flag=True, help="Write DALI's index beside each shard.")
@click.option("--job", help="Name of the job, so of its folder.  [default: create, or create-train for OUT=train-…]")
@running.engine_options
@running.start_options
def command(
    output: str,
    source: str,
    format: str | None,
    imagefolder: bool,
    classes: str | None,
    numbered: bool,
    fields: tuple[str, ...],
    files: tuple[str, ...],
    urls: tuple[str, ...],
    jsons: tuple[str, ...],
    key: str | None,
    allow_pipe: bool,
    skip_errors: bool,
    dry_run: bool,
    yes: bool,
    **how: object,
) -> None:
    """Write shards from SOURCE, a folder, a table (.csv .tsv .jsonl .parquet) or a recipe; '-' is standard input.

    OUT names the shards (out/train-{000000..}.tar), or is one file (x.tar), or a folder, or '-', standard output.

    Files of a folder that share a name up to the first dot are one sample. The columns of a table are fields; some may
    name files or URLs. A recipe has lines of a member's name, a tab, and its source: a path, a URL, text:… or pipe:….

    The same source and options give the same bytes. The same command again goes on where it stopped. The status is 1
    if a file or URL cannot be read, unless --skip-errors.

    Example: wds-async create 's3://bucket/train-{000000..}.tar' photos/ --imagefolder --shuffle 7 --maxsize 500M
    """
    if source == "-" and sys.stdin.isatty():
        raise click.UsageError("name a folder, table or recipe; or write a recipe to standard input")
    display = running.ProgressDisplay("create")
    with _reading(source):
        made = create_shards(
            source,
            output,
            format=format,
            imagefolder=imagefolder,
            classes=classes,
            numbered=numbered,
            columns=TableColumns(
                _pairs("--field", fields),
                _pairs("--file", files),
                _pairs("--url", urls),
                {name: columns.split(",") for name, columns in _pairs("--json", jsons).items()},
                key,
            ),
            allow_pipe=allow_pipe or (source != "-" and locate(source).path is not None),
            skip_errors=skip_errors,
            on_progress=display,
            **how,  # type: ignore[arg-type]  # the rest have the same names and types here and there
        )
    _run(made, display, output, dry_run, yes)


def _run(made: CreateJob, display: running.ProgressDisplay, output: str, dry_run: bool, yes: bool) -> None:
    """Run the job, or write the samples to standard output."""
    assert made.plan is not None
    lines = list(made.plan.lines(running.cost_of(made.plan.store.counts.buckets)))
    if output != "-":
        summary = running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes, source=lines)
        if summary is not None and summary.skipped:
            terminal.say(f"{redact(made.errors_url)} names what was passed over", err=True)
        return
    for line in lines:
        terminal.say(f"  {line}", err=True)
    if not dry_run:
        made.write(sys.stdout.buffer)


def _reading(source: str) -> AbstractContextManager[object]:
    """Return the display of a terminal while the source is read, which takes a minute for millions of files."""
    text = f"reading {terminal.line(redact(source))}"
    return Console(stderr=True).status(text) if sys.stderr.isatty() else nullcontext()


def _pairs(option: str, values: Iterable[str]) -> dict[str, str]:
    """Return ``FIELD=COLUMN`` options as a dict."""
    pairs: dict[str, str] = {}
    for value in values:
        name, equals, column = value.partition("=")
        if not (name and equals and column) or name in pairs:
            raise click.UsageError(f"{option} {value!r}: write FIELD=COLUMN, each field once")
        pairs[name] = column
    return pairs
