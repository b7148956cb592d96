"""torchtitan: its checkpoint manager saves our loader, and resumes it with the next batch.

``python examples/torchtitan_resume.py [URL FOLDER]``, or by ``torchrun``. Its Trainer makes the loader from
``WebDataLoader.Config`` and takes batches until it has its steps, so the data repeats without end. The loader is one of
the objects with a ``state_dict`` that go to torch.distributed.checkpoint. Ranks that share their data, as with tensor
parallelism, have the same ``dp_rank``: ``WDS_RANK`` makes it the rank of the dataset.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sampledata import CLASSES, write_pictures
from torch import nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader

import wds_async as wds

BATCH, STEPS, SAVE_EVERY, STOP = 8, 20, 4, 14


class WebDataLoader(BaseDataLoader):
    """Batches as torchtitan's Trainer wants them, for one of ``dp_world_size`` shares of the data."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """``dataset_path`` are the shards."""

        num_workers: int = 1

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        os.environ |= {"WDS_RANK": str(dp_rank), "WDS_WORLD_SIZE": str(dp_world_size)}
        dataset = (
            wds.WebDataset(config.dataset_path, shardshuffle="epoch", seed=0)
            .shuffle(100, seed=0)
            .decode("torchrgb")
            .to_tuple("jpg", "cls")
            .batched(local_batch_size, partial=False)
            .repeat()
        )
        self.loader = wds.AllRanks(wds.WebLoader(dataset, batch_size=None, num_workers=config.num_workers))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return (({"input": pictures}, torch.as_tensor(labels)) for pictures, labels in self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the loaders of all ranks are."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there, on as many ranks as before or another number."""
        self.loader.load_state_dict(state_dict)


class Progress:
    """The step of the training, as torchtitan's Trainer has it."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Be as far as then."""
        self.step = state_dict["step"]


def train(url: str, folder: str, stop: int = STEPS) -> tuple[list[float], nn.Module]:
    """`STEPS` steps, or ``stop`` of them, after those in ``folder``; the losses, and the model."""
    config = WebDataLoader.Config(dataset_path=url)
    loader = WebDataLoader(config, dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank(), local_batch_size=BATCH)
    torch.manual_seed(0)
    model, progress = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES)), Progress()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = CheckpointManager(
        CheckpointManager.Config(
            enable=True, interval=SAVE_EVERY, folder=folder, last_save_model_only=False, initial_load_model_only=False
        ),
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        states={"train_state": progress},
        sd_adapter=None,
    )
    checkpointer.load()
    losses, batches = [], iter(loader)
    while progress.step < stop:
        progress.step += 1
        batch, labels = next(batches)
        loss = nn.functional.cross_entropy(model(batch["input"]), labels)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        checkpointer.save(progress.step)
    checkpointer.close()
    return losses, model


def main(url: str, folder: str) -> None:
    """Compare a run that is interrupted with one that is not."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    whole, model = train(url, f"{folder}/whole")
    saved = STOP - STOP % SAVE_EVERY
    begun, _ = train(url, f"{folder}/stopped", STOP)
    rest, resumed = train(url, f"{folder}/stopped")
    assert begun[:saved] + rest == whole
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), model.parameters(), strict=True))
    print(f"stopped at step {STOP}, resumed after step {saved}: the losses of {len(whole)} steps in one run")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*sys.argv[1:3]) if len(sys.argv) > 2 else main(write_pictures(folder + "/shards"), folder)
