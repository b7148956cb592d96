"""One rank of a job that saves the states of all ranks and goes on.

It reads its epoch in one go, then 7 batches of it and the rest by other loaders: from the state that rank 0 wrote, and
from a checkpoint of torch.distributed.checkpoint.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

import wds_async as wds


def loader_of(urls: list[str]) -> Any:
    dataset = wds.WebDataset(urls, shardshuffle="epoch", seed=1).shuffle(9, seed=2).to_tuple("__key__").batched(4)
    return wds.AllRanks(wds.WebLoader(dataset, batch_size=None, num_workers=2))


def keys_in(batches: Any) -> list[list[str]]:
    return [list(keys) for (keys,) in batches]


def main(folder: Path, urls: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole = keys_in(loader_of(urls))
    loader = loader_of(urls)
    iterator = iter(loader)
    begun = keys_in(itertools.islice(iterator, 7))
    state = loader.state_dict()
    if rank == 0:
        (folder / "state.json").write_text(json.dumps(state))
    dist.barrier()
    again = loader_of(urls)
    again.load_state_dict(json.loads((folder / "state.json").read_text()))
    checkpoint = {"loader": loader, "step": 7}
    assert isinstance(loader, Stateful)
    dcp.save(checkpoint, checkpoint_id=folder / "dcp")
    stateful = loader_of(urls)
    dcp.load({"loader": stateful, "step": 0}, checkpoint_id=folder / "dcp")
    result = {"whole": whole, "begun": begun, "rest": keys_in(again), "rest_by_dcp": keys_in(stateful)}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
