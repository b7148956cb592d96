"""`WebDataset`: the usual pipeline from URLs to samples, with the fluent methods."""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from wds_async import config, filters, shardlists
from wds_async.errors import ConfigError, UrlError
from wds_async.handlers import Handler, reraise_exception
from wds_async.pipeline import DataPipeline
from wds_async.storage.registry import tell_of_native_pipes
from wds_async.tariterators import tarfile_to_samples

__all__ = ["FluidInterface", "FluidWrapper", "WebDataset", "check_empty"]

_log = logging.getLogger("wds_async")
_TRUE_SHUFFLE = 100


class FluidInterface:
    """Filters as methods. Each gives a new pipeline with the stage added and leaves this one as it is."""

    def compose(self, *stages: Any) -> Any:
        """A new pipeline with ``stages`` added; `DataPipeline.compose` is what is meant."""
        raise NotImplementedError(f"{type(self).__name__}: put FluidInterface behind DataPipeline among the bases")

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = filters.default_collation_fn,
        partial: bool = True,
    ) -> Any:
        """``batchsize`` samples at a time, collated; ``partial=False`` drops a shorter last batch."""
        return self.compose(filters.batched(batchsize, collation_fn=collation_fn, partial=partial))

    def unbatched(self) -> Any:
        """The samples of batches of columns."""
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
        """Shuffle through a buffer of ``size`` samples (see `filters.shuffle`); below 1, the same pipeline."""
        return self if size < 1 else self.compose(filters.shuffle(size, **kw))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Any:
        """``f(sample)``; None drops the sample."""
        return self.compose(filters.map(f, handler=handler))

    def decode(
        self,
        *args: Any,
        pre: Any = None,
        post: Any = None,
        only: Any = None,
        partial: bool = False,
        allow_pickle: bool = False,
        handler: Handler = reraise_exception,
    ) -> Any:
        """Decode fields by extension; ``args`` are image specifications (``"torchrgb"``) and decoder functions.

        ``allow_pickle`` trusts pickled fields of any class: they run code from the data. Raises ValueError at once
        for an unknown image specification.
        """
        from wds_async import autodecode  # noqa: PLC0415 (pipelines without decoding do not load the decoders)

        decoders = [autodecode.imagehandler(a) if isinstance(a, str) else a for a in args]
        return self.compose(
            filters.decode(
                *decoders,
                pre=pre,
                post=post,
                only=only,
                partial=partial,
                allow_pickle=allow_pickle,
                handler=handler,
            )
        )

    def map_dict(self, handler: Handler = reraise_exception, **kw: Any) -> Any:
        """Replace field ``k`` by ``f(field)`` for every ``k=f``."""
        return self.compose(filters.map_dict(handler=handler, **kw))

    def select(self, predicate: Callable[[Any], Any], **kw: Any) -> Any:
        """The samples for which ``predicate`` is true."""
        return self.compose(filters.select(predicate, **kw))

    def to_tuple(self, *args: Any, **kw: Any) -> Any:
        """Tuples of the named fields: ``to_tuple("jpg;png", "cls")``."""
        return self.compose(filters.to_tuple(*args, **kw))

    def map_tuple(self, *args: Any, handler: Handler = reraise_exception) -> Any:
        """Apply the i-th function to the i-th value; None leaves it."""
        return self.compose(filters.map_tuple(*args, handler=handler))

    def slice(self, *args: Any) -> Any:
        """``itertools.islice`` with these arguments; the count is that of each worker."""
        return self.compose(filters.slice(*args))

    def rename(self, **kw: Any) -> Any:
        """Name fields anew: ``rename(image="jpg;png")``."""
        return self.compose(filters.rename(**kw))

    def rsample(self, p: float = 0.5, **kw: Any) -> Any:
        """Let each sample pass with probability ``p``."""
        return self.compose(filters.rsample(p, **kw))

    def rename_keys(self, *args: Any, **kw: Any) -> Any:
        """Name fields anew by pattern (see `filters.rename_keys`)."""
        return self.compose(filters.rename_keys(*args, **kw))

    def extract_keys(self, *args: Any, **kw: Any) -> Any:
        """Tuples of the fields that fit patterns (see `filters.extract_keys`)."""
        return self.compose(filters.extract_keys(*args, **kw))

    def mcached(self) -> Any:
        """Keep the samples in memory during the first epoch and yield them from there."""
        return self.compose(filters.Cached())


def check_empty(source: Iterable[Any]) -> Iterator[Any]:
    """Everything; raises ConfigError (a ValueError) where that is nothing."""
    samples = iter(source)
    for first in samples:
        yield first
        break
    else:
        raise ConfigError(
            "no sample came out of the dataset in this worker: either it has fewer shards than ranks times workers "
            "(use fewer workers or more shards), or every shard was passed over by the handler; "
            "empty_check=False lets a worker be empty"
        )
    yield from samples


