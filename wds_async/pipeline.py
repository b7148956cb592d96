"""A list of stages that becomes one iterator, and the currying that makes a stage of a function.

A stage is an iterable or a callable without arguments (the first), a callable from iterator to iterator, or
an object with ``run(source)``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from wds_async import config, world
from wds_async.errors import ConfigError, ReaderClosed
from wds_async.handlers import Recorder, check_handler, reraise_exception
from wds_async.ledger import Ledger, Ledgers, Pass, ledger_of, ledgers_of

__all__ = [
    "DataPipeline",
    "FilterFunction",
    "Inheriting",
    "PipelineStage",
    "RestCurried",
    "Sourced",
    "pipelinefilter",
    "stage_maker",
    "stage_of",
    "stages_of",
]

_OURS = "wds_async."
_Maker = TypeVar("_Maker", bound=Callable[..., Any])


class PipelineStage:
    """Base for users' own stages that keep state: give them ``run(self, source)`` returning an iterator."""

    def run(self, *args: Any, **kw: Any) -> Iterable[Any]:
        """Turn the source into this stage's output."""
        raise NotImplementedError(f"{type(self).__name__} is a stage without run(self, source)")


class FilterFunction:
    """A stage: function ``f`` that gets the source first, then ``args`` and ``kw``. Pickles if they do."""

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.f = f
        self.args = args
        self.kw = kw

    def __call__(self, source: Iterable[Any]) -> Any:
        """The stage's output over ``source``."""
        return self.f(source, *self.args, **self.kw)

    run = __call__

    def __repr__(self) -> str:
        return f"<{self.f.__name__} {self.args} {self.kw}>"

    def __getstate__(self) -> dict[str, Any]:
        # Decorating with pipelinefilter leaves the stage maker under the function's name, where pickle looks
        # for the function: so the maker is stored in its place.
        module = sys.modules.get(getattr(self.f, "__module__", None) or "")
        named = getattr(module, getattr(self.f, "__qualname__", ""), None)
        decorated = isinstance(named, RestCurried) and named.f is self.f
        return {**self.__dict__, "f": named} if decorated else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.f, RestCurried):
            self.f = self.f.f


