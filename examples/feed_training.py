"""Decode in other processes, and go on from a checkpoint: ``python examples/feed_training.py``. Needs no torch."""

import json
import os
import tempfile
from pathlib import Path

from sampledata import write_pictures

import wds_async as wds
from wds_async import distributed as dist


def pipeline():
    """What each decoder runs on its share of the shards. Decoders import it by its name."""
    dataset = wds.WebDataset(os.environ["SHARDS"], nodesplitter=wds.split_by_node, shardshuffle=8, seed=1)
    return dataset.shuffle(50, seed=1).decode("rgb").to_tuple("__key__", "jpg", "cls").batched(16)


def main() -> None:
    """An epoch that is left after five steps, and its rest, from the state, with more decoders."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDS"] = write_pictures(folder)
        checkpoint = Path(folder, "checkpoint.json")
        seen = []
        # Not `pipeline` itself: decoders cannot import a function of a script that is run as __main__.
        with dist.Feed("feed_training:pipeline", decoders=1, ahead="64M") as feed:
            loader = feed.loader()
            for step, (keys, images, labels) in enumerate(loader, 1):
                print("step", step, "batch of", images.shape, "with", len(set(labels)), "classes")
                seen += keys
                if step == 5:
                    checkpoint.write_text(json.dumps(loader.state_dict()))
                    break

        with dist.Feed("feed_training:pipeline", decoders=2, ahead="64M") as feed:
            loader = feed.loader()
            loader.load_state_dict(json.loads(checkpoint.read_text()))
            for keys, *_ in loader:
                seen += keys
    print(len(seen), "samples,", len(set(seen)), "of them different")


if __name__ == "__main__":
    main()
