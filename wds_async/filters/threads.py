"""A function on threads of its own, ahead of the consumer, the order kept.

It pays for functions that release the GIL: decoding with Pillow, simplejpeg or PyAV, and most of numpy and torch.
Functions in pure Python get no faster.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async import packages
from wds_async.ahead import close_if_left
from wds_async.arguments import check_size
from wds_async.checkpoint.states import Held, StageState
from wds_async.errors import ReaderClosed, StateError
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.tracebacks import located

__all__ = ["ThreadsState", "on_threads", "ordered_map", "shared_threads"]

_EXIT_S = 1.5
_RUNNING_S = 0.1  # for a call that ran when its threads were ended

Result = tuple[Any, BaseException | None]
_NOT_RUN: Result = (None, ReaderClosed("the iteration was left"))
"""The answer to a call that was not begun when its threads were ended."""
Job = tuple[tuple[Any, ...], "queue.SimpleQueue[Result]"]  # the function's arguments, the item first
_Call = tuple[Callable[..., Any], tuple[Any, ...], "queue.SimpleQueue[Result]"]
_running: weakref.WeakSet[_Threads] = weakref.WeakSet()


class ThreadsState(StageState):
    """State of `ordered_map`: the items that are taken ahead, with their results as they come."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.inputs: deque[Any] = deque()
        """Items of an earlier run that are to be submitted first."""
        self.function: Callable[..., Any] | None = None
        """Makes the results that are missing once the threads have ended, because the loop was left."""

    @contextlib.contextmanager
    def of(self, function: Callable[..., Any]) -> Iterator[None]:
        """Note ``function`` when its threads have ended."""
        try:
            yield
        finally:
            self.function = function

    def arguments(self, item: Any) -> tuple[Any, ...]:
        """Return the arguments of the function for ``item``, which comes first among them. Called once an item, in
        their order."""
        return (item,)

    @property
    def ahead(self) -> list[Any]:
        """The items whose results have not been taken."""
        return [*(arguments[0] for arguments, _ in self.jobs), *self.inputs]

    def save(self) -> dict[str, Any]:
        return {"ahead": Held(self.ahead, self._results)}

    def load(self, saved: dict[str, Any]) -> None:
        ahead = saved["ahead"]
        if ahead.done:
            self.jobs.extend(((None,), _answered((result, None))) for result in ahead)
        else:
            self.inputs = deque(ahead)

    def done(self) -> Iterator[Any]:
        """Yield the results of an earlier run, and let go of each."""
        while self.jobs:
            yield self.jobs.popleft()[1].get()[0]

    def first(self) -> Iterator[Any]:
        """Yield the items of an earlier run, and let go of each."""
        while self.inputs:
            yield self.inputs.popleft()

    def _results(self) -> list[Any]:
        """Return the results of the jobs, when they have come. StateError where a function raised."""
        results = []
        if self.inputs:
            raise StateError("items are to be given to threads again that have not begun: take the state an item later")
        for number, (arguments, answer) in enumerate(self.jobs):
            result = self._result(arguments, answer)
            self.jobs[number] = arguments, _answered(result)
            if result[1] is not None:
                raise StateError("a function on a thread ahead has raised; the state can be saved behind that item")
            results.append(result[0])
        return results

    def _result(self, arguments: tuple[Any, ...], answer: queue.SimpleQueue[Result]) -> Result:
        if self.function is None:
            return answer.get()
        try:
            result = answer.get(timeout=_RUNNING_S)
        except queue.Empty:
            result = _NOT_RUN
        return (self.function(*arguments), None) if result is _NOT_RUN else result


def _answered(result: Result) -> queue.SimpleQueue[Result]:
    answer: queue.SimpleQueue[Result] = queue.SimpleQueue()
    answer.put(result)
    return answer


class _PoolOfThread(threading.local):
    pool: _Threads | None = None

    def share(self, pool: _Threads | None) -> None:
        self.pool = pool


_here = _PoolOfThread()


@contextlib.contextmanager
def shared_threads(threads: int) -> Iterator[None]:
    """Have the stages that begin on this thread call their functions on ``threads`` threads, which they share."""
    with contextlib.closing(_Threads(threads)) as pool:
        close_if_left(pool)
        _here.share(pool)
        try:
            yield
        finally:
            _here.share(None)


