"""What a reader needs of a cache of shards on disk, which lives on a floor above."""

from __future__ import annotations

from typing import Protocol

from wds_async.storage.growing import CacheEntry
from wds_async.storage.registry import Location

__all__ = ["CachedShard", "ShardCache"]


class CachedShard(CacheEntry, Protocol):
    """One shard in a cache, as its reader needs it; nothing here raises."""

    @property
    def hit(self) -> bool:
        """Whether it was found there."""
        ...

    @property
    def local_path(self) -> str | None:
        """Where it is or, once it is read to its end, will be."""
        ...

    def want(self) -> None:
        """The consumer has come to this shard."""
        ...

    def write(self, piece: memoryview) -> None:
        """Its next bytes, as the consumer takes them."""
        ...

    def over(self, *, whole: bool = False) -> None:
        """It was read to its good end (``whole``), or left. Idempotent."""
        ...

    def reject(self) -> None:
        """What was read is no good shard: no copy of it may stay in use."""
        ...


class ShardCache(Protocol):
    """Shards on this machine's disk."""

    def entry(self, location: Location) -> CachedShard | None:
        """The shard for one reader, None for one that is not cached."""
        ...
