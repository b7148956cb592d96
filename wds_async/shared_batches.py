"""The hand-over of batches from DataLoader workers to their parent, through shared memory that is used again.

torch's queue sends bytes and numpy arrays through a pipe, and puts each tensor into fresh shared memory, which the
kernel has to clear. Here a worker copies the large buffers of a batch into a slot, a block of memory that it keeps, and
sends only their places. In the parent arrays and tensors are views of the slot, which is free again when the last of
them has gone; bytes are copied out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import mmap
import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from wds_async import batch_memory, packages, world
from wds_async.checkpoint.states import NO_BATCH, WorkerState
from wds_async.errors import StateError
from wds_async.stages import traits_of

__all__ = [
    "BatchMemory",
    "DeliveredBatch",
    "Handover",
    "Packed",
    "StateSaver",
    "abandon",
    "begins_in_slots",
    "joined",
    "memory_of_process",
    "pack",
    "possible",
    "split",
    "sweep",
]

_BUFFER_BYTES = 4096  # smaller values go through the queue: finding them costs more than sending them
_BATCH_BYTES = 65536  # so do batches whose large buffers are together smaller than this
_SLOTS = 8  # of a worker: those in the queue (``prefetch_factor``, 2) and those whose arrays the program still holds
_ALIGNMENT = 64
_FREE, _TAKEN = 0, 1
_NUMBER = slice(8, 16)
# All pages at once take half of the time that they take one by one, when they are first written to.
_FLAGS = getattr(mmap, "MAP_SHARED", 0) | getattr(mmap, "MAP_POPULATE", 0)
_PRIVATE_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_POPULATE", 0)
_KEPT_BYTES = 24 << 20

Pin = Callable[[mmap.mmap], Any]
"""Pins memory for as long as what it returns exists."""

Token = tuple[int, int, int, int]
"""A slot's place for the parent: process, descriptor, a number that no other slot has, and size."""


def possible() -> bool:
    """Return whether the parent can open a worker's memory: on Linux, through ``/proc``."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        probe = os.memfd_create("wds-async-probe")
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{probe}", os.O_RDWR))
        finally:
            os.close(probe)
    except OSError:
        return False
    return True


@dataclass
class Handover:
    """``collate_fn`` around another, which makes a `DeliveredBatch` in a DataLoader worker. With ``shared`` the
    batch comes through shared memory; unpickling gives it."""

    collate_fn: Callable[[Any], Any]
    shared: bool = True

    def __call__(self, data: Any) -> Any:
        worker = world.torch_worker()
        if worker is None:
            return self.collate_fn(data)
        if data is NO_BATCH or (isinstance(data, list) and data and data[0] is NO_BATCH):
            return DeliveredBatch(None, worker[0], empty=True)
        batch = self.collate_fn(data)
        if self.shared and _worker_begins_in_slots():
            batch_memory.use(memory_of_process())  # from the next batch on
        return DeliveredBatch(pack(batch) if self.shared else batch, worker[0], _saver().state())


@dataclass
class DeliveredBatch:
    """A batch on its way, with the number of its worker, and now and then the worker's state behind it."""

    batch: Any
    worker: int
    state: Any = None
    empty: bool = False

    def pin_memory(self, device: Any = None) -> DeliveredBatch:
        """Return this with the batch in pinned memory."""
        pin_memory = packages.loaded("torch.utils.data._utils.pin_memory").pin_memory
        return DeliveredBatch(pin_memory(self.batch, device), self.worker, self.state, self.empty)


class StateSaver:
    """Saves the state of a worker's ``dataset`` so rarely that it takes at most 0.5 % of the time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._due_at = 0.0
        self._iteration: Any = None

    def state(self) -> Any:
        """Return the worker's state, or None where it is not yet due."""
        dataset, began = self._dataset, time.monotonic()
        if not hasattr(dataset, "go_on_in_workers"):
            return None
        ended = not dataset.is_iterated
        if dataset.iteration is self._iteration and began < self._due_at and not ended:
            return None
        self._iteration = dataset.iteration
        try:
            return WorkerState(dataset.state_dict(), ended=ended)
        except StateError as exn:
            return WorkerState(exn)
        finally:
            now = time.monotonic()
            self._due_at = now + _SAVE_EVERY * (now - began)


_SAVE_EVERY = 200


