"""One shard of one reader in the cache: found there, filled by this reader, followed while another fills it, or left
alone.

Which of these is decided when the engine starts to fetch the shard (`ShardEntry.begin`, on one of its threads), not
when the shard is taken from the list: a reader looks 64 shards ahead, and a shard that is locked for long before it is
read keeps others waiting. The bytes are written as the consumer takes them (`write`, on its thread), so the first epoch
streams, and a disk that is slower than the network slows it down instead of filling the memory.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from wds_async.shardcache.eviction import touch
from wds_async.shardcache.partial import Filling, Following
from wds_async.storage.growing import CopiedFile
from wds_async.storage.local import file_version

__all__ = ["Keeper", "ShardEntry"]

_TRIES = 10
_TRY_S = 0.02

_TROUBLE = (OSError, NotImplementedError, Warning)  # the latter two are of locks that a file system does not have

Role = Literal["new", "found", "filling", "following", "store"]


class Keeper(Protocol):
    """Protocol: the cache of an entry. Every method may block, and may be called by any thread."""

    folder: Path
    check: bool

    def find(self, url: str, name: str | None = None) -> Path | None:
        """The file that holds the shard, whole; it counts as used now."""
        ...

    def make_room(self) -> None:
        """A shard has come into the cache: remove others where it holds too much."""
        ...

    def too_large(self, size: int) -> bool:
        """Whether a shard of so many bytes is not kept."""
        ...

    def patience_s(self) -> float:
        """How long to wait for another process's next byte."""
        ...

    def lose_patience(self) -> None:
        """Wait less for the next bytes: the last wait was too long."""
        ...

    def tell(self, what: str, url: str) -> None:
        """Log what happened to a shard, where that is wanted."""
        ...

    def refuse(self, path: Path, why: str = ...) -> None:
        """The file is not to be used any more; it goes if the cache wrote it."""
        ...

    def complain(self, url: str, exn: BaseException) -> None:
        """Say, once, that the cache cannot be written."""
        ...


class ShardEntry:
    """The shard at ``url``, which the cache keeps under ``name``. `begin` runs on a thread of the engine, all else on
    the consumer's; `over` ends it whenever it comes."""

    def __init__(self, cache: Keeper, url: str, name: str) -> None:
        self.role: Role = "new"
        self._cache = cache
        self._url = url
        self._target = cache.folder / name
        self._name = name
        self._path: Path | None = None
        self._filling: Filling | None = None
        self._following: Following | None = None
        self._awaited = False
        self._is_over = False
        self._lock = threading.Lock()

    @property
    def hit(self) -> bool:
        """Whether the shard was found in the cache."""
        return self.role == "found"

    @property
    def local_path(self) -> str | None:
        """Where the shard is or, once it was read to its end, will be; None where the cache is given up for it."""
        if self.role == "store":
            return None
        if self._path is None and self.role == "new":
            return str(self._cache.find(self._url, self._name) or self._target)
        return str(self._path or self._target)

    def begin(self) -> CopiedFile | Following | None:
        """See `storage.growing.CacheEntry`."""
        with self._lock:
            if self._is_over or self.role in ("store", "filling"):
                return None
            try:
                return self._decide()
            except _TROUBLE as exn:
                self.role = "store"
                self._cache.complain(self._url, exn)
                return None

    @property
    def check(self) -> bool:
        """Whether a copy is compared with its object before it is used."""
        return self._cache.check

    def replaced(self) -> None:
        """The object has changed since its copy was made: `begin` will fill the cache anew."""
        with self._lock:
            if self._path is not None:
                self._cache.refuse(self._path, "is not its object as it is now")
            self.role, self._path = "new", None

    def lose(self) -> None:
        """The copy that was found, or followed, cannot be read."""
        with self._lock:
            self.role, self._path = "store", None

    def want(self) -> None:
        """The consumer has come to this shard."""
        self._awaited = True
        following = self._following
        if following is not None:
            following.awaited = True

    def write(self, piece: memoryview) -> None:
        """The shard's next bytes, as they pass by; nothing where this reader does not fill it. Never raises."""
        self._try(lambda filling: filling.write(piece))
        if self._filling is not None and self._cache.too_large(self._filling.size):
            self._cache.tell("not kept, larger than the cache", self._url)
            self._give_up()

    def over(self, *, whole: bool = False, modified: float | None = None) -> None:
        """The shard is over: ``whole`` publishes it, else nothing of it stays. ``modified`` is when its object was
        last changed (seconds since 1970); the copy's file takes that time. Idempotent; never raises."""
        with self._lock:
            self._is_over = True
        if whole and self.role == "found" and self._path is not None:
            touch(self._path)  # a second time: it was found a while ago, when the fetching began
        if whole:
            self._try(functools.partial(self._publish, modified))
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.drop()

    def reject(self) -> None:
        """What was read is no good shard."""
        self.over()
        if self._path is not None:
            self._cache.refuse(self._path)

    def _decide(self) -> CopiedFile | Following | None:
        followed = self._following
        copied = self._find()
        if copied is not None:
            self.role = "found"
            self._cache.tell("found", self._url)
            return copied
        if followed is not None:
            if followed.patience_lost:
                self._cache.lose_patience()
            self.role = "store"
            return None
        for timeout_s in (0.0, *[_TRY_S] * _TRIES):
            self._filling = Filling.begin(self._cache.folder, self._name, timeout_s)
            if self._filling is not None:
                return self._fill(self._filling)
            following = Following(self._cache.folder, self._name, self._cache.patience_s())
            if following.exists():
                self.role, self._following = "following", following
                if self._awaited:  # and never unset it: `want` may be at it now
                    following.awaited = True
                self._cache.tell("followed", self._url)
                return following
        self.role = "store"  # not before it is certain: the consumer asks for `local_path` meanwhile
        return None

    def _find(self) -> CopiedFile | None:
        """Return the shard's whole copy; None also for one that is evicted meanwhile."""
        self._path = self._cache.find(self._url, self._name)
        if self._path is not None:
            try:
                status = os.stat(self._path)
            except FileNotFoundError:
                self._path = None
            else:
                return CopiedFile(str(self._path), status.st_size, file_version(status))
        return None

    def _fill(self, filling: Filling) -> CopiedFile | None:
        if self._cache.find(self._url, self._name) is not None:  # published since we looked
            filling.drop()
            self._filling, self.role = None, "new"
            found = self._decide()
            return found if isinstance(found, CopiedFile) else None
        self.role = "filling"
        return None

    def _publish(self, modified: float | None, filling: Filling) -> None:
        self._path = filling.publish(modified)
        touch(self._path)  # the kernel's own clock of writes is some milliseconds behind
        self._cache.tell("kept", self._url)
        self._cache.make_room()

    def _try(self, action: Callable[[Filling], None]) -> None:
        if self._filling is not None:
            try:
                action(self._filling)
            except _TROUBLE as exn:
                self._cache.complain(self._url, exn)
                self._give_up()

    def _give_up(self) -> None:
        filling, self._filling, self.role = self._filling, None, "store"
        if filling is not None:
            filling.drop()
