"""Explicit pipelines: ``python examples/patterns/pipelines.py``."""

import cbor2
from shards import SAMPLES, SHARDS, shards

import wds_async as wds

ALL = SHARDS * SAMPLES


def keep_all(source):
    """An iterator function among the stages."""
    yield from source


with shards() as url:
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(url),
        wds.shuffle(100),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.shuffle(1000),
        wds.decode("torchrgb"),
        keep_all,
        wds.to_tuple("png;jpg", "json"),
        wds.batched(16),
    )
    assert sum(len(metas) for _, metas in pipeline) == ALL

    endless = wds.DataPipeline(
        wds.ResampledShards(url),
        wds.tarfile_to_samples(),
        wds.shuffle(100),
        wds.decode("rgb8"),
        wds.to_tuple("jpg", "cls"),
    ).with_epoch(100)
    assert [sum(1 for _ in endless) for _ in range(2)] == [100, 100]
    mapped = wds.DataPipeline(endless, wds.map_tuple(None, str))
    assert isinstance(next(iter(mapped))[1], str)

    with open("x.cbors", "wb") as stream:
        for i in range(10):
            cbor2.dump({"n": i}, stream)
    records = wds.DataPipeline(wds.SimpleShardList("x.cbors"), wds.cbors_to_samples())
    assert [record["n"] for record in records] == list(range(10))

    dataset = wds.WebDataset(url, shardshuffle=False)
    last = dataset.pipeline.pop()  # a plain list, which programs edit
    dataset.pipeline.append(last)
    dataset.append(wds.slice(5))
    assert sum(1 for _ in dataset) == 5
    print("all pipelines run")
