"""The shards that the matrix reads: small, of several parts each, the same in every store."""

from __future__ import annotations

import functools
import io
import random
import tarfile

from tests.servers.shards import make_shard

__all__ = ["PART_BYTES", "Objects", "large", "small"]

PART_BYTES = 64 << 10


class Objects:
    """Shards by name, the samples in them, and where in each the headers and the payloads are."""

    def __init__(self, shards: int, samples: int, payload: int) -> None:
        self.contents: dict[str, bytes] = {}
        self.samples: list[tuple[str, dict[str, bytes]]] = []
        self._payloads: dict[str, list[tuple[int, int]]] = {}
        self._headers: dict[str, list[int]] = {}
        for shard in range(shards):
            fields = {
                f"{number:04d}": {"bin": random.Random(number).randbytes(payload), "cls": b"%d" % (number % 10)}
                for number in range(shard * samples, (shard + 1) * samples)
            }
            name = f"shard-{shard}.tar"
            self.contents[name] = content = make_shard(fields)
            self.samples += [(name, {"__key__": key.encode(), **values}) for key, values in fields.items()]
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                found = archive.getmembers()
            self._payloads[name] = [(m.offset_data, m.offset_data + m.size) for m in found if m.size == payload]
            self._headers[name] = [m.offset for m in found if m.offset]

    @property
    def total_bytes(self) -> int:
        return sum(map(len, self.contents.values()))

    @property
    def parts(self) -> int:
        """The requests that a reading by ranges needs."""
        return sum(-(-len(content) // PART_BYTES) for content in self.contents.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest shard."""
        return max(map(len, self.contents.values()))

    @property
    def half_a_sample(self) -> int:
        """The offset between the two members of a sample in the middle of each shard."""
        (offsets,) = {tuple(headers) for headers in self._headers.values()}
        return offsets[len(offsets) // 4 * 2]

    def payload_in(self, name: str, first: int, end: int) -> int | None:
        """The offset of a payload's byte in ``[first, end)``."""
        for start, stop in self._payloads[name]:
            low, high = max(start, first), min(stop, end)
            if low < high:
                return (low + high) // 2
        return None

    def header_in(self, name: str, first: int, end: int) -> int | None:
        """The offset of a header in ``[first, end)``, not that of the shard's first: that one says what the file is."""
        return next((at for at in self._headers[name] if first <= at and at + 512 <= end), None)


@functools.cache
def large() -> Objects:
    """Three shards of three parts."""
    return Objects(shards=3, samples=6, payload=24 << 10)


@functools.cache
def small() -> Objects:
    """Two shards of two parts, for faults that take time."""
    return Objects(shards=2, samples=4, payload=24 << 10)
