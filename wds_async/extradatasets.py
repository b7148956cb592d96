"""Datasets around datasets: a mock, a cut into epochs, a stated length, and repetition."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async import world
from wds_async.arguments import check_size

__all__ = ["MockDataset", "guess_batchsize", "repeatedly", "with_epoch", "with_length"]

_END = object()


class MockDataset(world.TorchDataset):
    """The same ``sample``, ``length`` times: to measure or test what comes after a dataset."""

    def __init__(self, sample: Any, length: int) -> None:
        self.sample = sample
        self.length = check_size("MockDataset", "length", length)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield self.sample


class with_epoch(world.TorchDataset):
    """Epochs of ``length`` items out of ``dataset``, each going on where the one before ended.

    When the dataset ends it is begun again, within an epoch too; where a new beginning gives nothing the epoch ends.
    The count is that of each DataLoader worker. What is open between two epochs belongs to this process: a copy, a
    pickle and a new worker begin anew. `close` ends it.
    """

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        self.dataset = dataset
        self.length = check_size("with_epoch", "length", length)
        self._source: Iterator[Any] | None = None
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        if self._pid != os.getpid():  # a fork: what is open is the parent's
            self._source, self._pid = None, os.getpid()
        for _ in range(self.length):
            if self._source is None:
                self._source = iter(self.dataset)
            item = next(self._source, _END)
            if item is _END:
                self._source = iter(self.dataset)
                item = next(self._source, _END)
            if item is _END:
                self._source = None
                return
            yield item

    def close(self) -> None:
        """End what is open of the dataset; the next epoch begins it anew. Idempotent."""
        source, self._source = self._source, None
        if callable(close := getattr(source, "close", None)):
            close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}  # an open iterator cannot be pickled or shared


class with_length(world.TorchDataset):
    """``dataset`` with ``len()`` stated to be ``length``; how many items there are does not change."""

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        self.dataset = dataset
        self.length = check_size("with_length", "length", length, at_least=0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return self.length


def guess_batchsize(batch: Any) -> int:
    """Return the number of samples in a batch of columns: the length of the first."""
    return len(batch[0])


def repeatedly(
    source: Iterable[Any],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[[Any], int] = guess_batchsize,
) -> Iterator[Any]:
    """Yield the items of ``source`` again and again: ``nepochs`` times, or until ``nbatches`` items or ``nsamples``
    samples have come.

    Without any limit it does not end. ``batchsize`` tells how many samples an item holds; only ``nsamples`` asks
    for it. A pass that gives nothing ends it, as an iterator that is used up does.
    """
    epochs = batches = samples = 0
    while nepochs is None or epochs < nepochs:
        before = batches
        for item in source:
            yield item
            batches += 1
            if nbatches is not None and batches >= nbatches:
                return
            if nsamples is not None:
                samples += batchsize(item)
                if samples >= nsamples:
                    return
        if batches == before:
            return
        epochs += 1
