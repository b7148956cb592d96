"""An engine for tests: attempts run in this process, one after another."""

from __future__ import annotations

from collections import deque

from wds_async.distributed.engines.base import RunAttempt
from wds_async.distributed.tasks import AttemptResult, Task

__all__ = ["InlineEngine"]


class InlineEngine:
    """Engine that runs each attempt when its outcome is asked for. ``ran`` has the numbers of the tasks, in order."""

    name = "inline"
    capacity = 2

    def __init__(self) -> None:
        self.ran: list[int] = []
        self._waiting: deque[Task] = deque()
        self._attempt: RunAttempt | None = None

    def start(self, attempt: RunAttempt) -> None:
        self._attempt = attempt

    def submit(self, task: Task) -> None:
        self._waiting.append(task)

    def outcome(self, timeout_s: float) -> AttemptResult | None:
        if not self._waiting:
            return None
        assert self._attempt is not None
        task = self._waiting.popleft()
        self.ran.append(task.number)
        return self._attempt(task)

    def close(self) -> None:
        self._waiting.clear()
