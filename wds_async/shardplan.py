"""Which shards a rank and worker reads, in which order: the stages before reading, from `WebDataset`'s arguments."""

from __future__ import annotations

import itertools
import operator
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wds_async import config, filters, shardlists, world
from wds_async.errors import ConfigError
from wds_async.shardlists import DirectoryShardList, MultiShardSample, ResampledShards, SimpleShardList
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import tell_of_native_pipes

__all__ = ["ShardPlan", "shuffle_buffer"]

_TRUE_SHUFFLE = 100
_DIRECTORY_MODES = ("unlink", "keep", "resample")
_NOTICED_AT_MOST = 1000


def shuffle_buffer(shardshuffle: bool | int | None, resampled: bool, stacklevel: int) -> int:
    """How many shards to shuffle through, 0 for not at all; says where ``shardshuffle`` leaves that open."""
    if resampled:
        if shardshuffle is not False:
            text = (
                "shardshuffle changes nothing where shards are resampled; shardshuffle=False says that it is not meant"
            )
            warnings.warn(text, stacklevel=stacklevel)
        return 0
    if shardshuffle is None:
        warnings.warn(
            "shardshuffle is not given: shards are read in the order of the list. Say shardshuffle=False if that is "
            "meant, or a number of shards to shuffle through (for training, all of them)",
            stacklevel=stacklevel,
        )
    if shardshuffle is True:
        warnings.warn(
            f"shardshuffle=True shuffles through {_TRUE_SHUFFLE} shards; give a number", stacklevel=stacklevel
        )
        return _TRUE_SHUFFLE
    buffer = operator.index(shardshuffle or 0)
    if buffer < 0:
        raise ConfigError(f"shardshuffle={buffer}: it is a number of shards, or False")
    return buffer


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How shards are ordered and shared out.

    ``mode``: that of a directory, or None. ``resampled``: drawn with replacement, following from ``seed`` where it was
    ``seeded``. ``buffer``: of the shuffle, 0 for none. ``strict``: fewer shards than ranks are an error.
    ``storage_options`` are for the stores in which patterns are looked for.
    """

    mode: str | None = None
    resampled: bool = False
    buffer: int = 0
    seed: int = 0
    seeded: bool = False
    strict: bool = True
    nodesplitter: Callable[..., Any] | None = shardlists.split_by_node
    workersplitter: Callable[..., Any] | bool | None = shardlists.split_by_worker
    storage_options: StorageOptions = NOTHING_GIVEN

    def __post_init__(self) -> None:
        if self.mode not in (None, "resampled", *_DIRECTORY_MODES):
            raise ConfigError(f"mode={self.mode!r}: known are 'resampled' and, for directories, {_DIRECTORY_MODES}")

    def stages(self, urls: Any) -> list[Any]:
        """The shard list, its shuffle, and the splitters. ``urls`` may be a shard list already."""
        shards = self._shards(urls)
        if isinstance(shards, SimpleShardList | ResampledShards):
            tell_of_native_pipes(itertools.islice(shards.urls, _NOTICED_AT_MOST))
        stages = [shards]
        if self.buffer > 0 and isinstance(shards, SimpleShardList):
            epoch = config.settings().epoch or 0
            stages.append(filters.detshuffle(self.buffer, seed=self.seed, epoch=epoch - 1))
        splitters = [self.nodesplitter, self.workersplitter]
        if isinstance(shards, ResampledShards) or self.mode in _DIRECTORY_MODES:
            # Each worker draws for itself, and a share of an endless draw is just another one; what a directory gives
            # to one, it gives to no other.
            own = (shardlists.split_by_node, shardlists.split_by_worker)
            splitters = [splitter for splitter in splitters if splitter not in own]
        elif self.strict and isinstance(shards, SimpleShardList) and self.nodesplitter is shardlists.split_by_node:
            _refuse_empty_ranks(len(shards))
        return [*stages, *(splitter for splitter in splitters if splitter)]

    def _shards(self, urls: Any) -> Any:
        if isinstance(urls, SimpleShardList | ResampledShards | MultiShardSample):
            return urls
        if self.mode in _DIRECTORY_MODES:
            return _directory(urls, self.mode)
        if self.resampled:
            return ResampledShards(
                urls, seed=self.seed, deterministic=self.seeded, storage_options=self.storage_options
            )
        return SimpleShardList(urls, storage_options=self.storage_options)


def _refuse_empty_ranks(shards: int) -> None:
    """Said before training begins: a rank without shards would fail, or leave the others waiting for it."""
    ranks = world.place().world_size
    if shards < ranks:
        raise ConfigError(
            f"{shards} shards for {ranks} ranks: some would be empty. Make more shards, start fewer ranks, or pass "
            "nodesplitter=None and .compose(split_by_node), which splits samples (and has each rank read all shards)"
        )


def _directory(urls: Any, mode: str | None) -> Any:
    if not isinstance(urls, (str, os.PathLike)):
        raise ConfigError(f"mode={mode!r} watches one directory; urls is {urls!r:.80}")
    return DirectoryShardList(os.fspath(urls), mode=mode)
