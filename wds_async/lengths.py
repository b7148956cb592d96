"""The number of items that one rank receives, where it follows from the samples of each shard, in an index or learnt.

A stage that may drop or add items ends the knowledge: a loop that trusts a wrong length stops early or waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wds_async import world
from wds_async.environment import value
from wds_async.filters.shuffling import detshuffle, epochshuffle
from wds_async.handlers import reraise_exception
from wds_async.reading.stage import ReadingStage
from wds_async.shardlists import lists
from wds_async.shardlists.mixture import Mixture
from wds_async.stages import Traits, bound_arguments, traits_of

__all__ = ["Length", "batched", "of", "of_shards", "through", "together"]


@dataclass(frozen=True, slots=True)
class Length:
    """``total`` items of one rank, and of each of its workers where that is known too.

    ``in_batches`` are the samples in the batches of each worker, where the items are batches and that is known.
    """

    total: int
    by_worker: tuple[int, ...] | None
    in_batches: tuple[int, ...] | None = None


def of(stages: Sequence[Any], workers: int = 1) -> Length | None:
    """Return the length for one rank of ``workers`` DataLoader workers; None where it is not known."""
    first, rest = stages[0], stages[1:]
    if isinstance(first, Mixture):
        return through(together(of(source.pipeline, workers) for source in first.datasets), rest)
    reading = next((i for i, stage in enumerate(rest) if isinstance(stage, ReadingStage)), None)
    if reading is None or not isinstance(first, lists.SimpleShardList):
        return None
    if reading and hasattr(split := rest[reading - 1], "samples_of_workers"):
        shares = split.samples_of_workers(first.urls, workers)
        return through(Length(sum(shares), shares), rest[reading + 1 :])
    counts = first.counts or _learnt(first.urls, rest[reading])
    if not counts:
        return None
    splitters = [stage for stage in rest[:reading] if not isinstance(stage, detshuffle | epochshuffle)]
    read = of_shards(first.urls, counts, splitters, len(splitters) < reading, workers)
    return through(read, rest[reading + 1 :])


def _learnt(urls: Sequence[str], reading: ReadingStage) -> Mapping[str, int]:
    """Return the samples of each shard, where they were learnt when it was read before; else nothing."""
    if not value("WDS_LEARN_INDEX"):
        return {}
    from wds_async.indexed.learnt import learns, learnt_counts  # noqa: PLC0415 (numpy)

    return learnt_counts(urls) if learns(reading.kw) else {}


def of_shards(
    urls: Sequence[str], counts: Mapping[str, int], splitters: Iterable[Any], shuffled: bool, workers: int
) -> Length | None:
    """Return the samples of this rank; None where they are not known, or differ between epochs.

    ``counts`` are the samples of each shard and ``splitters`` the stages that share them out. With ``shuffled`` the
    order changes each epoch: then all shards have to be alike, unless this rank reads all of them.
    """
    numbers = [counts[url] for url in urls if url in counts]
    if len(numbers) < len(urls):
        return None
    here, alike = world.place(), len(set(numbers)) == 1
    shares = [numbers]
    for splitter in splitters:
        if splitter is lists.split_by_node:
            if shuffled and here.world_size > 1 and not alike:
                return None
            shares = [share[here.rank :: here.world_size] for share in shares]
        elif splitter is lists.split_by_worker:
            shares = [share[worker::workers] for share in shares for worker in range(workers)]
        elif splitter is not lists.single_node_only:
            return None
    if len(shares) != workers:
        shares = shares * workers  # no splitting by worker: each reads everything
    totals = tuple(map(sum, shares))
    return Length(sum(totals), totals if not shuffled or workers == 1 or alike else None)


def together(lengths: Iterable[Length | None]) -> Length | None:
    """Return the length of several streams of the same rank and workers, one after another or mixed."""
    columns, total, steady = [], 0, True
    for length in lengths:
        if length is None:
            return None
        total += length.total
        columns.append(length.by_worker or ())
        steady = steady and length.by_worker is not None
    return Length(total, tuple(map(sum, zip(*columns, strict=True))) if steady else None)


def through(length: Length | None, stages: Iterable[Any]) -> Length | None:
    """Return ``length`` as it is behind ``stages``."""
    for stage in stages:
        length = length and _behind(stage, length)
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
    contents = [traits.batches(n, *stage.args, **stage.kw) if traits.batches else None for n in length.by_worker]
    samples = tuple(n for n in contents if n is not None)
    return Length(sum(numbers), numbers, samples if len(samples) == len(contents) else None)


def _raises(stage: Any, traits: Traits) -> bool:
    """Return whether ``stage`` raises for a sample that fails, and drops none."""
    if not traits.handler:
        return True
    bound = bound_arguments(stage)
    return bound is not None and bound.arguments.get(traits.handler) in (None, reraise_exception)


def batched(length: Length, size: int, *, partial: bool, whole: bool) -> Length | None:
    """Return the length of a DataLoader with batches of ``size`` over ``length``, in one stream. ``partial``: it keeps
    the last batch of each worker. ``whole``: its batches hold all samples that go in, as torch's collation makes them.
    """
    if length.by_worker is None:
        return None
    total = sum(-(-n // size) if partial else n // size for n in length.by_worker)
    samples = sum(n if partial else n // size * size for n in length.by_worker)
    return Length(total, (total,), (samples,) if whole else None)
