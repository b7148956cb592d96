"""Processes on this host that are connected by the Unix socket, and the moment when one of them has gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

__all__ = ["Neighbours"]

_LINGER_S = 2.0
"""A process that changes its connections has none for a moment."""


class Neighbours:
    """Counts the connections of each process. ``gone`` is called with the number of one that has none any more. 0 and
    less are processes that the kernel does not tell, as those of another container: they are not counted."""

    def __init__(self, gone: Callable[[int], None] | None = None) -> None:
        self._gone = gone
        self._connections: Counter[int] = Counter()
        self._leaving: dict[int, asyncio.TimerHandle] = {}

    def came(self, process: int) -> None:
        """One more connection of ``process``."""
        if process <= 0 or self._gone is None:
            return
        self._connections[process] += 1
        if (leaving := self._leaving.pop(process, None)) is not None:
            leaving.cancel()

    def went(self, process: int) -> None:
        """One fewer."""
        if process not in self._connections:
            return
        self._connections[process] -= 1
        if self._connections[process] <= 0:
            del self._connections[process]
            later = asyncio.get_running_loop().call_later
            self._leaving[process] = later(_LINGER_S, self._left, process)

    def known(self) -> set[int]:
        """Those that are connected, or were a moment ago."""
        return {*self._connections, *self._leaving}

    def close(self) -> None:
        """Forget them all."""
        for leaving in self._leaving.values():
            leaving.cancel()
        self._leaving.clear()
        self._connections.clear()

    def _left(self, process: int) -> None:
        del self._leaving[process]
        if self._gone is not None:
            self._gone(process)
