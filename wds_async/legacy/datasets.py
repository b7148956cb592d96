"""WebDataset's older classes and functions, 2020 to 2024: each works, and warns of what to use today."""

from __future__ import annotations

import copy
import functools
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from wds_async import config, packages, samplecache, world
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError
from wds_async.extradatasets import with_epoch
from wds_async.filters.basic import identity, transform_with
from wds_async.fluid import FluidInterface, FluidWrapper
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.legacy.fluent import OlderMethods
from wds_async.legacy.names import deprecated
from wds_async.loader import WebLoader
from wds_async.pipeline import Composite, Inheriting
from wds_async.reading.stage import TarStage
from wds_async.shardlists import lists
from wds_async.stages import FilterFunction, Traits, pipelinefilter, stage_of, stages_of
from wds_async.tracebacks import located

__all__ = [
    "Chain", "Chopped", "ChoppedDataset", "Composable", "DBCache", "Dataset", "MultiDataset", "Processor",
    "PytorchShardList", "ResizedDataset", "ShardList", "Shorthands", "map_stream", "transformer", "worker_urls",
]  # fmt: skip


class Chopped(with_epoch):
    """`ResizedDataset` without its warning, for the older methods."""

    def __init__(self, dataset: Any, length: int | None = None, nominal: int | None = None) -> None:
        super().__init__(dataset, len(dataset) if length is None else length)
        self.nominal = self.length if nominal is None else nominal

    def __len__(self) -> int:
        return self.nominal

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """End the iteration that goes on, and close the dataset."""
        super().close()
        if hasattr(self.dataset, "close"):
            self.dataset.close()


class ResizedDataset(Chopped):
    """``length`` items of ``dataset`` in every iteration, each of which goes on where the last one stopped.

    The dataset is begun again when it ends. ``length`` is ``len(dataset)`` unless given, ``nominal`` (default
    ``length``) is what ``len`` gives. Each DataLoader worker counts for itself, and goes on only where workers are
    persistent. Deprecated: `with_epoch`, which begins the source again for each epoch.
    """

    def __init__(self, dataset: Any, length: int | None = None, nominal: int | None = None) -> None:
        deprecated(type(self).__name__, ".with_epoch(length)")
        super().__init__(dataset, length, nominal)


ChoppedDataset = ResizedDataset


