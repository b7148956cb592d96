"""`reshard`: other shards of the same samples: shuffled, sorted, split, joined, or of another size.

Two passes without disks of the workers: the first writes the samples of some inputs to one spill object, in sorted runs
(`spill`); the second reads a range of each run for its outputs (`gathering`). A task between them makes the plan.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, overload

from wds_async.arguments import check_size
from wds_async.distributed.engines.base import TaskEngine
from wds_async.distributed.folder import JobFolder, job_url, output_folder
from wds_async.distributed.functions import name_of
from wds_async.distributed.gathering import (
    PLAN_NAME,
    SAMPLE_SHARE,
    GatherWork,
    OutputRule,
    PlanWork,
    ShardNames,
    buckets_of,
    check_ranges,
)
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.ordering import Ordering
from wds_async.distributed.outputs import bytes_of, check_inputs_stay
from wds_async.distributed.plan import planned
from wds_async.distributed.progress import JobStatus, JobSummary
from wds_async.distributed.spill import ScatterWork, spill_name
from wds_async.distributed.tasks import Input, Task, Work, identity
from wds_async.errors import ConfigError, JobFailed, ShardNotFound
from wds_async.reading.options import on_corrupt_policy
from wds_async.redact import redact
from wds_async.storage.listing.expand import Urls, folder_entries
from wds_async.storage.options import StorageOptions
from wds_async.storage.removal import remove

__all__ = ["PLAN", "SCATTER", "ReshardJob", "reshard", "reshard_of"]

SCATTER, PLAN = "/scatter", "/plan"
"""The folders of the first two phases, within that of the job."""

_MIB = 1 << 20
_LEAST_MEMORY = 256 * _MIB
_RUN_SHARE, _BUCKET_SHARE, _READER_SHARE = 0.35, 0.2, 1 / 16
"""Shares of a task's memory: a run that is gathered; one of two buckets; parts that are on their way."""
_TASK_BYTES = (32 * _MIB, 1024 * _MIB)
_TASKS = 32
_DEFAULT_SIZE = 1_000_000_000
_ASKED = ("output", "order", "rule", "memory", "on_corrupt", "join", "joined")
"""Names in ``job.json`` of what was asked for, from which, with the inputs, the job can be made again."""
_SUMMED = (
    "tasks", "before", "done", "elsewhere", "retried", "lost", "dropped", "skipped", "bytes_read", "requests",
    "seconds",
)  # fmt: skip


class _ScatterTasks(Sequence[Task]):
    """Tasks of the first pass: consecutive inputs of at most ``task_bytes`` together, or one; those of the join last.
    They are made when they are asked for."""

    def __init__(self, inputs: Sequence[Input], joined: Sequence[Input], task_bytes: int) -> None:
        self._sides = (joined, inputs)
        self._groups: list[tuple[int, int, int]] = []  # side, first, last
        for side in (1, 0):
            first = held = 0
            for number, one in enumerate(self._sides[side]):
                size = task_bytes if one.size is None else one.size
                if number > first and held + size > task_bytes:
                    self._groups.append((side, first, number))
                    first, held = number, 0
                held += size
            if self._sides[side]:
                self._groups.append((side, first, len(self._sides[side])))

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, number: int) -> Task: ...

    @overload
    def __getitem__(self, number: slice) -> list[Task]: ...

    def __getitem__(self, number: int | slice) -> Task | list[Task]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        place = range(len(self))[operator.index(number)]
        side, first, last = self._groups[place]
        return Task(place, tuple(self._sides[side][first:last]), {"first": first, "side": side})


