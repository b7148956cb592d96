"""Door: the shard lists and splitters under WebDataset's module name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wds_async.shardlists import lists

if TYPE_CHECKING:
    from wds_async.shardlists.lists import *  # noqa: F403

__all__: list[str] = []
__all__ += lists.__all__


def __getattr__(name: str) -> Any:
    return getattr(lists, name)
