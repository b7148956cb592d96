"""Where this process stands: rank, worker, seeds, and the epoch that the workers of a dataset share.

Nothing here imports torch. Where a program has imported it, its ``sys.modules`` entry is asked; where it
has not, there is no process group and no DataLoader worker to ask about.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_async import config

__all__ = [
    "CountsEpochs",
    "Place",
    "SharedEpoch",
    "TorchDataset",
    "TorchMapDataset",
    "inherit_rank",
    "make_seed",
    "may_fork_workers",
    "place",
    "spawning",
    "torch_worker",
    "worker_seed",
]

_EPOCH_SLOTS = 513
_inherited_rank: tuple[int, int] | None = None
_xla_rank: tuple[int, int] | None = None


class Place(NamedTuple):
    """This process among all that read one dataset: ``rank`` of ``world_size``, ``worker`` of ``num_workers``."""

    rank: int
    world_size: int
    worker: int
    num_workers: int


def place(group: Any = None) -> Place:
    """Where this process stands.

    The rank is that of ``RANK`` and ``WORLD_SIZE``, else of torch.distributed (``group``, default the world)
    where it is initialised, else of torch_xla where its runtime is, else the one that a spawned worker was told
    by its parent, else of the task that Slurm's ``srun`` started, else 0 of 1. The worker is that of ``WORKER``
    and ``NUM_WORKERS``, else of the DataLoader worker, else 0 of 1.
    """
    rank = (
        config.rank_from_env()
        or _torch_rank(group)
        or _rank_of_xla()
        or _inherited_rank
        or config.rank_from_slurm()
        or (0, 1)
    )
    worker = config.worker_from_env() or torch_worker() or (0, 1)
    return Place(*rank, *worker)


def worker_seed(group: Any = None) -> int:
    """``1000 * rank + worker``: a number that differs between all workers of all ranks."""
    here = place(group)
    return here.rank * 1000 + here.worker


def make_seed(*values: Any) -> int:
    """One 31-bit seed from several values, the same in every process.

    Integers and floats count by value. Text counts by its CRC-32: Python's ``hash`` of text changes from
    process to process, so ranks could not agree on it.
    """
    seed = 0
    for value in values:
        if isinstance(value, (str, bytes)):
            value = zlib.crc32(value.encode() if isinstance(value, str) else value)  # noqa: PLW2901
        seed = (seed * 31 + hash(value)) & 0x7FFFFFFF
    return seed


def _torch_rank(group: Any) -> tuple[int, int] | None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(group=group), dist.get_world_size(group=group)


def _rank_of_xla() -> tuple[int, int] | None:
    """torch_xla's ordinal and world size, once the program has started its runtime: asking would start it, and
    ``xmp.spawn`` refuses to run after that. A DataLoader worker is told what its parent saw: the device is not its
    own to talk to."""
    global _xla_rank
    runtime = sys.modules.get("torch_xla.runtime")
    if runtime is not None and torch_worker() is None:
        core = sys.modules["torch_xla"]._XLAC
        started = getattr(core, "_xla_runtime_is_initialized", None) or core.is_runtime_initialized
        if started():
            _xla_rank = runtime.global_ordinal(), runtime.world_size()
    return _xla_rank


def torch_worker() -> tuple[int, int] | None:
    """The number of this DataLoader worker and how many there are; None in any other process."""
    data = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def may_fork_workers() -> bool:
    """Whether the program has imported torch's DataLoader. Its workers are forked: what is imported before that is
    there in all of them, and what is not is imported in each."""
    return "torch.utils.data" in sys.modules


def spawning() -> bool:
    """True while an object is pickled for a child process that is just being started."""
    context = sys.modules.get("multiprocessing.context")
    return context is not None and context.get_spawning_popen() is not None


def inherit_rank(rank: tuple[int, int] | None) -> None:
    """Tell a spawned worker its parent's ``(rank, world_size)``; it has no process group of its own."""
    global _inherited_rank
    if rank is not None:
        _inherited_rank = rank


