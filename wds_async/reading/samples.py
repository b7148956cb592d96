"""Samples of a stream of shards: the engine, the tar reader and the grouping of members, joined."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from wds_async import config, world
from wds_async.environment import value
from wds_async.errors import ReaderClosed
from wds_async.handlers import Handler, reraise_exception
from wds_async.logs import Once
from wds_async.observe.cost_limit import enforce
from wds_async.observe.ledger import EpochLog, Ledger
from wds_async.reading.options import MAX_FIELD_BYTES, field_limit, on_corrupt_policy, transfer_fields
from wds_async.reading.parts import guarded
from wds_async.reading.position import ReadState
from wds_async.reading.recover import CorruptionPolicy, ShardRecovery
from wds_async.redact import redact
from wds_async.stages import Traits
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.group import Keys, RawSample, admission, base_plus_ext, expected, samples
from wds_async.tar.parse import Member, members_of
from wds_async.tar.source import ByteSource
from wds_async.transfer.reader import ShardCache, ShardReader, ShardStream, open_shards
from wds_async.transfer.stats import Board, Counters

if TYPE_CHECKING:
    from wds_async.indexed.learnt import IndexRecorder

__all__ = ["ShardParsing", "base_plus_ext", "read_shards", "tarfile_samples"]

Sample = dict[str, Any]

_WATCH_EVERY = 16  # shards: a tool that writes members out of order writes all shards so, and watching costs 8 %
_COUNT_EVERY = 64  # samples counted at once: a shared counter for each would cost as much as a small sample


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
    ledger: EpochLog | None = None,
    state: ReadState | None = None,
) -> Iterator[Sample]:
    """Yield the samples of the shards in ``src`` (``{"url": …}`` or URLs), in order, read ahead within the byte budget.

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
    names: dict[str, Any] = {"select_files": select_files, "rename_files": rename_files, "keys": keys, "lcase": lcase}
    faults: dict[str, Any] = {"on_corrupt": on_corrupt, "max_field_bytes": max_field_bytes, "expect": expect}
    parsing = ShardParsing.of(ledger, handler, suffixes=suffixes, **names, **faults)
    setting = config.transfer_config(workers=world.place().num_workers, **transfer_fields(transfer, verify))
    state = state or ReadState()
    opening = functools.partial(
        open_shards, state.shards(src), config=setting, stats=ledger.counters, cache=cache, options=storage_options
    )
    return read_shards(opening, opened or enforce, parsing, ledger, state)


tarfile_samples.traits = Traits(handler="handler", state=ReadState)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ShardParsing:
    """Parser that makes samples of the bytes of one shard after another, by the arguments of `tarfile_samples`."""

    policy: CorruptionPolicy
    parse: Callable[[ByteSource], Iterator[Member]]
    grouping: dict[str, Any]
    recorder: IndexRecorder | None

    @classmethod
    def of(
        cls,
        ledger: EpochLog,
        handler: Handler = reraise_exception,
        *,
        select_files: Callable[[str], Any] | None = None,
        rename_files: Callable[[str], str] | None = None,
        keys: Keys = base_plus_ext,
        lcase: bool = True,
        suffixes: Collection[str] | None = None,
        on_corrupt: str | None = None,
        max_field_bytes: int = MAX_FIELD_BYTES,
        expect: Collection[str] | None = None,
    ) -> ShardParsing:
        """Return that of one reader, or of one of several shards that are open at once."""
        policy = CorruptionPolicy(handler, on_corrupt_policy(on_corrupt), ledger, keys)
        selects = select_files or rename_files
        admit = guarded(admission(select_files, rename_files), policy.of_member) if selects else None
        parse = functools.partial(members_of, admit=admit, max_field_bytes=field_limit(max_field_bytes))
        grouping: dict[str, Any] = {"keys": keys, "lcase": lcase, "suffixes": suffixes, "rename_files": rename_files}
        grouping |= {"on_error": policy.of_member, "expect": expected(expect, lcase, suffixes)}
        return cls(policy, parse, grouping, _recorder(grouping, select_files))


