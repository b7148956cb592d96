"""`WebDataset`: the usual pipeline from URLs to samples, with the fluent methods."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from wds_async import config, filters, shardlists, world
from wds_async.errors import ConfigError
from wds_async.fluid import FluidInterface
from wds_async.handlers import Handler, reraise_exception
from wds_async.pipeline import DataPipeline
from wds_async.storage.registry import tell_of_native_pipes
from wds_async.tariterators import tarfile_to_samples

__all__ = ["WebDataset", "check_empty"]

_log = logging.getLogger("wds_async")
_TRUE_SHUFFLE = 100
_DIRECTORY_MODES = ("unlink", "keep", "resample")


def check_empty(source: Iterable[Any], shards: int | None = None) -> Iterator[Any]:
    """Everything; raises ConfigError (a ValueError) where that is nothing. ``shards`` is how many there are in all."""
    samples = iter(source)
    for first in samples:
        yield first
        break
    else:
        here = world.place()
        raise ConfigError(
            f"no sample came out of the dataset in worker {here.worker} of {here.num_workers}, rank {here.rank} of "
            f"{here.world_size}: either it has fewer shards{'' if shards is None else f' ({shards})'} than ranks times "
            f"workers ({here.world_size * here.num_workers}), or every shard was passed over by the handler. Use fewer "
            "workers or more shards, or workersplitter=None and .compose(split_by_worker), which splits samples (and "
            "has each worker read all shards of its rank); empty_check=False lets a worker be empty"
        )
    yield from samples


class WebDataset(DataPipeline, FluidInterface):
    """The samples of the shards ``urls``, as dicts of bytes with ``__key__`` and ``__url__``.

    Stages: shard list, shard shuffle, split by rank, split by worker, reading, check for emptiness.

    ``urls``: a string (braces, ``::``, ``${X}`` for ``WDS_X``, globs, a directory ending in ``/``), a path or a
        list of these; or a dataset specification (`spec`): a ``.yaml`` or ``.json`` file or URL, a dict, or
        ``"package.module:function"``.
    ``handler``: what to do with a shard that fails (`handlers`); the default raises.
    ``mode``: ``"resampled"`` as below; ``"unlink"``, ``"keep"`` or ``"resample"`` for a directory whose shards come
        and go (`directories.DirectoryShardList`).
    ``resampled``: draw shards with replacement, without end. Nothing is split then, since every worker draws for
        itself; with ``seed`` (or ``WDS_SEED``) the draws follow from seed, rank, worker and epoch, without one they
        differ from run to run. About a third of the shards is not seen in as many draws as there are shards.
    ``repeat``: True goes through the shards without end, a number that many times.
    ``shardshuffle``: shuffle the shards, before they are split, through a buffer of that many (True warns and is
        100). The order follows from seed and epoch alone, so all ranks and workers have the same one and take their
        shares of it; every epoch has its own (`set_epoch`). False, 0: the order given; None too, with a warning.
    ``detshuffle``: accepted for WebDataset's sake; every shard shuffle is deterministic.
    ``seed``: of shard shuffling; default ``WDS_SEED``, else 0. The first epoch is ``WDS_EPOCH``, else 0.
    ``nodesplitter``, ``workersplitter``: iterator to iterator; None for none. By default `split_by_node` and
        `split_by_worker`; `single_node_only` raises where there are several ranks.
    ``cache_dir``: a folder where shards are kept when they are first read; default ``WDS_CACHE``, else no cache.
        ``cache_size`` bounds its bytes (-1: what ``WDS_CACHE_SIZE`` says, else no bound; 0: no cache),
        ``url_to_name`` names the files in it, ``cache_local`` keeps local shards too (for network drives).
    ``select_files``, ``rename_files``: predicate and renamer of members' names (renamed first).
    ``keys``: how a member's name is split into key and field; `tariterators.base_plus_ext` unless given.
    ``empty_check``: a worker that yields nothing raises ConfigError.
    ``verbose``: log what the dataset is made of, and what the cache does.
    ``length``: what ``len`` gives, as by `with_length`.
    ``transfer``: fields of `config.TransferConfig` over the environment, as in ``{"budget_bytes": 64 << 20}``.
    ``progress``: show a bar and a line for every epoch on standard error; None does what ``WDS_PROGRESS`` says.

    Raises UrlError for URLs that cannot be understood, and ConfigError for arguments out of range and where there
    are fewer shards than ranks. A context manager; `close` closes what is open. Nothing is opened before it is
    iterated.
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
        *,
        keys: Callable[[str], Any] | None = None,
        cache_local: bool = False,
        length: int | None = None,
        progress: bool | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        environment = config.settings()
        self._seeded = seed is not None or environment.seed is not None
        self.seed = (environment.seed or 0) if seed is None else seed
        splitters = nodesplitter, workersplitter
        self._add_shards(urls, mode, resampled, shardshuffle, splitters, empty_check, environment.epoch or 0)
        config.configure_logging()
        config.warn_of_unknown_variables()  # here: what ${X} read is known by now, and workers need not repeat it
        reading = tarfile_to_samples(handler, select_files, rename_files, transfer)
        self.append(reading)
        if empty_check:
            self.append(functools.partial(check_empty, shards=_how_many(self.pipeline[0])))
        if environment.progress if progress is None else progress:
            from wds_async.progress import Watch  # noqa: PLC0415 (rich is not loaded for nothing)

            self.append(Watch(reading.board, True))
        if repeat:
            self.repeat(-1 if repeat is True else repeat)
        if length is not None:
            self.with_length(length)
        if verbose:
            _log.warning("WebDataset of %s shards, seed %s: %s", _how_many(self.pipeline[0]), self.seed, self.pipeline)

    def _add_shards(
        self,
        urls: Any,
        mode: str | None,
        resampled: bool,
        shardshuffle: bool | int | None,
        splitters: tuple[Any, Any],
        empty_check: bool,
        epoch: int,
    ) -> None:
        """The stages before reading: which shards, in which order, for whom."""
        nodesplitter, workersplitter = splitters
        if mode in _DIRECTORY_MODES:
            self.append(_directory(urls, mode))
        elif resampled or mode == "resampled":
            if shardshuffle:
                warnings.warn("shardshuffle changes nothing where shards are resampled", stacklevel=3)
            self.append(shardlists.ResampledShards(urls, seed=self.seed, deterministic=self._seeded))
            # Each worker draws for itself, and a share of an endless draw is just another one.
            nodesplitter = None if nodesplitter is shardlists.split_by_node else nodesplitter
            workersplitter = None if workersplitter is shardlists.split_by_worker else workersplitter
        elif mode is not None:
            raise ConfigError(f"mode={mode!r}: known are 'resampled' and, for directories, {_DIRECTORY_MODES}")
        else:
            self.append(shardlists.SimpleShardList(urls))
            if (buffer := _shuffle_buffer(shardshuffle)) > 0:
                self.append(filters.detshuffle(buffer, seed=self.seed, epoch=epoch - 1))
            if empty_check and nodesplitter is shardlists.split_by_node:
                _refuse_empty_ranks(len(self.pipeline[0].urls))
        if isinstance(shards := self.pipeline[0], shardlists.SimpleShardList | shardlists.ResampledShards):
            tell_of_native_pipes(itertools.islice(shards.urls, 1000))
        self.pipeline += [splitter for splitter in (nodesplitter, workersplitter) if splitter]


