"""The older names, and what each is today.

A class warns when an object is made of it. A function may be passed on as a value (``Processor(source,
wds.url_opener)``), so this module warns when its name is looked up here.
"""

from __future__ import annotations

import importlib
from typing import Any

from wds_async.tracebacks import warn

__all__ = ["FUNCTIONS", "deprecated"]


_READING = "tarfile_to_samples(), or WebDataset, which reads ahead"

FUNCTIONS: dict[str, tuple[str, str]] = {
    "Curried": ("pipeline.pipelinefilter", "pipelinefilter(f)"),
    "batch": ("filters.batched", "batched(n)"),
    "group_by_keys": ("reading.parts.group_by_keys", _READING),
    "ignore_exception": ("handlers.ignore_and_continue", "ignore_and_continue"),
    "map_stream": ("legacy.datasets.map_stream", "map(f)"),
    "stage": ("pipeline.pipelinefilter", "pipelinefilter(f)"),
    "tar_file_expander": ("reading.parts.tar_file_expander", _READING),
    "tar_file_iterator": ("reading.parts.tar_file_iterator", _READING),
    "tarfile_expander": ("reading.parts.tar_file_expander", _READING),
    "transformer": ("legacy.datasets.transformer", "map_tuple(f, g)"),
    "url_opener": ("reading.parts.url_opener", _READING),
    "warn_exception": ("handlers.warn_and_continue", "warn_and_continue"),
    "worker_urls": ("legacy.datasets.worker_urls", "split_by_worker"),
}
"""Older functions by name: where each is (``room.attribute``), and what to write instead."""


def deprecated(name: str, instead: str) -> None:
    """Warn (DeprecationWarning) that ``name`` is old, at the line of the user's code that led here."""
    warn(f"{name} is deprecated; use {instead}", DeprecationWarning)


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, instead = FUNCTIONS[name]
    room, _, attribute = home.rpartition(".")
    function = getattr(importlib.import_module(f"wds_async.{room}"), attribute)
    deprecated(name, instead)
    return function
