"""What the cache counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, but for the last five, which are as it is now."""

    hit_bytes: int = 0
    """Given to readers that did not make the cache fetch them: they were there, or another's fetch was shared."""
    miss_bytes: int = 0
    """Given to the reader for which they were fetched."""
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
    """Chunks from before that were not what they should be; they were fetched again."""
    disk_errors: int = 0
    passed_bytes: int = 0
    """Given to readers from memory: not through the disk."""
    stale: int = 0
    """Opened from a whole copy because the origin could not be asked whether it is still the same."""
    entries: int = 0
    bytes: int = 0
    """On disk, those in transit too."""
    limit_bytes: int = 0
    transit_bytes: int = 0
    readers: int = 0