class ShardPosition(Protocol):
    """Protocol: where the samples that were read come from."""

    sample: RawSample | None
    """The latest sample of the open shard."""

    def begin(self, shard: ShardRecovery, number: int) -> None:
        """Note that ``shard``, number ``number`` of its reader, begins."""
        ...

    def wanted(self, samples: Iterator[RawSample], stream: ShardStream) -> Iterator[RawSample]:
        """Return those of ``samples`` that the entry of their shard asks for."""
        ...

    def over(self, shard: ShardRecovery) -> None:
        """Note that ``shard`` is over."""
        ...

    def stop(self) -> None:
        """Note that a handler ended the stream."""
        ...


class ShardsInTurn(Protocol):
    """Protocol: the shards to read one after another, such as a `ShardReader`."""

    @property
    def closed(self) -> bool: ...

    def __iter__(self) -> Iterator[ShardStream]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


Shards = TypeVar("Shards", bound=ShardsInTurn)


def read_shards(
    opening: Callable[[], Shards],
    opened: Callable[[Shards], Any],
    parsing: ShardParsing,
    ledger: EpochLog,
    state: ShardPosition,
    *,
    is_epoch: bool = True,
) -> Iterator[Sample]:
    """Yield the samples of the shards that ``opening`` opens, in order. ``is_epoch``: count their end as an epoch's."""
    counters, reading, recorder = ledger.counters, parsing.policy, parsing.recorder
    parse, grouping = parsing.parse, parsing.grouping
    n = total = 0
    with opening() as reader:
        opened(reader)
        try:
            for stream in reader:
                before, behind = total + n, None
                shard = reading.begin(stream)
                state.begin(shard, stream.number)
                note = None if recorder is None else recorder.begin()
                grouping.update(local_path=stream.local_path, on_return=_return_warning(stream), on_cut=shard.on_cut)
                while True:
                    try:
                        parsed = shard.members(parse)
                        grouped = samples(parsed, stream.url, drop_first=behind, **grouping)
                        for sample in state.wanted(grouped, stream):
                            n += 1
                            if n == _COUNT_EVERY:
                                counters.add("samples", n)
                                total, n = total + n, 0
                                ledger.judge()
                            if note is not None:
                                note(sample.offset)
                            state.sample = sample
                            yield sample
                    except Exception as exn:
                        if reader.closed:  # the parser met memory that was taken from it
                            raise ReaderClosed("the dataset was closed while it was read") from None
                        if reading.resumes_after(exn, total + n - before):
                            behind = shard.on_first_behind
                            continue
                    break
                if recorder is not None and not reading.stop and behind is None:
                    shard.learn(recorder)
                state.over(shard)
                shard.over(total + n - before)
                if reading.stop:
                    state.stop()
                    return
            if is_epoch:
                counters.add("epochs")
        finally:
            reading.drop()
            if n:
                counters.add("samples", n)
            del ledger  # see `CorruptionPolicy`


def _recorder(grouping: Mapping[str, Any], select_files: Any) -> IndexRecorder | None:
    """Return what keeps the indexes of shards that are read (``WDS_LEARN_INDEX``); None where they are not learnt."""
    if not value("WDS_LEARN_INDEX"):
        return None
    from wds_async.indexed.learnt import IndexRecorder, learns  # noqa: PLC0415 (numpy)

    return IndexRecorder() if learns({**grouping, "select_files": select_files}) else None


def _return_warning(stream: ShardStream) -> Callable[[str, int], None] | None:
    """Return a callback that warns, once, of a key that returns in this shard; None for shards that are not watched."""
    if stream.number % _WATCH_EVERY:
        return None
    warned = Once()

    def warn(key: str, offset: int) -> None:
        if warned.first("key"):
            warnings.warn(
                f"{redact(stream.url)}: the key {key!r} returns at byte {offset}, behind other samples. Only members "
                "that stand together make one sample, so this one is split; write the shard in the order of its "
                "keys (tar --sort=name).",
                stacklevel=2,
            )

    return warn
