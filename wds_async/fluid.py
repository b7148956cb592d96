"""Fluent methods of pipelines: those generated of the filters (`filters.methods`), and those that do more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from wds_async.arguments import check_size
from wds_async.filters import basic, batch, shuffling
from wds_async.filters.methods import FilterMethods
from wds_async.legacy.fluent import OlderMethods
from wds_async.pipeline import DataPipeline

if TYPE_CHECKING:
    from wds_async.observe.diagnosis import Diagnosis
    from wds_async.observe.prices import Range

__all__ = ["FluidInterface", "FluidWrapper"]


class FluidInterface(FilterMethods, OlderMethods):
    """Filters as methods. Each gives a new pipeline with the stage added and leaves this one as it is."""

    def compose(self, *stages: Any) -> Self:
        """Return a new pipeline with ``stages`` added, which are callables from iterator to iterator; this one stays as
        it is (see `DataPipeline.compose`).
        """
        raise NotImplementedError(f"{type(self).__name__}: put FluidInterface behind DataPipeline among the bases")

    def cost(self, samples: int | None = None) -> Range | None:
        """Return the US dollars that reading has cost so far, in this process and its workers, as ``low`` and ``high``:
        by list prices (``WDS_PRICES``), wide where regions are not known (``WDS_REGION``). None if nothing reads
        shards. ``samples`` extrapolates to so many of this rank, as in ``dataset.cost(samples=10 * len(dataset))`` for
        ten epochs; ValueError before any was read.
        """
        from wds_async.observe.prices import of_pipeline  # noqa: PLC0415 (only where asked for)

        return of_pipeline(self, samples)

    def doctor(self) -> Diagnosis:
        """Return the bottleneck of this pipeline in what it and its workers read so far: ``print(loader.doctor())`` is
        one sentence and the knob to turn next (`observe.diagnosis`). A `WebLoader` knows the consumer's side too."""
        from wds_async.observe import doctor  # noqa: PLC0415 (only where asked for)

        return doctor.what_bounds(self)

    def to_arrow_batches(self, batchsize: int = 1000, schema: Any = None) -> Iterator[Any]:
        """Yield the samples, which are dicts, as ``pyarrow.RecordBatch`` of ``batchsize`` rows: a column for each field
        of any of them, null where one lacks it. Texts, numbers, bytes and lists keep their types, arrays become lists.

        ``schema``: a ``pyarrow.Schema``, so that all batches have the same columns and types. `arrow_batches` is faster
        for undecoded shards. MissingExtra without pyarrow; an error of pyarrow for what has no type in Arrow.
        """
        assert isinstance(self, DataPipeline)
        return batch.record_batches(self, batchsize, schema)

    def shuffle(
        self,
        size: int,
        initial: int = 100,
        rng: random.Random | None = None,
        seed: Any = None,
        handler: Any = None,
    ) -> Self:
        """Shuffle samples through a buffer of ``size`` of them; below 1, the same pipeline.

        ``initial`` is how many are held before the first is given out. ``seed`` (or ``rng``) gives every iteration and
        every worker the same order; without it each has its own. ``handler`` is accepted for WebDataset's sake.
        """
        if check_size("shuffle", "size", size) < 1:
            return self
        return self.compose(shuffling.shuffle(size, initial, rng, seed, handler))

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Return the pipeline of lists of ``batchsize`` samples; ``partial=False`` drops a shorter last list."""
        return self.compose(batch.batched(batchsize, collation_fn=None, partial=partial))

    def lmdb_cached(self, *args: Any, **kw: Any) -> Self:
        """Keep the samples of the first complete epoch in an LMDB file: ``lmdb_cached(fname, …)``, with the arguments
        of `samplecache.LMDBCached`."""
        return self.compose(basic.LMDBCached(*args, **kw))

    def mcached(self) -> Self:
        """Keep the samples in memory during the first complete epoch and yield them from there afterwards. Each worker
        keeps its own, all of them: the memory is what the samples take, without a bound."""
        return self.compose(basic.Cached())


class FluidWrapper(DataPipeline, FluidInterface):
    """Any iterable or callable as the first stage, with the fluent methods."""

    def __init__(self, initial: Any) -> None:
        super().__init__()
        self.append(initial)  # also a list, which is several stages to DataPipeline