def _dataset_of_worker() -> Any:
    return packages.loaded("torch.utils.data").get_worker_info().dataset


@functools.cache
def _saver() -> StateSaver:
    """Return the saver of this DataLoader worker."""
    return StateSaver(_dataset_of_worker())


def begins_in_slots(dataset: Any) -> bool:
    """Return whether arrays of the batches of ``dataset`` may be made in slots, which the program may then change:
    where `batched` is the last stage, so that no other one keeps a batch to give it again."""
    stages = getattr(dataset, "pipeline", None)
    traits = traits_of(stages[-1]) if stages else None
    return traits is not None and traits.batches is not None and getattr(dataset, "equal_steps", None) is None


@functools.cache
def _worker_begins_in_slots() -> bool:
    return begins_in_slots(_dataset_of_worker())


# ------------------------------------------------------------------ in the worker


class _Slot:
    """A block of memory, which other processes can map if it is ``shared``. Its first byte says whether it is taken;
    the worker sets it, the parent clears it. Bytes 8 to 15 are its number."""

    def __init__(self, size: int, shared: bool, pin: Pin | None = None) -> None:
        self.size = size
        self.fd = os.memfd_create("wds-async-handover") if shared else -1
        try:
            if shared:
                os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size, flags=_FLAGS if shared else _PRIVATE_FLAGS)
        except OSError:
            if shared:
                os.close(self.fd)
            raise
        number = os.urandom(8)
        self.memory[_NUMBER] = number
        self.token: Token = (os.getpid(), self.fd, int.from_bytes(number, "little"), size)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self._lease: weakref.ref[Any] | None = None
        self._pinned = None if pin is None else pin(self.memory)

    def is_free(self) -> bool:
        """Return whether neither the parent has it nor an array of this process is in it."""
        return self.memory[0] == _FREE and (self._lease is None or self._lease() is None)

    def lease(self) -> Any:
        """Return its bytes as an array: the slot is in use as long as that exists, or a view of it."""
        lease = np.frombuffer(self.memory, np.uint8)
        self._lease = weakref.ref(lease)
        return lease

    def place_of(self, raw: memoryview) -> int | None:
        """Return where ``raw`` begins in this slot; None if it is elsewhere."""
        start = np.frombuffer(raw, np.uint8).ctypes.data - self.address if raw.nbytes else -1
        return start if 0 <= start < self.size else None

    def close(self) -> None:
        """Give it up; the parent keeps what it has mapped, and an array what it is in."""
        with contextlib.suppress(BufferError):
            self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)


