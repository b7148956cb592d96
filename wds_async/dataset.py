"""`WebDataset`: the usual pipeline from URLs to samples, with the fluent methods."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from wds_async import config, lengths, shardlists, spec, world
from wds_async.environment import warn_of_unknown_variables
from wds_async.errors import ConfigError
from wds_async.fluid import FluidInterface
from wds_async.handlers import Handler, reraise_exception
from wds_async.mixture import Mixture
from wds_async.pipeline import DataPipeline
from wds_async.shardcache.cache import DiskCache, shard_cache
from wds_async.shardplan import ShardPlan, shuffle_buffer
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tariterators import MAX_FIELD_BYTES, ReadingStage, base_plus_ext, tarfile_to_samples
from wds_async.transfer.stats import Boards

__all__ = ["WebDataset", "check_empty"]

logger = logging.getLogger("wds_async")


def check_empty(source: Iterable[Any], shards: int | None = None) -> Iterator[Any]:
    """Everything; raises ConfigError (a ValueError) where that is nothing. ``shards`` is how many there are in all."""
    return shardlists.non_empty(source, functools.partial(_why_empty, shards))


def _why_empty(shards: int | None) -> str:
    here = world.place()
    return (
        f"no sample came out of the dataset in worker {here.worker} of {here.num_workers}, rank {here.rank} of "
        f"{here.world_size}: either it has fewer shards{'' if shards is None else f' ({shards})'} than ranks times "
        f"workers ({here.world_size * here.num_workers}), or every shard was passed over by the handler. Use fewer "
        "workers or more shards, or workersplitter=None and .compose(split_by_worker), which splits samples (and "
        "has each worker read all shards of its rank); empty_check=False lets a worker be empty"
    )


check_empty.keeps_length = True  # type: ignore[attr-defined]


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
    ``storage_options``: options of the stores' clients, by scheme (``{"s3": {"anon": True}}``) or those of all, as
        fsspec's filesystems name them. Their values are shown nowhere.
    ``check``: look at the first and last shard of each source (``"ends"``) or at ``"all"`` of them now, by one small
        request each; what is missing, refused or no shard is one error. None: find out when they are read.
    ``verify``: whose checksums are compared: ``"auto"`` (CRC-32C where an answer brings it, which costs no request),
        ``"always"`` (whatever the store gives; a shard's samples come once it was found good) or ``"never"``; default
        ``WDS_VERIFY``, else ``"auto"``. The same as ``transfer={"verify": …}``.
    ``on_corrupt``: what follows damage inside a tar: ``"raise"`` it to the handler; ``"skip_shard"``, whatever the
        handler: the rest of the shard is passed over; ``"resync"``: the same shard is read on at its next valid header,
        without the sample on each side of the gap (a damaged compressed stream has none: its rest is passed over).
        Default ``WDS_ON_CORRUPT``, else ``"raise"``. A shard that is no tar at all goes to the handler.
    ``max_bad_fraction``: the share of the samples (of the bytes, where they cannot be counted) that a process may pass
        over before TooMuchLost ends the run, which no handler is asked about; judged after 10,000 samples or 1 GiB.
        Default ``WDS_MAX_BAD_FRACTION``, else None: no more than a warning at 1 %. See `ledger`.
    ``max_field_bytes``: a larger member of a shard (default 2 GiB) is FieldTooLarge before a byte of it is kept. A
        field is held whole, on top of the byte budget.
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
        storage_options: Mapping[str, Any] | None = None,
        check: str | None = None,
        verify: str | None = None,
        on_corrupt: str | None = None,
        max_bad_fraction: float | None = None,
        max_field_bytes: int = MAX_FIELD_BYTES,
    ) -> None:
        super().__init__()
        environment = config.settings()
        config.configure_logging()
        self.seed = (environment.seed or 0) if seed is None else seed
        resampled = resampled or mode == "resampled"
        options = StorageOptions(storage_options)
        plan = ShardPlan(
            mode=mode,
            resampled=resampled,
            buffer=shuffle_buffer(shardshuffle, resampled, stacklevel=3),
            seed=self.seed,
            seeded=seed is not None or environment.seed is not None,
            strict=empty_check,
            nodesplitter=nodesplitter,
            workersplitter=workersplitter,
            storage_options=options,
        )
        cache = shard_cache(cache_dir, cache_size, url_to_name=url_to_name, verbose=verbose, local=cache_local)
        faults: dict[str, Any] = {"verify": verify, "on_corrupt": on_corrupt, "max_bad_fraction": max_bad_fraction}
        faults["max_field_bytes"] = max_field_bytes
        parsing = {"keys": keys or base_plus_ext, "cache": cache, "storage_options": options, **faults}
        reading = functools.partial(tarfile_to_samples, handler, select_files, rename_files, transfer, **parsing)
        self._add_source(urls, plan, reading, cache)
        self._check(check, options, cache, transfer or {})
        warn_of_unknown_variables()  # here: what ${X} read is known by now, and workers need not repeat it
        self._add_stages(empty_check, environment.progress if progress is None else progress, repeat, length)
        if verbose:
            self._describe()

    def _describe(self) -> None:
        shards = _how_many(self.pipeline[0])
        logger.warning("WebDataset of %s shards, seed %s: %s", shards, self.seed, self.pipeline)

    def _add_stages(self, empty_check: bool, progress: bool, repeat: bool | int, length: int | None) -> None:
        if empty_check:
            self.append(functools.partial(check_empty, shards=_how_many(self.pipeline[0])))
        if progress:
            self._add_progress()
        if repeat:
            self.repeat(-1 if repeat is True else repeat)
        if length is not None:
            self.with_length(length, silent=True)

    def _check(
        self, which: str | None, options: StorageOptions, cache: DiskCache | None, transfer: Mapping[str, Any]
    ) -> None:
        if which is None:
            return
        from wds_async.shardcheck import check_shards, lists_of  # noqa: PLC0415 (its loop is not loaded for nothing)

        setting = config.transfer_config(**transfer)
        check_shards(lists_of(self.pipeline[0]), which, options, config=setting, cache=cache)

    def _add_source(self, urls: Any, plan: ShardPlan, reading: Callable[..., Any], cache: DiskCache | None) -> None:
        """What gives raw samples: shards and their reading, a mix of several such, or what a function returns."""
        if spec.is_function(urls):
            if plan.mode is not None or plan.resampled or plan.buffer:
                raise ConfigError(f"{urls} returns a pipeline, which orders its shards itself: it cannot be done here")
            self.append(spec.call(urls))
        elif spec.is_specification(urls):
            if plan.mode not in (None, "resampled"):
                raise ConfigError(f"mode={plan.mode!r} is for a directory, and {urls!r:.80} is a specification")
            described = spec.load(urls, plan.storage_options)
            make = functools.partial(_source, plan=dataclasses.replace(plan, strict=False), reading=reading)
            self.append(Mixture(described, make, resampled=plan.resampled, seed=self.seed))
        else:
            self.pipeline += [*plan.stages(urls), reading()]
        if cache is not None:
            cache.expect(getattr(self.pipeline[0], "urls", ()))

    def _add_progress(self) -> None:
        from wds_async.progress import Watch  # noqa: PLC0415 (rich is not loaded for nothing)

        first = self.pipeline[0]
        stages = (
            [stage for source in first.datasets for stage in source.pipeline]
            if isinstance(first, Mixture)
            else self.pipeline
        )
        boards = [stage.board for stage in stages if isinstance(stage, ReadingStage)]
        if boards:  # what a user's own function returned may read no shards
            self.append(Watch(boards[0] if len(boards) == 1 else Boards(boards), True))

    def __len__(self) -> int:
        """What was given to `with_length` or as ``length``, else what this rank receives, where an index (a JSON
        shard list) tells the samples of each shard. TypeError otherwise."""
        if self.size is None and self.repetitions == 1 and (known := lengths.of(self.pipeline)) is not None:
            return known.total
        return super().__len__()


def _source(
    shards: Any, plan: ShardPlan, reading: Callable[..., Any], storage_options: StorageOptions = NOTHING_GIVEN
) -> DataPipeline:
    """The pipeline of one source of a specification, whose options go over the dataset's."""
    own = {"storage_options": storage_options} if storage_options else {}
    return DataPipeline(plan.stages(shards), reading(**own))


def _how_many(shards: Any) -> int | None:
    try:
        return len(shards.urls)
    except (AttributeError, TypeError):
        return None
