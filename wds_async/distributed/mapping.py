"""`map_shards`: a function or stage over the samples of any number of shards, written to others."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async import handlers, world
from wds_async.arguments import check_size
from wds_async.checkpoint.packing import load_global_random, save_global_random, seed_generators
from wds_async.distributed.attempts import add_traffic, skipped_entries
from wds_async.distributed.folder import JobFolder, job_url, output_folder
from wds_async.distributed.functions import function_named, name_of
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.outputs import (
    ANY_NUMBER,
    Shards,
    bytes_of,
    check_inputs_stay,
    check_names,
    check_template,
    shard_name,
)
from wds_async.distributed.plan import Plan, planned
from wds_async.distributed.tasks import Record, Task
from wds_async.errors import ConfigError
from wds_async.handlers import Handler, reraise_exception
from wds_async.pipeline import DataPipeline
from wds_async.reading.options import on_corrupt_policy
from wds_async.reading.stage import tarfile_to_samples
from wds_async.redact import redact
from wds_async.stages import FilterFunction, RestCurried, Traits, bound_arguments, pipelinefilter
from wds_async.storage.listing.expand import Urls
from wds_async.storage.options import StorageOptions
from wds_async.writer import make_encoder

__all__ = ["MapWork", "map_shards"]


@dataclass(frozen=True)
class MapWork:
    """Work of `map_shards`. Its fields are arguments of that, as they were checked by `MapWork.checked`."""

    output: str
    """Names of the new shards, with the fields ``task``, ``part`` and ``name``, which is that of the (first) input
    without folder and suffix."""
    function: str
    """``module:function``, also with keyword arguments behind it (`functions.name_of`). It takes a sample, a dict of
    bytes, and returns a sample, several (a list, or it yields them), or None to drop it. With an argument ``rng`` it
    gets a ``random.Random`` that depends on seed, task and key alone. Python's, numpy's and torch's own generators are
    seeded for each task."""
    stage: bool = False
    """True if the function is a stage of a pipeline instead, from an iterator of samples to another: a filter of this
    package, an object or class with ``run(source)``, a list of such, a generator function over samples. Classes are
    called for each task. Given as None, all of these are taken for stages but plain functions."""
    version: str = ""
    """To be changed when the function changes: the job is another one then."""
    seed: int = 0
    maxsize: int | None = None
    """Bytes of fields beyond which another part of a task begins (also as text, ``"500M"``); None: one output each."""
    maxcount: int | None = None
    """Samples, likewise."""
    index: bool = False
    """True if DALI's index is written beside each shard."""
    encoder: bool | str = True
    """Encoder of values, see `TarWriter`: True, False, or the name of a function."""
    handler: str = "wds_async.handlers:reraise_exception"
    """Called with the error of a shard or sample, see `handlers`. What it lets pass stands in the task's record."""
    on_corrupt: str = "raise"
    """See `WebDataset`."""
    options: StorageOptions = field(default_factory=StorageOptions)
    """For the stores' clients; no part of what the job is."""

    @classmethod
    def checked(
        cls,
        output: str,
        function: str | Callable[..., Any],
        stage: bool | None,
        *,
        maxsize: float | str | None,
        maxcount: int | None,
        encoder: bool | str | Callable[..., Any],
        handler: str | Handler,
        on_corrupt: str | None,
        **others: Any,
    ) -> MapWork:
        """Return the work for these arguments. ConfigError for wrong ones, and for functions that no worker can
        import."""
        name = name_of(function)
        found = function_named(name)
        is_stage = _is_stage(found) if stage is None else stage
        if is_stage:
            _stages(found, name)
        elif not callable(found) or inspect.iscoroutinefunction(found):
            kind = f"{type(found).__name__} that is async" if callable(found) else type(found).__name__
            raise ConfigError(f"function={name}: a {kind} is no function of a sample, and no stage")
        encoder = encoder if isinstance(encoder, bool) else name_of(encoder, "encoder")
        make_encoder(function_named(encoder, "encoder") if isinstance(encoder, str) else encoder, None)
        return cls(
            output,
            name,
            is_stage,
            maxsize=None if maxsize is None else bytes_of(maxsize),
            maxcount=None if maxcount is None else check_size("map_shards", "maxcount", maxcount, at_least=1),
            encoder=encoder,
            handler=name_of(handler, "handler"),
            on_corrupt=on_corrupt_policy(on_corrupt),
            **others,
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "options"}
        return {"kind": "map", **fields, "output": redact(self.output)}

    @classmethod
    def of(cls, description: Mapping[str, Any], options: StorageOptions) -> MapWork:
        """Return the work that `describe` described."""
        return cls(**{name: value for name, value in description.items() if name != "kind"}, options=options)

    def run(self, task: Task) -> Record:
        """Read the shards of ``task``, and write what the function makes of their samples."""
        function_named(self.function)  # what it imports draws from generators too
        saved = save_global_random()
        seed_generators(world.make_seed(self.seed, task.number))
        try:
            return self._run(task)
        finally:
            load_global_random(saved)

    def _run(self, task: Task) -> Record:
        counts = _Counts()
        pipeline = self._pipeline(task, counts)
        pipeline.set_epoch(0)  # stages may count their iterations in this process
        out = output_folder(self.output)
        try:
            with pipeline, self._shards(task, out) as shards:
                write = shards.write
                for sample in pipeline:
                    try:
                        write(sample)
                    except Exception as exn:
                        key = sample.get("__key__") if isinstance(sample, Mapping) else type(sample).__name__
                        exn.add_note(f"when it wrote the new sample {key!r}")
                        raise
        finally:
            add_traffic(pipeline.traffic())
        skipped, more = skipped_entries(pipeline.ledger)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=tuple(shards.outputs),
            samples_in=counts.samples_in,
            samples_out=shards.samples,
            dropped=counts.dropped,
            bytes_in=sum(one.size or 0 for one in task.inputs) or int(pipeline.statistics().bytes),
            bytes_out=shards.bytes,
            skipped=skipped,
            more=more,
        )

    def _pipeline(self, task: Task, counts: _Counts) -> DataPipeline:
        handler = function_named(self.handler, "handler")
        infos = [{"url": one.url} | ({"version": one.version} if one.version else {}) for one in task.inputs]
        reading = tarfile_to_samples(handler, storage_options=self.options, on_corrupt=self.on_corrupt)
        function = function_named(self.function)
        if self.stage:
            seeds = itertools.count(world.make_seed(self.seed, task.number, "stages"))
            stages = [_handled(_seeded(stage, next(seeds)), handler) for stage in _stages(function, self.function)]
            return DataPipeline(infos, reading, functools.partial(_counted, counts=counts), *stages)
        if _takes_rng(function):
            function = functools.partial(_with_rng, function, f"{self.seed}/{task.number}/")
        return DataPipeline(infos, reading, _each(function, counts, handler))

    def _shards(self, task: Task, out: str) -> Shards:
        return Shards(
            self.output,
            task.number,
            out,
            maxsize=float("inf") if self.maxsize is None else self.maxsize,
            maxcount=float("inf") if self.maxcount is None else self.maxcount,
            encoder=function_named(self.encoder, "encoder") if isinstance(self.encoder, str) else self.encoder,
            index=self.index,
            options=self.options,
            name=shard_name(task.inputs[0].url),
        )


