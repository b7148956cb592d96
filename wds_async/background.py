"""Threads beside the program's own: event loops, blocking calls, and the watch of a worker for its parent."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from wds_async import world

__all__ = ["BlockingThreads", "LoopThread", "end_with_parent", "new_event_loop", "uvloop_or_none"]

P = ParamSpec("P")
T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]

_TASKS_END_WITHIN_S = 0.2


def uvloop_or_none() -> Any:
    """Import uvloop; None where it is not installed."""
    try:
        import uvloop  # noqa: PLC0415 (not on Windows, and its import takes 40 ms)
    except ImportError:
        return None
    return uvloop


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop where it is installed, else of asyncio (``benchmarks/scenarios/http.py`` has both)."""
    uvloop = uvloop_or_none()
    return asyncio.new_event_loop() if uvloop is None else uvloop.new_event_loop()


class LoopThread:
    """An event loop on a daemon thread, so that neither Ctrl-C nor the exit waits for a server that does not answer.

    When the loop is stopped, its remaining tasks are cancelled and waited for briefly, then ``at_end`` is awaited.
    """

    def __init__(self, name: str, at_end: Callable[[], Awaitable[None]] | None = None) -> None:
        self.name = name
        self.loop = new_event_loop()
        self._at_end = at_end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        """True if the thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run ``function`` on the loop soon. Return False where the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(lambda: function(*args, **kwargs))
        except RuntimeError:
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and return its result, or raise its error. Ctrl-C ends the wait."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """Stop the loop soon; the thread ends after it."""
        self.submit(self.loop.stop)

    def join(self, within_s: float) -> None:
        """Wait until the thread has ended, for ``within_s`` at most. Return at once on a thread of its own: a program's
        opener may close a reader on one of the blocking threads that the loop waits for."""
        if self._is_foreign():
            self._thread.join(within_s)

    def wait(self, event: threading.Event, within_s: float) -> None:
        """Wait for ``event``, which the loop sets, where `join` would wait for the thread."""
        if self._is_foreign():
            event.wait(within_s)

    def _is_foreign(self) -> bool:
        return not threading.current_thread().name.startswith(self.name)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._end())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            self.loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_TASKS_END_WITHIN_S)
        if self._at_end is not None:
            await self._at_end()
        await asyncio.sleep(0)  # transports that were closed report their end in the next round


class BlockingThreads:
    """Pool of at most ``most`` daemon threads; one is started when a call finds none idle."""

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
            except RuntimeError:  # the loop is closed, and nothing waits for the result
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
    """Return ``exn`` as an error that a future takes: neither a StopIteration nor a SystemExit, which would end the
    loop for all readers of the process."""
    if isinstance(exn, Exception) and not isinstance(exn, StopIteration):
        return exn
    carrier = RuntimeError(f"{type(exn).__name__}{f': {exn}' if str(exn) else ''}")
    carrier.__cause__ = exn
    return carrier


_GRACE_S = 1.5
"""Time for the worker to end by itself, once nothing is read any more."""
_watched = 0


def end_with_parent(stop: Callable[[], object]) -> None:
    """End this process soon after its parent, if it is a DataLoader worker; ``stop`` is called first.

    torch's worker looks for its parent between two batches only: one that waits for bytes, or for a pipe that other
    workers hold open, would outlive a parent that was killed. The thread sleeps in the kernel. Does nothing in any
    other process, or when called again.
    """
    global _watched
    if _watched == os.getpid() or world.torch_worker() is None:
        return
    _watched = os.getpid()
    from multiprocessing import process  # noqa: PLC0415 (loaded in every worker; 10 ms elsewhere)

    parent = process.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent, stop), name="wds-async-orphan", daemon=True).start()


def _watch(parent: Any, stop: Callable[[], object]) -> None:
    _wait_for(parent)
    # On a thread, since it may hang where the worker does.
    threading.Thread(target=stop, name="wds-async-orphan-stop", daemon=True).start()
    threading.Event().wait(_GRACE_S)
    os._exit(1)  # no process is left to read a status, or what the exit would wait to write


def _wait_for(parent: Any) -> None:
    """Return when ``parent`` has ended."""
    try:
        # Not multiprocessing's own sentinel: of workers that were forked one after another, each holds those of the
        # earlier ones open.
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old or a guarded kernel
        parent.join()
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    finally:
        os.close(descriptor)