class WebDataset(DataPipeline, FluidInterface):
    """The samples of the shards ``urls``, as dicts of bytes with ``__key__`` and ``__url__``.

    Stages: shard list, shard shuffle, split by rank, split by worker, reading, check for emptiness.

    ``urls``: a string (braces, ``::``, ``${X}`` for ``WDS_X``, globs, a directory ending in ``/``), a path or a
        list of these.
    ``handler``: what to do with a shard that fails (`handlers`); the default raises.
    ``resampled`` (or ``mode="resampled"``): draw shards with replacement, without end. Nothing is split then,
        since every worker draws for itself; with ``seed`` (or ``WDS_SEED``) the draws follow from seed, rank,
        worker and epoch, without one they differ from run to run.
    ``repeat``: True goes through the shards without end, a number that many times.
    ``shardshuffle``: shuffle the shards, before they are split, through a buffer of that many (True: 100). The
        order follows from seed and epoch alone, so all ranks and workers have the same one and take their shares
        of it; every epoch has its own (`set_epoch`). None, False, 0: the order given.
    ``detshuffle``: accepted for WebDataset's sake; every shard shuffle is deterministic.
    ``seed``: of shard shuffling; default ``WDS_SEED``, else 0. The first epoch is ``WDS_EPOCH``, else 0.
    ``nodesplitter``, ``workersplitter``: iterator to iterator; None for none. By default `split_by_node` and
        `split_by_worker`; `single_node_only` raises where there are several ranks.
    ``select_files``, ``rename_files``: predicate and renamer of members' names (renamed first).
    ``empty_check``: a worker that yields nothing raises ConfigError.
    ``verbose``: log what the dataset is made of.
    ``transfer``: fields of `config.TransferConfig` over the environment, as in ``{"budget_bytes": 64 << 20}``.
    ``progress``: show a bar and a line for every epoch on standard error; None does what ``WDS_PROGRESS`` says.
    ``cache_dir``, ``cache_size``, ``url_to_name``: there is no disk cache yet; a directory raises ConfigError.

    Raises UrlError for URLs that cannot be understood and ConfigError for arguments out of range. A context
    manager; `close` closes what is open. Nothing is opened before it is iterated.
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool | int = False,
        shardshuffle: bool | int | None = None,
        cache_size: float = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Callable[[str], str] | None = None,
        detshuffle: bool = False,
        nodesplitter: Callable[..., Any] | None = shardlists.split_by_node,
        workersplitter: Callable[..., Any] | bool | None = shardlists.split_by_worker,
        select_files: Callable[[str], Any] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
        progress: bool | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if mode not in (None, "resampled"):
            raise ConfigError(f"mode={mode!r}: only 'resampled' is known")
        if cache_dir is not None and cache_size != 0:
            raise ConfigError(f"cache_dir={os.fspath(cache_dir)!r}: there is no shard cache yet; leave cache_dir out")
        resampled = resampled or mode == "resampled"
        environment = config.settings()
        seed = environment.seed if seed is None else seed
        self.seed = 0 if seed is None else seed
        _refuse_specifications(urls)
        if resampled:
            if shardshuffle:
                warnings.warn("shardshuffle changes nothing where shards are resampled", stacklevel=2)
            self.append(shardlists.ResampledShards(urls, seed=self.seed, deterministic=seed is not None))
            # Each worker draws for itself, and a share of an endless draw is just another one.
            nodesplitter = None if nodesplitter is shardlists.split_by_node else nodesplitter
            workersplitter = None if workersplitter is shardlists.split_by_worker else workersplitter
        else:
            self.append(shardlists.SimpleShardList(urls))
            buffer = _TRUE_SHUFFLE if shardshuffle is True else int(shardshuffle or 0)
            if buffer > 0:
                epoch = environment.epoch or 0
                self.append(filters.detshuffle(buffer, seed=self.seed, epoch=epoch - 1))
        config.configure_logging()
        config.warn_of_unknown_variables()  # here: what ${X} read is known by now, and workers need not repeat it
        tell_of_native_pipes(itertools.islice(self.pipeline[0].urls, 1000))
        self.pipeline += [splitter for splitter in (nodesplitter, workersplitter) if splitter]
        reading = tarfile_to_samples(handler, select_files, rename_files, transfer)
        self.pipeline += [reading, check_empty] if empty_check else [reading]
        if environment.progress if progress is None else progress:
            from wds_async.progress import Watch  # noqa: PLC0415 (rich is not loaded for nothing)

            self.append(Watch(reading.board, True))
        if repeat:
            self.repeat(-1 if repeat is True else repeat)
        if verbose:
            _log.warning("WebDataset of %d shards, seed %s: %s", len(self.pipeline[0].urls), self.seed, self.pipeline)


def _refuse_specifications(urls: Any) -> None:
    """YAML and JSON dataset specifications are not shards; without this they would be opened as tars."""
    name = os.fspath(urls) if isinstance(urls, (str, os.PathLike)) else ""
    if isinstance(urls, dict) or name.endswith((".yaml", ".yml", ".json")):
        raise UrlError(
            f"{name or 'a dict'} is a dataset specification, which this version does not read: give the shards' URLs"
        )


class FluidWrapper(DataPipeline, FluidInterface):
    """Any iterable or callable as the first stage, with the fluent methods."""

    def __init__(self, initial: Any) -> None:
        super().__init__(initial)
