"""The loop thread, one a process, and each reader's side of it (`Pump`).

The thread lives while a reader is open, and half a second longer: the reader of the next epoch finds its connections
and its memory. A forked child forgets the engine it inherited: it neither closes nor stops anything of the parent's,
because the two share sockets and an epoll.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from wds_async import environment
from wds_async.background import LoopThread, end_with_parent, uvloop_or_none
from wds_async.config import TransferConfig
from wds_async.errors import ReaderClosed, WdsError
from wds_async.storage.base import Location
from wds_async.transfer.fetch import Fetcher
from wds_async.transfer.interleaved_window import window_of
from wds_async.transfer.options import ReadOptions, Span
from wds_async.transfer.resources import Resources
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.slabs import Slab, SlabPool
from wds_async.transfer.stats import Counters, ThreadClock, idle_s
from wds_async.transfer.window import End, Event, Finished, Part, Piece, Shard

__all__ = [
    "Engine",
    "EventQueue",
    "EventSink",
    "Pump",
    "QueuedShard",
    "crowded",
    "end_idle",
    "end_with_worker",
    "prepare",
]

logger = logging.getLogger("wds_async")

_STOP_WITHIN_S = 2.0
_LINGER_S = 0.5
_LOCK_WITHIN_S = 0.05
_DEFAULT_SWITCH_INTERVAL_S = 0.005
_CHECK_EVERY_S = 1.0
_CROWDED = 0.8
_BUSY_AT_LEAST = 0.1
_IDLE_AT_LEAST = 0.5
"""Cores, of those that this process may use."""
_CLOSED = "this reader was closed; iterate over the dataset again"
T = TypeVar("T")
QueuedShard = tuple[int, str, Location | WdsError, Span]
"""Number in the stream, URL, place (or the error in its stead) and span of a shard."""

_current: Engine | None = None
_retired: Engine | None = None
_exiting = False
_lock = threading.Lock()
# Engines of the parent, kept so that no finalizer of theirs ever runs in a forked child.
_inherited: list[Engine] = []


# Why the loop thread and the program's own hold each other up, once that was seen.
_crowding = ""


def crowded() -> str:
    """Return why the engine is better run in another process, as far as was seen in this one; "" where it is not."""
    return _crowding


def prepare() -> None:
    """Import what the engine will import, for a process whose children will run it. Starts nothing."""
    uvloop_or_none()
    if environment.value("WDS_ENGINE") != "thread":
        import wds_async.child_process  # noqa: F401, PLC0415 (subprocess, multiprocessing)


class EventSink(Protocol):
    """Protocol: taker of a reader's events, as its pump uses it."""

    flying: int

    @property
    def waiting(self) -> bool: ...

    def put(self, event: Event, /) -> None: ...


class EventQueue:
    """Events in stream order, from the loop to the consumer's thread, whose waiting is counted. It has no reference to
    the reader, so that an abandoned reader is collected."""

    def __init__(self, counters: Counters) -> None:
        self.waiting = False
        """True while the consumer has nothing else to do."""
        self.flying = 0
        """Parts on their way, as of the last change."""
        self.clock = ThreadClock(counters)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._counters = counters

    def put(self, event: Event) -> None:
        """Append an event."""
        self._events.put(event)

    def poll(self) -> Event | None:
        """Return the next event if it is there."""
        return None if self._events.empty() else self._events.get_nowait()

    def get(self, alive: Callable[[], bool]) -> Event:
        """Return the next event, waiting for it if need be. ReaderClosed where none will come: ``alive()`` is False."""
        self.clock.look()
        try:
            return self._events.get_nowait()
        except queue.Empty:
            pass
        began = time.monotonic()
        self.waiting = True
        try:
            while True:
                try:
                    return self._wait(_CHECK_EVERY_S)
                except queue.Empty:
                    if not alive():
                        raise ReaderClosed(_CLOSED) from None
        finally:
            self.waiting = False
            self._counters.add("wait_s", time.monotonic() - began)

    def _wait(self, within_s: float) -> Event:
        """Return the next event. Raise queue.Empty if none comes ``within_s``."""
        return self._events.get(timeout=within_s)


