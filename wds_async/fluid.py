"""The fluent methods: every filter as a method of a pipeline."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any, Self

from wds_async.arguments import check_size
from wds_async.decoding.streamdecode import StreamDecoder, default_decoders
from wds_async.filters import basic
from wds_async.filters.batch import default_collation_fn
from wds_async.handlers import Handler, reraise_exception
from wds_async.legacy.fluent import OlderMethods
from wds_async.observe import doctor
from wds_async.observe.diagnosis import Diagnosis
from wds_async.observe.prices import Range, of_pipeline
from wds_async.pipeline import DataPipeline

__all__ = ["FluidInterface", "FluidWrapper"]


class FluidInterface(OlderMethods):
    """Filters as methods. Each gives a new pipeline with the stage added and leaves this one as it is."""

    def compose(self, *stages: Any) -> Self:
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
        return self.compose(basic.shuffle(size, initial, rng, seed, handler))

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
    ) -> Self:
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
            basic.decode(
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

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Lists of ``batchsize`` samples; ``partial=False`` drops a shorter last list."""
        return self.compose(basic.batched(batchsize, collation_fn=None, partial=partial))

    def slice(self, *args: int | None) -> Self:
        """``itertools.islice`` with these arguments; the count is that of each worker."""
        return self.compose(basic.slice(*args))

    def lmdb_cached(
        self,
        fname: str | os.PathLike[str],
        map_size: float = 1e12,
        pickler: Any = pickle,
        chunksize: int = 500,
        *,
        allow_pickle: bool = False,
    ) -> Self:
        """Keep the samples of the first complete epoch in an LMDB file (see `samplecache.LMDBCached`)."""
        return self.compose(basic.LMDBCached(fname, map_size, pickler, chunksize, allow_pickle=allow_pickle))

    def mcached(self) -> Self:
        """Keep the samples in memory during the first complete epoch and yield them from there afterwards. Each worker
        keeps its own, all of them: the memory is what the samples take, without a bound."""
        return self.compose(basic.Cached())

    # -- written by tests/test_fluid.py from the filters --
    def associate(self, associator: Any, **kw: Any) -> Self:
        """Update every sample, in place, with ``associator(key)``, or ``associator[key]`` where it has the key."""
        return self.compose(basic.associate(associator, **kw))

    def batched(
        self,
        batchsize: int = 20,
        collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
        partial: bool = True,
    ) -> Self:
        """Collate ``batchsize`` samples at a time to columns; ``partial=False`` drops a shorter last batch.

        Tuples become a tuple of columns, dicts a dict of columns: numbers as a numpy array, arrays and tensors stacked
        (AssertionError where their shapes differ), everything else as a list (see `default_collation_fn`).
        ``collation_fn(samples)`` does it otherwise; None gives the list of samples. ConfigError for a ``batchsize``
        below 1; a fraction is rounded up.
        """
        return self.compose(basic.batched(batchsize, collation_fn=collation_fn, partial=partial))

    def extract_keys(
        self,
        *patterns: Any,
        duplicate_is_error: bool = True,
        ignore_missing: bool = False,
        handler: Handler = reraise_exception,
    ) -> Self:
        """Make tuples of the fields that fit patterns: ``extract_keys("*.png;jpg", "cls")``.

        A pattern (`fnmatch`) is held against ``jpg`` and ``.jpg``; ``;`` stands between alternatives. ValueError, for
        ``handler``, where one fits several fields (``duplicate_is_error``) or none (unless ``ignore_missing``).
        """
        return self.compose(
            basic.extract_keys(
                *patterns, duplicate_is_error=duplicate_is_error, ignore_missing=ignore_missing, handler=handler
            )
        )

    def info(
        self,
        fmt: str | None = None,
        n: int = 3,
        every: int = -1,
        width: int | None = 50,
        stream: Any = None,
        name: str = "",
    ) -> Self:
        """Write the first ``n`` samples, and then every ``every``-th, to ``stream`` (standard error).

        ``fmt`` is filled by ``str.format`` from the fields; without it each field is, cut to ``width`` (None: whole).
        """
        return self.compose(basic.info(fmt, n=n, every=every, width=width, stream=stream, name=name))

    def log_keys(self, logfile: str | None = None) -> Self:
        """Append ``number, worker, rank, key`` (tabs between) of every sample to ``logfile``; None logs nothing.

        Each line is one append of its own, so the lines of several processes do not mix.
        """
        return self.compose(basic.log_keys(logfile))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception, threads: int = 0) -> Self:
        """Replace each sample by ``f(sample)``. None drops the sample; a dict made from a dict gets its ``__key__``.

        ``handler`` is asked about an exception of ``f`` (`handlers`); the default raises it. With ``threads`` that many
        threads run ``f`` ahead of the consumer, the order kept: for what releases the GIL (see `parallel.ordered_map`).
        """
        return self.compose(basic.map(f, handler=handler, threads=threads))

    def map_dict(self, handler: Handler = reraise_exception, **kw: Any) -> Self:
        """Replace field ``k`` by ``f(field)`` for every ``k=f``, in place: ``map_dict(jpg=augment)``.

        A missing field is a KeyError with its likely cause, for ``handler``.
        """
        return self.compose(basic.map_dict(handler=handler, **kw))

    def map_tuple(self, *args: Any, handler: Handler = reraise_exception) -> Self:
        """Apply the i-th function to the i-th value of a tuple; None, or no function, leaves a value as it is.

        ``handler`` is asked about exceptions.
        """
        return self.compose(basic.map_tuple(*args, handler=handler))

    def rename(self, handler: Handler = reraise_exception, keep: bool = True, **kw: Any) -> Self:
        """Rename fields: ``rename(image="jpg;png", label="cls")`` takes the first of the alternatives that is there.

        Other fields stay; ``keep=False`` drops them, ``__key__`` too. ValueError, for ``handler``, where none is there.
        """
        return self.compose(basic.rename(handler=handler, keep=keep, **kw))

    def rename_keys(
        self,
        *args: tuple[str, str],
        keep_unselected: bool = False,
        must_match: bool = True,
        duplicate_is_error: bool = True,
        handler: Handler = reraise_exception,
        **kw: str,
    ) -> Self:
        """Rename fields by pattern: ``rename_keys(("image", "*.jpg"))`` or ``rename_keys(image="jpg")``.

        A pattern (`fnmatch`) is held against the field's lower-cased name after its last ``/``; the last pattern that
        fits decides. Fields that nothing fits are dropped, but for ``__key__``, unless ``keep_unselected``. ValueError,
        for ``handler``, for two fields under one new name (unless not ``duplicate_is_error``: the first stays) and for
        a pattern that fits nothing (``must_match``).
        """
        return self.compose(
            basic.rename_keys(
                *args,
                keep_unselected=keep_unselected,
                must_match=must_match,
                duplicate_is_error=duplicate_is_error,
                handler=handler,
                **kw,
            )
        )

    def rsample(self, p: float = 0.5, seed: Any = None) -> Self:
        """Let each item pass with probability ``p``. With ``seed`` every iteration chooses the same ones;
        without one it draws from the global ``random``, which ``random.seed(...)`` and torch, in its workers, seed.
        """
        return self.compose(basic.rsample(p, seed=seed))

    def select(self, predicate: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """Keep the samples for which ``predicate(sample)`` is true. ``handler`` is asked about its exceptions."""
        return self.compose(basic.select(predicate, handler=handler))

    def to_tuple(
        self,
        *args: Any,
        handler: Handler = reraise_exception,
        missing_is_error: bool = True,
        none_is_error: bool | None = None,
    ) -> Self:
        """Make tuples of the named fields: ``to_tuple("jpg;png", "cls")`` or, in one string, ``to_tuple("jpg cls")``.

        ``;`` stands between alternatives, of which the first that is there is taken. A missing field is a ValueError,
        for ``handler``, or None where not ``missing_is_error``; a field that is None is a ValueError where
        ``none_is_error`` (by default the same as ``missing_is_error``).
        """
        return self.compose(
            basic.to_tuple(*args, handler=handler, missing_is_error=missing_is_error, none_is_error=none_is_error)
        )

    def unbatched(self) -> Self:
        """Yield the single samples of batches, the reverse of `batched`.

        A batch is a tuple or dict of columns, each of which is taken apart along its first axis; a column that is a
        dict of columns itself gives dicts. ValueError, naming the lengths, where the columns of a batch differ in
        length.
        """
        return self.compose(basic.unbatched())

    def unlisted(self) -> Self:
        """Yield the samples of lists of samples one by one."""
        return self.compose(basic.unlisted())

    def xdecode(
        self,
        *args: tuple[str, StreamDecoder],
        must_decode: bool = True,
        defaults: Sequence[tuple[str, StreamDecoder]] = default_decoders,
        handler: Handler = reraise_exception,
        **kw: StreamDecoder,
    ) -> Self:
        """Decode fields with ``(pattern, f)`` pairs and ``extension=f`` arguments, where ``f`` takes a stream.

        A pattern (`fnmatch`) is held against ``jpg`` and ``.jpg``: the lower-cased name after its last ``/``, without
        and with a dot before it. The last pair that fits decides, so ``args`` go before ``defaults``
        (`default_decoders`), and ``kw`` before both. ``f=False`` leaves a field as it is. Bytes are given to ``f`` as a
        stream, anything else as it is; fields ``__x`` are passed on.

        A field that nothing fits is a ValueError, or passed on where not ``must_decode``. Pickles (``*.pyd``) of
        classes that are not harmless are `UnsafeContent`, and all of them are under ``WDS_SECURE=1``. What ``f`` raises
        carries a note that names the field, the sample and its shard.
        """
        return self.compose(basic.xdecode(*args, must_decode=must_decode, defaults=defaults, handler=handler, **kw))

    # -- until here --


class FluidWrapper(DataPipeline, FluidInterface):
    """Any iterable or callable as the first stage, with the fluent methods."""

    def __init__(self, initial: Any) -> None:
        super().__init__()
        self.append(initial)  # also a list, which is several stages to DataPipeline
