"""`ResizedDataset` (2020 to 2021): epochs of a given length, cut out of one continuing iteration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from wds_async import world
from wds_async.legacy.names import deprecated

__all__ = ["Chopped", "ChoppedDataset", "ResizedDataset"]


class Chopped(world.TorchDataset):
    """What `ResizedDataset` does, for use from here."""

    def __init__(self, dataset: Any, length: int | None = None, nominal: int | None = None) -> None:
        self.dataset = dataset
        self.length = len(dataset) if length is None else length
        self.nominal = self.length if nominal is None else nominal
        self._going: Iterator[Any] | None = None
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        if self._pid != os.getpid():  # a fork: the iterator is the parent's
            self._going, self._pid = None, os.getpid()
        left = self.length
        while left:
            fresh = self._going is None
            going = self._going = iter(self.dataset) if self._going is None else self._going
            for item in going:
                yield item
                left -= 1
                if not left:
                    return
            self._going = None
            if fresh and left == self.length:
                return  # nothing comes, and nothing would come

    def __len__(self) -> int:
        return self.nominal

    def __bool__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_going": None}

    def close(self) -> None:
        """Drop the iteration that goes on, and close the dataset."""
        self._going = None
        if hasattr(self.dataset, "close"):
            self.dataset.close()


class ResizedDataset(Chopped):
    """``length`` items of ``dataset`` in every iteration, each of which goes on where the last one stopped.

    The dataset is begun again when it ends. ``length`` is ``len(dataset)`` unless given, ``nominal`` (default
    ``length``) is what ``len`` gives. Each DataLoader worker counts for itself, and goes on only where workers are
    persistent. Deprecated: `with_epoch`, which begins the source again for each epoch.
    """

    def __init__(self, dataset: Any, length: int | None = None, nominal: int | None = None) -> None:
        deprecated(type(self).__name__, ".with_epoch(length)")
        super().__init__(dataset, length, nominal)


ChoppedDataset = ResizedDataset
