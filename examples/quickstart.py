"""Write a few shards, read them back in batches: ``python examples/quickstart.py``. Needs no torch."""

import tempfile
from pathlib import Path

import wds_async as wds


def main() -> None:
    """A hundred samples in four shards; the same code reads ``https://…`` or ``s3://…``."""
    with tempfile.TemporaryDirectory() as folder:
        with wds.ShardWriter(str(Path(folder, "train-%06d.tar")), maxcount=25, verbose=0) as sink:
            for i in range(100):
                sink.write({"__key__": f"sample{i:04d}", "txt": f"the number {i}", "cls": i % 10})

        dataset = (
            wds.WebDataset(f"{folder}/train-{{000000..000003}}.tar", shardshuffle=4, seed=1)
            .shuffle(50, seed=1)
            .decode()
            .to_tuple("txt", "cls")
            .batched(20)
        )
        for texts, labels in dataset:
            print(len(texts), "samples, the first:", texts[0], "of class", labels[0])
        print(f"{dataset.statistics().bytes / 1e3:.0f} kB read, {dataset.statistics().bound_by()}")


if __name__ == "__main__":
    main()
