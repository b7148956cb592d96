"""`ResizedDataset` (2020 to 2021): epochs of a given length, cut out of one continuing iteration."""

from __future__ import annotations

from typing import Any

from wds_async.extradatasets import with_epoch
from wds_async.legacy.names import deprecated

__all__ = ["Chopped", "ChoppedDataset", "ResizedDataset"]


class Chopped(with_epoch):
    """What `ResizedDataset` does, for use from here."""

    def __init__(self, dataset: Any, length: int | None = None, nominal: int | None = None) -> None:
        super().__init__(dataset, len(dataset) if length is None else length)
        self.nominal = self.length if nominal is None else nominal

    def __len__(self) -> int:
        return self.nominal

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """End the iteration that goes on, and close the dataset."""
        super().close()
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
