"""The cache of shards on a host's disk: `DiskCache`, and `ShardEntry`, one shard of one reader in it.

What a reader does with a shard (read its copy, write one, follow the process that writes it, or leave the cache alone)
is decided when the engine starts to fetch the shard (`ShardEntry.begin`, on one of its threads), not when the shard is
taken from the list: a reader looks 64 shards ahead, and a shard that is locked for long before it is read keeps others
waiting. The bytes are written as the consumer takes them (`write`, on its thread), so the first epoch streams, and a
disk that is slower than the network slows it down instead of filling the memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from wds_async.config import settings
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.shardcache.eviction import evict, touch
from wds_async.shardcache.formats import looks_like_shard
from wds_async.shardcache.names import base_name, cache_name, copied_name, elsewhere, given_name, is_own
from wds_async.shardcache.partial import PartialReader, PartialWriter, sweep
from wds_async.storage.base import CopiedFile, Location
from wds_async.storage.generic import reads_local_files
from wds_async.storage.local import file_version
from wds_async.transfer.reader import ShardReader, open_shards

__all__ = ["DiskCache", "ShardEntry", "shard_cache"]

logger = logging.getLogger("wds_async")

PATIENCE_S = 3.0
"""Seconds to wait for another process to write the next byte of the shard that is needed now. The other one's training
may be slow, or paused: going on without it costs the rest of one shard from the store, waiting costs training time."""
HASTE_S = 0.1  # the same, for a while after it was in vain
_HASTY_FOR_S = 30.0
_TRIES = 10
_TRY_S = 0.02
_UNUSABLE = (OSError, NotImplementedError, Warning)  # the latter two are of locks that a file system does not have
_PICKLED = ("folder", "limit_bytes", "local", "check", "verbose", "_url_to_name", "_validator", "_unique")
_impossible_folders: set[str] = set()


class DiskCache:
    """Shards in ``folder``, shared by any number of processes of a host; pickles, and opens nothing before it is used.

    A shard is read from the first of these that exists: its own file (see `names`; or the one that ``url_to_name``
    names), ``bucket/path`` as a copying tool writes it, and its bare name, if no other shard of the list that `expect`
    had has it. The last two are copies of the user's: they must begin like a shard.

    ``limit_bytes``: the least recently used files go as soon as those that this cache wrote exceed it (with
    ``url_to_name``, all in the folder, because names do not show the writer then). Copies are neither counted nor
    removed. None: no limit. ``local``: keep local files too (a mounted file server). Standard input never is.
    ``check``: before a copy is used, its store is asked whether the object has changed; one request a shard and reader.
    Without it a copy is used for ever. ``verbose``: log what happens to each shard.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: float | None = None,
        *,
        url_to_name: Callable[[str], str] | None = None,
        local: bool = False,
        check: bool = False,
        verbose: bool = False,
        validator: Callable[[str], bool] = looks_like_shard,
    ) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self.local = local
        self.check = check
        self.verbose = verbose
        self._url_to_name = url_to_name
        self._validator = validator
        self._unique: frozenset[str] = frozenset()
        self._reset()

    def _reset(self) -> None:
        self._swept_by = 0
        self._valid: dict[tuple[str, int, int], bool] = {}
        self._warned = False
        self._hasty_until = 0.0

    def expect(self, urls: Iterable[str]) -> DiskCache:
        """Declare all the shards: a copy under a bare name is used if only one of them has it. Returns itself.

        Raises ConfigError if ``url_to_name`` gives two of them one name: one would be read for the other.
        """
        urls = list(dict.fromkeys(urls))  # one that comes several times, as in spans of it, is one shard
        named: dict[str, str] = {}
        for url in urls if self._url_to_name is not None else ():
            other = named.setdefault(self.name(url), url)
            if cache_name(other) != cache_name(url):
                raise ConfigError(
                    f"url_to_name gives {redact(other)} and {redact(url)} the same name {self.name(url)!r}"
                )
        counted = Counter(base_name(url) for url in urls)
        self._unique = frozenset(name for name, count in counted.items() if name is not None and count == 1)
        return self

    def name(self, url: str) -> str:
        return cache_name(url) if self._url_to_name is None else given_name(url, self._url_to_name)

    def entry(self, location: Location, *, whole: bool = True) -> ShardEntry | None:
        """Return the shard for one reader; None for one that is not cached. Unless it is read ``whole``, a copy is used
        where there is one, and otherwise the cache is left alone."""
        is_local = location.kind == "local" or (location.kind == "generic" and reads_local_files(location.target))
        if location.kind == "stdin" or (is_local and not self.local):
            return None
        return ShardEntry(self, location.url, elsewhere(self.name(location.url), location.options.place), whole=whole)

    def find(self, url: str, name: str | None = None) -> Path | None:
        """Return the file that holds the whole shard; it counts as used now. ``name``: its `name`, if known."""
        self._sweep_once()
        own = self.folder / (self.name(url) if name is None else name)
        with contextlib.suppress(OSError):
            if own.is_file() and own.stat().st_size > 0:
                touch(own)
                return own
        if self._url_to_name is None and name in (None, cache_name(url)):
            bare = base_name(url)
            for copied in (copied_name(url), bare if bare in self._unique else None):
                if copied is not None and self._is_valid(path := self.folder / copied):
                    touch(path)
                    return path
        return None

    def fetch(self, url: str, opened: Callable[[ShardReader], Any] | None = None) -> Path | None:
        """Read the shard through this cache to its end and return its file; None if it is not kept (or another process,
        which this one followed, has died). ``opened`` is called with the reader first.

        Raises the errors of reading it, and those of `name`.
        """
        with open_shards([url], cache=self) as shards:
            if opened is not None:
                opened(shards)
            for shard in shards:
                while shard.read() is not None:
                    pass
        return self.find(url)

    def refuse(self, path: Path, why: str = "is no good shard") -> None:
        """Do not use the file any more, and remove it if the cache wrote it."""
        with contextlib.suppress(OSError):
            status = path.stat()
            own = self._is_own(path.relative_to(self.folder).as_posix())
            logger.warning("%s in the cache %s: %s", path, why, "removed" if own else "not used any more")
            if own:
                path.unlink()
            else:
                self._valid[str(path), status.st_size, status.st_mtime_ns] = False

    # -- for entries

    def make_room(self) -> None:
        """Remove shards if the cache holds too much, because one has come."""
        if self.limit_bytes is not None:
            for name in evict(self.folder, self.limit_bytes, self._is_own):
                self.log("removed", name)

    def patience_s(self) -> float:
        """Return how long to wait for another process's next byte."""
        return PATIENCE_S if time.monotonic() >= self._hasty_until else HASTE_S

    def lose_patience(self) -> None:
        """Wait less for other processes for a while: one that does not write will not write the next shards either."""
        self._hasty_until = time.monotonic() + _HASTY_FOR_S

    def log(self, what: str, shown: str) -> None:
        if self.verbose:
            logger.warning("cache %s: %s %s", self.folder, what, shown)

    def warn_unwritable(self, url: str, exn: BaseException) -> None:
        """Warn, once a process, that the cache cannot be written."""
        level = logging.INFO if self._warned else logging.WARNING
        self._warned = True
        words = "the shard cache %s cannot be written: %s; %s is read without it (warned once a process)"
        logger.log(level, words, self.folder, exn, redact(url))

    def _is_own(self, name: str) -> bool:
        return self._url_to_name is not None or is_own(name)

    def _is_valid(self, path: Path) -> bool:
        """Return whether a copy begins like a shard; read once, and again when it changes."""
        try:
            status = path.stat()
            if not path.is_file():
                return False
            key = (str(path), status.st_size, status.st_mtime_ns)
            if key not in self._valid:
                self._valid[key] = self._validator(str(path))
                if not self._valid[key]:
                    logger.warning("%s is in the cache but is no shard; the shard is fetched anew", path)
            return self._valid[key]
        except OSError:
            return False

    def _sweep_once(self) -> None:
        due, self._swept_by = self._swept_by != os.getpid(), os.getpid()
        if due and (count := sweep(self.folder)):
            logger.warning("%s: removed %d unfinished shards of processes that died", self.folder, count)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