class BatchMemory:
    """Slots for the batches that this process makes, which are used again. A batch's large arrays are made in a slot,
    which has room for as much as the batch before (`batch_memory.empty`)."""

    def __init__(self, shared: bool, pin: Pin | None = None) -> None:
        self.slots: list[_Slot] = []
        self._shared, self._pin = shared, pin
        self._owner = os.getpid()
        self._most = _SLOTS
        self._slot: _Slot | None = None
        """Slot of the batch that is being made."""
        self._lease: Any = None
        self._used = _ALIGNMENT
        self._asked = 0
        """Bytes that the batch that is being made wanted so far."""
        self._expected = 0
        """Bytes of the slot for the next batch."""
        _keep_memory()

    def empty(self, nbytes: int) -> Any:
        """Return a writable buffer of ``nbytes``, which is in use as long as a view of it exists; None for none."""
        if self._owner != os.getpid():
            return None
        self._asked += nbytes + _ALIGNMENT
        if self._slot is None:
            if not self._expected or (slot := self.take(self._expected, self._most)) is None:
                return None
            self._slot, self._lease, self._used = slot, slot.lease(), _ALIGNMENT
        end = self._used + nbytes
        if end > self._slot.size:
            return None
        start, self._used = self._used, -(-end // _ALIGNMENT) * _ALIGNMENT
        return memoryview(self._lease)[start:end]

    def end_batch(self, nbytes: int | None = None) -> None:
        """Have the next batch use another slot, for ``nbytes``, or what this batch asked for."""
        self._expected = self._asked + _ALIGNMENT if nbytes is None else nbytes
        self._slot, self._lease, self._asked = None, None, 0

    def take(self, size: int, most: int) -> _Slot | None:
        """Return a free slot of at least ``size`` bytes; None while all of them, ``most``, are in use, or there is no
        memory."""
        free = [slot for slot in self.slots if slot is not self._slot and slot.is_free()]
        fitting = next((slot for slot in free if slot.size >= size), None)
        if fitting is None:
            if len(self.slots) >= most:
                if not free:
                    return None
                self.slots.remove(free[0])
                free[0].close()
            try:
                fitting = _Slot(size + size // 8, self._shared, self._pin)
            except OSError:  # no memory, or not so much: the queue takes the batch
                return None
            self.slots.append(fitting)
        return fitting

    def put(self, raws: Sequence[memoryview], most: int) -> tuple[_Slot, list[tuple[int, int]]] | None:
        """Return a slot, which is taken now, with the contents of ``raws``, and their places in it. Those that were
        made in the slot of this batch stay where they are. None where no slot is free."""
        needed = _ALIGNMENT + sum(map(_aligned, raws))
        slot, end, self._most = self._slot, self._used, most
        here = [None if slot is None else slot.place_of(raw) for raw in raws]
        rest = sum(_aligned(raw) for raw, start in zip(raws, here, strict=True) if start is None)
        self.end_batch(needed)
        if slot is None or end + rest > slot.size or rest == needed - _ALIGNMENT:
            slot, end, here = self.take(needed, most), _ALIGNMENT, [None] * len(raws)
        if slot is None:
            return None
        places = []
        with memoryview(slot.memory) as memory:
            for raw, start in zip(raws, here, strict=True):
                if start is None:
                    memory[end : end + raw.nbytes] = raw
                places.append((end if start is None else start, raw.nbytes))
                end += _aligned(raw) if start is None else 0
        slot.memory[0] = _TAKEN
        return slot, places


def _aligned(raw: memoryview) -> int:
    return -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT


_memory: BatchMemory | None = None


def memory_of_process() -> BatchMemory:
    """Return the memory of the batches that this process hands over. What a forked child inherits is its parent's."""
    global _memory
    if _memory is None or _memory._owner != os.getpid():
        _memory = BatchMemory(shared=True)
    return _memory


class _BatchPickler(pickle.Pickler):
    """Hands the memory of arrays and tensors to ``buffer_callback``. For a ``child`` of the receiver, torch's own ways
    for all else that it has; they need a parent that lives as long."""

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any], child: bool) -> None:
        super().__init__(file, 5, buffer_callback=buffer_callback)
        self._least = _BUFFER_BYTES if child else 1
        if child:
            self.dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table

    def reducer_override(self, obj: Any) -> Any:
        """Reduce plain tensors in this machine's memory to their bytes."""
        torch = packages.loaded("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.nbytes < self._least or obj.requires_grad:
            return NotImplemented
        if obj.device.type != "cpu" or obj.layout != torch.strided or not obj.is_contiguous():
            return NotImplemented
        if obj.is_quantized or obj.is_conj() or obj.is_neg():
            return NotImplemented
        return _tensor, (pickle.PickleBuffer(obj.view(-1).view(torch.uint8).numpy()), obj.dtype, tuple(obj.shape))


@dataclass
class _Bytes:
    """bytes whose content goes to ``buffer_callback``, which pickle's own way for them does not do."""

    data: bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        return bytes, (pickle.PickleBuffer(self.data),)


def _marked(value: Any) -> Any:
    """Return ``value`` with the large bytes in its lists, tuples and dicts as `_Bytes`."""
    kind = type(value)
    if kind is bytes:
        return _Bytes(value) if len(value) >= _BUFFER_BYTES else value
    if kind is list or kind is tuple:
        return kind(map(_marked, value))
    if isinstance(value, dict):
        marked = copy.copy(value)
        for key, item in value.items():  # not `update`, which in a Counter counts
            marked[key] = _marked(item)
        return marked
    return value


def split(batch: Any, *, child: bool = False) -> tuple[bytes, list[memoryview]]:
    """Return ``batch`` pickled, and its large buffers, which are not in that; ``child``: for the parent process."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        large = buffer.raw().nbytes >= _BUFFER_BYTES
        if large:
            buffers.append(buffer)
        return not large  # true: write it into the stream

    _BatchPickler(stream, out_of_band, child).dump(_marked(batch))
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def joined(stream: bytes, buffers: Iterable[Any]) -> Any:
    """Return the batch of which `split` made ``stream`` and ``buffers``."""
    return pickle.loads(stream, buffers=buffers)


def pack(batch: Any, slots: int = _SLOTS, *, child: bool = True) -> Packed:
    """Return ``batch`` for another process of this machine, in one of at most ``slots`` slots if one is free."""
    stream, raws = split(batch, child=child)
    memory, put = memory_of_process(), None
    if sum(raw.nbytes for raw in raws) >= _BATCH_BYTES:
        put = memory.put(raws, slots)
    else:
        memory.end_batch(0)
    if put is None:
        return Packed(stream, None, [bytearray(raw) for raw in raws])
    slot, places = put
    return Packed(stream, slot.token, places)


def abandon() -> None:
    """Give up the slots that are taken: who has them keeps them, or has ended and will never free them."""
    slots = memory_of_process().slots
    for slot in [slot for slot in slots if slot.memory[0] == _TAKEN]:
        slots.remove(slot)
        slot.close()


def _keep_memory() -> None:
    """Keep the memory of one batch's values for the next one's: glibc gives back the free end of its heap until a block
    of this size was freed once (mallopt(3))."""
    bytes(_KEPT_BYTES)


@dataclass
class Packed:
    """A batch on its way; unpickling it gives the batch."""

    stream: bytes
    token: Token | None
    buffers: list[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch."""
        large = sum(one[1] if isinstance(one, tuple) else len(one) for one in self.buffers)
        return len(self.stream) + large

    def release(self) -> None:
        """Free its slot, in the process that packed it: it is not sent."""
        for slot in memory_of_process().slots:
            if self.token is not None and slot.token[2] == self.token[2]:
                slot.memory[0] = _FREE

    def __reduce__(self) -> Any:
        return _unpack, (self.stream, self.token, self.buffers)


# ------------------------------------------------------------------ in the parent


_mapped: dict[tuple[int, int], tuple[int, mmap.mmap, Any]] = {}
"""The number of the slot, its memory, and what keeps that pinned, by the worker's process and descriptor."""
_pin: Pin | None = None


def pin_mapped(pin: Pin | None) -> None:
    """Have the memory of workers pinned when it is mapped from now on."""
    global _pin
    _pin = pin or _pin


def _unpack(stream: bytes, token: Token | None, buffers: list[Any]) -> Any:
    if token is None:
        return pickle.loads(stream, buffers=buffers)
    memory, pinned = _map(token)
    # All arrays and tensors of the batch refer to this one, through the views of it that they are made of.
    lease = np.frombuffer(memory, np.uint8)
    weakref.finalize(lease, _release, memory, os.getpid(), pinned).atexit = False
    view = memoryview(lease)  # type: ignore[arg-type]  # an array is a buffer
    return pickle.loads(stream, buffers=[view[start : start + size] for start, size in buffers])


def _map(token: Token) -> tuple[mmap.mmap, Any]:
    pid, fd, number, size = token
    mapped_number, memory, pinned = _mapped.get((pid, fd), (None, None, None))
    if memory is None or mapped_number != number:
        if not _mapped:
            _keep_memory()
        sweep()
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            memory = mmap.mmap(opened, size, flags=_FLAGS)
        finally:
            os.close(opened)
        if memory[_NUMBER] != number.to_bytes(8, "little"):  # of a slot that was given up
            raise FileNotFoundError(f"process {pid} has given up the memory of its batch")
        pinned = None if _pin is None else _pin(memory)
        _mapped[pid, fd] = number, memory, pinned
    return memory, pinned


def sweep() -> None:
    """Forget the memory of workers that have ended, but for that which the program still refers to."""
    for key in list(_mapped):  # a copy: other threads map theirs
        if not os.path.exists(f"/proc/{key[0]}"):
            _mapped.pop(key, None)


def _release(memory: mmap.mmap, pid: int, pinned: Any) -> None:
    """Free a slot that nothing refers to any more, in the process that mapped it and not in a forked child. It stays
    ``pinned`` as long as it is mapped."""
    if os.getpid() == pid:
        memory[0] = _FREE


def _tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    if memoryview(buffer).readonly:  # a tensor can always be written to
        buffer = bytearray(buffer)
    return packages.loaded("torch").frombuffer(buffer, dtype=dtype).view(shape)
