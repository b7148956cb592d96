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
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wds_async.background import LoopThread
from wds_async.config import TransferConfig, transfer_config
from wds_async.errors import FetchTimeout, StorageError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Description, Fault, error_for
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import Location, locate
from wds_async.transfer.fetch import Fetcher
from wds_async.transfer.resources import Equipment, why_unread
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.slabs import Slab, SlabPool
from wds_async.transfer.stats import Counters
from wds_async.transfer.window import Part, Shard, Window

__all__ = ["HEAD_BYTES", "Described", "Probed", "describe", "probe"]

HEAD_BYTES = 512
"""How much of a shard is read: a tar's first header."""

_AT_ONCE = 32
_END_WITHIN_S = 2.0
_LOOK_EVERY_S = 1.0
T = TypeVar("T")

Located = tuple[str, Location | WdsError]


@dataclass(frozen=True, slots=True)
class Probed:
    """What a look at one shard found. Where ``error`` is None and ``checked``, it can be read."""

    url: str = field(repr=False)
    """As the user wrote it (expanded)."""
    size: int | None = None
    """Bytes; None where the answer did not tell, as one without ranges does not."""
    version: str = ""
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


@dataclass(frozen=True, slots=True)
class Described:
    """How one shard would be read: ``found`` by its backend, or an ``error`` in its stead."""

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
    """Read the first bytes of each of ``urls`` (expanded), many at once, and yield what was found, in their order.

    May be called from any thread, also in a running loop, which it blocks. Nothing is started before the first result
    is asked for, and all is gone with the last one, or when the iterator is closed. Errors are in the results.
    ``timeout_s`` bounds the look at each shard; without it the attempts end as they do in a training (``WDS_RETRIES``,
    ``WDS_TIMEOUT``). What can be read only once, or runs a command (``pipe:``, ``-``, the program's openers, FIFOs), is
    not read: ``checked`` is False. StorageError where the look itself fails.
    """
    located = [_located(url, options) for url in urls]
    job = functools.partial(_probed, timeout_s=timeout_s)
    with contextlib.closing(_Run(config or transfer_config(), located, job, counters).results()) as results:
        yield from results


def describe(
    urls: Iterable[str],
    options: StorageOptions = NOTHING_GIVEN,
    *,
    config: TransferConfig | None = None,
    timeout_s: float | None = None,
) -> Iterator[Described]:
    """How each of ``urls`` (expanded) would be read, in their order. Reads no shard, but may ask for credentials, for
    which ``timeout_s`` is the bound. Otherwise as `probe`."""
    located = [_located(url, options) for url in urls]
    job = functools.partial(_described, timeout_s=timeout_s)
    with contextlib.closing(_Run(config or transfer_config(), located, job).results()) as results:
        yield from results


def _located(url: str, options: StorageOptions) -> Located:
    try:
        return url, locate(url, options=options)
    except WdsError as exn:
        return url, exn


class _Engine(Equipment):
    """What the engine is made of, without its memory: for parts of a few bytes. Nothing else runs on its loop."""

    def __init__(self, config: TransferConfig, counters: Counters) -> None:
        super().__init__(config, asyncio.get_running_loop())
        slabs = SlabPool(config.budget_bytes, config.part_bytes)  # maps nothing before it is asked
        window = Window(slabs, config, _ignore, _ignore)
        config = config.taking_refusals()
        self.fetcher = Fetcher(window, equipment=self, config=config, counters=counters, hurried=lambda: False)

    async def close(self) -> None:
        """Close all, within a second and a half."""
        await self.close_backends(_END_WITHIN_S * 0.75)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_END_WITHIN_S * 0.1)
        await super().close()


def _ignore(_: object) -> None:
    """A window that plans nothing has nothing to hand on."""


async def _probed(engine: _Engine, url: str, located: Location | WdsError, timeout_s: float | None) -> Probed:
    if isinstance(located, WdsError):
        return Probed(url, error=located)
    state = ShardState(located)
    shard = Shard(0, url, state=state)
    part = Part(shard, 0, HEAD_BYTES, Slab(0, HEAD_BYTES, memoryview(bytearray(HEAD_BYTES))))
    shard.parts.append(part)
    clock = asyncio.get_running_loop().time
    asked_at = clock()
    error: WdsError | None = None
    try:
        async with asyncio.timeout(timeout_s) as bound:
            if why := await why_unread(engine.threads, located):
                return Probed(url, checked=False, why=why, location=located)
            if await engine.fetcher.fetch(part):
                shard.size = part.filled
    except WdsError as exn:
        error = exn
    except TimeoutError:
        if not bound.expired():
            raise
        error = _too_slow(located, timeout_s, state.last_fault)
    finally:
        taken_s = clock() - asked_at
        await state.close()
    head = bytes(part.slab.view[: part.filled])
    return Probed(url, shard.size, shard.version, head, taken_s, error, location=state.location)


