"""`WebDataset`: the usual pipeline from URLs to samples, with the fluent methods."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from wds_async import ahead, config, lengths, world
from wds_async.arguments import check_size
from wds_async.checkpoint.states import Counted
from wds_async.environment import warn_of_unknown_variables
from wds_async.equalsteps import chosen_steps, in_step
from wds_async.errors import ConfigError
from wds_async.fluid import FluidInterface
from wds_async.handlers import Handler, reraise_exception
from wds_async.misuse import log_unmatched_rules, warn_of_batches_in_torch, warn_of_uneven_ranks
from wds_async.pipeline import DataPipeline, epochs_of
from wds_async.reading.options import MAX_FIELD_BYTES
from wds_async.reading.stage import ReadingStage, tarfile_to_samples
from wds_async.redact import redact
from wds_async.shardlists import lists, spec
from wds_async.shardlists.canonical import check_canonical, samples_counted
from wds_async.shardlists.mixture import Mixture
from wds_async.shardlists.plan import ShardPlan, announce_epoch, log_seed, shuffle_buffer, shuffle_seed
from wds_async.stages import Traits
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.group import base_plus_ext
from wds_async.tracebacks import Shortened

if TYPE_CHECKING:
    from wds_async.observe.ledger import Ledger, Ledgers
    from wds_async.shardcache.cache import DiskCache

__all__ = ["WebDataset", "check_empty"]

logger = logging.getLogger("wds_async")


def check_empty(
    source: Iterable[Any],
    shards: int | None = None,
    ledger: Ledger | Ledgers | None = None,
    cut: bool = False,
    *,
    state: Counted | None = None,
) -> Iterator[Any]:
    """Yield everything; raise ConfigError (a ValueError) where that is nothing. ``shards`` is how many there are in
    all; ``ledger`` tells which were empty or passed over; ``cut`` says that shards are cut (``split="bytes"``)."""
    return lists.non_empty(source, functools.partial(_why_empty, shards, ledger, cut), state)


def _why_empty(shards: int | None, ledger: Ledger | Ledgers | None, cut: bool) -> str:
    here = world.place()
    head = (
        f"no sample came out of the dataset in worker {here.worker} of {here.num_workers}, rank {here.rank} of "
        f"{here.world_size}"
    )
    if ledger is not None and (why := ledger.why_barren()):
        return f"{head}: {why}. Write these shards again or leave them out; empty_check=False lets a worker be empty"
    if cut:
        return (
            f"{head}: there are fewer samples than ranks times workers ({here.world_size * here.num_workers}), or some"
            " take the bytes of several workers, or the stages let no sample pass. Use fewer workers; empty_check=False"
            " lets a worker be empty"
        )
    return (
        f"{head}: either it has fewer shards{'' if shards is None else f' ({shards})'} than ranks times "
        f"workers ({here.world_size * here.num_workers}), or its stages let no sample pass. Use fewer "
        'workers, more shards, or split="bytes", by which workers share a shard. Where shards cannot be cut, '
        "workersplitter=None and .compose(split_by_worker) split samples (each worker then reads all shards of its "
        "rank). empty_check=False lets a worker be empty"
    )


class _CameState(Counted):
    """State of `check_empty`. What is left of an epoch may leave workers without a sample, which is no error."""

    @classmethod
    def shared(cls, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"count": 1}


check_empty.traits = Traits(one_to_one=True, same_items=True, state=_CameState)  # type: ignore[attr-defined]


class WebDataset(DataPipeline, FluidInterface):
    """The samples of the shards ``urls``, as dicts of bytes by field name, with ``__key__`` and ``__url__``.

    Stages: shard list, shard shuffle, split by rank, split by worker, reading, check for emptiness. Nothing is opened
    before the first sample is requested.

    Shards and their order:

    ``urls``: a string (braces, ``::``, ``${X}`` for ``WDS_X``, wildcards, a folder ending in ``/``), a path, or a list
        of these; an iterable of ``{"url": …}``, a shard list of the program's own; or a dataset specification: a
        ``.yaml`` or ``.json`` file or URL, a dict, the folder of a job (``…/_wds/JOB``: the shards that it has
        finished), or ``"package.module:function"``.
    ``shardshuffle``: the order of the shards. ``"epoch"`` permutes all of them, anew in each epoch. A number shuffles
        through a buffer of that many, so shards that are far apart in the list stay far apart (True means 100, with a
        warning). The order depends only on seed and epoch, so all ranks and workers compute the same one. False or 0
        (or None, with a warning) keeps the order of the list.
    ``seed``: seed of the shard shuffle (default ``WDS_SEED``). Without either, a single rank draws a seed from
        ``random`` and logs it (level info); several ranks use 0, with a warning. Epochs count from ``WDS_EPOCH``, or 0.
    ``interleave``: number of shards that are open at once in each worker. Each sample is the next one of an open shard
        that is drawn, so that a small shuffle buffer mixes well. The draws depend on seed, epoch, rank and worker. The
        open shards share the byte budget; ConfigError if it is too small (256 KiB for each). Default None: one shard
        after another. Not with the ``mode`` of a folder. With ``canonical``, each global batch takes equal runs from so
        many places of the epoch, the same for all ranks.
    ``ordered``: False draws only among open shards whose bytes have arrived, so that none delays the others. The order
        then differs in each run; every sample still comes once, and a state resumes exactly.
    ``resampled``: draw shards with replacement, endlessly. The shards are then not split, because every worker draws
        its own. With a seed, the draws depend on seed, rank, worker and epoch; without one, they differ in each run.
    ``repeat``: True repeats the shards endlessly, a number that many times (default: once per epoch).
    ``mode``: ``"resampled"`` means ``resampled=True``. For a folder whose shards come and go
        (`DirectoryShardList`): ``"unlink"``, ``"keep"`` or ``"resample"``.
    ``detshuffle``: accepted for compatibility; every shard shuffle is deterministic.

    Sharing among ranks and workers:

    ``nodesplitter``, ``workersplitter``: functions from iterator to iterator, or None to split nothing. The defaults
        are `split_by_node` and `split_by_worker`. `single_node_only` raises if there are several ranks.
    ``split``: ``"bytes"`` cuts the shards of an epoch into equal byte spans, one for each worker, so there may be fewer
        shards than workers. Every sample is in exactly one span. The sizes of all shards are looked up at once, by one
        small request each. ShardCutError if a shard cannot be cut by its bytes (a tar within a tar); compressed shards
        are read whole. None (the default) splits whole shards, by the two splitters.
    ``index``: cut between samples, which works for any plain tar. It takes the indexes that
        ``wds-async index --kind wds`` writes, or those of Energon or DALI: a path or URL names their folder; True looks
        in the cache folder, then beside the shards. With an index, ``equal`` without ``steps`` gives every worker the
        same number of samples; at most one sample per worker is left out or repeated.
    ``canonical``: number of samples in a global batch, over all ranks. The sequence of global batches is then the same
        for any number of workers, and of ranks that divides ``canonical``. The shards of an epoch are laid end to end;
        each rank takes an equal run of every ``canonical`` samples, with ``.batched(canonical // world_size)`` and a
        loader with ``batch_size=None``. Needs ``index``. Samples after the last whole batch are left out, with a
        warning, unless ``equal`` is "pad" or "repeat". A merged state resumes with the next global batch, on any number
        of ranks. Stages that drop or reorder samples (`shuffle`) make the sequence depend on the ranks again. The seed
        is 0 unless given.
    ``equal``: give every rank the same number of items per epoch (batches, if the pipeline makes batches). ``"drop"``
        ends all ranks with the first that runs out, ``"pad"`` repeats the last item of ranks that run out, ``"repeat"``
        starts their share again. Without ``steps``, the ranks compare by torch.distributed what they have ready, every
        eight items; with DataLoader workers, this needs `WebLoader`.
    ``steps``: number of items for each rank, shared by its workers. Nothing is compared then. ``equal`` defaults to
        ``"repeat"``; with "drop", a worker that runs out raises ConfigError.
    ``empty_check``: raise ConfigError in a worker that yields no sample, and if there are fewer shards than ranks
        (default True).

    Caching:

    ``cache_dir``: folder in which shards are stored when they are first read (default ``WDS_CACHE``, else no cache).
    ``cache_size``: maximum bytes of the cache. -1 (the default): ``WDS_CACHE_SIZE``, else no limit; 0: no cache.
    ``url_to_name``: function from a URL to the name of its file in the cache.
    ``cache_local``: cache local shards too, for network drives (default False).
    ``cache_check``: check once per epoch whether a cached shard has changed in its store, and download it again if so
        (default ``WDS_CACHE_CHECK``, else False: a copy is used for ever).

    Reading:

    ``select_files``, ``rename_files``: predicate and renaming function for members' names; renaming comes first.
    ``keys``: function that splits a member's name into key and field (default `tariterators.base_plus_ext`: at the
        first dot of the last component).
    ``expect``: fields that every sample must have, such as ``("jpg;png", "txt")``, where jpg or png is enough. A sample
        that lacks one, for example because a shard was cut, raises MissingField for the handler (default: no check).
    ``max_field_bytes``: a larger member raises FieldTooLarge before it is read (default 2 GiB). A field is held in
        memory as a whole, on top of the byte budget.
    ``transfer``: fields of `config.TransferConfig`, which override the environment: ``{"budget_bytes": 64 << 20}``.
    ``storage_options``: options of the stores' clients, by scheme (``{"s3": {"anon": True}}``) or for all, named as in
        fsspec's filesystems. Their values are never shown.

    Faults:

    ``handler``: function called with the error of a shard or sample that fails (see `handlers`). The default raises it.
    ``check``: look at the first and last shard of each source (``"ends"``) or at every shard (``"all"``) at once, by
        one small request each. One error lists all that are missing, forbidden or no shards. None (the default) finds
        out when they are read.
    ``verify``: which checksums to compare. ``"auto"``: CRC-32C if the list of shards states it (as that of a job
        does) or a response contains it, without extra requests.
        ``"always"``: any that the store has; a shard's samples come only after it was verified. ``"never"``: none.
        Default ``WDS_VERIFY``, else ``"auto"``. The same as ``transfer={"verify": …}``.
    ``on_corrupt``: what to do after damage inside a tar. ``"raise"``: pass the error to the handler. ``"skip_shard"``:
        skip the rest of the shard, whatever the handler. ``"resync"``: continue at the next valid header, without the
        samples on both sides of the gap (the rest of a damaged compressed stream is skipped). Default
        ``WDS_ON_CORRUPT``, else ``"raise"``. A shard that is no tar at all always goes to the handler.
    ``max_bad_fraction``: share of the samples (or of the bytes, if samples cannot be counted) that a process may skip
        before TooMuchLost ends the run, which no handler can prevent. Checked after 10,000 samples or 1 GiB. Default
        ``WDS_MAX_BAD_FRACTION``, else None: only a warning at 1 %. See `ledger`.

    Display:

    ``length``: the number that ``len`` returns, as set by `with_length`.
    ``progress``: show a progress bar on standard error and a line for every epoch, under this name (True: a name made
        from the shards'). Default ``WDS_PROGRESS``.
    ``verbose``: log what the dataset is made of, and what the cache does.

    Raises UrlError for URLs that cannot be understood, and ConfigError for arguments out of range. It is a context
    manager; `close` closes all that is open.
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool | int = False,
        shardshuffle: bool | int | str | None = None,
        cache_size: float = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Callable[[str], str] | None = None,
        detshuffle: bool = False,
        nodesplitter: Callable[..., Any] | None = lists.split_by_node,
        workersplitter: Callable[..., Any] | bool | None = lists.split_by_worker,
        select_files: Callable[[str], Any] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
        *,
        split: str | None = None,
        index: str | os.PathLike[str] | bool | None = None,
        canonical: int | None = None,
        equal: str | None = None,
        steps: int | None = None,
        keys: Callable[[str], Any] | None = None,
        cache_local: bool = False,
        cache_check: bool | None = None,
        length: int | None = None,
        progress: bool | str | None = None,
        transfer: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        check: str | None = None,
        verify: str | None = None,
        on_corrupt: str | None = None,
        max_bad_fraction: float | None = None,
        max_field_bytes: int = MAX_FIELD_BYTES,
        expect: Collection[str] | None = None,
        interleave: int | None = None,
        ordered: bool = True,
    ) -> None:
        super().__init__()
        self.equal_steps, self._steps_by_loader = None if index and steps is None else chosen_steps(equal, steps), False
        environment, options = config.settings(), StorageOptions(storage_options)
        config.configure_logging()
        chosen, resampled = _seed(seed, nodesplitter, canonical), resampled or mode == "resampled"
        self.seed, self.canonical = world.seed_number(chosen), canonical
        order: Any = _order(shardshuffle, mode, resampled, chosen, seed is not None or environment.seed is not None)
        sharing: Any = {"nodesplitter": nodesplitter, "workersplitter": workersplitter, "strict": empty_check}
        cuts = _cuts(split, index, equal, steps, options, canonical, keys, interleave)
        plan = ShardPlan(**order, **sharing, **cuts, storage_options=options, transfer=transfer or {})
        cache = _shard_cache(cache_dir, cache_size, url_to_name, verbose, cache_local, cache_check)
        faults = {"verify": verify, "on_corrupt": on_corrupt, "max_bad_fraction": max_bad_fraction, "expect": expect}
        parsing: Any = {"keys": keys or base_plus_ext, "max_field_bytes": max_field_bytes, "storage_options": options}
        parsing |= _interleaving(interleave, ordered, chosen, mode, urls, canonical)
        reading = functools.partial(tarfile_to_samples, handler, select_files, rename_files, transfer, **parsing)
        with Shortened():
            self._add_source(urls, plan, functools.partial(reading, cache=cache, **faults), cache)
            self._check(check, options, cache, transfer or {})
        self._add_stages(empty_check, split is not None, progress, repeat, steps if length is None else length, verbose)

    def _add_stages(
        self,
        empty_check: bool,
        cut: bool,
        progress: bool | str | None,
        repeat: bool | int,
        length: int | None,
        verbose: bool,
    ) -> None:
        progress = config.settings().progress if progress is None else progress
        if empty_check and self.canonical is None:  # there, a worker may have no batch of what is left of an epoch
            urls = getattr(self.pipeline[0], "urls", None)
            shards = len(urls) if isinstance(urls, Sized) else None
            self.append(functools.partial(check_empty, shards=shards, ledger=self.ledger, cut=cut))
        if progress:
            self._add_progress(progress if isinstance(progress, str) else None, length)
        times = -1 if repeat is True else check_size("WebDataset", "repeat", 0 if repeat is None else repeat)
        if times:
            self.repeat(times)
        if length is not None:
            self.with_length(length, silent=True)
        if verbose:
            logger.warning("%r, seed %s", self, self.seed)

    def _run_once(self, iteration: Any) -> Iterator[Any]:
        """Run the stages once; with ``equal`` to as many items as other ranks get."""
        start, equal = functools.partial(self._begun, iteration), self.equal_steps
        by_loader = self._steps_by_loader and (world.torch_worker() is not None or ahead.is_ahead())
        if equal is None or (equal.steps is None and by_loader):
            return start()
        if equal.steps is None and world.torch_worker() is not None and world.place().world_size > 1:
            raise ConfigError(
                "equal= without steps= lets the ranks compare what they have, which workers of a DataLoader cannot:"
                " use WebLoader in place of DataLoader, or give steps="
            )
        return in_step(start, equal, self._rewind, iteration)

    def _begun(self, iteration: Any) -> Iterator[Any]:
        items = super()._run_once(iteration)
        announce_epoch(self.pipeline)  # the stages have counted it now
        return items

    def _rewind(self) -> None:
        """Make the next run that of the same epoch, in this worker."""
        for counter in epochs_of(self.pipeline):
            back = counter.set if world.torch_worker() is None else counter.go_to
            back(counter.get() - 1)

    def leave_steps_to_loader(self) -> None:
        """Have the loader that is made of this dataset compare the ranks, since its workers cannot."""
        self._steps_by_loader = True

    def _check_use(self) -> None:
        log_unmatched_rules(self)
        warn_of_uneven_ranks(self)
        warn_of_batches_in_torch(self, depth=2)
        if self.canonical is not None:
            from wds_async.checkpoint.globalbatches import check_batches  # noqa: PLC0415 (only where they are used)

            if self.repetitions != 1:
                raise ConfigError(
                    "canonical= goes with no repeat and no with_epoch of the dataset, where each worker counts for "
                    "itself: count epochs on the loader, loader.with_epoch(…)"
                )
            check_batches(self)

    def _check(
        self, which: str | None, options: StorageOptions, cache: DiskCache | None, transfer: Mapping[str, Any]
    ) -> None:
        warn_of_unknown_variables()  # here: what ${X} read is known by now, and workers need not repeat it
        if which is None:
            return
        from wds_async.shardlists.check import check_shards, lists_of  # noqa: PLC0415 (its loop is not loaded for nothing)

        setting = config.transfer_config(**transfer)
        check_shards(lists_of(self.pipeline[0]), which, options, config=setting, cache=cache)

    def _add_source(self, urls: Any, plan: ShardPlan, reading: Callable[..., Any], cache: DiskCache | None) -> None:
        """Add the stages of raw samples: shards and their reading, a mix of several such, or a function's pipeline."""
        if spec.is_function(urls):
            if plan.mode is not None or plan.resampled or plan.shuffles or plan.canonical:
                raise ConfigError(f"{urls} returns a pipeline, which orders its shards itself: it cannot be done here")
            self.append(spec.call(urls))
        elif spec.is_specification(urls):
            if plan.canonical:
                raise ConfigError(
                    f"canonical={plan.canonical} is for one list of shards, and {urls!r:.80} mixes several"
                )
            if plan.mode not in (None, "resampled"):
                raise ConfigError(f"mode={plan.mode!r} is for a directory, and {urls!r:.80} is a specification")
            described = spec.load(urls, plan.storage_options)
            make = functools.partial(_source, plan=dataclasses.replace(plan, strict=False), reading=reading)
            self.append(Mixture(described, make, resampled=plan.resampled, seed=plan.seed))
        else:
            self.pipeline += [*plan.stages(urls), reading()]
            if plan.canonical:
                self.append(samples_counted)
        if plan.shuffles:
            log_seed(plan.seed, "shuffled")
        elif isinstance(first := self.pipeline[0], Mixture) and first.draws and not plan.resampled:
            log_seed(plan.seed, "mixed")
        if cache is not None:
            cache.expect(getattr(self.pipeline[0], "urls", ()))

    def _add_progress(self, name: str | None, length: int | None) -> None:
        from wds_async.observe.progress import Label, Watch  # noqa: PLC0415 (rich is not loaded for nothing)
        from wds_async.transfer.stats import Boards  # noqa: PLC0415 (the engine)

        first = self.pipeline[0]
        pipelines = [source.pipeline for source in first.datasets] if isinstance(first, Mixture) else [self.pipeline]
        reading = [stage for stages in pipelines for stage in stages if isinstance(stage, ReadingStage)]
        if reading:  # what a user's own function returned may read no shards
            boards = [stage.board for stage in reading]
            total = functools.partial(_samples, tuple(self.pipeline), length)
            epochs = tuple(stage.ledger.epoch for stage in reading)
            label = Label(name or _name_of(first), epochs, total)
            self.append(Watch(boards[0] if len(boards) == 1 else Boards(boards), True, label))

    def __len__(self) -> int:
        """Return the number given to `with_length` or as ``length``, else the number of samples that this rank
        receives, if an index (a JSON shard list) gives the samples of each shard. TypeError otherwise.
        """
        known = self.size is None and self.repetitions == 1 and self.equal_steps is None
        if known and (length := lengths.of(self.pipeline)) is not None:
            return length.total
        return super().__len__()


