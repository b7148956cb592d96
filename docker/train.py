"""Distributed training from shards: ``torchrun --nproc-per-node=2 train.py URL [URL …] --samples N``.

Each rank reads its own shards and all take the same number of steps. The URLs are the stores' own; that they are read
through the node's service is for the environment to say (``AIS_ENDPOINT``, ``USE_AIS_FOR``). With ``--checkpoint``, a
run that was killed resumes with the batch after the last one that it had saved. On GPUs it uses NCCL, else gloo.
Without torchrun it is one process.
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
    parser.add_argument("--checkpoint", metavar="FILE", help="on a file system that all ranks share; resumed if there")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="(default: %(default)s)")
    return parser.parse_args()


def loader_of(urls: list[str], batch: int, workers: int, batches: int) -> wds.AllRanks:
    """Pictures and labels in batches, ``batches`` of them an epoch on all ranks together."""
    dataset = (
        wds.WebDataset("::".join(urls), shardshuffle="epoch", seed=0)
        .shuffle(1000, seed=0)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .batched(batch)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    return wds.AllRanks(loader.with_epoch(batches, all_ranks=True))


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


class Checkpoint:
    """Model, optimizer and loader in a file, which the first rank writes and all read."""

    def __init__(self, path: str | None, model: nn.Module, optimizer: torch.optim.Optimizer, loader: wds.AllRanks):
        self.path, self.model, self.optimizer, self.loader = path, model, optimizer, loader

    def load(self, device: torch.device) -> int:
        """Resume what was saved; the number of steps until then."""
        if not self.path or not os.path.exists(self.path):
            return 0
        saved = torch.load(self.path, map_location=device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.loader.load_state_dict(saved["loader"])
        return int(saved["step"])

    def save(self, step: int) -> None:
        """Save; every rank calls it, since the loader's state is that of all of them."""
        saved = {"step": step, "loader": self.loader.state_dict()}
        if self.path and (not dist.is_initialized() or dist.get_rank() == 0):
            saved |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(saved, self.path + ".new")
            os.replace(self.path + ".new", self.path)


def epochs(model: nn.Module, loader: wds.AllRanks, device: torch.device, given: argparse.Namespace) -> Iterator[str]:
    """Train; a line about each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoint = Checkpoint(given.checkpoint, model, optimizer, loader)
    step, steps = checkpoint.load(device), len(loader)
    while not given.epochs or step < given.epochs * steps:
        epoch, began, seen, right = step // steps, time.monotonic(), 0, 0
        for pictures, labels in loader:
            scores = model(pictures.to(device))
            target = torch.as_tensor(labels).to(device)
            loss = nn.functional.cross_entropy(scores, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(target)
            right += int((scores.argmax(1) == target).sum())
            step += 1
            if given.checkpoint and step % given.save_every == 0:
                checkpoint.save(step)
        pace = seen / (time.monotonic() - began)
        yield f"epoch {epoch}: {seen} samples on this rank, {pace:.0f} a second, accuracy {right / seen:.2f}"


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
    loader = loader_of(given.urls, given.batch, given.workers, max(ranks, given.samples // given.batch))
    for line in epochs(model_on(device), loader, device, given):
        if rank == 0:
            click.echo(line)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
