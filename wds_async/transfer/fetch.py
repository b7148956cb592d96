"""One part with its attempts: chooses the way, tries again where that can help, and gives up with the whole story."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wds_async.config import TransferConfig
from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.storage.base import (
    Access,
    Backend,
    Fault,
    LocalFile,
    Ranges,
    RefusedAnswer,
    Request,
    Stream,
    Verdict,
    error_for,
)
from wds_async.storage.growing import CopiedFile, GrowingStream, StoodStill
from wds_async.storage.registry import Backends, Location
from wds_async.transfer.connection import Origin
from wds_async.transfer.direct import IdentityChanged, RangesIgnored, Redirected, follow, get_part
from wds_async.transfer.files import FileReader, FileReplaced
from wds_async.transfer.origins import ConnectionPool
from wds_async.transfer.stats import Counters
from wds_async.transfer.streams import DirectStream, StreamReader
from wds_async.transfer.threads import BlockingThreads
from wds_async.transfer.window import Part, Shard, Window

__all__ = ["Fetcher", "ShardNotes"]

logger = logging.getLogger("wds_async")

_REDIRECTS_AT_MOST = 10
_UNREADY_WAIT_S = 0.02
_MOVED_AWAY = frozenset({401, 403, 404, 410})
_RENEWALS_AT_MOST = 3
_UNREACHABLE_FOR_S = 60.0


@dataclass(slots=True, eq=False)
class ShardNotes:
    """What fetching remembers of a shard between its parts."""

    location: Location
    access: asyncio.Future[Access] | None = None
    moved: Request | None = None
    files: dict[LocalFile, FileReader] = field(default_factory=dict)
    stream: StreamReader | None = None
    etag: str = ""
    fault: Fault | None = None
    """What was wrong last, for who gives up before the attempts do."""


@dataclass(slots=True)
class _Attempts:
    """The attempts of one part since its last new byte, the last one with ``access``, at ``location``."""

    since: float
    count: int = 0
    bytes: int = 0
    renewals: int = 0
    access: Access | None = None
    location: Location | None = None

    def progress(self, filled: int, now: float) -> None:
        if filled > self.bytes:
            self.count, self.renewals, self.since, self.bytes = 0, 0, now, filled


class _Unready(Exception):
    """The part must wait for an earlier one of its shard."""


class Fetcher:
    """Fetches the parts of one window. ``hurried`` says whether the consumer is waiting right now."""

    def __init__(
        self,
        window: Window,
        *,
        backends: Backends,
        pool: ConnectionPool,
        threads: BlockingThreads,
        config: TransferConfig,
        counters: Counters,
        hurried: Callable[[], bool],
    ) -> None:
        self.answering: Part | None = None
        self._window = window
        self._backends = backends
        self._pool = pool
        self._threads = threads
        self._config = config
        self._counters = counters
        self._hurried = hurried
        self._rng = random.Random()
        self._unreachable_until: dict[str, float] = {}

    async def fetch(self, part: Part) -> bool:
        """Fill ``part``; True where a streamed shard ends behind it. Raises one error of the tree."""
        shard = part.shard
        clock = asyncio.get_running_loop().time
        attempts = _Attempts(since=clock(), bytes=part.filled)
        while True:
            backend = self._backends.of(self._location(shard))
            try:
                return await self._once(backend, part, attempts)
            except WdsError:
                raise
            except _Unready:  # no fault: the part before it lands some time, or ends the shard
                await asyncio.sleep(_UNREADY_WAIT_S)
            except Exception as exn:
                attempts.progress(part.filled, clock())
                fault = self._explain(backend, exn, shard)
                if not self._renew(shard, attempts, fault):
                    await self._again(part, attempts, fault, exn)

    async def close(self, notes: ShardNotes) -> None:
        """Release what a shard that is over holds."""
        if notes.access is not None:
            notes.access.cancel()
        if notes.stream is not None:
            await notes.stream.close()
        for file in notes.files.values():
            file.close()

    async def _again(self, part: Part, attempts: _Attempts, fault: Fault, exn: Exception) -> None:
        """Wait until the next attempt, or raise what the last one means."""
        now = asyncio.get_running_loop().time()
        attempts.count += 1
        shard, retry = part.shard, self._config.retry
        shard.notes.fault = fault
        again = fault.verdict.again and fault.verdict is not Verdict.EXPIRED and self._restartable(shard)
        known = self._origin_known(shard)
        if not again or retry.gives_up(attempts.count, now - attempts.since, origin_known=known):
            if again and await self._leave(shard, attempts.location, fault):
                attempts.count, attempts.since = 0, now
                return
            url = redact(shard.notes.location.url)
            raise error_for(fault, url, part.start + part.filled, attempts.count) from exn
        self._counters.add("retries")
        logger.info(
            "%s at byte %d: %s; attempt %d follows",
            redact(shard.url),
            part.start + part.filled,
            fault.reason,
            attempts.count + 1,
        )
        await asyncio.sleep(retry.delay_s(attempts.count, self._rng, fault.retry_after_s))

    def _renew(self, shard: Shard, attempts: _Attempts, fault: Fault) -> bool:
        """Whether the backend has another request to try, now that this one has lapsed."""
        if fault.verdict is not Verdict.EXPIRED or attempts.renewals >= _RENEWALS_AT_MOST:
            return False
        attempts.renewals += 1
        _drop(shard.notes, attempts.access)
        logger.info("%s: %s; asked for another request", redact(shard.url), fault.reason)
        return True

    def _location(self, shard: Shard) -> Location:
        """Where the shard is read now: a store that could not be reached a moment ago is not asked again."""
        location: Location = shard.notes.location
        unreachable = self._unreachable_until.get(location.kind, 0.0) > time.monotonic()
        if location.fallback is not None and unreachable and shard.notes.access is None:
            shard.notes.location = location.fallback
        found: Location = shard.notes.location
        return found

    async def _leave(self, shard: Shard, left: Location | None, fault: Fault) -> bool:
        """Go on from the same byte at the place that the shard comes from, where there is one."""
        notes: ShardNotes = shard.notes
        location = notes.location
        if location is not left:  # another part of the shard has left it meanwhile
            return True
        if location.fallback is None:
            return False
        if location.kind not in self._unreachable_until:
            logger.warning("%s: %s; reading from its own store instead", redact(shard.url), fault.reason)
        self._unreachable_until[location.kind] = time.monotonic() + _UNREACHABLE_FOR_S
        notes.location, notes.access, notes.moved = location.fallback, None, None
        shard.identity = notes.etag = ""  # they were the other's
        stream, notes.stream = notes.stream, None
        if stream is not None:
            await stream.close()
        return True

    def _explain(self, backend: Backend, exn: Exception, shard: Shard) -> Fault:
        if isinstance(exn, IdentityChanged | FileReplaced):
            return Fault(Verdict.CHANGED, f"the object was replaced while it was being read: {exn}", "Read it again.")
        return backend.classify(exn, shard.notes.location.target)

    def _restartable(self, shard: Shard) -> bool:
        stream: StreamReader | None = shard.notes.stream
        return stream is None or stream.restartable

    def _origin_known(self, shard: Shard) -> bool:
        location: Location = shard.notes.location
        if location.kind != "http":
            return True
        return self._pool.answered(Origin.of(location.target))

    async def _once(self, backend: Backend, part: Part, attempts: _Attempts) -> bool:
        """One attempt, by the way that the backend names."""
        shard = part.shard
        attempts.access, attempts.location = None, shard.notes.location
        access = attempts.access = await self._access(backend, shard)
        if part.dropped:
            return False
        if isinstance(access, CopiedFile | GrowingStream):
            return await self._read_copy(backend, part, access, attempts)
        if shard.streamed or hasattr(access, "readinto"):
            return await self._stream(backend, part, access)
        if isinstance(access, LocalFile):
            return await self._read_file(part, access)
        if isinstance(access, Request):
            return await self._get(backend, part, access, attempts)
        return await self._read_ranges(part, access)

    async def _read_copy(
        self, backend: Backend, part: Part, copy: CopiedFile | GrowingStream, attempts: _Attempts
    ) -> bool:
        """Read what a disk cache has of the shard. Where that fails the store gives the rest, from this byte on."""
        shard = part.shard
        notes: ShardNotes = shard.notes
        try:
            if isinstance(copy, GrowingStream):
                return await self._stream(backend, part, copy)
            return await self._read_file(part, copy)
        except (StoodStill, FileReplaced, OSError) as exn:
            logger.info("%s at byte %d: left its copy on disk: %s", redact(shard.url), part.start + part.filled, exn)
        notes.access = None
        if isinstance(copy, GrowingStream):
            if notes.stream is not None:
                await notes.stream.close()
                notes.stream = None
            self._window.turn_ranged(part)
        else:
            assert notes.location.entry is not None
            notes.location.entry.lose()
            shard.identity = notes.etag = ""  # they were the copy's
        return await self._once(backend, part, attempts)

    async def _access(self, backend: Backend, shard: Shard) -> Access:
        """The shard's way of access, asked for once however many parts wait for it."""
        notes: ShardNotes = shard.notes
        if notes.access is None:
            notes.access = asyncio.ensure_future(backend.access(notes.location.target))
            notes.access.add_done_callback(_retrieved)
        future = notes.access
        try:
            access = await asyncio.shield(future)
        except Exception:
            if notes.access is future:  # the next attempt asks again
                notes.access = None
            raise
        if isinstance(access, Request) and access.renew_after <= time.monotonic():
            if notes.access is future:
                notes.access = notes.moved = None
            return await self._access(backend, shard)
        return access

    async def _read_file(self, part: Part, file: LocalFile) -> bool:
        self._learn(part, file.size, file.identity, "")
        notes: ShardNotes = part.shard.notes
        if part.dropped or part.start >= part.stop:
            return False
        reader = notes.files.setdefault(file, FileReader(file))
        view = part.slab.view[part.filled : part.stop - part.start]
        job = asyncio.ensure_future(self._threads.call(reader.read, view, part.start + part.filled))
        job.add_done_callback(_retrieved)
        try:
            await asyncio.shield(job)
        except asyncio.CancelledError:
            # The thread goes on writing to the slab: it may be given back only after that.
            await asyncio.wait([job])
            raise
        part.filled += len(view)
        self._counters.add("wire_bytes", len(view))
        return False

    async def _read_ranges(self, part: Part, ranges: Ranges) -> bool:
        self._learn(part, ranges.size, ranges.identity, "")
        while not part.dropped and part.start + part.filled < part.stop:
            start = part.start + part.filled
            data = await ranges.read(start, part.stop)
            if not 0 < len(data) <= part.stop - start:
                raise ConnectionError(f"asked for {part.stop - start} bytes, the filesystem gave {len(data)}")
            part.slab.view[part.filled : part.filled + len(data)] = data
            part.filled += len(data)
            self._counters.add("requests")
            self._counters.add("wire_bytes", len(data))
        return False

    async def _get(self, backend: Backend, part: Part, access: Request, attempts: _Attempts) -> bool:
        notes: ShardNotes = part.shard.notes
        if part.start + part.filled >= part.stop:
            return False  # all had come when the last attempt broke
        if self._pool.rangeless(Origin.of(access.url, access.tls)):
            return await self._turn_streamed(backend, part, access)
        kept, learn = notes.moved, functools.partial(self._learn, at=attempts.location)
        request = kept or access
        asked_again = False
        for _ in range(_REDIRECTS_AT_MOST):
            before = part.filled
            self._counters.add("requests")
            try:
                await get_part(self._pool, request, part, learn, self._window.concurrency.observe)
            except Redirected as moved:
                request = follow(request, moved.location)
                if access.keeps_redirect:
                    notes.moved = request
                continue
            except RefusedAnswer as refused:
                if request is access or asked_again or refused.answer.status not in _MOVED_AWAY:
                    raise
                # Where the redirect points to may have expired, for all parts in flight: ask the original place once.
                if notes.moved in (kept, request):
                    notes.moved = None
                request, asked_again = access, True
                continue
            except RangesIgnored:
                if part.filled == 0:
                    self._pool.mark_rangeless(Origin.of(access.url, access.tls))
                break
            finally:
                self._counters.add("wire_bytes", part.filled - before)
            if part.dropped or part.start + part.filled >= part.stop:
                return False
        else:
            raise ConnectionError(f"redirected or cut short more than {_REDIRECTS_AT_MOST} times")
        return await self._turn_streamed(backend, part, access)

    async def _turn_streamed(self, backend: Backend, part: Part, access: Access) -> bool:
        if not self._window.turn_streamed(part):
            raise _Unready("the server ignored the range")
        return await self._stream(backend, part, access)

    async def _stream(self, backend: Backend, part: Part, access: Access) -> bool:
        shard = part.shard
        notes: ShardNotes = shard.notes
        if not shard.streamed and not self._window.turn_streamed(part):
            raise _Unready("this shard can be read in order only")
        if notes.stream is None:
            notes.stream = StreamReader(self._maker(backend, access))
        before = part.filled
        try:
            return await notes.stream.fill(part, self._hurried)
        except RangesIgnored:  # not framed either: aiohttp reads it
            await notes.stream.close()
            assert isinstance(access, Request)
            notes.stream = StreamReader(lambda: backend.streamed(access))
            return await notes.stream.fill(part, self._hurried)
        finally:
            self._counters.add("wire_bytes", part.filled - before)

    def _maker(self, backend: Backend, access: Access) -> Callable[[], Stream]:
        if isinstance(access, Request):
            return lambda: DirectStream(self._pool, access)
        return lambda: access  # type: ignore[return-value]

    def _learn(self, part: Part, size: int, identity: str, etag: str, at: Location | None = None) -> None:
        shard = part.shard
        if at not in (None, shard.notes.location):  # its identity is not that of the store that is read now
            raise ConnectionError("the answer of a store that was left meanwhile")
        if shard.size not in (None, size):
            raise IdentityChanged(f"it had {shard.size} bytes and now has {size}")
        if not shard.identity:
            shard.identity, shard.notes.etag = identity, etag
        elif identity not in ("", shard.identity):
            raise IdentityChanged(f"it was {shard.identity} and is now {identity}")
        self.answering = part
        try:
            self._window.learn(shard, size)
        finally:
            self.answering = None


def _drop(notes: ShardNotes, access: Access | None) -> None:
    """Forget the access that an attempt was made with, unless another attempt has renewed it meanwhile."""
    future = notes.access
    known = future is not None and future.done() and not future.cancelled() and future.exception() is None
    if future is not None and known and future.result() is access:
        notes.access = notes.moved = None


def _retrieved(future: asyncio.Future[Any]) -> None:
    """An access or read that nobody waits for any more may fail: that is not worth a line in the log."""
    if not future.cancelled():
        future.exception()
