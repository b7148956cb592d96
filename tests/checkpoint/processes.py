"""Processes that are killed with all that they started.

Most are forked from a server that has imported torch once: that, and not what a test tells them to do, would take most
of the time of a process that starts from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["kill", "started"]

_LOADED = ["tests.checkpoint.ddp", "tests.checkpoint.rank", "tests.checkpoint.training", "torch._dynamo"]


def started(target: Callable[..., object], *arguments: object, fresh: bool = False, **environment: str) -> BaseProcess:
    """Start ``target(*arguments)`` in a process group of its own, with more variables in its environment. ``fresh``:
    by an interpreter that starts from nothing."""
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(_LOADED)
    process: BaseProcess = context.Process(target=_run, args=(target, arguments, {**os.environ, **environment}))
    process.start()
    return process


def _run(target: Callable[..., object], arguments: Sequence[object], environment: Mapping[str, str]) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # of its workers; the server's would outlive it
    os.environ.clear()  # the server was started for another test
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    target(*arguments)


def kill(process: BaseProcess) -> None:
    """End the process and those that it started, if it runs."""
    if process.is_alive():
        assert process.pid is not None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            process.kill()
    process.join()
