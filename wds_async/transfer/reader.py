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
from dataclasses import replace
from typing import Any, NoReturn

from wds_async.config import TransferConfig, settings, transfer_config
from wds_async.errors import ReaderClosed, StorageError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Checksum, Location
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.transfer.checksums import Comparison, HeldShard, Verifier
from wds_async.transfer.engine import Engine, Pump, QueuedShard
from wds_async.transfer.options import CachedShard, Limit, ReadOptions, ShardCache, Span
from wds_async.transfer.remote_engine import RemoteEngine, RemotePump, acquire, event_queue
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.slabs import Slab
from wds_async.transfer.stats import Board, Counters
from wds_async.transfer.window import End, Event, Finished, Piece, Shard

__all__ = [
    "CachedShard",
    "InterleavedReader",
    "ReadOptions",
    "ShardCache",
    "ShardReader",
    "ShardStream",
    "open_shards",
]

logger = logging.getLogger("wds_async")

_PENDING = Checksum("crc32c", b"")
"""A CRC-32C that may come with a later answer."""

_readers: weakref.WeakSet[ShardReader] = weakref.WeakSet()


def open_shards(
    shards: Iterable[str | Mapping[str, Any]],
    *,
    config: TransferConfig | None = None,
    stats: Counters | None = None,
    lookahead: int | None = None,
    final: bool = False,
    cache: ShardCache | None = None,
    options: StorageOptions = NOTHING_GIVEN,
    interleave: int = 1,
) -> ShardReader:
    """Read ``shards`` (URLs, or dicts with a ``url``) one after another, fetching ahead within the byte budget.

    A dict may have ``start`` (default 0) and ``stop`` (default None: the end): only these bytes of the stored object
    are requested and delivered. They end where the object does, if that is before ``stop``; TruncatedShard where it has
    none of them, unless none are wanted. ConfigError in the place of a shard whose span is none. Checksums are those of
    whole objects, so a span is not compared with one, whatever ``verify`` says, and a disk cache keeps no span. With
    ``version`` (of `ShardStream.version`) the object must have that version, or `ObjectChanged` is raised. With
    ``crc32c`` (eight hexadecimal digits) its bytes are compared with that and no other checksum, unless ``verify`` is
    "never"; a span is not.

    Nothing is started before the first shard is requested. ``config`` and ``stats`` default to new ones; for the rest
    see `ReadOptions`. With ``interleave`` the reader is an `InterleavedReader`.
    """
    chosen = ReadOptions(
        config=config or transfer_config(),
        counters=stats or Board().counters(),
        lookahead=lookahead,
        final=final,
        cache=cache,
        storage=options,
        interleave=interleave,
    )
    return ShardReader(shards, chosen) if interleave == 1 else InterleavedReader(shards, chosen)


