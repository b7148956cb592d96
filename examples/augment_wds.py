"""Offline augmentation: read each shard of one list, write a shard of another with several variants of each sample.

``python examples/augment_wds.py 'in-{000..099}.tar' out``. A queue, Dask or a Kubernetes Job can call `augment` for
each shard. It needs only two names, which may be URLs. A shard that is written again, after a crash, is the same.
"""

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from sampledata import write_pictures

import wds_async as wds

VARIANTS = 3


def variants(sample: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """The sample, flipped and brightened at random, `VARIANTS` times; ``jpg`` is uint8 of shape (H, W, 3)."""
    rng = np.random.default_rng(seed)
    for number in range(VARIANTS):
        picture = sample["jpg"][:, ::-1] if rng.random() < 0.5 else sample["jpg"]
        brighter = np.clip(picture * rng.uniform(0.7, 1.3), 0, 255).astype(np.uint8)
        yield {"__key__": f"{sample['__key__']}-{number}", "jpg": brighter, "cls": sample["cls"]}


def augment(source: str, destination: str) -> int:
    """Read shard ``source``, write shard ``destination``; the number of samples written."""
    written = 0
    dataset = wds.WebDataset(source, shardshuffle=False).decode("rgb8")
    with wds.TarWriter(destination, mtime=0) as sink:  # appears when it is complete, and not at all after an error
        for number, sample in enumerate(dataset):
            for variant in variants(sample, seed=number):
                sink.write(variant)
                written += 1
    return written


def main(sources: str, folder: str) -> None:
    """All shards, two at a time."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    urls = wds.shardlists.expand_urls(sources)
    targets = [f"{folder}/augmented-{i:06d}.tar" for i in range(len(urls))]
    with ProcessPoolExecutor(2) as pool:
        for target, count in zip(targets, pool.map(augment, urls, targets), strict=True):
            print(f"{Path(target).name}: {count} samples")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        given = sys.argv[1:] if len(sys.argv) > 2 else [write_pictures(temporary, 2, 12), f"{temporary}/out"]
        main(*given)