class Engine:
    """The running loop with what its readers share: slabs, connections, backends, threads.

    The first reader's configuration decides until the last reader has gone, but for what concerns one reader only:
    retries and hedging. An engine without readers is taken over by a reader of the same configuration in the same
    environment, where credentials may come from; another reader ends it and starts its own. One whose last reader met
    an error ends at once, since what it remembers may be the cause.
    """

    def __init__(self, config: TransferConfig, slabs: SlabPool | None = None) -> None:
        self.config = config
        self.slabs = slabs or SlabPool(config.budget_bytes, config.part_bytes)
        self.thread = LoopThread("wds-async")
        self.resources = Resources(config, self.thread.loop)
        self.backends = self.resources.backends
        self._environment = environment.snapshot()
        self._pumps: set[Pump] = set()
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._lingering: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._switch_interval_s: float | None = None
        self._looked: dict[Counters, tuple[float, float]] = {}
        self._computed = (0.0, 0.0, 0.0)

    @staticmethod
    def acquire(options: ReadOptions, events: EventSink, pool: type[SlabPool] = SlabPool) -> tuple[Engine, Pump]:
        """Return a pump on this process's engine, which is started if need be, with memory of a ``pool``. Give it back
        by `release`."""
        global _current
        end_idle(unless=options.config)
        with _lock:
            if _current is None:
                _current = Engine(options.config, pool(options.config.budget_bytes, options.config.part_bytes))
                _current.start()
            engine = _current
            if not engine._pumps:
                engine.lower_switch_interval()
            own = options.config
            config = replace(engine.config, retry=own.retry, hedge_share=own.hedge_share)
            pump = Pump(engine.slabs, engine.resources, replace(options, config=config), events)
            engine._pumps.add(pump)
        end_with_worker()
        engine.submit(pump.open)
        return engine, pump

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``function`` on the loop soon; nothing happens once the engine has stopped."""
        self.thread.submit(function, *args, **kwargs)

    def run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``work`` on the loop, and return its future. ReaderClosed once the engine has stopped."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.thread.loop)
        except RuntimeError:
            work.close()
            raise ReaderClosed(_CLOSED) from None

    @property
    def alive(self) -> bool:
        """True if the loop thread is running."""
        return self.thread.alive

    def release(self, pump: Pump) -> None:
        """End a pump; the last one has ended when this returns. Idempotent, and harmless in a forked child."""
        if self in _inherited:
            return
        # A garbage collection within `acquire` may end up here, on the thread that holds the lock.
        if not _lock.acquire(timeout=_LOCK_WITHIN_S):
            self.submit(self.release, pump)
            return
        try:
            if pump not in self._pumps:
                return
            self._pumps.discard(pump)
            last = not self._pumps
            if last:
                self.restore_switch_interval()
        finally:
            _lock.release()
        closed = threading.Event()
        if self.thread.submit(self._close, pump, closed.set) and last:
            self.thread.wait(closed, _STOP_WITHIN_S)
        if last and (pump.failed or _exiting):
            end_idle()

    def start(self) -> None:
        """Start the loop thread."""
        self.thread.start()
        self.submit(self._start_watch)

    def lower_switch_interval(self) -> None:
        """Lower the switch interval unless the program has set its own: a consumer in pure Python would hold the GIL
        5 ms for each time that the loop thread wants it."""
        before_s = sys.getswitchinterval()
        if math.isclose(before_s, _DEFAULT_SWITCH_INTERVAL_S, rel_tol=0.01):
            self._switch_interval_s = before_s
            sys.setswitchinterval(self.config.switch_interval_s)

    def restore_switch_interval(self) -> None:
        """Set the interval of the program again, if this engine has changed it."""
        before_s, self._switch_interval_s = self._switch_interval_s, None
        # CPython counts whole microseconds and gives 4.9999999999999996e-05 for 5e-5.
        if before_s and math.isclose(sys.getswitchinterval(), self.config.switch_interval_s, rel_tol=0.01):
            sys.setswitchinterval(before_s)

    def retire(self, unless: TransferConfig | None = None) -> bool:
        """Begin to end, if this is the process's engine and has no reader; not if a reader with the configuration
        ``unless`` may take it over. Return whether it ends."""
        global _current, _retired
        with _lock:
            if _current is not self or self._pumps:
                return False
            if unless == self.config and self.alive and self._environment == environment.snapshot():
                return False
            _current, _retired = None, self
        self.submit(self._stop)
        return True

    def _start_watch(self) -> None:
        self._watching = self.thread.loop.create_task(self.resources.watch(self._publish_traffic))

    def _close(self, pump: Pump, closed: Callable[[], None]) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        self._lingering = self.thread.loop.call_later(_LINGER_S, self.retire)
        task = self.thread.loop.create_task(pump.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.add_done_callback(lambda _: closed())

    def _stop(self) -> None:
        self._stopping = self.thread.loop.create_task(self._shut_down())

    def _publish_traffic(self) -> None:
        for pump in list(self._pumps):
            pump.counters.leave_traffic()
        self._look_for_crowding()

    def _look_for_crowding(self) -> None:
        """Note it if, in the last second, this thread and one that reads were busy for most of the time, and a core had
        nothing to do for half of it: in pure Python the two take turns, each turn costs, and a process has room."""
        global _crowding
        if _crowding:
            return
        now, (computed_s, idle_before_s, at) = time.monotonic(), self._computed
        self._computed = time.thread_time(), idle_s(), now
        passed_s = max(now - at, _CHECK_EVERY_S / 4)
        loop_share, idle = (self._computed[0] - computed_s) / passed_s, (self._computed[1] - idle_before_s) / passed_s
        before = self._looked
        self._looked = {one: (one.get("thread_s"), one.get("cpu_s")) for one in {pump.counters for pump in self._pumps}}
        for counters, (read_s, busy_s) in self._looked.items():
            then = before.get(counters, (read_s, busy_s))
            share = (busy_s - then[1]) / max(read_s - then[0], _CHECK_EVERY_S / 4)
            crowded = min(share, loop_share) >= _BUSY_AT_LEAST and share + loop_share >= _CROWDED
            if crowded and idle >= _IDLE_AT_LEAST:
                _crowding = (
                    f"the thread that reads computed {share:.0%} of the time, the engine's {loop_share:.0%}, and"
                    f" {idle:.1f} cores were idle"
                )
                logger.info("WDS_ENGINE=process may read faster here: %s", _crowding)
                return

    async def _shut_down(self) -> None:
        try:
            async with asyncio.timeout(_STOP_WITHIN_S - _LINGER_S):
                await asyncio.gather(*self._closing, return_exceptions=True)
                await self.backends.close()
        except TimeoutError:
            pass  # a file server that does not answer holds a daemon thread, not the exit
        finally:
            self.slabs.close()  # now, not when the cyclic collector comes by: an epoch's budget is a lot to leave
            await self.resources.close()
            self.thread.loop.stop()


class Pump:
    """One reader's side of the engine: starts the parts of its window, hands on what is ready, and cleans up behind
    shards that are over. Every method but the constructor runs on the loop."""

    def __init__(self, slabs: SlabPool, resources: Resources, options: ReadOptions, events: EventSink) -> None:
        self.counters = options.counters
        self._config = options.config
        self._slabs = slabs
        self._resources = resources
        self._events = events
        self._tasks: dict[Part, asyncio.Task[None]] = {}
        self._begun: set[Part] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.failed = False
        """True once the consumer has had an error."""
        self._closed = False
        self._kicking = False
        self._usage = (0.0, 0.0)
        """Share of the budget that is taken, and since when."""
        self.window = window_of(slabs, options, self._emit, self._cancel)
        self._fetcher = Fetcher(self.window, resources, options, hurried=lambda: events.waiting)

    def open(self) -> None:
        """Take a place among the pool's readers."""
        self._slabs.enter(self.window.reserved_blocks)
        self.counters.set("budget_bytes", self._slabs.budget_bytes)
        self.counters.set("connections_most", self._config.connections)

    def add(self, shards: Sequence[QueuedShard], *, ended: bool) -> None:
        """Append shards to the stream; ``ended``: no more will come."""
        for number, url, place, span in shards:
            if isinstance(place, WdsError):
                self.window.add(url, number=number, error=place)
                continue
            state = ShardState(place, expected=span.version)
            self.window.add(url, number=number, streamed=place.in_order, start=span.start, stop=span.stop, state=state)
            if place.spec.announced and place.entry is None and span.whole:
                self._resources.backends.of(place).expect(place)
        if ended:
            self.window.end_of_source()
        self.kick()

    def release(self, slabs: Sequence[Slab]) -> None:
        """Take back slabs that the consumer has read."""
        for slab in slabs:
            self.window.release(slab)
        self.kick()

    def opened(self, number: int) -> None:
        """Note that the consumer reads shard ``number`` from now on, beside the others that it has open."""
        self.window.opened(number)
        self.kick()

    def skip(self, number: int) -> None:
        """Drop the rest of shard ``number``."""
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
        except Exception as exn:  # else the consumer would wait for ever
            self.failed = True
            self._events.put(Finished(exn))
        finally:
            self._kicking = False
        window, connections, counters = self.window, self._resources.connections, self.counters
        self._events.flying = window.flying
        now, (share, since) = time.monotonic(), self._usage
        counters.add("full_s", (now - since) * share)
        self._usage = min(1.0, window.held_bytes / self._slabs.budget_bytes), now
        counters.set("window_bytes", window.held_bytes)
        counters.peak("window_peak_bytes", window.peak_bytes)
        counters.set("connections", connections.open)
        counters.peak("connections_peak", connections.peak)
        counters.set("connections_limit", window.concurrency.limit)
        counters.set("slowdown", window.concurrency.slowdown)

    async def close(self) -> None:
        """Cancel everything and return when no slab is being written to."""
        if self._closed:
            return
        self._closed = True
        for shard in self.window.close():
            self._clean(shard)  # at once, or by the last of its tasks, which were cancelled
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._fetcher.end()
        self._slabs.leave(self.window.reserved_blocks)
        self.counters.set("window_bytes", 0)
        self.counters.set("connections", 0)
        self.counters.leave_traffic()

    async def _fetch(self, part: Part) -> None:
        last = False
        error: Exception | None = None
        self._begun.add(part)
        try:
            last = not part.dropped and await self._fetcher.fetch(part)
        except asyncio.CancelledError:
            error = WdsError(f"{part.shard.url}: the read was cancelled")
        except Exception as exn:
            error = exn
        finally:
            del self._tasks[part]
            self._begun.discard(part)
            self.window.landed(part, last=last, error=error)
            if part.shard.gone:
                self._clean(part.shard)
            self.kick()

    def _emit(self, event: Event) -> None:
        if isinstance(event, Piece):
            self.counters.add("bytes", event.length)
        elif isinstance(event, End):
            self.failed |= event.shard.error is not None
            self.counters.add("bad_shards" if event.shard.error else "shards")
            self._clean(event.shard)
        self._events.put(event)

    def _clean(self, shard: Shard) -> None:
        if shard.flying == 0 and shard.state is not None and shard.state.finish():
            task = asyncio.get_running_loop().create_task(shard.state.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _cancel(self, part: Part) -> None:
        # A part that is judging its own answer ends by itself, and keeps its connection. One that has not begun sees
        # that it was dropped; a task that is cancelled before its first step never runs, and would never land.
        if part is not self._fetcher.answering and part in self._begun:
            self._tasks[part].cancel()


def end_idle(unless: TransferConfig | None = None) -> None:
    """End the engine that waits for another reader, and its thread; not if ``unless`` is its configuration."""
    engine = _current
    if engine is not None:
        engine.retire(unless)
    retired = _retired  # just now, or by itself
    if retired is not None:
        retired.thread.join(_STOP_WITHIN_S)


def end_with_worker() -> None:
    """End this process soon after its parent, if it is a DataLoader worker."""
    end_with_parent(_stop_at_exit)


def _stop_at_exit() -> None:
    global _exiting
    _exiting = True
    engine = _current
    if engine is not None:
        for pump in list(engine._pumps):
            engine.release(pump)
    end_idle()


def _forget_in_child() -> None:
    global _current, _retired, _lock
    _lock, _retired = threading.Lock(), None
    if _current is not None:
        _inherited.append(_current)
        _current.restore_switch_interval()
        _current = None


atexit.register(_stop_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=end_idle, after_in_child=_forget_in_child)
