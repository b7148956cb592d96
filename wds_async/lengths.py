"""How many items one rank receives, where that follows from what is known before anything is read.

Known is the number of samples of each shard, from an index. What splitting makes of it depends on which shards a
worker gets; what a batch makes of it, on each worker's own number. A stage that may drop or add items ends the
knowledge: a wrong length is worse than none, for a loop that trusts it stops early or waits for ever.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wds_async import world
from wds_async.filters import basic, batch, fields, shuffling
from wds_async.handlers import reraise_exception
from wds_async.pipeline import FilterFunction
from wds_async.reading.stage import ReadingStage
from wds_async.shardlists import lists
from wds_async.shardlists.mixture import Mixture

__all__ = ["Length", "batched", "of", "of_shards", "through", "together"]


@dataclass(frozen=True, slots=True)
class Length:
    """``total`` items of one rank, and of each of its workers where that is known too."""

    total: int
    by_worker: tuple[int, ...] | None
    in_batches: tuple[int, ...] | None = None
    """Where the items are batches: the samples in those of each worker, as far as that is known."""


def of(stages: Sequence[Any], workers: int = 1) -> Length | None:
    """What the pipeline of these stages gives one rank of ``workers`` DataLoader workers; None where that is not
    known."""
    first, rest = stages[0], stages[1:]
    if isinstance(first, Mixture):
        return through(together(of(source.pipeline, workers) for source in first.datasets), rest)
    reading = next((i for i, stage in enumerate(rest) if isinstance(stage, ReadingStage)), None)
    if reading is None or not isinstance(first, lists.SimpleShardList) or not first.counts:
        return None
    splitters = [stage for stage in rest[:reading] if not isinstance(stage, shuffling.detshuffle)]
    read = of_shards(first.urls, first.counts, splitters, len(splitters) < reading, workers)
    return through(read, rest[reading + 1 :])


def of_shards(
    urls: Sequence[str], counts: Mapping[str, int], splitters: Iterable[Any], shuffled: bool, workers: int
) -> Length | None:
    """The samples of this rank; None where that is not known, or differs between epochs.

    ``counts`` are the samples of each shard and ``splitters`` the stages that share them out. With ``shuffled`` the
    order changes each epoch: then all shards have to be alike, unless nobody else takes any.
    """
    numbers = [counts.get(url) for url in urls]
    known = [n for n in numbers if n is not None]
    if len(known) < len(numbers):
        return None
    here = world.place()
    shares = [known]
    for splitter in splitters:
        if splitter is lists.split_by_node:
            if shuffled and here.world_size > 1 and len(set(known)) > 1:
                return None
            shares = [share[here.rank :: here.world_size] for share in shares]
        elif splitter is lists.split_by_worker:
            shares = [share[worker::workers] for share in shares for worker in range(workers)]
        elif splitter is not lists.single_node_only:
            return None
    if len(shares) != workers:
        shares = shares * workers  # no splitting by worker: each reads everything
    steady = not shuffled or workers == 1 or len(set(known)) == 1
    totals = tuple(sum(share) for share in shares)
    return Length(sum(totals), totals if steady else None)


def together(lengths: Iterable[Length | None]) -> Length | None:
    """Several streams of the same rank and workers, one after another or mixed."""
    found = list(lengths)
    known = [length for length in found if length is not None]
    if len(known) < len(found):
        return None
    columns = [length.by_worker for length in known if length.by_worker is not None]
    by_worker = tuple(map(sum, zip(*columns, strict=True))) if len(columns) == len(known) else None
    return Length(sum(length.total for length in known), by_worker)


def through(length: Length | None, stages: Iterable[Any]) -> Length | None:
    """What is left of ``length`` behind ``stages``."""
    for stage in stages:
        if length is None:
            return None
        if _function(stage) in (batch._unbatched, batch._unlisted):
            samples = length.in_batches
            length = None if samples is None else Length(sum(samples), samples)
            continue
        effect = _effect(stage)
        if effect is None:
            return None
        if effect is not _same:
            if length.by_worker is None:
                return None
            numbers = tuple(map(effect, length.by_worker))
            in_batches = _in_batches(length.by_worker, stage) if _function(stage) is batch._batched else None
            length = Length(sum(numbers), numbers, in_batches)
        elif _function(stage) not in (shuffling._shuffle, None):  # any other may change what is in a batch
            length = replace(length, in_batches=None)
    return length


def batched(length: Length, size: int, *, partial: bool, whole: bool) -> Length | None:
    """What a DataLoader of batches of ``size`` gives of ``length``, in one stream. ``partial``: it keeps the last
    batch of each worker. ``whole``: its batches hold all samples that go in, as torch's own collation sees to."""
    if length.by_worker is None:
        return None
    total = sum(map(_batches(size, partial=partial), length.by_worker))
    samples = sum(n if partial else n // size * size for n in length.by_worker)
    return Length(total, (total,), (samples,) if whole else None)


def _in_batches(by_worker: tuple[int, ...], stage: Any) -> tuple[int, ...] | None:
    """The samples in what the stage `batched` makes; None where a program's own collation may change the number."""

    def samples(
        batchsize: int = 20, collation_fn: Any = batch.default_collation_fn, partial: bool = True
    ) -> tuple[int, ...] | None:
        if collation_fn not in (None, batch.default_collation_fn):
            return None
        return tuple(n if partial else n // batchsize * batchsize for n in by_worker)

    return samples(*stage.args, **stage.kw)


def _same(n: int) -> int:
    return n


# Stages that give out one item for each that comes in, unless a handler drops some.
_KEEPING = (
    basic._associate,
    basic._decode,
    basic._info,
    basic._log_keys,
    basic._map_dict,
    basic._map_tuple,
    fields._extract_keys,
    fields._rename,
    fields._rename_keys,
    fields._to_tuple,
    shuffling._shuffle,
)


def _effect(stage: Any) -> Callable[[int], int] | None:
    """What ``stage`` makes of a number of items; None where that cannot be told."""
    if isinstance(stage, basic.Cached | shuffling.detshuffle):
        return _same
    if not isinstance(stage, FilterFunction):
        checks = getattr(getattr(stage, "func", stage), "keeps_length", False)  # `Watch`, `check_empty`
        return _same if checks else None
    function = _function(stage)
    if _handler(stage) not in (None, reraise_exception):
        return None
    if function in _KEEPING:
        return _same
    if function is batch._batched:
        return _batched(*stage.args, **stage.kw)
    if function is itertools.islice:
        cut = slice(*stage.args)
        return lambda n: len(range(n)[cut])
    return None


def _handler(stage: FilterFunction) -> Any:
    """Return the handler that ``stage`` was given, by name or by position; None where it was given none."""
    try:
        given = inspect.signature(_function(stage)).bind(None, *stage.args, **stage.kw).arguments
    except (TypeError, ValueError):  # of C, or not callable so: it raises when it runs
        return stage.kw.get("handler")
    return given.get("handler", given.get("kw", {}).get("handler"))


def _function(stage: Any) -> Any:
    """The function that a stage was made of by `pipelinefilter`; None for other stages."""
    return getattr(stage.f, "f", stage.f) if isinstance(stage, FilterFunction) else None


def _batched(batchsize: int = 20, collation_fn: Any = None, partial: bool = True) -> Callable[[int], int]:
    return _batches(batchsize, partial=partial)


def _batches(size: int, *, partial: bool) -> Callable[[int], int]:
    return lambda n: -(-n // size) if partial else n // size
