"""``wds-async run``: an unedited script, its ``import webdataset`` resolving to wds_async."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

import click

from wds_async.cli import alias

__all__ = ["command"]


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(as_module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGS; its `import webdataset` (and `import wids`) becomes wds_async. Nothing
    in it is edited.

    The exit status is the script's own.

    Example: wds-async run train.py --epochs 3

    Example: wds-async run -m my_project.train
    """
    if not as_module and not Path(script).is_file():
        raise click.UsageError(f"no such script: {script} (for a module write: wds-async run -m {script})")
    alias.prepare()
    sys.argv = [script, *args]
    # As python itself: the script's folder comes first, for a module the working directory.
    sys.path.insert(0, str(Path.cwd()) if as_module else str(Path(script).resolve().parent))
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except Exception as exn:
        # The script's own error, shown as python would show it, less the frames of this launcher.
        traceback.print_exception(exn.with_traceback(_own_frames(exn)))
        click.get_current_context().exit(1)


def _own_frames(exn: BaseException) -> TracebackType | None:
    frame = exn.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frame = frame.tb_next
    return frame or exn.__traceback__
