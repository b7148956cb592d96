"""The fluent methods: every filter as a method of a pipeline."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from wds_async import doctor, filters
from wds_async.costs import of_pipeline
from wds_async.handlers import Handler, reraise_exception
from wds_async.legacy.fluent import OlderMethods
from wds_async.pipeline import DataPipeline
from wds_async.pricetable import Range
from wds_async.symptoms import Diagnosis

__all__ = ["FluidInterface", "FluidWrapper"]


class FluidInterface(OlderMethods):
    """Filters as methods. Each gives a new pipeline with the stage added and leaves this one as it is."""

    def compose(self, *stages: Any) -> Any:
        """A new pipeline with ``stages`` added, which are callables from iterator to iterator; this one stays as it is
        (see `DataPipeline.compose`)."""
        raise NotImplementedError(f"{type(self).__name__}: put FluidInterface behind DataPipeline among the bases")

    def cost(self, samples: int | None = None) -> Range | None:
        """US dollars that reading has cost so far, in this process and its workers, as ``low`` and ``high``: by a table
        of list prices (``WDS_PRICES``), wide where regions are not known (``WDS_REGION``). None where nothing reads
        shards. With ``samples``, what so many samples of this rank will have cost, going by those that were read:
        ``dataset.cost(samples=10 * len(dataset))`` for ten epochs. ValueError for that before any was read."""
        return of_pipeline(self, samples)

    def doctor(self) -> Diagnosis:
        """What bounds this pipeline, from what it and its workers read so far: ``print(loader.doctor())`` is one
        sentence and the knob to turn next (`symptoms`). On a `WebLoader` it knows the consumer's side too. With
        ``WDS_DOCTOR=1`` it knows where the reading threads' time went; without, only how long they waited for bytes."""
        return doctor.what_bounds(self)

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = filters.default_collation_fn,
        partial: bool = True,
    ) -> Any:
        """``batchsize`` samples at a time, collated to columns; ``partial=False`` drops a shorter last batch.

        Tuples become a tuple of columns, dicts a dict of columns: numbers as a numpy array, arrays and tensors stacked
        (AssertionError where their shapes differ), everything else as a list. ``collation_fn(samples)`` does it
        otherwise; None gives the list of samples. ConfigError for a ``batchsize`` below 1.
        """
        return self.compose(filters.batched(batchsize, collation_fn=collation_fn, partial=partial))

    def unbatched(self) -> Any:
        """The single samples of batches, the reverse of `batched`: each column is taken apart along its first axis."""
        return self.compose(filters.unbatched())

    def listed(self, batchsize: int, partial: bool = True) -> Any:
        """Lists of ``batchsize`` samples; ``partial=False`` drops a shorter last list."""
        return self.compose(filters.batched(batchsize, collation_fn=None, partial=partial))

    def unlisted(self) -> Any:
        """The samples of lists of samples."""
        return self.compose(filters.unlisted())

    def log_keys(self, logfile: str | None = None) -> Any:
        """Append a line for every sample to ``logfile``."""
        return self.compose(filters.log_keys(logfile))

    def shuffle(self, size: int, **kw: Any) -> Any:
        """Shuffle samples through a buffer of ``size`` of them; below 1, the same pipeline.

        ``initial`` (100) is how many are held before the first is given out. ``seed`` (or ``rng``, a
        ``random.Random``) gives every iteration and every worker the same order; without it each has its own.
        """
        return self if operator.index(size) < 1 else self.compose(filters.shuffle(size, **kw))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception, *, threads: int = 0) -> Any:
        """``f(sample)`` in place of each sample; None drops the sample.

        ``handler`` is asked about an exception of ``f`` (`handlers`); the default raises it. With ``threads`` that
        many run ``f`` ahead, the order kept: for what releases the GIL.
        """
        return self.compose(filters.map(f, handler=handler, threads=threads))

    def decode(
        self,
        *args: Any,
        pre: Any = None,
        post: Any = None,
        only: Any = None,
        partial: bool = False,
        allow_pickle: bool = False,
        min_size: int | None = None,
        threads: int = 0,
        handler: Handler = reraise_exception,
    ) -> Any:
        """Decode fields by extension; ``args`` are image specifications (``"torchrgb"``) and decoder functions
        ``f("." + field, data)``, tried in order before the built-in ones (None: not mine).

        ``only`` names the fields to decode (default: all), ``partial=True`` lets pass those that are no bytes any more;
        ``pre`` (decompression unless given) and ``post`` are decoders tried before and after all others. A field that
        fails is a `DecodingError`, for ``handler``.

        ``min_size`` decodes images at 1/2, 1/4 or 1/8 where both sides stay at least that many pixels, in a fraction
        of the time. With ``threads`` that many decode ahead, the order kept. ``allow_pickle`` trusts pickled fields of
        any class: they run code from the data. Raises ValueError at once for an unknown image specification.
        """
        from wds_async import autodecode  # noqa: PLC0415 (pipelines without decoding do not load the decoders)

        decoders = [autodecode.imagehandler(a, min_size=min_size) if isinstance(a, str) else a for a in args]
        return self.compose(
            filters.decode(
                *decoders,
                pre=pre,
                post=post,
                only=only,
                partial=partial,
                allow_pickle=allow_pickle,
                threads=threads,
                handler=handler,
            )
        )

    def map_dict(self, handler: Handler = reraise_exception, **kw: Any) -> Any:
        """Replace field ``k`` by ``f(field)`` for every ``k=f``: ``map_dict(jpg=augment)``. A missing field is a
        KeyError, for ``handler``."""
        return self.compose(filters.map_dict(handler=handler, **kw))

    def select(self, predicate: Callable[[Any], Any], **kw: Any) -> Any:
        """The samples for which ``predicate(sample)`` is true; ``handler=`` is asked about its exceptions."""
        return self.compose(filters.select(predicate, **kw))

    def to_tuple(self, *args: Any, **kw: Any) -> Any:
        """Tuples of the named fields: ``to_tuple("jpg;png", "cls")``, or in one string ``to_tuple("jpg;png cls")``.

        ``;`` stands between alternatives, of which the first that is there is taken. A missing field is a ValueError,
        for ``handler``; with ``missing_is_error=False`` it is None.
        """
        return self.compose(filters.to_tuple(*args, **kw))

    def map_tuple(self, *args: Any, handler: Handler = reraise_exception) -> Any:
        """Apply the i-th function to the i-th value of a tuple. None leaves a value as it is; so are values left that
        have no function. ``handler`` is asked about exceptions."""
        return self.compose(filters.map_tuple(*args, handler=handler))

    def slice(self, *args: Any) -> Any:
        """``itertools.islice`` with these arguments; the count is that of each worker."""
        return self.compose(filters.slice(*args))

    def rename(self, **kw: Any) -> Any:
        """Name fields anew: ``rename(image="jpg;png", label="cls")``, the first alternative that is there.

        Other fields stay; ``keep=False`` drops them, ``__key__`` too. ValueError, for ``handler``, where none is there.
        """
        return self.compose(filters.rename(**kw))

    def rsample(self, p: float = 0.5, **kw: Any) -> Any:
        """Let each sample pass with probability ``p``; with ``seed=`` every iteration chooses the same ones."""
        return self.compose(filters.rsample(p, **kw))

    def rename_keys(self, *args: Any, **kw: Any) -> Any:
        """Name fields anew by pattern, ``rename_keys(("image", "*.jpg"))`` or ``rename_keys(image="jpg")``.

        What nothing fits is dropped unless ``keep_unselected=True`` (see `filters.rename_keys`).
        """
        return self.compose(filters.rename_keys(*args, **kw))

    def extract_keys(self, *args: Any, **kw: Any) -> Any:
        """Tuples of the fields that fit patterns: ``extract_keys("*.png;jpg", "cls")``.

        ValueError where none fits (unless ``ignore_missing=True``) or several do (unless ``duplicate_is_error=False``).
        """
        return self.compose(filters.extract_keys(*args, **kw))

    def xdecode(self, *args: Any, **kw: Any) -> Any:
        """Decode fields by pattern, from streams (see `filters.xdecode`)."""
        return self.compose(filters.xdecode(*args, **kw))

    def lmdb_cached(self, *args: Any, **kw: Any) -> Any:
        """Keep the samples of the first complete epoch in an LMDB file (see `samplecache.LMDBCached`)."""
        return self.compose(filters.LMDBCached(*args, **kw))

    def mcached(self) -> Any:
        """Keep the samples in memory during the first complete epoch and yield them from there afterwards. Each worker
        keeps its own, all of them: the memory is what the samples take, without a bound."""
        return self.compose(filters.Cached())


class FluidWrapper(DataPipeline, FluidInterface):
    """Any iterable or callable as the first stage, with the fluent methods."""

    def __init__(self, initial: Any) -> None:
        super().__init__()
        self.append(initial)  # also a list, which is several stages to DataPipeline
