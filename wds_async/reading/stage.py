"""Stages that read shards. The engine is imported when a stage is made: a pipeline can be imported without it."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wds_async import ahead, config, world
from wds_async.arguments import check_function
from wds_async.environment import value
from wds_async.errors import ConfigError
from wds_async.handlers import Handler, check_handler, reraise_exception
from wds_async.reading.options import MAX_FIELD_BYTES, field_limit, on_corrupt_policy, transfer_fields
from wds_async.stages import FilterFunction, stage_maker
from wds_async.storage.options import StorageOptions
from wds_async.tar.group import Keys, base_plus_ext, expected

if TYPE_CHECKING:
    from wds_async.checkpoint.packing import Reference
    from wds_async.checkpoint.states import StageState
    from wds_async.transfer.reader import ShardCache, ShardReader
    from wds_async.transfer.stats import Stats
    from wds_async.transfer.traffic import Traffic

__all__ = ["ReadingStage", "TarStage", "tarfile_to_samples"]


class ReadingStage(FilterFunction):
    """A stage of ``f(source, *args, counters=…, opened=…, ledger=…, **kw)``, which reads shards by the engine. It
    counts what it reads, and notes what is passed over (``ledger``), in this process and its workers."""

    def __init__(
        self, f: Callable[..., Iterator[Any]], *args: Any, max_bad_fraction: float | None = None, **kw: Any
    ) -> None:
        from wds_async.observe.cost_limit import limit_of_job  # noqa: PLC0415 (the engine)
        from wds_async.observe.ledger import Ledger  # noqa: PLC0415 (the engine)
        from wds_async.transfer.engine import prepare  # noqa: PLC0415 (the engine)
        from wds_async.transfer.stats import Board  # noqa: PLC0415 (the engine)

        super().__init__(f, *args, **kw)
        if world.may_fork_workers():
            from wds_async.checkpoint import run  # noqa: F401, PLC0415 (so that forked workers need not)

            prepare()
        elif value("WDS_ENGINE") == "process":
            from wds_async.transfer import remote_engine  # noqa: PLC0415 (the engine)

            remote_engine.start()
        self.board = Board()
        self.ledger = Ledger(self.board, max_bad_fraction)
        self.cost_limit = limit_of_job()
        if (metrics := _metrics()) is not None:
            metrics.join(self.ledger)
        self._open: weakref.WeakSet[ShardReader] = weakref.WeakSet()

    def run(self, source: Iterable[Any], **kw: Any) -> Iterator[Any]:
        """Yield the contents of the shards of ``source``; ``kw`` are for ``f``."""
        if (metrics := _metrics()) is not None:
            metrics.show()
        counters = self.board.counters()
        ledger = self.ledger.begin(counters)
        read: Iterator[Any] = self.f(
            source, *self.args, counters=counters, opened=self._opened, ledger=ledger, **self.kw, **kw
        )
        return read

    __call__ = run

    def with_state(self, state: StageState) -> Any:
        """Return this stage with its position."""
        return functools.partial(self.run, state=state)

    def samples_at(self, references: Sequence[Reference], facts: Mapping[str, Any]) -> list[Any]:
        """Return the samples at ``references`` once more, read by ranges. StateError where a shard has changed."""
        from wds_async.reading.position import entries_of, picked  # noqa: PLC0415 (the engine)

        spans = entries_of(references, facts)
        return picked(
            self.f(spans, *self.args, counters=self.board.counters(), opened=self._opened, **self.kw), references
        )

    def _opened(self, reader: ShardReader) -> None:
        from wds_async.observe.cost_limit import enforce  # noqa: PLC0415 (the engine)

        self._open.add(reader)
        ahead.close_if_left(reader)
        enforce(reader, self.cost_limit)

    def statistics(self) -> Stats:
        """Totals of every run of this stage, in this process and its DataLoader workers together."""
        return self.board.total()

    def traffic(self) -> Traffic:
        """Requests by origin, likewise; of workers as of a second ago."""
        return self.board.traffic()

    def detached(self) -> Any:
        """Return a copy that counts for itself, and notes what is passed over for itself alone."""
        from wds_async.transfer.stats import Board  # noqa: PLC0415 (the engine)

        other = copy.copy(self)
        other.board = Board()
        other.ledger = self.ledger.detached(other.board)
        return other

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
        from wds_async.observe.cost_limit import limit_of_job  # noqa: PLC0415 (the engine)

        super().__setstate__({"cost_limit": limit_of_job(), **state})
        self._open = weakref.WeakSet()


def _metrics() -> Any:
    """Return the module that serves a job's figures where ``WDS_METRICS_PORT`` is set, else None."""
    if value("WDS_METRICS_PORT") is None:
        return None
    from wds_async.observe import metrics_server  # noqa: PLC0415 (the engine)

    return metrics_server


