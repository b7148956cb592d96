"""Door: the functions from shards to samples under WebDataset's module name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wds_async.reading import stage

if TYPE_CHECKING:
    from wds_async.reading.stage import *  # noqa: F403

__all__: list[str] = []
__all__ += stage.__all__


def __getattr__(name: str) -> Any:
    return getattr(stage, name)