class ReshardJob:
    """A job in three phases: the jobs ``JOB/scatter``, ``JOB/plan`` and, the outputs, ``JOB``. Nothing is written
    before `run`. Spill objects, as many bytes as the inputs, are in ``JOB/spill/`` until the end."""

    def __init__(
        self,
        scatter: ScatterWork,
        tasks: Sequence[Task],
        plan: PlanWork,
        gather: GatherWork,
        folder: JobFolder,
        *,
        overwrite: bool,
        **options: Any,
    ) -> None:
        self.folder = folder
        self._tasks, self._scatter, self._plan, self._gather = tasks, scatter, plan, gather
        self._overwrite, self._options = overwrite, options

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {redact(self.folder.url)}: {len(self._tasks):,} tasks in the first pass>"

    @property
    def first_pass(self) -> Job:
        """The job that reads the inputs."""
        return self._job(self._scatter, self._tasks, SCATTER)

    def run(self) -> JobSummary:
        """Run all phases, from where they stand, and return what was done: the samples that were read, and those that
        were written. Call it again, in any process, after it stopped. See `Job.run` for what it raises."""
        return self._run(only_failed=False)

    def retry(self) -> JobSummary:
        """Run the tasks that failed in an earlier run, and the later phases where these have not begun. JobFailed where
        other tasks of a phase have no record either."""
        return self._run(only_failed=True)

    def status(self) -> JobStatus:
        """Return what the folders say of all phases begun so far, taken together."""
        phases = [self.first_pass.status()]
        if phases[0].finished == phases[0].tasks:
            phases.append(self._planning().status())
            if phases[1].finished:
                phases.append(self._gathering().status())
        failed = tuple(itertools.chain.from_iterable(one.failed for one in phases))
        finished, tasks = sum(one.finished for one in phases), sum(one.tasks for one in phases)
        return JobStatus(self.folder.url, tasks, finished, failed, phases[-1].complete and len(phases) == 3)

    def _run(self, *, only_failed: bool) -> JobSummary:
        scatter, plan = self.first_pass, self._planning()
        finished = scatter.folder.finished(), plan.folder.finished()
        spilled = self._spilled()  # after the records, and before the look whether all is done: then they are removed
        phases: list[JobSummary] = []
        before = self._complete()
        if before is None:
            self._forget(scatter.folder, finished[0], spill_name, spilled)
            self._forget(plan.folder, finished[1], lambda number: PLAN_NAME, spilled)
            try:
                for job in (scatter, plan):
                    phases.append(_start(job, only_failed))
                    job.wait()
                phases.append(_start(self._gathering(), only_failed))
            except JobFailed:
                if self._complete() is None:  # another runner has finished it, and removed the spill objects
                    raise
        if before is not None or self._complete() is not None:
            remove([self._scatter.folder], self.folder.options)
        return self._summary(phases, before or 0)

    def _planning(self) -> Job:
        """Return the job that makes the plan, of one task, which depends on the whole first pass."""
        work = self._scatter.describe()
        ids = identity([one.identity(work) for one in self._tasks])
        return self._job(self._plan, [Task(0, (), {"tasks": len(self._tasks), "scatter": ids})], PLAN)

    def _gathering(self) -> Job:
        """Return the job of the last phase, which the plan's record describes."""
        plan = JobFolder(f"{self.folder.url}{PLAN}", self.folder.options).record(0)
        shards, step = int(plan.more["shards"]), int(plan.more["shards_per_task"])
        crc = plan.outputs[0].crc32c
        tasks = [
            Task(number, (), {"first": first, "last": min(shards, first + step), "plan": crc})
            for number, first in enumerate(range(0, shards, step))
        ]
        return self._job(self._gather, tasks, "")

    def _job(self, work: Work, tasks: Sequence[Task], suffix: str) -> Job:
        folder = JobFolder(f"{self.folder.url}{suffix}", self.folder.options)
        return Job(work, tasks, folder, overwrite=self._overwrite, finishes=not suffix, **self._options)

    def _complete(self) -> int | None:
        """Return the number of tasks if all outputs are there; JobChanged where the folder holds another job."""
        contents = self.folder.contents()
        if not contents.begun:
            return None
        there = self.folder.document()
        if there.get("work") == self._gather.describe():
            return int(there["tasks"]) if contents.complete else None
        if not self._overwrite:
            self.folder.compare({**there, "work": self._gather.describe()})
        return None

    def _spilled(self) -> set[str]:
        """Return the names of the spill objects that are there, and of the plan."""
        try:
            entries = list(folder_entries(self._scatter.folder, options=self.folder.options))
        except ShardNotFound:
            return set()
        return {entry.url.rpartition("/")[2] for entry in entries}

    def _forget(self, folder: JobFolder, finished: set[int], name: Callable[[int], str], spilled: set[str]) -> None:
        """Remove the records of the tasks whose spill objects are gone: they are to be done again."""
        lost = [number for number in sorted(finished) if name(number) not in spilled]
        remove([f"{folder.url}/{number:05d}.json" for number in lost], folder.options)

    def _summary(self, phases: Sequence[JobSummary], before: int) -> JobSummary:
        """Return the sums over the phases, with the samples and bytes in and out of the whole; ``before``
        tasks of a job that was complete."""
        nothing = JobSummary(job=self.folder.url, tasks=before, before=before)
        if before:
            return nothing
        first, last = phases[0] if phases else nothing, phases[2] if len(phases) == 3 else nothing
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in phases) for name in _SUMMED}
        sums["dollars"] = functools.reduce(operator.add, (one.dollars for one in phases), nothing.dollars)
        return replace(last, job=self.folder.url, samples_in=first.samples_in, bytes_in=first.bytes_in, **sums)