Role = Literal["new", "found", "filling", "following", "store"]


class ShardEntry:
    """The shard at ``url``, which ``cache`` keeps under ``name``, for one reader (see `storage.base.CacheEntry`).
    `begin` runs on a thread of the engine, all else on the consumer's; `over` ends it whenever it comes."""

    def __init__(self, cache: DiskCache, url: str, name: str, *, whole: bool = True) -> None:
        self.role: Role = "new"
        self.check = cache.check
        self._cache = cache
        self._url = url
        self._target = cache.folder / name
        self._name = name
        self._whole = whole
        self._path: Path | None = None
        self._writer: PartialWriter | None = None
        self._following: PartialReader | None = None
        self._awaited = False
        self._is_over = False
        self._lock = threading.Lock()

    @property
    def hit(self) -> bool:
        return self.role == "found"

    @property
    def local_path(self) -> str | None:
        """The shard's file, also before it was read to its end; None if the cache is given up for it."""
        if self.role == "store":
            return None
        if self._path is None and self.role == "new":
            found = self._cache.find(self._url, self._name)
            return str(found or self._target) if found or self._whole else None
        return str(self._path or self._target)

    def begin(self) -> CopiedFile | PartialReader | None:
        """Return what to read the shard from; None for its store."""
        with self._lock:
            if self._is_over or self.role in ("store", "filling"):
                return None
            try:
                return self._decide()
            except _UNUSABLE as exn:
                self.role = "store"
                self._cache.warn_unwritable(self._url, exn)
                return None

    def replaced(self) -> None:
        """Refuse the copy, because the object has changed since: `begin` will fill the cache anew."""
        with self._lock:
            if self._path is not None:
                self._cache.refuse(self._path, "is not its object as it is now")
            self.role, self._path = "new", None

    def lose(self) -> None:
        """Give up the copy that was found or followed, because it cannot be read."""
        with self._lock:
            self.role, self._path = "store", None

    def want(self) -> None:
        """Note that the consumer has come to this shard."""
        self._awaited = True
        following = self._following
        if following is not None:
            following.awaited = True

    def write(self, piece: memoryview) -> None:
        """Write the shard's next bytes, if this reader fills the cache. Never raises."""
        self._try(lambda writer: writer.write(piece))
        limit_bytes = self._cache.limit_bytes
        if self._writer is not None and limit_bytes is not None and self._writer.size > limit_bytes:
            self._cache.log("not kept, larger than the cache", redact(self._url))
            self._give_up()

    def over(self, *, whole: bool = False, modified: float | None = None) -> None:
        """End: ``whole`` publishes the shard, else nothing of it stays. ``modified``: when its object was last
        changed (seconds since 1970); the copy's file takes that time. Idempotent; never raises."""
        with self._lock:
            self._is_over = True
        if whole and self.hit and self._path is not None:
            touch(self._path)  # a second time: it was found a while ago, when the fetching began
        if whole:
            self._try(functools.partial(self._publish, modified))
        self._drop()

    def reject(self) -> None:
        """End, and refuse the copy: the bytes are no good shard."""
        self.over()
        if self._path is not None:
            self._cache.refuse(self._path)

    def _decide(self) -> CopiedFile | PartialReader | None:
        copied = self._find()
        if copied is not None:
            return copied
        if not self._whole:
            self.role = "store"
            return None
        if self._following is not None:  # it stood still
            if self._following.patience_lost:
                self._cache.lose_patience()
            self.role = "store"
            return None
        for timeout_s in (0.0, *[_TRY_S] * _TRIES):
            self._writer = PartialWriter.begin(self._cache.folder, self._name, timeout_s)
            if self._writer is not None:
                copied = self._find()  # published since we looked?
                if copied is None:
                    self.role = "filling"
                else:
                    self._drop()
                return copied
            following = PartialReader(self._cache.folder, self._name, self._cache.patience_s())
            if following.exists():
                self.role, self._following = "following", following
                if self._awaited:  # and never unset it: `want` may be at it now
                    following.awaited = True
                self._cache.log("followed", redact(self._url))
                return following
        self.role = "store"  # not before it is certain: the consumer reads `local_path` meanwhile
        return None

    def _find(self) -> CopiedFile | None:
        """Return the shard's whole copy; None also for one that is evicted meanwhile."""
        path = self._cache.find(self._url, self._name)
        try:
            status = None if path is None else os.stat(path)
        except FileNotFoundError:
            status = None
        if path is None or status is None:
            self._path = None
            return None
        self.role, self._path = "found", path
        self._cache.log("found", redact(self._url))
        return CopiedFile(str(path), status.st_size, file_version(status))

    def _publish(self, modified: float | None, writer: PartialWriter) -> None:
        self._path = writer.publish(modified)
        touch(self._path)  # the kernel's own clock of writes is some milliseconds behind
        self._cache.log("kept", redact(self._url))
        self._cache.make_room()

    def _try(self, action: Callable[[PartialWriter], None]) -> None:
        if self._writer is not None:
            try:
                action(self._writer)
            except _UNUSABLE as exn:
                self._cache.warn_unwritable(self._url, exn)
                self._give_up()

    def _give_up(self) -> None:
        self.role = "store"
        self._drop()

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.drop()


