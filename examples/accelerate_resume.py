"""Accelerate: save regularly, stop in the middle of an epoch, and continue with the next batch.

``python examples/accelerate_resume.py [URL FOLDER]``, or by ``accelerate launch``. ``register_for_checkpointing`` takes
any object with a ``state_dict``. Only the main process writes it, so `AllRanks` puts the states of all ranks into it.
The loader is not given to ``prepare``, because its dataset already splits the shards by rank.
"""

import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds

BATCH, SAMPLES, EPOCHS, SAVE_EVERY = 16, 192, 2, 3


class Progress:
    """How far the training is: each step's loss, the mean of all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be as far as then."""
        self.losses = state["losses"]


def train(url: str, folder: str, stop: int | None = None, resume: bool = False) -> tuple[list[float], nn.Module]:
    """All epochs, or ``stop`` steps of them, or what is left behind those saved; the losses, and the model."""
    accelerator = Accelerator(cpu=True)
    dataset = (
        wds.WebDataset(url, shardshuffle="epoch", seed=0)
        .shuffle(100, seed=0)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1).with_epoch(SAMPLES // BATCH, all_ranks=True)
    loader, progress = wds.AllRanks(loader), Progress()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(loader, progress)
    if resume:
        accelerator.load_state(folder)
    for _ in range(len(progress.losses) // len(loader), EPOCHS):
        for pictures, labels in loader:
            target = torch.as_tensor(labels, device=accelerator.device)
            loss = nn.functional.cross_entropy(model(pictures.to(accelerator.device)), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(progress.losses) == stop:
                return progress.losses, model
            if len(progress.losses) % SAVE_EVERY == 0:
                accelerator.save_state(folder)
    return progress.losses, model


def main(url: str, folder: str) -> None:
    """Compare a run that is interrupted, at two places, with one that is not."""
    whole, model = train(url, f"{folder}/whole")
    steps = len(whole) // EPOCHS
    for stop, resume in ((steps + 2, False), (len(whole) - 2, True)):
        losses, _ = train(url, f"{folder}/stopped", stop, resume)
        assert losses == whole[:stop]
    losses, resumed = train(url, f"{folder}/stopped", resume=True)
    assert losses == whole
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), model.parameters(), strict=True))
    print(f"stopped at step {steps + 2} and {len(whole) - 2}, with the losses of {len(whole)} steps in one run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*sys.argv[1:3]) if len(sys.argv) > 2 else main(write_pictures(folder + "/shards"), folder)
