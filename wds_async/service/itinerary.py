"""The shards of a plan, in order: a list that may be long, kept small."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from wds_async.service.names import Named

__all__ = ["BLOCK", "Itinerary"]

BLOCK = 256
_BLOCKS_AT_HAND = 4


class Itinerary:
    """URLs in blocks of 256, compressed: names of shards differ in a few digits, so each costs some bytes. ``named``
    says what a request for one would name, None for one that names nothing; it is asked when a block is opened, and a
    few blocks are kept open."""

    def __init__(self, named: Callable[[str], Named | None]) -> None:
        self._named = named
        self._count = 0
        self._blocks: list[bytes] = []
        self._open: dict[int, _Block] = {}
        self.bytes = 0
        """What the closed blocks take."""

    def add(self, shards: Sequence[str]) -> None:
        """Behind the others: as many as `BLOCK` holds, or fewer as the last ones. ValueError for "\\0" in one."""
        if not 0 < len(shards) <= BLOCK or self._count % BLOCK or any("\0" in url for url in shards):
            raise ValueError("no block of URLs")
        block = zlib.compress("\0".join(shards).encode("utf-8", "surrogatepass"), 1)
        self._blocks.append(block)
        self._count += len(shards)
        self.bytes += len(block)

    def __len__(self) -> int:
        return self._count

    def at(self, index: int) -> Named | None:
        """What the shard at ``index`` is; None where it names nothing. IndexError behind the end."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._block(index // BLOCK).names[index % BLOCK]

    def find(self, url: str, start: int, stop: int) -> int | None:
        """The first place of what is known by ``url`` from ``start`` on and before ``stop``; None where it is not
        there."""
        start, stop = max(start, 0), min(stop, self._count)
        while start < stop:
            base = start - start % BLOCK
            try:
                return base + self._block(start // BLOCK).urls.index(url, start - base, min(BLOCK, stop - base))
            except ValueError:
                start = base + BLOCK
        return None

    def _block(self, number: int) -> _Block:
        found = self._open.get(number)
        if found is None:
            shards = zlib.decompress(self._blocks[number]).decode("utf-8", "surrogatepass").split("\0")
            names = [self._named(url) for url in shards]
            found = self._open[number] = _Block(names, ["" if name is None else name.url for name in names])
            if len(self._open) > _BLOCKS_AT_HAND:
                del self._open[next(iter(self._open))]
        return found


class _Block(NamedTuple):
    names: list[Named | None]
    urls: list[str]