class SharedEpoch:
    """The number of the epoch, counted in memory that a dataset's worker processes share.

    A DataLoader without persistent workers makes new ones for every epoch from the parent's object; a plain
    attribute would start again in each of them, and each epoch would have the same order. Each worker
    counts in a slot of its own, so no lock is needed. A copy (``copy.copy``) goes on sharing; ``pickle``
    stores the numbers, except for a child process that is being started, which shares them.
    """

    __slots__ = ("_slots",)

    def __init__(self, start: int = -1) -> None:
        from multiprocessing.sharedctypes import RawArray  # noqa: PLC0415 (10 ms that readers alone pay)

        self._slots: Any = RawArray("q", _EPOCH_SLOTS)
        self.set(start)

    @staticmethod
    def _slot() -> int:
        # By DataLoader worker only: the slot of a WORKER variable's process would be nobody else's.
        worker = torch_worker()
        return 0 if worker is None else 1 + worker[0] % (_EPOCH_SLOTS - 1)

    def get(self) -> int:
        """The epoch of the latest (or running) iteration in this worker."""
        return int(self._slots[self._slot()])

    def set(self, epoch: int) -> None:
        """Make ``epoch`` the latest one, for every worker, persistent ones included."""
        self._slots[:] = [epoch] * _EPOCH_SLOTS

    def next(self) -> int:
        """Begin the next epoch in this worker and return its number."""
        slot = self._slot()
        self._slots[slot] += 1
        return int(self._slots[slot])

    def __reduce__(self) -> tuple[Any, ...]:
        if spawning():
            return _attach, (self._slots,)
        first = self._slots[0]
        return _restore, (first, {i: n for i, n in enumerate(self._slots) if n != first})

    def __copy__(self) -> SharedEpoch:
        return self

    def apart(self) -> SharedEpoch:
        """Another one that goes on from the same number."""
        return SharedEpoch(self.get())


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
        """A copy that counts its epochs for itself, from here on."""
        other = copy.copy(self)
        other._epoch = self._epoch.apart()
        return other


def _attach(slots: Any) -> SharedEpoch:
    epoch = SharedEpoch.__new__(SharedEpoch)
    epoch._slots = slots
    return epoch


def _restore(start: int, others: dict[int, int]) -> SharedEpoch:
    epoch = SharedEpoch(start)
    for slot, number in others.items():
        epoch._slots[slot] = number
    return epoch


class TorchDataset:
    """Base of everything that torch's DataLoader must take for an ``IterableDataset``.

    Importing torch costs two seconds that a writer, the command line and a plain reader should not pay, and
    a real subclass could not exist before torch is imported. ``isinstance`` of an abstract base class
    (which ``IterableDataset`` is) reads ``__class__`` of the object before it looks the class up, and by then torch
    is imported: so reading ``__class__`` registers the class. It holds whatever the order of imports is.
    ``isinstance(x, torch.utils.data.Dataset)`` stays false: that class is not an abstract one.
    """

    if not TYPE_CHECKING:  # for a type checker, ``__class__`` is what it always is

        @property
        def __class__(self):
            cls = type(self)
            _register(cls)
            _rank_of_xla()  # a DataLoader asks here, before it makes the workers that cannot
            return cls


_registered: weakref.WeakSet[type] = weakref.WeakSet()


def _register(cls: type) -> None:
    if cls in _registered:
        return
    data = sys.modules.get("torch.utils.data")
    base = getattr(data, "IterableDataset", None)
    if base is not None:
        if not issubclass(cls, base):
            base.register(cls)
        _registered.add(cls)


class TorchMapDataset:
    """Base of what torch must take for a map-style ``torch.utils.data.Dataset``; give it ``len`` and indexing.

    As for `TorchDataset`, but that class is no abstract base class, so nothing can be registered with it.
    ``isinstance`` also believes ``__class__``: once torch is there, that is a class made of ours and torch's.
    ``type(self)`` stays what it is.
    """

    if not TYPE_CHECKING:

        @property
        def __class__(self):
            base = getattr(sys.modules.get("torch.utils.data"), "Dataset", None)
            return type(self) if base is None else _both(type(self), base)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would refuse: it finds that ``__class__`` is not the type.
        return _remade, (type(self), dict(self.__dict__))

    def __add__(self, other: Any) -> Any:
        """Both, one after the other, as torch's datasets are added."""
        data = sys.modules.get("torch.utils.data")
        return NotImplemented if data is None else data.ConcatDataset([self, other])


@functools.cache
def _both(cls: type, base: type) -> type:
    if issubclass(cls, base):  # a user's class that names torch's as well
        return cls
    return type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _remade(cls: type[TorchMapDataset], state: dict[str, Any]) -> TorchMapDataset:
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made
