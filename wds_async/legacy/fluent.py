"""Older fluent methods, for today's pipelines and for the older classes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from wds_async import world
from wds_async.arguments import check_size
from wds_async.errors import ConfigError
from wds_async.legacy.names import deprecated
from wds_async.stages import stage_of

__all__ = ["Equalized", "OlderMethods"]


class Equalized(world.TorchDataset):
    """``length // world_size`` items of ``dataset`` on every rank, whatever its share is.

    The dataset is begun again as often as needed, and cut. DataLoader workers share the rank's number among them.
    Raises ConfigError where nothing would come, or where a share is to be filled from a source that is empty.
    """

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self.length = check_size("ddp_equalize", "length", length)

    def __iter__(self) -> Iterator[Any]:
        here = world.place()
        of_rank = self.length // here.world_size
        if of_rank < 1:
            raise ConfigError(f"ddp_equalize({self.length}) leaves nothing for each of {here.world_size} ranks")
        left = of_rank // here.num_workers + (here.worker < of_rank % here.num_workers)
        while left:
            before = left
            for item in itertools.islice(self.dataset, left):
                yield item
                left -= 1
            if left == before:
                raise ConfigError(
                    f"ddp_equalize: worker {here.worker} of rank {here.rank} owes {left} items and gets none; "
                    "use more shards or fewer workers"
                )

    def close(self) -> None:
        """Close the dataset."""
        if callable(close := getattr(self.dataset, "close", None)):
            close()


class OlderMethods:
    """Methods of older versions for a class that has ``compose(*stages)``. All of them warn."""

    def pipe(self: Any, stage: Any) -> Any:
        """Call `compose`, under its name of 2020."""
        deprecated(".pipe(f)", ".compose(f)")
        return self.compose(stage_of(stage))

    def then(self: Any, f: Any, *args: Any, **kw: Any) -> Any:
        """Return a stage of ``f(source, *args, **kw)``, or of a filter and its arguments."""
        deprecated(".then(f, *args)", ".compose(pipelinefilter(f)(*args))")
        return self.compose(stage_of(f, *args, **kw))

    def dbcache(self: Any, fname: Any, size: int) -> Any:
        """Keep the first ``size`` samples in an SQLite file (see `samplecache.SQLiteCache`)."""
        deprecated(".dbcache(fname, size)", ".compose(LMDBCached(folder))")
        from wds_async.samplecache import SQLiteCache  # noqa: PLC0415 (with it comes SQLite)

        return self.compose(SQLiteCache(fname, size))

    def ddp_equalize(self: Any, length: int, with_length: bool = False) -> Any:
        """Return the dataset with ``length // world_size`` items on every rank (see `Equalized`): of a loader, batches.

        ``with_length`` makes ``len`` give that number.
        """
        deprecated(".ddp_equalize(length)", ".with_epoch(items of each rank), and .with_length")
        result = copy.copy(self)
        equalized = Equalized(self, length)
        result.pipeline = [equalized]
        result.repetitions, result.nsamples, result.size = 1, -1, None
        return result.with_length(equalized.length // world.place().world_size, silent=True) if with_length else result
