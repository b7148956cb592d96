"""Dataset specifications: ``python examples/patterns/specification.py``."""

from pathlib import Path

from shards import SAMPLES, SHARDS, shards

import wds_async as wds

SPECIFICATION = """
dataset:
  - shards: "x-{000000..000001}.tar"
    scaleprob: 0.3
  - shards: "x-000002.tar"
    scale: [1.0, 3.0]
    extensions: json
"""


def pipeline():
    """What ``WebDataset("specification:pipeline")`` calls."""
    return wds.WebDataset("x-000001.tar", shardshuffle=False).decode().to_tuple("json", "cls")


with shards() as url:
    Path("data.yaml").write_text(SPECIFICATION, encoding="utf-8")
    samples = list(wds.WebDataset("data.yaml", shardshuffle=False).decode())
    assert len(samples) == SHARDS * SAMPLES
    scaled = [sample for sample in samples if "scale" in sample["__source__"]]
    assert len(scaled) == SAMPLES
    assert all("jpg" not in sample and "json" in sample for sample in scaled)

    same = {"dataset": [{"shards": url, "weight": 1}]}
    assert sum(1 for _ in wds.WebDataset(same, shardshuffle=False)) == SHARDS * SAMPLES
    index = {"wids_version": 1, "shardlist": [{"url": f"x-{i:06d}.tar", "nsamples": SAMPLES} for i in range(SHARDS)]}
    counted = wds.WebDataset(index, shardshuffle=False)
    assert len(counted) == sum(1 for _ in counted) == SHARDS * SAMPLES
    print("all specifications are understood")
