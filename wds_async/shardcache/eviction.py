"""Keep a cache within its size: the least recently used shards go first.

When a file was used is its access time, which the cache sets itself at every use: many file systems are mounted so
that reading does not set it. Its time of change stays, because a reader tells by it that a file was replaced.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from wds_async.shardcache.partial import PARTIAL, lock_file

__all__ = ["evict", "files", "touch"]

_WAIT_S = 5.0


def touch(path: Path) -> None:
    """Set the time of access to now, and leave the time of change."""
    with contextlib.suppress(OSError):  # somebody else's: its time of change will have to do
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The files below ``folder``, without what is not whole yet; what vanishes meanwhile is passed over."""
    folders = [os.fspath(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != PARTIAL:
                        folders.append(entry.path)
                elif entry.is_file():
                    yield entry


def evict(folder: Path, limit_bytes: float, is_ours: Callable[[str], bool]) -> list[str]:
    """Remove files until what is left of ours has at most ``limit_bytes``; the names of those that went.

    ``is_ours`` is asked with a file's name relative to ``folder``, with ``/``. One process at a time does this. A file
    that is being read goes on being readable where it is open, and stays where the system forbids its removal.
    """
    lock = lock_file(folder / PARTIAL / "eviction.lock", _WAIT_S)
    if lock is None:
        return []
    try:
        found: list[tuple[int, int, str, str]] = []
        for entry in files(folder):
            name = Path(os.path.relpath(entry.path, folder)).as_posix()
            if is_ours(name):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    found.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, entry.path, name))
        total, gone = sum(size for _, size, _, _ in found), []
        for _, size, path, name in sorted(found):
            if total <= limit_bytes:
                break
            with contextlib.suppress(OSError):
                os.remove(path)
                gone.append(name)
                total -= size
        return gone
    finally:
        lock.release()
