"""From a stream of shards to a stream of samples: the engine and the tar floor, joined to a stage."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from wds_async import config, world
from wds_async.errors import CorruptShard, NotATar, ReaderClosed, ShardFormatError, TruncatedShard
from wds_async.handlers import Handler, check_handler, reraise_exception
from wds_async.pipeline import FilterFunction, stage_maker
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.decompress import plain
from wds_async.tar.group import admission, base_plus_ext, samples
from wds_async.tar.parse import members
from wds_async.tarparts import (
    Ended,
    EndOfShard,
    Outcome,
    group_by_keys,
    guarded,
    meta_prefix,
    meta_suffix,
    tar_file_expander,
    tar_file_iterator,
    url_opener,
    valid_sample,
)
from wds_async.transfer.bridge import prepare
from wds_async.transfer.reader import ShardCache, ShardReader, ShardStream, open_shards
from wds_async.transfer.stats import Board, Counters, Stats

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

Keys = Callable[[str], tuple[str, str] | tuple[None, None]]

_WATCH_EVERY = 16  # shards: a tool that writes members out of order writes all shards so, and watching costs 8 %
_COUNT_EVERY = 64  # samples counted at once: a shared counter for each would cost as much as a small sample


class _Counting(Outcome):
    """Counts the bad samples that go to the handler."""

    def __init__(self, handler: Handler, counters: Counters | None) -> None:
        super().__init__(handler)
        self.counters = counters

    def __call__(self, exn: Exception) -> bool:
        passed = super().__call__(exn)
        # A shard that broke on its way is counted by the engine; what is wrong inside one costs a sample.
        if self.counters is not None and isinstance(exn, ShardFormatError):
            self.counters.add("bad_samples")
        return passed


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
    counters: Counters | None = None,
    opened: Callable[[ShardReader], Any] | None = None,
) -> Iterator[Sample]:
    """The samples of the shards in ``src`` (``{"url": …}`` or URLs), in order, read ahead within the byte budget.

    A sample is a dict of field name to bytes with ``__key__``, ``__url__`` and, for a local shard, ``__local_path__``.
    ``select_files`` and ``rename_files`` see the names of members (renamed first), ``keys`` splits a name into key and
    field, ``lcase`` lower-cases fields, and only ``suffixes`` are kept. ``transfer`` sets fields of
    `config.TransferConfig` over the environment, as in ``{"budget_bytes": 64 << 20}``. ``cache`` (see
    `cache.cached_tarfile_samples`) keeps shards on disk; samples of such have a ``__local_path__`` too. For
    ``storage_options`` see `storage.options.StorageOptions`.

    An error of a shard (see `errors`) goes to ``handler``: True goes on with the next shard, False ends the
    stream. The sample that the error cut short is dropped, or with False comes last, as it is; nothing of it joins
    another. After a duplicate field, or what those functions raise, True drops that member and goes on in its shard. An
    error of ``src`` is raised. A key that returns in its shard, behind others, is warned of: every sixteenth shard is
    looked at. Nothing is opened before the first sample is asked for.
    """
    outcome = _Counting(handler, counters)
    admit = guarded(admission(select_files, rename_files), outcome) if select_files or rename_files else None
    grouping: dict[str, Any] = {"keys": keys, "lcase": lcase, "suffixes": suffixes, "on_duplicate": outcome}
    setting = config.transfer_config(workers=world.place().num_workers, **(transfer or {}))
    n = 0
    with open_shards(src, config=setting, stats=counters, cache=cache, options=storage_options) as reader:
        (opened or _nobody)(reader)
        try:
            for stream in reader:
                grouping.update(local_path=stream.local_path, on_return=_teller(stream), pending=[None])
                try:
                    parsed = members(plain(stream.read, stream.url), stream.url, admit=admit)
                    for sample in samples(parsed, stream.url, **grouping):
                        n += 1
                        if n == _COUNT_EVERY and counters is not None:
                            counters.add_samples(n)
                            n = 0
                        yield sample
                except Exception as exn:
                    _judge(exn, reader, stream, outcome)
                    if outcome.stop and valid_sample(grouping["pending"][0]):
                        n += 1
                        yield grouping["pending"][0]
                if outcome.stop:
                    return
            if counters is not None:
                counters.add("epochs")
        finally:
            if counters is not None and n:
                counters.add_samples(n)


def _nobody(reader: ShardReader) -> None:
    """Whom to tell of a reader, where nobody asked."""


def _judge(exn: Exception, reader: ShardReader, stream: ShardStream, outcome: Outcome) -> None:
    """Ask the handler about what ended a shard, unless it was the handler, or the end of everything."""
    if reader.closed:  # the parser met memory that was taken from it
        raise ReaderClosed("the dataset was closed while it was read") from None
    if isinstance(exn, NotATar | CorruptShard | TruncatedShard):
        stream.reject()
    if isinstance(exn, Ended):
        return
    if outcome.stop:  # what the handler itself raised, between two members
        raise exn
    outcome(exn)


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
    """A stage of ``f(source, *args, counters=…, opened=…, **kw)``, which reads shards by the engine: it counts what it
    reads, in this process and its workers."""

    def __init__(self, f: Callable[..., Iterator[Any]], *args: Any, **kw: Any) -> None:
        super().__init__(f, *args, **kw)
        if world.may_fork_workers():
            prepare()
        self.board = Board()
        self._open: weakref.WeakSet[ShardReader] = weakref.WeakSet()

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """What is in the shards of ``source``."""
        read: Iterator[Any] = self.f(
            source, *self.args, counters=self.board.counters(), opened=self._open.add, **self.kw
        )
        return read

    __call__ = run

    def statistics(self) -> Stats:
        """What every run of this stage read so far, in this process and its DataLoader workers together."""
        return self.board.total()

    def close(self) -> None:
        """Close the readers that runs of this stage left open in this process."""
        for reader in list(self._open):
            reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._open = weakref.WeakSet()


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
) -> TarStage:
    """The stage from shards to samples, see `tarfile_samples`. ConfigError at once for a wrong ``transfer`` or
    ``storage_options``."""
    check_handler(handler)
    config.transfer_config(**(transfer or {}))
    given: dict[str, Any] = {"cache": cache, "keys": keys, "lcase": lcase, "suffixes": suffixes}
    usual = {"cache": None, "keys": base_plus_ext, "lcase": True, "suffixes": None}
    options = StorageOptions(storage_options)
    kept = {name: value for name, value in given.items() if value is not usual[name]}
    kept |= {"storage_options": options} if options else {}
    return TarStage(handler=handler, select_files=select_files, rename_files=rename_files, transfer=transfer, **kept)