class TarStage(ReadingStage):
    """The stage from shards to samples: see `tarfile_samples`, and with ``interleave`` `interleaved_samples`."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        from wds_async.reading.interleave import interleaved_samples  # noqa: PLC0415 (the engine)
        from wds_async.reading.samples import tarfile_samples  # noqa: PLC0415 (the engine)

        self.seed = kw.get("seed")
        super().__init__(interleaved_samples if "interleave" in kw else tarfile_samples, *args, **kw)

    def samples_at(self, references: Sequence[Reference], facts: Mapping[str, Any]) -> list[Any]:
        """Return the samples at ``references`` once more, in their order."""
        if "interleave" not in self.kw:
            return super().samples_at(references, facts)
        from wds_async.reading.position import entries_of, picked  # noqa: PLC0415 (the engine)
        from wds_async.reading.samples import tarfile_samples  # noqa: PLC0415 (the engine)

        in_order = {name: argument for name, argument in self.kw.items() if name not in _INTERLEAVING}
        spans, counters = entries_of(references, facts), self.board.counters()
        samples = tarfile_samples(spans, *self.args, counters=counters, opened=self._opened, **in_order)
        return picked(samples, references)  # type: ignore[arg-type]


_INTERLEAVING = ("interleave", "ordered", "seed")


def _interleaving(interleave: int | None, ordered: bool, seed: Any) -> dict[str, Any]:
    """Return the arguments of `interleaved_samples`; none for shards that are read one after another. Raise ConfigError
    for values that they cannot have."""
    if interleave is None:
        if ordered is not True:
            raise ConfigError(f"ordered={ordered!r} needs interleave=, the number of shards that are open at once")
        return {}
    if isinstance(interleave, bool) or not hasattr(interleave, "__index__") or operator.index(interleave) < 1:
        raise ConfigError(f"interleave={interleave!r}: the number of shards that are open at once, 1 or more")
    if not isinstance(ordered, bool):
        raise ConfigError(f"ordered={ordered!r}: True or False")
    if operator.index(interleave) == 1:
        return {}
    if seed is None and (seed := config.settings().seed) is None:
        seed = world.DrawnSeed()
    return {"interleave": operator.index(interleave), "seed": seed} | ({} if ordered else {"ordered": False})


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
    interleave: int | None = None,
    ordered: bool = True,
    seed: Any = None,
) -> TarStage:
    """Return the stage from shards to samples, see `tarfile_samples`. With ``interleave``, that many shards are open at
    once, and samples are drawn from them; the draws depend on ``seed`` (default ``WDS_SEED``, else one that is drawn),
    epoch, rank and worker. ``ordered=False`` draws among those whose bytes have arrived. ConfigError at once for a
    wrong ``transfer``, ``storage_options``, ``verify``, ``on_corrupt``, ``max_bad_fraction``, ``max_field_bytes``,
    ``expect``, ``interleave`` or ``ordered``, and for a ``WDS_LEDGER`` that cannot be written."""
    check_handler(handler)
    for argument, function in (("select_files", select_files), ("rename_files", rename_files), ("keys", keys)):
        check_function("tarfile_to_samples", argument, function, optional=True)
    transfer = transfer_fields(transfer, verify) if verify is not None else transfer
    config.transfer_config(**(transfer or {}))
    on_corrupt_policy(on_corrupt)
    field_limit(max_field_bytes)
    expected(expect, lcase, suffixes)
    options: dict[str, Any] = {
        "cache": cache,
        "keys": None if keys is base_plus_ext else keys,
        "lcase": None if lcase else False,
        "suffixes": suffixes,
        "storage_options": StorageOptions(storage_options) or None,
        "on_corrupt": on_corrupt,
        "max_bad_fraction": max_bad_fraction,
        "max_field_bytes": None if max_field_bytes == MAX_FIELD_BYTES else max_field_bytes,
        "expect": expect,
    }
    options = {name: value for name, value in options.items() if value is not None}  # so that repr is short
    options |= _interleaving(interleave, ordered, seed)
    return TarStage(handler=handler, select_files=select_files, rename_files=rename_files, transfer=transfer, **options)