class ShardReader(Iterator["ShardStream"]):
    """Iterator of `ShardStream`; also a context manager. Each shard ends when the next one is requested.

    `close` (also by ``with``, by garbage collection and at exit) stops all transfers and frees their memory.
    """

    def __init__(self, shards: Iterable[str | Mapping[str, Any]], options: ReadOptions) -> None:
        self.options = options
        self.config, self.counters = options.config, options.counters
        self.limit: Limit | None = None  # set by the caller that made the reader
        self.closed = False
        """True if `close` was called, or the last shard is over."""
        self._source: Iterator[str | Mapping[str, Any]] | None = iter(shards)
        self._lookahead = max(1, self.config.connections if options.lookahead is None else options.lookahead)
        self._ahead: deque[ShardStream | BaseException] = deque()
        self._open: list[ShardStream] = []
        self._arrived: dict[int, deque[Piece | End]] = {}
        """By the number of a shard, events that came while another one was waited for."""
        self._events = event_queue(options)
        self._pid = os.getpid()
        self._started: tuple[Engine | RemoteEngine, Pump | RemotePump] | None = None
        self._finalizer: weakref.finalize[Any, ShardReader] | None = None
        self._returned: list[Slab] = []
        self._taken = 0
        self._verbose = settings().verbose > 0
        self._opened_at = time.monotonic()
        self._verifier: Verifier | None = None
        if self.config.verify == "always":
            folder: Any = getattr(options.cache, "folder", None)
            self._verifier = Verifier(self, None if folder is None else str(folder), options.interleave)
        _readers.add(self)

    def __iter__(self) -> ShardReader:
        return self

    def __next__(self) -> ShardStream:
        self._check()
        while self._open:
            self._open.pop().close()
        self._top_up()
        if not self._ahead:
            self._check()  # closed meanwhile by another thread, it has not come to its end
            self.close()
            raise StopIteration
        return self._begin_next()

    def _begin_next(self) -> ShardStream:
        following = self._ahead.popleft()
        if isinstance(following, BaseException):
            self.close()
            raise following
        self._open.append(following)
        if following._cached is not None:
            following._cached.want()
        if self._verifier is not None:
            self._verifier.request_ahead((following, *self._ahead))
        return following

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading; idempotent. A later read raises `ReaderClosed`."""
        if self.closed:
            return
        self.closed = True
        self._source = None
        for stream in self._open:
            stream._drop_piece()
            stream._leave_cache()
        for following in self._ahead:
            if isinstance(following, ShardStream):
                following._leave_cache()
        self._ahead.clear()
        self._arrived.clear()
        if self._verifier is not None:
            self._verifier.close()
        if self._finalizer is not None:
            self._finalizer()
        self._events.put(Finished())  # wakes a thread that waits for an event
        self.counters.add("read_s", time.monotonic() - self._opened_at)
        self._events.clock.stop()
        if self.limit is not None:
            self.limit.over()

    def engine(self) -> Engine:
        """Return the engine that reads, started if need be; for ``verify="always"`` it is in this process."""
        engine = self._start()[0]
        assert isinstance(engine, Engine)
        return engine

    def reading(self, shards: Iterable[Any], counters: Counters, *, optional: bool = False) -> ShardReader:
        """Return a reader of other ``shards``, which goes past the cache, compares nothing and counts in ``counters``.
        ``optional``: they are targets, not rewritten again, and need not exist: a 403 or 404 is not retried."""
        config = replace(self.config, verify="never")
        config = config.taking_refusals() if optional else config
        final = optional or self.options.final
        return ShardReader(
            shards, ReadOptions(config=config, counters=counters, final=final, storage=self.options.storage)
        )

    # For ShardStream

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ReaderClosed("this reader belongs to the parent process; iterate over the dataset again here")
        if self.closed:
            raise ReaderClosed("this reader was closed; iterate over the dataset again")

    def _start(self) -> tuple[Engine | RemoteEngine, Pump | RemotePump]:
        if self._started is None:
            self._opened_at = time.monotonic()
            engine, pump = self._started = acquire(self.options, self._events)
            self._finalizer = weakref.finalize(self, engine.release, pump)  # type: ignore[arg-type]  # they are a pair
        return self._started

    def _top_up(self) -> None:
        """Take shards from the source until enough are ahead."""
        batch: list[QueuedShard] = []
        while self._source is not None and len(self._ahead) < self._lookahead:
            try:
                info = next(self._source)
                stream = ShardStream(self, info, self._taken)
            except StopIteration:
                self._source = None
                break
            except Exception as exn:  # it is raised where its shard would have come
                self._source = None
                self._ahead.append(exn)
                break
            if self._verbose:
                logger.warning("shard %d: %s", stream.number, redact(stream.url))
            self._taken += 1
            self._ahead.append(stream)
            batch.append((stream.number, stream.url, stream.located, stream.span))
            if getattr(info, "alone", False):  # it changes its name once the next one is taken
                break
        if batch:
            engine, pump = self._start()
            engine.submit(pump.add, batch, ended=self._source is None)

    def _next_event(self, stream: ShardStream) -> Piece | End:
        """Return the next event of ``stream``, waiting for it if need be."""
        engine = self._give_back()
        while stream.number not in self._arrived:
            event = self._events.get(lambda: engine.alive and not self.closed)
            if not isinstance(event, Finished) and event.shard.number == stream.number:
                return event
            self._keep(event, stream.url)
        events = self._arrived[stream.number]
        event = events.popleft()
        if not events:
            del self._arrived[stream.number]
        return event

    def _keep(self, event: Event, url: str = "") -> None:
        if not isinstance(event, Finished):
            self._arrived.setdefault(event.shard.number, deque()).append(event)
        elif event.error is not None:
            self._fail(event, url)
        else:
            self._check()

    def _give_back(self) -> Engine | RemoteEngine:
        """Give the engine the memory that was read, and return it."""
        engine, pump = self._start()
        if self._returned:
            returned, self._returned = self._returned, []
            engine.submit(pump.release, returned)
        return engine

    def _fail(self, event: Finished, url: str) -> NoReturn:
        self.close()
        raise StorageError(f"{redact(url)}: the engine failed: {event.error!r}") from event.error


class InterleavedReader(ShardReader):
    """Iterator of `ShardStream`, of which up to ``options.interleave`` may be open at once, to be read in any order:
    each until its `ShardStream.close`, or its end."""

    def __next__(self) -> ShardStream:
        self._check()
        self._open = [stream for stream in self._open if not stream._over]
        self._top_up()
        if not self._ahead:
            self._check()  # closed meanwhile by another thread, it has not come to its end
            raise StopIteration  # and the others are read on
        following = self._begin_next()
        engine, pump = self._start()
        engine.submit(pump.opened, following.number)
        return following

    def has_arrived(self, stream: ShardStream) -> bool:
        """Return whether bytes of ``stream`` are there that were not read, or its end is."""
        while (event := self._events.poll()) is not None:
            self._keep(event)
        return stream._over or stream.number in self._arrived

    def wait(self) -> None:
        """Wait until bytes of any shard come; not if none are on their way."""
        engine = self._give_back()
        with contextlib.suppress(ReaderClosed):
            self._keep(self._events.get(lambda: engine.alive and not self.closed and self._events.flying > 0))


class ShardStream:
    """The bytes of one shard, in order.

    ``url`` is as the user wrote it (expanded, before rewriting); ``info`` is the dict that the shard list gave;
    ``number`` counts the shards of this reader from 0. Its bytes are those from ``start`` to ``stop`` (None: the end);
    ``size`` is that of the whole object, None until an answer gives it.
    """

    def __init__(self, reader: ShardReader, info: str | Mapping[str, Any], number: int) -> None:
        self.number = number
        self.info: dict[str, Any] = {"url": info} if isinstance(info, str) else dict(info)
        self.url: str = os.fspath(self.info["url"])
        self.span = span = Span.of(self.info)
        self.located: Location | WdsError
        self.size: int | None = None
        self._cached: CachedShard | None = None
        self._cache_left = False
        try:
            self.located = locate(self.url, final=reader.options.final, options=reader.options.storage)
            if reader.options.cache is not None:
                self._cached = reader.options.cache.entry(self.located, whole=span.whole)
                self.located = replace(self.located, entry=self._cached)
        except WdsError as exn:
            self.located = exn
        self._reader = reader
        self._slab: Slab | None = None
        self._piece: memoryview | None = None
        self._shard: Shard | None = None
        self._over = False
        self._left = False
        self._comparison: Comparison | None = None
        self._held: HeldShard | None = None
        if not span.whole:  # checksums are those of whole objects
            return
        if reader._verifier is not None:
            self._held = HeldShard(self, self._received, reader._verifier)
            self._comparison = self._held.comparison
        elif reader.config.verify == "auto":
            self._comparison = Comparison(self._crc32c, span.checksum)

    @property
    def start(self) -> int:
        """Offset of its first byte in the object."""
        return self.span.start

    @property
    def stop(self) -> int | None:
        """Offset behind its last byte in the object; None: that is the object's end."""
        return self.span.stop

    @property
    def version(self) -> str:
        """Version of the object (its ETag, or another text that changes with it), once its first bytes have come; ""
        while it is not known, and where nothing tells it. Of a copy in a disk cache only the size is known."""
        state: ShardState | None = None if self._shard is None else self._shard.state
        return "" if state is None else state.version

    @property
    def local_path(self) -> str | None:
        """The path of a local file, or of the shard in the cache: where it is or, once it was read to its end, will be
        (unless the cache cannot be written). None for what has no such place."""
        kept = None if self._cached is None else self._cached.local_path
        return self._file_path if kept is None else kept

    @property
    def kept(self) -> bool:
        """True if the cache had it. Such a copy was compared with its checksum when it was fetched, where there was
        one.
        """
        return self._cached is not None and self._cached.hit

    def read(self) -> memoryview | None:
        """Return the next piece, valid until the next call; None at the end, again and again.

        Raises an error of the tree where the stream is broken: after all good bytes before it, never in between.
        """
        if self._reader.limit is not None:
            self._reader.limit.check()
        if self._held is None:
            return self._received()
        if not self._held.over:
            self._reader._check()
        return self._held.read()

    def others(self, start: int, stop: int) -> ShardReader:
        """Return a reader of bytes ``[start, stop)`` of the same object, which must have this version."""
        info = {"url": self.url, "start": start, "stop": stop, "version": self.version}
        return ShardReader([info], replace(self._reader.options, lookahead=1, interleave=1))

    def is_open_ended(self) -> bool:
        """Return whether it was read to an end that nothing confirms: without a length, a cut looks the same."""
        return self._shard is not None and self._over and self._shard.state is not None and self._shard.state.open_ended

    def compare(self, comparison: Comparison) -> None:
        """Use ``comparison``, and raise `ChecksumMismatch` at the end of a shard that does not match."""
        self._comparison = comparison

    def close(self) -> None:
        """Skip the rest of this shard; idempotent."""
        if self._held is not None:
            self._held.close()
        if self._over or self._reader.closed:
            self._drop_piece()
            return
        self._left = True
        engine, pump = self._reader._start()
        engine.submit(pump.skip, self.number)
        with contextlib.suppress(WdsError):  # of bytes that are not wanted
            while self._received() is not None:
                pass

    def reject(self) -> None:
        """Read no more of these bytes, which are no good shard: a cache must not keep or use its copy."""
        if self._cached is not None:
            self._cached.reject()
        if self._shard is not None and self._shard.state is not None:
            self._shard.state.report_bad()
        self.close()

    def _received(self) -> memoryview | None:
        """Return the next piece as it comes."""
        self._drop_piece()
        if self._over:
            return None
        self._reader._check()
        event = self._reader._next_event(self)
        self._shard = shard = event.shard
        self.size = shard.size
        if isinstance(event, Piece):
            self._slab = event.slab
            try:
                self._piece = event.slab.view[: event.length]
            except ValueError:  # its memory is released: another thread has closed the reader since `_check`
                self._reader._check()
                raise
            if not self._left:
                if self._comparison is not None:
                    self._comparison.add(shard.state, self._piece)
                if self._cached is not None:
                    self._cached.write(self._piece)
            return self._piece
        self._over = True
        error = shard.error or self._mismatch(shard.state)
        whole = error is None and not self._left and not shard.state.end_in_doubt
        self._leave_cache(whole=whole, modified=self._modified(shard.state) if whole else None)
        if error is not None:
            raise error
        return None

    def _mismatch(self, state: ShardState) -> WdsError | None:
        """Return the error of a shard whose bytes are not those expected; none of one that was left."""
        if self._comparison is None or self._left:
            return None
        try:
            good = self._comparison.matches(state)
        except WdsError as exn:  # the checksum could not be requested
            return exn
        if good and self._held is None:
            self._reader.counters.add("verified_shards")
        if good is False:
            state.report_bad()
            if self._cached is not None and self._cached.hit:
                self._cached.reject()
            return self._comparison.error(self.url)
        return None

    def _crc32c(self, state: ShardState) -> Checksum | None:
        """Return the checksum of ``verify="auto"``: the CRC-32C of an answer. That of a copy which another process is
        fetching may come later, if the shard is read to its end from its store."""
        checksum, shard = state.checksum, self._shard
        if checksum is None:
            return _PENDING if self._cached is not None and shard is not None and shard.streamed else None
        return checksum if checksum.algorithm == "crc32c" else None

    def _leave_cache(self, *, whole: bool = False, modified: float | None = None) -> None:
        cached = self._cached
        if cached is not None and not self._cache_left:
            self._cache_left = True
            self._reader.counters.add("cache_hits" if cached.hit else "cache_misses")
            cached.over(whole=whole, modified=modified)

    @property
    def _file_path(self) -> str | None:
        return None if isinstance(self.located, WdsError) else self.located.path

    def _modified(self, state: ShardState) -> float | None:
        """Return the last change of the object, if its store or file system gives it."""
        path = self._file_path
        if path is None:
            return state.modified
        with contextlib.suppress(OSError):
            return os.stat(path).st_mtime
        return None

    def _drop_piece(self) -> None:
        if self._piece is not None:
            self._piece.release()
            self._piece = None
        if self._slab is not None:
            self._reader._returned.append(self._slab)
            self._slab = None


def _forget_in_child() -> None:
    """Stop reading in a forked child, which shares the slabs with its parent; the parent goes on filling them."""
    for reader in list(_readers):
        reader.closed = True
        for stream in reader._open:
            with contextlib.suppress(AttributeError, BufferError):  # it has none
                stream._piece.release()  # type: ignore[union-attr]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
