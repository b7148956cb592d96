"""Reading of shards: URLs in, pieces of memory out, in order.

::

    with open_shards(urls) as shards:
        for shard in shards:
            while (piece := shard.read()) is not None:
                ...  # a memoryview, valid until the next read
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from wds_async.config import TransferConfig, settings, transfer_config
from wds_async.errors import ReaderClosed, StorageError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Checksum
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import Location, locate
from wds_async.transfer.bridge import Engine
from wds_async.transfer.checksums import Comparison, HeldShard, VerifyBeforeUse, answer_checksum
from wds_async.transfer.protocols import CachedShard, Limit, ShardCache
from wds_async.transfer.pump import Event, Hand, Pump
from wds_async.transfer.slabs import Slab
from wds_async.transfer.stats import Board, Counters
from wds_async.transfer.window import Broken, Finished, Piece, Shard

__all__ = ["CachedShard", "ReadOptions", "ShardCache", "ShardReader", "ShardStream", "open_shards"]

logger = logging.getLogger("wds_async")

_readers: weakref.WeakSet[ShardReader] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of a `ShardReader`."""

    config: TransferConfig
    counters: Counters
    lookahead: int | None = None
    """Shards taken from the iterable ahead of the one that is read (default: as many as there may be connections); 1
    suits a source that blocks."""
    final: bool = False
    """The URLs are targets, and are not rewritten."""
    cache: ShardCache | None = None
    """Disk cache (see `shardcache`): shards that it has are read there, the others pass through it."""
    storage: StorageOptions = NOTHING_GIVEN


def open_shards(
    shards: Iterable[str | Mapping[str, Any]],
    *,
    config: TransferConfig | None = None,
    stats: Counters | None = None,
    lookahead: int | None = None,
    final: bool = False,
    cache: ShardCache | None = None,
    options: StorageOptions = NOTHING_GIVEN,
) -> ShardReader:
    """Read ``shards`` (URLs, or dicts with a ``url``) one after another, fetching ahead within the byte budget.

    Nothing is started before the first shard is requested. ``config`` and ``stats`` default to new ones; for the rest
    see `ReadOptions`.
    """
    chosen = ReadOptions(
        config=config or transfer_config(),
        counters=stats or Board().counters(),
        lookahead=lookahead,
        final=final,
        cache=cache,
        storage=options,
    )
    return ShardReader(shards, chosen)


