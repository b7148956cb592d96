"""Members and samples of shards with their offsets, as ``ls`` and ``cat`` show them, read through the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from wds_async import urls
from wds_async.errors import UrlError
from wds_async.tar import decompress, group, parse
from wds_async.transfer import reader

__all__ = ["Entry", "expand", "human", "members", "raw", "samples"]


@dataclass
class Entry:
    """One sample: ``key``, shard ``url``, ``offset`` of its first header in the (decompressed) tar, ``fields``."""

    key: str
    url: str
    offset: int
    fields: dict[str, bytes] = field(default_factory=dict)


def expand(specs: Iterable[str]) -> list[str]:
    """Every URL that the arguments stand for."""
    found = [url for spec in specs for url in urls.expand_urls(spec)]
    if not found:
        raise UrlError("no URL given: name at least one shard, for example 'train-{000..009}.tar'")
    return found


def members(shards: Iterable[str]) -> Iterator[tuple[str, parse.Member]]:
    """Every regular file of every shard, with the shard's URL."""
    with reader.open_shards(shards) as opened:
        for stream in opened:
            plain = decompress.plain(stream.read, stream.url)
            for member in parse.members(plain, stream.url):
                yield stream.url, member


def samples(shards: Iterable[str]) -> Iterator[Entry]:
    """Adjacent members of one key, as `WebDataset` groups them; nameless ones are passed over."""
    with reader.open_shards(shards) as opened:
        for stream in opened:
            members = parse.members(decompress.plain(stream.read, stream.url), stream.url)
            for found in group.samples(members, stream.url):
                fields = {name: data for name, data in found.items() if name not in ("__key__", "__url__")}
                yield Entry(found["__key__"], found.shard, found.offset, fields)


def raw(shards: Iterable[str]) -> Iterator[memoryview]:
    """The bytes of every shard as the store holds them, one after another; each view is valid until the next."""
    with reader.open_shards(shards) as opened:
        for stream in opened:
            while (view := stream.read()) is not None:
                yield view


def human(count: float) -> str:
    """``1536`` → ``1.5 kB``: powers of 1000, as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