async def _described(engine: _Engine, url: str, located: Location | WdsError, timeout_s: float | None) -> Described:
    if isinstance(located, WdsError):
        return Described(url, error=located)
    try:
        backend = engine.backends.of(located)
    except WdsError as exn:  # settings without which there is no backend
        return Described(url, located, error=exn)
    try:
        async with asyncio.timeout(timeout_s) as bound:
            return Described(url, located, await backend.describe(located.target))
    except WdsError as exn:
        return Described(url, located, error=exn)
    except Exception as exn:
        if isinstance(exn, TimeoutError) and bound.expired():
            return Described(url, located, error=_too_slow(located, timeout_s))
        fault = backend.classify(exn, located.target)
        return Described(url, located, error=error_for(fault, redact(located.target), 0, 1))


def _too_slow(location: Location, timeout_s: float | None, fault: Fault | None = None) -> FetchTimeout:
    said = "Check that the endpoint is the right one, and the network between."
    if fault is not None:
        said = f"The last attempt failed: {fault.reason}. {fault.advice}".rstrip()
    return FetchTimeout(f"{redact(location.target)}: no answer within {timeout_s:g} s. {said}")


class _Run(Generic[T]):
    """One job for each shard, at most 32 at once, on one loop thread."""

    def __init__(
        self,
        config: TransferConfig,
        located: Sequence[Located],
        job: Callable[[_Engine, str, Location | WdsError], Awaitable[T]],
        counters: Counters | None = None,
    ) -> None:
        self._config = config
        self._located = located
        self._job = job
        self._counters = counters or Counters()
        self._done: queue.SimpleQueue[tuple[int, T] | BaseException] = queue.SimpleQueue()
        self._jobs: asyncio.Task[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._left = False

    def results(self) -> Generator[T, None, None]:
        """What became of each, in order. The thread ends with it, also when it is closed or by Ctrl-C."""
        pid = os.getpid()
        thread = LoopThread("wds-async-probe")
        thread.submit(self._begin, thread)
        thread.start()
        early: dict[int, T] = {}
        try:
            for number in range(len(self._located)):
                while number not in early:
                    index, found = self._next(thread)
                    early[index] = found
                yield early.pop(number)
        finally:
            if os.getpid() == pid:  # in a forked child loop and thread are the parent's
                thread.submit(self._leave)
                thread.join(_END_WITHIN_S)

    def _next(self, thread: LoopThread) -> tuple[int, T]:
        while True:
            try:
                found = self._done.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                if thread.alive or not self._done.empty():
                    continue
                raise StorageError("the look at the shards ended early") from None
            if isinstance(found, BaseException):
                raise StorageError(f"the look at the shards failed: {found!r}") from found
            return found

    # On the thread

    def _begin(self, thread: LoopThread) -> None:
        self._main = asyncio.get_running_loop().create_task(self._run(thread))

    async def _run(self, thread: LoopThread) -> None:
        try:
            await self._all()
        except BaseException as exn:
            self._done.put(exn)
        finally:
            thread.stop()

    def _leave(self) -> None:
        """Nobody wants the rest. What is being closed is closed all the same."""
        self._left = True
        if self._jobs is not None:
            self._jobs.cancel()

    async def _all(self) -> None:
        engine = _Engine(self._config, self._counters)
        watch = asyncio.ensure_future(engine.watch())
        self._jobs = asyncio.ensure_future(self._do(engine))
        try:
            if self._left:
                self._jobs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._jobs
        finally:
            watch.cancel()
            await engine.close()

    async def _do(self, engine: _Engine) -> None:
        waiting = iter(enumerate(self._located))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_AT_ONCE, self._config.connections, len(self._located))):
                group.create_task(self._work(engine, waiting))

    async def _work(self, engine: _Engine, waiting: Iterator[tuple[int, Located]]) -> None:
        for index, (url, located) in waiting:
            self._done.put((index, await self._job(engine, url, located)))
