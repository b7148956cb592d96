"""Warnings of what is probably not meant, given once where an iteration or a loader begins."""

from __future__ import annotations

import logging
import sys
from typing import Any

from wds_async import world
from wds_async.pipeline import DataPipeline
from wds_async.reading.stage import ReadingStage
from wds_async.rewrite import note_matches, unmatched_rules
from wds_async.shardlists import lists as shardlists
from wds_async.stages import traits_of
from wds_async.tracebacks import warn

__all__ = ["log_unmatched_rules", "warn_of_batches_in_torch", "warn_of_batches_twice", "warn_of_uneven_ranks"]

logger = logging.getLogger("wds_async")

_UNEVEN, _TWICE, _UNMATCHED = 1, 2, 4  # flags of `SharedEpoch.once`


def _first_time(pipeline: DataPipeline, flag: int) -> bool:
    from wds_async.observe.ledger import ledgers_of  # noqa: PLC0415 (the engine)

    ledgers = ledgers_of(pipeline.pipeline)
    return not ledgers or ledgers[0].epoch.once(flag)


def warn_of_uneven_ranks(pipeline: DataPipeline) -> None:
    """Warn on rank 0 where ranks read different numbers of shards, and no `with_epoch` gives them as many steps.

    Called for the outermost pipeline first, a loader's: its DataLoader workers do not know that its epochs are cut.
    """
    here = world.place()
    if here.world_size < 2 or here.rank or here.worker or not _first_time(pipeline, _UNEVEN):
        return
    lists, ranks, last = _split_by_rank(pipeline), here.world_size, here.world_size - 1
    most, least = (sum(len(one.urls[rank::ranks]) for one in lists) for rank in (0, last))
    if most == least or not least:  # none at all is an error, unless empty_check=False says that it is meant
        return
    samples = [_samples(lists, rank, ranks) for rank in (0, last)]
    counts = "" if None in samples else f" ({samples[0]:,} samples against {samples[1]:,})"
    shards = sum(len(one.urls) for one in lists)
    warn(
        f"{shards} shards for {ranks} ranks: {most} on rank 0, {least} on rank {last}{counts}. Ranks with more batches "
        "in an epoch than others make DistributedDataParallel hang, fail in backward(), or mix two epochs. Give each "
        f"rank as many: loader.with_epoch(n) with n = samples // (batch size * {ranks}); or make the number of shards "
        f"a multiple of {ranks}; or draw them with resampled=True"
    )


def log_unmatched_rules(dataset: DataPipeline) -> None:
    """Log once the rules of ``WDS_REWRITE`` that rewrite no shard of ``dataset`` or other lists of this process."""
    here, urls = world.place(), getattr(dataset.pipeline[0], "urls", None)
    if here.rank or here.worker or not isinstance(urls, list) or not _first_time(dataset, _UNMATCHED):
        return
    note_matches(urls)
    if unmatched := unmatched_rules():
        logger.warning("WDS_REWRITE: these rules match none of %d shards: %s", len(urls), "; ".join(unmatched))


def _samples(lists: list[shardlists.SimpleShardList], rank: int, world_size: int) -> int | None:
    """Return the numbers of samples of ``rank`` in each epoch, if an index gives them and shards are alike: they may be
    shuffled.
    """
    alike = [({one.counts.get(url) for url in one.urls}, len(one.urls[rank::world_size])) for one in lists]
    if any(len(counts) > 1 or None in counts for counts, _ in alike):
        return None
    return sum(count * shards for counts, shards in alike for count in counts if count is not None)


def _split_by_rank(pipeline: DataPipeline) -> list[shardlists.SimpleShardList]:
    """Return the shard lists that the ranks share out; none where the numbers of steps are evened out."""
    if pipeline.repetitions == sys.maxsize or not pipeline.pipeline or getattr(pipeline, "equal_steps", None):
        return []
    first, *rest = pipeline.pipeline
    if any((traits := traits_of(stage)) and traits.cuts for stage in rest):
        return []
    within = [first.dataset] if hasattr(first, "num_workers") else getattr(first, "datasets", [])
    if within:
        return [shards for one in within if isinstance(one, DataPipeline) for shards in _split_by_rank(one)]
    reading = next((i for i, stage in enumerate(rest) if isinstance(stage, ReadingStage)), 0)
    split = isinstance(first, shardlists.SimpleShardList) and shardlists.split_by_node in rest[:reading]
    return [first] if split else []


def warn_of_batches_twice(dataset: Any, batch_size: int | None) -> None:
    """Warn of a DataLoader with its default ``batch_size`` over a dataset that makes batches."""
    if batch_size == 1:
        _warn_of_batches_twice(dataset)


def warn_of_batches_in_torch(dataset: DataPipeline, depth: int) -> None:
    """Warn likewise where torch's own DataLoader iterates ``dataset``, ``depth`` frames up: only there it shows."""
    caller = sys._getframe(depth + 1).f_locals.get("self")
    collates = type(caller).__module__.startswith("torch.utils.data.") and getattr(caller, "auto_collation", False)
    if collates and not world.place().worker:
        _warn_of_batches_twice(dataset)


def _warn_of_batches_twice(dataset: Any) -> None:
    """Warn once where `batched` is the last stage of ``dataset`` that changes its items, as far as that is known."""
    stages = reversed(getattr(dataset, "pipeline", []))
    changing = (t for t in map(traits_of, stages) if t is None or t.batches or t.takes_batches)
    last = next(changing, None)
    if last is not None and last.batches and _first_time(dataset, _TWICE):
        warn(
            "the dataset makes batches (.batched), and the DataLoader makes batches of them again: pass batch_size=None"
            " to the loader, or leave .batched out"
        )
