"""The names of ``wids``, WebDataset's older package for random access: ``import wds_async.wids as wids``."""

from __future__ import annotations

from wds_async.indexed.dataset import ShardListDataset
from wds_async.indexed.samplers import (
    ChunkedSampler,
    DistributedChunkedSampler,
    ShardedSampler,
    ShardListSampler,
)

__all__ = ["ChunkedSampler", "DistributedChunkedSampler", "ShardListDataset", "ShardListSampler", "ShardedSampler"]
