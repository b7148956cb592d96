"""Distributed training with gloo: ``torchrun --nproc_per_node=2 examples/ddp_torchrun.py [URL]``.

Each rank reads its own shards (``split_by_node`` is the default) and all ranks take the same number of steps, so
none waits for another at the end. Started as a plain script, it runs torchrun itself.
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from sampledata import CLASSES, write_pictures
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wds_async as wds

BATCH, SAMPLES = 8, 192


def main(url: str) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dataset = (
        wds.WebDataset(url, shardshuffle=1000, seed=0)
        .shuffle(100)
        .decode("torchrgb")
        .to_tuple("jpg", "cls", "__key__")
        .batched(BATCH)
    )
    steps = SAMPLES // (BATCH * ranks)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1).with_epoch(steps)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for epoch in range(2):
        seen = []
        for pictures, labels, keys in loader:
            loss = nn.functional.cross_entropy(model(pictures), torch.as_tensor(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += keys
        everyone: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everyone, seen)
        if rank == 0:
            different = len({key for keys in everyone for key in keys})
            print(f"epoch {epoch}: {[len(keys) for keys in everyone]} samples by rank, {different} different ones")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            url = sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
            sys.exit(subprocess.run([*torchrun, __file__, url], env=quiet, check=False).returncode)
