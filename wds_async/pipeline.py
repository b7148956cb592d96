"""A list of stages that becomes one iterator."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import itertools
import operator
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Self

from wds_async import config, environment, world
from wds_async.arguments import check_size
from wds_async.errors import ConfigError, ReaderClosed, StateError
from wds_async.handlers import Recorder, reraise_exception
from wds_async.stages import (
    FilterFunction,
    PipelineStage,
    ProfiledItems,
    RestCurried,
    Traits,
    bound_arguments,
    pipelinefilter,
    stages_of,
    traits_of,
)
from wds_async.tracebacks import Shortened, shortened, warn

if TYPE_CHECKING:
    from wds_async.checkpoint.run import Declared, Run
    from wds_async.checkpoint.states import WorkerStates
    from wds_async.observe.ledger import Ledger, Ledgers

__all__ = ["Composite", "DataPipeline", "Inheriting", "PipelineStage", "epochs_of", "pipelinefilter"]

STATE_VERSION = 1
"""Version of the states of pipelines; a state of another one is refused."""

_open: weakref.WeakSet[Iterator[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what is being iterated. Where other packages refer to it, it would be closed after its modules are gone."""
    for items in list(_open):
        with contextlib.suppress(ValueError):  # a thread of the program is in it
            items.close()  # type: ignore[attr-defined]


class Inheriting:
    """Base of what is pickled for DataLoader workers: a spawned one inherits the rank (it has no process group) and
    that security is enforced."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_iteration", "_past", "_shards_read"):  # a copy has none
            state.pop(name, None)
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


class Composite:
    """Base of what is made of stages or datasets: calls that reach those of them that have the method."""

    def _parts(self) -> Sequence[Any]:
        raise NotImplementedError

    def _call(self, method: str, *args: Any) -> list[Any]:
        holders = [holder for part in self._parts() for holder in _holders(part, method)]
        return [getattr(holder, method)(*args) for holder in holders]

    def _sum(self, method: str) -> Any:
        numbers = [one for one in self._call(method) if one is not None]
        return functools.reduce(operator.add, numbers) if numbers else None

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, wherever shards are shuffled or resampled."""
        self._call("set_epoch", epoch)

    def statistics(self) -> Any:
        """Return the counts of the shard readers so far, in this process and its DataLoader workers, as a
        `transfer.stats.Stats`. None if no stage reads shards.
        """
        return self._sum("statistics")

    def traffic(self) -> Any:
        """Return the shard readers' requests to each origin, as a `transfer.traffic.Traffic`, likewise; the figures of
        workers are up to a second old.
        """
        return self._sum("traffic")

    def close(self) -> None:
        """Close all that can be closed. Idempotent."""
        for part in self._parts():
            if callable(close := getattr(part, "close", None)):
                close()


def _holders(thing: Any, method: str, depth: int = 8) -> list[Any]:
    """Return ``thing`` if it has ``method``, else those that have it among the datasets in it, as in a DataLoader."""
    if hasattr(thing, method):
        return [thing]
    datasets = getattr(thing, "datasets", None)
    within = datasets if isinstance(datasets, list | tuple) else [getattr(thing, "dataset", None)]
    return [holder for one in within if depth and one is not None for holder in _holders(one, method, depth - 1)]


