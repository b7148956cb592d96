"""Writing as programs do it: ``python examples/patterns/writing.py``."""

import numpy as np
from shards import shards

import wds_async as wds

rng = np.random.default_rng(0)

with shards():
    with wds.TarWriter("dest.tar") as sink:
        for i in range(5):
            sink.write({"__key__": "sample%06d" % i, "input.pyd": {"i": i}, "output.pyd": [i, i]})
    first = next(iter(wds.WebDataset("dest.tar", shardshuffle=False).decode()))
    assert (first["input.pyd"], first["output.pyd"]) == ({"i": 0}, [0, 0])

    sink = wds.TarWriter("pictures.tar")
    for i in range(5):
        sink.write({"__key__": f"{i:04d}", "input.jpg": rng.random((8, 8, 3)), "output.cls": 3}, mtime=0.0)
    sink.close()
    with wds.TarWriter("arrays.tar") as sink:
        sink.write({"__key__": "a", "sequence.npy": rng.random((5, 2)), "target.npy": rng.random(5)})

    with open("raw.tar", "wb") as stream, wds.TarWriter(stream, encoder=False) as sink:
        sink.write({"__key__": "raw", "jpg": b"bytes as they are", "cls": b"1"})
    assert next(iter(wds.WebDataset("raw.tar", shardshuffle=False)))["cls"] == b"1"

    with wds.ShardWriter("y-%06d.tar", maxcount=4, maxsize=1e9) as sink:
        for i in range(10):
            sink.write({"__key__": f"{i}", "txt": f"text {i}"})
    assert sum(1 for _ in wds.WebDataset("y-{000000..000002}.tar", shardshuffle=False)) == 10

    def augment(source, destination):
        """One shard in, one shard out: what Dask, a queue or a Kubernetes Job calls."""
        with wds.TarWriter(destination) as sink:
            for sample in wds.WebDataset(source, shardshuffle=False).decode("rgb8"):
                sink.write({"__key__": sample["__key__"], "png": sample["jpg"][:, ::-1], "cls": sample["cls"]})

    augment("x-000000.tar", "augmented.tar")
    assert sum(1 for _ in wds.WebDataset("augmented.tar", shardshuffle=False)) == 20
    print("all writers write")
