"""WebDataset's names for keeping shards on disk, by means of `shardcache`.

The usual way is ``WebDataset(urls, cache_dir=…)`` or ``WDS_CACHE``, and in a `DataPipeline` the stage
`cached_tarfile_to_samples`: they stream while they fill the cache. `FileCache` and `StreamingOpen` give files instead
of samples.
"""

from __future__ import annotations

import logging
import os
import re
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from wds_async.config import settings
from wds_async.errors import CostLimitReached, NotATar, StorageError
from wds_async.handlers import Handler, reraise_exception
from wds_async.observe.cost_limit import enforce
from wds_async.reading.samples import tarfile_samples
from wds_async.reading.stage import TarStage, tarfile_to_samples
from wds_async.reading.url_files import gopen
from wds_async.redact import redact
from wds_async.shardcache.cache import DiskCache, shard_cache
from wds_async.shardcache.eviction import files, remove_until
from wds_async.shardcache.formats import looks_like_shard
from wds_async.shardcache.names import cache_name, claim
from wds_async.stages import stage_maker
from wds_async.storage.registry import locate
from wds_async.urls import scheme

__all__ = [
    "FileCache",
    "LRUCleanup",
    "StreamingOpen",
    "cached_tarfile_samples",
    "cached_tarfile_to_samples",
    "check_tar_format",
    "create_cache_dir",
    "get_filetype",
    "islocal",
    "pipe_cleaner",
    "url_to_cache_name",
]

logger = logging.getLogger("wds_async")

DEFAULT_FOLDER = "./_cache"

_HIERARCHICAL = ("", "file", "http", "https", "ftp", "ftps", "gs", "s3", "ais")
_QUOTED_CHARACTERS = 128
_FETCHES = 3
_FILETYPES = (
    (b"\x1f\x8b", "gzip compressed data"),
    (b"BZh", "bzip2 compressed data"),
    (b"\xfd7zXZ\0", "XZ compressed data"),
    (b"\x28\xb5\x2f\xfd", "Zstandard compressed data"),
)


def islocal(url: str) -> bool:
    """Return whether ``url`` is a path or a ``file:`` URL."""
    return scheme(url) in ("", "file")


def get_filetype(fname: str | os.PathLike[str]) -> str:
    """Return what a file is by its first bytes, as ``name: description``, like the command ``file``."""
    with open(fname, "rb") as file:
        head = file.read(512)
    for magic, description in _FILETYPES:
        if head.startswith(magic):
            return f"{fname}: {description}"
    if not head:
        return f"{fname}: empty"
    if looks_like_shard(fname):
        return f"{fname}: POSIX tar archive" if head[257:262] == b"ustar" else f"{fname}: tar archive"
    return f"{fname}: data"


