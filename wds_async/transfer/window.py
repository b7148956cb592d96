"""The window of parts: which bytes to request next, and which may be handed on. No I/O, no clock, no threads.

Parts start in stream order as memory, connections and the consumer allow, and are delivered in stream order. Progress
is certain: one block of the pool is held back for the head of the line, the first part not yet delivered.
"""

from __future__ import annotations

import bisect
import heapq
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wds_async.config import TransferConfig
from wds_async.transfer.concurrency import Concurrency
from wds_async.transfer.slabs import Slab, SlabPool, slab_bytes

__all__ = ["End", "Event", "Finished", "Part", "Piece", "Shard", "Window"]

_UNKNOWN_PART_BYTES = 1 << 20
_SIZES_REMEMBERED = 64
_FIRST_ALLOWANCE_BYTES = 1 << 20
_ALLOWANCE_GROWTH = 8
# Parts in memory for each that may be in flight. From a server a millisecond away what is read far ahead only costs
# memory, and the time to touch it; from a store 50 ms away this is more than any budget.
_DEPTH = 4


@dataclass(slots=True, eq=False)
class Part:
    """Bytes ``[start, stop)`` of a shard on their way into ``slab``, of which ``filled`` have arrived.

    A part that was started ahead of its memory has an empty slab until it is ``backed``; then ``on_memory`` is called.
    """

    shard: Shard
    start: int
    stop: int
    slab: Slab
    filled: int = 0
    ready: bool = False
    dropped: bool = False
    flying: bool = True
    error: Exception | None = None
    backed: bool = True
    on_memory: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Shard:
    """The plan of one shard, or of bytes ``[start, stop)`` of it (``stop`` None: to its end). ``size`` is that of the
    whole object, None until an answer gives it, and ``end`` where the plan ends, as far as it is known; ``state`` is
    for the fetcher (`ShardState`); ``error`` ends the shard behind its good bytes."""

    number: int
    url: str
    streamed: bool = False
    start: int = 0
    stop: int | None = None
    size: int | None = None
    end: int | None = None
    planned: int = 0
    finished: bool = False
    flying: int = 0
    gone: bool = False
    parts: deque[Part] = field(default_factory=deque)
    error: Exception | None = None
    state: Any = None
    held_bytes: int = 0
    """Memory of its parts and of the pieces that the consumer has, where several shards are open at once."""

    @property
    def complete(self) -> bool:
        """Nothing is left to plan."""
        return self.finished or (self.end is not None and self.planned >= self.end)


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` bytes of a shard, next in its order; the slab comes back through `Window.release`."""

    shard: Shard
    slab: Slab
    length: int


@dataclass(frozen=True, slots=True)
class End:
    """End of a shard: whole, or broken here by its ``error``."""

    shard: Shard


@dataclass(frozen=True, slots=True)
class Finished:
    """End of the stream; with an ``error`` where the engine itself failed (no memory, a fault of ours)."""

    error: Exception | None = None


Event = Piece | End | Finished


class Window:
    """The plan of one reader. ``emit`` takes `Piece`, `End` and `Finished` in stream order; ``cancel`` parts in flight
    that are not needed any more (they end by `landed`, as all others do)."""

    def __init__(
        self,
        pool: SlabPool,
        config: TransferConfig,
        emit: Callable[[Event], None],
        cancel: Callable[[Part], None],
    ) -> None:
        self.config = config
        self.concurrency = Concurrency(config.connections, config.processes)
        self.held_bytes = 0
        self.peak_bytes = 0
        self.flying = 0
        self._pool = pool
        self._emit = emit
        self._cancel = cancel
        self._shards: dict[int, Shard] = {}
        self._next_number = 0
        self._unplanned: list[int] = []
        self._ahead: list[Part] = []
        self._sizes: deque[int] = deque(maxlen=_SIZES_REMEMBERED)
        self._guess: int | None = None
        self._largest_bytes = pool.block_bytes
        self._ramp = min(config.first_part_bytes, pool.block_bytes)
        self._allowance_bytes = _FIRST_ALLOWANCE_BYTES
        self._started_bytes = 0
        self._released_bytes = 0
        self._reserve_in_use = False
        self._source_ended = False
        self._handed: set[Slab] = set()
        self.reserved_blocks = 1
        """Blocks of the pool that are held back for this reader."""

    def opened(self, number: int) -> None:
        """Note that the consumer has opened shard ``number``; it matters where it may have several open."""

    def add(
        self,
        url: str,
        *,
        number: int | None = None,
        streamed: bool = False,
        start: int = 0,
        stop: int | None = None,
        error: Exception | None = None,
        state: Any = None,
    ) -> Shard:
        """Append a shard, or bytes ``[start, stop)`` of it, to the stream; one with an ``error`` ends there at once.
        Its ``number`` is larger than that of any before it, by default the next."""
        number = self._next_number if number is None else number
        shard = Shard(number, url, streamed, start, stop, end=stop, planned=start, error=error, state=state)
        self._next_number = number + 1
        self._shards[shard.number] = shard
        if error is None:
            heapq.heappush(self._unplanned, shard.number)
        return shard

    def end_of_source(self) -> None:
        """Note that no shard will be added any more."""
        self._source_ended = True

    def release(self, slab: Slab) -> None:
        """Take back a slab that the consumer has read."""
        if slab not in self._handed:
            return  # it came back by `close` already
        self._released_bytes += slab.size
        self._free(slab)

    def skip(self, number: int) -> None:
        """Drop the rest of a shard; its `End` follows, unless it was emitted before."""
        shard = self._shards.get(number)
        if shard is not None:
            self._drop_parts(shard)
            shard.finished = shard.streamed = True

    def close(self) -> list[Shard]:
        """Drop everything, and emit no more. Return the shards that were not over."""
        shards = list(self._shards.values())
        for shard in shards:
            self._drop_parts(shard)
            shard.gone = True
        self._shards.clear()
        self._unplanned.clear()
        self._source_ended = False
        for slab in list(self._handed):
            self._free(slab)
        return shards

    def learn(self, shard: Shard, size: int) -> None:
        """Take a shard's size from an answer."""
        if shard.size is not None or shard.streamed:
            return
        shard.size = size
        shard.end = end = size if shard.stop is None else min(size, shard.stop)
        self._sizes.append(size)
        self._guess = int(statistics.median_high(self._sizes))
        for part in list(shard.parts):
            if part.start >= end:
                self._drop(part)
            else:
                part.stop = min(part.stop, end)
        if shard.planned < end and not shard.gone:
            heapq.heappush(self._unplanned, shard.number)

    def turn_streamed(self, part: Part) -> bool:
        """Go on with the shard of ``part`` as a stream that begins there: it cannot be read in ranges. False, and
        nothing changes, while an earlier part of the shard is still in flight."""
        shard = part.shard
        if part.dropped or any(not earlier.ready for earlier in shard.parts if earlier.start < part.start):
            return False
        for other in [later for later in shard.parts if later.start > part.start]:
            self._drop(other)
        shard.streamed, shard.size, shard.end, shard.planned = True, None, shard.stop, part.start
        return True

    def turn_ranged(self, part: Part) -> None:
        """Go on in ranges with the shard of ``part``, a stream until now: first with the rest of ``part``."""
        shard = part.shard
        if shard.streamed and not part.dropped:
            part.stop = max(part.stop, part.start + part.filled)  # its slab may have room for more than was planned
            shard.streamed, shard.size, shard.end, shard.planned = False, None, shard.stop, part.stop

    def landed(self, part: Part, *, last: bool = False, error: Exception | None = None) -> None:
        """Take a part that is written no more: it is ready, or ended by ``error``, or was dropped. ``last`` ends a
        streamed shard behind it."""
        shard = part.shard
        part.error = error
        part.flying = False
        shard.flying -= 1
        self.flying -= 1
        if part in self._ahead:
            self._ahead.remove(part)
        if part.dropped:
            self._free(part.slab)
            return
        part.ready = part.error is None
        if shard.streamed:
            shard.planned = part.start + part.filled
            shard.finished = last
            if not last and part.ready and not shard.gone:
                heapq.heappush(self._unplanned, shard.number)

    def plan(self) -> list[Part]:
        """Start every part that may start now, each with its slab or ahead of it."""
        started: list[Part] = []
        self._back_parts()
        while self._unplanned:
            shard = self._shards.get(self._unplanned[0])
            size = 0 if shard is None or shard.gone else self._next_slab_bytes(shard)
            if shard is None or size == 0:
                heapq.heappop(self._unplanned)
                continue
            head = not shard.parts and shard.number == next(iter(self._shards))
            slab = None
            # A shard that goes on, a stream or one longer than was thought, comes before those that wait for memory.
            first = not self._ahead or shard.number < self._ahead[0].shard.number
            if first and self._may_start(shard, size, head=head):
                slab = self._pool.take(size, reserve=head and not self._reserve_in_use)
            if slab is not None:
                started.append(self._start(shard, slab, slab.size))
            elif self._may_start_ahead(shard, size):
                part = self._start(shard, Slab(0, 0, memoryview(b"")), size, backed=False)
                bisect.insort(self._ahead, part, key=lambda part: (part.shard.number, part.start))
                started.append(part)
            else:
                break
        # As if this reader had the whole limit: what it shares with others is theirs, and not left over.
        self.concurrency.in_flight((self.flying - len(self._ahead)) * max(1, self._pool.readers))
        return started

    def _back_parts(self) -> None:
        """Give memory to the parts that were started ahead of it, in stream order."""
        while self._ahead:
            part = self._ahead[0]
            if part.dropped:
                self._ahead.pop(0)
                continue
            size = slab_bytes(part.stop - part.start, self._pool.block_bytes)
            head = part.shard.number == next(iter(self._shards)) and part.shard.parts[0] is part
            if not head and self.held_bytes + size > self._pool.budget_bytes // max(1, self._pool.readers):
                return
            slab = self._pool.take(size, reserve=head and not self._reserve_in_use)
            if slab is None:
                return
            self._ahead.pop(0)
            self._hold(slab)
            part.slab, part.backed = slab, True
            if part.on_memory is not None:
                part.on_memory()

    def _may_start_ahead(self, shard: Shard, size: int) -> bool:
        """Return whether a part may be requested before it has memory: over a line that fails now and then, while the
        consumer has nothing. Then all memory waits for one part, and each released slab would wait a round trip for its
        first byte. What arrives meanwhile stays in the sockets of half of the connections at most."""
        room = max(1, self.concurrency.room // max(1, self._pool.readers))
        sized = not shard.streamed and (shard.end is not None or self._guess is not None)
        blocked = self.concurrency.rough > 0 and not self._handed and self._allowed(size)
        return blocked and sized and self.flying < room and len(self._ahead) < room // 2

    def deliver(self) -> None:
        """Emit whatever is next in stream order and there."""
        while self._shards and self._deliver_of(next(iter(self._shards.values()))):
            pass
        self._deliver_end()

    def _deliver_of(self, shard: Shard) -> bool:
        """Emit whatever is next of ``shard`` and there. Return whether it is over."""
        while shard.parts and not shard.parts[0].flying and shard.error is None:
            part = shard.parts.popleft()
            shard.error = part.error  # behind the good bytes that came before it
            if part.filled:
                self._handed.add(part.slab)
                self._emit(Piece(shard, part.slab, part.filled))
            else:
                self._free(part.slab)
        if shard.error is None and (shard.parts or not shard.complete):
            return False
        self._drop_parts(shard)
        shard.gone = True
        del self._shards[shard.number]
        self._emit(End(shard))
        return True

    def _deliver_end(self) -> None:
        """Emit the end of the stream, once all shards are over."""
        if self._source_ended and not self._shards:
            self._source_ended = False
            self._emit(Finished())

    def _next_slab_bytes(self, shard: Shard) -> int:
        """Return the size of the slab for the shard's next part; 0 while it needs none."""
        most = min(self._ramp, self._largest_bytes)
        if shard.streamed:
            busy = shard.finished or (shard.parts and not shard.parts[-1].ready)
            rest = most if shard.end is None else shard.end - shard.planned
            rest = 0 if busy else rest
        elif shard.end is not None:
            rest = shard.end - shard.planned
        elif self._guess is None:
            rest = _UNKNOWN_PART_BYTES - (shard.planned - shard.start)
        elif shard.planned == shard.start:
            # An eighth more than the median for a first part: shards of one dataset differ a little.
            rest = max(1, self._guess + self._guess // 8 - shard.start)
        else:
            rest = self._guess - shard.planned
        return slab_bytes(min(rest, most), most) if rest > 0 else 0

    def _may_start(self, shard: Shard, size: int, *, head: bool) -> bool:
        """Return whether a part may start. The head of the line may, unless the consumer has pieces before it and took
        so little until now that it may never want more."""
        if head and not self._handed:
            return True
        if not self._allowed(size):
            return False
        if head:
            return True
        if self.held_bytes + size > self._most_bytes():
            return False
        if shard.streamed:
            return shard.number - next(iter(self._shards)) < self.config.open_streams
        if shard.end is None and self._guess is None and self.held_bytes + size > self._pool.budget_bytes // 4:
            return False
        return self._has_room()

    def _most_bytes(self) -> int:
        """Return how much memory this reader may hold."""
        most = self._pool.budget_bytes // max(1, self._pool.readers)
        if self.concurrency.rough:
            return most
        return min(most, _DEPTH * self.concurrency.limit * self._pool.block_bytes)

    def _has_room(self) -> bool:
        """Return whether one part more may be in flight."""
        return self.flying < max(1, self.concurrency.room // max(1, self._pool.readers))

    def _allowed(self, size: int) -> bool:
        """Return whether the consumer has taken enough for so many bytes more to be requested."""
        allowance = self._allowance_bytes + _ALLOWANCE_GROWTH * self._released_bytes
        return self._started_bytes + size <= allowance or self._released_bytes >= self._pool.budget_bytes

    def _start(self, shard: Shard, slab: Slab, size: int, *, backed: bool = True) -> Part:
        stop = shard.planned + size
        if shard.end is not None:
            stop = min(stop, shard.end)
        part = Part(shard, shard.planned, stop, slab, backed=backed)
        shard.parts.append(part)
        shard.planned = stop
        shard.flying += 1
        self.flying += 1
        self._ramp = min(2 * self._ramp, self._pool.block_bytes)
        self._started_bytes += size
        self.concurrency.started()
        self._hold(slab)
        return part

    def _hold(self, slab: Slab) -> None:
        self._reserve_in_use = self._reserve_in_use or slab.reserved
        self.held_bytes += slab.size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _drop_parts(self, shard: Shard) -> None:
        for part in list(shard.parts):
            self._drop(part)

    def _drop(self, part: Part) -> None:
        part.shard.parts.remove(part)
        part.dropped = True
        if part.flying:
            self._cancel(part)
        else:
            self._free(part.slab)

    def _free(self, slab: Slab) -> None:
        if not slab.size:
            return
        self._handed.discard(slab)
        self.held_bytes -= slab.size
        if slab.reserved:
            self._reserve_in_use = False
        self._pool.give_back(slab)