def _shuffle_buffer(shardshuffle: bool | int | None) -> int:
    if shardshuffle is None:
        warnings.warn(
            "shardshuffle is not given: shards are read in the order of the list. Say shardshuffle=False if that is "
            "meant, or a number of shards to shuffle through (for training, all of them)",
            stacklevel=4,
        )
    if shardshuffle is True:
        warnings.warn(f"shardshuffle=True shuffles through {_TRUE_SHUFFLE} shards; give a number", stacklevel=4)
        return _TRUE_SHUFFLE
    return int(shardshuffle or 0)


def _how_many(shards: Any) -> int | None:
    try:
        return len(shards.urls)
    except (AttributeError, TypeError):
        return None


def _refuse_empty_ranks(shards: int) -> None:
    """Said before training begins: a rank without shards would fail, or leave the others waiting for it."""
    ranks = world.place().world_size
    if shards < ranks:
        raise ConfigError(
            f"{shards} shards for {ranks} ranks: some would be empty. Make more shards, start fewer ranks, or pass "
            "nodesplitter=None and .compose(split_by_node), which splits samples (and has each rank read all shards)"
        )


def _directory(urls: Any, mode: str | None) -> Any:
    from wds_async.directories import DirectoryShardList  # noqa: PLC0415 (few watch a directory)

    if not isinstance(urls, (str, os.PathLike)):
        raise ConfigError(f"mode={mode!r} watches one directory; urls is {urls!r:.80}")
    return DirectoryShardList(os.fspath(urls), mode=mode)
