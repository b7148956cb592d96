"""Plan of the shards that a rank and worker reads, and of their order: the stages before reading, from `WebDataset`'s
arguments.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wds_async import config, world
from wds_async.arguments import check_function, check_size, check_type
from wds_async.errors import ConfigError
from wds_async.filters import shuffling
from wds_async.logs import warn_once
from wds_async.shardlists import lists
from wds_async.shardlists.canonical import CanonicalSplit
from wds_async.shardlists.lists import DirectoryShardList, MultiShardSample, ResampledShards, SimpleShardList
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.order import announce_order

if TYPE_CHECKING:
    from wds_async.shardlists.spans import SampleOffsets

__all__ = ["ShardPlan", "announce_epoch", "log_seed", "shuffle_buffer", "shuffle_seed"]

logger = logging.getLogger("wds_async")

_EPOCH = "epoch"
"""The ``shardshuffle`` that permutes all shards in each epoch."""

_TRUE_SHUFFLE = 100
_DIRECTORY_MODES = ("unlink", "keep", "resample")
_NOTICED_AT_MOST = 1000


def shuffle_buffer(shardshuffle: bool | int | str | None, resampled: bool, stacklevel: int) -> int:
    """Return how many shards to shuffle through, 0 for not at all or (``"epoch"``) all of them at once. Warn where
    ``shardshuffle`` leaves that open. TypeError for another text."""
    if isinstance(shardshuffle, str) and shardshuffle != _EPOCH:
        check_type("WebDataset", "shardshuffle", shardshuffle, (), "a number of shards or 'epoch'")
    warning = ""
    if resampled and shardshuffle is not False:
        warning = (
            "shardshuffle changes nothing where shards are resampled; shardshuffle=False says that it is not meant"
        )
    elif shardshuffle is None:
        warning = (
            "shardshuffle is not given: shards are read in the order of the list. Say shardshuffle=False if that is "
            "meant, or a number of shards to shuffle through (for training 'epoch', all of them)"
        )
    elif shardshuffle is True:
        warning = f"shardshuffle=True shuffles through {_TRUE_SHUFFLE} shards; give a number, or 'epoch' for all"
    if warning:
        warnings.warn(warning, stacklevel=stacklevel)
    if resampled or shardshuffle is None or isinstance(shardshuffle, str):
        return 0
    return _TRUE_SHUFFLE if shardshuffle is True else check_size("WebDataset", "shardshuffle", shardshuffle, 0)


def shuffle_seed(seed: int | None, nodesplitter: Any) -> int | world.DrawnSeed:
    """Return the seed of shard shuffling: ``seed``, else ``WDS_SEED``, else one that is drawn, or 0 where
    ``nodesplitter`` is the program's own: its ranks take shares of one order, and their number is unknown here."""
    if seed is not None:
        return seed
    drawn = world.DrawnSeed()  # with WDS_SEED too, so that the program's later draws are those that WebDataset leaves
    if (seed := config.settings().seed) is not None:
        return seed
    return drawn if nodesplitter in (None, lists.split_by_node, lists.single_node_only) else 0


