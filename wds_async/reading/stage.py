"""From a stream of shards to a stream of samples: the engine and the tar floor, joined to a stage."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from wds_async import config, world
from wds_async.arguments import check_function
from wds_async.environment import ON_CORRUPT, value
from wds_async.errors import ConfigError, ReaderClosed
from wds_async.handlers import Handler, check_handler, reraise_exception
from wds_async.observe.cost_limit import enforce, limit_of_job
from wds_async.observe.ledger import Ledger, Pass
from wds_async.pipeline import FilterFunction, stage_maker
from wds_async.reading.parts import (
    EndOfShard,
    group_by_keys,
    guarded,
    meta_prefix,
    meta_suffix,
    tar_file_expander,
    tar_file_iterator,
    url_opener,
    valid_sample,
)
from wds_async.reading.recover import Reading
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.group import Keys, admission, base_plus_ext, expected, samples
from wds_async.tar.parse import Member, members_of
from wds_async.tar.source import Source
from wds_async.transfer import stack_sampler
from wds_async.transfer.bridge import prepare
from wds_async.transfer.reader import ShardCache, ShardReader, ShardStream, open_shards
from wds_async.transfer.stats import Board, Counters, Stats
from wds_async.transfer.traffic import Traffic

__all__ = [
    "EndOfShard",
    "ReadingStage",
    "TarStage",
    "base_plus_ext",
    "group_by_keys",
    "meta_prefix",
    "meta_suffix",
    "tar_file_expander",
    "tar_file_iterator",
    "tarfile_samples",
    "tarfile_to_samples",
    "url_opener",
    "valid_sample",
]

Sample = dict[str, Any]

_WATCH_EVERY = 16  # shards: a tool that writes members out of order writes all shards so, and watching costs 8 %
_COUNT_EVERY = 64  # samples counted at once: a shared counter for each would cost as much as a small sample

MAX_FIELD_BYTES = 2 << 30
"""The largest member that is taken, unless ``max_field_bytes`` says otherwise."""


def tarfile_samples(
    src: Iterable[Any],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    transfer: Mapping[str, Any] | None = None,
    *,
    keys: Keys = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    cache: ShardCache | None = None,
    storage_options: StorageOptions = NOTHING_GIVEN,
    verify: str | None = None,
    on_corrupt: str | None = None,
    max_bad_fraction: float | None = None,
    max_field_bytes: int = MAX_FIELD_BYTES,
    expect: Collection[str] | None = None,
    counters: Counters | None = None,
    opened: Callable[[ShardReader], Any] | None = None,
    ledger: Pass | None = None,
) -> Iterator[Sample]:
    """The samples of the shards in ``src`` (``{"url": …}`` or URLs), in order, read ahead within the byte budget.

    A sample is a dict of field name to bytes with ``__key__``, ``__url__`` and, for a local shard, ``__local_path__``.
    ``select_files`` and ``rename_files`` see the names of members (renamed first), ``keys`` splits a name into key and
    field, ``lcase`` lower-cases fields, and only ``suffixes`` are kept. ``transfer`` sets fields of
    `config.TransferConfig` over the environment, as in ``{"budget_bytes": 64 << 20}``. ``cache`` (see
    `cache.cached_tarfile_samples`) keeps shards on disk; samples of such have a ``__local_path__`` too. For
    ``storage_options`` see `storage.options.StorageOptions`.

    An error of a shard (see `errors`) goes to ``handler``: True goes on with the next shard, False ends the
    stream. The sample that the error cut short is dropped: it is never yielded, and nothing of it joins another. What
    was let pass is noted in the `ledger`, of the stage or of its own (``max_bad_fraction`` is for that). After a
    duplicate field, or what those functions raise, True drops that member and goes on in its shard. An
    error of ``src`` is raised. A key that returns in its shard, behind others, is warned of: every sixteenth shard is
    looked at. Nothing is opened before the first sample is asked for.

    ``on_corrupt`` (default ``WDS_ON_CORRUPT``, else "raise") says what follows damage inside a tar, see `WebDataset`;
    ``verify`` is that of ``transfer``. A member of more than ``max_field_bytes`` (2 GiB), unless ``select_files``
    passes it over, is FieldTooLarge before a byte of it is kept. ``expect`` names fields that every sample must have
    (``"jpg;png"``: one of the two); a sample that lacks one is MissingField, and True drops it and goes on in its
    shard. ConfigError for choices that there are not.
    """
    ledger = ledger or Ledger(Board(), max_bad_fraction).begin(counters)
    reading = Reading(handler, _on_corrupt(on_corrupt), ledger)
    admit = guarded(admission(select_files, rename_files), reading.of_member) if select_files or rename_files else None
    parse = functools.partial(members_of, admit=admit, max_field_bytes=_field_limit(max_field_bytes))
    grouping: dict[str, Any] = {"keys": keys, "lcase": lcase, "suffixes": suffixes, "rename_files": rename_files}
    grouping |= {"on_error": reading.of_member, "expect": expected(expect, lcase, suffixes)}
    setting = config.transfer_config(workers=world.place().num_workers, **_transfer(transfer, verify))
    opening = functools.partial(
        open_shards, src, config=setting, stats=ledger.counters, cache=cache, options=storage_options
    )
    return _read(opening, opened or enforce, reading, ledger, parse, grouping)


def _read(
    opening: Callable[[], ShardReader],
    opened: Callable[[ShardReader], Any],
    reading: Reading,
    ledger: Pass,
    parse: Callable[[Source], Iterator[Member]],
    grouping: dict[str, Any],
) -> Iterator[Sample]:
    counters = ledger.counters
    n = total = 0
    with opening() as reader:
        opened(reader)
        try:
            for stream in reader:
                before, behind = total + n, None
                shard = reading.begin(stream)
                grouping.update(local_path=stream.local_path, on_return=_teller(stream), on_cut=shard.on_cut)
                while True:
                    try:
                        parsed = parse(shard.source())
                        for sample in samples(parsed, stream.url, drop_first=behind, **grouping):
                            n += 1
                            if n == _COUNT_EVERY:
                                counters.add_samples(n)
                                total, n = total + n, 0
                                ledger.judge()
                            yield sample
                    except Exception as exn:
                        if reader.closed:  # the parser met memory that was taken from it
                            raise ReaderClosed("the dataset was closed while it was read") from None
                        if reading.goes_on(exn, total + n - before):
                            behind = shard.on_first_behind
                            continue
                    break
                shard.over(total + n - before)
                if reading.stop:
                    return
            counters.add("epochs")
        finally:
            reading.drop()
            if n:
                counters.add_samples(n)
            del ledger  # see `Reading`


def _on_corrupt(given: str | None) -> str:
    chosen = config.settings().on_corrupt if given is None else given
    if chosen not in ON_CORRUPT:
        raise ConfigError(f"on_corrupt={chosen!r}: one of {', '.join(ON_CORRUPT)} (WDS_ON_CORRUPT)")
    return chosen


def _field_limit(given: int) -> int:
    if given < 1:
        raise ConfigError(f"max_field_bytes={given}: at least 1")
    return given


def _transfer(transfer: Mapping[str, Any] | None, verify: str | None) -> dict[str, Any]:
    """The fields of ``transfer``, with ``verify`` among them. ConfigError where they contradict each other."""
    fields = dict(transfer or {})
    if verify is not None and fields.setdefault("verify", verify) != verify:
        raise ConfigError(f"verify={verify!r}, and transfer={{'verify': {fields['verify']!r}}}: give one of them")
    return fields


def _teller(stream: ShardStream) -> Callable[[str, int], None] | None:
    """Who warns, once, of a key that returns in this shard; None where nobody looks."""
    if stream.number % _WATCH_EVERY:
        return None
    told: set[str] = set()

    def tell(key: str, offset: int) -> None:
        if not told:
            told.add(key)
            warnings.warn(
                f"{redact(stream.url)}: the key {key!r} returns at byte {offset}, behind other samples. Only members "
                "that stand together make one sample, so this one is split; write the shard in the order of its "
                "keys (tar --sort=name).",
                stacklevel=2,
            )

    return tell


class ReadingStage(FilterFunction):
    """A stage of ``f(source, *args, counters=…, opened=…, ledger=…, **kw)``, which reads shards by the engine: it
    counts what it reads, and notes what is passed over (``ledger``), in this process and its workers."""

    def __init__(
        self, f: Callable[..., Iterator[Any]], *args: Any, max_bad_fraction: float | None = None, **kw: Any
    ) -> None:
        super().__init__(f, *args, **kw)
        if world.may_fork_workers():
            prepare()
        self.board = Board()
        self.ledger = Ledger(self.board, max_bad_fraction)
        self.cost_limit = limit_of_job()
        if (metrics := _metrics()) is not None:
            metrics.join(self.ledger)
        self._open: weakref.WeakSet[ShardReader] = weakref.WeakSet()

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """What is in the shards of ``source``."""
        if (metrics := _metrics()) is not None:
            metrics.show()
        counters = self.board.counters()
        ledger = self.ledger.begin(counters)
        read: Iterator[Any] = self.f(
            source, *self.args, counters=counters, opened=self._opened, ledger=ledger, **self.kw
        )
        return read

    __call__ = run

    def _opened(self, reader: ShardReader) -> None:
        self._open.add(reader)
        enforce(reader, self.cost_limit)
        stack_sampler.watch(reader)

    def statistics(self) -> Stats:
        """What every run of this stage read so far, in this process and its DataLoader workers together."""
        return self.board.total()

    def traffic(self) -> Traffic:
        """What they asked of each origin, likewise; of workers as of a second ago."""
        return self.board.traffic()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, in the ledger."""
        self.ledger.epoch.set(epoch - 1)

    def close(self) -> None:
        """Close the readers that runs of this stage left open in this process."""
        for reader in list(self._open):
            reader.close()

    def __getstate__(self) -> dict[str, Any]:
        left = ("_open",) if world.spawning() else ("_open", "cost_limit")
        if world.spawning() and (metrics := _metrics()) is not None:
            metrics.show()
        return {k: v for k, v in super().__getstate__().items() if k not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"cost_limit": limit_of_job(), **state})
        self._open = weakref.WeakSet()


