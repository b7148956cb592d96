"""Shared by the commands that write the samples of shards in another order or size: their options, and the job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from wds_async.cli import running
from wds_async.distributed.resharding import reshard
from wds_async.environment import ON_CORRUPT

__all__ = ["options", "run", "size_options"]

_SIZES = (
    click.option("--shards", type=click.IntRange(1), help="Number of new shards, equal by samples."),
    click.option("--maxcount", type=click.IntRange(1), help="Samples of a new shard."),
    click.option("--maxsize", help="Bytes of a new shard (500M, 1G).  [default: 1G, if OUT does not say how many]"),
)
_OPTIONS = (
    click.option("--memory", default="1GiB", show_default=True, help="Bytes that a task may use."),
    click.option("--on-corrupt", type=click.Choice(ON_CORRUPT), help="What to do about broken shards."),
    click.option("--job", help="Name of the job's folder.  [default: that of the command, and of a single OUT]"),
    running.engine_options,
    running.start_options,
)


def _all(decorators: tuple[Callable[..., Any], ...], command: Callable[..., Any]) -> Callable[..., Any]:
    return functools.reduce(lambda inner, one: one(inner), reversed(decorators), command)


def size_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how large new shards are."""
    return _all(_SIZES, command)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of jobs that reshard."""
    return _all(_OPTIONS, command)


def run(
    name: str, inputs: tuple[str, ...], output: str, *, job: str | None, dry_run: bool, yes: bool, **others: Any
) -> None:
    """Run the job of the command ``name``, which writes the samples of SHARDS to OUT: a folder, a template of names, or
    one file. ``others`` are options of `reshard`."""
    job = job or running.job_name(name, output)
    display = running.ProgressDisplay(job)
    if output.endswith("/") or output in (".", ".."):
        output = f"{output.rstrip('/')}/{'{split}-' if others.get('split') is not None else ''}{{000000..}}.tar"
    made = reshard(list(inputs), output, job=job, on_progress=display, **others)
    running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes)
