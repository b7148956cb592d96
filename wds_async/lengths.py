"""How many items one rank receives, where that follows from what is known before anything is read.

Known is the number of samples of each shard, from an index. What splitting makes of it depends on which shards a
worker gets; what a batch makes of it, on each worker's own number. A stage that may drop or add items ends the
knowledge: a wrong length is worse than none, for a loop that trusts it stops early or waits for ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wds_async import world
from wds_async.filters.shuffling import detshuffle
from wds_async.handlers import reraise_exception
from wds_async.pipeline import Traits, traits_of
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
    splitters = [stage for stage in rest[:reading] if not isinstance(stage, detshuffle)]
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
    """Return what is left of ``length`` behind ``stages``."""
    for stage in stages:
        if length is None:
            return None
        length = _behind(stage, length)
    return length


def _behind(stage: Any, length: Length) -> Length | None:
    traits = traits_of(stage)
    if traits is None or not _raises(stage, traits):
        return None
    if traits.takes_batches:
        samples = length.in_batches
        return None if samples is None else Length(sum(samples), samples)
    if traits.one_to_one:
        return length if traits.same_items else replace(length, in_batches=None)
    if traits.count is None or length.by_worker is None:
        return None
    numbers = tuple(traits.count(n, *stage.args, **stage.kw) for n in length.by_worker)
    batches = traits.batches or (lambda *args, **kw: None)
    contents = [batches(n, *stage.args, **stage.kw) for n in length.by_worker]
    samples = tuple(n for n in contents if n is not None)
    return Length(sum(numbers), numbers, samples if len(samples) == len(contents) else None)


def _raises(stage: Any, traits: Traits) -> bool:
    """Whether ``stage`` raises for a sample that fails, and drops none."""
    if not traits.handler:
        return True
    try:
        bound = inspect.signature(stage.f).bind(None, *stage.args, **stage.kw)
    except TypeError:  # it raises when it runs
        return False
    return bound.arguments.get(traits.handler) in (None, reraise_exception)


def batched(length: Length, size: int, *, partial: bool, whole: bool) -> Length | None:
    """What a DataLoader of batches of ``size`` gives of ``length``, in one stream. ``partial``: it keeps the last
    batch of each worker. ``whole``: its batches hold all samples that go in, as torch's own collation sees to."""
    if length.by_worker is None:
        return None
    total = sum(-(-n // size) if partial else n // size for n in length.by_worker)
    samples = sum(n if partial else n // size * size for n in length.by_worker)
    return Length(total, (total,), (samples,) if whole else None)
