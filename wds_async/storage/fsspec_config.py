"""fsspec's own configuration, for the stores that the engine reads itself: where fsspec makes a filesystem, it applies
it by itself."""

from __future__ import annotations

import os
from typing import Any

from wds_async import packages
from wds_async.environment import names, variable
from wds_async.storage.options import Options

__all__ = ["configured", "fsspec_configuration"]


def fsspec_configuration(*protocols: str) -> dict[str, Any]:
    """What fsspec's files and ``FSSPEC_*`` say for ``protocols``, the later over the earlier. Blocks.

    fsspec (60 ms) is imported only where there is something to find.
    """
    if packages.loaded("fsspec.config") is None and not _is_any(protocols):
        return {}
    try:
        from fsspec.config import conf  # noqa: PLC0415 (slow, and often not needed)
    except ImportError:
        return {}
    merged: dict[str, Any] = {}
    for name in protocols:
        merged.update(conf.get(name, {}))
    return merged


def configured(options: Options, *protocols: str) -> Options:
    """``options`` over what fsspec's configuration says for ``protocols``."""
    said = fsspec_configuration(*protocols)
    return Options({**said, **options}) if said else options


def _is_any(protocols: tuple[str, ...]) -> bool:
    folder = variable("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
    return os.path.isdir(folder) or any(names(f"FSSPEC_{protocol.upper()}") for protocol in protocols)
