"""Shards that come and go in a directory: some processes put them there, others take them."""

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
    """``{"url": …}`` of a shard that changes its name when the next one is asked for.

    ``alone`` says so: whoever reads ahead must not ask for the next before this one is read.
    """

    alone = True


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
        self.pattern = pattern
        self.poll = poll
        self.timeout = timeout
        self.mode = mode
        self.select = select
        self.fate = fate
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
                self._give_back(name)
        given: set[str] = set()
        rng = random.Random()
        while (found := self._wait(given, stopped)) is not None:
            candidate = self._choose(found, rng)
            active = self._take(candidate)
            if active is None:
                continue  # another process was faster
            given.add(candidate)
            self._unread.append(active)
            yield ActiveShard(url=active)
            if active in self._unread:  # else another iteration has given it back
                self._unread.remove(active)
                self.recycle(active)
            self.cleanup_files_without_processes()

    def _wait(self, given: set[str], stopped: threading.Event) -> list[str] | None:
        """The shards that may be taken, once there are any; None where the list is at its end."""
        deadline = time.monotonic() + self.timeout
        while not stopped.is_set():
            if found := self._candidates(given):
                return found
            left = deadline - time.monotonic()
            if self.poll is None or left <= 0:
                return None
            stopped.wait(min(self.poll, left, threading.TIMEOUT_MAX))
        return None

    def _candidates(self, given: set[str]) -> list[str]:
        folder = glob.escape(self.path)
        found = {name for pattern in braceexpand(self.pattern) for name in glob.iglob(folder + pattern)}
        return sorted(name for name in found if not _TAKEN.search(name) and not (self.mode is None and name in given))

    def _choose(self, candidates: list[str], rng: random.Random) -> str:
        if self.select == "random":
            return rng.choice(candidates)

        def age(name: str) -> float:
            try:
                return os.stat(name).st_mtime
            except FileNotFoundError:  # taken since
                return float("inf")

        return min(candidates, key=age)

    def _take(self, candidate: str) -> str | None:
        """The name under which this process reads the shard; None where the shard is gone."""
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
        """Do with the shard that is called ``activename`` what ``mode`` says for one that was read."""
        with contextlib.suppress(FileNotFoundError):  # its user removed it
            if self.mode == "unlink":
                os.unlink(activename)
            elif self.mode == "keep":
                os.rename(activename, _own_name(activename) + "._done_")
            elif self.mode == "resample":
                os.rename(activename, _own_name(activename))

    @staticmethod
    def _give_back(activename: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(activename, _own_name(activename))

    def cleanup_files_without_processes(self) -> None:
        """Give the shards that ended processes of this host left unread their own names back."""
        if self.mode is None:
            return
        for name in glob.iglob(glob.escape(self.path) + "*._*_"):
            taken = _TAKEN.search(name)
            if taken and taken[1].isdecimal() and not _runs(int(taken[1])):
                self._give_back(name)

    def close(self) -> None:
        """End every iteration of this process that waits for a shard. Idempotent."""
        for stopped in list(self._waiting):
            stopped.set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": [], "_unread": []}  # another process took nothing yet


def _own_name(activename: str) -> str:
    return _TAKEN.sub("", activename)


def _runs(pid: int) -> bool:
    """Whether there is a process of this number."""
    if os.name == "nt":  # there os.kill would end it, so files of ended processes stay as they are
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it runs, for somebody else
        return True
    return True