class RestCurried:
    """What `pipelinefilter` makes: called with everything but the source, it gives the stage."""

    def __init__(self, f: Callable[..., Any]) -> None:
        functools.update_wrapper(self, f)
        self.f = f

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        self._check(args, kw)
        return FilterFunction(self.f, *args, **kw)

    def _check(self, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
        """Wrong arguments are told here, in the user's line, and not when the first sample is asked for."""
        name = getattr(self.f, "__name__", "stage").lstrip("_")
        if kw.get("handler") is not None:
            check_handler(kw["handler"])
        try:
            signature = inspect.signature(self.f)
        except ValueError:  # of some built-in functions
            return
        try:
            signature.bind(None, *args, **kw)
        except TypeError as exn:
            raise TypeError(f"{name}(): {exn}") from None

    def __reduce__(self) -> Any:
        # By name where the decorated name is this object, else by the function it wraps.
        module = sys.modules.get(getattr(self, "__module__", None) or "")
        name = getattr(self, "__qualname__", "")
        return name if getattr(module, name, None) is self else (pipelinefilter, (self.f,))


def pipelinefilter(f: Callable[..., Any]) -> RestCurried:
    """Make stages of ``f(source, *args, **kw)``: the result takes all arguments but the source.

    >>> double = pipelinefilter(lambda source, by: (by * x for x in source))
    >>> list(DataPipeline([1, 2], double(2)))
    [2, 4]
    """
    return RestCurried(f)


def stage_maker(f: _Maker) -> _Maker:
    """Decorator of functions that return a stage (``tarfile_to_samples``): `stage_of` calls them without a source."""
    f.makes_stages = True  # type: ignore[attr-defined]
    return f


def stage_of(f: Any, *args: Any, **kw: Any) -> Any:
    """The stage that ``f`` with these arguments is.

    A filter of ours (``wds.shuffle, 100``), a `stage_maker` and a class of stages (``wds.DBCache, "x.db", 1000``) are
    called with the arguments; a function gets the source before them (``add_noise, noise=0.02``). A class with
    ``source_`` is a dataset that takes its source that way. Raises ConfigError for what cannot be called.
    """
    if isinstance(f, RestCurried):
        return f(*args, **kw)
    if _makes_stages(f):
        made = f(*args, **kw)
        return made if hasattr(made, "run") else Sourced(made)
    if hasattr(f, "run") and not args and not kw:
        return f
    if not callable(f):
        raise ConfigError(f"{f!r:.80} of type {type(f).__name__} is no function from an iterator to an iterator")
    return FilterFunction(f, *args, **kw)


def stages_of(*stages: Any, **kw: Any) -> list[Any]:
    """What ``compose(*stages)`` means: these, or one stage that is written with its arguments behind it, as a class
    of stages is, and a function with an argument that is no stage itself (``compose(DBCache, "x.db", 1000)``)."""
    arguments = any(not callable(stage) and not hasattr(stage, "run") for stage in stages[1:])
    return [stage_of(*stages, **kw)] if kw or arguments or _makes_stages(*stages[:1]) else list(stages)


def _makes_stages(f: Any = None) -> bool:
    if isinstance(f, type):
        return hasattr(f, "run") or hasattr(f, "source_")
    return getattr(f, "makes_stages", False) is True


class Sourced(PipelineStage):
    """A dataset with ``source_(source)`` as a stage."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a copy of the dataset that has this source."""
        bound = copy.copy(self.dataset)
        bound.source_(source)
        return iter(bound)


class Inheriting:
    """Base of what is pickled for DataLoader workers: a spawned one is told of its parent what it cannot find out,
    the rank (it has no process group) and that security is enforced."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if world.spawning():
            here = world.place()
            if here.world_size > 1:
                state["_rank"] = (here.rank, here.world_size)
            state["_secure"] = config.security_enforced()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        world.inherit_rank(state.pop("_rank", None))
        config.inherit_security(state.pop("_secure", False))
        self.__dict__.update(state)


class DataPipeline(world.TorchDataset, Inheriting):
    """Stages one after another, as an iterable that can be run many times.

    ``None`` among the stages is skipped and a list is taken for several stages. ``pipeline`` is the plain list of
    them, to be read and edited. `compose` and the fluent methods give new pipelines that share the stages;
    `with_epoch`, `with_length` and `repeat` change this one and return it. torch's DataLoader takes it
    for an ``IterableDataset``.
    """

    def __init__(self, *stages: Any) -> None:
        self.pipeline: list[Any] = []
        self.repetitions = 1
        self.nsamples = -1
        self.size: int | None = None
        self.closed = False
        for stage in stages:
            if isinstance(stage, list):
                self.pipeline.extend(stage)
            elif stage is not None:
                self.pipeline.append(stage)

    def invoke(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of stage ``f`` over the source, or of the first stage where no source is given.

        Raises ConfigError for an object that is no stage.
        """
        if isinstance(f, RestCurried) or getattr(f, "makes_stages", False) is True:
            name = getattr(f, "__name__", "stage").lstrip("_")
            raise ConfigError(f"{name} stands in the pipeline without its call: write {name}(…)")
        if not args and hasattr(f, "__iter__") and not isinstance(f, (type, str)):
            return iter(f)
        if hasattr(f, "run"):
            return f.run(*args, **kwargs)
        if callable(f):
            return f(*args, **kwargs)
        where = "stage" if args else "first stage"
        raise ConfigError(
            f"{f!r} of type {type(f).__name__} is not a {where} of a pipeline: give an iterable (first), "
            "a callable from iterator to iterator, or an object with run(source)"
        )

    def iterator1(self) -> Iterator[Any]:
        """Run the stages once."""
        if self.closed:
            raise ReaderClosed(f"this {type(self).__name__} was closed; make a new one")
        if not self.pipeline:
            raise ConfigError("a pipeline without stages cannot be iterated; append a source first")
        source = self.invoke(self.pipeline[0])
        recorders = _Recorders(self.pipeline)
        for stage in self.pipeline[1:]:
            source = self.invoke(recorders.noting(stage), source)
        return iter(source)

    def iterator(self) -> Iterator[Any]:
        """Run the stages ``repetitions`` times; a run that yields nothing ends it."""
        for _ in range(self.repetitions):
            empty = True
            for sample in self.iterator1():
                empty = False
                yield sample
            if empty:
                return

    def __iter__(self) -> Iterator[Any]:
        if self.repetitions == 1:
            return self.iterator1()
        return itertools.islice(self.iterator(), self.nsamples) if self.nsamples > 0 else self.iterator()

    def stage(self, i: int) -> Any:
        """Stage number ``i``, 0 being the source."""
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Add stage ``f`` to the end of this pipeline."""
        self.pipeline.append(f)

    def compose(self, *stages: Any, **kw: Any) -> Any:
        """A new pipeline of the same class with ``stages`` added.

        The earlier stages are shared, but for those that count epochs (`detshuffle`, `ResampledShards`, mixes): each
        pipeline counts its own, so call `set_epoch` on the one that is iterated.

        One stage may be written with its arguments: ``compose(DBCache, "x.db", 1000)`` (see `stages_of`).
        """
        result = copy.copy(self)
        own = [stage.apart() if hasattr(stage, "apart") else stage for stage in self.pipeline]
        result.pipeline = [*own, *stages_of(*stages, **kw)]
        return result

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Any:
        """End each iteration after ``nsamples`` items (samples, or batches after `batched`), starting the source
        again when it ends earlier. Changes this object and returns it.

        On a dataset the count is that of each worker; on a `WebLoader` it is what comes out of it, of all workers
        together. A number below 1 sets no end: the iteration goes on for ever, so see to it that
        ``total // (batch * world_size)`` is not 0.

        A shard that is partly read when an epoch ends is read from its start in a later one.
        """
        self.repetitions = sys.maxsize
        self.nsamples = max(nsamples, nbatches)
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Any:
        """Run the source ``nepochs`` times (for ever unless positive), at most ``nbatches`` items in all.
        Changes this object and returns it."""
        self.repetitions = nepochs if nepochs > 0 else sys.maxsize
        self.nsamples = nbatches
        return self

    def with_length(self, n: int, silent: bool = False) -> Any:
        """Make ``len`` give ``n``, for loaders and progress bars that ask. It does not change how many samples there
        are, and a warning says so unless ``silent``. Changes this object and returns it."""
        if not silent:
            warnings.warn(
                f"with_length({n}) changes what len() says, not how many samples come; with_length(n, silent=True) if "
                "that is meant, with_epoch(n) for epochs of that length",
                stacklevel=2,
            )
        self.size = n
        return self

    def __len__(self) -> int:
        # TypeError is what list(), tqdm, Lightning and Trainer expect of an iterable that does not know.
        if self.size is None:
            raise TypeError(f"{type(self).__name__} has no len(): with_length(n) gives it one")
        return self.size

    def __bool__(self) -> bool:
        return True  # not len(): `if dataset:` asks whether there is one

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, in every stage that shuffles or resamples shards.

        Needed only where ranks may have begun different numbers of iterations, or to go on after a restart.
        Call it before the epoch's ``iter(loader)``; it reaches the workers, persistent ones included.
        """
        for stage in self._holders("set_epoch"):
            stage.set_epoch(epoch)

    def statistics(self) -> Any:
        """What the shard readers of this pipeline did so far, in this process and its DataLoader workers, as a
        `transfer.stats.Stats`. None where no stage reads shards."""
        return self._sum("statistics")

    def traffic(self) -> Any:
        """What they asked of each origin, as a `transfer.traffic.Traffic`, likewise; of workers a second old."""
        return self._sum("traffic")

    def _sum(self, method: str) -> Any:
        found = [one for stage in self._holders(method) if (one := getattr(stage, method)()) is not None]
        return functools.reduce(operator.add, found) if found else None

    @property
    def ledger(self) -> Ledger | Ledgers | None:
        """What was passed over, by the shard readers of this pipeline and the stages behind them, in this process and
        its DataLoader workers (see `ledger.Ledger`). None where no stage reads shards."""
        return ledger_of(self.pipeline)

    def _holders(self, method: str) -> list[Any]:
        """The stages that offer ``method``; for a DataLoader, its dataset."""
        stages = [s if hasattr(s, method) else getattr(s, "dataset", None) for s in self.pipeline]
        return [stage for stage in stages if hasattr(stage, method)]

    def close(self) -> None:
        """Close every stage that can be closed, iterators that are still open included. Idempotent."""
        self.closed = True
        for stage in self.pipeline:
            if callable(close := getattr(stage, "close", None)):
                close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Recorders:
    """Gives our own filters a handler that notes in the readers' ledger what it lets pass."""

    def __init__(self, pipeline: list[Any]) -> None:
        self._pipeline = pipeline
        self._pass: Pass | None = None
        self._in_one = 1  # samples in an item: more behind `batched`

    def noting(self, stage: Any) -> Any:
        """``stage`` itself, or one that notes."""
        if type(stage) is not FilterFunction or not str(getattr(stage.f, "__module__", "")).startswith(_OURS):
            return stage  # what users write asks handlers of its own
        try:
            given = inspect.signature(stage.f).bind(None, *stage.args, **stage.kw)
        except (TypeError, ValueError):
            return stage  # said when it is called
        name = stage.f.__name__.lstrip("_")
        if name in ("batched", "unbatched", "unlisted"):
            given.apply_defaults()
            self._in_one = given.arguments.get("batchsize", 1)
        handler = given.arguments.get("handler")
        if handler is None or handler is reraise_exception:
            return stage
        if self._pass is None:
            ledgers = ledgers_of(self._pipeline)
            if not ledgers:
                return stage
            self._pass = ledgers[0].current()
        given.arguments["handler"] = Recorder(handler, functools.partial(self._pass.note_sample, name, self._in_one))
        return FilterFunction(stage.f, *given.args[1:], **given.kwargs)
