"""`MultiDataset` (2020): a dataset that is read in several processes."""

from __future__ import annotations

from typing import Any

from wds_async import packages
from wds_async.filters.basic import identity
from wds_async.legacy.names import deprecated
from wds_async.loader import WebLoader

__all__ = ["MultiDataset"]

_MOST_AHEAD = 32  # a tensor that waits takes a file descriptor


class MultiDataset(WebLoader):
    """The items of ``dataset``, read by ``workers`` processes of torch's DataLoader, with the fluent methods.

    ``output_size``: items that may wait in all (at most 32 of each worker); ``nominal``: what ``len`` gives;
    ``pin_memory``: copy tensors to page-locked memory, where there is a GPU. Deprecated: `WebLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        workers: int = 4,
        output_size: int = 10000,
        nominal: int | None = None,
        pin_memory: bool = True,
    ) -> None:
        deprecated("MultiDataset", "WebLoader(dataset, num_workers=n, batch_size=None)")
        ahead = min(max(1, output_size // workers), _MOST_AHEAD) if workers else None
        super().__init__(
            dataset, batch_size=None, num_workers=workers, prefetch_factor=ahead, collate_fn=identity, pin_memory=False
        )
        # Asked for without a GPU, torch would warn in every epoch.
        self.pipeline[0].pin_memory = pin_memory and packages.loaded("torch").cuda.is_available()
        if nominal is not None:
            self.with_length(nominal, silent=True)
