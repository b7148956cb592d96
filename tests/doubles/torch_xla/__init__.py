"""A double of torch_xla: two "cores", each a process, on the CPU. Only what ``examples/xla_train.py`` calls."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CORES = 2
ordinal: int | None = None
"""Of this process; None until its runtime runs."""

_XLAC = SimpleNamespace(_xla_runtime_is_initialized=lambda: ordinal is not None)


def device() -> str:
    return "cpu"


def _start(number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global ordinal
    ordinal = number
    function(number, *args)


def launch(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
    if ordinal is not None:
        raise RuntimeError("Runtime is already initialized.")
    context = multiprocessing.get_context("spawn")
    cores = [context.Process(target=_start, args=(i, function, args)) for i in range(CORES)]
    for core in cores:
        core.start()
    for core in cores:
        core.join()
    if any(core.exitcode for core in cores):
        raise SystemExit(1)
