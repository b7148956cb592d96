"""Loaders, states and `MultiDataset` where processes come from a fork server, as they do by default in Python 3.14."""

import multiprocessing
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import common  # noqa: F401 - the path

import wds_async as wds
from tests.servers import Origin, make_shards

KEYS = [f"{i:06d}" for i in range(20)]


def key(sample: Any) -> str:
    """At module level, so that workers find it."""
    return str(sample["__key__"])


def dataset(urls: list[str]) -> Any:
    return wds.WebDataset(urls, shardshuffle=False).map(key)


def main(urls: list[str]) -> None:
    from torch.utils.data import DataLoader

    loader = wds.WebLoader(dataset(urls), batch_size=None, num_workers=2, persistent_workers=True)
    assert all(sorted(loader) == KEYS for _ in range(2))
    stream = iter(loader)
    begun = [next(stream) for _ in range(7)]
    again = wds.WebLoader(dataset(urls), batch_size=None, num_workers=2)
    again.load_state_dict(loader.state_dict())
    assert sorted([*begun, *again]) == KEYS
    assert sorted(DataLoader(dataset(urls), batch_size=None, num_workers=2)) == KEYS
    assert sorted(wds.MultiDataset(dataset(urls), workers=2)) == KEYS


if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, when it is imported
        import torch.utils.data  # noqa: F401
    multiprocessing.set_forkserver_preload(["torch.utils.data", "wds_async.dataset"])
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", "MultiDataset is deprecated")
    tempfile.tempdir = sys.argv[1]
    with Origin() as origin:
        paths = make_shards(Path(sys.argv[1], "shards"), 4, 5, payload=70_000)
        main([origin.add(path.name, path.read_bytes()) for path in paths])
