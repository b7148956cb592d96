"""Loaders over workers: ``python examples/patterns/loaders.py``."""

import warnings

import torch
from shards import SAMPLES, SHARDS, shards
from torch.utils.data import DataLoader, IterableDataset

import wds_async as wds

warnings.simplefilter("ignore", DeprecationWarning)  # ResizedDataset and MultiDataset are of 2020
warnings.filterwarnings("ignore", "This DataLoader will create")
ALL = SHARDS * SAMPLES

with shards() as url:
    dataset = wds.WebDataset(url, shardshuffle=False).decode("torchrgb").to_tuple("jpg", "cls")
    assert isinstance(dataset, IterableDataset)

    loader = DataLoader(dataset, num_workers=3, batch_size=10)
    assert sum(len(labels) for _, labels in loader) == ALL
    batches = dataset.batched(16)
    loader = DataLoader(batches, num_workers=2, batch_size=None)
    pictures, labels = next(iter(loader))
    assert isinstance(pictures, torch.Tensor)
    assert len(labels) == 16

    loader = wds.WebLoader(batches, num_workers=2, batch_size=None).unbatched().shuffle(1000).batched(12)
    assert [len(labels) for _, labels in loader] == [12] * (ALL // 12)

    chopped = wds.ResizedDataset(dataset, 25)
    assert [sum(1 for _ in chopped) for _ in range(3)] == [25, 25, 25]
    many = wds.MultiDataset(dataset, workers=2)
    assert sum(1 for _ in many) == ALL
    print("all loaders load")
