"""Batches that come as tensors on a device: pinned memory, and copies ahead of the program on a stream of their own."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wds_async import packages
from wds_async.logs import warn_once
from wds_async.shared_batches import DeliveredBatch

__all__ = ["Copier", "PinnedMemory", "copied"]

logger = logging.getLogger("wds_async")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_IN_FLIGHT = 2
"""Batches whose memory is held until their copies are over; before a later one is copied, the first is waited for."""


class PinnedMemory:
    """Registration of ``memory`` with CUDA, which ends with this object. ``cudart`` is ``torch.cuda.cudart()``."""

    def __init__(self, memory: mmap.mmap, cudart: Any) -> None:
        self._memory, self._cudart = memory, cudart  # it must not be unmapped before
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        code = int(cudart.cudaHostRegister(self._address, len(memory), _PORTABLE))
        self.is_pinned = code == 0
        if code:
            warn_once(
                logger, "pin", "CUDA cannot pin the memory of batches (error %d): copying them takes longer", code
            )

    def __del__(self) -> None:
        if self.is_pinned:
            with contextlib.suppress(Exception):  # CUDA may have ended before
                self._cudart.cudaHostUnregister(self._address)


@dataclass
class _OnDevice:
    batch: Any
    event: Any
    """Comes when the copy is over; None where it is."""


class Copier:
    """Copies the tensors of batches to ``device``; for CUDA on a stream of its own, from pinned memory."""

    def __init__(self, device: Any) -> None:
        torch: Any = packages.loaded("torch")
        self.device = torch.device(device)
        self._torch, self._stream = torch, None
        self._in_flight: deque[tuple[Any, Any]] = deque()
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._stream = torch.cuda.Stream(self.device)

    @property
    def pin(self) -> Callable[[mmap.mmap], PinnedMemory] | None:
        """Function that pins memory; None where the device has no use for it."""
        if self._stream is None:
            return None
        cudart = self._torch.cuda.cudart()
        return lambda memory: PinnedMemory(memory, cudart)

    def copy(self, batch: Any) -> _OnDevice:
        """Begin to copy ``batch``, whose memory is kept until that is over."""
        if self._stream is None:
            return _OnDevice(_mapped(batch, lambda tensor: tensor.to(self.device)), None)
        while self._in_flight and (len(self._in_flight) >= _IN_FLIGHT or self._in_flight[0][0].query()):
            self._in_flight.popleft()[0].synchronize()
        with self._torch.cuda.stream(self._stream):
            moved = _mapped(batch, self._begin)
            event = self._stream.record_event()
        self._in_flight.append((event, batch))
        return _OnDevice(moved, event)

    def _begin(self, tensor: Any) -> Any:
        if tensor.device.type == "cpu" and tensor.layout == self._torch.strided and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # of torch's own pinned memory, which it keeps until the copy is over
        return tensor.to(self.device, non_blocking=True)

    def delivered(self, moved: _OnDevice) -> Any:
        """Return the batch for the program's current stream, which waits for the copy."""
        if moved.event is not None:
            stream = self._torch.cuda.current_stream(self.device)
            stream.wait_event(moved.event)
            # Its memory was taken on the stream of the copies, and must not be used again before the program's work.
            _mapped(moved.batch, lambda tensor: tensor.record_stream(stream))
        return moved.batch

    def close(self) -> None:
        """Wait for the copies."""
        while self._in_flight:
            self._in_flight.popleft()[0].synchronize()


def _mapped(batch: Any, f: Callable[[Any], Any]) -> Any:
    """Return ``batch`` with each tensor in its dicts, lists and tuples replaced by ``f(tensor)``."""
    if hasattr(batch, "is_pinned") and hasattr(batch, "record_stream"):
        return f(batch)
    if isinstance(batch, dict):
        return {key: _mapped(value, f) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, f) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(_mapped(value, f) for value in batch)
    return batch


def copied(deliveries: Iterator[DeliveredBatch], copier: Copier, ahead: int) -> Iterator[DeliveredBatch]:
    """Yield ``deliveries`` with their batches on the device; ``ahead`` of them are copied before they are asked for."""
    held: deque[DeliveredBatch] = deque()
    with contextlib.closing(copier):
        while True:
            try:
                delivery = next(deliveries)
            except Exception as exn:  # StopIteration as well: it comes behind the batches that are held
                failure = exn
                break
            held.append(replace(delivery, batch=copier.copy(delivery.batch)))
            del delivery  # its memory is used again when the copy is over
            if len(held) > ahead:
                yield held.popleft()
        while held:
            yield held.popleft()
    if not isinstance(failure, StopIteration):
        raise failure