def _interleaving(
    interleave: int | None, ordered: bool, seed: Any, mode: str | None, urls: Any, canonical: int | None
) -> dict[str, Any]:
    """Return the arguments of reading for ``interleave`` and ``ordered``. Raise ConfigError where they do not fit."""
    if interleave is None and ordered is True:
        return {}
    if mode not in (None, "resampled"):
        raise ConfigError(
            f"interleave={interleave!r} opens several shards at once, and mode={mode!r} gives one after another, whose "
            "file is renamed or removed when the next one is taken: leave one of them out"
        )
    if canonical is not None:  # its split takes samples from as many places, in an order that is the same for all
        if ordered is not True:
            raise ConfigError("ordered=False lets the order differ from run to run, and canonical= keeps it the same")
        return {}
    if spec.is_function(urls):
        raise ConfigError(f"{urls} returns a pipeline, which reads its shards itself: give interleave= there")
    return {"interleave": interleave, "ordered": ordered, "seed": seed}


def _shard_cache(
    folder: Any, size: float, url_to_name: Any, verbose: bool, local: bool, check: bool | None
) -> DiskCache | None:
    from wds_async.shardcache.cache import shard_cache  # noqa: PLC0415 (the engine)

    return shard_cache(folder, size, url_to_name=url_to_name, verbose=verbose, local=local, check=check)


