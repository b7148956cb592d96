"""Orders of indexes for `dataset.ShardListDataset`: shuffled, and yet near each other on disk. And one by weight, for
`randomaccess.IndexedDataset`.

The indexes are cut into ranges (shards, or chunks of a size). The order of the ranges is shuffled, then the indexes
in each, so that few shards are read at a time. Every order follows from seed and epoch alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence, Sized

import numpy as np

from wds_async import world
from wds_async.arguments import check_size
from wds_async.errors import ConfigError

__all__ = ["ChunkedSampler", "DistributedChunkedSampler", "ShardListSampler", "ShardedSampler", "WeightedSampler"]

_EPOCH_STEP = 1289738273  # wids's own, so that one seed gives one order in both


class _RangeSampler:
    """Base of the samplers, which visit ranges of indexes.

    ``epoch`` counts the passes that went to their end; the next pass has its order. In epoch 0 the ranges keep their
    order unless ``shufflefirst``: a first pass then fetches the shards one after another.
    """

    def __init__(self, ranges: Sequence[range], *, seed: int, shuffle: bool, shufflefirst: bool) -> None:
        self.ranges = ranges
        self.seed = seed
        self.shuffle = shuffle
        self.shufflefirst = shufflefirst
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(self.seed + _EPOCH_STEP * self.epoch)
        order = list(self.ranges)
        if self.shuffle and (self.shufflefirst or self.epoch > 0):
            rng.shuffle(order)
        for indexes in order:
            if self.shuffle:
                shuffled = list(indexes)
                rng.shuffle(shuffled)
                yield from shuffled
            else:
                yield from indexes
        self.epoch += 1


class ShardListSampler(_RangeSampler):
    """Sampler of every index once, shard by shard; each epoch has a new order of the shards, and of the samples in
    each.

    ``lengths`` are the numbers of samples of the shards (default: ``dataset.lengths``). In epoch 0 the shards keep
    their order, unless ``shufflefirst``. The order is the same on all ranks: it suits one process.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        lengths: Sequence[int] | None = None,
        seed: int = 0,
        shufflefirst: bool = False,
    ) -> None:
        lengths = list(dataset.lengths if lengths is None else lengths)  # type: ignore[attr-defined]
        stops = list(itertools.accumulate(lengths))
        ranges = [range(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]
        super().__init__(ranges, seed=seed, shuffle=True, shufflefirst=shufflefirst)


ShardedSampler = ShardListSampler


class ChunkedSampler(_RangeSampler):
    """Sampler of every index once, chunk by chunk of ``chunksize`` neighbours; each epoch has a new order.

    ``num_samples`` is how many indexes there are, from 0 on, or ``(start, stop)``; default: all of ``dataset``.
    ``shuffle=False`` keeps the order of the indexes. In epoch 0 the chunks keep theirs, unless ``shufflefirst``.
    ``dslength_per_replica`` above 0 is the length of a pass: it is cut to that, or goes on with its first indexes.

    Raises ConfigError for a ``chunksize`` below 1 and for indexes that ``dataset`` does not have.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        dslength_per_replica: int = -1,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = True,
        shufflefirst: bool = False,
    ) -> None:
        chunksize = check_size("ChunkedSampler", "chunksize", chunksize, at_least=1)
        if num_samples is None:
            num_samples = len(dataset)
        start, stop = (0, num_samples) if isinstance(num_samples, int) else num_samples
        if not 0 <= start <= stop <= len(dataset):
            raise ConfigError(f"num_samples={num_samples!r}: the dataset has the indexes 0 to {len(dataset) - 1}")
        ranges = [range(at, min(at + chunksize, stop)) for at in range(start, stop, chunksize)]
        super().__init__(ranges, seed=seed, shuffle=shuffle, shufflefirst=shufflefirst)
        self.dslength_per_replica = dslength_per_replica if dslength_per_replica > 0 else stop - start

    def __len__(self) -> int:
        return self.dslength_per_replica

    def __iter__(self) -> Iterator[int]:
        begun, left = self.epoch, self.dslength_per_replica
        while left > 0 and self.ranges:
            self.epoch = begun
            for index in itertools.islice(super().__iter__(), left):
                yield index
                left -= 1
        self.epoch = begun + 1


def DistributedChunkedSampler(
    dataset: Sized,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    shuffle: bool = True,
    shufflefirst: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    chunksize: int = 1000000,
) -> ChunkedSampler:
    """Return the `ChunkedSampler` of one rank: the ``rank``-th of ``num_replicas`` equal stretches of neighbours.

    A rank stays in its stretch in every epoch, so it fetches no other shards. Rank and number of replicas are those of
    `world.place` where they are not given; ``num_samples`` is how many indexes are shared out (default: all).

    ``drop_last`` says what happens where they do not divide evenly. None: every index goes to one rank, and the last
    ranks have fewer, which makes ranks that wait for each other at every step hang. True: the last few indexes are
    left out. False: the last ranks begin earlier, and some indexes come twice. With True and False all have as many.

    Raises ConfigError for a rank that is not below ``num_replicas``.
    """
    here = world.place()
    replicas = here.world_size if num_replicas is None else num_replicas
    own = here.rank if rank is None else rank
    if not 0 <= own < replicas:
        raise ConfigError(f"rank {own} of {replicas} replicas: ranks count from 0")
    total = len(dataset) if num_samples is None else num_samples
    share = total // replicas if drop_last else -(-total // replicas)
    start, stop = min(own * share, total), min((own + 1) * share, total)
    if drop_last is False:
        start = stop - share
    return ChunkedSampler(
        dataset,
        num_samples=(start, stop),
        chunksize=chunksize,
        seed=seed,
        shuffle=shuffle,
        shufflefirst=shufflefirst,
    )


class WeightedSampler:
    """Sampler of ``num_samples`` indexes, drawn by ``weights`` without replacement: no index comes twice in an epoch.

    The next index is always drawn among those that are left, each with a chance in proportion to its weight: those of
    large weights come sooner, and more often where not all are drawn. An index of weight 0 never comes.
    ``num_samples``: how many all ranks draw together (default: all that have a weight).

    The order follows from ``seed`` and epoch (`set_epoch`; each pass is the next one) and is the same on all ranks, of
    which each takes every ``num_replicas``-th index from its own ``rank`` on (default: those of `world.place`). All
    ranks have as many: the last few that do not divide evenly are left out.

    Raises ConfigError for weights that are negative, not finite, or fewer than ``num_samples``, and for a rank that is
    not below ``num_replicas``. The draw is that of Efraimidis and Spirakis, "Weighted random sampling with a reservoir"
    (2006): one random number an index, divided by its weight.
    """

    def __init__(
        self,
        weights: Iterable[float],
        num_samples: int | None = None,
        *,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        self.weights = np.asarray(weights if isinstance(weights, np.ndarray) else list(weights), np.float64)
        if self.weights.ndim != 1 or not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ConfigError("WeightedSampler: weights: one finite number, 0 or more, for each index")
        possible = int(np.count_nonzero(self.weights))
        wanted = possible if num_samples is None else num_samples
        self.num_samples = check_size("WeightedSampler", "num_samples", wanted, at_least=0)
        if self.num_samples > possible:
            why = f"{possible} indexes have a weight above 0, and each comes once"
            raise ConfigError(f"WeightedSampler: num_samples={self.num_samples}: {why}")
        here = world.place()
        self.num_replicas = here.world_size if num_replicas is None else num_replicas
        self.rank = here.rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(f"rank {self.rank} of {self.num_replicas} replicas: ranks count from 0")
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        numbers = np.random.default_rng(world.make_seed("weights", self.seed, self.epoch)).random(len(self.weights))
        drawable = np.flatnonzero(self.weights)
        # Times of independent exponential clocks: which rings next is drawn by weight among those that have not rung.
        with np.errstate(over="ignore"):
            times = -np.log1p(-numbers[drawable]) / self.weights[drawable]
        order = drawable[np.argsort(times, kind="stable")]
        yield from order[self.rank : len(self) * self.num_replicas : self.num_replicas].tolist()
        self.epoch += 1
