"""fsspec's own configuration, for the stores that the engine reads without fsspec."""

from __future__ import annotations

import os
from typing import Any

from wds_async import packages
from wds_async.environment import names, variable
from wds_async.storage.options import Options

__all__ = ["configure", "configured", "fsspec_configuration", "set_by_program"]


def fsspec_configuration(*protocols: str) -> dict[str, Any]:
    """Return the configuration of ``protocols`` in fsspec's files and ``FSSPEC_*``, the later over the earlier. Blocks.

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
    """Return ``options`` over fsspec's configuration of ``protocols``."""
    configuration = fsspec_configuration(*protocols)
    return Options({**configuration, **options}) if configuration else options


def set_by_program() -> dict[str, Any]:
    """Return the whole configuration of a program that has loaded fsspec, and may have changed it; {} for another."""
    loaded = packages.loaded("fsspec.config")
    return {} if loaded is None else dict(loaded.conf)


def configure(configuration: dict[str, Any]) -> None:
    """Have fsspec use what another process has `set_by_program`."""
    if configuration:
        from fsspec.config import conf  # noqa: PLC0415 (slow, and often not needed)

        conf.clear()
        conf.update(configuration)


def _is_any(protocols: tuple[str, ...]) -> bool:
    folder = variable("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
    return os.path.isdir(folder) or any(names(f"FSSPEC_{protocol.upper()}") for protocol in protocols)