def check_tar_format(fname: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like a tar (POSIX, GNU, V7) or like one that gzip, bzip2, xz or zstd compressed."""
    return looks_like_shard(fname)


def pipe_cleaner(spec: str) -> str:
    """Return the URL that a ``pipe:`` command seems to read, or ``spec`` itself. Deprecated: the cache does it."""
    warnings.warn(
        "pipe_cleaner is deprecated and removed in 1.0; the cache names commands by itself: leave url_to_name out",
        DeprecationWarning,
        stacklevel=2,
    )
    command = spec.removeprefix("pipe:")
    match = re.search(r"(?:^|(?<= ))(?:https?|hdfs|gs|ais|s3):[^ ]*", command) if command is not spec else None
    return match[0] if match else command


def url_to_cache_name(url: str, ndir: int = 0) -> str:
    """Return the last ``ndir + 1`` components of the path in ``url``; the quoted URL's end for schemes without a path.
    Two buckets can give the same name, so the cache itself names files otherwise (`shardcache.names`)."""
    assert isinstance(url, str), f"a URL is a str, not {type(url).__name__}"
    parsed = urllib.parse.urlparse(url)
    if parsed.scheme not in _HIERARCHICAL:
        return urllib.parse.quote(url, safe="_+{}*,-")[-_QUOTED_CHARACTERS:]
    return "/".join(parsed.path.lstrip("/").split("/")[-1 - ndir :])


def create_cache_dir(cache_dir: str | os.PathLike[str] = DEFAULT_FOLDER) -> str:
    """Create the folder, with its parents, if necessary, and return its name."""
    os.makedirs(cache_dir, exist_ok=True)
    return os.fspath(cache_dir)


class LRUCleanup:
    """Keeps the files in a folder within a size: `cleanup` removes those first whose ``keyfn`` is smallest.

    ``cache_size`` is in bytes; ``keyfn(path)`` is a time, by default that of creation (or of the last change of name or
    access rights). ``interval``: `cleanup` does nothing within so many seconds of the last time; None: it always looks.
    All files below the folder count, those of other programs too.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: float = int(1e12),
        keyfn: Callable[[str], float] = os.path.getctime,
        verbose: bool = False,
        interval: float | None = 30,
    ) -> None:
        self.cache_dir = cache_dir
        self.cache_size = cache_size
        self.keyfn = keyfn
        self.verbose = verbose
        self.interval = interval
        self.last_run = 0.0

    def set_cache_dir(self, cache_dir: str | os.PathLike[str]) -> None:
        """Look after another folder."""
        self.cache_dir = cache_dir

    def cleanup(self) -> None:
        """Remove files until the rest fits. What cannot be removed, or has gone meanwhile, is passed over."""
        if self.cache_dir is None or not os.path.isdir(self.cache_dir):
            return
        if self.interval is not None and time.time() - self.last_run < self.interval:
            return
        removed = remove_until(files(Path(self.cache_dir)), self.cache_size, lambda entry: self.keyfn(entry.path))
        for path in removed if self.verbose else ():
            logger.warning("cache %s: removed %s", self.cache_dir, path)
        self.last_run = time.time()


