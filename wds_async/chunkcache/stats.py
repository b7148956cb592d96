"""What the cache counts."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CacheStats"]


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, but for those from ``entries`` on, which are as it is now."""

    hit_bytes: int = 0
    """Given to readers that did not make the cache fetch them: they were there, or another's fetch was shared."""
    miss_bytes: int = 0
    """Given to the reader for which they were fetched."""
    ahead_bytes: int = 0
    """Of ``hit_bytes``: fetched for a plan, and given for the first time. The rest was in the cache, or shared."""
    hits: int = 0
    """Reads of which nothing had to be fetched."""
    misses: int = 0
    coalesced: int = 0
    """Chunks that a reader waited for and another's fetch brought."""
    evictions: int = 0
    evicted_bytes: int = 0
    verified: int = 0
    """Chunks from before that were compared with their checksum, and were good."""
    bad_chunks: int = 0
    """Chunks on disk that were not what was written; they were dropped, to be fetched again."""
    distrusted: int = 0
    """Copies of which a read came short or failed, here or at a client that had been handed the file."""
    scrubbed_bytes: int = 0
    """Read in the background and compared with their checksums."""
    disk_errors: int = 0
    passed_bytes: int = 0
    """Given to readers from memory: not through the disk."""
    stale: int = 0
    """Opened from a whole copy whose freshness had lapsed, before or without an answer of its origin."""
    unchanged: int = 0
    """Copies whose freshness had lapsed, and which their origin still had."""
    changed: int = 0
    """The same, but another version (or one that nothing pins) was there, or none any more."""
    unanswered: int = 0
    """The same, but the origin did not answer in time, or was not asked because it is down."""
    entries: int = 0
    bytes: int = 0
    """On disk, those in transit too."""
    limit_bytes: int = 0
    keep_free_bytes: int = 0
    free_bytes: int = 0
    """Of the file system, as far as it is watched."""
    transit_bytes: int = 0
    readers: int = 0
    by_tenant: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """``hit_bytes``, ``miss_bytes`` and ``ahead_bytes`` of each tenant."""

    def given(self, tenant: str, *, hit: int = 0, miss: int = 0, ahead: int = 0) -> None:
        """Count bytes that were given to a reader of ``tenant``; those ``ahead`` are among the hits."""
        self.hit_bytes += hit
        self.miss_bytes += miss
        self.ahead_bytes += ahead
        before = self.by_tenant.get(tenant, (0, 0, 0))
        self.by_tenant[tenant] = before[0] + hit, before[1] + miss, before[2] + ahead
