"""`ShardList` and `PytorchShardList` (2020 to 2021): shards, split and shuffled in one object."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async import config, world
from wds_async.legacy.names import deprecated
from wds_async.legacy.processor import Composable
from wds_async.shardlists import lists

__all__ = ["PytorchShardList", "ShardList"]

logger = logging.getLogger("wds_async")

Splitter = Callable[[list[str]], Iterable[str]]


class ShardList(world.TorchDataset, Composable):
    """This rank's and worker's shards of ``urls``, as ``{"url": …}``.

    ``shuffle``: True shuffles this worker's shards anew in each iteration; a function shuffles the list of them in
        place.
    ``nodesplitter``, ``splitter``: functions from a list of URLs to the share of this rank (by default all of them;
        True: `split_by_node`) and of this worker (True: `split_by_worker`); None for none.
    ``length``: what ``len`` gives.

    Deprecated: `SimpleShardList`, and the splitters as stages.
    """

    def __init__(
        self,
        urls: Any,
        shuffle: bool | Callable[[list[str]], Any] = False,
        nodesplitter: Splitter | bool | None = None,
        splitter: Splitter | bool | None = lists.split_by_worker,
        length: int | None = None,
    ) -> None:
        deprecated("ShardList", "DataPipeline(SimpleShardList(urls), split_by_node, split_by_worker)")
        self.urls = lists.expand_source(urls)
        self.shuffle = shuffle
        self.nodesplitter = lists.split_by_node if nodesplitter is True else nodesplitter
        self.splitter = lists.split_by_worker if splitter is True else splitter
        self.length = length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        urls = list(self.urls)
        for split in (self.nodesplitter, self.splitter):
            if callable(split):
                urls = list(split(urls))
        if callable(self.shuffle):
            self.shuffle(urls)
        elif self.shuffle:
            random.Random().shuffle(urls)
        return ({"url": url} for url in urls)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("ShardList has no len(): length= gives it one")
        return self.length

    def __bool__(self) -> bool:
        return True


class PytorchShardList(world.TorchDataset, Composable):
    """This rank's and worker's shards of ``urls``, as ``{"url": …}``.

    ``epoch_shuffle``: shuffle before splitting, by the number of the epoch, so that shards change hands: that of
    ``WDS_EPOCH`` where it is set, else that of `set_epoch`, each iteration being the next one.
    ``shuffle``: shuffle this worker's share, differently each time. ``split_by_worker``, ``split_by_node``: whether.
    Deprecated: ``WebDataset(urls, shardshuffle=n)``.
    """

    def __init__(
        self,
        urls: Any,
        epoch_shuffle: bool = False,
        shuffle: bool = True,
        split_by_worker: bool = True,
        split_by_node: bool = True,
        verbose: bool = False,
    ) -> None:
        deprecated(
            "PytorchShardList", "WebDataset(urls, shardshuffle=n), or SimpleShardList with detshuffle and splitters"
        )
        self.urls = lists.expand_source(urls)
        self.epoch_shuffle = epoch_shuffle
        self.shuffle = shuffle
        self.split_by_worker = split_by_worker
        self.split_by_node = split_by_node
        self.verbose = verbose
        self._epoch = world.SharedEpoch()
        self._chosen = False

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``; ``WDS_EPOCH`` is not read any more."""
        self._chosen = True
        self._epoch.set(epoch - 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        urls = list(self.urls)
        epoch = self._epoch.next()
        told = None if self._chosen else config.settings().epoch
        if self.epoch_shuffle:
            random.Random(epoch if told is None else told).shuffle(urls)
        if self.split_by_node:
            urls = list(lists.split_by_node(urls))
        if self.split_by_worker:
            urls = list(lists.split_by_worker(urls))
        if self.shuffle:
            random.Random().shuffle(urls)
        if self.verbose:
            logger.warning("PytorchShardList: %d of %d shards", len(urls), len(self.urls))
        return ({"url": url} for url in urls)
