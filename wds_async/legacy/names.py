"""The older names, what each is today, and how that is said.

A class warns when an object is made of it. A function that is passed on as a value (``Processor(source,
wds.url_opener)``) would warn in somebody else's line if it warned when it is called: so this module warns when
such a name is looked up here.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from wds_async.tracebacks import warn

__all__ = ["FUNCTIONS", "Today", "deprecated"]


class Today(NamedTuple):
    """Where an older name's function is (``room.attribute``), and what to write instead."""

    home: str
    instead: str


_READING = "tarfile_to_samples(), or WebDataset, which reads ahead"

FUNCTIONS: dict[str, Today] = {
    "Curried": Today("pipeline.pipelinefilter", "pipelinefilter(f)"),
    "batch": Today("filters.batched", "batched(n)"),
    "group_by_keys": Today("reading.parts.group_by_keys", _READING),
    "ignore_exception": Today("handlers.ignore_and_continue", "ignore_and_continue"),
    "map_stream": Today("legacy.datasets.map_stream", "map(f)"),
    "stage": Today("pipeline.pipelinefilter", "pipelinefilter(f)"),
    "tar_file_expander": Today("reading.parts.tar_file_expander", _READING),
    "tar_file_iterator": Today("reading.parts.tar_file_iterator", _READING),
    "tarfile_expander": Today("reading.parts.tar_file_expander", _READING),
    "transformer": Today("legacy.datasets.transformer", "map_tuple(f, g)"),
    "url_opener": Today("reading.parts.url_opener", _READING),
    "warn_exception": Today("handlers.warn_and_continue", "warn_and_continue"),
    "worker_urls": Today("legacy.datasets.worker_urls", "split_by_worker"),
}
"""Older functions by name: attributes of this module that warn."""

_PACKAGE = __name__.partition(".")[0]


def deprecated(name: str, instead: str) -> None:
    """Warn (DeprecationWarning) that ``name`` is old, at the line of the user's code that led here."""
    warn(f"{name} is deprecated; use {instead}", DeprecationWarning)


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, attribute = FUNCTIONS[name].home.rpartition(".")
    found = getattr(importlib.import_module(f"{_PACKAGE}.{home}"), attribute)
    deprecated(name, FUNCTIONS[name].instead)
    return found
