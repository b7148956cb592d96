"""Warnings that are logged once."""

from __future__ import annotations

import logging
from collections.abc import Hashable

__all__ = ["Once", "warn_once"]


class Once:
    """Remembers keys, to do something for each of them once."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def first(self, key: Hashable) -> bool:
        """Return whether ``key`` occurs for the first time."""
        new = key not in self._seen
        self._seen.add(key)
        return new


_process = Once()


def warn_once(logger: logging.Logger, key: Hashable, message: str, *args: object) -> None:
    """Log a warning, but only the first one of ``key`` in this process."""
    if _process.first(key):
        logger.warning(message, *args)
