"""Accelerate: save in the middle of an epoch and go on with the next batch.

``python examples/accelerate_resume.py [URL]``, or by ``accelerate launch``. ``register_for_checkpointing`` takes what
has a ``state_dict``. The main process alone writes it, so `AllRanks` puts the states of all ranks into it.
"""

import sys
import tempfile

import torch
from accelerate import Accelerator
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds

BATCH, SAMPLES, STOP = 16, 192, 7


def train(url: str, folder: str, stop: int | None = None, resume: bool = False) -> tuple[list[list[str]], nn.Module]:
    """One epoch, or ``stop`` steps of it, or what is left behind them; the keys of its batches, and the model."""
    accelerator = Accelerator(cpu=True)
    dataset = (
        wds.WebDataset(url, shardshuffle="epoch", seed=0)
        .shuffle(100, seed=0)
        .decode("torchrgb")
        .to_tuple("__key__", "jpg", "cls")
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1).with_epoch(SAMPLES // BATCH, all_ranks=True)
    loader = wds.AllRanks(loader)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(loader)
    if resume:
        accelerator.load_state(folder)
    seen = []
    for keys, pictures, labels in loader:
        target = torch.as_tensor(labels, device=accelerator.device)
        accelerator.backward(nn.functional.cross_entropy(model(pictures.to(accelerator.device)), target))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(keys)
        if len(seen) == stop:
            accelerator.save_state(folder)
            break
    return seen, model


def main(url: str, folder: str) -> None:
    """Compare a run that is interrupted with one that is not."""
    whole, model = train(url, folder)
    begun, _ = train(url, folder, stop=STOP)
    rest, resumed = train(url, folder, resume=True)
    assert begun + rest == whole
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), model.parameters(), strict=True))
    print(f"{len(begun)} and {len(rest)} steps, the same as {len(whole)} in one run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder + "/shards"), folder + "/checkpoint")
