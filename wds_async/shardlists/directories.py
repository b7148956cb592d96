"""A directory as a queue of shards between processes."""

from __future__ import annotations

import contextlib
import glob
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from braceexpand import braceexpand

from wds_async import world
from wds_async.errors import AccessDenied, ConfigError, UrlError

__all__ = ["ActiveShard", "DirectoryShardList"]

_MODES = ("resample", "unlink", "keep", None)
_SELECTIONS = ("random", "oldest")
_TAKEN = re.compile(r"\._(\d+|done)_$")


class ActiveShard(dict[str, Any]):
    """``{"url": …}`` of a shard that changes its name when the next one is asked for."""

    alone = True  # a reader must not ask for the next one before this one is read


class DirectoryShardList(world.TorchDataset):
    """The shards in the directory ``path``, as they come, for any number of processes on this host.

    ``pattern``: names to take, as a glob with braces.
    ``poll``: seconds between two looks where there is nothing; None ends the list instead.
    ``timeout``: seconds to wait for a shard before the list ends.
    ``mode``: what happens to a shard once it is read: ``resample`` puts it back (so the list does not end),
        ``unlink`` deletes it, ``keep`` names it ``<file>._done_``; None leaves all names alone and gives each once.
    ``select``: ``random``, or the ``oldest`` by its time of modification.
    ``fate``: accepted for WebDataset's sake.

    While a shard is read it is called ``<file>._<pid>_``, so that no other process takes it: every process of a
    host gets others, and nothing needs to be split. It counts as read when the next one is asked for; so it must be
    the only one that is taken ahead (`ActiveShard`), and shards must not be shuffled. One that a process left unread
    gets its own name back: after the process has ended (in any mode), or, with ``resample``, with its next iteration.

    Raises UrlError where ``path`` is no directory, ConfigError for an unknown ``mode`` or ``select``, AccessDenied
    where files may not be renamed. `close` ends the waiting, from any thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = "*.{tar,tgz,tar.tgz}",
        poll: float | None = 1,
        timeout: float = 1e12,
        mode: str | None = "resample",
        select: str = "random",
        fate: Any = None,
    ) -> None:
        self.path = os.path.join(os.fspath(path), "")
        if not os.path.isdir(self.path):
            raise UrlError(f"{self.path!r} is not a directory; shards that come and go are taken from an existing one")
        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r}: a directory's shards know 'resample', 'unlink', 'keep' and None")
        if select not in _SELECTIONS:
            raise ConfigError(f"select={select!r}: shards are taken 'random' or the 'oldest' first")
        self.pattern, self.select, self.mode, self.fate = pattern, select, mode, fate
        self.poll, self.timeout = poll, timeout
        self._waiting: list[threading.Event] = []
        self._unread: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        stopped = threading.Event()
        self._waiting.append(stopped)
        try:
            yield from self._shards(stopped)
        finally:
            self._waiting.remove(stopped)

    def _shards(self, stopped: threading.Event) -> Iterator[dict[str, Any]]:
        if self.mode == "resample":
            mine = f"._{os.getpid()}_"  # a fork inherits its parent's list
            left, self._unread = [name for name in self._unread if name.endswith(mine)], []
            for name in left:
                self._rename(name)
        seen: set[str] = set()
        rng = random.Random()
        while (candidates := self._wait(seen, stopped)) is not None:
            candidate = rng.choice(candidates) if self.select == "random" else min(candidates, key=_modified)
            active = self._take(candidate)
            if active is None:
                continue  # another process was faster
            seen.add(candidate)
            self._unread.append(active)
            yield ActiveShard(url=active)
            if active in self._unread:  # else another iteration has given it back
                self._unread.remove(active)
                self.recycle(active)
            self.cleanup_files_without_processes()

    def _wait(self, seen: set[str], stopped: threading.Event) -> list[str] | None:
        """Return the shards that may be taken, once there are any; None where the list is at its end."""
        deadline = time.monotonic() + self.timeout
        while not stopped.is_set():
            patterns = [glob.escape(self.path) + pattern for pattern in braceexpand(self.pattern)]
            names = {name for pattern in patterns for name in glob.iglob(pattern) if not _TAKEN.search(name)}
            if candidates := sorted(names - seen if self.mode is None else names):
                return candidates
            left = deadline - time.monotonic()
            if self.poll is None or left <= 0:
                return None
            stopped.wait(min(self.poll, left, threading.TIMEOUT_MAX))
        return None

    def _take(self, candidate: str) -> str | None:
        """Return the name under which this process reads the shard; None where the shard is gone."""
        if self.mode is None:
            return candidate
        active = f"{candidate}._{os.getpid()}_"
        try:
            os.rename(candidate, active)
        except FileNotFoundError:
            return None
        except PermissionError as exn:
            raise AccessDenied(
                f"{candidate}: cannot be renamed ({exn.strerror}), which mode={self.mode!r} does to every shard it "
                "takes; allow writing in the directory, or leave the shards alone with mode=None"
            ) from exn
        return active

    def recycle(self, activename: str) -> None:
        """Treat the shard that is called ``activename`` as read, by ``mode``."""
        if self.mode == "unlink":
            with contextlib.suppress(FileNotFoundError):  # its user removed it
                os.unlink(activename)
        elif self.mode is not None:
            self._rename(activename, "._done_" if self.mode == "keep" else "")

    @staticmethod
    def _rename(activename: str, suffix: str = "") -> None:
        with contextlib.suppress(FileNotFoundError):  # its user removed it
            os.rename(activename, _TAKEN.sub("", activename) + suffix)

    def cleanup_files_without_processes(self) -> None:
        """Give the shards that ended processes of this host left unread their own names back."""
        if self.mode is None:
            return
        for name in glob.iglob(glob.escape(self.path) + "*._*_"):
            taken = _TAKEN.search(name)
            if taken and taken[1].isdecimal() and not _runs(int(taken[1])):
                self._rename(name)

    def close(self) -> None:
        """End every iteration of this process that waits for a shard. Idempotent."""
        for stopped in list(self._waiting):
            stopped.set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": [], "_unread": []}  # another process took nothing yet


def _modified(name: str) -> float:
    try:
        return os.stat(name).st_mtime
    except FileNotFoundError:  # taken since
        return float("inf")


def _runs(pid: int) -> bool:
    if os.name == "nt":  # there os.kill would end it, so files of ended processes stay as they are
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True
