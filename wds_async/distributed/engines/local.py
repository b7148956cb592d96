"""Engine of one machine: a pool of processes, each of which runs one attempt at a time.

A process is a new interpreter and not a fork, so it inherits neither threads nor open readers, and it does not import
the program's script: a job may be started anywhere in it. It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from multiprocessing.connection import wait
from typing import Any

from wds_async.arguments import check_number, check_size
from wds_async.child_process import ChildProcess
from wds_async.distributed.engines.base import RunAttempt
from wds_async.distributed.tasks import AttemptResult, Task
from wds_async.errors import ConfigError, WdsError

__all__ = ["LocalEngine", "cpus_here", "pickled"]

_STARTS_IN_VAIN = 5
_STOP_WITHIN_S = 3.0


def pickled(attempt: RunAttempt) -> bytes:
    """Return ``attempt`` pickled. ConfigError where that cannot be done, or what comes back is not the same."""
    try:
        data = pickle.dumps(attempt)
        pickle.loads(data)
    except Exception as exn:
        raise ConfigError(
            f"the job cannot be sent to its workers: {type(exn).__name__}: {exn}. Give functions by their names"
            " ('module:function') and options as plain values"
        ) from exn
    return data


class LocalEngine:
    """Processes of this machine. ``workers``: how many (default: the CPUs that this process may use, divided by
    ``cpus``, those of one task, and by the ``ranks_of_host``). A process that ends by itself, or is killed, ends its
    attempt as lost, and another takes its place. ConfigError for numbers below 1."""

    name = "local"

    def __init__(self, workers: int | None = None, cpus: float = 1, *, ranks_of_host: int = 1) -> None:
        if check_number(f"engine={self.name!r}", "cpus", cpus) <= 0:
            raise ConfigError(f"engine={self.name!r}: cpus={cpus!r}: CPUs of one task, more than 0")
        most = max(1, int(cpus_here() / cpus / ranks_of_host)) if workers is None else workers
        self.workers = check_size(f"engine={self.name!r}", "workers", most, at_least=1)
        self._attempt = b""
        self._processes: list[_Process] = []
        self._waiting: deque[Task] = deque()
        self._in_vain = 0

    def start(self, attempt: RunAttempt) -> None:
        """Remember ``attempt``; processes start with the first tasks."""
        self.start_pickled(pickled(attempt))

    def start_pickled(self, attempt: bytes) -> None:
        """The same for an attempt that is pickled already, and cannot be loaded in this process perhaps."""
        self._attempt = attempt
        self._in_vain = 0

    @property
    def capacity(self) -> int:
        """The number of processes."""
        return self.workers

    def submit(self, task: Task) -> None:
        """Give ``task`` to an idle process, or to a new one."""
        self._waiting.append(task)
        self._hand_out()

    def outcome(self, timeout_s: float) -> AttemptResult | None:
        """Return the next outcome. WdsError where processes end before they can take a task."""
        until = time.monotonic() + timeout_s
        while True:
            self._hand_out()
            left = max(0.0, until - time.monotonic())
            by_connection = {one.connection: one for one in self._processes}
            ready: Any = wait(list(by_connection), left)
            for connection in ready:
                result = self._heard(by_connection[connection])
                if result is not None:
                    return result
            if not ready:
                return None

    def close(self) -> None:
        """End the processes: by a signal, and within seconds by another that they cannot hold up."""
        processes, self._processes = self._processes, []
        self._waiting.clear()
        for one in processes:
            one.stop()
        until = time.monotonic() + _STOP_WITHIN_S
        for one in processes:
            one.end(until - time.monotonic())

    def _hand_out(self) -> None:
        while self._waiting:
            idle = next((one for one in self._processes if one.task is None), None)
            if idle is None and len(self._processes) >= self.workers:
                return
            if idle is None:
                idle = _Process(self._attempt)
                self._processes.append(idle)
            idle.task = self._waiting.popleft()
            with contextlib.suppress(OSError):  # it has ended: `_heard` finds the end of its connection
                idle.connection.send(idle.task)

    def _heard(self, process: _Process) -> AttemptResult | None:
        """Return the outcome that a process reports, or that its end is."""
        try:
            kind, value = process.connection.recv()
        except (EOFError, OSError):
            return self._ended(process)
        if kind == "ready":
            self._in_vain = 0
            process.is_ready = True
            return None
        if kind == "broken":
            raise ConfigError(f"a worker process cannot take the job: {value}")
        process.task = None
        result: AttemptResult = value
        return result

    def _ended(self, process: _Process) -> AttemptResult | None:
        self._processes.remove(process)
        how = process.end(_STOP_WITHIN_S)
        task, process.task = process.task, None
        # One that was killed from outside says nothing of whether processes can start.
        if not process.is_ready and process.popen.returncode not in (-signal.SIGKILL, -signal.SIGTERM):
            self._in_vain += 1
            if self._in_vain >= _STARTS_IN_VAIN:
                raise WdsError(
                    f"{self._in_vain} worker processes in a row ended before they were ready; the last one {how}. What"
                    f" they wrote to standard error says more. They run {sys.executable} with this program's sys.path"
                )
            if task is not None:
                self._waiting.appendleft(task)
            return None
        if task is None:
            return None
        return AttemptResult(
            task=task.number,
            error=f"the process {process.popen.pid} {how} while it ran the task",
            lost=True,
            place=f"{socket.gethostname()}:{process.popen.pid}",
        )


class _Process(ChildProcess):
    """A worker process and the task that it runs."""

    def __init__(self, attempt: bytes) -> None:
        super().__init__("distributed.engines.worker", attempt)
        self.task: Task | None = None
        self.is_ready = False


def cpus_here() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
