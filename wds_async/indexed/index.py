"""The JSON index of a dataset: which shards, and how many samples each holds.

The format is that of ``wids`` (its version 1)::

    {"wids_version": 1, "name": "…", "base": "s3://bucket/data",
     "shardlist": [{"url": "train-000.tar", "nsamples": 1000, "filesize": 104857600}, …],
     "datasets": [{"source_url": "https://host/other.json"}, {"name": "…", "shardlist": […]}]}

URLs are relative to ``base``, without one to the place of the index itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import IO, Any

from wds_async.errors import ConfigError, WdsError
from wds_async.redact import redact
from wds_async.shardlists.document import Document, ValuePath, read
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.urls import local_path, merge_url, scheme

__all__ = ["load_index", "names_list", "placed_shards"]

Shard = dict[str, Any]

_LIST = re.compile(r"\.json(\.gz)?$", re.IGNORECASE)


def names_list(text: str) -> bool:
    """Return whether the path or URL ``text`` is that of such an index, by its name."""
    return _LIST.search(text.partition("?")[0]) is not None


def load_index(
    source: str | os.PathLike[str] | IO[Any],
    *,
    base: str | None = None,
    options: Mapping[str, Any] | None = None,
    storage: StorageOptions = NOTHING_GIVEN,
) -> dict[str, Any]:
    """Return the index at a path or URL, or in an open file, as its object with every shard in ``shardlist``.

    ``options`` go over the keys of the object; ``storage``: options of its store. A shard's URL is made absolute by
    ``base``, else by the object's own ``base``, else by the index's folder; the object's ``base`` then says which. The
    shards of ``datasets`` follow the object's own; each gets the ``dataset`` (its name), ``weight`` and ``source_url``
    of what it came from, where it has none.

    Raises ConfigError, with the line, for what is no index; UnsafeContent for an index from elsewhere that names a
    command or a file of this machine; and what reading the URL raises.
    """
    document = _opened(source, storage)
    data = {**_checked(document), **(options or {})}
    if data.get("wids_version") != 1:
        raise _wrong(document, ("wids_version",), f"wids_version is {data.get('wids_version')!r}, and only 1 is known")
    place = _base(document, data, base)
    shards = _rebased(document, (), data, place, weight=data.get("weight"), name=data.get("name"))
    parts = data.get("datasets", [])
    if not isinstance(parts, list):
        raise _wrong(document, ("datasets",), f"it is a {type(parts).__name__}, not a list")
    for number, part in enumerate(parts):
        shards += _component(document, ("datasets", number), part, place, storage)
    if not shards:
        raise _wrong(document, (), "it names no shards in 'shardlist' or 'datasets'")
    return {**data, "base": place, "shardlist": shards}


def _component(document: Document, path: ValuePath, part: Any, place: str, storage: StorageOptions) -> list[Shard]:
    """Return the shards of one entry of ``datasets``."""
    if not isinstance(part, dict):
        raise _wrong(document, path, f"{part!r:.80} is no object")
    weight, source = part.get("weight"), part.get("source_url")
    if source is None:
        place = _base(document, part, None) if part.get("base") else place
    else:
        there = merge_url(place, str(source))
        document.refuse_local((*path, "source_url"), there)
        document, path = read(there, storage), ()
        part = _checked(document)
        if "source_url" in part:
            raise _wrong(document, ("source_url",), "it refers to yet another index; name that one itself")
        place = _base(document, part, None)
    return _rebased(document, path, part, place, weight=weight, source_url=source, dataset=part.get("name"))


def _opened(source: str | os.PathLike[str] | IO[Any], storage: StorageOptions) -> Document:
    if isinstance(source, (str, os.PathLike)):
        return read(os.fspath(source), storage)
    name = redact(str(getattr(source, "name", "the index")))
    try:
        return Document(name, json.loads(source.read()))
    except ValueError as exn:  # of JSON, which names line and column, or of UTF-8
        raise ConfigError(f"{name}: not valid JSON: {exn}") from exn


def _checked(document: Document) -> dict[str, Any]:
    if not isinstance(document.data, dict):
        raise _wrong(document, (), f"it holds a {type(document.data).__name__}, not an object")
    return document.data


def _base(document: Document, data: Mapping[str, Any], base: str | None) -> str:
    """Return the base of the URLs in ``data``."""
    if base is not None:
        return base
    return merge_url(document.base, str(data["base"])) if data.get("base") else document.base


def _rebased(document: Document, path: ValuePath, data: Mapping[str, Any], place: str, **defaults: Any) -> list[Shard]:
    """Return copies of the object's shards, checked, their URLs absolute, with ``defaults`` that are not None."""
    defaults = {name: value for name, value in defaults.items() if value is not None}
    path = (*path, "shardlist")
    shards = data.get("shardlist", [])
    if not isinstance(shards, list):
        raise _wrong(document, path, f"it is a {type(shards).__name__}, not a list")
    rebased = []
    for number, shard in enumerate(shards):
        if not isinstance(shard, dict) or not isinstance(shard.get("url"), str):
            raise _wrong(document, (*path, number), f"{shard!r:.80}: a shard is an object with a 'url'")
        samples = shard.get("nsamples")
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            why = f"nsamples of {redact(shard['url'])} is {samples!r}, not a number of samples"
            raise _wrong(document, (*path, number), why)
        url = merge_url(place, shard["url"])
        document.refuse_local((*path, number, "url"), url)
        rebased.append({**defaults, **shard, "url": url})
    return rebased


def _wrong(document: Document, path: ValuePath, why: str) -> WdsError:
    return document.error(path, f"no index of shards: {why} (`wds-async index SHARDS… -o index.json` makes one)")


# ------------------------------------------------------------------ making one


def placed_shards(
    shards: Iterable[Mapping[str, Any]], *, base: str | None = None, folder: str | None = None
) -> list[Shard]:
    """Return ``shards`` with URLs as an index in ``folder`` names them (see `tar.index`).

    ``base`` is the URL of a folder where the shards will be, for those that are given as relative paths: copies at
    hand can be indexed for another place. Other local shards are named relative to ``folder``, if they lie in it, or
    absolute. URLs are written whole, as every reader of this format understands them.
    """
    placed = []
    for shard in shards:
        url = shard["url"]
        if base is not None and not scheme(url) and not os.path.isabs(url):
            url = merge_url(base, url.replace(os.sep, "/"))
        elif (path := local_path(url)) is not None:
            url = os.path.abspath(path) if folder is None else _below(os.path.abspath(path), os.path.abspath(folder))
        placed.append({**shard, "url": url})
    return placed


def _below(path: str, folder: str) -> str:
    """Return ``path`` relative to ``folder`` where it lies in it, so that both can move together; else absolute."""
    relative = os.path.relpath(path, folder)
    return path if relative.startswith(os.pardir) or os.path.isabs(relative) else relative.replace(os.sep, "/")
