"""Places of the indexes of shards: beside them, in a folder, or in the cache folder; reading many indexes at once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from wds_async.config import transfer_config
from wds_async.errors import ConfigError, ShardFormatError, StorageError, WdsError
from wds_async.indexed.files import default_folder
from wds_async.indexed.shardindex import HEAD_BYTES, ShardFacts, ShardIndex, facts_in
from wds_async.redact import redact
from wds_async.shardcache.names import cache_name
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.storage.sink import LocalSink
from wds_async.tar.index import dali_name, energon_index, energon_name
from wds_async.transfer.reader import open_shards
from wds_async.urls import local_path

__all__ = ["KINDS", "cache_path", "cached_facts", "cached_index", "file_bytes", "keep", "places", "read_files"]

_FOLDER = ".index"
"""Folder of indexes within the cache folder; nothing there is taken for a shard, or removed."""
_LARGEST_BYTES = 1 << 30
_NAMES: dict[str, Callable[[str], str]] = {"dali": dali_name, "energon": energon_name, "wds": "{}.index".format}
KINDS = tuple(_NAMES)
"""Kinds of indexes of one shard."""


def places(urls: Sequence[str], kind: str, folder: str | None = None) -> list[str]:
    """Return where the indexes of ``urls`` are, by their `KINDS`: beside the shards, or in ``folder`` (a path or URL).

    ConfigError where two would be in the same place, and for what has no place: a command, standard input.
    """
    owners: dict[str, str] = {}
    found = []
    for url in urls:
        if locate(url).in_order:
            raise ConfigError(f"{redact(url)}: this has no place beside which an index could be; name a file or a URL")
        path, mark, query = (url, "", "") if local_path(url) is not None else url.partition("?")
        if folder is not None:
            path, mark, query = f"{folder.rstrip('/')}/{os.path.basename(path)}", "", ""
        place = f"{_NAMES[kind](path)}{mark}{query}"
        other = owners.setdefault(place, url)
        if other != url:
            why = "their indexes would have the same name; index them one after another, or give them other names"
            raise ConfigError(f"{redact(other)} and {redact(url)}: {why}")
        found.append(place)
    return found


def file_bytes(kind: str, index: ShardIndex, url: str, dali: str = "") -> bytes:
    """Return the bytes of the file for ``index``, that of the shard ``url``, by one of the `KINDS`. ``dali``: the text
    of DALI's, which `scan_shards` makes. ShardFormatError for a compressed shard, which Energon does not read."""
    if kind == "wds":
        return index.to_bytes()
    if kind == "dali":
        return dali.encode("utf-8", "surrogateescape")
    if not index.facts.plain:
        raise ShardFormatError(f"{redact(url)}: it is compressed, and Energon reads plain tars only")
    return energon_index(index.starts.tolist(), index.stop(len(index) - 1) if len(index) else 0)


def read_files(urls: Iterable[str], options: StorageOptions = NOTHING_GIVEN) -> Iterator[bytes | WdsError]:
    """Yield the bytes of each of ``urls``, or the error of reading it, in order; many are read at once."""
    with open_shards(urls, config=transfer_config(verify="never").taking_refusals(), options=options) as opened:
        for stream in opened:
            pieces, size = [], 0
            try:
                while (piece := stream.read()) is not None:
                    size += len(piece)
                    if size > _LARGEST_BYTES:
                        raise StorageError(f"{redact(stream.url)}: more than {_LARGEST_BYTES >> 30} GiB are no index")
                    pieces.append(bytes(piece))
                yield b"".join(pieces)
            except WdsError as exn:
                yield exn


def cache_path(url: str) -> Path:
    """Return the place of a shard's index in the cache folder (see `files.default_folder`)."""
    return _cache_folder() / _FOLDER / _NAMES["wds"](cache_name(url))


def _cache_folder() -> Path:
    return Path(os.path.abspath(os.path.expanduser(default_folder())))


def keep(index: ShardIndex, url: str) -> None:
    """Write the index of ``url`` into the cache folder. StorageError where it cannot be written."""
    folder = _cache_folder()
    # Among everybody's temporary files the folder is the user's own (see `default_folder`).
    with contextlib.suppress(OSError):
        folder.mkdir(0o700 if folder.parent == Path(tempfile.gettempdir()) else 0o777, parents=True, exist_ok=True)
    sink = LocalSink(str(cache_path(url)))
    try:
        sink.write(index.to_bytes())
        sink.commit()
    finally:
        sink.abort()


def cached_index(url: str) -> ShardIndex | None:
    """Return the index of ``url`` in the cache folder, None where there is no good one."""
    path = cache_path(url)
    try:
        return ShardIndex.from_bytes(path.read_bytes(), str(path))
    except (OSError, ConfigError):
        return None


def cached_facts(url: str) -> ShardFacts | None:
    """Return the facts in the head of that index, None where there is no good one."""
    path = cache_path(url)
    try:
        with path.open("rb") as file:
            return facts_in(file.read(HEAD_BYTES), str(path))
    except (OSError, ConfigError):
        return None
