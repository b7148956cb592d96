"""Options of a read, and protocols of the shard cache and of a limit, as the reader uses them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from wds_async.config import TransferConfig
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.base import CacheEntry, Checksum, Location
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.transfer.stats import Counters

__all__ = ["CachedShard", "Limit", "ReadOptions", "ShardCache", "Span"]

_CRC32C = re.compile(r"[0-9a-fA-F]{8}")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[start, stop)`` of a shard's object (``stop`` None: to its end), which must have ``version`` unless that
    is "", and the CRC-32C ``crc32c`` (big-endian) unless that is empty."""

    start: int = 0
    stop: int | None = None
    version: str = ""
    crc32c: bytes = b""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Span:
        """Return what a shard's dict asks for by ``start``, ``stop``, ``version`` and ``crc32c``. Raise ConfigError
        unless they are whole numbers with ``0 <= start <= stop``, a string, and eight hexadecimal digits."""
        start, stop, version = info.get("start", 0), info.get("stop"), info.get("version") or ""
        numbers = [start] if stop is None else [start, stop]
        if not (_are_whole(numbers) and start >= 0 and (stop is None or start <= stop) and isinstance(version, str)):
            raise ConfigError(
                f"{redact(str(info['url']))}: start={start!r}, stop={stop!r}, version={version!r}: a span of a shard is"
                " two numbers of bytes, 0 <= start <= stop (stop None: to the end), and a version is a string"
            )
        crc32c = info.get("crc32c")
        if crc32c is not None and not (isinstance(crc32c, str) and _CRC32C.fullmatch(crc32c)):
            raise ConfigError(
                f"{redact(str(info['url']))}: crc32c={crc32c!r:.60}: eight hexadecimal digits are expected"
            )
        return cls(int(start), None if stop is None else int(stop), version, bytes.fromhex(crc32c or ""))

    @property
    def whole(self) -> bool:
        """True if it is the whole object."""
        return self.start == 0 and self.stop is None

    @property
    def checksum(self) -> Checksum | None:
        """The checksum that the whole object must have; None where none is stated."""
        return Checksum("crc32c", self.crc32c, "its list of shards") if self.crc32c and self.whole else None


def _are_whole(numbers: list[Any]) -> bool:
    return all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers)


class CachedShard(CacheEntry, Protocol):
    """Protocol: one shard in a cache. Its methods do not raise."""

    @property
    def hit(self) -> bool:
        """True if the cache had it."""
        ...

    @property
    def local_path(self) -> str | None:
        """Path of the shard now or, once it is read to its end, then."""
        ...

    def want(self) -> None:
        """Note that the consumer waits for this shard now."""
        ...

    def write(self, piece: memoryview) -> None:
        """Take its next bytes, as the consumer does."""
        ...

    def over(self, *, whole: bool = False, modified: float | None = None) -> None:
        """End it: read to its good end (``whole``), or left. ``modified``: last change of its object (seconds since
        1970), if the store sends it. Idempotent."""
        ...

    def reject(self) -> None:
        """Discard it: its bytes are no good shard, and no copy may stay in use."""
        ...


class ShardCache(Protocol):
    """Protocol: shards on this machine's disk."""

    def entry(self, location: Location, *, whole: bool = True) -> CachedShard | None:
        """Return the shard for one reader; None for one that is not cached. Unless it is read ``whole``, a copy may be
        used and none is made."""
        ...


class Limit(Protocol):
    """Protocol: a limit that ends a read from outside (`cost_limit.CostLimit`)."""

    def check(self) -> None:
        """Raise once it is reached. Called for each piece of memory."""
        ...

    def over(self) -> None:
        """End the reader's part in it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of one read, from the reader down to the requests."""

    config: TransferConfig
    counters: Counters
    lookahead: int | None = None
    """Shards taken from the iterable ahead of the one that is read (default: as many as there may be connections); 1
    suits a source that blocks."""
    final: bool = False
    """The URLs are targets, and are not rewritten."""
    cache: ShardCache | None = None
    """Disk cache (see `shardcache`): shards that it has are read there, the others pass through it."""
    storage: StorageOptions = NOTHING_GIVEN
    interleave: int = 1
    """Shards that the consumer has open at once."""
