"""Probe of shards from blocking code: how they would be read, and their first bytes.

It uses the engine's backends, connections and retries, on a loop thread of its own. Each shard costs one ranged GET.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from wds_async.background import LoopThread
from wds_async.config import TransferConfig, transfer_config
from wds_async.errors import FetchTimeout, StorageError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Description, Fault, Location, error_for
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.transfer.fetch import Fetcher
from wds_async.transfer.options import ReadOptions
from wds_async.transfer.resources import Resources, why_unread
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.slabs import Slab, SlabPool
from wds_async.transfer.stats import Counters
from wds_async.transfer.window import Part, Shard, Window

__all__ = ["HEAD_BYTES", "Described", "Probed", "describe", "probe"]

HEAD_BYTES = 512
"""Bytes of a shard that are read: a tar's first header."""

_AT_ONCE = 32
_AHEAD = 1024
_END_WITHIN_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of the probe of one shard. Where ``error`` is None and ``checked``, it can be read."""

    url: str = field(repr=False)
    """As the user wrote it (expanded)."""
    size: int | None = None
    """Bytes; None where the answer did not give it, as one without ranges does not."""
    version: str = ""
    """Version that pins it while it is read: an ETag, say."""
    head: bytes = b""
    """First bytes, at most `HEAD_BYTES`."""
    seconds: float = 0.0
    """From the request to these bytes: with names, sign-in, connections and attempts that failed."""
    error: WdsError | None = None
    checked: bool = True
    why: str = ""
    """Reason why it was not checked."""
    location: Location | None = field(default=None, repr=False)
    """Place where it was read: its own store, if AIStore could not be reached (``WDS_AIS_FALLBACK``)."""


@dataclass(frozen=True, slots=True)
class Described:
    """Description of one shard by its backend, or an ``error`` in its stead."""

    url: str = field(repr=False)
    location: Location | None = field(default=None, repr=False)
    found: Description | None = None
    error: WdsError | None = None


def probe(
    urls: Iterable[str],
    options: StorageOptions = NOTHING_GIVEN,
    *,
    config: TransferConfig | None = None,
    timeout_s: float | None = None,
    counters: Counters | None = None,
) -> Iterator[Probed]:
    """Read the first bytes of each of ``urls`` (expanded), many at once, and yield the results in their order.

    May be called from any thread, also in a running loop, which it blocks. Nothing is started before the first result
    is requested, and all is gone with the last one, or when the iterator is closed. Errors are in the results.
    ``timeout_s`` bounds the probe of each shard; without it the attempts end as they do in a training (``WDS_RETRIES``,
    ``WDS_TIMEOUT``). What can be read only once, or runs a command (``pipe:``, ``-``, the program's openers, FIFOs), is
    not read: ``checked`` is False. StorageError where the probe itself fails.
    """
    return _run(_Prober.probe, urls, options, config, timeout_s, counters)


def describe(
    urls: Iterable[str],
    options: StorageOptions = NOTHING_GIVEN,
    *,
    config: TransferConfig | None = None,
    timeout_s: float | None = None,
) -> Iterator[Described]:
    """Describe how each of ``urls`` (expanded) would be read, in their order. Reads no shard, but may request
    credentials, for which ``timeout_s`` is the bound. Otherwise as `probe`."""
    return _run(_Prober.describe, urls, options, config, timeout_s, None)


def _run(
    job: Callable[[_Prober, str], Awaitable[T]],
    urls: Iterable[str],
    options: StorageOptions,
    config: TransferConfig | None,
    timeout_s: float | None,
    counters: Counters | None,
) -> Generator[T]:
    """Yield the results of ``job`` for each URL, in order, some of them at once, on one loop thread. It ends with this
    generator, also when that is closed or by Ctrl-C."""
    pid, waiting = os.getpid(), iter(list(urls))
    prober = _Prober(config or transfer_config(), options, timeout_s, counters or Counters())
    thread = prober.thread
    thread.start()
    thread.submit(prober.watch)
    try:
        results: deque[concurrent.futures.Future[T]] = deque()
        while True:
            for url in itertools.islice(waiting, _AHEAD - len(results)):
                results.append(asyncio.run_coroutine_threadsafe(prober.limited(job, url), thread.loop))
            if not results:
                return
            try:
                result = results.popleft().result()
            except Exception as exn:
                raise StorageError(f"the probe of the shards failed: {exn!r}") from exn
            yield result
    finally:
        if os.getpid() == pid:  # in a forked child loop and thread are the parent's
            thread.stop()
            thread.join(_END_WITHIN_S)


class _Prober:
    """The engine's resources, without its memory: for parts of a few bytes."""

    def __init__(
        self, config: TransferConfig, options: StorageOptions, timeout_s: float | None, counters: Counters
    ) -> None:
        self.thread = LoopThread("wds-async-probe", at_end=self.close)
        self._resources = Resources(config, self.thread.loop)
        window = Window(SlabPool(config.budget_bytes, config.part_bytes), config, lambda _: None, lambda _: None)
        read = ReadOptions(config=config.taking_refusals(), counters=counters)
        self._fetcher = Fetcher(window, self._resources, read, hurried=lambda: False)
        self._options, self._timeout_s = options, timeout_s
        self._gate = asyncio.Semaphore(min(_AT_ONCE, config.connections))
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Start to look for stalled connections; on the loop."""
        self._watching = asyncio.get_running_loop().create_task(self._resources.watch())

    async def limited(self, job: Callable[[_Prober, str], Awaitable[T]], url: str) -> T:
        """Return the result of ``job``, of which some run at once."""
        async with self._gate:
            return await job(self, url)

    async def close(self) -> None:
        """Close all, within a second and a half."""
        await self._resources.close_backends(_END_WITHIN_S * 0.75)
        await self._resources.close()

    async def probe(self, url: str) -> Probed:
        """Read the first bytes of ``url``."""
        try:
            location = locate(url, options=self._options)
        except WdsError as exn:
            return Probed(url, error=exn)
        state = ShardState(location)
        shard = Shard(0, url, state=state)
        part = Part(shard, 0, HEAD_BYTES, Slab(0, HEAD_BYTES, memoryview(bytearray(HEAD_BYTES))))
        shard.parts.append(part)
        clock, size = asyncio.get_running_loop().time, None
        began = clock()
        error: WdsError | None = None
        try:
            async with asyncio.timeout(self._timeout_s) as bound:
                if why := await why_unread(self._resources.threads, location):
                    return Probed(url, checked=False, why=why, location=location)
                if await self._fetcher.fetch(part):
                    size = part.filled
        except WdsError as exn:
            error = exn
        except TimeoutError:
            if not bound.expired():
                raise
            error = self._too_slow(location, state.last_fault)
        finally:
            took_s = clock() - began
            await state.close()
        head, size = bytes(part.slab.view[: part.filled]), shard.size if size is None else size
        return Probed(url, size, state.version, head, took_s, error, location=state.location)

    async def describe(self, url: str) -> Described:
        """Describe how ``url`` would be read."""
        try:
            location = locate(url, options=self._options)
        except WdsError as exn:
            return Described(url, error=exn)
        try:
            backend = self._resources.backends.of(location)
        except WdsError as exn:  # settings without which there is no backend
            return Described(url, location, error=exn)
        try:
            async with asyncio.timeout(self._timeout_s) as bound:
                return Described(url, location, await backend.describe(location))
        except WdsError as exn:
            return Described(url, location, error=exn)
        except Exception as exn:
            if isinstance(exn, TimeoutError) and bound.expired():
                return Described(url, location, error=self._too_slow(location))
            fault = backend.classify(exn, location)
            return Described(url, location, error=error_for(fault, redact(location.target), 0, 1))

    def _too_slow(self, location: Location, fault: Fault | None = None) -> FetchTimeout:
        advice = "Check that the endpoint is the right one, and the network between."
        if fault is not None:
            advice = f"The last attempt failed: {fault.reason}. {fault.advice}".rstrip()
        return FetchTimeout(f"{redact(location.target)}: no answer within {self._timeout_s:g} s. {advice}")
