"""Deadlines for the clients of others: aiohttp, the clouds' libraries, fsspec's filesystems.

The engine's own connections have clocks (`transfer.connection`). Another client's clock may be missing or fail: aiohttp
3.14 stops its own when the size of a chunk is rubbish, and then waits for ever. So each wait for such a client has a
deadline here as well, which holds even where the client ignores its cancellation: the call is then abandoned. A missed
deadline is a `TimeoutError`, which every backend's `classify` takes for a stall.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from wds_async.storage.base import Access, Backend, BackendWrapper, Checksum, Description, Entry, Location

__all__ = ["BackendWithDeadlines", "Progress", "call_with_deadline", "question_s", "transfer_s", "with_deadline"]

T = TypeVar("T")

_GRACE_S = 0.5  # for a cancelled call to clean up, before it is abandoned
_PAGE = 1000
_SLOWEST_BYTES_S = 64 << 10

_abandoned: set[asyncio.Future[Any]] = set()
"""Calls that did not end when they were cancelled: asyncio itself would forget them while they run."""


def question_s(connect_timeout_s: float, stall_timeout_s: float) -> float:
    """Return seconds for a question that another client answers, such as one page of a listing or a token: longer than
    the client's own limits for two requests, so that where these work, it is they that say what is wrong."""
    return 2 * (connect_timeout_s + stall_timeout_s)


def transfer_s(allowed_s: float, size_bytes: int) -> float:
    """Return seconds for a call that moves ``size_bytes`` and shows nothing of its progress: ``allowed_s``, and what
    they take at 64 KiB a second."""
    return allowed_s + size_bytes / _SLOWEST_BYTES_S


class Progress:
    """Clock of an operation: when it last made progress, by the running loop's clock."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.at_s = self._clock()

    def made(self) -> None:
        """Start the deadline again."""
        self.at_s = self._clock()


async def with_deadline(
    work: Awaitable[T], allowed_s: float, missed: str = "no answer", progress: Progress | None = None
) -> T:
    """Return the result of ``work``, or raise what it raises.

    TimeoutError (``{missed} within {allowed_s} s``) where it makes no progress for ``allowed_s`` seconds: without
    ``progress``, where it is not done by then. It is cancelled in that case, and abandoned where that does not end it;
    so it is where the caller is cancelled. ConnectionError where ``work`` cancels itself.
    """
    clock = asyncio.get_running_loop().time
    task, progress = asyncio.ensure_future(work), progress or Progress()
    try:
        while not task.done():
            left_s = progress.at_s + allowed_s - clock()
            if left_s <= 0:
                raise TimeoutError(f"{missed} within {allowed_s:g} s")
            await asyncio.wait([task], timeout=left_s)
    except BaseException:
        _abandoned.add(task)
        task.add_done_callback(_ended)
        if task.cancel():
            await asyncio.wait([task], timeout=_GRACE_S)
        raise
    if task.cancelled():
        raise ConnectionError("the client cancelled its own call")
    return task.result()


def _ended(task: asyncio.Future[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved: asyncio logs those that are not


def call_with_deadline(allowed_s: float, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``function`` on a daemon thread and return its result, or raise what it raises. TimeoutError where it has
    not returned within ``allowed_s`` seconds: its thread is left behind then. Blocks."""
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as exn:
            errors.append(exn)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="wds-async-call", daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and starts no threads
        return function(*args, **kwargs)
    if not done.wait(allowed_s):
        raise TimeoutError(f"no answer within {allowed_s:g} s")
    if errors:
        raise errors.pop()
    return results.pop()


class BackendWithDeadlines(BackendWrapper):
    """A `Backend` that raises TimeoutError where the client of ``store`` answers nothing for ``allowed_s`` seconds.
    Bodies have deadlines of their own (`http.backend.HttpStream`, `checked.CheckedRanges`,
    `filesystems.FsspecRanges`)."""

    def __init__(self, store: Backend, allowed_s: float) -> None:
        super().__init__(store)
        self._allowed_s = allowed_s

    async def access(self, location: Location) -> Access:
        return await with_deadline(self.store.access(location), self._allowed_s)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        entries: Any = self.store.entries(location)
        try:
            while True:
                progress = Progress()
                page = await with_deadline(_page(entries, progress), self._allowed_s, "nothing more came", progress)
                for entry in page:
                    yield entry
                if len(page) < _PAGE:
                    return
        finally:
            with contextlib.suppress(RuntimeError, TimeoutError):  # one that hangs cannot be closed
                await with_deadline(entries.aclose(), _GRACE_S)

    async def describe(self, location: Location) -> Description:
        return await with_deadline(self.store.describe(location), self._allowed_s)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        return await with_deadline(self.store.remote_checksum(location), self._allowed_s)

    async def create(self, location: Location, data: bytes) -> bool:
        return await with_deadline(self.store.create(location, data), transfer_s(self._allowed_s, len(data)))

    async def remove(self, location: Location) -> None:
        await with_deadline(self.store.remove(location), self._allowed_s)

    async def certainly_creates(self, location: Location) -> bool:
        return await with_deadline(self.store.certainly_creates(location), self._allowed_s)

    async def close(self) -> None:
        await with_deadline(self.store.close(), self._allowed_s)


async def _page(entries: AsyncIterator[Entry], progress: Progress) -> list[Entry]:
    """Return the next thousand, fewer at the end. One task for each entry would cost more than listing it."""
    page: list[Entry] = []
    async for entry in entries:
        progress.made()
        page.append(entry)
        if len(page) == _PAGE:
            break
    return page
