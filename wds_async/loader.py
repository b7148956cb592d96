"""`WebLoader`: torch's DataLoader as the source of a pipeline."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from wds_async import batch_memory, config, environment, lengths, shared_batches, world
from wds_async.ahead import Ahead
from wds_async.arguments import check_device, check_size
from wds_async.checkpoint.states import (
    StageState,
    WorkerState,
    WorkerStates,
    pack_bytes,
    unpack_bytes,
    without_history,
)
from wds_async.equalsteps import in_step
from wds_async.errors import ConfigError, MissingExtra, StateError
from wds_async.filters.threads import shared_threads
from wds_async.fluid import FluidInterface
from wds_async.misuse import warn_of_batches_twice, warn_of_uneven_ranks
from wds_async.pipeline import DataPipeline, epochs_of
from wds_async.shared_batches import BatchMemory, DeliveredBatch, StateSaver
from wds_async.transfer.stats import Board, Counters

if TYPE_CHECKING:
    from wds_async.checkpoint.merge import WorkerPart
    from wds_async.checkpoint.run import Declared
    from wds_async.to_device import Copier

__all__ = ["LoaderState", "WebLoader"]

_LEAVES_WITHIN_S = 1.0


class WebLoader(DataPipeline, FluidInterface):
    """A ``torch.utils.data.DataLoader`` made of these arguments, followed by the stages of the fluent methods.

    The usual call is ``WebLoader(dataset.batched(n), batch_size=None, num_workers=w)``: batches are made in the
    workers, and ``.unbatched().shuffle(1000).batched(n)`` then mixes samples of several workers. ``batch_size=None`` is
    needed, because torch's default of 1 would batch the batches again. `with_epoch` counts batches of all workers
    together.

    With workers, on Linux, large bytes, arrays and tensors of a batch pass to this process through shared memory that
    is reused, not through torch's queue; ``WDS_HANDOVER=0`` disables this. They are views of that memory, which stays
    in use as long as a view exists.

    ``threads=n``, in place of ``num_workers``, makes the batches in this process, with no hand-over: one thread reads,
    shuffles and batches, up to ``prefetch_factor`` (2) batches ahead, and the functions of `decode`, `map`, `map_dict`
    and `map_tuple` run on n others, the order of the samples kept. It pays where these release the GIL, as decoders of
    images do. The stream is that of ``num_workers=0``. Functions must be safe to call from several threads at once;
    those that draw from the program's random generators draw in no fixed order. 0, the default, is none: without
    workers the program's own thread makes each batch when it asks for it.

    ``device`` gives batches with their tensors on that device, copied ahead of the program: for ``"cuda"`` on a stream
    of its own, from memory that is pinned once and used again, so ``pin_memory`` is not needed. Other values stay as
    they are. With neither workers nor threads, a thread then prepares the batches. A device that torch does not have
    here is a ConfigError.

    `state_dict` counts the batches that came out of the loader: those that workers or threads have prepared are made
    again. With persistent workers, `load_state_dict` must be called before the first iteration.

    ``len`` is the number given to `with_length`, or to `with_epoch`, or the DataLoader's own length if no stage follows
    it (for which its dataset needs a length); otherwise TypeError is raised. Raises MissingExtra if torch is not
    installed, and ConfigError for threads and workers at once.
    """

    def __init__(self, *args: Any, threads: int = 0, device: Any = None, **kw: Any) -> None:
        prefetch = kw.pop("prefetch_factor", None) if threads else None
        self._here = _InThisProcess(
            check_size("WebLoader", "threads", threads, at_least=0),
            None if device is None else check_device("WebLoader", device),
            check_size("WebLoader", "prefetch_factor", 2 if prefetch is None else prefetch, at_least=1),
        )
        try:
            from torch.utils.data import DataLoader  # noqa: PLC0415 (seconds, paid by those who load)
        except ModuleNotFoundError as exn:
            raise MissingExtra('WebLoader needs torch: pip install "wds-async[torch]"') from exn
        loader = DataLoader(*args, **kw)
        if loader.num_workers and threads:
            raise ConfigError(
                f"threads={threads} and num_workers={loader.num_workers}: give one of them; within workers, "
                "decode(…, threads=n) and map(f, threads=n) have threads of their own"
            )
        if loader.num_workers:
            shared = config.settings().handover and shared_batches.possible()
            loader.collate_fn = shared_batches.Handover(loader.collate_fn, shared)
        warn_of_batches_twice(loader.dataset, loader.batch_size)
        dataset: Any = loader.dataset
        if getattr(dataset, "equal_steps", None) is not None:
            dataset.leave_steps_to_loader()
        super().__init__(loader)
        self.all_ranks = self.continues = False
        self._started: Iterator[Any] | None = None
        """An iteration that `start` began."""
        self._stream: Iterator[Any] | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin the next iteration now: workers or threads start and prepare batches while the program still loads its
        model. The next ``iter()`` of this loader goes on with it. `set_epoch` and `load_state_dict` end it, and the
        next iteration begins anew, at the right place; `close` ends it too. Does nothing if it has begun. With neither
        workers nor threads nothing is prepared ahead of the program, but ``WDS_ENGINE=process`` starts that process.
        """
        if self._here.runs_ahead or self.pipeline[0].num_workers:
            if self._started is None:
                self._started, self._pid = super().__iter__(), os.getpid()
        elif environment.value("WDS_ENGINE") == "process":
            from wds_async.transfer import remote_engine  # noqa: PLC0415 (the engine)

            remote_engine.start()

    def __iter__(self) -> Iterator[Any]:
        started, self._started = self._started, None
        return super().__iter__() if started is None or self._pid != os.getpid() else started

    def _drop_started(self, what: str = "") -> None:
        """End an iteration that `start` began. ConfigError for ``what`` where its workers stay, and go on counting."""
        if self._started is None:
            return
        if what and self.pipeline[0].num_workers and self.pipeline[0].persistent_workers:
            raise ConfigError(f"{what} of a loader whose persistent workers were started: call it before start()")
        self._end_stream()
        self._started = self._iteration = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch`` (see `DataPipeline.set_epoch`). ConfigError where `start` has begun
        it in persistent workers."""
        self._drop_started("set_epoch")
        super().set_epoch(epoch)

    def with_epoch(
        self, nsamples: int = -1, nbatches: int = -1, *, all_ranks: bool = False, continue_stream: bool = False
    ) -> Self:
        """End each iteration after ``nsamples`` items of all workers together: batches, if the dataset makes batches.
        If the data ends earlier, the workers start again. Changes this object and returns it. A number below 1 (the
        default) sets no end.

        ``all_ranks``: the number is that of the whole job, and each rank takes an equal share, rounded down.
        ConfigError, at the first iteration, if a rank's share is less than one.

        ``continue_stream``: continue where the last iteration ended, even if the loop was left early, so that all of
        the data comes once before any comes again. The workers keep running between iterations and keep their
        prefetched batches. `set_epoch` then sets the number of the next pass over the data and does not end the current
        one; `close`, or an error, ends it. Two iterations at the same time share one stream. By default, every
        iteration begins the next epoch of the dataset, and batches that the workers had prepared are dropped.
        """
        if self._started is not None:
            raise ConfigError("with_epoch of a loader that was started: call it before start()")
        super().with_epoch(nsamples, nbatches)
        self.all_ranks, self.continues = all_ranks, continue_stream
        self._end_stream()
        return self

    def _epoch_length(self, world_size: int | None = None) -> int:
        if not self.all_ranks or self.nsamples < 1:
            return self.nsamples
        ranks = world_size or world.place().world_size
        if self.nsamples < ranks:
            raise ConfigError(
                f"with_epoch({self.nsamples}, all_ranks=True): there are {ranks} ranks, and each needs one batch"
            )
        return self.nsamples // ranks

    def _run_often(self, iteration: Any) -> Iterator[Any]:
        if not self.continues:
            return super()._run_often(iteration)
        if self._stream is None or self._pid != os.getpid():  # after a fork, what is open is the parent's
            # Of a copy: a loader that its own stream refers to would not be freed, with its workers, when dropped.
            self._stream, self._pid = super(WebLoader, copy.copy(self))._run_often(iteration), os.getpid()
        return _Continued(self)

    def _begin_iteration(self) -> Any:
        """Return the next iteration: that of a stream that continues is one and the same."""
        if self._stream is None or self._iteration is None or self._pid != os.getpid():
            return super()._begin_iteration()
        self._iteration.given = 0
        self._iteration.history.begin_again()
        return self._iteration

    def _over(self, iteration: Any) -> None:
        iteration.given = 0
        if self._stream is None:
            super()._over(iteration)

    def _next_of_stream(self) -> Any:
        """Return the next batch of the stream that continues; after its end or an error the next one begins anew."""
        if self._stream is None:
            raise StopIteration
        try:
            return next(self._stream)
        except BaseException:
            self._stream = None
            raise

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if callable(close := getattr(stream, "close", None)):
            close()

    def close(self) -> None:
        """Close every stage that can be closed, and end the workers of a stream that continues, or was started.
        Idempotent."""
        self._drop_started()
        self._end_stream()
        super().close()

    def detached(self) -> Self:
        """Return a copy whose workers run in this process, in turn (see `DataPipeline.detached`)."""
        from wds_async.checkpoint.local_workers import LocalWorkers  # noqa: PLC0415 (the engine)

        loader = self.pipeline[0]
        other = copy.copy(self)
        other._loaded, other._here = None, _InThisProcess()
        other.pipeline = [
            LocalWorkers(loader, loader.dataset.detached()),
            *DataPipeline(*self.pipeline[1:]).detached().pipeline,
        ]
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stream": None, "_started": None}  # a copy begins a stream of its own

    def _check_use(self) -> None:
        warn_of_uneven_ranks(self)

    def _run_once(self, iteration: Any) -> Iterator[Any]:
        """Run the workers once; they start now. Where the dataset has ``equal``, to as many batches as other ranks."""
        loader, run = self.pipeline[0], functools.partial(super()._run_once, iteration)
        if getattr(loader.dataset, "canonical", None) is not None:
            from wds_async.checkpoint.globalbatches import check_loader  # noqa: PLC0415 (only where they are used)

            check_loader(loader)
        if not self._aligns():  # or the dataset sees to it
            return _sweeping(run())

        def start() -> Iterator[Any]:
            batches = _sweeping(run())
            _log_of(iteration).clear()
            return batches

        def save() -> dict[str, Any]:
            saved: dict[str, Any] = iteration.run.save()
            _log_of(iteration).clear()
            return saved

        return in_step(start, self.pipeline[0].dataset.equal_steps, self._rewind, iteration, save)

    def _aligns(self) -> bool:
        """Return whether this loader compares what its workers have with other ranks."""
        loader = self.pipeline[0]
        equal = getattr(loader.dataset, "equal_steps", None)
        return equal is not None and equal.steps is None and (loader.num_workers > 0 or self._here.runs_ahead)

    def _rewind(self) -> None:
        """Make the next run of the workers that of the same epoch."""
        for counter in epochs_of(self.pipeline[0].dataset.pipeline):
            counter.set(counter.latest() - 1)

    def declared(self) -> list[Declared]:
        first, *rest = super().declared()
        loader = self.pipeline[0]
        stage = _LoaderStage(loader, self._here)
        if isinstance(loader.dataset, DataPipeline):
            first = replace(first, stage=stage, state=LoaderState)
        else:
            first = replace(first, stage=stage)
        return [first, *rest]

    def _sources(self) -> list[Any]:
        dataset = self.pipeline[0].dataset
        return [dataset] if isinstance(dataset, DataPipeline) else []

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, of the batches that came out of it (see `DataPipeline.state_dict`). StateError
        where its dataset is none of ours."""
        if not isinstance(dataset := self.pipeline[0].dataset, DataPipeline):
            kind = type(dataset).__name__
            raise StateError(f"a loader of a {kind} has no state; one of a WebDataset or wds.DataPipeline(…) has")
        state, iteration = super().state_dict(), self._iteration
        behind = state.get("equal", {}).get("behind")
        if behind and len(self.pipeline) == 1 and iteration is not None and iteration.run is not None:
            state["equal"]["workers"] = _log_of(iteration)[:behind]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` at the next iteration (see `DataPipeline.load_state_dict`). StateError if persistent
        workers are already running.
        """
        loader = self.pipeline[0]
        if getattr(loader, "_iterator", None) is not None:
            raise StateError("the loader's persistent workers run already: load the state before the first iteration")
        self._drop_started()
        super().load_state_dict(state)

    def _share_of(self, merged: Mapping[str, Any]) -> dict[str, Any]:
        import torch  # noqa: PLC0415 (it is there: so is the loader)

        from wds_async.checkpoint import merge  # noqa: PLC0415 (the engine)
        from wds_async.checkpoint.globalbatches import state_at  # noqa: PLC0415 (the engine)

        ranks, here, loader = merge.ranks_of(merged), world.place(), self.pipeline[0]
        own = merge.state_of_rank(merged, here)
        saved = [_saved_in(state) for state in ranks]
        if own is not None and all(one["workers"] == loader.num_workers for one in saved):
            return own
        if not ranks:
            return dict(merged["merged"][0])
        units = [unit for state in ranks for unit in self._workers_of(state)]
        left = [unit for unit in units if not unit.ended]
        if not left:  # all have ended, and their epoch is not over
            return {**without_history(ranks[0]), "run": None, "sources": [_saved_in(ranks[0])["nested"][0]["state"]]}
        count, batch = max(1, loader.num_workers), self._next_global_batch(merged["merged"])
        shares = []
        for worker in range(count):
            parts = merge.parts_of(left, here.rank * count + worker, here.world_size * count)
            with world.standing_at(world.Place(here.rank, here.world_size, worker, count)):
                if batch is None:
                    state = merge.share(loader.dataset, parts, left[0].state)
                else:
                    state = state_at(loader.dataset, batch, [unit.state for unit in left])
                equal = merge.equal_of(loader.dataset, units)
            shares.append({"state": state if self._aligns() else {**state, **equal}})
        of_loader = {"nested": shares, "workers": loader.num_workers, "next": 0, "batch_size": loader.batch_size or 1}
        of_loader["seed"] = pack_bytes(torch.get_rng_state().numpy().tobytes())
        of_ranks = [merge.WorkerPart(state, world.Place(state["place"][0], state["place"][1], 0, 1)) for state in ranks]
        parts = merge.parts_of(of_ranks, here.rank, here.world_size)
        states = {"0": of_loader}
        for number, one in enumerate(self.declared()):
            if number and isinstance(one.state, type):
                of_stage = [(part, part.state["run"]["states"].get(str(number), {})) for part in parts]
                states[str(number)] = merge.shared_states(one, of_stage, {})
        length, before = self._epoch_length(), self._epoch_length(len(merged["merged"]))
        # Each rank has a part of every global batch, so that as many batches are left as were.
        given = merge.given_of(length, parts, old=before) if batch is None else length - before + ranks[0]["given"]
        whole = {
            **without_history(ranks[0]),
            "place": [*here[:2]],
            "given": given,
            "run": {"replayed": False, "states": states},
        }
        whole.pop("equal", None)
        return {**whole, **equal} if self._aligns() else whole

    def _workers_of(self, state: Mapping[str, Any]) -> list[WorkerPart]:
        """Return what each worker of a rank had still to read."""
        from wds_async.checkpoint import merge  # noqa: PLC0415 (the engine)

        saved, equal = _saved_in(state), state.get("equal", {})
        if (behind := equal.get("behind", 0)) and "workers" not in equal:
            raise StateError(
                "equal= has batches in hand that stages behind the loader made, which cannot be shared out: go on with "
                "as many ranks and workers, or put these stages into the workers"
            )
        came = Counter(equal.get("workers", ())[:behind])
        units = []
        for number, worker in enumerate(saved["nested"]):
            place = world.Place(state["place"][0], state["place"][1], number, len(saved["nested"]))
            items = (worker["behind"] + came[number]) * saved["batch_size"]
            unit = merge.part_of(worker["state"], place, items)
            ended = worker["ended"] or unit.ended or any(equal.get(name) for name in ("again", "over", "ended"))
            units.append(replace(unit, ended=ended))
        return units

    def _next_global_batch(self, states: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the global batch that comes next by the ``states`` of all ranks; None where the dataset has none."""
        if getattr(self.pipeline[0].dataset, "canonical", None) is None:
            return None
        from wds_async.checkpoint.globalbatches import next_batch  # noqa: PLC0415 (only where they are used)

        over = {"nested": [{"ended": True, "state": {"run": None}}], "next": 0}
        ranks = [over if state["run"] is None else _saved_in(state) for state in states]
        return next_batch(self.pipeline[0].dataset, [{**rank, "workers": rank["nested"]} for rank in ranks])

    def __len__(self) -> int:
        if self.size is None and self.repetitions == sys.maxsize and (length := self._epoch_length()) > 0:
            return length  # an epoch of `with_epoch` is cut to it, and filled by starting again
        if self.size is None and self.repetitions == 1:
            received = lengths.through(_received(self.pipeline[0]), self.pipeline[1:])
            if received is not None:
                return received.total
        return super().__len__()


def _sweeping(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    finally:
        shared_batches.sweep()


class _Continued(Iterator[Any]):
    """The stream of ``loader`` from where it is. An iterator over it that is closed leaves the stream open."""

    def __init__(self, loader: WebLoader) -> None:
        self._loader = loader

    def __next__(self) -> Any:
        return self._loader._next_of_stream()


class LoaderState(StageState):
    """State of a DataLoader: which batches of each worker have come out of it."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._workers: list[WorkerState] = []
        self._next = 0
        self._seed = b""
        """State of torch's generator before it drew the seed of the workers."""
        self._saved: dict[str, Any] | None = None
        self.log: list[int] | None = None
        """Workers whose batches came out, where that is asked for."""

    def save(self) -> dict[str, Any]:
        here = self._loader.dataset
        own = getattr(self._loader, "worker_states", None)
        workers = (own and own()) or self._workers or [WorkerState(here.state_dict(), ended=not here.is_iterated)]
        for worker in workers:
            if isinstance(worker.state, StateError):
                raise worker.state
        saved = [{"state": worker.state, "behind": worker.behind, "ended": worker.ended} for worker in workers]
        facts = {"workers": self._loader.num_workers, "next": self._next, "batch_size": self._loader.batch_size or 1}
        return {"nested": saved, **facts, "seed": pack_bytes(self._seed)}

    def load(self, saved: dict[str, Any]) -> None:
        self._saved = saved

    @classmethod
    def at_start(cls, stage: Any, start: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        from wds_async.checkpoint.history import state_at_start  # noqa: PLC0415 (the decoders)

        nested = [state_at_start(stage.loader.dataset, worker["state"]) for worker in saved["nested"]]
        return {**saved, "nested": [{"state": state, "behind": 0, "ended": False} for state in nested], "next": 0}

    def open(self, loader: Any, *, ahead: bool = False) -> Iterator[Any]:
        """Return the iterator of ``loader``, whose workers go on where they were. ``ahead``: its batches are made ahead
        of those that `take` counts."""
        import torch  # noqa: PLC0415 (it is there: so is the loader)

        self._loader, saved, self._saved = loader, self._saved, None
        counted = loader.num_workers or int(ahead)
        if saved is None:
            self._seed = torch.get_rng_state().numpy().tobytes()
            if counted:
                self._workers = [_state_at_start(loader.dataset)] * counted
            return iter(loader)
        if saved["workers"] != loader.num_workers:
            raise StateError(
                f"the state is of a loader with {saved['workers']} workers, and this one has {loader.num_workers}: "
                "give it as many, or share out the state anew by wds.merge_states"
            )
        if saved["batch_size"] != (loader.batch_size or 1):
            raise StateError(
                f"the state is of a loader with batch_size={saved['batch_size']}, and this one has {loader.batch_size}"
            )
        workers = [WorkerState(**one) for one in saved["nested"]]
        behind = 0
        if counted:
            self._workers, self._next = workers, saved["next"]
        else:  # batches that threads had made ahead
            behind, workers = workers[0].behind, [replace(workers[0], behind=0)]
        self._seed, now = unpack_bytes(saved["seed"]), torch.get_rng_state()
        loader.dataset.go_on_in_workers(WorkerStates(list(workers), saved["next"], loader.batch_size or 1))
        # The seed of the workers is drawn again, and what was drawn behind it is not.
        torch.set_rng_state(torch.frombuffer(bytearray(self._seed), dtype=torch.uint8))
        try:
            batches: Iterator[Any] = iter(loader)
        finally:
            if loader.num_workers or "random" not in workers[0].state:  # else the dataset has set it
                torch.set_rng_state(now)
            if loader.num_workers:
                loader.dataset.go_on_in_workers(None)
        for _ in itertools.islice(batches, behind):
            pass
        return batches

    def take(self, delivery: DeliveredBatch) -> Any:
        """Count the batch of ``delivery``, and return it."""
        before, state = self._workers[delivery.worker], delivery.state
        self._workers[delivery.worker] = state or replace(before, behind=before.behind + 1)
        self._next = (delivery.worker + 1) % len(self._workers)
        if self.log is not None:
            self.log.append(delivery.worker)
        return delivery.batch


def _log_of(iteration: Any) -> list[int]:
    """Return the workers of the batches that came out of the loader, which are noted from now on."""
    state: LoaderState = iteration.run.states[0]
    state.log = [] if state.log is None else state.log
    return state.log


def _saved_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `LoaderState` saved in the state of a rank's loader."""
    saved: dict[str, Any] = state["run"]["states"].get("0", {})
    if "nested" not in saved:
        raise StateError("this loader's state cannot be shared out: a stage behind it declares nothing of its state")
    return saved


def _state_at_start(dataset: Any) -> WorkerState:
    """Return the state that workers begin with."""
    return WorkerState(dataset.state_between() if isinstance(dataset, DataPipeline) else None)


@dataclass
class _InThisProcess:
    """Part of a loader in the program's process: its threads, and the device for its batches."""

    threads: int = 0
    device: Any = None
    prefetch: int = 2

    @property
    def runs_ahead(self) -> bool:
        """True if batches are made ahead where there are no workers."""
        return self.threads > 0 or self.device is not None


class _LoaderStage:
    """A DataLoader as the first stage. Where its iterator is left early, workers that have not ended within a second
    (they wait for bytes, or are in the user's function) are terminated; torch gives each 5 s."""

    def __init__(self, loader: Any, here: _InThisProcess, state: LoaderState | None = None) -> None:
        self.loader = loader
        self._here = here
        self._state = state or LoaderState()

    def with_state(self, state: LoaderState) -> _LoaderStage:
        """Return this stage, which counts its batches in ``state``."""
        return _LoaderStage(self.loader, self._here, state)

    def run(self) -> Iterator[Any]:
        """Start the workers or threads, and return their batches."""
        loader, here, counters, copier = self.loader, self._here, _counters_of(self.loader.dataset), None
        if here.device is not None:
            from wds_async.to_device import Copier, copied  # noqa: PLC0415 (only where they are used)

            copier = Copier(here.device)
            shared_batches.pin_mapped(copier.pin)
        if not loader.num_workers and not here.runs_ahead:
            return self._state.open(loader)
        if not loader.num_workers:
            within = shared_threads(here.threads) if here.threads else None
            ahead = Ahead(functools.partial(self._made_here, copier), here.prefetch, within)
            return _Timed(ahead, counters, self._state, copier)
        output = self._state.open(loader)
        workers = getattr(output, "_workers", ())
        timed = _Timed(output if copier is None else copied(output, copier, 1), counters, self._state, copier)
        return timed if loader.persistent_workers else _left_soon(timed, workers)

    def _made_here(self, copier: Copier | None) -> Iterator[DeliveredBatch]:
        """Return the batches with the state behind them, now and then."""
        memory = BatchMemory(shared=False, pin=None if copier is None else copier.pin)
        batch_memory.use(memory)
        batches = self._state.open(self.loader, ahead=True)
        deliveries = _delivered(batches, StateSaver(self.loader.dataset), memory)
        if copier is None:
            return deliveries
        from wds_async.to_device import copied  # noqa: PLC0415 (only where they are used)

        return copied(deliveries, copier, 0)


def _delivered(batches: Iterator[Any], saver: StateSaver, memory: BatchMemory) -> Iterator[DeliveredBatch]:
    for batch in batches:
        memory.end_batch()
        yield DeliveredBatch(batch, 0, saver.state())
        del batch  # its memory is used again when the program lets go of it


class _Timed(Iterator[Any]):
    """``batches``, with the time spent waiting for them, and between them. The first one, which waits for the workers
    to start, is not counted. No batch is kept: its memory is used again when the program lets go of it."""

    def __init__(
        self, batches: Iterator[Any], counters: Counters, state: LoaderState, copier: Copier | None = None
    ) -> None:
        self._batches = batches
        self._copier = copier
        self._counters = counters
        self._state = state
        self._gave_at = 0.0

    def __next__(self) -> Any:
        asked_at, gave_at = time.monotonic(), self._gave_at
        delivery = next(self._batches)
        while type(delivery) is DeliveredBatch and delivery.empty:
            delivery = next(self._batches)
        batch = self._state.take(delivery) if type(delivery) is DeliveredBatch else delivery
        del delivery
        if self._copier is not None:
            batch = self._copier.delivered(batch)
        self._gave_at = now = time.monotonic()
        self._counters.add("batches")
        if gave_at:
            self._counters.add("consumer_s", asked_at - gave_at)
            self._counters.add("starved_s", now - asked_at)
        return batch


def _counters_of(dataset: Any) -> Counters:
    """Return the counters of the first stage that reads shards; unused ones if there is none."""
    for stage in getattr(dataset, "pipeline", ()):
        board = getattr(stage, "board", None)
        if isinstance(board, Board):
            return board.aside()
        for source in getattr(stage, "datasets", ()):
            return _counters_of(source)
    return Counters()


def _left_soon(batches: Iterator[Any], workers: Sequence[Any]) -> Iterator[Any]:
    ended = False
    try:
        yield from batches
        ended = True
    finally:
        if not ended and not sys.is_finalizing():  # then no thread starts any more, and the workers are terminated
            # While torch joins one after the other.
            with contextlib.suppress(RuntimeError):  # since Python 3.12, no thread starts in functions of atexit
                threading.Thread(target=_end, args=(list(workers),), name="leave-workers", daemon=True).start()


def _end(workers: Sequence[Any]) -> None:
    from multiprocessing.connection import wait  # noqa: PLC0415 (loaded where there are workers)

    deadline = time.monotonic() + _LEAVES_WITHIN_S
    running = {worker.sentinel: worker for worker in workers}
    while running and (left_s := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), left_s):
            del running[sentinel]
    for worker in running.values():
        worker.terminate()


def _received(loader: Any) -> lengths.Length | None:
    """Return the length of a DataLoader; None if its dataset has none."""
    dataset = loader.dataset
    if not isinstance(dataset, DataPipeline) or dataset.size is not None:
        try:
            return lengths.Length(len(loader), (len(loader),))
        except TypeError:
            return None
    known = dataset.repetitions == 1 and getattr(dataset, "equal_steps", None) is None
    length = lengths.of(dataset.pipeline, max(1, loader.num_workers)) if known else None
    if length is None:
        return None
    if loader.batch_size is None:
        return lengths.Length(length.total, (length.total,), length.in_batches and (sum(length.in_batches),))
    collate = getattr(loader.collate_fn, "collate_fn", loader.collate_fn)  # `Handover` is around it
    whole = getattr(collate, "__module__", "").startswith("torch.")
    return lengths.batched(length, loader.batch_size, partial=not loader.drop_last, whole=whole)
