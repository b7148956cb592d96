"""State of one shard between its parts: where it is read, by which access, and what its answers said of the object.

`ShardState` is changed in this module only; fetching, retrying and opening call its methods.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.storage.base import Access, Backend, Fault, LocalFile, ObjectReplaced, Request
from wds_async.storage.http.messages import modified_of
from wds_async.storage.registry import Location
from wds_async.transfer.circuit_breaker import CircuitBreaker
from wds_async.transfer.files import FileReader
from wds_async.transfer.streams import StreamReader
from wds_async.transfer.traffic import OriginTraffic, region_of
from wds_async.transfer.window import Shard

__all__ = ["ShardState", "ignore_result"]

Observe = Callable[[int, float, float], None]
"""Bytes, seconds, and when."""


@dataclass(slots=True, eq=False)
class ShardState:
    """Everything that fetching keeps of a shard between its parts."""

    location: Location
    access: asyncio.Future[Access] | None = None
    redirected: Request | None = None
    """Where the access redirected to, for later parts."""
    files: dict[LocalFile, FileReader] = field(default_factory=dict)
    stream: StreamReader | None = None
    rangeless: bool = False
    """The server ignores ranges for this object."""
    unframed: bool = False
    """Only aiohttp can read the way in which the server frames the whole object."""
    etag: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Head of the first answer that had one, in lower case."""
    last_fault: Fault | None = None
    """For callers that stop waiting before the attempts end."""
    traffic: OriginTraffic | None = None
    """Counters of the origin that is read; None before the first part and after `move_to_fallback`."""
    observe: Observe | None = None
    """Takes the duration of a good answer; set together with ``traffic``."""
    breaker: CircuitBreaker | None = None
    """Circuit breaker of the store; None before the first part, and without a server."""

    # Access

    def current_access(self) -> Access | None:
        """The access that has come; None while it is requested, or after that failed."""
        future = self.access
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    async def request_access(self, backend: Backend) -> Access:
        """Return the shard's access, requested once for all parts, and again once ``renew_after`` has passed. A fresh
        one is used even if it has expired already."""
        current = self.current_access()
        if isinstance(current, Request) and current.renew_after <= time.monotonic():
            self.drop(current)
        future = self.access
        if future is None:
            future = self.access = asyncio.ensure_future(backend.access(self.location.target))
            traffic = self.traffic
            future.add_done_callback(lambda done: _note_region(traffic, done))
        try:
            return await asyncio.shield(future)
        except Exception:
            if self.access is future:  # the next attempt requests another
                self.access = None
            raise

    def drop(self, access: Access | None) -> None:
        """Forget ``access``, unless it was renewed meanwhile."""
        if access is not None and self.current_access() is access:
            self.access = self.redirected = None

    def leave_copy(self, shard: Shard, *, forget_version: bool) -> None:
        """Read the rest from the store. ``forget_version``: the version that was pinned is that of the copy."""
        self.access = None
        if forget_version:
            shard.version = self.etag = ""

    def keep_redirect(self, access: Request, target: Request) -> None:
        """Send later parts straight to ``target``, unless ``access`` was renewed meanwhile."""
        if access.keeps_redirect and self.current_access() is access:
            self.redirected = replace(target, hops=())  # it may lead back to the start one day

    def forget_redirect(self, *expired: Request | None) -> None:
        """Send later parts to the original place again, if the redirect is one of ``expired``."""
        if self.redirected in expired:
            self.redirected = None

    def move_to_fallback(self, shard: Shard) -> StreamReader | None:
        """Read on at the fallback, if there is one: only the object's size stays. Return the stream to close."""
        if self.location.fallback is None:
            return None
        self.location, self.access, self.redirected = self.location.fallback, None, None
        self.rangeless, self.unframed, self.breaker = False, False, None
        self.traffic, self.observe, self.fields = None, None, {}
        shard.version = self.etag = ""
        stream, self.stream = self.stream, None
        return stream

    def bind(self, traffic: OriginTraffic, observe: Observe, breaker: CircuitBreaker | None) -> None:
        """Set the counters and the circuit breaker of ``location``."""
        self.traffic, self.observe, self.breaker = traffic, observe, breaker

    # Ways of reading

    def file(self, file: LocalFile) -> FileReader:
        """The open reader of ``file``, shared by all parts."""
        return self.files.setdefault(file, FileReader(file))

    def open_stream(self) -> StreamReader:
        """The reader of the shard's only stream."""
        if self.stream is None:
            self.stream = StreamReader()
        return self.stream

    @property
    def restartable(self) -> bool:
        """Whether another attempt can be made after a fault."""
        return self.stream is None or self.stream.restartable

    async def close_stream(self) -> None:
        """Close the stream, and forget it."""
        stream, self.stream = self.stream, None
        if stream is not None:
            await stream.close()

    def stream_whole(self, *, unframed: bool = False) -> None:
        """Request no ranges of this object any more; ``unframed``: nor its body by our own connection."""
        self.rangeless, self.unframed = True, self.unframed or unframed

    # What answers say

    def learn(
        self,
        shard: Shard,
        size: int,
        version: str,
        fields: Mapping[str, str],
        *,
        backend: Backend | None = None,
        at: Location | None = None,
    ) -> None:
        """Pin the object by its first answer. ObjectReplaced where a later one is of another object, ConnectionError
        where it came from ``at`` and the shard is read elsewhere by now."""
        if at not in (None, self.location):
            raise ConnectionError("the answer of a store that was left meanwhile")
        if shard.size not in (None, size):
            raise ObjectReplaced(f"it had {shard.size} bytes and now has {size}")
        if not shard.version:
            shard.version, self.etag = version, fields.get("etag", "")
            shard.checksum = None if backend is None else backend.checksum(fields)
            shard.modified = modified_of(fields)
        elif version not in ("", shard.version):
            raise ObjectReplaced(f"it was {shard.version} and is now {version}")
        self.fields = self.fields or fields

    def learn_of_stream(self, shard: Shard, fields: Mapping[str, str]) -> None:
        """Keep the head of the answer that is read in order."""
        self.fields = self.fields or fields
        shard.modified = modified_of(fields)

    def record_fault(self, fault: Fault) -> None:
        """Keep the last failure of an attempt."""
        self.last_fault = fault

    # The end

    @property
    def closed(self) -> bool:
        """Whether there is nothing to release."""
        return self.stream is None and not self.files and (self.access is None or self.access.done())

    def release(self) -> None:
        """Stop requesting an access, and close files; no part may be in flight."""
        if self.access is not None:
            self.access.cancel()
        for file in self.files.values():
            file.close()
        self.files.clear()

    async def close(self) -> None:
        """Release everything that a finished shard holds."""
        if self.access is not None:
            self.access.cancel()
        await self.close_stream()
        self.release()


def _note_region(traffic: OriginTraffic | None, future: asyncio.Future[Access]) -> None:
    """Set the region of ``traffic`` by the host of a request."""
    ignore_result(future)
    if traffic is None or future.cancelled() or future.exception() is not None:
        return
    access = future.result()
    if isinstance(access, Request):
        traffic.region = region_of(access.url) or traffic.region


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future without waiters as retrieved, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
