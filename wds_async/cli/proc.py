"""``wds-async proc``: a command that is run on the files of each sample."""

from __future__ import annotations

import functools
from typing import Any

import click

from wds_async.cli import changing
from wds_async.tools.changes import check_command, processed

__all__ = ["command"]


@click.command("proc")
@changing.arguments
@click.argument("program", metavar="COMMAND")
@click.option("--shell", is_flag=True, help="Have the shell run it, for pipes and redirections.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Samples at once in each task.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="Seconds.")
@changing.options
def command(
    shards: tuple[str, ...], output: str, program: str, shell: bool, jobs: int, timeout: float, **options: Any
) -> None:
    """Run COMMAND on the files of each sample of SHARDS, and write the files that are there afterwards to new shards.

    {jpg} stands for the file of the field jpg, also of one that COMMAND makes, and {key} for the key; {{ is a brace. It
    runs in a folder of its own for each sample, several at once. Where it fails, the task fails, with the command's
    message; with --skip-errors the sample is left out, and the record says so.

    Example: wds-async proc 'train-{000..009}.tar' small/ 'convert {jpg} -resize 256 {jpg}'
    """
    check_command(program, shell)
    run = functools.partial(processed, command=program, shell=shell, jobs=jobs, timeout_s=timeout)
    changing.run("proc", shards, output, run, **options)