class ShardReader(Iterator["ShardStream"]):
    """Iterator of `ShardStream`; also a context manager. Each shard ends when the next one is asked for.

    `close` (also by ``with``, by garbage collection and at exit) stops all transfers and frees their memory.
    """

    def __init__(self, shards: Iterable[str | Mapping[str, Any]], options: ReadOptions) -> None:
        self.options = options
        self.config, self.counters = options.config, options.counters
        self.limit: Limit | None = None  # set by the caller that made the reader
        self._source: Iterator[str | Mapping[str, Any]] | None = iter(shards)
        self._lookahead = max(1, self.config.connections if options.lookahead is None else options.lookahead)
        self._ahead: deque[ShardStream | BaseException] = deque()
        self._open: ShardStream | None = None
        self._hand = Hand(self.counters)
        self._pid = os.getpid()
        self._engine: Engine | None = None
        self._pump: Pump | None = None
        self._finalizer: weakref.finalize[Any, ShardReader] | None = None
        self._returned: list[Slab] = []
        self._taken = 0
        self._verbose = settings().verbose > 0
        self._opened_at = time.monotonic()
        self._closed = False
        self._verifier: VerifyBeforeUse | None = None
        if self.config.verify == "always":
            folder: Any = getattr(options.cache, "folder", None)
            self._verifier = VerifyBeforeUse(self, None if folder is None else str(folder))
        _readers.add(self)

    def __iter__(self) -> ShardReader:
        return self

    def __next__(self) -> ShardStream:
        self._check()
        if self._open is not None:
            self._open.close()
            self._open = None
        self._top_up()
        if not self._ahead:
            self._check()  # closed meanwhile by another thread, it has not come to its end
            self.close()
            raise StopIteration
        following = self._ahead.popleft()
        if isinstance(following, BaseException):
            self.close()
            raise following
        self._open = following
        if following._cached is not None:
            following._cached.want()
        if self._verifier is not None:
            self._verifier.ahead((following, *self._ahead))
        return following

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading; idempotent. A later read raises `ReaderClosed`."""
        if self._closed:
            return
        self._closed = True
        self._source = None
        if self._open is not None:
            self._open._drop_piece()
            self._open._leave_cache()
        for following in self._ahead:
            if isinstance(following, ShardStream):
                following._leave_cache()
        self._ahead.clear()
        if self._verifier is not None:
            self._verifier.close()
        if self._finalizer is not None:
            self._finalizer()
        self.counters.add("read_s", time.monotonic() - self._opened_at)
        self._hand.clock.stop()
        if self.limit is not None:
            self.limit.over()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the last shard is over."""
        return self._closed

    @property
    def own(self) -> bool:
        """Whether it is of this process, and not inherited by ``fork``."""
        return self._pid == os.getpid()

    def engine(self) -> Engine:
        """The engine that reads, started if need be."""
        return self._start()[0]

    def reading(self, shards: Iterable[Any], counters: Counters, *, optional: bool = False) -> ShardReader:
        """Return a reader of other ``shards``, which goes past the cache, compares nothing and counts in ``counters``.
        ``optional``: they are targets, not rewritten again, and need not exist: a 403 or 404 is not asked again."""
        config = replace(self.config, verify="never")
        options = ReadOptions(
            config=config.taking_refusals() if optional else config,
            counters=counters,
            final=optional or self.options.final,
            storage=self.options.storage,
        )
        return ShardReader(shards, options)

    # For ShardStream

    def _check(self) -> None:
        if not self.own:
            raise ReaderClosed("this reader belongs to the parent process; iterate over the dataset again here")
        if self._closed:
            raise ReaderClosed("this reader was closed; iterate over the dataset again")

    def _start(self) -> tuple[Engine, Pump]:
        if self._engine is None or self._pump is None:
            hand = self._hand
            self._opened_at = time.monotonic()
            self._engine, self._pump = Engine.acquire(self.config, self.counters, hand.events.put, lambda: hand.waiting)
            self._finalizer = weakref.finalize(self, Engine.release, self._engine, self._pump)
        return self._engine, self._pump

    def _top_up(self) -> None:
        """Take shards from the source until enough are ahead."""
        batch: list[tuple[str, Location | WdsError]] = []
        while self._source is not None and len(self._ahead) < self._lookahead:
            try:
                info = next(self._source)
            except StopIteration:
                self._source = None
                break
            except Exception as exn:  # it is raised where its shard would have come
                self._source = None
                self._ahead.append(exn)
                break
            stream = ShardStream(self, info, self._taken)
            if self._verbose:
                logger.warning("shard %d: %s", stream.number, redact(stream.url))
            self._taken += 1
            self._ahead.append(stream)
            batch.append((stream.url, stream.located))
            if getattr(info, "alone", False):  # it changes its name once the next one is taken
                break
        if batch:
            engine, pump = self._start()
            engine.submit(pump.add, batch, ended=self._source is None)

    def _next_event(self) -> Event:
        """The next event, waiting for it if need be."""
        engine, pump = self._start()
        if self._returned:
            returned, self._returned = self._returned, []
            engine.submit(pump.release, returned)
        return self._hand.take(lambda: engine.alive and not self._closed)

    def _give_back(self, slab: Slab) -> None:
        self._returned.append(slab)

    def _skip(self, number: int) -> None:
        engine, pump = self._start()
        engine.submit(pump.skip, number)


