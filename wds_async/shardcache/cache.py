"""The cache of shards on a host's disk: which file holds which shard, and how many bytes it may keep."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wds_async.config import settings
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.shardcache.entries import ShardEntry
from wds_async.shardcache.eviction import evict, touch
from wds_async.shardcache.formats import looks_like_shard
from wds_async.shardcache.names import base_name, cache_name, copied_name, elsewhere, given_name, is_own
from wds_async.shardcache.partial import sweep
from wds_async.storage.generic import reads_local_files
from wds_async.storage.registry import Location
from wds_async.transfer.reader import ShardReader, open_shards

__all__ = ["DiskCache", "shard_cache"]

logger = logging.getLogger("wds_async")

PATIENCE_S = 3.0
"""How long a process waits for another to write the next byte of the shard that it needs now. The other one's training
may be slow, or paused: going on without it costs the rest of one shard from the store, waiting costs training time."""
_told_impossible: set[str] = set()
HASTE_S = 0.1
"""The same, for a while after it was in vain."""
_HASTY_FOR_S = 30.0


class DiskCache:
    """Shards in ``folder``, shared by any number of processes of a host; pickles, and opens nothing before it is used.

    A shard is read from the first of these that is there: its own file (see `names`; or the one that ``url_to_name``
    names), ``bucket/path`` as a copying tool writes it, and its bare name, where ``expect`` was told of a list of
    shards in which no other has it. The last two are copies of the user's: they must begin like a shard.

    ``limit_bytes``: the least recently used files go as soon as those that this cache wrote exceed it (with
    ``url_to_name``, all in the folder: names do not tell then). Copies are neither counted nor removed. None: no limit.
    ``local``: keep local files too (a mounted file server). Standard input never is.
    ``check``: before a copy is used, its store is asked whether the object has changed; one request a shard and reader.
    Without it a copy is used for ever, whatever becomes of the object.
    ``verbose``: log what happens to each shard.
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
        self._forget()

    def _forget(self) -> None:
        self._swept_by = 0
        self._judged: dict[tuple[str, int, int], bool] = {}
        self._complained = False
        self._hasty_until = 0.0

    def expect(self, urls: Iterable[str]) -> DiskCache:
        """These are all the shards: a copy under a bare name is used where only one of them has it. Returns itself.

        Raises ConfigError where ``url_to_name`` gives two of them one name: one would be read for the other.
        """
        urls = list(urls)
        if self._url_to_name is not None:
            named: dict[str, str] = {}
            for url in urls:
                other = named.setdefault(self.name(url), url)
                if cache_name(other) != cache_name(url):
                    raise ConfigError(
                        f"url_to_name gives {redact(other)} and {redact(url)} the same name {self.name(url)!r}"
                    )
        counted = Counter(base_name(url) for url in urls)
        self._unique = frozenset(name for name, count in counted.items() if name is not None and count == 1)
        return self

    def name(self, url: str) -> str:
        """The shard's name relative to the folder, with ``/``."""
        return cache_name(url) if self._url_to_name is None else given_name(url, self._url_to_name)

    def entry(self, location: Location) -> ShardEntry | None:
        """The shard for one reader, None for one that is not cached."""
        is_local = location.kind == "local" or (location.kind == "generic" and reads_local_files(location.target))
        if location.kind == "stdin" or (is_local and not self.local):
            return None
        return ShardEntry(self, location.url, elsewhere(self.name(location.url), location.options.place))

    def find(self, url: str, name: str | None = None) -> Path | None:
        """The file that holds the shard, whole; it counts as used now. ``name``: `name` of it, where that is known."""
        self._sweep_once()
        own = self.folder / (self.name(url) if name is None else name)
        if _size(own) > 0:
            touch(own)
            return own
        if self._url_to_name is None and name in (None, self.name(url)):
            bare = base_name(url)
            for copied in (copied_name(url), bare if bare in self._unique else None):
                if copied is not None and self._is_good(path := self.folder / copied):
                    touch(path)
                    return path
        return None

    def fetch(self, url: str, opened: Callable[[ShardReader], Any] | None = None) -> Path | None:
        """Read the shard through this cache to its end; its file then, None where it is not kept (or where another
        process, which this one followed, has died). ``opened`` is told of the reader first.

        Raises the errors of reading it, and whatever `name` raises.
        """
        with open_shards([url], cache=self) as shards:
            if opened is not None:
                opened(shards)
            for shard in shards:
                while shard.read() is not None:
                    pass
        return self.find(url)

    # For entries

    def make_room(self) -> None:
        """A shard has come into the cache: remove others where it holds too much."""
        if self.limit_bytes is not None:
            for name in evict(self.folder, self.limit_bytes, self._is_ours):
                self._log("removed", name)

    def patience_s(self) -> float:
        """How long to wait for another process's next byte."""
        return PATIENCE_S if time.monotonic() >= self._hasty_until else HASTE_S

    def lose_patience(self) -> None:
        """Wait less for other processes for a while: one that does not write will not write the next shards either."""
        self._hasty_until = time.monotonic() + _HASTY_FOR_S

    def too_large(self, size: int) -> bool:
        """Whether a shard of so many bytes is not kept."""
        return self.limit_bytes is not None and size > self.limit_bytes

    def tell(self, what: str, url: str) -> None:
        """Log what happened to a shard, where that is wanted."""
        self._log(what, redact(url))

    def refuse(self, path: Path, why: str = "is no good shard") -> None:
        """The file is not to be used any more; it goes if the cache wrote it."""
        with contextlib.suppress(OSError):
            status = path.stat()
            ours = self._is_ours(path.relative_to(self.folder).as_posix())
            logger.warning("%s in the cache %s: %s", path, why, "removed" if ours else "not used any more")
            if ours:
                path.unlink()
            else:
                self._judged[str(path), status.st_size, status.st_mtime_ns] = False

    def complain(self, url: str, exn: BaseException) -> None:
        """Say, once a process, that the cache cannot be written."""
        first, self._complained = not self._complained, True
        log = logger.warning if first else logger.info
        log("%s is read without the cache, which cannot be written: %s (said once a process)", redact(url), exn)

    def _is_ours(self, name: str) -> bool:
        return self._url_to_name is not None or is_own(name)

    def _is_good(self, path: Path) -> bool:
        """Whether a copy begins like a shard; looked at once, and again when it changes."""
        try:
            status = path.stat()
            if not path.is_file():
                return False
            key = (str(path), status.st_size, status.st_mtime_ns)
            if key not in self._judged:
                self._judged[key] = self._validator(str(path))
                if not self._judged[key]:
                    logger.warning("%s is in the cache but is no shard; the shard is fetched anew", path)
            return self._judged[key]
        except OSError:
            return False

    def _sweep_once(self) -> None:
        due, self._swept_by = self._swept_by != os.getpid(), os.getpid()
        if due and (count := sweep(self.folder)):
            logger.warning("%s: removed %d unfinished shards of processes that died", self.folder, count)

    def _log(self, what: str, shown: str) -> None:
        if self.verbose:
            logger.warning("cache %s: %s %s", self.folder, what, shown)

    def __getstate__(self) -> dict[str, Any]:
        names = ("folder", "limit_bytes", "local", "check", "verbose", "_url_to_name", "_validator", "_unique")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def shard_cache(
    cache_dir: str | os.PathLike[str] | None = None,
    cache_size: float | None = None,
    *,
    url_to_name: Callable[[str], str] | None = None,
    verbose: bool = False,
    local: bool = False,
    check: bool | None = None,
    urls: Iterable[str] | None = None,
) -> DiskCache | None:
    """The cache that the arguments ask for and, where they say nothing, ``WDS_CACHE``, ``WDS_CACHE_SIZE`` and
    ``WDS_VERBOSE_CACHE``; None for none (no folder, or a size of 0).

    ``cache_size`` is in bytes; None or negative says nothing, and without a variable there is no limit. ``urls``: all
    shards, where they are known (see `DiskCache.expect`). ``local`` and ``check`` as in `DiskCache`; ``check=None`` is
    ``WDS_CACHE_CHECK``. The folder is made, with its
    parents; where that cannot be, one warning says so and there is no cache.
    """
    environment = settings()
    size = environment.cache_size if cache_size is None or cache_size < 0 else cache_size
    folder = environment.cache if cache_dir is None else os.fspath(cache_dir)
    folder = os.path.expanduser(folder)
    if not folder or size == 0:
        return None
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as exn:
        level = logging.INFO if folder in _told_impossible else logging.WARNING
        _told_impossible.add(folder)
        logger.log(level, "the shard cache cannot have the folder %r: %s; shards are read without it", folder, exn)
        return None
    cache = DiskCache(
        os.path.abspath(folder),
        size,
        url_to_name=url_to_name,
        local=local,
        check=environment.cache_check if check is None else check,
        verbose=verbose or environment.verbose_cache,
    )
    return cache if urls is None else cache.expect(urls)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1