def log_seed(seed: int | world.DrawnSeed, what: str) -> None:
    """Log a seed that was drawn, or once a process on the first of several ranks that there is none. ``what`` it does
    with the shards: ``"shuffled"`` or ``"mixed"``."""
    if not isinstance(seed, world.DrawnSeed):
        return
    here = world.place()
    if here.world_size == here.num_workers == 1:
        logger.info("no seed is given: %d was drawn; seed=%d or WDS_SEED repeats this order", *[seed.number()] * 2)
    elif here.rank == here.worker == 0 and config.settings().epoch is None:
        warn_once(
            logger,
            "no seed",
            "no seed is given: the shards of %d ranks are %s by seed 0, so a restarted run reads them in the "
            "same order again. Pass seed= or WDS_SEED, the same on every rank and another one after a restart, or name "
            "the epoch that was interrupted (set_epoch, WDS_EPOCH)",
            here.world_size,
            what,
        )


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Rules by which shards are ordered and shared out.

    ``mode``: that of a directory, or None. ``resampled``: drawn with replacement, following from ``seed`` where it was
    ``seeded``. ``buffer``: of the shuffle, 0 for none; ``permuted``: of all shards at once. ``strict``: fewer
    shards than ranks are an error. ``storage_options`` are for the stores in which patterns are looked for.
    ``split``: "bytes" cuts the shards into equal spans instead of the splitters (see `spans`), with ``transfer`` for
    looking up their sizes, or with ``indexes``, which finds where samples are, and with ``equal`` as many for all.
    ``canonical``: samples of a global batch, which are shared out in its place (see `canonical`), from as many
    ``places`` of the epoch.
    """

    mode: str | None = None
    resampled: bool = False
    buffer: int = 0
    permuted: bool = False
    seed: int | world.DrawnSeed = 0
    seeded: bool = False
    strict: bool = True
    nodesplitter: Callable[..., Any] | None = lists.split_by_node
    workersplitter: Callable[..., Any] | bool | None = lists.split_by_worker
    storage_options: StorageOptions = NOTHING_GIVEN
    split: str | None = None
    indexes: Callable[[Sequence[str]], Mapping[str, SampleOffsets]] | None = None
    equal: str | None = None
    canonical: int | None = None
    places: int = 1
    transfer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in (None, "resampled", *_DIRECTORY_MODES):
            raise ConfigError(f"mode={self.mode!r}: known are 'resampled' and, for directories, {_DIRECTORY_MODES}")
        check_function("WebDataset", "nodesplitter", self.nodesplitter or None, optional=True)
        check_function("WebDataset", "workersplitter", self.workersplitter or None, optional=True)
        if self.split not in (None, "bytes"):
            raise ConfigError(f"split={self.split!r}: known is 'bytes'; without it whole shards are split")
        own = 'split="bytes"' if self.split else f"canonical={self.canonical}" if self.canonical else ""
        if own and (self.resampled or self.mode or self.splitters != [lists.split_by_node, lists.split_by_worker]):
            raise ConfigError(
                f"{own} shares the shards of an epoch out itself: it goes with no nodesplitter= or "
                "workersplitter=, with no mode= and with no resampled=True, where every worker draws its own shards"
            )

    @property
    def splitters(self) -> list[Any]:
        """The splitters by rank and by worker."""
        return [self.nodesplitter, self.workersplitter]

    @property
    def shuffles(self) -> bool:
        """True if the order of the shards differs between epochs."""
        return self.permuted or self.buffer > 0

    def stages(self, urls: Any) -> list[Any]:
        """Return the shard list, its shuffle, and the splitters. ``urls`` may be a shard list already, the user's own
        too.
        """
        from wds_async.storage.registry import tell_of_native_pipes  # noqa: PLC0415 (pipes only)

        shards = self._shards(urls)
        if isinstance(shards, SimpleShardList | ResampledShards):
            tell_of_native_pipes(itertools.islice(shards.urls, _NOTICED_AT_MOST))
        stages = [shards]
        ordered = isinstance(shards, ResampledShards | MultiShardSample | DirectoryShardList)
        if self.shuffles and not ordered:
            before = (config.settings().epoch or 0) - 1
            if self.permuted:
                stages.append(shuffling.epochshuffle(self.seed, before))
            else:
                stages.append(shuffling.detshuffle(self.buffer, seed=self.seed, epoch=before))
        if self.split or self.canonical:
            return [*stages, self._split_within(shards)]
        splitters = self.splitters
        if isinstance(shards, ResampledShards) or self.mode in _DIRECTORY_MODES:
            # Each worker draws for itself, and a share of an endless draw is just another one; what a directory gives
            # to one, it gives to no other.
            own = (lists.split_by_node, lists.split_by_worker)
            splitters = [splitter for splitter in splitters if splitter not in own]
        elif self.strict and isinstance(shards, SimpleShardList) and self.nodesplitter is lists.split_by_node:
            _refuse_empty_ranks(len(shards), world.place().world_size)
        return [*stages, *(splitter for splitter in splitters if splitter)]

    def _split_within(self, shards: Any) -> Any:
        from wds_async.shardlists.spans import ByteSplit, IndexedSplit, ShardSizes  # noqa: PLC0415 (the engine)

        if isinstance(shards, ResampledShards):
            raise ConfigError('split="bytes" cuts shards that are read once an epoch, and these are drawn without end')
        urls = getattr(shards, "urls", None)
        if self.indexes is not None:
            if not isinstance(urls, Sequence):
                raise ConfigError(
                    f"index= is for shards that are listed, and {type(shards).__name__} does not list them"
                )
            if self.canonical:
                return CanonicalSplit(self.indexes(urls), self.canonical, self.equal, self.places)
            return IndexedSplit(self.indexes(urls), self.equal)
        setting = config.transfer_config(**self.transfer)
        sizes = ShardSizes(getattr(shards, "sizes", None), self.storage_options, setting)
        if isinstance(urls, Sequence):
            sizes.of(urls)  # once here, and not again in every worker
        return ByteSplit(sizes)

    def _shards(self, urls: Any) -> Any:
        if world.is_iterable_dataset(urls):
            return urls
        if self.mode in _DIRECTORY_MODES:
            if not isinstance(urls, (str, os.PathLike)):
                raise ConfigError(f"mode={self.mode!r} watches one directory; urls is {urls!r:.80}")
            return DirectoryShardList(os.fspath(urls), mode=self.mode)
        if self.resampled:
            return ResampledShards(
                urls, seed=self.seed, deterministic=self.seeded, storage_options=self.storage_options
            )
        if isinstance(urls, Iterable) and not isinstance(urls, (str, os.PathLike, Collection)):
            source = iter(urls)
            first = list(itertools.islice(source, 1))
            urls = itertools.chain(first, source) if source is urls else urls
            if first and isinstance(first[0], Mapping):  # {"url": …}, to be iterated anew each epoch
                return urls
        return SimpleShardList(urls, storage_options=self.storage_options)


def announce_epoch(stages: Sequence[Any]) -> None:
    """Note the order of the epoch that has just begun, for a service that reads for this process: where it follows from
    a list and a seed, and ranks and workers take their shares by turns. Once for the workers of a rank."""
    here, shards = world.place(), stages[0]
    if here.worker or len(stages) < 4 or not isinstance(shards, SimpleShardList) or shards.seed is not None:
        return
    shuffled = stages[1] if isinstance(stages[1], shuffling.epochshuffle | shuffling.detshuffle) else None
    behind = 1 if shuffled is None else 2
    if list(stages[behind : behind + 2]) != [lists.split_by_node, lists.split_by_worker]:
        return
    facts: dict[str, Any] = {"kind": "listed", "epoch": 0}
    if shuffled is not None:
        facts = {"kind": "epoch", "seed": world.seed_number(shuffled.seed), "epoch": max(0, shuffled.epoch)}
    if isinstance(shuffled, shuffling.detshuffle):
        facts |= {"kind": "buffer", "size": shuffled.bufsize, "initial": shuffled.initial}
    if isinstance(facts.get("seed", 0), int):
        announce_order(shards.urls, rank=here.rank, world=here.world_size, **facts)


def _refuse_empty_ranks(shards: int, ranks: int) -> None:
    """Raise ConfigError before training begins: a rank without shards fails, or leaves the others waiting for it."""
    if shards < ranks:
        raise ConfigError(
            f"{shards} shards for {ranks} ranks: some would be empty. Make more shards, start fewer ranks, or pass "
            "nodesplitter=None and .compose(split_by_node), which splits samples (and has each rank read all shards)"
        )