def _metrics() -> Any:
    """The module that shows a job's figures, where ``WDS_METRICS_PORT`` asks for it."""
    if value("WDS_METRICS_PORT") is None:
        return None
    from wds_async.observe import metrics_server  # noqa: PLC0415 (who shows nothing pays nothing)

    return metrics_server


class TarStage(ReadingStage):
    """The stage from shards to samples, see `tarfile_samples`."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(tarfile_samples, *args, **kw)


@stage_maker
def tarfile_to_samples(
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    transfer: Mapping[str, Any] | None = None,
    cache: ShardCache | None = None,
    *,
    keys: Keys = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    storage_options: Mapping[str, Any] | StorageOptions | None = None,
    verify: str | None = None,
    on_corrupt: str | None = None,
    max_bad_fraction: float | None = None,
    max_field_bytes: int = MAX_FIELD_BYTES,
    expect: Collection[str] | None = None,
) -> TarStage:
    """The stage from shards to samples, see `tarfile_samples`. ConfigError at once for a wrong ``transfer``,
    ``storage_options``, ``verify``, ``on_corrupt``, ``max_bad_fraction``, ``max_field_bytes`` or ``expect``, and for
    a ``WDS_LEDGER`` that cannot be written."""
    check_handler(handler)
    for argument, function in (("select_files", select_files), ("rename_files", rename_files), ("keys", keys)):
        check_function("tarfile_to_samples", argument, function, optional=True)
    transfer = _transfer(transfer, verify) if verify is not None else transfer
    config.transfer_config(**(transfer or {}))
    _on_corrupt(on_corrupt)
    _field_limit(max_field_bytes)
    expected(expect, lcase, suffixes)
    given: dict[str, Any] = {"cache": cache, "keys": keys, "lcase": lcase, "suffixes": suffixes}
    usual: dict[str, Any] = {"cache": None, "keys": base_plus_ext, "lcase": True, "suffixes": None}
    given |= {"on_corrupt": on_corrupt, "max_bad_fraction": max_bad_fraction, "max_field_bytes": max_field_bytes}
    given["expect"], usual["expect"] = expect, None
    usual |= {"on_corrupt": None, "max_bad_fraction": None, "max_field_bytes": MAX_FIELD_BYTES}
    options = StorageOptions(storage_options)
    kept = {name: value for name, value in given.items() if value is not usual[name]}
    kept |= {"storage_options": options} if options else {}
    return TarStage(handler=handler, select_files=select_files, rename_files=rename_files, transfer=transfer, **kept)
