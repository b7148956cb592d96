"""The small share of the cache for chunks that do not stay: they are there for whoever reads them now, and a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Chunk", "Transit"]

Chunk = tuple[int, int]
"""An entry's number, and which of its chunks."""

_MOST_LOOKED_AT = 512


class Transit:
    """At most ``limit_bytes`` of chunks. Those that a reader has passed go first, the oldest of them first; one that
    nobody has read yet goes only for what is wanted now."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.spent_bytes = 0
        self._unread: OrderedDict[Chunk, int] = OrderedDict()
        self._spent: OrderedDict[Chunk, int] = OrderedDict()
        self._of: dict[int, set[int]] = {}

    def put(self, chunk: Chunk, count: int, wanted: bool, held: Callable[[Chunk], bool]) -> list[Chunk] | None:
        """Take in a chunk; those that go for it. None: there is no room. ``held`` tells which must not go."""
        gone: list[Chunk] = []
        if count > self.limit_bytes:
            return None
        free = self.limit_bytes - self.bytes
        for pile in (self._spent, self._unread) if wanted else (self._spent,):
            for number, (other, size) in enumerate(pile.items()):
                if free >= count or number >= _MOST_LOOKED_AT:
                    break
                if not held(other):
                    gone.append(other)
                    free += size
        if free < count:
            return None
        for other in gone:
            self.drop(other)
        self._unread[chunk] = count
        self._of.setdefault(chunk[0], set()).add(chunk[1])
        self.bytes += count
        return gone

    def spend(self, chunk: Chunk) -> None:
        """A reader has passed it."""
        count = self._unread.pop(chunk, None)
        if count is not None:
            self._spent[chunk] = count
            self.spent_bytes += count

    def drop(self, chunk: Chunk) -> int:
        """It is not there any more; its bytes."""
        count = self._unread.pop(chunk, None)
        if count is None:
            count = self._spent.pop(chunk, 0)
            self.spent_bytes -= count
        numbers = self._of.get(chunk[0], set())
        numbers.discard(chunk[1])
        if not numbers:
            self._of.pop(chunk[0], None)
        self.bytes -= count
        return count

    def of(self, entry: int) -> int:
        """Bytes of an entry's chunks in transit."""
        numbers = self._of.get(entry, ())
        return sum(self._unread.get((entry, n), 0) or self._spent.get((entry, n), 0) for n in numbers)

    def drop_all(self, entry: int) -> int:
        """None of an entry's chunks is in transit any more; their bytes."""
        return sum(self.drop((entry, number)) for number in list(self._of.get(entry, ())))