def map_shards(
    inputs: Urls,
    output: str,
    function: str | Callable[..., Any],
    *,
    stage: bool | None = None,
    seed: int = 0,
    version: str = "",
    maxsize: float | str | None = None,
    maxcount: int | None = None,
    index: bool = False,
    encoder: bool | str | Callable[..., Any] = True,
    handler: str | Handler = reraise_exception,
    on_corrupt: str | None = None,
    inputs_per_task: int = 1,
    job: str = "map",
    engine: Any = "local",
    cpus: float | None = None,
    workers: int | None = None,
    attempts: int = 4,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Job:
    """Return the job that applies ``function`` to the samples of the shards ``inputs``, and writes new shards.

    ``inputs``: URLs as for `WebDataset`. They are listed now, with their versions; one that is replaced later fails.
    ``output``: names, as in ``"s3://out/train-{task:06d}-{part:03d}.tar"``. The job's folder is ``_wds/JOB`` beside
        them. For the arguments up to ``on_corrupt`` see `MapWork`.
    ``inputs_per_task``: shards that one task reads. ``job``: name of the job, so of its folder.
    ``engine``: its name (`engine_of`), or one. ``cpus``: of one task. ``workers``: processes of this machine.
    ``attempts``, ``overwrite``, ``on_progress``: see `Job`. ``storage_options``: as for `WebDataset`.

    Raise ConfigError for wrong arguments and for a function that no worker can import, UrlError and StorageError where
    the inputs cannot be listed. Nothing is written before `Job.run`.
    """
    options = StorageOptions(storage_options)
    sizes: dict[str, Any] = {"maxsize": maxsize, "maxcount": maxcount, "index": bool(index)}
    kept: dict[str, Any] = {"seed": check_size("map_shards", "seed", seed), "version": str(version), "options": options}
    faults: dict[str, Any] = {"handler": handler, "on_corrupt": on_corrupt}
    work = MapWork.checked(output, function, stage, encoder=encoder, **sizes, **kept, **faults)
    plan = Plan(planned(inputs, options), inputs_per_task)
    check_template(output, len(plan), parts=maxsize is not None or maxcount is not None)
    firsts = [plan[number].inputs[0].url for number in range(len(plan))]
    check_names(output, firsts)
    check_inputs_stay(
        (output.format(task=number, part=ANY_NUMBER, name=shard_name(url)) for number, url in enumerate(firsts)),
        (one.url for number in range(len(plan)) for one in plan[number].inputs),
    )
    folder = JobFolder(job_url(output_folder(output), job), options)
    running: dict[str, Any] = {"engine": engine, "options": {"cpus": cpus, "workers": workers}, "attempts": attempts}
    return Job(work, plan, folder, inputs=_as_json(inputs), overwrite=overwrite, on_progress=on_progress, **running)


@dataclass
class _Counts:
    samples_in: int = 0
    dropped: int = 0


def _counted(source: Iterable[Any], counts: _Counts) -> Iterator[Any]:
    for sample in source:
        counts.samples_in += 1
        yield sample


def _mapped(
    source: Iterable[Any], function: Callable[[Any], Any], counts: _Counts, handler: Handler = reraise_exception
) -> Iterator[Any]:
    """Yield what ``function`` makes of each sample: one, several or none."""
    for sample in source:
        counts.samples_in += 1
        try:
            result = function(sample)
            several = (result,) if type(result) is dict and "__key__" in result else _samples(result)
        except Exception as exn:
            if handlers.passed(handler, _located(exn, sample), sample):
                continue
            return
        counts.dropped += not several
        yield from several


_each = pipelinefilter(_mapped, traits=Traits(handler="handler"))


def _samples(result: Any) -> Sequence[Any]:
    """Return the samples that a function returned. TypeError for what is none, ValueError for one without a key."""
    if result is None:
        return ()
    is_several = isinstance(result, Iterable) and not isinstance(result, Mapping | str | bytes)
    several = list(result) if is_several else [result]
    for one in several:
        if not isinstance(one, Mapping):
            raise TypeError(
                f"the function returned {'several, one of them ' if is_several else ''}a {type(one).__name__}; it"
                " returns a sample, a dict, or several, or None. Is it a stage, from an iterator to another? Then give"
                " stage=True"
            )
        if "__key__" not in one:
            raise ValueError(f"the function returned a sample without __key__, with the fields {list(one)}")
    return several


def _located(exn: Exception, sample: Any) -> Exception:
    """Return ``exn`` with a note of the sample that it is about."""
    shard, offset = getattr(sample, "shard", None) or sample.get("__url__"), getattr(sample, "offset", None)
    at = "" if offset is None else f" at byte {offset}"
    exn.add_note(f"in the sample {sample.get('__key__')!r}{at} of {redact(str(shard))}")
    return exn


def _takes_rng(function: Callable[..., Any]) -> bool:
    code = getattr(getattr(function, "func", function), "__code__", None)
    return code is not None and "rng" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _with_rng(function: Callable[..., Any], prefix: str, sample: Any) -> Any:
    return function(sample, rng=random.Random(f"{prefix}{sample['__key__']}"))


def _is_stage(found: Any) -> bool:
    """Return whether it is seen to be a stage: a filter, an object or class with ``run``, a list of stages."""
    return isinstance(getattr(found, "func", found), RestCurried | list | tuple) or hasattr(found, "run")


def _stages(found: Any, name: str) -> list[Any]:
    """Return the stages that ``found`` is. ConfigError for what is none."""
    stages: list[Any] = []
    for one in found if isinstance(found, list | tuple) else [found]:
        stage = one() if isinstance(getattr(one, "func", one), RestCurried | type) else one
        if not callable(stage) and not hasattr(stage, "run"):
            raise ConfigError(f"function={name}: {stage!r:.80} is no stage, from an iterator to an iterator")
        stages.append(stage)
    return stages


def _seeded(stage: Any, seed: int) -> Any:
    """Return a filter that would draw its seed itself, such as `shuffle`, with ``seed``, and one that has a generator
    with a copy of that, as it was when it was made; any other stage as it is."""
    bound = bound_arguments(stage) if type(stage) is FilterFunction else None
    if bound is None or "seed" not in bound.signature.parameters:
        return stage
    if (rng := bound.arguments.get("rng")) is not None:
        bound.arguments["rng"] = copy.deepcopy(rng)
    elif bound.arguments.get("seed") is None:
        bound.arguments["seed"] = seed
    return FilterFunction(stage.f, *bound.args[1:], **bound.kwargs)


def _handled(stage: Any, handler: Handler) -> Any:
    """Return a filter that has no handler of its own with ``handler``; any other stage as it is."""
    bound = bound_arguments(stage) if type(stage) is FilterFunction else None
    if bound is None or "handler" not in bound.signature.parameters or "handler" in bound.arguments:
        return stage
    return FilterFunction(stage.f, *stage.args, **stage.kw, handler=handler)


def _as_json(inputs: Urls) -> Any:
    if isinstance(inputs, str | os.PathLike):
        return redact(os.fspath(inputs))
    urls = [redact(os.fspath(url)) for url in inputs]
    return urls if len(urls) <= 100 else [*urls[:100], f"and {len(urls) - 100:,} more"]