class ShardStream:
    """The bytes of one shard, in order.

    ``url`` is as the user wrote it (expanded, before rewriting); ``info`` is the dict that the shard list gave;
    ``number`` counts the shards of this reader from 0.
    """

    def __init__(self, reader: ShardReader, info: str | Mapping[str, Any], number: int) -> None:
        self.number = number
        self.info: dict[str, Any] = {"url": info} if isinstance(info, str) else dict(info)
        self.url: str = os.fspath(self.info["url"])
        self.located: Location | WdsError
        self._local_path: str | None = None
        self._cached: CachedShard | None = None
        try:
            located = locate(self.url, final=reader.options.final, options=reader.options.storage)
            self._local_path = located.path
            if reader.options.cache is not None:
                self._cached = reader.options.cache.entry(located)
                located = replace(located, entry=self._cached)
            self.located = located
        except WdsError as exn:
            self.located = exn
        self._reader = reader
        self._slab: Slab | None = None
        self._piece: memoryview | None = None
        self._shard: Shard | None = None
        self._over = False
        self._left = False
        self._told = False
        self.size: int | None = None
        """Bytes of the whole shard; None while nobody has told."""
        self._open_ended = False
        self._comparison: Comparison | None = None
        self._held: HeldShard | None = None
        if reader._verifier is not None:
            self._comparison, self._held = reader._verifier.held(self, self._received)
        elif reader.config.verify == "auto":
            self._comparison = Comparison(self._brought)

    @property
    def local_path(self) -> str | None:
        """The path of a local file, or of the shard in the cache: where it is or, once it was read to its end, will be
        (unless the cache cannot be written). None for what has no such place."""
        kept = None if self._cached is None else self._cached.local_path
        return self._local_path if kept is None else kept

    @property
    def kept(self) -> bool:
        """Whether it was found in the cache: what is there was compared when it came, where it could be."""
        return self._cached is not None and self._cached.hit

    def read(self) -> memoryview | None:
        """The next piece, valid until the next call; None at the end, again and again.

        Raises an error of the tree where the stream is broken: after all good bytes before it, never in between.
        """
        if self._reader.limit is not None:
            self._reader.limit.check()
        if self._held is None:
            return self._received()
        if not self._held.over:
            self._reader._check()
        return self._held.read()

    def is_open_ended(self) -> bool:
        """Whether it was read to an end that nothing confirms: the server sent no length, so a cut looks the same."""
        return self._open_ended

    def compare(self, comparison: Comparison) -> None:
        """Compare the shard so, and raise `ChecksumMismatch` at its end where it is another."""
        self._comparison = comparison

    def _received(self) -> memoryview | None:
        """The next piece as it comes."""
        self._drop_piece()
        if self._over:
            return None
        self._reader._check()
        event = self._reader._next_event()
        if isinstance(event, Broken):
            self._reader.close()
            raise StorageError(f"{redact(self.url)}: the engine failed: {event.error!r}") from event.error
        assert not isinstance(event, Finished)
        self._shard, self.size = event.shard, event.shard.size
        if isinstance(event, Piece):
            self._slab = event.slab
            try:
                self._piece = event.slab.view[: event.length]
            except ValueError:  # its memory is released: another thread has closed the reader since `_check`
                self._reader._check()
                raise
            if self._comparison is not None and not self._left:
                self._comparison.add(event.shard, self._piece)
            if self._cached is not None and not self._left:
                self._cached.write(self._piece)
            return self._piece
        self._over = True
        error = event.error or self._compared(event.shard)
        self._open_ended = event.shard.open_ended
        whole = error is None and not self._left and not event.shard.end_in_doubt
        self._leave_cache(whole=whole, shard=event.shard)
        if error is not None:
            raise error
        return None

    def _compared(self, shard: Shard) -> WdsError | None:
        """What the end of the shard shows; nothing of one that was left."""
        if self._comparison is None or self._left:
            return None
        try:
            good = self._comparison.judge(shard)
        except WdsError as exn:  # nobody could be asked
            return exn
        if good and self._held is None:
            self._reader.counters.add("verified_shards")
        if good is False and shard.report_bad is not None:
            shard.report_bad()
        return self._comparison.error(self.url) if good is False else None

    def _brought(self, shard: Shard) -> Checksum | None:
        """What ``verify="auto"`` compares by. A copy that another process is fetching is not yet known to be good, nor
        has any answer come."""
        return answer_checksum(shard, may_come=self._cached is not None and shard.streamed)

    def close(self) -> None:
        """Skip the rest of this shard; idempotent."""
        if self._held is not None:
            self._held.close()
        if self._over or self._reader._closed:
            self._drop_piece()
            return
        self._left = True
        self._reader._skip(self.number)
        try:
            while self._received() is not None:
                pass
        except WdsError:
            pass  # of bytes that nobody wanted

    def reject(self) -> None:
        """Say that these bytes are no good shard, and read no more of them: a cache must not keep or use its copy."""
        if self._cached is not None:
            self._cached.reject()
        if self._shard is not None and self._shard.report_bad is not None:
            self._shard.report_bad()
        self.close()

    def _leave_cache(self, *, whole: bool = False, shard: Shard | None = None) -> None:
        cached = self._cached
        if cached is not None and not self._told:
            self._told = True
            self._reader.counters.add("cache_hits" if cached.hit else "cache_misses")
            cached.over(whole=whole, modified=self._modified(shard) if whole and shard is not None else None)

    def _modified(self, shard: Shard) -> float | None:
        """When the object was last changed, as its store says; None where it does not."""
        if self._local_path is None:
            return shard.modified
        with contextlib.suppress(OSError):
            return os.stat(self._local_path).st_mtime
        return None

    def _drop_piece(self) -> None:
        if self._piece is not None:
            self._piece.release()
            self._piece = None
        if self._slab is not None:
            self._reader._give_back(self._slab)
            self._slab = None


def _forget_in_child() -> None:
    """A forked child shares the slabs with its parent, which goes on filling them: it reads no byte more there."""
    for reader in list(_readers):
        reader._closed = True
        with contextlib.suppress(AttributeError, BufferError):  # none is open
            reader._open._piece.release()  # type: ignore[union-attr]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
