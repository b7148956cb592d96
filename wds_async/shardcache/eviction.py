"""Eviction of a cache's least recently used shards.

When a file was used is its access time, which the cache sets itself at every use: many file systems are mounted so
that reading does not set it. Its time of change stays, because a reader recognises by it that a file was replaced.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from wds_async.shardcache.partial import PARTIAL, lock_file

__all__ = ["evict", "files", "remove_until", "touch"]

_WAIT_S = 5.0


def touch(path: Path) -> None:
    """Set the time of access to now, and leave the time of change."""
    with contextlib.suppress(OSError):  # another user's: its time of change will have to do
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files below ``folder``, without unfinished ones; what vanishes meanwhile is passed over."""
    folders = [os.fspath(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != PARTIAL:
                        folders.append(entry.path)
                elif entry.is_file():
                    yield entry


def evict(folder: Path, limit_bytes: float, is_own: Callable[[str], bool]) -> list[str]:
    """Remove files until the cache's own have at most ``limit_bytes``; return the names of the removed ones.

    ``is_own`` takes a file's name relative to ``folder``, with ``/``. One process at a time does this. A file that is
    being read remains readable where it is open, and stays where the system forbids its removal.
    """

    def last_use(entry: os.DirEntry[str]) -> float:
        status = entry.stat()
        return max(status.st_atime_ns, status.st_mtime_ns)

    def name(path: str) -> str:
        return Path(os.path.relpath(path, folder)).as_posix()

    lock = lock_file(folder / PARTIAL / "eviction.lock", _WAIT_S)
    if lock is None:
        return []
    try:
        own = (entry for entry in files(folder) if is_own(name(entry.path)))
        return [name(path) for path in remove_until(own, limit_bytes, last_use)]
    finally:
        lock.release()


def remove_until(
    entries: Iterator[os.DirEntry[str]], limit_bytes: float, order: Callable[[os.DirEntry[str]], float]
) -> list[str]:
    """Remove the files with the smallest ``order`` until the rest has at most ``limit_bytes``; return the removed
    paths. What cannot be removed, or has gone meanwhile, is passed over."""
    ordered: list[tuple[float, int, str]] = []
    for entry in entries:
        with contextlib.suppress(OSError):
            ordered.append((order(entry), entry.stat().st_size, entry.path))
    total, removed = sum(size for _, size, _ in ordered), []
    for _, size, path in sorted(ordered):
        if total <= limit_bytes:
            break
        with contextlib.suppress(OSError):
            os.remove(path)
            removed.append(path)
            total -= size
    return removed
