"""Members and samples of shards with their offsets, as ``ls`` and ``cat`` show them, read through the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.errors import ConfigError, UrlError
from wds_async.shardlists import spec
from wds_async.storage.listing.expand import expand_listed
from wds_async.tar import decompress, group, parse
from wds_async.transfer import reader

__all__ = ["ListedShard", "counted", "entries", "expand", "human", "made", "members", "raw", "samples"]


@dataclass
class ListedShard:
    """One sample: ``key``, shard ``url``, ``offset`` of its first header in the (decompressed) tar, ``fields``.

    ``offset`` is None for a sample that a function made without one.
    """

    key: str
    url: str
    offset: int | None
    fields: dict[str, bytes] = field(default_factory=dict)


def expand(specs: Iterable[str]) -> list[str]:
    """Return every URL that the arguments stand for: URLs, patterns, and specifications in YAML or JSON (all sources).

    Raises UrlError for ``module:function``, which stands for samples and not for shards.
    """
    urls: list[str] = []
    for name in specs:
        if spec.is_function(name):
            raise UrlError(f"{name} makes samples, and this takes shards: give a URL, a path or a specification")
        if spec.is_specification(name):
            urls += (url for source in spec.load(name).sources for url in source.urls)
        else:
            urls += expand_listed(name)
    if not urls:
        raise UrlError("no URL given: name at least one shard, for example 'train-{000..009}.tar'")
    return urls


def members(shards: Iterable[str]) -> Iterator[tuple[str, parse.Member]]:
    """Yield every regular file of every shard, with the shard's URL."""
    with reader.open_shards(shards) as opened:
        for stream in opened:
            for member in _members(stream):
                yield stream.url, member


def _members(stream: reader.ShardStream) -> Iterator[parse.Member]:
    plain = decompress.plain(stream.read, stream.url)
    return parse.members(plain, stream.url, end_required=stream.is_open_ended)


def samples(shards: Iterable[str]) -> Iterator[ListedShard]:
    """Yield adjacent members of one key as samples, as `WebDataset` groups them; nameless ones are passed over."""
    with reader.open_shards(shards) as opened:
        for stream in opened:
            for sample in group.samples(_members(stream), stream.url):
                fields = {name: data for name, data in sample.items() if name not in ("__key__", "__url__")}
                yield ListedShard(sample["__key__"], sample.shard, sample.offset, fields)


def made(name: str) -> Any:
    """Return the result of ``module:function``; modules of the working directory are found, as by ``python -m``."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    return spec.call(name)


def entries(specs: Iterable[str]) -> Iterator[ListedShard]:
    """Yield the samples of everything that the arguments stand for: shards, specifications, ``module:function``."""
    for name in specs:
        yield from _made_entries(name) if spec.is_function(name) else samples(expand([name]))


def _made_entries(name: str) -> Iterator[ListedShard]:
    for number, sample in enumerate(made(name)):
        if not isinstance(sample, Mapping):
            raise ConfigError(
                f"{name} gives items of type {type(sample).__name__}; samples, which are dicts, can be shown "
                "(`wds-async bench` measures any)"
            )
        fields = {field: _bytes(value) for field, value in sample.items() if not field.startswith("__")}
        where = str(sample.get("__url__", name))
        yield ListedShard(str(sample.get("__key__", number)), where, getattr(sample, "offset", None), fields)


def _bytes(value: Any) -> bytes:
    """Return a field as it is shown: its bytes or text, else its ``repr``."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return (value if isinstance(value, str) else repr(value)).encode()


def raw(shards: Iterable[str], **how: Any) -> Iterator[memoryview]:
    """Yield the bytes of every shard as the store holds them, one after another; each view is valid until the next.
    ``how``: as of `reader.open_shards`."""
    with reader.open_shards(shards, **how) as opened:
        for stream in opened:
            while (view := stream.read()) is not None:
                yield view


def counted(count: int, what: str) -> str:
    """Return ``count`` with its noun: ``1 shard``, ``1,200 shards``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def human(count: float) -> str:
    """Return bytes in powers of 1000, as disks and networks count: ``1.5 kB`` for 1536."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
