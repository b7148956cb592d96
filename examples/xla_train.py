"""TPU training with torch_xla: ``python examples/xla_train.py [URL]`` on a TPU VM.

The rank is torch_xla's ordinal, which is found once its runtime is running; nothing has to be set. Every core takes the
same number of steps (``with_epoch``), which ``len(loader)`` returns for progress bars and schedules.
"""

import sys
import tempfile

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds

BATCH, SAMPLES = 8, 192


def run(index: int, url: str) -> None:
    """One core."""
    device = torch_xla.device()
    dataset = (
        wds.WebDataset(url, shardshuffle=1000, seed=0)
        .shuffle(100)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .map_tuple(None, torch.tensor)
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1).with_epoch(SAMPLES // (BATCH * xr.world_size()))
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for epoch in range(2):
        steps = 0
        for pictures, labels in pl.MpDeviceLoader(loader, device):
            loss = nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            xm.optimizer_step(optimizer)
            steps += 1
        print(
            f"core {xr.global_ordinal()} of {xr.world_size()}: epoch {epoch}, {steps} of {len(loader)} steps",
            flush=True,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch_xla.launch(run, args=(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder),))