def shard_cache(
    cache_dir: str | os.PathLike[str] | None = None,
    cache_size: float | None = None,
    *,
    check: bool | None = None,
    verbose: bool = False,
    urls: Iterable[str] | None = None,
    **options: Any,
) -> DiskCache | None:
    """Return the cache that the arguments and, for those left out, ``WDS_CACHE``, ``WDS_CACHE_SIZE``,
    ``WDS_CACHE_CHECK`` and ``WDS_VERBOSE_CACHE`` ask for; None without a folder, or with a size of 0.

    ``cache_size`` is in bytes; None or negative leaves it out, and without a variable there is no limit. ``urls``: all
    shards, if they are known (see `DiskCache.expect`). ``options`` are those of `DiskCache`. The folder is made, with
    its parents; if that fails, one warning is logged and there is no cache.
    """
    environment = settings()
    size = environment.cache_size if cache_size is None or cache_size < 0 else cache_size
    folder = os.path.expanduser(environment.cache if cache_dir is None else os.fspath(cache_dir))
    if not folder or size == 0:
        return None
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as exn:
        level = logging.INFO if folder in _impossible_folders else logging.WARNING
        _impossible_folders.add(folder)
        logger.log(level, "the shard cache cannot have the folder %r: %s; shards are read without it", folder, exn)
        return None
    check = environment.cache_check if check is None else check
    verbose = verbose or environment.verbose_cache
    cache = DiskCache(os.path.abspath(folder), size, check=check, verbose=verbose, **options)
    return cache if urls is None else cache.expect(urls)
