"""Jobs: tasks carried out by an engine until each has a record in the job's folder."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_async.arguments import check_size
from wds_async.distributed.attempts import Attempt
from wds_async.distributed.engines.base import RankedEngine, TaskEngine
from wds_async.distributed.engines.choice import engine_of
from wds_async.distributed.folder import JobFolder
from wds_async.distributed.plan import hash_of_ids, ids_of
from wds_async.distributed.progress import JobProgress, JobStatus, JobSummary, Tally
from wds_async.distributed.tasks import AttemptResult, Input, Task, Work
from wds_async.errors import JobChanged, JobFailed, ShardNotFound, WdsError
from wds_async.observe.prices import meter_of_job
from wds_async.redact import redact

__all__ = ["Job", "OnProgress"]

OnProgress = Callable[[JobProgress], object]

logger = logging.getLogger("wds_async")

_OUTCOME_WITHIN_S = 1.0
_LOOK_EVERY_S = 2.0
_LEADER_WITHIN_S = 900.0
_NAMED = 10
_LOST_FACTOR = 2
"""A machine that dies ends attempts through no fault of their tasks, so twice as many may be lost as may fail."""


class Job:
    """A job: ``work`` done for each of ``tasks``, with its records in ``folder``.

    ``inputs`` is what the user asked for, as JSON; it stands in ``job.json`` for people. ``engine`` is one, or its
    name, with the ``options`` of `engine_of`. A task may fail ``attempts`` times, and twice as many may be lost with
    their process. ``on_progress`` is called after each attempt, on the thread that runs the job. ``finishes``: write
    the list of shards at the end; false for a phase whose outputs are no shards.

    Nothing is written before `run`.
    """

    def __init__(
        self,
        work: Work,
        tasks: Sequence[Task],
        folder: JobFolder,
        *,
        engine: TaskEngine | str = "local",
        options: Mapping[str, Any] | None = None,
        inputs: Any = None,
        attempts: int = 4,
        overwrite: bool = False,
        on_progress: OnProgress | None = None,
        finishes: bool = True,
    ) -> None:
        self.work, self.tasks, self.folder = work, tasks, folder
        self.inputs, self.overwrite, self.on_progress, self.finishes = inputs, overwrite, on_progress, finishes
        self.attempts = check_size("a job", "attempts", attempts, at_least=1)
        self._engine = engine_of(engine, **(options or {})) if isinstance(engine, str) else engine
        self._document: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {redact(self.folder.url)}: {len(self.tasks):,} tasks>"

    def document(self) -> dict[str, Any]:
        """Return what ``job.json`` holds: the described work, the number of tasks, a hash of all task ids, the inputs
        as they were asked for."""
        if self._document is None:
            work = self.work.describe()
            ids = hash_of_ids(ids_of(self.tasks, work))
            self._document = {"work": work, "tasks": len(self.tasks), "ids": ids, "inputs": self.inputs}
        return self._document

    def run(self) -> JobSummary:
        """Run the tasks without a record, and return what was done. Call it again, in any process, to go on where it
        stopped; two runners at once do no harm.

        Raise JobFailed, which names each failed task, after all others have finished; JobChanged where the folder
        holds another job; ConfigError, before anything is written, for what cannot be sent to workers; StorageError
        where the folder cannot be written.
        """
        return self._run(lambda contents: self._unfinished(contents.finished))

    def retry(self) -> JobSummary:
        """Run the tasks that failed in an earlier run, and no others."""
        return self._run(lambda contents: iter(sorted(contents.failed)))

    def status(self) -> JobStatus:
        """Return what the folder says, by one listing, and the reasons of failed tasks."""
        contents = self.folder.contents()
        failed = tuple(self.folder.failures(sorted(contents.failed)))
        return JobStatus(self.folder.url, len(self.tasks), len(contents.finished), failed, contents.complete)

    def wait(self, stall_s: float = 1800.0) -> None:
        """Return once every task has a record, by any runner. JobFailed, with the missing tasks, where none gets one
        for ``stall_s`` seconds. For phases that need all of the one before, with engine "rank"."""
        since, before, pause = time.monotonic(), -1, threading.Event()
        while len(finished := self.folder.finished()) < len(self.tasks):
            if len(finished) != before:
                since, before = time.monotonic(), len(finished)
            if (waited := time.monotonic() - since) >= stall_s:
                missing = list(itertools.islice(self._unfinished(finished), _NAMED))
                reasons = self.folder.failures(sorted(self.folder.contents().failed & set(missing)))
                raise JobFailed(
                    f"{redact(self.folder.url)}: {len(self.tasks) - before:,} of {len(self.tasks):,} tasks have no"
                    f" record, and none got one for {waited:,.0f} s. Missing: {self._named(missing)}."
                    + "".join(f" Task {number} failed: {error}." for number, error in reasons)
                    + " Look at the ranks that run them, and start them again: finished tasks are kept"
                )
            pause.wait(min(_LOOK_EVERY_S, stall_s / 10))

    def _inputs_of_tasks(self) -> Iterator[Input]:
        return (one for task in self.tasks for one in task.inputs)

    def _unfinished(self, finished: set[int]) -> Iterator[int]:
        return (number for number in range(len(self.tasks)) if number not in finished)

    def _run(self, chosen: Callable[[Any], Iterable[int]]) -> JobSummary:
        document, folder, engine = self.document(), self.folder, self._engine
        contents = folder.contents()
        if contents.begun and not self.overwrite:
            folder.compare(document, self._inputs_of_tasks())
        tally = Tally(folder.url, len(self.tasks), meter_of_job())
        share = engine if isinstance(engine, RankedEngine) else None
        begins = not contents.has_inputs or self.overwrite
        started = False
        try:
            if begins or next(iter(chosen(contents)), None) is not None:
                started = True
                engine.start(Attempt(self.work, folder))
            if begins:
                if self.overwrite and share is not None and not share.leads:
                    self._await_document(document)
                folder.create(document, self._inputs_of_tasks(), overwrite=self.overwrite)
                contents = folder.contents()
            tally.before = len(contents.finished)
            numbers = [number for number in chosen(contents) if share is None or share.is_mine(number)]
            _Drive(self, engine, tally, numbers).run()
        finally:
            if started:
                engine.close()
        if tally.failures:
            raise self._failed(tally)
        if self.finishes:
            self.finish()
        return tally.summary()

    def _await_document(self, document: Mapping[str, Any]) -> None:
        """Return once the leading rank has begun the job in place of another one. JobChanged where it does not."""
        until, pause = time.monotonic() + _LEADER_WITHIN_S, threading.Event()
        while True:
            try:
                if self.folder.contents().begun:
                    return self.folder.compare(document)
            except (JobChanged, ShardNotFound):
                if time.monotonic() >= until:
                    raise
            if time.monotonic() >= until:
                raise JobFailed(f"{redact(self.folder.url)}: rank 0 has not begun the job in {_LEADER_WITHIN_S:.0f} s")
            pause.wait(_LOOK_EVERY_S)

    def finish(self) -> None:
        """Write the list of shards where every task has a record, as the last of several runners does by itself."""
        contents = self.folder.contents()
        if len(contents.finished) >= len(self.tasks) and not contents.complete:
            self.folder.finish(len(self.tasks), ids_of(self.tasks, self.work.describe()))

    def _failed(self, tally: Tally) -> JobFailed:
        lines = [f"  {self._named_error(number, error)}" for number, error in sorted(tally.failures.items())]
        more = [f"  and {len(lines) - _NAMED:,} more: wds-async job status"] if len(lines) > _NAMED else []
        error = JobFailed(
            f"{redact(self.folder.url)}: {len(lines):,} of {len(self.tasks):,} tasks failed. Finished tasks are kept:"
            " mend what is wrong, and run the job again.\n" + "\n".join(lines[:_NAMED] + more)
        )
        error.failures = tuple(sorted(tally.failures.items()))
        return error

    def _named_error(self, number: int, error: str) -> str:
        inputs = self._inputs(number)
        return f"task {number} {inputs}: {error.removeprefix(f'{inputs[1:-1]}: ')}"

    def _named(self, numbers: Iterable[int]) -> str:
        return ", ".join(f"{number} {self._inputs(number)}" for number in numbers)

    def _inputs(self, number: int) -> str:
        urls = [redact(one.url) for one in self.tasks[number].inputs]
        return f"({urls[0]}{f' and {len(urls) - 1} more' if len(urls) > 1 else ''})" if urls else "(no inputs)"


class _Drive:
    """One run of the tasks ``numbers`` on ``engine``: keeps as many submitted as it takes, and repeats what fails."""

    def __init__(self, job: Job, engine: TaskEngine, tally: Tally, numbers: Sequence[int]) -> None:
        self._job, self._engine, self._tally = job, engine, tally
        self._new = iter(numbers)
        self._left = len(numbers)
        self._running: set[int] = set()
        self._again: list[tuple[float, int]] = []  # when, number
        self._errors: dict[int, int] = {}
        self._losses: dict[int, int] = {}

    def run(self) -> None:
        while self._left:
            while len(self._running) < self._engine.capacity and (number := self._next()) is not None:
                self._running.add(number)
                self._engine.submit(self._job.tasks[number])
            result = self._engine.outcome(_OUTCOME_WITHIN_S)
            if result is not None and result.task in self._running:
                self._running.remove(result.task)
                self._ended(result)
                self._report(result)

    def _next(self) -> int | None:
        """Return the next task to submit; None where none is due."""
        if self._again and self._again[0][0] <= time.monotonic():
            return heapq.heappop(self._again)[1]
        return next(self._new, None)

    def _ended(self, result: AttemptResult) -> None:
        number, tally, job = result.task, self._tally, self._job
        error = result.error
        tally.add(result)
        if result.record is not None:
            self._left -= 1
            return
        counts, most = (self._losses, _LOST_FACTOR * job.attempts) if result.lost else (self._errors, job.attempts)
        counts[number] = counts.get(number, 0) + 1
        stream = next((one.url for one in job.tasks[number].inputs if one.is_stream), None)
        if stream is not None:
            error += f"; it is not run again, since what was read of {stream} cannot be read again"
        elif not result.permanent and counts[number] < most:
            tally.lost += result.lost
            tally.retried += not result.lost
            logger.info("task %d: %s; it is run again (%d of %d)", number, result.error, counts[number], most)
            heapq.heappush(self._again, (time.monotonic() + min(30.0, 0.1 * 2 ** counts[number]), number))
            return
        self._left -= 1
        tally.failures[number] = error
        logger.error("task %d failed: %s", number, error)
        with contextlib.suppress(WdsError):  # the error itself is raised at the end
            job.folder.note_failure(number, error, counts[number])

    def _report(self, result: AttemptResult) -> None:
        if self._job.on_progress is not None:
            pending = self._left
            self._job.on_progress(self._tally.progress(pending, len(self._running), result))
