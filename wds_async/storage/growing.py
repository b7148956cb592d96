"""Shards that a disk cache knows: read from there, or behind the process that is just putting them there.

The cache itself lives on a higher floor (`shardcache`); what the engine needs of it is `CacheEntry`. Whatever goes
wrong with a copy on this machine's disk is no reason to end a training: `StoodStill` (and a copy that cannot be read)
makes the engine go on from the same byte by the shard's own backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from wds_async.storage.base import (
    Access,
    Answer,
    Backend,
    Call,
    Checksum,
    Description,
    Fault,
    LocalFile,
    Request,
    Store,
    Stream,
)

__all__ = ["CacheEntry", "CachedBackend", "CopiedFile", "Growing", "GrowingStream", "StoodStill"]

_LOOK_EVERY_S = 0.02
_LOOK_AHEAD_EVERY_S = 0.2  # a reader follows as many shards as it reads ahead, and only the first of them is urgent


@dataclass(frozen=True, slots=True)
class CopiedFile(LocalFile):
    """A shard's whole copy in a disk cache."""


class StoodStill(Exception):
    """The file that was followed does not grow any more, and is not whole."""


class Growing(Protocol):
    """A file that another process is writing. Every method may block."""

    awaited: bool
    """Whether the consumer has come to this shard: before that nobody is kept waiting by it."""
    patience_s: float
    """How long to wait for a byte more, once it is awaited."""
    patience_lost: bool
    """Set where that was too long."""

    def open(self) -> None:
        """FileNotFoundError where it is there no more."""
        ...

    def read(self, into: memoryview, offset: int) -> int:
        """The bytes at ``offset`` that are there, 0 where there is none yet."""
        ...

    def ended(self, offset: int) -> bool | None:
        """True: the file is whole and ends at ``offset``. False: nobody writes it any more. None: neither."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class CacheEntry(Protocol):
    """One shard of one reader, as its cache sees it and the engine needs it."""

    def begin(self) -> CopiedFile | Growing | None:
        """How to read it: the copy on disk, the file that grows into one, or (None) from its store. Blocks. Asked
        again where a growing file stood still: then never a growing one."""
        ...

    def lose(self) -> None:
        """The copy that `begin` gave cannot be read: from now on the store is."""
        ...


class GrowingStream:
    """A file that another process is writing, read up to its end as it grows."""

    restartable = True

    def __init__(self, call: Call, growing: Growing) -> None:
        self._call = call
        self._growing = growing
        self._offset = 0
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


class CachedBackend(Store):
    """The backend of one shard that a cache knows; ``store`` is the backend of where it comes from."""

    def __init__(self, call: Call, entry: CacheEntry, store: Backend) -> None:
        self._call = call
        self._entry = entry
        self._store = store

    async def access(self, url: str) -> Access:
        found: CopiedFile | Growing | None = await self._call(self._entry.begin)
        if found is None:
            return await self._store.access(url)
        return found if isinstance(found, CopiedFile) else GrowingStream(self._call, found)

    def streamed(self, request: Request) -> Stream:
        return self._store.streamed(request)

    async def describe(self, url: str) -> Description:
        return await self._store.describe(url)

    def classify(self, outcome: Answer | BaseException, url: str) -> Fault:
        return self._store.classify(outcome, url)

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return self._store.checksum(fields)

    async def vouched(self, url: str) -> Checksum | None:
        return await self._store.vouched(url)
