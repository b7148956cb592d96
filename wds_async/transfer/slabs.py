"""Slabs: reused pieces of memory that the kernel receives into, and the pool that owns them. On the loop only.

Shared mappings ("blocks", one part long) are cut by the buddy system into slabs of any power of two down to 64 KiB
(Knowlton, "A fast storage allocator", CACM 1965). Blocks are kept: fresh pages are the cost of a read.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque
from dataclasses import dataclass

__all__ = [
    "LARGEST_BYTES",
    "MIN_SLAB_BYTES",
    "SharedSlabPool",
    "Slab",
    "SlabBudget",
    "SlabPool",
    "SlabView",
    "SmallReserve",
    "slab_bytes",
]

MIN_SLAB_BYTES = 64 << 10
LARGEST_BYTES = 4 << 20
"""The largest slab of a `SlabBudget`, where the memory is not smaller."""


def slab_bytes(wanted: int, most: int) -> int:
    """Return the size of the slab for ``wanted`` bytes: the next power of two within [64 KiB, ``most``]."""
    return min(max(1 << max(wanted - 1, 0).bit_length(), MIN_SLAB_BYTES), most)


@dataclass(slots=True, eq=False)
class Slab:
    """One owner at a time: the pool, the loop (filling) or the consumer (reading).

    ``view`` spans the whole slab; ``reserved``: it came out of a reader's reserve.
    """

    address: int
    size: int
    view: memoryview
    reserved: bool = False


class SlabPool:
    """All slab memory of a process: ``budget_bytes`` in blocks, and one block more for each further reader.

    For each registered reader one block is held back, which only the head of that reader's line may use: a
    window whose later parts hold everything else still moves. A reader with many shards open has more of them.
    """

    def __init__(self, budget_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.readers = 0
        self._further_reserves = 0
        self._blocks: list[mmap.mmap] = []
        # Free pieces by size, each dict an ordered set of addresses: the last freed is the warmest.
        self._free: dict[int, dict[int, None]] = {block_bytes: {}}

    def enter(self, blocks: int = 1) -> None:
        """Count a reader more, for which so many blocks are held back."""
        self.readers += 1
        self._further_reserves += blocks - 1

    def leave(self, blocks: int = 1) -> None:
        """Count a reader less."""
        self.readers -= 1
        self._further_reserves -= blocks - 1

    @property
    def max_blocks(self) -> int:
        further = max(0, self.readers - 1) + (self._further_reserves if self.readers > 1 else 0)
        return self.budget_bytes // self.block_bytes + further

    @property
    def mapped_bytes(self) -> int:
        """Bytes that the pool has mapped so far."""
        return len(self._blocks) * self.block_bytes

    def take(self, size: int, *, reserve: bool = False) -> Slab | None:
        """Return a slab of ``size`` bytes (a power of two from `slab_bytes`), or None while there is none. OSError
        where the system has no memory for it, and waiting would not help.

        ``reserve`` lets the taker use the block held back for its reader.
        """
        piece = self._smallest_free(size)
        reserved = False
        if piece == self.block_bytes or piece is None:
            whole = len(self._free[self.block_bytes]) + self.max_blocks - len(self._blocks)
            if whole <= self.readers + self._further_reserves:
                if not reserve or whole <= 0:
                    return None
                # The whole block: a piece of it would let others settle in the rest, and no head could move again.
                reserved, size = True, self.block_bytes
            piece = self.block_bytes
            if not self._free[piece]:
                try:
                    block = self._map_block(len(self._blocks))  # first: where there is none, nothing has changed
                    self._free[piece][len(self._blocks) * piece] = None
                    self._blocks.append(block)
                except OSError:
                    if reserve or not self.used_bytes:
                        raise
                    return None  # the system has no more: what is in use comes back
        address, _ = self._free[piece].popitem()
        while piece > size:
            piece //= 2
            self._free.setdefault(piece, {})[address + piece] = None
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Slab(address, size, self._view(address, size), reserved)

    def give_back(self, slab: Slab) -> None:
        """Return a slab; its ``view`` is released, so that a late reader fails instead of seeing other bytes."""
        slab.view.release()
        self.used_bytes -= slab.size
        address, size = slab.address, slab.size
        while size < self.block_bytes:
            buddy = address ^ size
            same = self._free.setdefault(size, {})
            if buddy not in same:
                break
            del same[buddy]
            address &= ~size
            size *= 2
        self._free[size][address] = None

    def close(self) -> None:
        """Let go of all memory now; a slab that is still held keeps its own block alive, nothing else does."""
        self._blocks.clear()
        self._free = {self.block_bytes: {}}

    def _map_block(self, number: int) -> mmap.mmap:
        return _map(self.block_bytes)

    def _smallest_free(self, size: int) -> int | None:
        while size <= self.block_bytes:
            if self._free.get(size):
                return size
            size *= 2
        return None

    def _view(self, address: int, size: int) -> memoryview:
        block, offset = divmod(address, self.block_bytes)
        return memoryview(self._blocks[block])[offset : offset + size]


class SharedSlabPool(SlabPool):
    """A pool whose memory another process can map: its blocks are those of a ``file`` without a name."""

    def __init__(self, budget_bytes: int, block_bytes: int) -> None:
        super().__init__(budget_bytes, block_bytes)
        self.file = os.memfd_create("wds-async-slabs")

    def _map_block(self, number: int) -> mmap.mmap:
        os.ftruncate(self.file, (number + 1) * self.block_bytes)
        return _map(self.block_bytes, self.file, number * self.block_bytes)

    def close(self) -> None:
        super().close()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class SlabView:
    """The memory of another process's `SharedSlabPool`, of which it has sent the ``file`` (taken over) and the size of
    a block."""

    def __init__(self, file: int, block_bytes: int) -> None:
        self._file, self._block_bytes = file, block_bytes
        self._blocks: dict[int, mmap.mmap] = {}

    def slab(self, address: int, size: int) -> Slab:
        """Return the slab at ``address`` of the pool."""
        number, offset = divmod(address, self._block_bytes)
        if number not in self._blocks:
            self._blocks[number] = _map(self._block_bytes, self._file, number * self._block_bytes)
        return Slab(address, size, memoryview(self._blocks[number])[offset : offset + size])

    def close(self) -> None:
        """Let go of all memory but that of slabs that are still held."""
        self._blocks.clear()
        os.close(self._file)


class SmallReserve:
    """Memory held back for a reader that has ``shards`` open at once: a slab of 64 KiB for each, cut from `blocks`
    reserved blocks of the pool. On the loop only."""

    def __init__(self, pool: SlabPool, shards: int) -> None:
        self._pool = pool
        self._each = pool.block_bytes // MIN_SLAB_BYTES
        self.blocks = -(-shards // self._each)
        """Blocks for `SlabPool.enter`."""
        self._taken: dict[int, Slab] = {}
        self._free: dict[int, list[int]] = {}

    def take(self) -> Slab | None:
        """Return a slab of 64 KiB; None where all are in use."""
        if not any(self._free.values()) and not self._take_block():
            return None
        address, offsets = next((address, offsets) for address, offsets in self._free.items() if offsets)
        offset = offsets.pop()
        view = self._taken[address].view[offset : offset + MIN_SLAB_BYTES]
        return Slab(address + offset, MIN_SLAB_BYTES, view, reserved=True)

    def _take_block(self) -> bool:
        size = self._pool.block_bytes
        block = self._pool.take(size, reserve=True) if len(self._taken) < self.blocks else None
        if block is None:
            return False
        self._taken[block.address] = block
        self._free[block.address] = list(range(0, size, MIN_SLAB_BYTES))
        return True

    def give_back(self, slab: Slab) -> None:
        """Return a slab; its ``view`` is released."""
        slab.view.release()
        offset = slab.address % self._pool.block_bytes
        offsets = self._free[slab.address - offset]
        offsets.append(offset)
        if len(offsets) == self._each:
            del self._free[slab.address - offset]
            self._pool.give_back(self._taken.pop(slab.address - offset))


def _map(size: int, file: int = -1, offset: int = 0) -> mmap.mmap:
    """Map shared memory, of a ``file`` or of this process and its forks, with all its pages where that can be had: one
    by one, when they are first written to, they cost twice the time."""
    if not hasattr(mmap, "MAP_POPULATE"):
        return mmap.mmap(file, size, offset=offset)
    anonymous = mmap.MAP_ANONYMOUS if file < 0 else 0
    return mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE | anonymous, offset=offset)


class SlabBudget:
    """Slabs of at most ``memory_bytes`` together, first come, first served; on the loop only. ValueError for less than
    64 KiB."""

    def __init__(self, memory_bytes: int) -> None:
        if memory_bytes < MIN_SLAB_BYTES:
            raise ValueError(f"memory of {memory_bytes} bytes: at least {MIN_SLAB_BYTES}")
        self.largest_bytes = min(LARGEST_BYTES, 1 << (memory_bytes.bit_length() - 1))
        """No slab is larger."""
        self._pool = SlabPool(memory_bytes, self.largest_bytes)
        self._waiting: deque[tuple[int, asyncio.Future[Slab]]] = deque()
        self._in_use: list[tuple[Slab, memoryview]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of the slabs that are taken."""
        return self._pool.used_bytes

    @property
    def crowded(self) -> bool:
        """True if a caller waits."""
        return bool(self._waiting)

    async def take(self, wanted_bytes: int) -> Slab:
        """Return a slab of at least so many bytes, once there is one. ValueError for more than `largest_bytes`."""
        if wanted_bytes > self.largest_bytes:
            raise ValueError(f"{wanted_bytes} bytes at once: at most {self.largest_bytes}")
        size = slab_bytes(wanted_bytes, self.largest_bytes)
        self.lend()
        slab = None if self._waiting else self._pool.take(size)
        if slab is not None:
            return slab
        future: asyncio.Future[Slab] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # given in this very turn
                self._pool.give_back(future.result())
            else:
                self._waiting = deque(each for each in self._waiting if each[1] is not future)
            self.lend()
            raise

    def give_back(self, slab: Slab, view: memoryview | None = None) -> None:
        """Take a slab back, with the ``view`` of it that was handed out: it is free once that is read no more (by a
        thread that writes it to a disk, say)."""
        if view is not None:
            try:
                view.release()
            except BufferError:
                self._in_use.append((slab, view))
                return
        self._pool.give_back(slab)
        self.lend()

    def lend(self) -> None:
        """Give what is free to the callers that wait."""
        if self._in_use:
            held, self._in_use = self._in_use, []
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
        """Let go of all memory that is not taken."""
        self._pool.close()