def _opened(
    items: Iterable[str | Mapping[str, Any]], handler: Handler, open_url: Callable[[str], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield each URL (or that of a dict) with what ``open_url`` returns. Its errors go to ``handler``: True passes over
    the URL."""
    for item in items:
        url = item if isinstance(item, str) else item["url"]
        try:
            opened = open_url(url)
        except CostLimitReached:
            raise
        except Exception as exn:
            if handler(exn):
                continue
            return
        yield {"url": url} | opened


class StreamingOpen:
    """URLs (or dicts with a ``url``) in, dicts out: ``url``, an open ``stream`` and, for a local file, ``local_path``.

    Remote shards are not stored. A URL that cannot be opened goes to ``handler``: True passes over it.
    """

    def __init__(self, verbose: bool = False, handler: Handler = reraise_exception) -> None:
        self.verbose = verbose
        self.handler = handler

    def __call__(self, urls: Iterable[str | Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Open each; the streams are the caller's to close."""
        return _opened(urls, self.handler, self._open)

    def _open(self, url: str) -> dict[str, Any]:
        path = locate(url).path
        if self.verbose:
            logger.warning("opening %s", redact(url))
        if path is None:
            return {"stream": gopen(url)}
        return {"stream": open(path, "rb"), "local_path": path}


class FileCache:
    """Shards as whole local files: each is fetched into ``cache_dir`` if necessary, then opened.

    ``url_to_name`` returns a file's relative path. By default it is the last component of the URL's path or, if another
    URL has that name in this folder, our own name for it (with its bucket). ``validator(path)`` returns whether a
    fetched file is a shard; None: all are. ``cache_size`` in bytes: the least recently used go, every
    ``cache_cleanup_interval`` seconds; not positive: no limit. Without ``cache_dir`` it is ``WDS_CACHE``, else
    ``./_cache``. Local files are opened where they are.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        url_to_name: Callable[[str], str] = url_to_cache_name,
        verbose: bool = False,
        validator: Callable[[str], bool] | None = check_tar_format,
        handler: Handler = reraise_exception,
        cache_size: float = -1,
        cache_cleanup_interval: float | None = 30,
    ) -> None:
        self.url_to_name = url_to_name
        self.validator = validator
        self.handler = handler
        self.cache_dir = os.fspath(cache_dir if cache_dir is not None else settings().cache or DEFAULT_FOLDER)
        self.verbose = verbose
        self.cleaner: LRUCleanup | None = None
        if cache_size > 0:
            # By use, and not by creation: what `get_file` touches stays.
            self.cleaner = LRUCleanup(
                self.cache_dir, cache_size, os.path.getatime, verbose=verbose, interval=cache_cleanup_interval
            )
        default = url_to_name is url_to_cache_name
        self._cache = DiskCache(self.cache_dir, url_to_name=self._name if default else url_to_name, verbose=verbose)

    def get_file(self, url: str) -> str:
        """Return the path of the shard's file, after fetching it if necessary.

        Raises the errors of `wds_async.errors`, NotATar (a ValueError) if the validator refuses the file, and
        StorageError if the folder cannot be written.
        """
        assert isinstance(url, str), f"a URL is a str, not {type(url).__name__}"
        if (path := locate(url).path) is not None:
            return path
        cached = self._cache.find(url)
        if cached is not None:
            return str(cached)
        create_cache_dir(self.cache_dir)
        if self.cleaner is not None:
            self.cleaner.cleanup()
        for _ in range(_FETCHES):  # more than one where this followed a process that then died
            cached = self._cache.fetch(url, enforce)
            if cached is not None:
                return self._validated(cached, url)
        raise StorageError(f"{redact(url)}: it cannot be kept in {self.cache_dir!r}; look at its space and permissions")

    def __call__(self, urls: Iterable[str | Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield a dict for each URL (or dict with a ``url``): ``url``, ``local_path`` and an open ``stream``, which is
        the caller's to close. A URL that fails goes to the handler, after the engine's retries: True passes over it."""
        return _opened(urls, self.handler, self._open)

    def _open(self, url: str) -> dict[str, Any]:
        path = self.get_file(url)
        return {"stream": open(path, "rb"), "local_path": path}

    def _validated(self, path: Path, url: str) -> str:
        if self.validator is not None and not self.validator(str(path)):
            with open(path, "rb") as file:
                head = file.read(64)
            self._cache.refuse(path)
            raise NotATar(f"{redact(url)} at byte 0: no tar archive; it begins with {head!r}")
        return str(path)

    def _name(self, url: str) -> str:
        short, own = url_to_cache_name(url), cache_name(url)
        return short if short and claim(Path(self.cache_dir), short, own) else own


def cached_tarfile_samples(
    src: Iterable[Any],
    handler: Handler = reraise_exception,
    cache_size: float = -1,
    cache_dir: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    url_to_name: Callable[[str], str] | None = pipe_cleaner,
    always: bool = False,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Read samples as `tariterators.tarfile_samples`, through a cache on disk: copies are read there, other shards
    stream, and are kept as they pass.

    ``cache_size``: bytes, beyond which the least recently used go; negative: ``WDS_CACHE_SIZE``, else no limit; 0: no
    cache. ``cache_dir``: created if necessary; by default ``WDS_CACHE``, else ``./_cache``. ``url_to_name``: the
    relative path of a shard in it; by default our own (`shardcache.names`). ``always``: keep local files too.
    ``verbose``: log what happens to each shard. If ``src`` is a list, copies under bare names are used (see
    `DiskCache.expect`).
    """
    cache = _cache_of(cache_size, cache_dir, verbose, url_to_name, always)
    if isinstance(cache, DiskCache) and isinstance(src, list | tuple):
        cache.expect(item if isinstance(item, str) else item["url"] for item in src)
    yield from tarfile_samples(src, handler, select_files, rename_files, cache=cache)


@stage_maker
def cached_tarfile_to_samples(
    handler: Handler = reraise_exception,
    cache_size: float = -1,
    cache_dir: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    url_to_name: Callable[[str], str] | None = pipe_cleaner,
    always: bool = False,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    transfer: Mapping[str, Any] | None = None,
) -> TarStage:
    """Return the stage of `cached_tarfile_samples`, for a `DataPipeline`. ``transfer`` as in `tarfile_to_samples`."""
    cache = _cache_of(cache_size, cache_dir, verbose, url_to_name, always)
    return tarfile_to_samples(handler, select_files, rename_files, transfer, cache=cache)


def _cache_of(
    cache_size: float,
    cache_dir: str | os.PathLike[str] | None,
    verbose: bool,
    url_to_name: Callable[[str], str] | None,
    always: bool,
) -> DiskCache | None:
    folder = cache_dir if cache_dir is not None else settings().cache or DEFAULT_FOLDER
    url_to_name = None if url_to_name is pipe_cleaner else url_to_name
    return shard_cache(folder, cache_size, url_to_name=url_to_name, verbose=verbose, local=always)
