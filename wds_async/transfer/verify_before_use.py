"""``verify="always"`` of one reader: shards held back, compared with what vouches for them, read again if need be."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wds_async.errors import AccessDenied, ReaderClosed, ShardNotFound, TransferError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Checksum
from wds_async.transfer.checksums import ChecksumFuture, RemoteChecksums, cancel_requests, logger, request_checksum
from wds_async.transfer.stats import Counters, Stats
from wds_async.transfer.verify import Comparison, HeldShard, Spool
from wds_async.transfer.window import Shard

if TYPE_CHECKING:
    from wds_async.storage.registry import Location
    from wds_async.transfer.reader import ShardReader, ShardStream

__all__ = ["VerifyBeforeUse"]

_MEMORY_BYTES = 32 << 20
_LOOK_EVERY_S = 1.0
_COUNTED = ("requests", "wire_bytes", "retries")


class VerifyBeforeUse:
    """``folder``: where more than fits into memory is held back; None: the system's for temporary files."""

    def __init__(self, reader: ShardReader, folder: str | None) -> None:
        self._reader: ShardReader = weakref.proxy(reader)  # a cycle would keep its connections until it is collected
        self._pending: set[ChecksumFuture] = set()
        self._within: weakref.WeakSet[ShardReader] = weakref.WeakSet()
        self._spool = Spool(min(_MEMORY_BYTES, reader.config.budget_bytes // 4), folder)
        self._vouching = RemoteChecksums(reader.counters, ask=self._ask, wait=self._wait, small=self._small)

    def held(self, stream: ShardStream, receive: Callable[[], memoryview | None]) -> tuple[Comparison, HeldShard]:
        """How ``stream``, which ``receive`` gives as it comes, is compared, and read."""
        expect = functools.partial(self._expect, stream)
        comparison = Comparison(expect)
        again, told = functools.partial(self._again, stream), functools.partial(self._told, stream)
        held = HeldShard(stream.url, self._spool, comparison, receive=receive, again=again, expect=expect, told=told)
        return comparison, held

    def ahead(self, streams: Iterable[ShardStream | BaseException]) -> None:
        """These come next."""
        located = (stream.located for stream in streams if not isinstance(stream, BaseException))
        self._vouching.ahead(place for place in located if not isinstance(place, WdsError) and _can_be_compared(place))

    def close(self) -> None:
        """The reader is over: say what could not be compared."""
        for reader in list(self._within):  # another thread waits there
            reader.close()
        self._spool.clear()
        self._vouching.close()
        if (pending := list(self._pending)) and self._reader.own:  # else it is the parent's loop
            self._reader.engine().submit(cancel_requests, pending)

    def _expect(self, stream: ShardStream, shard: Shard) -> Checksum | None:
        place = stream.located
        if isinstance(place, WdsError) or stream.kept or not _can_be_compared(place):
            return None
        return self._vouching.find(place, shard.checksum)

    def _told(self, stream: ShardStream, good: bool) -> None:
        if good or not stream.kept:
            self._vouching.told(stream.url, good)

    def _ask(self, place: Location) -> ChecksumFuture:
        engine, asked = self._reader.engine(), ChecksumFuture()
        self._pending.add(asked)
        asked.add_done_callback(self._pending.discard)
        engine.submit(request_checksum, engine.backends, place, self._reader.config.retry, asked)
        return asked

    def _wait(self, asked: ChecksumFuture) -> Checksum | None:
        while True:
            try:
                return asked.result(_LOOK_EVERY_S)
            except concurrent.futures.CancelledError:  # the engine has ended
                raise ReaderClosed("this reader was closed; iterate over the dataset again") from None
            except TimeoutError:
                if asked.done():  # it is what asking raised, or the answer has come at this very moment
                    return asked.result()
                if self._reader.closed or not self._reader.engine().alive:
                    raise ReaderClosed("this reader was closed; iterate over the dataset again") from None

    def _again(self, stream: ShardStream, comparison: Comparison) -> Iterator[memoryview]:
        """The pieces of another reading, past the shard cache. `ChecksumMismatch` at a bad end."""
        counters = Counters(traffic=self._reader.counters.traffic)
        try:
            with self._open([stream.info], counters) as reader:
                for other in reader:
                    other.compare(comparison)
                    while (piece := other.read()) is not None:
                        yield piece
        finally:
            counters.add("retries")
            spent = Stats(*counters.values()).as_dict()
            engine = self._reader.engine()
            for name in _COUNTED:  # those cells are the loop's
                engine.submit(self._reader.counters.add, name, spent[name])

    def _small(self, targets: Sequence[str], limit_bytes: int) -> list[str | None]:
        """See `vouching.Small`. As targets, not as the user's URLs: by the very way of the shard, with its credentials
        for its place, and not rewritten again."""
        found: list[str | None] = []
        counters = Counters(traffic=self._reader.counters.traffic)
        with self._open(targets, counters, optional=True) as reader:
            for stream in reader:
                data = bytearray()
                try:
                    while (piece := stream.read()) is not None and len(data) <= limit_bytes:
                        data += piece
                except (AccessDenied, ShardNotFound):
                    data.clear()  # S3 says 403 of what is not there to whom it does not show the folder
                except (ReaderClosed, TransferError):  # it may be there: without it, nothing is known to be good
                    raise
                except WdsError as exn:
                    logger.warning("%s: the checksum there could not be read: %s", redact(stream.url), exn)
                    data.clear()
                found.append(bytes(data).decode("utf-8", "replace") if 0 < len(data) <= limit_bytes else None)
        return found

    def _open(self, shards: Sequence[Any], counters: Counters, *, optional: bool = False) -> ShardReader:
        opened = self._reader.reading(shards, counters, optional=optional)
        self._within.add(opened)
        return opened


def _can_be_compared(place: Location) -> bool:
    return not place.spec.in_order and (place.path is None or os.path.isfile(place.path))
