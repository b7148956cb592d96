"""Protocol of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from wds_async.distributed.tasks import AttemptResult, Task

__all__ = ["RankedEngine", "RunAttempt", "TaskEngine"]

RunAttempt = Callable[[Task], AttemptResult]
"""Runs one attempt at a task and commits it. Can be pickled; raises nothing but KeyboardInterrupt and SystemExit."""


class TaskEngine(Protocol):
    """Protocol: carries attempts to where they run. A process or machine that dies ends the attempts on it with an
    outcome that is ``lost``; whether there is another attempt is for the job to decide."""

    name: str

    def start(self, attempt: RunAttempt) -> None:
        """Prepare workers. Raise ConfigError, before anything is written, for an ``attempt`` that does not pickle, and
        where the cluster cannot be reached or lacks what the tasks ask for."""
        ...

    @property
    def capacity(self) -> int:
        """The number of tasks to keep submitted; it may change while the job runs (a cluster that grows)."""
        ...

    def submit(self, task: Task) -> None:
        """Hand over a task. Returns at once."""
        ...

    def outcome(self, timeout_s: float) -> AttemptResult | None:
        """Return the outcome of the next attempt that ends, None where none ends within ``timeout_s``."""
        ...

    def close(self) -> None:
        """Stop what runs, by what this engine started only; idempotent."""
        ...


@runtime_checkable
class RankedEngine(Protocol):
    """Protocol: an engine that runs a share of the tasks; others, elsewhere, run the rest."""

    def is_mine(self, number: int) -> bool:
        """Return whether task ``number`` is in the share."""
        ...

    @property
    def leads(self) -> bool:
        """True if it does what one of them has to do for all."""
        ...
