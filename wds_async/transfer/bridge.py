"""The loop thread, one a process, and how the rest of the process talks to it.

The thread lives while a reader is open. A forked child forgets the engine it inherited: it neither closes nor
stops anything of the parent's, because the two share sockets and an epoll.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wds_async.background import LoopThread, end_with_parent, uvloop_or_none
from wds_async.config import TransferConfig
from wds_async.transfer.pump import Event, Pump
from wds_async.transfer.resources import Equipment
from wds_async.transfer.slabs import SlabPool
from wds_async.transfer.stats import Counters

__all__ = ["Engine", "prepare"]

_STOP_WITHIN_S = 2.0
_LOCK_WITHIN_S = 0.05
_DEFAULT_SWITCH_INTERVAL_S = 0.005
_WATCH_EVERY_S = 1.0

_current: Engine | None = None
_lock = threading.Lock()
# Engines of the parent, kept so that no finalizer of theirs ever runs in a forked child.
_inherited: list[Engine] = []


def prepare() -> None:
    """Import what the engine will import, for a process whose children will run it. Starts nothing."""
    uvloop_or_none()


class Engine:
    """The running loop with what its readers share: slabs, connections, backends, threads.

    The first reader's configuration decides until the last reader has gone, but for what concerns one reader only: how
    long it tries, and what it asks for twice.
    """

    def __init__(self, config: TransferConfig) -> None:
        self.config = config
        self.slabs = SlabPool(config.budget_bytes, config.part_bytes)
        self._pumps: set[Pump] = set()
        self._closing: set[asyncio.Task[None] | None] = set()
        self._thread = LoopThread("wds-async")
        self._loop = self._thread.loop
        self._equipment = Equipment(config, self._loop)
        self.backends = self._equipment.backends
        self._switch_interval_s: float | None = None
        self._watching: asyncio.Task[None] | None = None

    @staticmethod
    def acquire(
        config: TransferConfig, counters: Counters, emit: Callable[[Event], None], hurried: Callable[[], bool]
    ) -> tuple[Engine, Pump]:
        """A pump on this process's engine, which is started if need be. Give it back by `release`."""
        global _current
        with _lock:
            if _current is None:
                _current = Engine(config)
                _current._start()
            engine = _current
            pump = Pump(
                engine.slabs,
                equipment=engine._equipment,
                config=replace(engine.config, retry=config.retry, hedge_share=config.hedge_share),
                counters=counters,
                emit=emit,
                hurried=hurried,
            )
            engine._pumps.add(pump)
        end_with_parent(_stop_at_exit)
        engine.submit(pump.open)
        return engine, pump

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``function`` on the loop soon; nothing happens once the engine has stopped."""
        self._thread.submit(function, *args, **kwargs)

    @property
    def alive(self) -> bool:
        """Whether the loop thread runs."""
        return self._thread.alive

    def release(self, pump: Pump) -> None:
        """End a pump; the last one stops the loop thread. Idempotent, and harmless in a forked child."""
        global _current
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
            if last and _current is self:
                _current = None
        finally:
            _lock.release()
        self._schedule(pump.close() if not last else self._shut_down(pump))
        if last:
            self._thread.join(_STOP_WITHIN_S)

    def _start(self) -> None:
        # A consumer in pure Python would hold the GIL 5 ms for each time that the loop thread wants it.
        before_s = sys.getswitchinterval()
        if math.isclose(before_s, _DEFAULT_SWITCH_INTERVAL_S, rel_tol=0.01):
            self._switch_interval_s = before_s
            sys.setswitchinterval(self.config.switch_interval_s)
        self._thread.start()
        self._thread.submit(self._begin_watch)

    def _restore_switch_interval(self) -> None:
        # Only who changed it: what an engine found that began while another one ended is not the program's.
        if self._switch_interval_s is None:
            return
        # CPython counts whole microseconds and gives 4.9999999999999996e-05 for 5e-5.
        if math.isclose(sys.getswitchinterval(), self.config.switch_interval_s, rel_tol=0.01):
            sys.setswitchinterval(self._switch_interval_s)

    def _schedule(self, coroutine: Any) -> None:
        if not self._thread.submit(lambda: self._keep(self._loop.create_task(coroutine))):
            coroutine.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _begin_watch(self) -> None:
        self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Look for stalled connections, once a second, and leave what was counted for who asks."""
        while True:
            await asyncio.sleep(min(_WATCH_EVERY_S, self.config.stall_timeout_s / 4))
            self._equipment.look()
            for pump in list(self._pumps):
                pump.counters.leave_traffic()

    async def _shut_down(self, pump: Pump) -> None:
        try:
            async with asyncio.timeout(_STOP_WITHIN_S * 0.75):
                others = self._closing - {asyncio.current_task()}
                await asyncio.gather(pump.close(), *others, return_exceptions=True)
                await self.backends.close()
        except TimeoutError:
            pass  # a file server that does not answer holds a daemon thread, not the exit
        finally:
            self.slabs.close()  # now, not when the cyclic collector comes by: an epoch's budget is a lot to leave
            self._restore_switch_interval()
            await self._equipment.close()
            self._loop.stop()


def _stop_at_exit() -> None:
    engine = _current
    if engine is not None:
        for pump in list(engine._pumps):
            engine.release(pump)


def _forget_in_child() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _inherited.append(_current)
        _current._restore_switch_interval()
        _current = None


atexit.register(_stop_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
