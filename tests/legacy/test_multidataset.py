"""`MultiDataset` on torch's DataLoader."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from tests.legacy.common import deprecated
from wds_async.dataset import WebDataset
from wds_async.legacy.datasets import MultiDataset

multi = functools.partial(deprecated, MultiDataset)


def test_reads_in_workers(shards: Any) -> None:
    dataset = WebDataset([str(path) for path in shards(4, 3)], shardshuffle=False)
    loader = multi(dataset, workers=2, output_size=20, nominal=99)
    for _ in range(2):
        assert sorted(sample["__key__"] for sample in loader) == [f"{i:06}" for i in range(12)]
    assert len(loader) == 99
    assert isinstance(loader, torch.utils.data.IterableDataset)
    batches = list(loader.to_tuple("cls").batched(5))
    assert [len(batch[0]) for batch in batches] == [5, 5, 2]


def test_items_stay_what_they_are() -> None:
    items = ({"a": np.arange(3)}, "text", 1)
    (array, text, number) = multi(items_dataset(items), workers=0)
    assert isinstance(array["a"], np.ndarray)
    assert (text, number) == ("text", 1)


def items_dataset(items: Any) -> Any:
    from wds_async.pipeline import DataPipeline

    return DataPipeline(items)


def test_many_workers_wait_within_bounds() -> None:
    loader = multi(items_dataset((1,)), workers=2)  # output_size=10000
    assert loader.pipeline[0].prefetch_factor == 32
    assert loader.pipeline[0].pin_memory is torch.cuda.is_available()
    with pytest.raises(TypeError):
        len(loader)
    assert multi(items_dataset((1,)), workers=2, output_size=1).pipeline[0].prefetch_factor == 1
