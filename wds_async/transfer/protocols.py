"""What a reader needs of what lives on floors above: a cache of shards on disk, a limit of what may be read."""

from __future__ import annotations

from typing import Protocol

from wds_async.storage.growing import CacheEntry
from wds_async.storage.registry import Location

__all__ = ["CachedShard", "Limit", "ShardCache"]


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

    def over(self, *, whole: bool = False, modified: float | None = None) -> None:
        """It was read to its good end (``whole``), or left. ``modified``: when its object was last changed (seconds
        since 1970), where its store says so. Idempotent."""
        ...

    def reject(self) -> None:
        """What was read is no good shard: no copy of it may stay in use."""
        ...


class ShardCache(Protocol):
    """Shards on this machine's disk."""

    def entry(self, location: Location) -> CachedShard | None:
        """The shard for one reader, None for one that is not cached."""
        ...


class Limit(Protocol):
    """Protocol: a limit that ends a read from outside (`cost_limit.CostLimit`)."""

    def check(self) -> None:
        """Raise where it is reached. Called for each piece of memory."""
        ...

    def over(self) -> None:
        """A reader has come to its end."""
        ...