def _seed(seed: int | None, nodesplitter: Any, canonical: int | None) -> int | world.DrawnSeed:
    """Return the seed of shard shuffling. For ``canonical`` none is drawn: it would be another one for one rank than
    for several."""
    if canonical is not None and seed is None:
        seed = config.settings().seed or 0
    return shuffle_seed(seed, nodesplitter)


def _order(shardshuffle: Any, mode: str | None, resampled: bool, seed: Any, seeded: bool) -> dict[str, Any]:
    """Return how `ShardPlan` orders shards."""
    buffer = shuffle_buffer(shardshuffle, resampled, stacklevel=4)
    permuted = isinstance(shardshuffle, str) and not resampled
    order = {"mode": mode, "resampled": resampled, "buffer": buffer, "permuted": permuted}
    return {**order, "seed": seed, "seeded": seeded}


def _cuts(
    split: str | None,
    index: Any,
    equal: str | None,
    steps: int | None,
    options: StorageOptions,
    canonical: Any,
    keys: Any,
    interleave: int | None,
) -> dict[str, Any]:
    """Return how `ShardPlan` cuts shards."""
    if index and keys is not None:
        raise ConfigError("index= with keys=: indexes are of samples by the usual keys, and these may be others")
    if canonical is not None:
        check_canonical(canonical)
        if not index or split is not None or steps is not None:
            raise ConfigError(
                f"canonical={canonical} needs index=True (or a folder of indexes, that `wds-async index --kind wds` "
                "writes), and goes with no split= and no steps=: it shares samples out itself, as many to each rank"
            )
        if equal is not None:
            chosen_steps(equal, None)
        indexes = functools.partial(_sample_offsets, index, options)
        places = check_size("WebDataset", "interleave", 1 if interleave is None else interleave, at_least=1)
        return {"split": None, "indexes": indexes, "equal": equal, "canonical": canonical, "places": places}
    if not index:
        return {"split": split}
    if split is None:
        raise ConfigError('index= says where samples are, for split="bytes" or canonical=, and neither is given')
    if steps is None:
        chosen_steps(equal, None)
    in_samples = equal if steps is None else None
    return {"split": split, "indexes": functools.partial(_sample_offsets, index, options), "equal": in_samples}


