"""Byte ranges of many objects at once, from blocking code: `ranges.RangeFetcher` on a loop thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wds_async.background import LoopThread, end_with_parent
from wds_async.config import TransferConfig
from wds_async.errors import ReaderClosed, TruncatedShard
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.transfer.ranges import LARGEST_PART_BYTES, LEAST_RANGES, Facts, RangeFetcher
from wds_async.transfer.rate_limits import OriginLimits
from wds_async.transfer.traffic import Traffic

__all__ = ["RangeReader", "WantedRange"]

_END_WITHIN_S = 2.0
_LOOK_EVERY_S = 1.0
_readers: weakref.WeakSet[RangeReader] = weakref.WeakSet()
_inherited: list[_Running] = []


@dataclass(frozen=True, slots=True)
class WantedRange:
    """Bytes ``[start, stop)`` of the object at ``url``, which ``facts`` are of (None: whatever is there)."""

    url: str
    start: int
    stop: int
    facts: Facts | None = None


class RangeReader:
    """Reader of ranges, all of a call at the same time. Safe for threads; a forked child makes its own connections.

    Nothing is started before the first `read`, and connections are kept from call to call. ``traffic`` counts the
    requests, and ``before_request`` is called before each (see `RangeFetcher`).
    """

    def __init__(
        self,
        config: TransferConfig,
        options: StorageOptions = NOTHING_GIVEN,
        *,
        traffic: Traffic | None = None,
        before_request: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._options = options
        self._traffic = traffic or Traffic()
        self._before_request = before_request
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _readers.add(self)

    def read(self, wanted: Sequence[WantedRange]) -> list[bytearray]:
        """Return the bytes of each range, in order. Raises the first error of the tree that comes; TruncatedShard where
        an object ends within a range, ObjectChanged where it is not that of its facts."""
        return self._start().run(wanted) if wanted else []

    def close(self) -> None:
        """Close the connections and end the thread; idempotent. A later `read` starts again."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._running = self._finalizer = None

    def _start(self) -> _Running:
        with self._lock:
            if self._running is None:
                self._running = _Running(self._config, self._options, self._traffic, self._before_request)
                self._finalizer = weakref.finalize(self, self._running.stop)
                end_with_parent(self._running.stop)
            return self._running

    def _forget(self) -> None:
        """Begin anew in a forked child: sockets and loop are the parent's, and must not be closed here."""
        self._lock = threading.Lock()
        if self._running is not None:
            _inherited.append(self._running)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._running = self._finalizer = None


class _Running:
    """A loop thread with its fetcher."""

    def __init__(
        self,
        config: TransferConfig,
        options: StorageOptions,
        traffic: Traffic,
        before_request: Callable[[], None],
    ) -> None:
        self._arguments = (config, options, traffic, before_request)
        self._part_bytes = min(LARGEST_PART_BYTES, config.part_bytes)
        self._fetcher: RangeFetcher | None = None
        self._compared: set[tuple[str, str]] = set()
        self._thread = LoopThread("wds-async-ranges", at_end=self._end)
        self._thread.start()

    def run(self, wanted: Sequence[WantedRange]) -> list[bytearray]:
        """Return the bytes of each range."""
        closed = ReaderClosed("the reader of ranges was closed while it was read")
        try:
            future = asyncio.run_coroutine_threadsafe(self._read(wanted), self._thread.loop)
        except RuntimeError:  # the loop is closed
            raise closed from None
        while True:
            try:
                return future.result(_LOOK_EVERY_S)
            except concurrent.futures.CancelledError:
                raise closed from None
            except TimeoutError:
                if future.done():  # an error of the transfer, not the end of this wait
                    raise
                if not self._thread.alive:
                    raise closed from None
            except BaseException:
                future.cancel()
                raise

    def stop(self) -> None:
        """End the thread and close the connections."""
        self._thread.stop()
        self._thread.join(_END_WITHIN_S)

    async def _read(self, wanted: Sequence[WantedRange]) -> list[bytearray]:
        if self._fetcher is None:
            config, options, traffic, before_request = self._arguments
            self._fetcher = RangeFetcher(
                config,
                memory_bytes=config.budget_bytes,
                traffic=traffic,
                # One origin may have all the connections: the limit of all together leaves some free.
                limits=OriginLimits(config.connections + config.connections // 4 + 1, config.connections),
                options=options,
                before_request=before_request,
            )
        buffers = [bytearray(one.stop - one.start) for one in wanted]
        may_batch = len(wanted) >= LEAST_RANGES and self._fetcher.batches(wanted[0].url)
        try:
            filled = await self._batched(self._fetcher, wanted, buffers) if may_batch else ()
            async with asyncio.TaskGroup() as group:
                for i, (one, buffer) in enumerate(zip(wanted, buffers, strict=True)):
                    for at in range(0, 0 if i in filled else len(buffer), self._part_bytes):
                        group.create_task(self._fill(self._fetcher, one, buffer, at))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if may_batch:
            self._compared.update((one.url, one.facts.version) for one in wanted if one.facts is not None)
        return buffers

    async def _batched(
        self, fetcher: RangeFetcher, wanted: Sequence[WantedRange], buffers: Sequence[bytearray]
    ) -> set[int]:
        """Fill the buffers of ranges that come in batches; return their numbers. As a batch does not tell the versions
        of its objects, one that must have a version is not among them before a range of it was read by itself."""
        may = [i for i, one in enumerate(wanted) if one.facts is None or (one.url, one.facts.version) in self._compared]
        filled = await fetcher.batch([(wanted[i].url, wanted[i].start, buffers[i]) for i in may])
        return {may[n] for n in filled}

    async def _fill(self, fetcher: RangeFetcher, one: WantedRange, buffer: bytearray, at: int) -> None:
        """Read the part that begins at ``at`` in ``buffer``."""
        stop = min(at + self._part_bytes, len(buffer))
        async with fetcher.part(one.url, one.start + at, one.start + stop, one.facts) as part:
            buffer[at : at + len(part.view)] = part.view
            if len(part.view) < stop - at:
                shown, end = redact(one.url), one.start + at + len(part.view)
                raise TruncatedShard(
                    f"{shown}: it ends at byte {end}, and bytes {one.start} to {one.stop} were wanted; it was cut or "
                    "replaced since its index was made"
                ).at(shown, end)

    async def _end(self) -> None:
        if self._fetcher is not None:
            await self._fetcher.close()


def _forget_in_child() -> None:
    for reader in list(_readers):
        reader._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
