"""Position of this process (rank and worker), seeds, and the epoch that the workers of a dataset share.

Nothing here imports torch. Where a program has imported it, its ``sys.modules`` entry is asked; where it
has not, there is no process group and no DataLoader worker to ask about.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_async import config, packages
from wds_async.errors import MissingExtra

__all__ = [
    "CountsEpochs", "DrawnSeed", "Place", "SharedEpoch", "TorchDataset", "TorchMapDataset", "global_draws",
    "inherit_rank", "is_iterable_dataset", "make_seed", "may_fork_workers", "place", "seed_number", "spawning",
    "standing_at", "torch_worker", "worker_seed",
]  # fmt: skip

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

    _IterableDataset = IterableDataset[Any]  # what a type checker must see for DataLoader(dataset) to be right
else:
    _IterableDataset = object

_EPOCH_SLOTS = 513
_inherited_rank: tuple[int, int] | None = None
_xla_rank: tuple[int, int] | None = None
_assumed: Place | None = None


class Place(NamedTuple):
    """This process among all that read one dataset: ``rank`` of ``world_size``, ``worker`` of ``num_workers``."""

    rank: int
    world_size: int
    worker: int
    num_workers: int


def place(group: Any = None) -> Place:
    """Return the position of this process: its rank and its worker.

    The rank is that of ``WDS_RANK`` and ``WDS_WORLD_SIZE``, else of ``RANK`` and ``WORLD_SIZE``, else of
    torch.distributed (``group``, default the world) where it is initialised, else of torch_xla where its runtime is,
    else the one that a spawned worker inherits from its parent, else of the task that Slurm's ``srun`` started, else 0
    of 1. The worker is that of ``WORKER`` and ``NUM_WORKERS``, else of the DataLoader worker, else 0 of 1.
    """
    if _assumed is not None:
        return _assumed
    rank = (
        config.place_from_env("WDS_RANK", "WDS_WORLD_SIZE")
        or config.place_from_env("RANK", "WORLD_SIZE")
        or _torch_rank(group)
        or _rank_of_xla()
        or _inherited_rank
        # Not SLURM_NTASKS: a batch script that starts one program by itself sees that of the whole job, as rank 0.
        or config.place_from_env("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        or (0, 1)
    )
    worker = config.place_from_env("WORKER", "NUM_WORKERS") or torch_worker() or (0, 1)
    return Place(*rank, *worker)


@contextlib.contextmanager
def standing_at(here: Place) -> Iterator[None]:
    """Take ``here`` for the place of this process, to read or list what another one would."""
    global _assumed
    before, _assumed = _assumed, here
    try:
        yield
    finally:
        _assumed = before


def worker_seed(group: Any = None) -> int:
    """Return ``1000 * rank + worker``: a number that differs between all workers of all ranks."""
    here = place(group)
    return here.rank * 1000 + here.worker


def global_draws() -> Callable[[], float]:
    """Return `random.random`, for stages without a seed whose choices follow ``random.seed(...)`` and the seeds of
    DataLoader workers as WebDataset's do. A copy of the generator would give stage and program the same numbers.
    """
    return random.random


class DrawnSeed:
    """Seed of a dataset that was given none.

    It is drawn from the global ``random``, as WebDataset draws it, so that a restarted run has another order and
    ``random.seed(...)`` repeats one. Where several ranks or workers make their datasets themselves it is 0: they take
    shares of one order, and must agree on it without talking to each other.
    """

    def __init__(self) -> None:
        drawn = random.randint(0, 1_000_000)
        self._drawn = drawn if place().num_workers == 1 else 0
        self._restored = False

    def number(self) -> int:
        """Return the seed of this run; the number of ranks is looked up now: process groups begin after datasets."""
        return self._drawn if self._restored or place().world_size == 1 else 0

    def restore(self, number: int) -> None:
        """Become the seed ``number`` of an earlier run."""
        self._drawn, self._restored = number, True


def seed_number(seed: Any) -> Any:
    """Return the number of a `DrawnSeed`; any other seed as it is."""
    return seed.number() if isinstance(seed, DrawnSeed) else seed


def make_seed(*values: Any) -> int:
    """Return one 31-bit seed from several values, the same in every process.

    Text counts by its CRC-32, since Python's ``hash`` of it changes from process to process.
    """
    seed = 0
    for value in values:
        if isinstance(value, (str, bytes)):
            value = zlib.crc32(value.encode() if isinstance(value, str) else value)  # noqa: PLW2901
        seed = (seed * 31 + hash(value)) & 0x7FFFFFFF
    return seed


def _torch_rank(group: Any) -> tuple[int, int] | None:
    dist = packages.loaded("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(group=group), dist.get_world_size(group=group)


def _rank_of_xla() -> tuple[int, int] | None:
    """Return torch_xla's ordinal and world size, once the program has started its runtime: asking would start it, and
    ``xmp.spawn`` refuses to run after that. A DataLoader worker, which must not talk to the device, has its parent's.
    """
    global _xla_rank
    runtime = packages.loaded("torch_xla.runtime")
    if runtime is not None and torch_worker() is None:
        core = packages.loaded("torch_xla")._XLAC
        started = getattr(core, "_xla_runtime_is_initialized", None) or core.is_runtime_initialized
        if started():
            _xla_rank = runtime.global_ordinal(), runtime.world_size()
    return _xla_rank


def torch_worker() -> tuple[int, int] | None:
    """Return the number of this DataLoader worker and how many there are; None in any other process."""
    data = packages.loaded("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def may_fork_workers() -> bool:
    """Return whether the program has imported torch's DataLoader. Its workers are forked: a module imported before that
    is there in all of them, any other is imported in each.
    """
    return packages.loaded("torch.utils.data") is not None


def spawning() -> bool:
    """True while an object is pickled for a child process that is just being started."""
    context = packages.loaded("multiprocessing.context")
    return context is not None and context.get_spawning_popen() is not None


def inherit_rank(rank: tuple[int, int] | None) -> None:
    """Take a parent's ``(rank, world_size)`` for this spawned worker's; it has no process group of its own."""
    global _inherited_rank
    if rank is not None:
        _inherited_rank = rank


class SharedEpoch:
    """The number of the epoch, counted in memory that a dataset's worker processes share.

    A DataLoader without persistent workers makes new ones for every epoch from the parent's object, so a plain
    attribute would start again in each of them. Each worker counts in a slot of its own, without a lock, and goes on
    from the passes that its parent had begun when it was started: workers that looked at the parent's slot later could
    differ from each other. A copy (``copy.copy``) goes on sharing; ``pickle`` stores the numbers, except for a child
    process that is being started, which shares them.
    """

    __slots__ = ("__weakref__", "_derived", "_origin", "_parents", "_slots", "_times_set")

    def __init__(self, start: int = -1, slots: Any = None) -> None:
        from multiprocessing.sharedctypes import RawArray  # noqa: PLC0415 (10 ms that readers alone pay)

        # The last two: how often it was set, and the flags of `once`.
        self._slots: Any = RawArray("q", _EPOCH_SLOTS + 2) if slots is None else slots
        self._parents = self._times_set = 0
        self._derived: weakref.WeakSet[SharedEpoch] = weakref.WeakSet()
        self._origin: SharedEpoch | None = None  # kept: it is the way to this one from what it was made of in turn
        if slots is None:
            self.set(start)

    @staticmethod
    def _slot() -> int:
        # By DataLoader worker only: the process of a WORKER variable shares nothing with others.
        worker = torch_worker()
        return 0 if worker is None else 1 + worker[0] % (_EPOCH_SLOTS - 1)

    def get(self) -> int:
        """Return the epoch of the latest (or running) iteration in this worker."""
        slot = self._slot()
        before = self._parents if slot and self._times_set == self._slots[_EPOCH_SLOTS] else 0
        return int(self._slots[slot]) + before

    def latest(self) -> int:
        """Return the latest epoch that any worker began."""
        return int(max(self._slots[0], max(self._slots[1:_EPOCH_SLOTS]) + self._parents))

    def set(self, epoch: int) -> None:
        """Make ``epoch`` the latest one, for every worker, persistent ones included, and in those made by `apart`."""
        self._times_set = self._slots[_EPOCH_SLOTS] + 1
        self._slots[: _EPOCH_SLOTS + 1] = [*[epoch] * _EPOCH_SLOTS, self._times_set]
        self._parents = 0
        for derived in list(self._derived):
            derived.set(epoch)

    def go_to(self, epoch: int) -> None:
        """Make ``epoch`` the latest one of this worker alone, as where each loads a state of its own."""
        slot = self._slot()
        self._slots[slot] += epoch - self.get()

    def next(self) -> int:
        """Begin the next epoch in this worker and return its number."""
        slot = self._slot()
        self._slots[slot] += 1
        self._parents += not slot
        return self.get()

    def once(self, flag: int) -> bool:
        """Return True the first time in all processes that share it; ``flag`` is a power of two. Two processes that ask
        at the same time may both get True."""
        new = not self._slots[_EPOCH_SLOTS + 1] & flag
        self._slots[_EPOCH_SLOTS + 1] |= flag
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        kept = (0, _EPOCH_SLOTS, _EPOCH_SLOTS + 1)
        numbers = {i: n for i, n in enumerate(self._slots) if i in kept or n != self._slots[0]}
        return _shared_epoch, (self._slots if spawning() else numbers, self._parents, self._times_set)

    def __copy__(self) -> SharedEpoch:
        return self

    def apart(self) -> SharedEpoch:
        """Return another one that goes on from the same number. It counts for itself; `set` reaches it."""
        other = SharedEpoch(self.get())
        self._derived.add(other)
        other._origin = self
        return other


class CountsEpochs:
    """Base of stages whose order follows from the number of the epoch. Each iteration takes ``self._epoch.next()``."""

    _epoch: SharedEpoch

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration in this worker; assigning to it sets it for all workers."""
        return self._epoch.get()

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``."""
        self._epoch.set(epoch - 1)

    def apart(self) -> Any:
        """Return a copy that counts its epochs for itself, from here on; `set_epoch` of this one reaches it."""
        other = copy.copy(self)
        other._epoch = self._epoch.apart()
        return other


def _shared_epoch(slots: Any, parents: int, times_set: int) -> SharedEpoch:
    """Return a `SharedEpoch` over ``slots``, or over new ones where that is a dict: of those unlike the first."""
    epoch = SharedEpoch(slots[0], None if isinstance(slots, dict) else slots)
    if isinstance(slots, dict):
        for number, count in slots.items():
            epoch._slots[number] = count
    epoch._parents, epoch._times_set = parents, times_set
    return epoch


class TorchDataset(_IterableDataset):
    """Base of everything that torch's DataLoader must take for an ``IterableDataset``.

    Importing torch costs two seconds that a writer, the command line and a plain reader should not pay. ``isinstance``
    of an abstract base class (which ``IterableDataset`` is) reads ``__class__`` of the object first, and by then torch
    is imported: so reading ``__class__`` registers the class, whatever the order of imports.
    ``isinstance(x, torch.utils.data.Dataset)`` stays false: that class is not an abstract one.
    """

    if not TYPE_CHECKING:  # for a type checker, ``__class__`` is what it always is

        @property
        def __class__(self):
            if base := _torch_class("IterableDataset"):
                _register(type(self), base)
            _rank_of_xla()  # a DataLoader asks here, before it makes the workers that cannot
            return type(self)

    def __add__(self, other: Any) -> Any:
        """Return a ``torch.utils.data.ChainDataset`` of both, one after the other. MissingExtra without torch."""
        if not hasattr(other, "__iter__"):
            return NotImplemented
        try:
            from torch.utils.data import ChainDataset  # noqa: PLC0415 (seconds, paid by those who chain)
        except ModuleNotFoundError as exn:
            raise MissingExtra('dataset + dataset needs torch: pip install "wds-async[torch]"') from exn
        both: list[Any] = [self, other]
        return ChainDataset(both)


def _torch_class(name: str) -> Any:
    """Return a class of ``torch.utils.data``, None if that is not imported."""
    return getattr(packages.loaded("torch.utils.data"), name, None)


def is_iterable_dataset(x: Any) -> bool:
    """Return whether ``x`` is a `TorchDataset` or one of torch's, without importing torch."""
    base = _torch_class("IterableDataset")
    return isinstance(x, TorchDataset) or (base is not None and isinstance(x, base))


@functools.cache
def _register(cls: type, base: Any) -> None:
    if not issubclass(cls, base):
        base.register(cls)


class TorchMapDataset:
    """Base of what torch must take for a map-style ``torch.utils.data.Dataset``; give it ``len`` and indexing.

    Nothing can be registered with that class, which is not abstract. ``isinstance`` also believes ``__class__``: once
    torch is there, that is a class made of ours and torch's. ``type(self)`` stays what it is.
    """

    if not TYPE_CHECKING:

        @property
        def __class__(self):
            base = _torch_class("Dataset")
            return type(self) if base is None else _both(type(self), base)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would refuse: it finds that ``__class__`` is not the type.
        return object.__new__, (type(self),), dict(self.__dict__)

    def __add__(self, other: Any) -> Any:
        """Return both, one after the other, as torch's datasets are added."""
        concat = _torch_class("ConcatDataset")
        return NotImplemented if concat is None else concat([self, other])


@functools.cache
def _both(cls: type, base: type) -> type:
    if issubclass(cls, base):  # a user's class that names torch's as well
        return cls
    return type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})