class DataPipeline(world.TorchDataset, Composite, Inheriting):
    """Stages one after another, as an iterable that can be run many times.

    A stage is an iterable (the first one), a function from iterator to iterator, or an object with ``run(source)``.
    None is skipped. A list is taken for several stages, but a list of dicts (``{"url": …}``) for a source. Keyword
    arguments have no effect, as in WebDataset, and a warning says so.

    ``pipeline`` is the plain list of the stages, which may be read and edited. `compose` and the fluent methods return
    new pipelines that share the stages; `with_epoch`, `with_length` and `repeat` change this one and return it. torch's
    DataLoader takes it for an ``IterableDataset``.
    """

    _iteration: _Iteration | None = None
    """The latest iteration in this process, until it ends."""
    _past: Mapping[str, Any] | None = None
    """History of the latest iteration, once it is over."""
    _loaded: Mapping[str, Any] | None = None
    """The state that the next iteration goes on from."""
    _loaded_in: tuple[int, int] | None = None
    """The DataLoader worker that loaded it."""
    _worker_states: WorkerStates | None = None

    def __init__(self, *stages: Any, **ignored: Any) -> None:
        if ignored:
            text = f"DataPipeline takes stages only; {', '.join(ignored)} has no effect here: give it to the stages"
            warnings.warn(text, stacklevel=2)
        self.pipeline: list[Any] = []
        self.repetitions = 1
        self.nsamples = -1
        self.size: int | None = None
        self.closed = False
        for stage in stages:
            if isinstance(stage, list) and not (stage and isinstance(stage[0], Mapping)):
                self.pipeline.extend(stage)
            elif stage is not None:
                self.pipeline.append(stage)

    def invoke(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of stage ``f`` over the source; of the first stage, without one. ConfigError for an object
        that is no stage."""
        _check_stage(f, first=not args)
        if not args and hasattr(f, "__iter__") and not isinstance(f, type):
            return iter(f)
        return f.run(*args, **kwargs) if hasattr(f, "run") else f(*args, **kwargs)

    def iterator1(self) -> Iterator[Any]:
        """Run the stages once."""
        return self._run_once(_Iteration(self._epochs()))

    def _run_once(self, iteration: _Iteration) -> Iterator[Any]:
        from wds_async.checkpoint.run import Run  # noqa: PLC0415 (the engine)

        if self.closed:
            raise ReaderClosed(f"this {type(self).__name__} was closed; make a new one")
        if not self.pipeline:
            raise ConfigError("a pipeline without stages cannot be iterated; append a source first")
        if iteration.saved_steps is not None:
            raise StateError("the state is of a dataset with equal= or steps=, and this one has neither")
        if iteration.run is not None:
            self._pass_over(iteration)
        saved, iteration.saved_run = iteration.saved_run, None
        run = iteration.run = Run(self.declared(), saved, self._sources(), self.shards_read)
        source = run.first(self.invoke)
        is_profiled = bool(environment.value("WDS_PROFILE"))
        for number, stage in enumerate(_noting(self.pipeline, run), 1):
            _check_stage(stage, first=False)
            source = self.invoke(run.bind(number, stage), run.input_of(number, source))
            if is_profiled:
                source = ProfiledItems(source, f"wds.{_kind_of(stage)}")
        return run.items(source)

    def iterator(self) -> Iterator[Any]:
        """Run the stages ``repetitions`` times; a run that yields nothing ends it."""
        return self._run_often(_Iteration(self._epochs()))

    def _run_often(self, iteration: _Iteration) -> Iterator[Any]:
        loaded = iteration.saved_run is not None
        return self._repeated(iteration, self._run_once(iteration), loaded)  # it begins its epoch now

    def _repeated(self, iteration: _Iteration, items: Iterator[Any], loaded: bool) -> Iterator[Any]:
        while True:
            empty = not loaded
            for sample in items:
                empty = False
                yield sample
            iteration.passes, loaded = iteration.passes + 1, False
            if empty or iteration.passes >= self.repetitions:
                return
            items = self._run_once(iteration)

    def _pass_over(self, iteration: _Iteration) -> None:
        """Note how ``iteration`` began and what it has read, before its next pass begins."""
        from wds_async.checkpoint.history import state_at_start  # noqa: PLC0415 (the engine)

        history = iteration.history
        assert iteration.run is not None
        try:
            if history.first is None and history.start is not None:
                history.began_with(state_at_start(self, self._state_of(iteration)))
            history.pass_over(iteration.run.save())
        except Exception:  # of a stage that has no state: then there is no history, but the iteration goes on
            history.began_with(None)

    def __iter__(self) -> Iterator[Any]:
        with Shortened():
            self._check_use()
            states, self._worker_states = self._worker_states, None
            if states is not None:
                return self._go_on(states)
            return self._begin()

    def _begin(self) -> Iterator[Any]:
        iteration = self._iteration = self._begin_iteration()
        self._past = None
        items = self._run_once(iteration) if self.repetitions == 1 else self._run_often(iteration)
        if self.repetitions != 1 and (length := self._epoch_length()) > 0:
            items = iteration.counted(itertools.islice(items, max(0, length - iteration.given)))
        _open.add(ending := self._ending(iteration, items))
        return ending

    def _go_on(self, states: WorkerStates) -> Iterator[Any]:
        """Return the items of this DataLoader worker behind its state; first something in place of a batch, where the
        turn is that of a later worker."""
        from wds_async.checkpoint.states import NO_BATCH  # noqa: PLC0415 (only in workers that go on)

        number = (world.torch_worker() or (0, 1))[0]
        worker = states.workers[number]
        self.load_state_dict(worker.state)
        items = iter(()) if worker.ended else itertools.islice(self._begin(), worker.behind * states.items_each, None)
        return itertools.chain([NO_BATCH] * (states.items_each * (number < states.next)), items)

    def _epoch_length(self) -> int:
        """Return the number of items of an iteration that is cut; below 1 for no bound."""
        return self.nsamples

    @property
    def is_iterated(self) -> bool:
        """True if an iteration has begun in this process and has not ended."""
        return self._iteration is not None

    def _ending(self, iteration: _Iteration, items: Iterator[Any]) -> Iterator[Any]:
        """Yield ``items``, whose errors leave by `shortened`."""
        try:
            yield from iteration.history.counted(items)
        except Exception as exn:
            iteration.failed = True
            shortened(exn)
            raise
        except GeneratorExit:
            if callable(close := getattr(items, "close", None)):
                close()
            raise
        if self._iteration is iteration:
            self._over(iteration)

    def _over(self, iteration: _Iteration) -> None:
        """Note that ``iteration`` has come to its end."""
        self._past, self._iteration = self._history_of(iteration), None

    def _history_of(self, iteration: _Iteration) -> dict[str, Any] | None:
        """Return the history of ``iteration``, which is over; None where a stage has no state."""
        from wds_async.checkpoint.history import state_at_start  # noqa: PLC0415 (the engine)

        history = iteration.history
        try:
            if history.first is None and history.start is not None:
                history.began_with(state_at_start(self, self._state_of(iteration)))
        except Exception:  # of a stage that has no state, or does not tell of its start
            history.began_with(None)
        try:
            if iteration.run is not None:
                history.pass_over(iteration.run.save(), last=True)
        except Exception:
            return None
        return history.save()

    def _begin_iteration(self) -> _Iteration:
        """Return the next iteration: the one that was loaded, if one was."""
        saved, self._loaded = self._loaded, None
        if saved is None:
            return _Iteration(self._epochs())
        if world.torch_worker() != self._loaded_in:
            raise StateError(
                "a state was loaded into a dataset, and now a DataLoader's workers iterate over it, each from that one "
                "state: save and load the state of the WebLoader"
            )
        return _Iteration.of(saved)

    def declared(self) -> list[Declared]:
        """Return the stages with what they declare for their state."""
        from wds_async.checkpoint.run import Declared  # noqa: PLC0415 (the engine)

        declared = []
        for stage in self.pipeline:
            traits = traits_of(stage) or Traits()
            pure = traits.pure is not None and traits.pure(*getattr(stage, "args", ()), **getattr(stage, "kw", {}))
            declared.append(Declared(stage, _kind_of(stage), traits.state, traits.same_items, pure))
        return declared

    @property
    def shards_read(self) -> dict[str, Any]:
        """By URL, what it takes to read a part of a shard once more that was read in this process."""
        read: dict[str, Any] = self.__dict__.setdefault("_shards_read", {})
        return read

    def _share_of(self, merged: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state for this rank's share of what the old ranks had still to read."""
        from wds_async.checkpoint import merge  # noqa: PLC0415 (the engine)

        ranks, here = merge.ranks_of(merged), world.place()
        if (own := merge.state_of_rank(merged, here)) is not None:
            return own
        if not ranks:
            return dict(merged["merged"][0])
        units = [merge.part_of(state, world.Place(state["place"][0], state["place"][1], 0, 1)) for state in ranks]
        parts = merge.parts_of([unit for unit in units if not unit.ended], here.rank, here.world_size)
        equal = merge.equal_of(self, units)
        if getattr(self, "canonical", None) is not None:
            from wds_async.checkpoint.globalbatches import next_batch, state_at  # noqa: PLC0415 (the engine)

            alone = [{"state": state, "behind": 0, "ended": state["run"] is None} for state in merged["merged"]]
            first = next_batch(self, [{"workers": [one], "next": 0} for one in alone])
            if first is not None:
                return {**state_at(self, first, ranks), **equal}
        return {**merge.share(self, parts, ranks[0]), **equal}

    @property
    def iteration(self) -> object | None:
        """The latest iteration in this process, by which one is told from another; None once it is over."""
        return self._iteration

    @property
    def goes_on_from(self) -> WorkerStates | None:
        """The states that the DataLoader workers which are started next go on from."""
        return self._worker_states

    def go_on_in_workers(self, states: WorkerStates | None) -> None:
        """Make the DataLoader workers that are started next go on from ``states``."""
        self._worker_states = states

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration as values that JSON can hold; without an iteration, the number of
        the next epoch.

        Call it between two items, in the process that iterates. (`WebLoader` has one that includes its workers.)
        `load_state_dict` makes another process continue from there, with a pipeline of the same stages: the same
        samples in the same order. A state contains the positions of samples, not the samples; a stage after functions
        that are not `deterministic` saves the items that it holds. Raises StateError for what cannot be saved, and
        after an iteration that ended with an error.
        """
        iteration = self._iteration
        if self._loaded is not None:
            return dict(self._loaded)
        if iteration is not None and iteration.failed:
            raise StateError(
                "the iteration ended with an error, which may have cost items: go on from an earlier state"
            )
        if iteration is None or iteration.run is None:
            if iteration is not None and iteration.loaded is not None:
                return dict(iteration.loaded)
            past = {} if self._past is None else {"history": self._past}
            return {**self.state_between(), **past}
        return self._state_of(iteration)

    def _state_of(self, iteration: _Iteration) -> dict[str, Any]:
        from wds_async.checkpoint.packing import save_global_random  # noqa: PLC0415 (the decoders)

        assert iteration.run is not None
        run = {"run": iteration.run.save()} if iteration.steps is None else iteration.steps.save(iteration.run.save)
        starts = iteration.run.starts() if iteration.history.first is None else None
        now = {"passes": iteration.passes, "given": iteration.given, **run, "random": save_global_random()}
        return {**self.state_between(), "sources": [], **now, "history": iteration.history.save(starts)}

    def state_between(self) -> dict[str, Any]:
        """Return the state between two epochs: which one comes next, whatever iteration has begun."""
        seeds = {str(number): _drawn_seed(stage) for number, stage in enumerate(self.pipeline)}
        return {
            "version": STATE_VERSION,
            "stages": [_kind_of(stage) for stage in self.pipeline],
            "place": list(world.place()[:2]),
            "epochs": self._epochs(),
            "seeds": {number: seed.number() for number, seed in seeds.items() if seed is not None},
            "passes": 0,
            "given": 0,
            "run": None,
            "sources": [source.state_between() for source in self._sources()],
        }

    def _epochs(self) -> dict[str, int]:
        """Return the epochs of the stages that count them, by their numbers."""
        counters = {str(number): _epoch_of(stage) for number, stage in enumerate(self.pipeline)}
        return {number: _epoch_in(counter) for number, counter in counters.items() if counter is not None}

    def _sources(self) -> list[Any]:
        """Return the datasets within the first stage that have states."""
        first = self.pipeline[0] if self.pipeline else None
        return [one for one in (first, *getattr(first, "datasets", ())) if isinstance(one, DataPipeline)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` (see `state_dict`) at the next iteration. The program's random generators (Python's,
        numpy's and torch's for the CPU) are set to what they were. From a merged state (`merge_states`), this rank
        takes its share.

        Raises StateError if the state was saved by another version or by a pipeline with other stages, or is damaged.
        """
        from wds_async.checkpoint.states import check_keys  # noqa: PLC0415 (only where states are used)

        check_keys(state, "version", "stages")
        if (version := state["version"]) != STATE_VERSION:
            raise StateError(f"a state of version {version!r}; this wds_async reads version {STATE_VERSION}")
        names = [_kind_of(stage) for stage in self.pipeline]
        if state["stages"] != names:
            raise StateError(f"the state is of a pipeline with stages {state['stages']}, and this one has {names}")
        if "merged" in state:
            from wds_async.checkpoint.merge import with_states  # noqa: PLC0415 (the engine)

            state = self._own_or_share(with_states(state))
        check_keys(state, "place", "epochs", "seeds", "passes", "given", "run")
        (rank, ranks), here = state["place"], world.place()
        if state["run"] is not None and (rank, ranks) != here[:2]:
            raise StateError(
                f"the state is of rank {rank} of {ranks}, and this is rank {here.rank} of {here.world_size}: give each "
                "rank its own, or for another number of ranks all of them (merge_states)"
            )
        for number, stage in enumerate(self.pipeline):
            if (counter := _epoch_of(stage)) is not None:
                # An iteration begins the next epoch: a running one is begun again.
                begin = counter.set if world.torch_worker() is None else counter.go_to
                begin(state["epochs"][str(number)] - (state["run"] is not None))
            if (seed := _drawn_seed(stage)) is not None:
                seed.restore(state["seeds"][str(number)])
        if "random" in state:
            from wds_async.checkpoint.packing import load_global_random  # noqa: PLC0415 (the decoders)

            load_global_random(state["random"])
        for source, saved in zip(self._sources(), state.get("sources", ()), strict=False):
            source.load_state_dict(saved)
        # Between two epochs there is nothing to go on with: the epochs and seeds are set.
        self._loaded = state if state["run"] is not None else None
        self._loaded_in = world.torch_worker()
        self._iteration = self._past = None

    def _own_or_share(self, merged: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's own state, or that of its share, which tells of the past of all ranks together."""
        from wds_async.checkpoint.history import shared_history  # noqa: PLC0415 (the engine)

        state, rank = self._share_of(merged), world.place().rank
        if state["run"] is None or any(state == own for own in merged["merged"]):
            return state
        return {**state, "history": shared_history(merged["merged"], state, rank)}

    def _check_use(self) -> None:
        """Warn of what is probably not meant; called where an iteration begins, by `__iter__` itself."""

    def stage(self, i: int) -> Any:
        """Stage number ``i``, 0 being the source."""
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Add stage ``f`` to the end of this pipeline."""
        self.pipeline.append(f)

    def compose(self, *stages: Any, **kw: Any) -> Self:
        """Return a new pipeline of the same class with ``stages`` added.

        The earlier stages are shared, but for those that count epochs (`detshuffle`, `ResampledShards`, mixes): each
        pipeline counts its own, and `set_epoch` of this one reaches the new one. One stage may be written with its
        arguments: ``compose(DBCache, "x.db", 1000)``.
        """
        result, added = copy.copy(self), stages_of(*stages, **kw)
        for number, stage in enumerate(added, len(self.pipeline)):
            _check_stage(stage, first=number == 0)
        result.pipeline = [*(s.apart() if hasattr(s, "apart") else s for s in self.pipeline), *added]
        return result

    def detached(self) -> Self:
        """Return a copy that can be iterated without a trace in this one: it has epochs, seeds, counts and a state of
        its own. Functions are shared, and so are the objects that these change."""
        other = copy.copy(self)
        other._loaded = None
        other.pipeline = [_detached(stage) for stage in self.pipeline]
        return other

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """End each iteration after ``nsamples`` items (samples, or batches after `batched`), starting the source
        again when it ends earlier. Changes this object and returns it.

        On a dataset each worker counts for itself; a `WebLoader` counts what comes out of it. A number below 1 sets no
        end. A shard that is partly read when an epoch ends is read from its start in a later one.
        """
        samples = check_size("with_epoch", "nsamples", nsamples)
        self.nsamples = max(samples, check_size("with_epoch", "nbatches", nbatches))
        if self.nsamples == 0:
            warn(
                "with_epoch(0) sets no end: the iteration goes on for ever. Perhaps the number came of a division that "
                "was rounded to 0, as total // (batch * world_size) is where there is less than a batch for each rank"
            )
        self.repetitions = sys.maxsize
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Run the source ``nepochs`` times (for ever unless positive), at most ``nbatches`` items in all.
        Changes this object and returns it."""
        epochs = check_size("repeat", "nepochs", nepochs)
        self.nsamples = check_size("repeat", "nbatches", nbatches)
        self.repetitions = epochs if epochs > 0 else sys.maxsize
        return self

    def with_length(self, n: int | None, silent: bool = False) -> Self:
        """Make ``len`` give ``n`` (None: no length), for loaders and progress bars. It does not change how many samples
        there are, and a warning says so unless ``silent``. Changes this object and returns it."""
        self.size = None if n is None else check_size("with_length", "n", n, at_least=0)
        if not silent:
            warnings.warn(
                f"with_length({n}) changes what len() says, not how many samples come; with_length(n, silent=True) if "
                "that is meant, with_epoch(n) for epochs of that length",
                stacklevel=2,
            )
        return self

    def __len__(self) -> int:
        # TypeError is what list(), tqdm, Lightning and Trainer expect of an iterable that does not know.
        if self.size is None:
            raise TypeError(
                f"{type(self).__name__} has no len(): with_length(n) gives it one, and so does an index "
                "(wds-async index)"
            )
        return self.size

    def __getitem__(self, index: object) -> Any:
        """Raise TypeError: samples come in order."""
        raise TypeError(
            f"{type(self).__name__} has no [{index!r:.40}]: samples come in order; iterate over it, or use "
            "ShardListDataset with an index (wds-async index) for samples by number"
        )

    def __repr__(self) -> str:
        urls = getattr(self.pipeline[0], "urls", None) if self.pipeline else None
        facts = [f"{len(urls):,} shards"] if isinstance(urls, Sized) else []
        facts += [f"next epoch {epoch.latest() + 1}" for epoch in map(_epoch_of, self.pipeline) if epoch][:1]
        stages = " > ".join(map(_name_of, self.pipeline)) or "no stages"
        return f"<{type(self).__name__}: {', '.join(facts)}{'; ' if facts else ''}{stages}>"

    def __bool__(self) -> bool:
        return True  # not len(): `if dataset:` asks whether there is one

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, in every stage that shuffles or resamples shards.

        Needed only where ranks may have begun different numbers of iterations, or to go on after a restart.
        Call it before the epoch's ``iter(loader)``; it reaches the pipelines that were made of this one and the loaders
        built on them, and the workers, persistent ones included. A loader whose dataset counts no epochs is warned of.
        """
        reached = self._call("set_epoch", epoch)
        if not reached and (kinds := [type(s.dataset).__name__ for s in self.pipeline if hasattr(s, "dataset")]):
            warn(f"set_epoch({epoch}) reaches nothing: the loader's dataset is a {kinds[0]}, which has no set_epoch")

    @property
    def ledger(self) -> Ledger | Ledgers:
        """The record of what was skipped by the shard readers of this pipeline and the stages behind them, in this
        process and its DataLoader workers (see `ledger.Ledger`). Empty if no stage reads shards.
        """
        from wds_async.observe.ledger import ledger_of  # noqa: PLC0415 (the engine)

        return ledger_of(self.pipeline)

    def _parts(self) -> Sequence[Any]:
        return self.pipeline

    def close(self) -> None:
        """Close every stage that can be closed, iterators that are still open included. Idempotent."""
        self.closed = True
        self._iteration = None
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_stage(f: Any, first: bool) -> None:
    """Raise ConfigError for what cannot be a stage; the ``first`` may be an iterable."""
    if isinstance(f, RestCurried) or getattr(f, "makes_stages", False) is True:
        name = getattr(f, "__name__", "stage").lstrip("_")
        raise ConfigError(f"{name} stands in the pipeline without its call: write {name}(…)")
    iterable = first and hasattr(f, "__iter__") and not isinstance(f, str)
    if not (iterable or hasattr(f, "run") or callable(f)):
        raise ConfigError(
            f"{f!r:.200} of type {type(f).__name__} is not a {'first ' * first}stage of a pipeline: give an iterable "
            "(first), a callable from iterator to iterator, or an object with run(source)"
        )


def _detached(stage: Any) -> Any:
    """Return a copy of ``stage`` that shares neither counters nor seeds with it; the stage itself if it has none."""
    if hasattr(stage, "detached"):
        return stage.detached()
    if isinstance(stage, world.CountsEpochs) or hasattr(stage, "apart"):
        other = stage.apart()
    elif isinstance(stage, PipelineStage | Composite):
        other = copy.copy(stage)
    else:
        return stage
    if (seed := _drawn_seed(other)) is not None:
        other.seed = copy.copy(seed)
    if isinstance(datasets := getattr(other, "datasets", None), list | tuple):
        other.datasets = [_detached(dataset) for dataset in datasets]
    return other


class _Iteration:
    """One iteration of a pipeline: how many passes over its stages are over, and how many items were given."""

    def __init__(
        self, epochs: Mapping[str, int], history: Mapping[str, Any] | None = None, begun: bool = False
    ) -> None:
        from wds_async.checkpoint.history import History  # noqa: PLC0415 (the decoders)

        self.passes = self.given = 0
        self.failed = False
        self.history = History(epochs, history, begun)
        self.run: Run | None = None
        self.steps: Any = None
        """State of equal steps, which have a say in how much of the run was given (`equalsteps`)."""
        self.loaded: Mapping[str, Any] | None = None
        """The state that it goes on from."""
        self.saved_run: Mapping[str, Any] | None = None
        self.saved_steps: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Iteration:
        """Return the iteration that a state was taken of."""
        iteration = cls({}, state.get("history"), begun=True)
        iteration.passes, iteration.given, iteration.saved_run = state["passes"], state["given"], state["run"]
        iteration.loaded, iteration.saved_steps = state, state.get("equal")
        return iteration

    def take_steps(self) -> Mapping[str, Any] | None:
        """Return the state of equal steps that was loaded, once."""
        saved, self.saved_steps = self.saved_steps, None
        return saved

    def keep_steps(self, steps: Any) -> None:
        """Keep ``steps`` (`equalsteps.StepCount`, `equalsteps.Alignment`), which is asked for its state."""
        self.steps = steps

    def counted(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield ``items``, and count them."""
        for item in items:
            self.given += 1
            yield item


def _epoch_in(counter: world.SharedEpoch) -> int:
    """Return the epoch of this worker, or the latest of all in the process that has them."""
    return counter.latest() if world.torch_worker() is None else counter.get()


def _drawn_seed(stage: Any) -> world.DrawnSeed | None:
    seed = getattr(stage, "seed", None)
    return seed if isinstance(seed, world.DrawnSeed) else None


def _epoch_of(stage: Any) -> world.SharedEpoch | None:
    """Return the counter of a stage whose order follows from the epoch, or that reads shards."""
    counter = getattr(stage, "_epoch", None) or getattr(getattr(stage, "ledger", None), "epoch", None)
    return counter if isinstance(counter, world.SharedEpoch) else None


def epochs_of(stages: Iterable[Any]) -> list[world.SharedEpoch]:
    """Return the counters of epochs of ``stages``, and of the pipelines that one of them mixes."""
    found = []
    for stage in stages:
        if (counter := _epoch_of(stage)) is not None:
            found.append(counter)
        for source in getattr(stage, "datasets", ()):
            found += epochs_of(getattr(source, "pipeline", ()))
    return found


def _name_of(stage: Any) -> str:
    if isinstance(dataset := getattr(stage, "dataset", None), DataPipeline):
        return f"{type(stage).__name__} of {dataset!r}"
    return _kind_of(stage)


def _kind_of(stage: Any) -> str:
    function = getattr(stage, "func", getattr(stage, "f", stage))
    return str(getattr(function, "__name__", type(function).__name__)).lstrip("_")


def _noting(pipeline: list[Any], run: Run) -> Iterator[Any]:
    """Yield the stages behind the first, ours with a handler that notes in the readers' ledger what it lets pass, and
    in ``run`` where it ended the stream."""
    from wds_async.observe.ledger import ledgers_of  # noqa: PLC0415 (the engine)

    log, in_one = None, 1  # samples in an item: more behind `batched`
    for number, stage in enumerate(pipeline[1:], 1):
        traits = traits_of(stage) if type(stage) is FilterFunction else None
        bound = None if traits is None else bound_arguments(stage)
        if traits is None or bound is None:
            yield stage
            continue
        if traits.batches or traits.takes_batches:
            bound.apply_defaults()
            in_one = bound.arguments.get("batchsize", 1)
        handler = bound.arguments.get(traits.handler)
        if handler not in (None, reraise_exception):
            log = log or next((ledger.current() for ledger in ledgers_of(pipeline)), None)
            note = None if log is None else functools.partial(log.note_sample, stage.f.__name__.lstrip("_"), in_one)
            bound.arguments[traits.handler] = Recorder(handler, note, functools.partial(run.stop, number))
            yield FilterFunction(stage.f, *bound.args[1:], **bound.kwargs)
        else:
            yield stage
