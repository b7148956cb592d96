"""Engines by their names."""

from __future__ import annotations

from typing import Any

from wds_async.distributed.engines.base import TaskEngine
from wds_async.errors import ConfigError

__all__ = ["ENGINES", "engine_of"]

ENGINES = ("local", "rank", "ray", "dask")


def engine_of(name: str, **options: Any) -> TaskEngine:
    """Return the engine ``name`` with its ``options``; those that are None do not count.

    ``cpus``: of one task. ``workers``: processes of this machine, for "local" and "rank" (default: as many as CPUs
    allow). ``rank``, ``world_size``: for "rank" (default: as the environment says). Those of "ray" and "dask":
    see `RayEngine` and `DaskEngine`.
    ConfigError for a name or an option that there is not, MissingExtra where the engine's package is missing.
    """
    given = {option: value for option, value in options.items() if value is not None}
    try:
        if name == "local":
            from wds_async.distributed.engines.local import LocalEngine  # noqa: PLC0415 (subprocess)

            return LocalEngine(**given)
        if name == "rank":
            from wds_async.distributed.engines.rank import RankEngine  # noqa: PLC0415 (subprocess)

            return RankEngine(**given)
        if name == "ray":
            from wds_async.distributed.engines.ray import RayEngine  # noqa: PLC0415 (an extra)

            return RayEngine(**given)
        if name == "dask":
            from wds_async.distributed.engines.dask import DaskEngine  # noqa: PLC0415 (an extra)

            return DaskEngine(**given)
    except TypeError as exn:
        raise ConfigError(f"engine={name!r}: {exn}") from exn
    raise ConfigError(f"engine={name!r}: one of {', '.join(ENGINES)}")
