"""Processors, the pipelines of 2020 and 2021: ``python examples/patterns/processors.py``.

Today the same is written ``wds.DataPipeline(source, stage, stage, …)``, see ``pipelines.py``.
"""

import warnings

from shards import SAMPLES, SHARDS, shards
from torch.utils.data import IterableDataset

import wds_async as wds

warnings.simplefilter("ignore", DeprecationWarning)
ALL = SHARDS * SAMPLES


def add_noise(source, noise=0.01):
    """An iterator function with an argument."""
    for sample in source:
        yield {**sample, "npy": sample["npy"] + noise}


class Numbers(IterableDataset):
    """A user's own source."""

    def __iter__(self):
        return ((i, 2 * i) for i in range(32))


with shards() as url:
    dataset = wds.WebDataset(url, shardshuffle=False).decode("rgb8")
    plain = next(iter(dataset))["npy"]
    assert (next(iter(wds.Processor(add_noise, noise=0.02)(dataset)))["npy"] == plain + 0.02).all()
    assert sum(1 for _ in wds.Processor(wds.shuffle, 100)(dataset)) == ALL
    assert next(iter(wds.Processor(wds.map, lambda sample: sample["cls"])(dataset))) == 0
    assert len(next(iter(wds.Processor(wds.batch, 16)(dataset)))["cls"]) == 16
    assert [len(column) for column, _ in wds.Processor(wds.batch, 16)(Numbers())] == [16, 16]

    for expander in (wds.tar_file_expander, wds.tarfile_expander):
        opened = wds.Processor(wds.ShardList(url), wds.url_opener)
        samples = wds.Processor(wds.Processor(opened, expander), wds.group_by_keys)
        assert [sample["__key__"] for sample in samples] == [sample["__key__"] for sample in dataset]
    split = wds.ShardList(url, splitter=wds.split_by_worker, nodesplitter=wds.split_by_node, shuffle=False)
    assert sum(1 for _ in split) == SHARDS
    print("all processors give the samples of today's pipeline")
