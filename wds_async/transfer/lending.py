"""Memory for those who come and go: slabs within a number of bytes, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque

from wds_async.transfer.slabs import MIN_SLAB_BYTES, Slab, SlabPool, slab_bytes

__all__ = ["LARGEST_BYTES", "Lender"]

LARGEST_BYTES = 4 << 20
"""The largest slab that is lent, where the memory is not smaller."""


class Lender:
    """Lends slabs of at most ``memory_bytes`` together. Who waits longest has the next; on the loop only.

    ValueError for less than 64 KiB.
    """

    def __init__(self, memory_bytes: int) -> None:
        if memory_bytes < MIN_SLAB_BYTES:
            raise ValueError(f"memory of {memory_bytes} bytes: at least {MIN_SLAB_BYTES}")
        self.largest_bytes = min(LARGEST_BYTES, 1 << (memory_bytes.bit_length() - 1))
        """No slab is larger."""
        self._pool = SlabPool(memory_bytes, self.largest_bytes)
        self._waiting: deque[tuple[int, asyncio.Future[Slab]]] = deque()
        self._read_still: list[tuple[Slab, memoryview]] = []

    @property
    def held_bytes(self) -> int:
        """What is lent now."""
        return self._pool.used_bytes

    @property
    def crowded(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def take(self, wanted_bytes: int) -> Slab:
        """A slab of at least so many bytes, once there is one. ValueError for more than `largest_bytes`."""
        if wanted_bytes > self.largest_bytes:
            raise ValueError(f"{wanted_bytes} bytes at once: at most {self.largest_bytes}")
        size = slab_bytes(wanted_bytes, self.largest_bytes)
        self.look()
        slab = None if self._waiting else self._pool.take(size)
        if slab is not None:
            return slab
        future: asyncio.Future[Slab] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # lent in this very turn
                self._pool.give_back(future.result())
            else:
                self._waiting = deque(each for each in self._waiting if each[1] is not future)
            self.look()
            raise

    def give_back(self, slab: Slab, view: memoryview | None = None) -> None:
        """Take a slab back, with the ``view`` of it that was handed out: while somebody (a thread that writes it to a
        disk, say) reads that still, the slab is nobody else's."""
        if view is not None:
            try:
                view.release()
            except BufferError:
                self._read_still.append((slab, view))
                return
        self._pool.give_back(slab)
        self.look()

    def look(self) -> None:
        """Lend what is free to those who wait."""
        if self._read_still:
            held, self._read_still = self._read_still, []
            for slab, view in held:
                self.give_back(slab, view)
        while self._waiting:
            size, future = self._waiting[0]
            lent = None if future.done() else self._pool.take(size)
            if lent is None and not future.done():
                return
            self._waiting.popleft()
            if lent is not None:
                future.set_result(lent)

    def close(self) -> None:
        """Let go of all memory that is not lent."""
        self._pool.close()
