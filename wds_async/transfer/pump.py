"""Drives one window on the loop: starts its parts, hands on what is ready, cleans up after shards that are over."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Sequence

from wds_async.config import TransferConfig
from wds_async.errors import ReaderClosed, WdsError
from wds_async.storage.registry import Location
from wds_async.transfer.fetch import Fetcher
from wds_async.transfer.resources import Equipment
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.slabs import Slab, SlabPool
from wds_async.transfer.stats import Counters, ThreadClock
from wds_async.transfer.window import Broken, End, Finished, Part, Piece, Shard, Window

__all__ = ["Event", "Hand", "Pump"]

logger = logging.getLogger("wds_async")

Event = Piece | End | Finished | Broken

_LOOK_EVERY_S = 1.0


class Hand:
    """What a pump hands to the consumer's thread: events in stream order. Holds no reference to the reader, whose time
    without an event it counts in ``counters``."""

    def __init__(self, counters: Counters) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.waiting = False
        """Whether the consumer has nothing else to do."""
        self._counters = counters
        self.clock = ThreadClock(counters)

    def take(self, alive: Callable[[], bool]) -> Event:
        """The next event, waiting for it if need be. ReaderClosed once ``alive`` says that none will come."""
        self.clock.look()
        try:
            return self.events.get_nowait()
        except queue.Empty:
            pass
        began = time.monotonic()
        self.waiting = True
        try:
            while True:
                try:
                    return self.events.get(timeout=_LOOK_EVERY_S)
                except queue.Empty:
                    if not alive():
                        raise ReaderClosed("this reader was closed; iterate over the dataset again") from None
        finally:
            self.waiting = False
            self._counters.add("wait_s", time.monotonic() - began)


class Pump:
    """One reader's side of the engine; every method but the constructor runs on the loop."""

    def __init__(
        self,
        pool: SlabPool,
        *,
        equipment: Equipment,
        config: TransferConfig,
        counters: Counters,
        emit: Callable[[Event], None],
        hurried: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._connections = equipment.connections
        self._backends = equipment.backends
        self.counters = counters
        self._emit = emit
        self._tasks: dict[Part, asyncio.Task[None]] = {}
        self._begun: set[Part] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._kicking = False
        self._config = config
        self._held = (0.0, 0.0)  # since when how much of the budget is taken
        self.window = Window(pool, config, self._hand_on, self._cancel)
        self._fetcher = Fetcher(
            self.window,
            equipment=equipment,
            config=config,
            counters=counters,
            hurried=hurried,
        )

    def open(self) -> None:
        """Take a place among the pool's readers."""
        self._pool.readers += 1
        self.counters.set("budget_bytes", self._pool.budget_bytes)
        self.counters.set("connections_most", self._config.connections)

    def add(self, shards: Sequence[tuple[str, Location | WdsError]], *, ended: bool) -> None:
        """Append shards to the stream; ``ended`` says that no more will come."""
        for url, located in shards:
            if isinstance(located, WdsError):
                self.window.add(url, error=located)
            else:
                shard = self.window.add(url, streamed=located.in_order)
                shard.state = ShardState(located)
                if located.spec.announced and located.entry is None:
                    self._backends.of(located).expect((located.target,))
        if ended:
            self.window.end_of_source()
        self.kick()

    def release(self, slabs: Sequence[Slab]) -> None:
        """The consumer is done with these."""
        for slab in slabs:
            self.window.release(slab)
        self.kick()

    def skip(self, number: int) -> None:
        """The consumer wants no more of its shard ``number``."""
        self.window.skip(number)
        self.kick()

    def kick(self) -> None:
        """Hand on what is ready and start what may start."""
        if self._closed or self._kicking:
            return
        self._kicking = True
        try:
            self.window.deliver()
            for part in self.window.plan():
                self._tasks[part] = asyncio.get_running_loop().create_task(self._fetch(part))
        except Exception as exn:  # nobody else would see it, and the consumer would wait for ever
            self._emit(Broken(exn))
        finally:
            self._kicking = False
        now, (since, share) = time.monotonic(), self._held
        self.counters.add("full_s", (now - since) * share)
        self._held = now, min(1.0, self.window.held_bytes / self._pool.budget_bytes)
        self.counters.set("window_bytes", self.window.held_bytes)
        self.counters.peak("window_peak_bytes", self.window.peak_bytes)
        self.counters.set("connections", self._connections.open)
        self.counters.peak("connections_peak", self._connections.peak)
        self.counters.set("connections_limit", self.window.concurrency.limit)
        self.counters.set("slowdown", self.window.concurrency.slowdown)

    async def close(self) -> None:
        """Cancel everything and wait until no slab is being written to."""
        if self._closed:
            return
        self._closed = True
        for shard in self.window.close():
            self._clean(shard)  # at once, or by the last of its tasks, which were cancelled
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._fetcher.end()
        self._pool.readers -= 1
        self.counters.set("window_bytes", 0)
        self.counters.set("connections", 0)
        self.counters.leave_traffic()

    async def _fetch(self, part: Part) -> None:
        last = False
        self._begun.add(part)
        try:
            last = not part.dropped and await self._fetcher.fetch(part)
        except asyncio.CancelledError:
            if not part.dropped:
                part.error = WdsError(f"{part.shard.url}: the read was cancelled")
        except Exception as exn:
            part.error = exn
        finally:
            del self._tasks[part]
            self._begun.discard(part)
            self.window.landed(part, last=last)
            if part.shard.gone:
                self._clean(part.shard)
            self.kick()

    def _hand_on(self, event: Event) -> None:
        if isinstance(event, Piece):
            self.counters.add("bytes", event.length)
        elif isinstance(event, End):
            self.counters.add("bad_shards" if event.error else "shards")
            self._clean(event.shard)
        self._emit(event)

    def _clean(self, shard: Shard) -> None:
        if shard.flying == 0 and shard.state is not None:
            state, shard.state = shard.state, None
            if not state.closed:
                task = asyncio.get_running_loop().create_task(state.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _cancel(self, part: Part) -> None:
        # A part that is judging its own answer ends by itself, and keeps its connection. One that has not begun sees
        # that it was dropped; a task that is cancelled before its first step never runs, and would never land.
        if part is not self._fetcher.answering and part in self._begun:
            self._tasks[part].cancel()
