"""Shards as plain tars on this machine's disk, to be read out of order.

A plain local shard is read where it lies. Any other is fetched whole into the disk cache (`shardcache`) that all
processes of the host share, the same that `WebDataset` fills: one fetches a shard, the others wait for it. A compressed
shard is unpacked beside that.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import tempfile
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from wds_async import config, environment
from wds_async.errors import (
    AccessDenied,
    DuplicateField,
    NotATar,
    ShardFormatError,
    ShardNotFound,
    StorageError,
    UrlError,
)
from wds_async.observe.cost_limit import enforce
from wds_async.redact import redact
from wds_async.shardcache.cache import DiskCache
from wds_async.shardcache.eviction import touch
from wds_async.shardcache.partial import PartialWriter
from wds_async.storage.registry import locate
from wds_async.tar.decompress import plain
from wds_async.tar.group import admission, base_plus_ext
from wds_async.tar.index import scan
from wds_async.transfer.reader import ShardCache, open_shards
from wds_async.urls import local_path

__all__ = ["MappedShard", "OpenShards", "ShardFiles", "default_folder"]

logger = logging.getLogger("wds_async")

_PEEK_BYTES = 512
_FOR_EVER_S = -1.0  # in filelock's terms
_TRIES = 3  # between finding a file and opening it another process may have made room


def default_folder() -> str:
    """Return the default folder of shards: ``WDS_CACHE``, else ``WIDS_CACHE``, else a folder of this user
    among the temporary files, which the machine clears now and then."""
    named = config.settings().cache or environment.variable("WIDS_CACHE")
    if named:
        return named
    folder = os.path.join(tempfile.gettempdir(), "wds-async-shards")
    if not hasattr(os, "getuid"):  # where each user has temporary files of their own
        return folder
    folder = f"{folder}-{os.getuid()}"
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(folder).st_uid != os.getuid():  # its owner could choose what is read
            raise AccessDenied(f"{folder} belongs to another user; give cache_dir= or set WDS_CACHE")
    return folder


class ShardFiles:
    """Opener of shards as plain tars.

    ``folder`` is that of the disk cache, which may keep ``size_bytes`` (None: all) of what it fetched, and uses copies
    that the user put there, by bare name where ``urls`` are all the shards and no other has it (see `DiskCache`).
    ``localname(url)`` chooses the path instead, and nothing there is ever removed.

    Holds nothing open; pickles where ``localname`` does. Nothing is made or removed before the first `open`.
    """

    def __init__(
        self,
        folder: str,
        *,
        size_bytes: float | None = None,
        localname: Callable[[str], str] | None = None,
        urls: Iterable[str] = (),
    ) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self.localname = localname
        self.cache = DiskCache(self.folder, size_bytes, verbose=config.settings().verbose_cache).expect(urls)

    def open(self, url: str) -> BinaryIO:
        """Return the shard as an open file, a plain tar; it is fetched first if it is not there.

        Raises the errors of reading the shard, and StorageError where it cannot be kept on disk.
        """
        location = locate(url)
        if location.kind == "stdin":
            raise UrlError("-: standard input cannot be read out of order; write it to a file first")
        file = self._fetched(url) if location.path is None else _open_local(location.path, url)
        if file is not None:
            if not _is_compressed(file, url):
                return file
            file.close()
        for _ in range(_TRIES):
            kept = self.path(url)
            new = not kept.exists()
            if new:
                self._unpack(url, kept)
            with contextlib.suppress(FileNotFoundError):
                file = kept.open("rb")
                touch(kept)
                if new and self.localname is None:
                    self.cache.make_room()  # perhaps by removing this very file: it is open
                return file
        raise StorageError(f"{redact(url)}: {kept} is removed again at once; give cache_size= more room")

    def path(self, url: str) -> Path:
        """Return the place of the plain tar of a shard that is compressed, or that ``localname`` places."""
        if self.localname is not None:
            return Path(self.localname(url))
        version = ""
        path = local_path(url)
        if path is not None:
            with contextlib.suppress(OSError):  # a name that WDS_REWRITE leads elsewhere
                status = os.stat(path)
                version = f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"
        digest = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return self.folder / f"{self.cache.name(url)}.{f'{digest}.' if version else ''}plain"

    def forget(self, file: str) -> None:
        """Use a file that `open` opened no more: it is no good shard."""
        if self.localname is None and self.folder in Path(file).parents:
            self.cache.refuse(Path(file))

    def _fetched(self, url: str) -> BinaryIO | None:
        """Open the shard in the cache, as its store has it. None where the cache does not keep it."""
        if self.localname is not None:
            return None
        for fetch in (True, False):
            cached = self.cache.find(url)
            if cached is not None:
                with contextlib.suppress(FileNotFoundError):
                    return cached.open("rb")
            if fetch and not self.path(url).exists():
                logger.info("fetching %s", redact(url))
                self._make_folder(self.folder, url)
                self.cache.fetch(url, enforce)
        return None

    def _unpack(self, url: str, kept: Path) -> None:
        """Put the plain tar of a shard at ``kept``, unless another process does so first."""
        self._make_folder(kept.parent, url)
        root = kept.parent if self.localname is not None else self.folder
        try:
            filling = PartialWriter.begin(root, kept.relative_to(root).as_posix(), _FOR_EVER_S)
            assert filling is not None, "the lock is waited for"
            try:
                if not kept.exists():
                    _write_plain(url, self.cache if self.localname is None else None, filling.write)
                    filling.publish()
            finally:
                filling.drop()
        except StorageError:
            raise
        except OSError as exn:
            raise _cannot_keep(url, kept, exn) from exn

    def _make_folder(self, folder: Path, url: str) -> None:
        # Among everybody's temporary files the folder is the user's own (see `default_folder`).
        mode = 0o700 if folder.parent == Path(tempfile.gettempdir()) else 0o777
        try:
            folder.mkdir(mode, parents=True, exist_ok=True)
        except OSError as exn:
            raise _cannot_keep(url, folder, exn) from exn


class MappedShard:
    """One shard in memory: its samples by number, as ``{".jpg": bytes}``, and their ``keys``. Safe for threads.

    Its file is mapped, not read: a sample costs the pages it lies on. The mapping ends with the last reference. Members
    are grouped as in `group.samples`; fields keep their case and have a leading dot, as in ``wids``. The table of a
    sample of three fields takes some 150 bytes.
    """

    def __init__(self, url: str, file: BinaryIO) -> None:
        """Map ``file``, which is closed, and find its samples. Raises the errors of `index.scan`."""
        self.url = url
        with file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:  # an empty file cannot be mapped
                raise NotATar(f"{redact(url)}: the shard is empty (0 bytes)") from None
        self.keys: list[str] = []
        self._names: list[str] = []
        self._firsts, self._starts, self._sizes = array("q"), array("q"), array("q")
        admit, names = admission(), dict[str, str]()
        pieces = iter((memoryview(self._map),))
        last = None
        for name, start, size in scan(lambda: next(pieces, None), url):
            key, ext = base_plus_ext(name) if admit(name) is not None else (None, None)
            if key is None or ext is None:
                continue
            if key != last:
                last = key
                self.keys.append(key)
                self._firsts.append(len(self._names))
            self._names.append(names.setdefault(ext, f".{ext}"))
            self._starts.append(start)
            self._sizes.append(size)
        self._firsts.append(len(self._names))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> dict[str, bytes]:
        """Return the fields of sample ``i``, from 0. IndexError beyond the last, DuplicateField where a field comes
        twice.
        """
        fields: dict[str, bytes] = {}
        for n in range(self._firsts[i], self._firsts[i + 1]):
            name, start = self._names[n], self._starts[n]
            if name in fields:
                raise DuplicateField(
                    f"{redact(self.url)}: the member whose data is at byte {start} gives sample {self.keys[i]!r} the"
                    f" field {name!r} again; it has {list(fields)}"
                )
            fields[name] = self._map[start : start + self._sizes[n]]
        return fields


class OpenShards:
    """The most recently used ``size`` shards, open. Safe for threads; a child process begins with none.

    ``accesses`` and ``misses`` count calls of `get_shard`, and those that had to open a shard.
    """

    def __init__(self, size: int, files: ShardFiles) -> None:
        self.size = size
        self.files = files
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._open: OrderedDict[str, MappedShard] = OrderedDict()
        self.reset_stats()

    def __len__(self) -> int:
        return len(self._open)

    def reset_stats(self) -> None:
        """Count from 0 again."""
        self.accesses = self.misses = 0

    def get_shard(self, url: str) -> MappedShard:
        """Return the shard at ``url``; opened, and fetched, where it is not open."""
        if self._pid != os.getpid():  # forked: a thread of the parent may have held the lock
            self._begin()
        with self._lock:
            self.accesses += 1
            if (shard := self._recent(url)) is not None:
                return shard
            opening = self._opening.setdefault(url, threading.Lock())
        with opening:  # one thread opens it; others go on with their shards meanwhile
            with self._lock:
                if (shard := self._recent(url)) is not None:
                    return shard
                self.misses += 1
            file = self.files.open(url)
            try:
                shard = MappedShard(url, file)
            except ShardFormatError as exn:
                self.files.forget(file.name)
                raise type(exn)(f"{exn} (read from {file.name})") from exn
            with self._lock:
                self._opening.pop(url, None)
                self._open[url] = shard
                while len(self._open) > self.size:
                    self._open.popitem(last=False)  # closed when its last reader has done
            return shard

    def _recent(self, url: str) -> MappedShard | None:
        shard = self._open.get(url)
        if shard is not None:
            self._open.move_to_end(url)
        return shard

    def clear(self) -> None:
        """Close all."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "files": self.files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _cannot_keep(url: str, path: Path, exn: OSError) -> StorageError:
    return StorageError(
        f"{redact(url)}: cannot be kept at {path}: {exn}; give a cache_dir= (or WDS_CACHE) that can be written"
    )


def _open_local(path: str, url: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise ShardNotFound(
            f"{redact(url)}: there is no such file. Check the path and the working directory."
        ) from None
    except PermissionError as exn:
        raise AccessDenied(f"{redact(url)}: {exn.strerror}. Check the file's permissions.") from None


def _is_compressed(file: BinaryIO, url: str) -> bool:
    """Return True where a shard's bytes are not the tar's own. ``file`` is at its start before and after."""
    head = file.read(_PEEK_BYTES)
    pieces = iter((memoryview(head),))
    try:
        inner = plain(lambda: next(pieces, None), url)()
        return inner is not None and bytes(inner[:_PEEK_BYTES]) != head
    except ShardFormatError:  # a compressed stream, cut by the peek
        return True
    finally:
        file.seek(0)


def _write_plain(url: str, cache: ShardCache | None, write: Callable[[memoryview], None]) -> None:
    """Call ``write`` with the plain tar of a shard. A copy in ``cache`` that is broken is not used again."""
    with open_shards([url], cache=cache) as opened:
        enforce(opened)
        for stream in opened:
            try:
                read = plain(stream.read, url)
                while (piece := read()) is not None:
                    write(piece)
            except ShardFormatError:
                stream.reject()
                raise
