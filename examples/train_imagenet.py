"""ImageNet-style training: decode, augment, batch in the workers, mix across workers, train.

``python examples/train_imagenet.py [URL]``. Without a URL it makes small shards and trains on them in seconds. For
``s3://bucket/imagenet/train-{000000..001281}.tar``, only the model and the sizes below are too small.
"""

import sys
import tempfile

import torch
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds

BATCH = 16
SAMPLES = 192  # of the whole data set: an epoch has SAMPLES // BATCH batches


def augment(picture: torch.Tensor) -> torch.Tensor:
    """A random flip, as a stand-in for ``torchvision.transforms``; from (3, H, W) in [0, 1] to the same."""
    return picture.flip(2) if torch.rand(()) < 0.5 else picture


def make_loader(url: str, workers: int = 2) -> wds.WebLoader:
    """Batches of pictures (B, 3, H, W) and labels (B,), the epoch of a fixed number of batches."""
    dataset = (
        wds.WebDataset(url, shardshuffle=1000, seed=0)
        .shuffle(100)
        .decode("torchrgb")
        .to_tuple("jpg;png;jpeg", "cls")
        .map_tuple(augment)
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    # Samples of all workers meet here; with_epoch makes every epoch, and so every rank, equally long.
    return loader.unbatched().shuffle(200).batched(BATCH).with_epoch(SAMPLES // BATCH)


def train(url: str, epochs: int = 3) -> float:
    """Train a very small network; the accuracy over the last epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    loader = make_loader(url)
    accuracy = 0.0
    for epoch in range(epochs):
        right = 0
        for pictures, labels in loader:
            scores = model(pictures)
            target = torch.as_tensor(labels)
            loss = nn.functional.cross_entropy(scores, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((scores.argmax(1) == target).sum())
        accuracy = right / (len(loader) * BATCH)
        print(f"epoch {epoch}: {len(loader)} batches, accuracy {accuracy:.2f}")
    return accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder))
