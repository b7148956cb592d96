"""One rank that takes steps and saves its state: ``python -m tests.checkpoint.steps BEFORE AFTER KIND WORKERS STOP
URL…``. It goes on from the states in the folder BEFORE, if there are any, takes STOP batches (0: all), and leaves its
state and the keys of its batches in the folder AFTER."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import wds_async as wds


def key_of(sample: dict[str, str]) -> str:
    return sample["__key__"]


def loader_of(kind: str, urls: list[str], workers: int) -> wds.WebLoader:
    mode, _, steps = kind.partition(" ")
    kw = {"steps": int(steps)} if steps else {}
    samples = wds.WebDataset(urls, shardshuffle=10, seed=3, equal=mode, empty_check=False, **kw)
    keys = samples.shuffle(12, seed=1).map(key_of).batched(3, collation_fn=list)
    return wds.WebLoader(keys, batch_size=None, num_workers=workers)


def main(before: Path, after: Path, kind: str, workers: int, stop: int, urls: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = loader_of(kind, urls, workers)
    if states := [json.loads(path.read_text())["state"] for path in sorted(before.glob("*.json"))]:
        loader.load_state_dict(wds.merge_states(states))
    batches = []
    for batch in itertools.islice(loader, stop or None):
        dist.all_reduce(torch.ones(1))  # waits for the other ranks
        batches.append(list(batch))
    after.mkdir(exist_ok=True)
    (after / f"{rank}.json").write_text(json.dumps({"state": loader.state_dict(), "batches": batches}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
