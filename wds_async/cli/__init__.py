"""The command line ``wds-async``: one small module a command, imported when it is called.

Exit codes: 0 good, 1 the data or the store had an error, 2 the command or a setting was wrong, 130 Ctrl-C.
An error of the tree is one message on stderr; ``WDS_LOG=debug`` shows its traceback too. A reader that leaves
(``| head``) ends the command silently.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import click

from wds_async import config, environment
from wds_async._version import __version__
from wds_async.cli import terminal
from wds_async.errors import ConfigError, MissingExtra, UrlError, WdsError

__all__ = ["COMMANDS", "GROUPS", "Commands", "main"]

GROUPS = {
    "Look at shards": {
        "ls": "List the samples of shards, or the contents of a folder in any store.",
        "cat": "Show samples, write the bytes of a field or shard, or put shards together.",
        "stats": "Report what is in shards, in numbers and as a contact sheet.",
        "check": "Read shards from end to end and report what is wrong.",
        "diff": "Compare the samples of two sets of shards.",
        "verify": "Compare the bytes of shards with SHA256SUMS, or write that.",
        "resolve": "Show what URLs resolve to, how they are read, and whether they can be read.",
    },
    "Make and change shards": {
        "create": "Write shards from a folder, a table or a recipe.",
        "filter": "Write the samples for which an expression is true.",
        "select": "Write some fields of each sample.",
        "rename": "Rename fields, and keys of samples.",
        "proc": "Run a command on the files of each sample.",
        "sort": "Write the samples sorted by key, or by an expression.",
        "shuffle": "Write the samples in a random order.",
        "split": "Write shards of another size, or several sets of shards.",
        "join": "Join the samples of data sets by key.",
        "map": "Apply a function to the samples of any number of shards, on many machines.",
        "reshard": "Shuffle, sort, split or join the samples of any number of shards, or write shards of another size.",
        "index": "Write indexes of shards, for lengths and random access.",
        "convert": "Convert shards to and from TFRecord, MDS and LitData, and to Parquet and folders of images.",
        "copy": "Copy shards from one store to another, byte for byte.",
        "job": "See the jobs of these commands; finish them, run again what failed.",
    },
    "Run and measure": {
        "run": "Run a script whose `import webdataset` becomes wds_async.",
        "bench": "Measure reading: bytes/s, samples/s, CPU and memory.",
        "doctor": "Find the bottleneck of a pipeline and one setting to change next.",
        "top": "Show services and jobs at work.",
        "env": "Show every environment variable that is read.",
        "replay": "Make the batch of a step again from a saved state.",
        "seen": "List the samples that a job had seen when its state was saved.",
    },
    "The service": {
        "serve": "Serve shards to every process of a node from one cache.",
        "cache": "Manage the cache of the service: list, sum up, remove, warm, verify, pin.",
    },
    "To begin with": {
        "demo": "Train a small model from shards streamed over HTTP.",
    },
}
"""Commands and what they do, by group."""
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
_INTERRUPTED = 130


class Commands(click.Group):
    """Group of the commands; ``--help`` of the group imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"wds_async.cli.{cmd_name}")
        if hasattr(module, "__path__"):  # a folder
            module = importlib.import_module(f"{module.__name__}.command")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # What stdout still holds would be written, and fail again, when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        return result

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        parent: Any = super()

        def call() -> Any:
            return parent.main(*args, standalone_mode=False, **extra)

        return sys.exit(_exit_code(call)) if standalone_mode else call()


def _exit_code(call: Any) -> int:
    try:
        code = call()
    except click.ClickException as exn:
        exn.show()
        return exn.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except WdsError as exn:
        report(exn)
        return 2 if isinstance(exn, (ConfigError, UrlError, MissingExtra)) else 1
    return code if isinstance(code, int) else 0


def report(exn: BaseException) -> None:
    """Print one red message on stderr, after the traceback if ``WDS_LOG=debug``."""
    if (environment.variable("WDS_LOG") or "").lower() == "debug":
        traceback.print_exception(exn)
    click.echo(click.style(terminal.line(f"wds-async: {exn}", keep="\n"), fg="red"), err=True)


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"wds-async {__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
def main() -> None:
    """Read, list, check and measure shards of training data, from files, HTTP or any cloud.

    Example: wds-async ls 'https://host/train-{000..009}.tar' -n 5
    """
    config.configure_logging()
