"""Packages that are not imported with this one: those that the program has loaded, and those that an extra brings."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from wds_async.errors import MissingExtra

__all__ = ["loaded", "optional"]


def loaded(name: str) -> Any:
    """Return the module ``name`` where the program has imported it, else None. Nothing is imported."""
    return sys.modules.get(name)


def optional(name: str, what: str, extra: str) -> Any:
    """Import and return the module ``name``. Raise MissingExtra, naming ``extra``, where ``what`` needs it in vain."""
    try:
        return importlib.import_module(name)
    except ImportError as exn:
        raise MissingExtra(f'{what} needs {name.partition(".")[0]}: pip install "wds-async[{extra}]"') from exn
