"""Which chunks of an object are on disk, and what their checksums are. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

__all__ = ["CHUNK_BYTES", "PAGE", "Chunks"]

CHUNK_BYTES = 2 << 20
"""As large as the engine's parts, so that a chunk is one request."""
PAGE = 512
"""Chunks whose checksums are one row of the index."""

_RECORD = struct.Struct("<HI")


class Chunks:
    """The chunks of one object of ``size`` bytes (None: not known yet).

    A chunk is *there* with its CRC-32C. It is *trusted* once this process has written it, or compared it. It *stays*
    unless it is in the transit share, from where it may go at any time.
    """

    def __init__(self, size: int | None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.size = size
        self.chunk_bytes = chunk_bytes
        self.passing: set[int] = set()
        """Those of the transit share."""
        self._crcs: dict[int, int] = {}
        self._trusted: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self._crcs

    @property
    def count(self) -> int | None:
        """How many chunks the object has."""
        return None if self.size is None else -(-self.size // self.chunk_bytes)

    @property
    def whole(self) -> bool:
        """Whether all of them are there."""
        return len(self._crcs) == self.count

    @property
    def settled(self) -> bool:
        """Whether all of them are there, trusted, and stay."""
        return not self.passing and len(self._trusted) == self.count

    def trusted(self, number: int) -> bool:
        """Whether the chunk may be served as it is."""
        return number in self._trusted

    def crc(self, number: int) -> int:
        """The CRC-32C of a chunk that is there."""
        return self._crcs[number]

    def add(self, number: int, crc: int, *, passing: bool = False) -> None:
        """The chunk was written by this process."""
        self._crcs[number] = crc
        self._trusted.add(number)
        if passing:
            self.passing.add(number)

    def trust(self, number: int) -> None:
        """What lies on disk was compared with the checksum."""
        self._trusted.add(number)

    def distrust(self, number: int | None = None) -> None:
        """Have a chunk (None: every one) compared with its checksum again before it is served."""
        if number is None:
            self._trusted.clear()
        else:
            self._trusted.discard(number)

    def drop(self, number: int) -> None:
        """The chunk is not there any more."""
        self._crcs.pop(number, None)
        self._trusted.discard(number)
        self.passing.discard(number)

    def numbers(self) -> list[int]:
        """The chunks that are there."""
        return sorted(self._crcs)

    def bounds(self, number: int) -> tuple[int, int]:
        """First byte of a chunk, and the one behind its last."""
        start = number * self.chunk_bytes
        stop = start + self.chunk_bytes
        return start, stop if self.size is None else min(stop, self.size)

    def length(self, number: int) -> int:
        """Bytes of a chunk."""
        start, stop = self.bounds(number)
        return stop - start

    def over(self, start: int, stop: int) -> range:
        """The chunks that hold bytes ``[start, stop)``."""
        return range(start // self.chunk_bytes, -(-stop // self.chunk_bytes)) if stop > start else range(0)

    def ready(self, start: int, stop: int, *, passing: bool = False) -> int:
        """The end of what is there from ``start`` on, trusted and staying (with ``passing``: or in transit)."""
        if self.size is not None:
            stop = min(stop, self.size)
            if self.settled:
                return max(start, stop)
        number, chunk = start // self.chunk_bytes, self.chunk_bytes
        while number * chunk < stop and number in self._trusted and (passing or number not in self.passing):
            number += 1
        return max(start, min(stop, number * chunk))

    # -- rows of the index

    def page(self, page: int) -> bytes:
        """The checksums of the page's chunks that stay, for the index."""
        first = page * PAGE
        return b"".join(
            _RECORD.pack(number - first, self._crcs[number])
            for number in range(first, first + PAGE)
            if number in self._crcs and number not in self.passing
        )

    def load(self, pages: Iterable[tuple[int, bytes]]) -> None:
        """What the index says is there; none of it is trusted. What makes no sense is passed over."""
        for page, packed in pages:
            for number, crc in _unpack(page, packed):
                if self.count is None or number < self.count:
                    self._crcs[number] = crc


def _unpack(page: int, packed: bytes) -> Iterator[tuple[int, int]]:
    whole = len(packed) - len(packed) % _RECORD.size
    for place, crc in _RECORD.iter_unpack(packed[:whole]):
        yield page * PAGE + place, crc
