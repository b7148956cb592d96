"""Division of an epoch's shards into equal byte spans for all ranks and workers: ``WebDataset(split="bytes")``."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_async import world
from wds_async.config import TransferConfig
from wds_async.errors import ConfigError
from wds_async.logs import warn_once
from wds_async.reading.spans import entry_of
from wds_async.redact import redact
from wds_async.stages import PipelineStage
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.cut import CutSpan
from wds_async.tar.decompress import compressed_by
from wds_async.tar.write import compression
from wds_async.transfer.probe import Probed, probe

__all__ = ["ByteSplit", "IndexedSplit", "SampleOffsets", "ShardSizes", "spans_of"]

logger = logging.getLogger("wds_async")

_NEAR_SHARE = 64
"""A cut that is nearer to the end of a shard than this part of a span, and than 64 KiB, is put there."""
_NEAR_BYTES = 64 << 10


class ShardSizes:
    """Sizes of shards in bytes, looked up once: ``known`` are those of an index, by URL; the others are found by one
    small ranged request each, many at once.

    ``whole`` are the shards that cannot be cut, because they are compressed.
    """

    def __init__(
        self,
        known: Mapping[str, int] | None = None,
        options: StorageOptions = NOTHING_GIVEN,
        transfer: TransferConfig | None = None,
    ) -> None:
        self._sizes = dict(known or {})
        self.whole = {url for url in self._sizes if compression(url, None)}
        self._options, self._transfer = options, transfer
        self._warn()

    def of(self, urls: Sequence[str]) -> list[int]:
        """Return the sizes of ``urls``. Raises the error of a shard that cannot be read, and ConfigError for one whose
        size is not known before it is read."""
        if missing := list(dict.fromkeys(url for url in urls if url not in self._sizes)):
            for shard in probe(missing, self._options, config=self._transfer):
                self._take(shard)
            self._warn()
        return [self._sizes[url] for url in urls]

    def _take(self, shard: Probed) -> None:
        if shard.error is not None:
            raise shard.error
        if shard.size is None:
            why = shard.why or "its server does not give its size"
            raise ConfigError(
                f'{redact(shard.url)}: split="bytes" cuts shards by their sizes, and that of this one is not known'
                f' ({why}); leave out split="bytes" to split by whole shards'
            )
        self._sizes[shard.url] = shard.size
        if compressed_by(shard.head):
            self.whole.add(shard.url)

    def _warn(self) -> None:
        if self.whole:
            example = redact(min(self.whole))
            warn_once(
                logger,
                "compressed",
                'split="bytes": %d of %d shards are compressed (%s), and cannot be cut: each is read whole by the '
                "worker whose span has its middle, so that shares differ by up to a shard",
                len(self.whole),
                len(self._sizes),
                example,
            )


class ByteSplit(PipelineStage):
    """Stage that divides an epoch's shards: each worker of each rank gets the same number of bytes.

    The shards stand end to end in the order of the epoch, and are cut into equal spans; the first worker of the first
    rank has the first one. A shard that is cut comes to its readers with its `CutSpan` (see `tar.cut`).
    """

    def __init__(self, sizes: ShardSizes) -> None:
        self.sizes = sizes

    def run(self, source: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield the shards of ``source``, or spans of them, that belong to this rank and worker."""
        here = world.place()
        shards = [{"url": item} if isinstance(item, str) else dict(item) for item in source]
        urls = [shard["url"] for shard in shards]
        number, count = here.rank * here.num_workers + here.worker, here.world_size * here.num_workers
        for which, span in spans_of(self.sizes.of(urls), number, count, lambda n: urls[n] in self.sizes.whole):
            yield entry_of(shards[which], span)


@dataclass(frozen=True, slots=True, eq=False)
class SampleOffsets:
    """Offsets and lengths of the samples of a plain tar, in bytes (arrays of integers), and the version of the shard to
    which they apply ("": unknown).
    """

    starts: Any
    lengths: Any
    version: str = ""

    def __len__(self) -> int:
        return len(self.starts)

    def stop(self, i: int) -> int:
        """Return the end of sample ``i``, in bytes."""
        return int(self.starts[i]) + int(self.lengths[i])


