"""The workers of a DataLoader, run one batch at a time in this process: they give what they would give in their own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from wds_async import packages, world
from wds_async.checkpoint.packing import load_global_random, save_global_random, seed_global_random
from wds_async.checkpoint.states import NO_BATCH, WorkerState, WorkerStates
from wds_async.shared_batches import DeliveredBatch

__all__ = ["LocalWorkers"]


class LocalWorkers:
    """Stand-in for the DataLoader ``loader``, over ``dataset``: its workers take their turns in this process.

    Each has its own copy of the dataset, its own states of the program's generators of random numbers, and stands at
    its place (`world.standing_at`, torch's ``get_worker_info``).
    """

    def __init__(self, loader: Any, dataset: Any) -> None:
        self._kind = type(loader).__name__
        self.dataset = dataset
        self.num_workers: int = loader.num_workers
        self.batch_size: int | None = loader.batch_size
        self.drop_last: bool = loader.drop_last
        self.collate_fn = getattr(loader.collate_fn, "collate_fn", loader.collate_fn)
        self.worker_init_fn = loader.worker_init_fn
        self.persistent_workers = True
        self.workers: list[LocalWorker] = []
        self.latest: int | None = None
        """Number of the worker whose batch came last."""
        self._generator = loader.generator

    @property
    def __name__(self) -> str:
        """The name by which states know the stage."""
        return self._kind

    def __iter__(self) -> Iterator[Any]:
        if not self.num_workers:
            return self.batches(iter(self.dataset))
        torch, generator = packages.loaded("torch"), None
        if self._generator is not None:
            generator = torch.Generator()
            generator.set_state(self._generator.get_state())
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        before: list[LocalWorker | None] = [*self.workers] or [None] * self.num_workers
        self.workers = [LocalWorker(self, number, seed, one) for number, one in enumerate(before)]
        return self._in_turn()

    def batches(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield batches of ``items``, as torch's fetchers make them."""
        if self.batch_size is None:
            for item in items:
                yield item if item is NO_BATCH else self.collate_fn(item)
            return
        while batch := list(itertools.islice(items, self.batch_size)):
            if batch[0] is NO_BATCH:
                yield NO_BATCH
            elif len(batch) == self.batch_size or not self.drop_last:
                yield self.collate_fn(batch)

    def _in_turn(self) -> Iterator[DeliveredBatch]:
        left = list(self.workers)
        while left:
            for worker in list(left):
                try:
                    batch = next(worker)
                except StopIteration:
                    left.remove(worker)
                else:
                    self.latest = worker.number
                    yield DeliveredBatch(None if batch is NO_BATCH else batch, worker.number, empty=batch is NO_BATCH)

    def worker_states(self) -> Sequence[WorkerState] | None:
        """Return the states of the workers as they are now; None where there are none."""
        return [worker.state() for worker in self.workers] or None


class LocalWorker:
    """Worker ``number`` of ``loader``, whose workers have the seeds from ``base_seed`` on. ``before`` is the one of the
    pass before, whose epochs it goes on counting."""

    def __init__(self, loader: LocalWorkers, number: int, base_seed: int, before: LocalWorker | None) -> None:
        here = world.place()
        self.number = number
        self.dataset = loader.dataset.detached() if before is None else before.copied()
        self._loader = loader
        self._place = world.Place(here.rank, here.world_size, number, loader.num_workers)
        self._torch = packages.loaded("torch.utils.data._utils.worker")
        self._info = self._torch.WorkerInfo(
            id=number, num_workers=loader.num_workers, seed=base_seed + number, dataset=self.dataset
        )
        self._random: Any = None
        self._base_seed = base_seed
        self._batches: Iterator[Any] | None = None
        self._states: WorkerStates | None = loader.dataset.goes_on_from

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Be this worker."""
        torch, module, before = packages.loaded("torch"), self._torch, save_global_random()
        threads, info = torch.get_num_threads(), module._worker_info
        torch.set_num_threads(1)
        module._worker_info = self._info
        try:
            with world.standing_at(self._place):
                if self._random is not None:
                    load_global_random(self._random)
                else:
                    seed_global_random(self._base_seed, self.number)
                    if self._loader.worker_init_fn is not None:
                        self._loader.worker_init_fn(self.number)
                yield
        finally:
            self._random = save_global_random()
            module._worker_info = info
            torch.set_num_threads(threads)
            load_global_random(before)

    def _begin(self) -> Iterator[Any]:
        """Return its batches behind those that came behind the state which it goes on from."""
        states = self._states
        if states is None:
            return self._loader.batches(iter(self.dataset))
        worker, empty = states.workers[self.number], self.number < states.next
        self.dataset.go_on_in_workers(None)
        self.dataset.load_state_dict(worker.state)
        items: Iterator[Any] = iter(()) if worker.ended else iter(self.dataset)
        for _ in itertools.islice(items, worker.behind * states.items_each):
            pass
        return self._loader.batches(itertools.chain([NO_BATCH] * (states.items_each * empty), items))

    def __next__(self) -> Any:
        with self._here():
            self._batches = self._batches or self._begin()
            return next(self._batches)

    def state(self) -> WorkerState:
        """Return its state now."""
        if self._states is not None:
            worker = self._states.workers[self.number]
            if worker.ended or (self._batches is None and not worker.behind):
                return worker
        with self._here():
            if self._states is not None:
                self._batches = self._batches or self._begin()
            return WorkerState(
                self.dataset.state_dict(), ended=self._batches is not None and not self.dataset.is_iterated
            )

    def state_dict(self) -> Any:
        """Return the state of its dataset."""
        return self.state().state

    def copied(self) -> Any:
        """Return a copy of its dataset, which counts epochs on from here."""
        with self._here():
            return self.dataset.detached()

    def close(self) -> None:
        """End its iteration."""
        with self._here():
            self._batches = None
