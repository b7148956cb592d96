"""Small shards for the other examples: ``python examples/sampledata.py FOLDER`` writes them there.

Each sample is an image of 32 x 32 pixels whose colour shows its class (0 red, 1 green, 2 blue), with some noise.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import wds_async as wds

CLASSES = 3


def write_pictures(folder: str, shards: int = 4, samples: int = 48, seed: int = 0) -> str:
    """Write ``shards`` tars of ``samples`` pictures (``jpg``) with ``cls`` and ``json``; the URL of all of them."""
    rng = np.random.default_rng(seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with wds.ShardWriter(f"{folder}/train-%06d.tar", maxcount=samples, verbose=0, mtime=0) as sink:
        for i in range(shards * samples):
            label = i % CLASSES
            picture = rng.integers(0, 96, (32, 32, 3), dtype=np.uint8)
            picture[:, :, label] += 128
            sink.write({"__key__": f"{i:06d}", "jpg": picture, "cls": label, "json": {"caption": f"picture {i}"}})
    return f"{folder}/train-{{000000..{shards - 1:06d}}}.tar"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(write_pictures(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            print("an example of what it writes:", write_pictures(temporary))
