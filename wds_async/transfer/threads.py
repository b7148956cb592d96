"""Daemon threads for calls that block: DNS, files on network file systems, pipes, standard input.

The loop's default executor is not used: the interpreter joins it at exit, and one read that hangs on a dead
file server would hang the exit with it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["BlockingThreads"]

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class BlockingThreads:
    """At most ``most`` daemon threads, started when a call finds none idle."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int = 24) -> None:
        self._loop = loop
        self._most = most
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on a thread. A cancelled call goes on in its thread; its result is dropped. Until it returns
        another thread may be started in place of its own, so that calls that hang leave the others their threads."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._idle <= 0 and self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, name="wds-async-blocking", daemon=True).start()
        else:
            self._idle -= 1
        self._jobs.put((lambda: function(*args, **kwargs), future))
        try:
            return await future
        except asyncio.CancelledError:
            self._most += future.cancelled()
            raise

    def stop(self) -> None:
        """Let the idle threads end; busy ones end after their call."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            try:
                result, error = call(), None
            except BaseException as exn:
                result, error = None, _bearable(exn)
            try:
                self._loop.call_soon_threadsafe(self._done, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits for this result any more
                return
            del job, call, future, result, error

    def _done(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._idle += 1
        self._most -= future.cancelled()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _bearable(exn: BaseException) -> Exception:
    """``exn`` as a loop bears it: no future takes a StopIteration, and the SystemExit of one call (of a user's opener,
    say) would end the loop for all readers of the process."""
    if isinstance(exn, Exception) and not isinstance(exn, StopIteration):
        return exn
    carrier = RuntimeError(f"{type(exn).__name__}{f': {exn}' if str(exn) else ''}")
    carrier.__cause__ = exn
    return carrier
