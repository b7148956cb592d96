"""Nodes of ``torchdata.nodes``: a dataset as the source of a graph of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wds_async import packages
from wds_async.dataset import WebDataset
from wds_async.pipeline import DataPipeline

__all__ = ["ShardReader"]

BaseNode: Any = packages.optional("torchdata.nodes", "ShardReader", "nodes").BaseNode


class ShardReader(BaseNode[Any]):  # type: ignore[misc] # its package is not read where types are checked
    """Node that gives the items of a dataset, or of the shards ``source`` with the ``options`` of `WebDataset`.

    Each reset is the next epoch. The state is that of the dataset, so it is exact: ``torchdata.nodes.Loader`` goes on
    with the item behind the last one that its graph has taken. Put decoding behind it (``ParallelMapper``), or into the
    dataset. Raise what the dataset raises.
    """

    def __init__(self, source: Any, **options: Any) -> None:
        super().__init__()
        self.dataset: Any = source if isinstance(source, DataPipeline) else WebDataset(source, **options)
        self._items: Iterator[Any] | None = None

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        """Begin the next epoch, or go on from ``initial_state``."""
        super().reset(initial_state)
        if self._items is not None:
            self._items.close()  # type: ignore[attr-defined] # a pipeline's iterator is a generator
        if initial_state is not None:
            self.dataset.load_state_dict(initial_state["dataset"])
        self._items = iter(self.dataset)

    def next(self) -> Any:
        """Return the next item."""
        assert self._items is not None  # `BaseNode` resets before
        return next(self._items)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the dataset."""
        return {"dataset": self.dataset.state_dict()}
