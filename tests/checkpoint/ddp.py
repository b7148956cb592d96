"""A small model trained by several ranks: ``python -m tests.checkpoint.ddp FOLDER STOP KIND URL…`` under RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT. It saves model and loader after each step, goes on from the last step that all
ranks have saved, and ends at step STOP. Each rank writes the losses of its steps, to the last bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wds_async as wds


def features(sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise that depends on the worker's generator, beside the sample's number."""
    number = float(sample["cls"])
    return torch.cat([torch.randn(7), torch.tensor([number])]), torch.tensor([number / 10])


def loader_of(kind: str, urls: list[str]) -> wds.WebLoader:
    mode = None if kind == "epoch" else kind.split(maxsplit=1)[0].strip(",")
    samples = wds.WebDataset(urls, shardshuffle=10, seed=3, equal=mode).shuffle(12, seed=1).map(features)
    if kind.endswith("in this process"):
        return wds.WebLoader(samples.batched(4), batch_size=None)
    if kind.endswith("stages behind"):
        return (
            wds.WebLoader(samples.batched(3), batch_size=None, num_workers=2).unbatched().shuffle(9, seed=1).batched(4)
        )
    loader = wds.WebLoader(samples.batched(4), batch_size=None, num_workers=2)
    return loader.with_epoch(12) if mode is None else loader


def last_step(folder: Path, ranks: int) -> int:
    steps = [int(path.stem.split("-")[1]) for path in folder.glob("model-*.pt")]
    whole = [s for s in steps if all((folder / f"loader-{s}-{rank}.json").exists() for rank in range(ranks))]
    return max(whole, default=0)


def put(path: Path, write: Any) -> None:
    write(path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def main(folder: Path, stop: int, kind: str, urls: list[str]) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loader, step = loader_of(kind, urls), last_step(folder, ranks)
    losses: list[str] = []
    if step:
        saved = torch.load(folder / f"model-{step}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = json.loads((folder / f"loader-{step}-{rank}.json").read_text())
        loader.load_state_dict(state["loader"])
        losses = state["losses"]
    while step < stop:
        for inputs, wanted in loader:
            # Dropout draws from the generator that functions in this process draw from, too.
            loss = torch.nn.functional.mse_loss(model(torch.nn.functional.dropout(inputs, 0.1)), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.item().hex())
            text = json.dumps({"loader": loader.state_dict(), "losses": losses})
            put(folder / f"loader-{step}-{rank}.json", lambda path, text=text: path.write_text(text))
            if rank == 0:
                both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                put(folder / f"model-{step}.pt", lambda path, both=both: torch.save(both, path))
            if step == stop:
                break
    (folder / f"losses-{rank}").write_text("\n".join(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
