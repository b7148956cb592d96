"""Attempts in a Dask worker, each in a process of its own.

A Dask worker's threads share Python's global generator with each other and with Dask's own threads, which draw from it
too, so a task that seeds it would not give the same result each time. A process of its own also can be ended when its
task is cancelled, and may die without the worker.
"""

from __future__ import annotations

import threading
from typing import Any

from wds_async.distributed.engines.local import LocalEngine
from wds_async.distributed.engines.remote import not_loaded, short_error
from wds_async.distributed.tasks import AttemptResult, Task
from wds_async.errors import WdsError
from wds_async.packages import loaded

__all__ = ["end_processes", "run_apart"]

_LOOK_EVERY_S = 0.5
_IDLE_S = 20.0


class _Processes:
    """Processes that wait for a task, by the job that they have loaded, and a count of those that run one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._idle: list[tuple[bytes, LocalEngine, threading.Timer]] = []

    def take(self, job: bytes) -> LocalEngine:
        """Return a process that has loaded ``job``, or a new one."""
        with self._changed:
            self._running += 1
            for one in self._idle:
                if one[0] == job:
                    self._idle.remove(one)
                    one[2].cancel()
                    return one[1]
        engine = LocalEngine(workers=1)
        engine.start_pickled(job)
        return engine

    def put_back(self, job: bytes, engine: LocalEngine, keep: bool) -> None:
        """Keep a process for the next task, or end it."""
        if not keep:
            engine.close()
        with self._changed:
            if keep:
                timer = threading.Timer(_IDLE_S, self._end, [engine])
                timer.daemon = True
                self._idle.append((job, engine, timer))
                timer.start()
            self._running -= 1
            self._changed.notify_all()

    def end(self, within_s: float) -> None:
        """Wait until none runs, not longer than ``within_s``, and end those that wait."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, within_s)
            idle = [engine for _, engine, _ in self._idle]
        for engine in idle:
            self._end(engine)

    def _end(self, engine: LocalEngine) -> None:
        """End a process unless it has been taken."""
        with self._changed:
            there = [one for one in self._idle if one[1] is engine]
            self._idle = [one for one in self._idle if one[1] is not engine]
        for _, waiting, timer in there:
            timer.cancel()
            waiting.close()


_processes = _Processes()


def run_apart(data: bytes, task: Task, key: str) -> AttemptResult:
    """Run an attempt at ``task``, the Dask task ``key``, in another process, where ``data`` is pickled what runs it.
    The process ends when the task is cancelled, and when it had no further task for a while."""
    engine = _processes.take(data)
    result = None
    try:
        engine.submit(task)
        while (result := engine.outcome(_LOOK_EVERY_S)) is None:
            if _is_cancelled(key):
                return AttemptResult(task.number, error="it was cancelled", lost=True)
    except WdsError as exn:
        return not_loaded(task, short_error(exn))
    finally:
        _processes.put_back(data, engine, keep=result is not None)
    return result


def end_processes(within_s: float) -> None:
    """Wait for the tasks that run in this process to end, not longer than ``within_s``, and end what waits for more."""
    _processes.end(within_s)


def _is_cancelled(key: str) -> bool:
    """Return whether the task is not wanted any more: its program has cancelled it, or ended."""
    dask: Any = loaded("distributed")
    state = dask.get_worker().state.tasks.get(key)
    return state is None or state.state == "cancelled"
