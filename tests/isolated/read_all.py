"""The ordinary case, without a DataLoader: samples by `WebDataset`, in one process."""

import tempfile
from pathlib import Path

import common  # noqa: F401 - the path

import wds_async as wds
from tests.servers import Origin, make_shards

with Origin() as origin, tempfile.TemporaryDirectory() as folder:
    urls = [origin.add(path.name, path.read_bytes()) for path in make_shards(Path(folder), 3, 5)]
    dataset = wds.WebDataset(urls, shardshuffle=False)
    for _ in range(2):
        assert [sample["__key__"] for sample in dataset] == [f"{i:06d}" for i in range(15)]
    next(iter(dataset))
