"""The window of a reader whose consumer has several shards open at once, and takes from any of them.

The open shards share the memory equally, and what is left over is for the shards behind them. Progress is certain: for
each shard that the consumer has open, a slab of 64 KiB is held back in the pool, for when all other memory is in use.
A consumer of ``interleave`` shards may have twice as many open for a moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from wds_async.transfer.options import ReadOptions
from wds_async.transfer.slabs import MIN_SLAB_BYTES, Slab, SlabPool, SmallReserve
from wds_async.transfer.window import Event, Part, Shard, Window

__all__ = ["InterleavedWindow", "window_of"]

_SLABS_EACH = 2
"""Parts of each open shard that fit into its share of the memory: one is read, the others are on their way."""


def window_of(
    pool: SlabPool, options: ReadOptions, emit: Callable[[Event], None], cancel: Callable[[Part], None]
) -> Window:
    """Return the window of a reader with these options."""
    if options.interleave == 1:
        return Window(pool, options.config, emit, cancel)
    return InterleavedWindow(pool, options, emit, cancel)


class InterleavedWindow(Window):
    """The plan of a reader with up to ``interleave`` shards open. ``emit`` takes the pieces of each shard in their
    order, and those of different shards in any."""

    def __init__(
        self, pool: SlabPool, options: ReadOptions, emit: Callable[[Event], None], cancel: Callable[[Part], None]
    ) -> None:
        super().__init__(pool, options.config, emit, cancel)
        self._most_open = options.interleave
        self._opened = 0
        """The consumer has opened the shards below this number."""
        self._begun = 0
        self._allowance_bytes += options.interleave * self._ramp
        # Behind the last sample of a shard, the next one may be open before that one is closed.
        self._reserve = SmallReserve(pool, 2 * options.interleave)
        self._owners: dict[Slab, Shard] = {}
        self.reserved_blocks = self._reserve.blocks

    def opened(self, number: int) -> None:
        self._opened = max(self._opened, number + 1)

    def _open(self) -> list[Shard]:
        """Return the shards that the consumer has open, or opens first, of which something is still to come."""
        end, open_shards = max(self._opened, self._most_open), []
        for shard in self._shards.values():
            if shard.number >= end:
                break
            open_shards.append(shard)
        return open_shards

    def deliver(self) -> None:
        for shard in self._open():
            if not shard.parts or not shard.parts[0].flying:
                self._deliver_of(shard)
        self._deliver_end()

    def plan(self) -> list[Part]:
        started: list[Part] = []
        self._largest_bytes = self._part_bytes()
        # Room comes first: to choose looks at every open shard.
        while self._has_room() and (chosen := self._choose()) is not None:
            shard, size = chosen
            # Its consumer waits, or will: it has nothing of this shard, and nothing is on its way.
            needed = not shard.held_bytes and shard.number < self._opened
            slab = None
            if self._may_start(shard, size, head=needed):
                slab = self._pool.take(size) or (self._reserve.take() if needed else None)
            if slab is None:
                break
            started.append(self._start(shard, slab, slab.size))
        self.concurrency.in_flight(self.flying * max(1, self._pool.readers))
        return started

    def _part_bytes(self) -> int:
        """Return the most that a part has now: a power of two, so that several of each open shard fit into memory."""
        most = self._most_bytes() // (_SLABS_EACH * self._most_open)
        return min(max(1 << max(0, most.bit_length() - 1), MIN_SLAB_BYTES), self._pool.block_bytes)

    def _choose(self) -> tuple[Shard, int] | None:
        """Return the shard whose next part is to start first, and the size of its slab: the open one that has the least
        memory, up to its share; then those behind them, with the memory that the open ones leave."""
        shards, most = self._open(), self._most_bytes()
        share = most // self._most_open
        least: tuple[Shard, int] | None = None
        owed = 0
        for shard in shards:
            size = self._next_slab_bytes(shard)
            if size:
                owed += max(0, share - shard.held_bytes)
                if least is None or shard.held_bytes < least[0].held_bytes:
                    least = shard, size
        if least is not None and (not least[0].held_bytes or least[0].held_bytes + least[1] <= share):
            return least
        behind = self._behind(shards[-1].number if shards else -1)
        if behind is None:
            return least
        return behind if self.held_bytes + behind[1] + owed <= most else None

    def _behind(self, last_open: int) -> tuple[Shard, int] | None:
        """Return the first shard behind the open ones that has something to plan, and the size of its next slab."""
        while self._unplanned:
            shard = self._shards.get(self._unplanned[0])
            size = 0 if shard is None or shard.gone or shard.number <= last_open else self._next_slab_bytes(shard)
            if shard is not None and size:
                return shard, size
            heapq.heappop(self._unplanned)
        return None

    def _may_start(self, shard: Shard, size: int, *, head: bool) -> bool:
        if head:
            return True
        if not self._allowed(size) or self.held_bytes + size > self._most_bytes():
            return False
        ahead = shard.number - next(iter(self._shards))
        if shard.streamed:
            return ahead < max(self._most_open, self.config.open_streams)
        is_sized = shard.end is not None or self._guess is not None
        return is_sized or ahead < self._most_open or self.held_bytes + size <= self._pool.budget_bytes // 4

    def _start(self, shard: Shard, slab: Slab, size: int, *, backed: bool = True) -> Part:
        part = super()._start(shard, slab, size, backed=backed)
        shard.held_bytes += slab.size
        self._owners[slab] = shard
        self._begun += 1
        doublings = min(self._begun // self._most_open, 16)
        self._ramp = min(self.config.first_part_bytes << doublings, self._pool.block_bytes)
        return part

    def _free(self, slab: Slab) -> None:
        shard = self._owners.pop(slab, None)
        if shard is not None:
            shard.held_bytes -= slab.size
        if not slab.reserved:
            super()._free(slab)
            return
        self._handed.discard(slab)
        self.held_bytes -= slab.size
        self._reserve.give_back(slab)
