"""The training of the RayJob beside it: ranks on GPU machines, and decoders of their pictures on others.

It runs on the head, makes the feed, and starts the ranks with it. Ray Train starts all ranks again where one is lost;
they go on with the batch behind the latest checkpoint.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from ray import train
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

import wds_async as wds
from wds_async import distributed

CLASSES = 1000


def pipeline() -> wds.WebDataset:
    """Return what a decoder runs: decoder n of N reads its share of the shards."""
    return (
        wds.WebDataset(os.environ["SHARDS"], shardshuffle="epoch", seed=0)
        .shuffle(1000, seed=0)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .batched(int(os.environ.get("BATCH", "256")))
    )


def run_rank(config: dict[str, Any]) -> None:
    """Train as one rank."""
    context = train.get_context()
    loader = config["feed"].loader(context.get_world_rank(), context.get_world_size())
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    model, device, step, first = prepare_model(layers), get_device(), 0, 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/train.pt", map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["feed"]))
        step, first = saved["step"], saved["epoch"]
    for epoch in range(first, config["epochs"]):
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(model(pictures.to(device)), torch.as_tensor(labels).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % config["save_every"] == 0:
                # Every rank has made this step, so that the state of any of them is that of all.
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch}
                save({**saved, "feed": json.dumps(loader.state_dict())}, float(loss))


def save(saved: dict[str, Any], loss: float) -> None:
    """Report to Ray Train, which waits for all ranks; the first one's file is the checkpoint."""
    figures = {"step": saved["step"], "loss": loss}
    if train.get_context().get_world_rank():
        train.report(figures)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(saved, Path(folder, "train.pt"))
        train.report(figures, checkpoint=train.Checkpoint.from_directory(folder))


def main() -> None:
    """Run the training; the numbers come from the manifest."""
    ranks, decoders = int(os.environ["RANKS"]), int(os.environ["DECODERS"])
    use_gpu = os.environ.get("USE_GPU", "1") == "1"
    # The resource is one that only the machines for data have: no decoder takes CPUs from a GPU's rank.
    machines = distributed.RayEngine(cpus=1, resources={"decoding": 1})
    with distributed.Feed("training:pipeline", engine=machines, decoders=decoders, ahead="4G") as feed:
        trainer = TorchTrainer(
            run_rank,
            train_loop_config={
                "feed": feed,
                "epochs": int(os.environ.get("EPOCHS", "90")),
                "save_every": int(os.environ.get("SAVE_EVERY", "100")),
            },
            scaling_config=train.ScalingConfig(num_workers=ranks, use_gpu=use_gpu),
            run_config=train.RunConfig(
                name="train",
                storage_path=os.environ["CHECKPOINTS"],
                checkpoint_config=train.CheckpointConfig(num_to_keep=2),
                failure_config=train.FailureConfig(max_failures=3),
            ),
        )
        click.echo(trainer.fit().metrics)


if __name__ == "__main__":
    main()
