"""Door: every filter under the module name that WebDataset gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wds_async.filters import basic

if TYPE_CHECKING:
    from wds_async.filters.basic import *  # noqa: F403

__all__: list[str] = []
__all__ += basic.__all__


def __getattr__(name: str) -> Any:
    return getattr(basic, name)
