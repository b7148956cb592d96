"""Accelerate: ``accelerate launch examples/accelerate_loop.py [URL]``, or as a plain script.

``accelerator.prepare`` is for the model and the optimizer only. The dataset already splits its shards by rank; a
prepared loader would split the batches a second time and drop all but one share.
"""

import sys
import tempfile

import torch
from accelerate import Accelerator
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds

BATCH, SAMPLES = 16, 192


def main(url: str) -> None:
    """Two epochs."""
    accelerator = Accelerator(cpu=True)
    dataset = (
        wds.WebDataset(url, shardshuffle=1000, seed=0)
        .shuffle(100)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .batched(BATCH)
    )
    steps = SAMPLES // (BATCH * accelerator.num_processes)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1).with_epoch(steps)

    model: nn.Module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for epoch in range(2):
        total = 0.0
        for pictures, labels in loader:
            target = torch.as_tensor(labels, device=accelerator.device)
            loss = nn.functional.cross_entropy(model(pictures.to(accelerator.device)), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: {len(loader)} steps, mean loss {total / len(loader):.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder))
