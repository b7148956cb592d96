"""Distributed training from shards: ``torchrun --nproc-per-node=2 train.py URL [URL …] --samples N``.

Each rank reads its own shards and all take the same number of steps. The URLs are the stores' own; that they are read
through the node's service is for the environment to say (``AIS_ENDPOINT``, ``USE_AIS_FOR``). On GPUs it uses NCCL, else
gloo. Without torchrun it is one process.
"""

import argparse
import os
import time
from collections.abc import Iterator

import click
import torch
import torch.distributed as dist
from sampledata import CLASSES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wds_async as wds


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("urls", nargs="+", metavar="URL", help="s3://bucket/train-{000000..000007}.tar")
    parser.add_argument("--samples", type=int, required=True, help="of all URLs together; gives the steps of an epoch")
    parser.add_argument("--epochs", type=int, default=3, help="0: until it is stopped (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="of one rank (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of one rank's loader (default: %(default)s)")
    return parser.parse_args()


def loader_of(urls: list[str], batch: int, workers: int, steps: int) -> wds.WebLoader:
    """Pictures and labels in batches, ``steps`` of them an epoch on every rank."""
    dataset = (
        wds.WebDataset("::".join(urls), shardshuffle=1000, seed=0)
        .shuffle(1000)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .batched(batch)
    )
    return wds.WebLoader(dataset, batch_size=None, num_workers=workers).with_epoch(steps)


def model_on(device: torch.device) -> nn.Module:
    """A network that is far too small, the same on every rank."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    layers.to(device)
    if not dist.is_initialized():
        return layers
    return DistributedDataParallel(layers, device_ids=[device.index] if device.type == "cuda" else None)


def epochs(model: nn.Module, loader: wds.WebLoader, device: torch.device, most: int) -> Iterator[str]:
    """Train; a line about each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    epoch = 0
    while not most or epoch < most:
        began, seen, right = time.monotonic(), 0, 0
        for pictures, labels in loader:
            scores = model(pictures.to(device))
            target = torch.as_tensor(labels).to(device)
            loss = nn.functional.cross_entropy(scores, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(target)
            right += int((scores.argmax(1) == target).sum())
        pace = seen / (time.monotonic() - began)
        yield f"epoch {epoch}: {seen} samples on this rank, {pace:.0f} a second, accuracy {right / seen:.2f}"
        epoch += 1


def main() -> None:
    """One rank."""
    given = arguments()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loader = loader_of(given.urls, given.batch, given.workers, max(1, given.samples // (given.batch * ranks)))
    for line in epochs(model_on(device), loader, device, given.epochs):
        if rank == 0:
            click.echo(line)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
