"""Shards that a disk cache knows: read from there, or behind the process that is just putting them there.

The cache itself lives on a higher floor (`shardcache`); what the engine needs of it is `base.CacheEntry`. Whatever goes
wrong with a copy on this machine's disk is no reason to end a training: `StoodStill` (and a copy that cannot be read)
makes the engine go on from the same byte by the shard's own backend.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from wds_async.storage.base import (
    Access,
    Backend,
    BackendWrapper,
    CacheEntry,
    Call,
    CopiedFile,
    Growing,
    LocalFile,
    Location,
    Request,
)
from wds_async.storage.checked import CheckedRanges
from wds_async.storage.deadlines import with_deadline
from wds_async.storage.http.backend import HttpBackend, RangeRequests, always
from wds_async.storage.http.messages import modified_of, version_of

__all__ = ["CachedBackend", "GrowingStream", "StoodStill"]

logger = logging.getLogger("wds_async")

_CHECK_WITHIN_S = 10.0
_told_unchecked: set[int] = set()
_LOOK_EVERY_S = 0.02
_LOOK_AHEAD_EVERY_S = 0.2  # a reader follows as many shards as it reads ahead, and only the first of them is urgent


class StoodStill(Exception):
    """The file that was followed does not grow any more, and is not whole."""


class GrowingStream:
    """A file that another process is writing, read up to its end as it grows."""

    restartable = True

    def __init__(self, call: Call, growing: Growing) -> None:
        self._call, self._growing, self._offset = call, growing, 0
        self._busy: asyncio.Future[Any] | None = None

    async def open(self) -> str:
        self._offset = 0
        await self._run(self._growing.open)
        return ""

    async def readinto(self, into: memoryview) -> int:
        growing, waited_s = self._growing, 0.0
        while True:
            count: int = await self._run(growing.read, into, self._offset)
            if count:
                self._offset += count
                return count
            ended: bool | None = await self._run(growing.ended, self._offset)
            if ended:
                return 0
            if ended is False:
                raise StoodStill("its writer is gone")
            if waited_s > growing.patience_s:
                growing.patience_lost = True
                raise StoodStill(f"no byte more came in {growing.patience_s:g} s")
            pause_s = _LOOK_EVERY_S if growing.awaited else _LOOK_AHEAD_EVERY_S
            await asyncio.sleep(pause_s)
            waited_s += pause_s if growing.awaited else 0.0

    async def close(self) -> None:
        busy = self._busy
        if busy is not None and not busy.done():
            await asyncio.wait([busy])
        await self._call(self._growing.close)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call on a thread; a cancelled call is waited for, because it may be writing to a slab until it returns."""
        self._busy = asyncio.ensure_future(self._call(function, *args))
        try:
            return await asyncio.shield(self._busy)
        except asyncio.CancelledError:
            await asyncio.wait([self._busy])
            raise
        except OSError as exn:
            raise StoodStill(str(exn)) from exn


class CachedBackend(BackendWrapper):
    """The backend of one shard that a cache knows; ``store`` is the backend of where it comes from."""

    def __init__(self, call: Call, entry: CacheEntry, store: Backend) -> None:
        super().__init__(store)
        self._call, self._entry = call, entry

    async def access(self, location: Location) -> Access:
        copy: CopiedFile | Growing | None = await self._call(self._entry.begin)
        if isinstance(copy, CopiedFile) and self._entry.check and await self._has_changed(copy, location):
            await self._call(self._entry.replaced)
            copy = await self._call(self._entry.begin)
        if copy is None:
            return await self.store.access(location)
        return copy if isinstance(copy, CopiedFile) else GrowingStream(self._call, copy)

    async def _has_changed(self, copy: CopiedFile, location: Location) -> bool:
        """Return whether the object has another size or date than ``copy``, which was given its object's date. Where
        the store gives no answer within seconds the copy is used: a training goes on with what it has."""
        try:
            size, modified = await with_deadline(self._size_and_date(location), _CHECK_WITHIN_S)
        except Exception as exn:
            level = logging.INFO if _told_unchecked else logging.WARNING
            _told_unchecked.add(os.getpid())
            why = (
                self.store.classify(exn, location).reason if not isinstance(exn, TimeoutError) else "no answer in time"
            )
            logger.log(level, "%s: its copy in the cache is used unchecked: %s (said once)", location.shown, why)
            return False
        copied = await self._call(os.stat, copy.path)
        dated_otherwise = modified is not None and int(modified) != int(copied.st_mtime)
        return (size is not None and size != copied.st_size) or dated_otherwise

    async def _size_and_date(self, location: Location) -> tuple[int | None, float | None]:
        """Return the size and date of the object at its store, None for what the store does not give."""
        access = await self.store.access(location)
        if isinstance(access, LocalFile):
            return access.size, (await self._call(os.stat, access.path)).st_mtime
        if isinstance(access, Request):
            client = HttpBackend(call=self._call)
            try:
                get = RangeRequests(client, always(access))
                ranges = None if access.socket else await CheckedRanges.of(get, version_of, _CHECK_WITHIN_S)
            finally:
                await client.close()
            return (None, None) if ranges is None else (ranges.size, modified_of(ranges.fields))
        return getattr(access, "size", None), modified_of(getattr(access, "fields", {}))
