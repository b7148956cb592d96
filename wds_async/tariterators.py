"""From a stream of shards to a stream of samples: the engine and the tar floor, joined to a stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from wds_async import config, world
from wds_async.errors import ReaderClosed, ShardFormatError
from wds_async.handlers import Handler, reraise_exception
from wds_async.pipeline import FilterFunction
from wds_async.tar.decompress import plain
from wds_async.tar.group import admission, base_plus_ext, samples
from wds_async.tar.parse import members
from wds_async.transfer.reader import ShardReader, open_shards
from wds_async.transfer.stats import Board, Counters, Stats

__all__ = [
    "TarStage",
    "base_plus_ext",
    "meta_prefix",
    "meta_suffix",
    "tarfile_samples",
    "tarfile_to_samples",
    "valid_sample",
]

Sample = dict[str, Any]

meta_prefix = "__"
meta_suffix = "__"

_COUNT_EVERY = 64  # samples counted at once: a shared counter for each would cost as much as a small sample


def valid_sample(sample: Any) -> bool:
    """True for a dict that has something in it and no true ``__bad__``."""
    return isinstance(sample, dict) and bool(sample) and not sample.get("__bad__", False)


class _Verdict:
    """The user's handler, and whether it ended the stream: by False, or by raising. Counts what it lets pass."""

    def __init__(self, handler: Handler, counters: Counters | None) -> None:
        self.handler = handler
        self.counters = counters
        self.stop = False

    def __call__(self, exn: Exception) -> bool:
        self.stop = True
        self.stop = not self.handler(exn)
        # A shard that broke on its way is counted by the engine; what is wrong inside one costs a sample.
        if self.counters is not None and isinstance(exn, ShardFormatError):
            self.counters.add("bad_samples")
        return not self.stop


def tarfile_samples(
    src: Iterable[Any],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    transfer: Mapping[str, Any] | None = None,
    *,
    counters: Counters | None = None,
    opened: Callable[[ShardReader], Any] | None = None,
) -> Iterator[Sample]:
    """The samples of the shards in ``src`` (``{"url": …}`` or URLs), in order, read ahead within the byte budget.

    A sample is a dict of field name to bytes with ``__key__``, ``__url__`` and, for a local shard,
    ``__local_path__``. ``select_files`` and ``rename_files`` see the names of members (renamed first). ``transfer``
    sets fields of `config.TransferConfig` over the environment, as in ``{"budget_bytes": 64 << 20}``.

    An error of a shard (see `errors`) goes to ``handler``: True goes on with the next shard, False ends the
    stream; the sample that the error cut short is dropped either way, and nothing of it joins another. After a
    duplicate field, True drops that member and goes on in its shard. An error of ``src`` itself is raised.
    Nothing is opened before the first sample is asked for.
    """
    renaming = select_files is not None or rename_files is not None
    admit = admission(select_files, rename_files) if renaming else None
    verdict = _Verdict(handler, counters)
    setting = config.transfer_config(workers=world.place().num_workers, **(transfer or {}))
    n = 0
    with open_shards(src, config=setting, stats=counters) as reader:
        if opened is not None:
            opened(reader)
        try:
            for stream in reader:
                try:
                    parsed = members(plain(stream.read, stream.url), stream.url, admit=admit)
                    for sample in samples(parsed, stream.url, local_path=stream.local_path, on_duplicate=verdict):
                        n += 1
                        if n == _COUNT_EVERY and counters is not None:
                            counters.add_samples(n)
                            n = 0
                        yield sample
                except Exception as exn:
                    if reader.closed:  # the parser met memory that was taken from it
                        raise ReaderClosed("the dataset was closed while it was read") from None
                    if verdict.stop:  # what the handler itself raised, between two members
                        raise
                    verdict(exn)
                if verdict.stop:
                    return
            if counters is not None:
                counters.add("epochs")
        finally:
            if counters is not None and n:
                counters.add_samples(n)


class TarStage(FilterFunction):
    """The stage that `tarfile_to_samples` makes: it counts what it reads, in this process and its workers."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(tarfile_samples, *args, **kw)
        self.board = Board()
        self._open: weakref.WeakSet[ShardReader] = weakref.WeakSet()

    def run(self, source: Iterable[Any]) -> Iterator[Sample]:
        """The samples of the shards in ``source``."""
        return tarfile_samples(source, *self.args, counters=self.board.counters(), opened=self._open.add, **self.kw)

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


def tarfile_to_samples(
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    transfer: Mapping[str, Any] | None = None,
) -> TarStage:
    """The stage from shards to samples, see `tarfile_samples`. ConfigError at once for a wrong ``transfer``."""
    config.transfer_config(**(transfer or {}))
    return TarStage(handler=handler, select_files=select_files, rename_files=rename_files, transfer=transfer)