class IndexedSplit(PipelineStage):
    """`ByteSplit` of shards that have an index of samples: cuts are between samples, so that any plain tar can be cut.

    With ``equal`` each worker of each rank gets as many samples as any other: "drop" leaves out one sample of workers
    that would have one more, "pad" and "repeat" give the last or the first sample of the others again.
    """

    def __init__(self, indexes: Mapping[str, SampleOffsets], equal: str | None = None) -> None:
        self.indexes, self.equal = indexes, equal

    def run(self, source: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield the shards of ``source``, or spans of them, that belong to this rank and worker."""
        here = world.place()
        shards = [{"url": item} if isinstance(item, str) else dict(item) for item in source]
        indexes = [self.indexes[shard["url"]] for shard in shards]
        number, count = here.rank * here.num_workers + here.worker, here.world_size * here.num_workers
        ends = list(itertools.accumulate(map(len, indexes)))
        for first, behind in self._ranges(indexes, ends, number, count):
            for which in range(bisect.bisect_right(ends, first), len(ends)):
                index, begin = indexes[which], ends[which] - len(indexes[which])
                if begin >= behind:
                    break
                i, j = max(first - begin, 0), min(behind - begin, len(index))
                shard = {**shards[which], "version": index.version}
                if (i, j) == (0, len(index)):
                    yield shard
                else:
                    yield {**shard, "start": int(index.starts[i]), "stop": index.stop(j - 1)}

    def _ranges(
        self, indexes: Sequence[SampleOffsets], ends: Sequence[int], number: int, count: int
    ) -> Iterator[tuple[int, int]]:
        """Yield samples of part ``number`` of ``count``, by their number in the epoch: first and behind the last."""
        total = ends[-1] if ends else 0
        if self.equal is None:
            yield _by_bytes(indexes, ends, number, count), _by_bytes(indexes, ends, number + 1, count)
            return
        if total < count:
            raise ConfigError(f"equal={self.equal!r}: {total} samples for {count} workers of all ranks; start fewer")
        first, behind, least = total * number // count, total * (number + 1) // count, total // count
        if self.equal == "drop":
            if not number and total % count:
                logger.info("equal='drop': %d of %d samples are left out in this epoch", total % count, total)
            yield first, first + least
            return
        yield first, behind
        if behind - first == least < -(-total // count):
            yield (behind - 1, behind) if self.equal == "pad" else (first, first + 1)


def _by_bytes(indexes: Sequence[SampleOffsets], ends: Sequence[int], number: int, count: int) -> int:
    """Return the first sample, by its number in the epoch, of part ``number`` of ``count`` parts with equal bytes."""
    sizes = [index.stop(len(index) - 1) if len(index) else 0 for index in indexes]
    behind = list(itertools.accumulate(sizes))
    at = (behind[-1] if behind else 0) * number // count
    shard = bisect.bisect_right(behind, at)
    if shard == len(behind):
        return ends[-1] if ends else 0
    starts = indexes[shard].starts
    return ends[shard] - len(starts) + bisect.bisect_left(starts, at - behind[shard] + sizes[shard])


def spans_of(
    sizes: Sequence[int], number: int, count: int, is_whole: Callable[[int], bool] = lambda _: False
) -> Iterator[tuple[int, CutSpan]]:
    """Yield the shards, by number, with the piece of each that belongs to part ``number`` of ``count`` equal parts.

    ``is_whole(shard)``: it cannot be cut. All parts together are the shards, whatever ``count`` is.
    """
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    near = min(_NEAR_BYTES, total // count // _NEAR_SHARE)

    def edge(k: int) -> int:
        """Return the offset of part ``k`` among all bytes."""
        at = total * k // count
        shard = bisect.bisect_right(ends, at)
        if shard == len(ends):
            return total
        begin, end = ends[shard] - sizes[shard], ends[shard]
        if is_whole(shard):
            return begin if at - begin < end - at else end
        if at - begin <= near or end - at <= near:
            return begin if at - begin <= end - at else end
        return at

    start, stop, last = edge(number), edge(number + 1), number == count - 1
    first = bisect.bisect_right(ends, start)
    while first and not sizes[first - 1] and ends[first - 1] == start:  # an empty shard is read too: it is an error
        first -= 1
    for shard in range(first, len(ends)):
        begin, end = ends[shard] - sizes[shard], ends[shard]
        if max(begin, start) >= stop and not (last and begin == total):
            return
        cuts: list[int] = []
        for k in range(number + 1, count):
            at = edge(k)
            if at >= end:
                break
            if at > max(start, begin) and (not cuts or at - begin > cuts[-1]):
                cuts.append(at - begin)
        yield shard, CutSpan(max(0, start - begin), tuple(cuts))
