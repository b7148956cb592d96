"""A look at shards from plain blocking code: who would read them, and whether their first bytes come.

It goes the engine's way: the same backends, connections, judgement and attempts, on a loop thread of its own that is
there for the time of the look and no longer. One ranged GET a shard is what it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wds_async.config import TransferConfig, transfer_config
from wds_async.errors import FetchTimeout, StorageError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Description, error_for
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import Backends, Location, locate
from wds_async.transfer.bridge import new_event_loop
from wds_async.transfer.fetch import Fetcher, ShardNotes
from wds_async.transfer.origins import ConnectionPool
from wds_async.transfer.slabs import Slab, SlabPool
from wds_async.transfer.stats import Counters
from wds_async.transfer.threads import BlockingThreads
from wds_async.transfer.window import Part, Window
from wds_async.urls import local_path

__all__ = ["HEAD_BYTES", "Probed", "describe", "probe"]

HEAD_BYTES = 512
"""How much of a shard is read: a tar's first header."""

_AT_ONCE = 32
_END_WITHIN_S = 2.0
_LOOK_EVERY_S = 1.0

T = TypeVar("T")

_Job = Callable[["_Engine", Location], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Probed:
    """What a look at one shard found. Where ``error`` is None and ``checked``, it can be read."""

    url: str
    """As the user wrote it (expanded)."""
    size: int | None = None
    """Bytes; None where the answer did not tell, as one without ranges does not."""
    identity: str = ""
    """What pins it while it is read: an ETag, say."""
    head: bytes = b""
    """Its first bytes, at most `HEAD_BYTES`."""
    seconds: float = 0.0
    """From asking until they were there: with names, sign-in, connections and attempts that failed."""
    error: WdsError | None = None
    checked: bool = True
    why: str = ""
    """Why it was not checked."""
    location: Location | None = field(default=None, repr=False)
    """Where it was read: its own store, where AIStore could not be reached (``WDS_AIS_FALLBACK``)."""


def probe(
    urls: Iterable[str],
    options: StorageOptions = NOTHING_GIVEN,
    *,
    config: TransferConfig | None = None,
    timeout_s: float | None = None,
    counters: Counters | None = None,
) -> Iterator[Probed]:
    """Read the first bytes of each of ``urls`` (expanded), many at once, and yield what was found, in their order.

    May be called from any thread, also in a running loop, which it blocks. Nothing is started before the first result
    is asked for, and all is gone with the last one, or when the iterator is closed. Errors are in the results.
    ``timeout_s`` bounds the look at each shard; without it the attempts end as they do in a training (``WDS_RETRIES``,
    ``WDS_TIMEOUT``). What can be read only once, or runs a command (``pipe:``, ``-``, the program's openers, FIFOs), is
    not read: ``checked`` is False.
    """
    config = config or transfer_config()
    located = [_located(url, options) for url in urls]
    look = functools.partial(_look, timeout_s=timeout_s)
    with contextlib.closing(_Run(config, located, look, counters).results()) as results:
        for (url, place), found in zip(located, results, strict=True):
            yield found if isinstance(found, Probed) else Probed(url, error=found, location=_place(place))


def describe(
    urls: Iterable[str], options: StorageOptions = NOTHING_GIVEN, *, config: TransferConfig | None = None
) -> Iterator[tuple[Location | None, Description | WdsError]]:
    """Where each of ``urls`` (expanded) is and how it would be read, in their order; reads no shard.

    Instead of a description there is the error, and no location where that could not be found out."""
    located = [_located(url, options) for url in urls]
    with contextlib.closing(_Run(config or transfer_config(), located, _describe).results()) as results:
        for (_, place), found in zip(located, results, strict=True):
            yield _place(place), found


def _located(url: str, options: StorageOptions) -> tuple[str, Location | WdsError]:
    try:
        return url, locate(url, options=options)
    except WdsError as exn:
        return url, exn


def _place(located: Location | WdsError) -> Location | None:
    return located if isinstance(located, Location) else None


class _Run(Generic[T]):
    """One loop thread, and its results by their numbers."""

    def __init__(
        self,
        config: TransferConfig,
        located: list[tuple[str, Location | WdsError]],
        job: _Job[T],
        counters: Counters | None = None,
    ) -> None:
        self._config = config
        self._located = located
        self._job = job
        self._counters = counters or Counters()
        self._done: queue.SimpleQueue[tuple[int, T | WdsError] | BaseException] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None

    def results(self) -> Iterator[T | WdsError]:
        """What became of each, in order. Ends the thread when it is closed, also by Ctrl-C."""
        pid = os.getpid()
        thread = threading.Thread(target=self._run, name="wds-async-probe", daemon=True)
        thread.start()
        early: dict[int, T | WdsError] = {}
        try:
            for number in range(len(self._located)):
                while number not in early:
                    index, found = self._next(thread)
                    early[index] = found
                yield early.pop(number)
        finally:
            if os.getpid() == pid:  # in a forked child the loop is still the parent's
                self._stop()
                thread.join(_END_WITHIN_S)

    def _next(self, thread: threading.Thread) -> tuple[int, T | WdsError]:
        while True:
            try:
                found = self._done.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                if not thread.is_alive() and self._done.empty():
                    raise StorageError("the look at the shards ended early") from None
                continue
            if isinstance(found, BaseException):
                raise StorageError(f"the look at the shards failed: {found!r}") from found
            return found

    def _stop(self) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()

    # On the thread

    def _run(self) -> None:
        loop = self._loop = new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            self._main = loop.create_task(self._all())
            loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except BaseException as exn:
            self._done.put(exn)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()

    async def _all(self) -> None:
        engine = _Engine(self._config, self._counters)
        try:
            waiting = iter(enumerate(self._located))
            count = min(_AT_ONCE, self._config.connections, len(self._located))
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(self._work(engine, waiting))
                watch = asyncio.ensure_future(engine.watch())
                group.create_task(_cancelled_after(watch, [task for task in group._tasks]))
        finally:
            await engine.close()

    async def _work(self, engine: _Engine, waiting: Iterator[tuple[int, tuple[str, Location | WdsError]]]) -> None:
        for index, (_, located) in waiting:
            found: T | WdsError
            try:
                found = located if isinstance(located, WdsError) else await self._job(engine, located)
            except WdsError as exn:
                found = exn
            self._done.put((index, found))
