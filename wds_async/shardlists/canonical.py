"""Global batches in an order that does not depend on ranks and workers: ``WebDataset(canonical=…, index=…)``."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wds_async import world
from wds_async.arguments import check_size
from wds_async.checkpoint.states import Counted, StageState
from wds_async.errors import ConfigError, StateError
from wds_async.logs import warn_once
from wds_async.stages import PipelineStage, Traits

if TYPE_CHECKING:
    from wds_async.shardlists.spans import SampleOffsets

__all__ = ["CanonicalSplit", "CanonicalState", "GlobalBatches", "check_canonical", "samples_counted"]

logger = logging.getLogger("wds_async")


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """Plan of the global batches of an epoch of ``total`` samples, with ``batch`` samples each.

    ``places``: each batch takes as many samples from so many places of the epoch, which are equally far from each
    other. ``equal``: "drop" leaves out the samples behind the last whole batch, "pad" fills that batch with the last
    sample of the epoch, "repeat" with its first ones.
    """

    total: int
    batch: int
    equal: str = "drop"
    places: int = 1

    def __len__(self) -> int:
        return self.total // self.batch if self.equal == "drop" else -(-self.total // self.batch)

    @property
    def left_out(self) -> int:
        """Samples that are in no batch."""
        return max(0, self.total - len(self) * self.batch)

    def runs(self, number: int, first: int, behind: int) -> Iterator[tuple[int, int]]:
        """Yield the samples that are in global batch ``number``, from its sample ``first`` to before ``behind``, as
        runs: by their number in the epoch, the first and the one behind the last."""
        each = self.batch // self.places
        for place in range(first // each, -(-behind // each)):
            at = (place * len(self) + number - place) * each
            yield from self._filled(at + max(first, place * each), at + min(behind, (place + 1) * each))

    def _filled(self, first: int, behind: int) -> Iterator[tuple[int, int]]:
        """Yield the part of the run for which there are samples, and then the samples that fill it up."""
        if first < self.total:
            yield first, min(behind, self.total)
        for missing in range(max(first, self.total), behind):
            again = missing % self.total if self.equal == "repeat" else self.total - 1
            yield again, again + 1


class CanonicalState(StageState):
    """State of `CanonicalSplit`: the ``first`` global batch of a run; samples and places of each (``shape``)."""

    def __init__(self) -> None:
        self.first = 0
        self.shape = (0, 0)

    def save_start(self) -> dict[str, Any]:
        return {"first": self.first, "shape": list(self.shape)}

    def load(self, saved: dict[str, Any]) -> None:
        self.first, self.shape = saved["first"], tuple(saved["shape"])


def samples_counted(source: Iterable[Any], *, state: Counted | None = None) -> Iterator[Any]:
    """Yield the samples of ``source`` and count them in ``state``, from which a state tells how far its worker has
    come.
    """
    state = state or Counted()
    for sample in source:
        state.add()
        yield sample


samples_counted.traits = Traits(one_to_one=True, same_items=True, state=Counted)  # type: ignore[attr-defined]


class CanonicalSplit(PipelineStage):
    """The stage that shares out global batches of ``batch`` samples: each rank gets an equal run of every one, and
    worker w of W the batches w, w + W, …, in the order in which a DataLoader asks for them.

    ``indexes`` tell where the samples of each shard are. ``equal`` and ``places`` are those of `GlobalBatches`; None is
    "drop", with a warning where samples are left out.
    """

    traits = Traits(state=CanonicalState)

    def __init__(
        self, indexes: Mapping[str, SampleOffsets], batch: int, equal: str | None = None, places: int = 1
    ) -> None:
        self.indexes, self.equal = indexes, equal
        self.batch, self.places = check_canonical(batch), places
        if self.batch % places:
            raise ConfigError(
                f"canonical={batch}, interleave={places}: each global batch takes as many samples from each of these "
                "places; make the one a multiple of the other"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """The samples of a global batch, and the places of the epoch that they are from."""
        return self.batch, self.places

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise StateError where ``shape``, which was saved, is that of other batches."""
        if tuple(shape) != self.shape:
            raise StateError(
                "the state is of global batches of {} samples from {} places, and these are of {} from {}: canonical= "
                "and interleave= have to stay as they were".format(*shape, *self.shape)
            )

    def of_rank(self, world_size: int) -> int:
        """Return the number of samples of a global batch that each rank gets. ConfigError if ranks do not divide it."""
        if self.batch % world_size:
            raise ConfigError(
                f"canonical={self.batch}: {world_size} ranks cannot share a global batch of {self.batch} samples "
                "equally; take a number of ranks that divides it"
            )
        return self.batch // world_size

    def samples_of_workers(self, urls: Sequence[str], workers: int) -> tuple[int, ...]:
        """Return the numbers of samples that the ``workers`` of a rank get in an epoch of ``urls``."""
        batches = len(self._batches(sum(len(self.indexes[url]) for url in urls)))
        each = self.of_rank(world.place().world_size)
        return tuple(each * len(range(worker, batches, workers)) for worker in range(workers))

    def run(self, source: Iterable[Any], *, state: CanonicalState | None = None) -> Iterator[dict[str, Any]]:
        """Yield the spans of the shards of ``source`` with the samples of this rank and worker."""
        state = state or CanonicalState()
        if state.shape != (0, 0):
            self.check_shape(state.shape)
        state.shape = self.shape
        return self._spans(source, state.first, world.place())

    def _batches(self, total: int) -> GlobalBatches:
        return GlobalBatches(total, self.batch, self.equal or "drop", self.places)

    def _spans(self, source: Iterable[Any], begin: int, here: world.Place) -> Iterator[dict[str, Any]]:
        shards = [{"url": item} if isinstance(item, str) else dict(item) for item in source]
        indexes = [self.indexes[shard["url"]] for shard in shards]
        ends = list(itertools.accumulate(map(len, indexes)))
        batches = self._batches(ends[-1] if ends else 0)
        self._check_total(batches, here)
        for which, i, j in _pieces(_joined(self._runs(batches, here, begin)), ends):
            index = indexes[which]
            span = {**shards[which], "version": index.version}
            if j - i < len(index):
                span |= {"start": int(index.starts[i]), "stop": index.stop(j - 1)}
            yield span

    def _runs(self, batches: GlobalBatches, here: world.Place, begin: int) -> Iterator[tuple[int, int]]:
        size = self.of_rank(here.world_size)
        for number in range(begin + here.worker, len(batches), here.num_workers):
            yield from batches.runs(number, here.rank * size, (here.rank + 1) * size)

    def _check_total(self, batches: GlobalBatches, here: world.Place) -> None:
        """Raise ConfigError if there is no batch; warn, once per job, about samples that are left out."""
        if not len(batches):
            raise ConfigError(
                f"canonical={self.batch}: the epoch has {batches.total} samples, fewer than a global batch; make it "
                "smaller, or give equal='repeat'"
            )
        if not (batches.left_out and here.rank == here.worker == 0):
            return
        text = "canonical=%d: %d of %d samples are left out of this epoch, less than a global batch"
        figures = self.batch, batches.left_out, batches.total
        if self.equal is None:
            advice = "; equal='pad' or 'repeat' fills the last one, equal='drop' says that it is meant"
            warn_once(logger, "canonical", f"{text}{advice}", *figures)
        else:
            logger.info(text, *figures)


def check_canonical(batch: Any) -> int:
    """Return the size of a global batch. ConfigError or TypeError for an invalid one."""
    if batch is True:
        raise ConfigError(
            "canonical=True: say of how many samples a global batch is, over all ranks (canonical=256). That is what "
            "stays as it is when the number of ranks changes; .batched(n) makes a rank's part of it"
        )
    return check_size("WebDataset", "canonical", batch, at_least=1)


def _joined(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ``runs``, joining adjacent ones, up to a million samples."""
    start = stop = 0
    for first, behind in runs:
        if first != stop or behind - start > 1_000_000:
            if stop > start:
                yield start, stop
            start = first
        stop = behind
    if stop > start:
        yield start, stop


def _pieces(runs: Iterable[tuple[int, int]], ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the shards that ``runs`` are in, by number, with the first sample of each and the one behind the last.
    ``ends`` are the samples behind each shard."""
    which = 0
    for first, behind in runs:
        at = first
        if not (at < ends[which] and (not which or ends[which - 1] <= at)):
            which = bisect.bisect_right(ends, at)
        while at < behind:
            begin, stop = (ends[which - 1] if which else 0), min(behind, ends[which])
            if stop > at:
                yield which, at - begin, stop - begin
            at = stop
            which += at < behind
