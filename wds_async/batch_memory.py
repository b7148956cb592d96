"""Memory for the arrays of batches, where the process that makes them has some that is used again.

Fresh memory for a batch of images costs more than filling it: the kernel clears each page, and takes it back.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

__all__ = ["Memory", "empty", "use"]

_LEAST_BYTES = 65536


class Memory(Protocol):
    """Memory of the batch that is being made."""

    def empty(self, nbytes: int) -> Any:
        """Return a writable buffer of ``nbytes``, which is in use as long as a view of it exists; None for none."""


class _MemoryOfThread(threading.local):
    memory: Memory | None = None

    def use(self, memory: Memory | None) -> None:
        self.memory = memory


_here = _MemoryOfThread()


def use(memory: Memory | None) -> None:
    """Take the memory of the batches that are made on this thread from ``memory``."""
    _here.use(memory)


def empty(nbytes: int) -> Any:
    """Return a writable buffer of ``nbytes`` for an array of a batch; None where it is small, or there is none."""
    memory = _here.memory
    return None if memory is None or nbytes < _LEAST_BYTES else memory.empty(nbytes)