class _Mixin:
    """Base of the mixins for users' classes. A class that names one as a base warns when it is defined."""

    def __init_subclass__(cls, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            for base in cls.__bases__:
                if _Mixin in base.__bases__:
                    deprecated(base.__name__, "DataPipeline with FluidInterface")


class Composable(Inheriting, _Mixin):
    """Mixin of datasets that take their ``source`` and can be continued."""

    source: Any = None

    def source_(self, source: Any) -> Any:
        """Set the source; returns this object."""
        self.source = source
        return self

    def then(self, f: Any, *args: Any, **kw: Any) -> Any:
        """Return the dataset of ``f(iter(self), *args, **kw)``, or of a filter and its arguments."""
        return Chain(self, stage_of(f, *args, **kw))

    def compose(self, *args: Any, **kw: Any) -> Any:
        """Return an object of a class with ``source_`` that has this as its source, for ``compose(cls, *args, **kw)``.
        Otherwise the arguments are stages, one after another.
        """
        if args and isinstance(args[0], type) and hasattr(args[0], "source_"):
            return args[0](*args[1:], **kw).source_(self)
        return functools.reduce(Chain, stages_of(*args, **kw), self)


class Shorthands(FluidInterface, OlderMethods, _Mixin):
    """Mixin of today's fluent methods and the older ones."""

    def slice(self, *args: Any) -> Any:
        """Return the dataset after ``itertools.islice`` with these arguments; all of it without any."""
        return super().slice(*args) if args else self

    def repeat(self, nepochs: int | None = None, nbatches: int | None = None) -> Any:
        """Go through this ``nepochs`` times (without end by default), for at most ``nbatches`` items."""
        return FluidWrapper(self).repeat(nepochs or -1, nbatches or -1)

    def with_epoch(self, length: int, by_node: bool = False) -> Any:
        """Return the dataset with iterations of ``length`` items each (``by_node``: ``length // world_size``), which go
        on where the last one stopped.
        """
        return FluidWrapper(Chopped(self, length // world.place().world_size if by_node else length))

    def with_length(self, length: int) -> Any:
        """Make ``len`` give ``length``."""
        return FluidWrapper(self).with_length(length, silent=True)

    def ddp_equalize(self, length: int, with_length: bool = False) -> Any:
        """Return the dataset with ``length // world_size`` items on every rank, see `legacy.fluent.Equalized`."""
        return OlderMethods.ddp_equalize(FluidWrapper(self), length, with_length)


class Chain(world.TorchDataset, Composable, Shorthands, Composite):
    """``source`` run through one ``stage``."""

    def __init__(self, source: Any, stage: Any) -> None:
        self.source = source
        self.stage = stage

    def __iter__(self) -> Iterator[Any]:
        if self.source is None:
            raise ConfigError(f"{type(self).__name__} of {self.stage!r} has no source: call it with one, or source_")
        return iter(getattr(self.stage, "run", self.stage)(iter(self.source)))

    def _parts(self) -> Sequence[Any]:
        return self.stage, self.source


class Processor(Chain):
    """A function as a dataset: ``f(iter(source), *args, **kw)``.

    ``Processor(source, f, *args, **kw)``, or ``Processor(f, *args, **kw)``, which called with a source gives the same.
    ``f`` is a function that gets the source first, or a filter (``wds.shuffle``) that is meant with these arguments;
    ``_kwa`` holds further arguments by name. Deprecated. Raises ConfigError without a function.
    """

    def __init__(self, *args: Any, _kwa: dict[str, Any] | None = None, **kw: Any) -> None:
        deprecated("Processor", "DataPipeline(source, f), or .compose(f) of a WebDataset")
        arguments, source = list(args), kw.pop("source", None)
        if source is None and arguments and (arguments[0] is None or _is_source(arguments[0])):
            source = arguments.pop(0)
        f = arguments.pop(0) if arguments else kw.pop("f", None)
        if f is None:
            raise ConfigError("Processor(source, f, *args) or Processor(f, *args)(source): there is no function f")
        super().__init__(source, stage_of(f, *arguments, **(_kwa or {}), **kw))

    def __call__(self, source: Iterable[Any]) -> Any:
        """Return this processor over ``source``."""
        return copy.copy(self).source_(source)


def _is_source(x: Any) -> bool:
    return hasattr(x, "__iter__") and not isinstance(x, type)


class DBCache(samplecache.SQLiteCache, Composable, Shorthands):
    """`samplecache.SQLiteCache` as a dataset with fluent methods. Deprecated."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        deprecated("DBCache", "LMDBCached(folder), or cache_dir= of WebDataset to keep shards")
        super().__init__(*args, **kw)


Splitter = Callable[[list[str]], Iterable[str]]


class ShardList(world.TorchDataset, Composable):
    """This rank's and worker's shards of ``urls``, as ``{"url": …}``.

    ``shuffle``: True shuffles this worker's shards anew in each iteration; a function shuffles the list in place.
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
            urls = list(split(urls)) if callable(split) else urls
        if self.shuffle:
            (self.shuffle if callable(self.shuffle) else random.Random().shuffle)(urls)
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
    ``shuffle``: shuffle this worker's share, differently each time. Deprecated: ``WebDataset(urls, shardshuffle=n)``.
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
        self.epoch_shuffle, self.shuffle, self.verbose = epoch_shuffle, shuffle, verbose
        self.split_by_worker, self.split_by_node = split_by_worker, split_by_node
        self._epoch = world.SharedEpoch()
        self._chosen = False

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``; ``WDS_EPOCH`` is not read any more."""
        self._chosen = True
        self._epoch.set(epoch - 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        urls = list(self.urls)
        epoch = self._epoch.next()
        of_environment = None if self._chosen else config.settings().epoch
        if self.epoch_shuffle:
            random.Random(epoch if of_environment is None else of_environment).shuffle(urls)
        if self.split_by_node:
            urls = list(lists.split_by_node(urls))
        if self.split_by_worker:
            urls = list(lists.split_by_worker(urls))
        if self.shuffle:
            random.Random().shuffle(urls)
        if self.verbose:
            logging.getLogger("wds_async").warning("PytorchShardList: %d of %d shards", len(urls), len(self.urls))
        return ({"url": url} for url in urls)


def _map_stream(
    data: Iterable[Any], f: Callable[[Any], Any] | None = None, handler: Handler = reraise_exception
) -> Iterator[Any]:
    """Yield ``f(sample)``, None included; a dict made from a dict gets its ``__key__``. Without ``f``, the sample."""
    for sample in data:
        try:
            result = sample if f is None else f(sample)
        except Exception as exn:
            if passed(handler, located(exn, "map_stream", sample), sample):
                continue
            return
        if isinstance(result, dict) and isinstance(sample, dict):
            result["__key__"] = sample.get("__key__")
        yield result


map_stream = pipelinefilter(_map_stream, traits=Traits(handler="handler"))


def transformer(transformers: Sequence[Callable[[Any], Any] | None]) -> Callable[[Sequence[Any]], Any]:
    """Return `transform_with` as a function of the sample."""
    return functools.partial(transform_with, transformers=transformers)


def worker_urls(urls: Iterable[Any]) -> list[Any]:
    """Return this worker's share of ``urls``."""
    return list(lists.split_by_worker(urls))


def _on_urls(
    source: Iterable[dict[str, Any]], f: Callable[[list[str]], Iterable[str] | None]
) -> Iterator[dict[str, Any]]:
    """Return the shards of the URLs that ``f`` returns for the list of all; if it returns None, it has changed the
    list.
    """
    urls = [shard["url"] for shard in source]
    chosen = f(urls)
    return ({"url": url} for url in (urls if chosen is None else chosen))


def _members(
    source: Iterable[dict[str, Any]], open_fn: Callable[[str], Any] | None, handler: Handler
) -> Iterator[dict[str, Any]]:
    """Return the members of shards that a user's ``open_fn(url)`` opens, expanded as tars without the engine."""
    from wds_async.reading import parts  # noqa: PLC0415 (few bring an opener of their own)

    opened = parts.url_opener(source, handler=handler) if open_fn is None else _opened(source, open_fn, handler)
    return iter(parts.tar_file_expander(opened, handler=handler))


def _opened(
    source: Iterable[dict[str, Any]], open_fn: Callable[[str], Any], handler: Handler
) -> Iterator[dict[str, Any]]:
    for shard in source:
        try:
            stream = open_fn(shard["url"])
        except Exception as exn:
            if handler(exn):
                continue
            return
        yield {**shard, "stream": stream}


def _grouped(source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    from wds_async.reading import parts  # noqa: PLC0415 (as above)

    return iter(parts.group_by_keys(source))


class Dataset(WebDataset):
    """The samples of the shards ``urls``. The fluent methods change this object and return it.

    ``length``: what ``len`` gives. ``handler``, ``tarhandler``: for errors of shards, the second one where it is given.
    ``open_fn``: ``open_fn(url)`` gives a binary stream, instead of the engine.
    ``initial_pipeline``: stages that make samples of a shard's members (dicts with ``fname`` and ``data``), instead of
        grouping them by key.
    ``shard_selection``, ``splitter``: a function from the list of URLs to this worker's (default: every n-th);
        ``prepare_for_worker=False`` and ``splitter=None`` leave all to each. Such a function of one's own also decides
        about ranks; otherwise shards are split by rank. A function ``prepare_for_worker`` is called with this object
        when an iteration begins.
    ``shuffle``: shuffle shards; a number of shards, or a function that does it in place.
    ``cache_dir``, ``cache_size``, ``cache_name``, ``cache_verbose``: `WebDataset`'s ``cache_dir``, ``cache_size``,
        ``url_to_name``, ``verbose``.

    Deprecated: `WebDataset`.
    """

    def __init__(
        self,
        urls: Any,
        *,
        length: int | bool | None = None,
        open_fn: Callable[[str], Any] | None = None,
        handler: Handler = reraise_exception,
        tarhandler: Handler | None = None,
        prepare_for_worker: bool | Callable[[Any], Any] = True,
        initial_pipeline: list[Any] | None = None,
        shard_selection: Callable[[list[str]], Iterable[str]] | None = None,
        splitter: bool | Callable[[list[str]], Iterable[str]] | None = True,
        shuffle: bool | int | Callable[[list[str]], Any] = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: float = -1,
        cache_name: Callable[[str], str] | None = None,
        cache_verbose: bool = False,
    ) -> None:
        deprecated("Dataset", "WebDataset")
        chosen = shard_selection if shard_selection is not None else splitter
        own = callable(chosen) and chosen is not lists.split_by_worker
        split = bool(chosen) and prepare_for_worker is not False
        super().__init__(
            urls,
            handler=tarhandler or handler,
            shardshuffle=False if callable(shuffle) else sys.maxsize if shuffle is True else int(shuffle),
            cache_dir=cache_dir,
            cache_size=cache_size,
            url_to_name=cache_name,
            verbose=cache_verbose,
            nodesplitter=None if own else lists.split_by_node,
            workersplitter=lists.split_by_worker if split and not own else None,
            empty_check=False,
            length=None if length is None or isinstance(length, bool) else length,
        )
        self.prepare_for_worker = prepare_for_worker
        at = next(i for i, stage in enumerate(self.pipeline) if isinstance(stage, TarStage))
        if open_fn is not None or initial_pipeline is not None:
            members = FilterFunction(_members, open_fn, tarhandler or handler)
            self.pipeline[at : at + 1] = [members, *([_grouped] if initial_pipeline is None else initial_pipeline)]
        if own and split:
            self.pipeline.insert(at, FilterFunction(_on_urls, chosen))
        if callable(shuffle):
            self.pipeline.insert(at, FilterFunction(_on_urls, shuffle))

    def compose(self, *stages: Any, **kw: Any) -> Any:
        """Add the stages to this object, and return it."""
        self.pipeline = super().compose(*stages, **kw).pipeline
        return self

    def __iter__(self) -> Iterator[Any]:
        if callable(self.prepare_for_worker):
            self.prepare_for_worker(self)
        return super().__iter__()


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
        ahead = min(max(1, output_size // workers), 32) if workers else None  # a tensor that waits is an open file
        super().__init__(
            dataset, batch_size=None, num_workers=workers, prefetch_factor=ahead, collate_fn=identity, pin_memory=False
        )
        # Asked for without a GPU, torch would warn in every epoch.
        vars(self.pipeline[0])["pin_memory"] = pin_memory and packages.loaded("torch").cuda.is_available()
        if nominal is not None:
            self.with_length(nominal, silent=True)
