"""Shared by the commands that change samples one by one: their arguments, and the job that they start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from wds_async.cli import running
from wds_async.distributed.mapping import map_shards

__all__ = ["arguments", "options", "run"]

_ALL_INPUTS = 1 << 60

_ARGUMENTS = (
    click.argument("shards", nargs=-1, required=True, metavar="SHARDS..."),
    click.argument("output", metavar="OUT"),
)
_OPTIONS = (
    click.option("--maxsize", help="Begin another shard beyond so many bytes of fields (500M, 1G)."),
    click.option("--maxcount", type=click.IntRange(1), help="Begin another shard beyond so many samples."),
    click.option("--index", is_flag=True, help="Write DALI's index beside each new shard."),
    click.option(
        "--skip-errors", is_flag=True,
        help="Pass over samples and shards with errors; the task's record names them.  [default: the task fails]",
    ),
    click.option("--job", help="Name of the job's folder.  [default: that of the command, and of a single OUT]"),
    running.engine_options,
    running.start_options,
)  # fmt: skip


def _all(decorators: tuple[Callable[..., Any], ...], command: Callable[..., Any]) -> Callable[..., Any]:
    return functools.reduce(lambda inner, one: one(inner), reversed(decorators), command)


def arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments SHARDS and OUT."""
    return _all(_ARGUMENTS, command)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of outputs and jobs."""
    return _all(_OPTIONS, command)


def run(
    name: str,
    shards: tuple[str, ...],
    output: str,
    function: Callable[..., Any],
    *,
    skip_errors: bool,
    job: str | None,
    dry_run: bool,
    yes: bool,
    **others: Any,
) -> None:
    """Run the job of the command ``name``, which applies ``function`` to SHARDS. ``others`` go to `map_shards`."""
    job = job or running.job_name(name, output)
    display = running.ProgressDisplay(job)
    template, inputs_per_task = _template(output, others["maxsize"] is not None or others["maxcount"] is not None)
    made = map_shards(
        list(shards),
        template,
        function,
        handler=f"wds_async.handlers:{'ignore_and_continue' if skip_errors else 'reraise_exception'}",
        inputs_per_task=inputs_per_task,
        job=job,
        on_progress=display,
        **others,
    )
    running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes)


def _template(output: str, parts: bool) -> tuple[str, int]:
    """Return the template of names that OUT stands for, and the inputs of one task: a folder keeps the names of the
    inputs, a plain name is one file for all of them."""
    if output.endswith("/") or output in (".", ".."):
        return f"{output.rstrip('/')}/{{name}}{'-{part:03d}' if parts else ''}.tar", 1
    return output, 1 if "{task" in output or "{name" in output else _ALL_INPUTS