def _start(job: Job, only_failed: bool) -> JobSummary:
    """Run one phase, or the tasks of it that failed."""
    contents = job.folder.contents()
    if not only_failed or not contents.begun:
        return job.run()
    if left := len(job.tasks) - len(contents.finished | contents.failed):
        raise JobFailed(
            f"{redact(job.folder.url)}: {left:,} tasks have no record and have not failed either, as where a runner was"
            " stopped. Run the job, not its failed tasks alone (--unfinished)"
        )
    return job.retry()


def reshard(
    inputs: Urls,
    output: str,
    *,
    shuffle: int | None = None,
    sort: str | Callable[[Any], Any] | None = None,
    reverse: bool = False,
    split: str | Callable[[Any], str | None] | None = None,
    join: Urls | None = None,
    how: str = "inner",
    shards: int | None = None,
    maxcount: int | None = None,
    maxsize: float | str | None = None,
    memory: float | str = "1GiB",
    version: str = "",
    on_corrupt: str | None = None,
    job: str = "reshard",
    engine: TaskEngine | str = "local",
    cpus: float | None = None,
    workers: int | None = None,
    attempts: int = 4,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReshardJob:
    """Return the job that writes the samples of the shards ``inputs`` to other shards, each exactly once.

    ``inputs``: URLs as for `WebDataset` (braces, wildcards, folders). They are listed now, with their versions.
    ``output``: names of the shards: ``"s3://out/s-{000000..004095}.tar"`` for as many shards as it names,
        ``{000000..}`` or ``{shard:06d}`` for as many as there will be; and ``{split}``. See `map_shards` for ``job``.
    ``shuffle``: a seed. It and the list of inputs alone give the order: any of all permutations, equally probable.
    ``sort``: ``"__key__"``, or a function from sample (a dict of bytes) to a number, str, bytes or tuple of these.
        ``reverse``: the largest first. Without ``shuffle``, ``sort`` and ``join`` the inputs' order stays.
    ``split``: a function from sample to the name of its split, or None to drop it. Each split has shards of its own.
    ``join``: shards of another data set. Samples of one key become one, in the order of the keys; a key is in each data
        set once, no field in both. ``how``: "inner" drops samples of ``inputs`` without a partner, "left" keeps them;
        sizes of shards count these alone. "outer" keeps those of both and counts both: one joined of two counts two.
        Not with ``split``, nor with a ``sort`` by a function.
    ``shards``: their number (of each split), equal by samples. ``maxcount``: samples in each but the last one.
        ``maxsize``: bytes of a tar before compression, up to a sample more; the shards are cut equally, and a number is
        missing where a sample is larger. One of the three; None: as many as ``output`` names, else ``maxsize="1G"``.
    ``memory``: bytes that a task may use, 256 MiB or more. A terabyte wants some GiB, else its ranges become small.
    ``version``: of the functions. ``on_corrupt``: see `WebDataset`. For the others see `map_shards`.

    Headers are written anew, with the time 0; names of fields stay as they are. A sample whose key is in its shard
    already gets another one (``KEY-1``): readers take two beside each other for one, and indexes find one only.
    Raise ConfigError for wrong arguments, UrlError and StorageError where the inputs cannot be listed.
    """
    options, names, policy = StorageOptions(storage_options), ShardNames(output), on_corrupt_policy(on_corrupt)
    ordering = _ordering(shuffle, sort, split, join is not None, version, reverse)
    rule, matched, size = _rule(names, shards, maxcount, maxsize), _join_kind(join, how), _memory_bytes(memory)
    if names.has_split != bool(ordering.split):
        raise ConfigError(f"output={redact(output)!r}, split={split!r}: with split=, and only then, it has {{split}}")
    folder = JobFolder(job_url(output_folder(output), job), options)
    sources = _planned(names, inputs, join, options)
    phases = _phases(folder, names, ordering, rule, sources, size, policy, matched)
    values = (redact(output), asdict(ordering), asdict(rule), size, policy, matched, len(sources[1]))
    asked = dict(zip(_ASKED, values, strict=True))
    given: dict[str, Any] = {"options": {"cpus": cpus, "workers": workers}, "attempts": attempts, "inputs": asked}
    return ReshardJob(*phases, folder, overwrite=overwrite, on_progress=on_progress, engine=engine, **given)


def _planned(
    names: ShardNames, inputs: Urls, join: Urls | None, options: StorageOptions
) -> tuple[list[Input], list[Input]]:
    """Return the inputs of both data sets. ConfigError where an output would replace one of them."""
    sources = planned(inputs, options), planned(join, options) if join is not None else []
    check_inputs_stay(names.all_names(), (one.url for source in sources for one in source))
    return sources


def reshard_of(folder: JobFolder, *, engine: TaskEngine | str = "local", **how: Any) -> ReshardJob:
    """Return the job of `reshard` whose folder is ``folder``, as that of its first phase describes it. ``how``:
    arguments of `Job`. ConfigError for inputs whose URLs have secrets, which are not kept."""
    scattered = JobFolder(f"{folder.url}{SCATTER}", folder.options)
    asked, inputs = scattered.document()["inputs"], scattered.inputs()
    if secret := [one.url for one in inputs if "***" in one.url]:
        raise ConfigError(f"{secret[0]}: the secrets of inputs are not kept; start the job as it was started at first")
    first = len(inputs) - int(asked["joined"])
    ordering, rule = Ordering(**asked["order"]), OutputRule(**asked["rule"])
    sources = inputs[:first], inputs[first:]
    names, memory, join = ShardNames(asked["output"]), int(asked["memory"]), asked["join"]
    phases = _phases(folder, names, ordering, rule, sources, memory, asked["on_corrupt"], join)
    return ReshardJob(*phases, folder, overwrite=False, inputs=asked, engine=engine, **how)


def _join_kind(join: Urls | None, how: str) -> str:
    """Return "" for no join, else ``how``."""
    if how not in ("inner", "left", "outer"):
        raise ConfigError(f"how={how!r}: 'inner', 'left' or 'outer'")
    return how if join is not None else ""


def _memory_bytes(memory: float | str) -> int:
    size = bytes_of(memory, "memory")
    if size < _LEAST_MEMORY:
        raise ConfigError(f"memory={memory!r}: bytes that a task may use, at least 256 MiB")
    return size


def _phases(
    folder: JobFolder,
    names: ShardNames,
    ordering: Ordering,
    rule: OutputRule,
    sources: tuple[Sequence[Input], Sequence[Input]],
    memory: int,
    on_corrupt: str,
    join: str,
) -> tuple[ScatterWork, _ScatterTasks, PlanWork, GatherWork]:
    """Return the work of each phase, and the tasks of the first. ``memory`` is the bytes that a task may use."""
    out, spill, options = folder.out, f"{folder.url}/spill/", folder.options
    total = sum(one.size or 0 for source in sources for one in source)
    task_bytes = max(_TASK_BYTES[0], min(_TASK_BYTES[1], total // _TASKS))
    run, bucket, reader = (int(memory * share) for share in (_RUN_SHARE, _BUCKET_SHARE, _READER_SHARE))
    check_ranges(-(-total // run), buckets_of(total, bucket), bucket)
    sample = int(bucket * SAMPLE_SHARE) // (2 if join else 1)
    scattered = JobFolder(f"{folder.url}{SCATTER}", options)
    ids = identity(*[[[redact(one.url), one.size, one.version] for one in source] for source in sources])
    source = {**asdict(ordering), "join": join, **asdict(rule), "on_corrupt": on_corrupt, "inputs": ids}
    return (
        ScatterWork(ordering, spill, out, run, sample, reader, on_corrupt, options),
        _ScatterTasks(*sources, task_bytes),
        PlanWork(scattered, spill, rule, bucket, task_bytes, reader, join, options),
        GatherWork(spill, names, out, reader, source, options),
    )


def _ordering(shuffle: Any, sort: Any, split: Any, join: bool, version: str, reverse: bool) -> Ordering:
    """Return the order that the arguments of `reshard` ask for. ConfigError where they exclude each other."""
    if shuffle is not None and sort is not None:
        raise ConfigError("shuffle= and sort= are two orders: give one of them")
    if reverse and sort is None:
        raise ConfigError("reverse=True is for sort=: give what to sort by")
    if isinstance(shuffle, bool):
        raise ConfigError(f"shuffle={shuffle!r}: it is a seed, a number; None does not shuffle")
    by = "" if sort is None else sort if sort == "__key__" else name_of(sort, "sort")
    if join and (split is not None or by not in ("", "__key__")):
        raise ConfigError(
            "join= brings samples of one key together: neither split= nor a function for sort= goes with it"
        )
    seed = None if shuffle is None else check_size("reshard", "shuffle", shuffle)
    return Ordering(seed, by, "" if split is None else name_of(split, "split"), join, str(version), bool(reverse))


def _rule(names: ShardNames, shards: Any, maxcount: Any, maxsize: Any) -> OutputRule:
    """Return what a shard holds. ConfigError for more than one rule."""
    if names.count is not None and shards in (None, names.count):
        shards = names.count
    given = {"shards": shards, "maxcount": maxcount, "maxsize": maxsize}
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1 or (names.count is not None and shards != names.count):
        also = f" (output names {names.count:,})" if names.count is not None else ""
        raise ConfigError(f"{', '.join(f'{name}={value!r}' for name, value in chosen.items())}{also}: give one of them")
    if maxsize is not None or not chosen:
        return OutputRule(maxsize=_DEFAULT_SIZE if maxsize is None else bytes_of(maxsize))
    (name,) = chosen
    return OutputRule(**{name: check_size("reshard", name, chosen[name], at_least=1)})