def _sample_offsets(index: Any, options: StorageOptions, urls: Sequence[str]) -> Mapping[str, Any]:
    from wds_async.indexed.randomaccess import sample_offsets  # noqa: PLC0415 (numpy)

    return sample_offsets(urls, index, options)


def _source(
    shards: Any, plan: ShardPlan, reading: Callable[..., Any], storage_options: StorageOptions = NOTHING_GIVEN
) -> DataPipeline:
    """Return the pipeline of one source of a specification, whose options go over the dataset's."""
    own = {"storage_options": storage_options} if storage_options else {}
    return DataPipeline(plan.stages(shards), reading(**own))


def _samples(stages: tuple[Any, ...], length: int | None, workers: int) -> int | None:
    """Return the samples that come out of ``stages`` in an epoch of this rank; None where that is not known."""
    computed = lengths.of(stages, workers) if length is None else None
    return length if computed is None else computed.total


def _name_of(shards: Any) -> str:
    """Return a name for the data of a shard list: that of its sources, or of its first shard without its number."""
    if isinstance(shards, Mixture):
        names = [source.name or _name_of(source) for source in shards.sources]
        return "+".join(dict.fromkeys(names)) if len(names) <= 3 else f"{len(names)} sources"
    url = redact(next(iter(getattr(shards, "urls", ())), ""))
    name = re.match(r"[\w\-]*", url.partition("?")[0].rstrip("/").rpartition("/")[2])
    return (name[0].rstrip("0123456789-_") if name else "") or "wds_async"