def on_threads(
    source: Iterable[Any],
    f: Callable[..., Any],
    threads: int,
    handler: Handler,
    stage: str,
    state: ThreadsState | None,
) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return the results of `ordered_map` on ``threads`` threads, or where that is 0 on those of `shared_threads`, and
    the items that are left to the caller, which are all where there are none of these."""
    if threads or _here.pool is not None:
        return _threaded(source, f, threads, handler, stage, state or ThreadsState()), ()
    return ((), source) if state is None else (state.done(), itertools.chain(state.first(), source))


def ordered_map(
    source: Iterable[Any],
    f: Callable[..., Any],
    threads: int,
    handler: Handler = reraise_exception,
    *,
    stage: str = "ordered_map",
    state: ThreadsState | None = None,
) -> Iterator[Any]:
    """Yield ``f(item)`` for every item of ``source`` in order, computed by ``threads`` threads ahead of the consumer.

    At most ``2 * threads`` items are taken from ``source`` before their results are taken; it is iterated in the
    consumer's thread. Where ``f`` raises, ``handler`` is called when that item's turn comes: True leaves the item out,
    False ends the iteration, and it may raise; a note of the error names ``stage``. What ``source`` raises comes after
    the results of the items before it.

    The threads start with the iteration, and end with it: when it is exhausted, closed, garbage collected or ended by
    an error, and at interpreter exit. A call that is running then is finished, and its result dropped.

    Raises ConfigError for less than one thread, and ReaderClosed in a forked child that goes on with its parent's
    iterator.
    """
    threads = check_size("ordered_map", "threads", threads, at_least=1)
    return _threaded(source, f, threads, handler, stage, state or ThreadsState())


def _threaded(
    source: Iterable[Any], f: Callable[..., Any], threads: int, handler: Handler, stage: str, state: ThreadsState
) -> Iterator[Any]:
    items, ended = itertools.chain(state.first(), source), False
    failure: BaseException | None = None
    owner = os.getpid()
    jobs = state.jobs
    with state.of(f), contextlib.closing(_Threads(threads)) if threads else _shared() as pool:
        most = 2 * len(pool.members)
        while jobs or not ended:
            while not ended and len(jobs) < most:
                try:
                    item = next(items)
                except StopIteration:
                    ended = True
                except Exception as exn:
                    ended, failure = True, exn
                else:
                    jobs.append(pool.submit(f, state.arguments(item)))
                    del item  # else the latest item would live until the next one comes
            if not jobs:
                break
            if os.getpid() != owner:
                raise ReaderClosed("this iterator's threads are its parent process's: begin a new iteration here")
            arguments, answer = jobs.popleft()
            answered = answer.get()
            result, error = answered
            if error is None:
                yield result
            elif answered is _NOT_RUN:
                raise ReaderClosed("the loader that has these threads was left")
            elif not isinstance(error, Exception):
                raise error
            elif not passed(handler, located(error, stage, arguments[0]), arguments[0]):
                jobs.clear()
                return
            del answered, result, error, arguments, answer
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _shared() -> Iterator[_Threads]:
    """Give the threads of `shared_threads`, which closes them."""
    assert _here.pool is not None
    yield _here.pool


class _Threads:
    """Daemon threads, so that a function that hangs does not hang the interpreter's exit. They do not know this
    object, only its queue: an iterator that is garbage can be collected while they run."""

    def __init__(self, threads: int) -> None:
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.RLock()  # behind those that end the threads no call may come; for finalisers, reentrant
        self.members: list[threading.Thread] = []
        torch = packages.loaded("torch")
        is_shared = getattr(torch, "get_num_threads", int)() > 1  # without it where it is just being imported
        started: queue.SimpleQueue[None] = queue.SimpleQueue()
        arguments = (self._queue, self._closed, torch if is_shared else None, started)
        try:
            for n in range(threads):
                thread = threading.Thread(target=_work, args=arguments, name=f"wds-async-map-{n}", daemon=True)
                thread.start()
                self.members.append(thread)
        except RuntimeError:  # the system gives no more of them
            self.close()
            raise
        if is_shared:
            for _ in self.members:
                started.get()
            torch.set_num_threads(torch.get_num_threads())  # each set what threads begin with that are made later
        _running.add(self)

    def submit(self, f: Callable[..., Any], arguments: tuple[Any, ...]) -> Job:
        answer: queue.SimpleQueue[Result] = queue.SimpleQueue()
        with self._lock:
            if self._closed.is_set():
                answer.put(_NOT_RUN)
            else:
                self._queue.put((f, arguments, answer))
        return arguments, answer

    def close(self) -> None:
        """Let the threads end after their calls, without waiting: this may run on one of them, as a finaliser."""
        with self._lock:
            self._closed.set()
            for _ in self.members:
                self._queue.put(None)


def _work(
    calls: queue.SimpleQueue[_Call | None],
    closed: threading.Event,
    torch: Any,
    started: queue.SimpleQueue[None],
) -> None:
    if torch is not None:
        torch.get_num_threads()  # the first call in a thread takes the program's number
        torch.set_num_threads(1)  # as many threads as cores for each of several would wait for each other
    started.put(None)
    while (call := calls.get()) is not None:
        f, arguments, answer = call
        try:
            result: Result = _NOT_RUN if closed.is_set() else (f(*arguments), None)
        except BaseException as exn:
            result = (None, exn)
        answer.put(result)
        del call, f, arguments, answer, result  # nothing of a sample stays here while the thread waits for the next


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter: one that wakes in C++ code after its end would abort the process."""
    pools = list(_running)
    for pool in pools:
        pool.close()
    deadline = time.monotonic() + _EXIT_S
    for thread in itertools.chain.from_iterable(pool.members for pool in pools):
        thread.join(max(0.0, deadline - time.monotonic()))
