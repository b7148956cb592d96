"""State of one shard between its parts: where and how it is read, and what its answers say of the object.

`ShardState` is changed by its own methods only.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.storage.base import Access, Backend, Checksum, Fault, LocalFile, Location, ObjectReplaced, Request
from wds_async.storage.http.messages import modified_of, same_object, version_like
from wds_async.transfer.circuit_breaker import CircuitBreaker
from wds_async.transfer.files import FileReader
from wds_async.transfer.streams import StreamReader
from wds_async.transfer.traffic import OriginTraffic, region_of

__all__ = ["ShardState", "UnexpectedVersion", "ignore_result"]

Observe = Callable[[int, float, float], None]
"""Bytes, seconds, and when."""

_INODE = re.compile(r"inode \d+, ")
_SIZE = re.compile(r"\b(\d+) bytes\b")


class UnexpectedVersion(ObjectReplaced):
    """The object has another version than the one that the caller expects."""


@dataclass(slots=True, eq=False)
class ShardState:
    """Everything that is known of a shard but for the plan of its parts (`window.Shard`)."""

    location: Location
    access: asyncio.Future[Access] | None = None
    redirected: Request | None = None
    """Target of the access's redirect, for later parts."""
    files: dict[LocalFile, FileReader] = field(default_factory=dict)
    stream: StreamReader | None = None
    rangeless: bool = False
    """The server ignores ranges for this object."""
    unframed: bool = False
    """Only aiohttp can read the way in which the server frames the whole object."""
    expected: str = ""
    """Version that the caller expects, "" for any."""
    version: str = ""
    """Version of the object, pinned by the first answer."""
    etag: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Head of the first answer that had one, in lower case."""
    checksum: Checksum | None = None
    """Checksum of the whole object, if its answer has one."""
    modified: float | None = None
    """Last change of the object (seconds since 1970), if its store sends it."""
    open_ended: bool = False
    """It was read to an end that nothing confirms: its body had no length, and ended with the connection."""
    end_in_doubt: bool = False
    """And it is a tar that has no end of archive there, at two attempts."""
    last_fault: Fault | None = None
    """For callers that stop waiting before the attempts end."""
    traffic: OriginTraffic | None = None
    """Counters of the origin that is read; None before the first part and after `move_to_fallback`."""
    observe: Observe | None = None
    """Takes the duration of a good answer; set together with ``traffic``."""
    breaker: CircuitBreaker | None = None
    """Circuit breaker of the store; None before the first part, and without a server."""
    lose_copy: Callable[[], None] | None = None
    """Rejects the file of the shard that a service has handed over."""

    def current_access(self) -> Access | None:
        """Return the access that has come; None while it is requested, or after that failed."""
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
            future = self.access = asyncio.ensure_future(backend.access(self.location))
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

    def use_handed_file(self, lose: Callable[[], None]) -> None:
        """Read a file that a service has handed over; ``lose()`` rejects it."""
        self.lose_copy = lose

    def report_bad(self) -> None:
        """Reject the handed file, if there is one: its bytes are wrong."""
        if self.lose_copy is not None:
            self.lose_copy()

    def leave_copy(self, *, forget_version: bool) -> None:
        """Read the rest from the store. ``forget_version``: the version that was pinned is that of the copy."""
        self.access = None
        if forget_version:
            self.version = self.etag = ""

    def keep_redirect(self, access: Request, target: Request) -> None:
        """Send later parts straight to ``target``, unless ``access`` was renewed meanwhile."""
        if access.keeps_redirect and self.current_access() is access:
            self.redirected = replace(target, hops=())  # it may lead back to the start one day

    def forget_redirect(self, *expired: Request | None) -> None:
        """Send later parts to the original place again, if the redirect is one of ``expired``."""
        if self.redirected in expired:
            self.redirected = None

    def move_to_fallback(self) -> StreamReader | None:
        """Read on at the fallback, if there is one: only the object's size stays, since each store has versions of its
        own. Return the stream to close."""
        if self.location.fallback is None:
            return None
        self.location, self.access, self.redirected = self.location.fallback, None, None
        self.rangeless, self.unframed, self.breaker = False, False, None
        self.traffic, self.observe, self.fields = None, None, {}
        self.version = self.etag = ""
        size = _SIZE.search(self.expected)
        self.expected = size[0] if size else ""
        stream, self.stream = self.stream, None
        return stream

    def bind(self, traffic: OriginTraffic, observe: Observe, breaker: CircuitBreaker | None) -> None:
        """Set the counters and the circuit breaker of ``location``."""
        self.traffic, self.observe, self.breaker = traffic, observe, breaker

    def file(self, file: LocalFile) -> FileReader:
        """Return the open reader of ``file``, shared by all parts."""
        return self.files.setdefault(file, FileReader(file))

    def open_stream(self) -> StreamReader:
        """Return the reader of the shard's only stream."""
        if self.stream is None:
            self.stream = StreamReader()
        return self.stream

    @property
    def restartable(self) -> bool:
        """True if another attempt can be made after a fault."""
        return self.stream is None or self.stream.restartable

    async def close_stream(self) -> None:
        """Close the stream, and forget it."""
        stream, self.stream = self.stream, None
        if stream is not None:
            await stream.close()

    def stream_whole(self, *, unframed: bool = False) -> None:
        """Request no ranges of this object any more; ``unframed``: nor its body by our own connection."""
        self.rangeless, self.unframed = True, self.unframed or unframed

    def learn(
        self,
        known_size: int | None,
        size: int,
        version: str,
        fields: Mapping[str, str],
        backend: Backend | None = None,
        at: Location | None = None,
    ) -> None:
        """Pin the object by its first answer. ObjectReplaced where a later one is of another object, ConnectionError
        where it came from ``at`` and the shard is read elsewhere by now."""
        if at not in (None, self.location):
            raise ConnectionError("the answer of a store that was left meanwhile")
        if known_size not in (None, size):
            raise ObjectReplaced(f"it had {known_size} bytes and now has {size}")
        if not self.version:
            self._check_expected(version_like(self.expected, version, fields), size)
            self.version, self.etag = version, fields.get("etag", "")
            self.checksum = None if backend is None else backend.checksum(fields)
            self.modified = modified_of(fields)
        elif version not in ("", self.version):
            raise ObjectReplaced(f"it was {self.version} and is now {version}")
        self.fields = self.fields or fields

    def learn_of_stream(self, backend: Backend, version: str, fields: Mapping[str, str]) -> None:
        """Keep the version and the facts in the head of an answer that is read in order; another start changes no
        checksum. `UnexpectedVersion` where the caller expects another."""
        length, plain = fields.get("content-length", ""), "content-encoding" not in fields
        told = version_like(self.expected, version, fields)
        self._check_expected(told, int(length) if plain and length.isascii() and length.isdigit() else None)
        self.version = self.version or version
        if self.checksum is None:
            self.fields = self.fields or fields
            self.modified, self.checksum = modified_of(fields), backend.checksum(fields)

    def _check_expected(self, version: str, size: int | None) -> None:
        """Raise `UnexpectedVersion` where the object, of this version and size, is not the expected one. Versions of
        different kinds (an ETag, a date) are of different ways to read one object: only their sizes are compared."""
        expected, seen = _INODE.sub("", self.expected), _INODE.sub("", version)
        if not expected:
            return
        sizes = {match[1] for match in (_SIZE.search(expected), _SIZE.search(seen)) if match}
        sizes |= set() if size is None else {str(size)}
        of_one_kind = seen != "" and expected.partition(" ")[0] == seen.partition(" ")[0]
        if len(sizes) > 1 or (of_one_kind and not same_object(expected, seen)):
            untold = len(sizes) > 1 and not _SIZE.search(version)
            found = f"{version or 'an object'}, {size} bytes" if untold else version
            raise UnexpectedVersion(f"it was {self.expected} and is now {found}")

    def end_stream(self, *, open_ended: bool, in_doubt: bool) -> None:
        """Keep how the stream ended."""
        self.open_ended, self.end_in_doubt = open_ended, in_doubt

    def record_fault(self, fault: Fault) -> None:
        """Keep the last failure of an attempt."""
        self.last_fault = fault

    def finish(self) -> bool:
        """Let go of the disk cache's entry, once the shard is over; return whether `close` has more to release."""
        if self.location.entry is not None:
            self.location = replace(self.location, entry=None)
        return self.stream is not None or bool(self.files) or (self.access is not None and not self.access.done())

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
