"""The demo's training: a small CNN on the digits, fed by a PyTorch DataLoader through `WebDataset`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wds_async import packages
from wds_async.cli.bench.chart import Course

__all__ = ["State", "train"]

_TICK_S = 0.25
_PIXELS = 32


@dataclass(frozen=True)
class State:
    """The state of the training, for the progress bar: samples seen, samples/s, bytes/s arriving, mean loss."""

    epoch: int
    samples: int
    samples_per_s: float
    bytes_per_s: float
    loss: float


def train(
    train_urls: list[str],
    test_urls: list[str],
    *,
    epochs: int,
    workers: int,
    sample_bytes: float,
    show: Callable[[State], None],
    batch: int = 64,
) -> tuple[Course, Any]:
    """Train, test after each epoch; gives the course of it and the reader's statistics over all workers.

    ``sample_bytes`` is what a sample takes in its shard, for the rate at which bytes are trained on.
    """
    torch = packages.optional("torch", "the demo", "demo")
    import wds_async as wds  # noqa: PLC0415

    torch.manual_seed(1)
    torch.set_num_threads(1)  # the workers decode on the other cores
    dataset = wds.WebDataset(train_urls, shardshuffle=100, seed=1).shuffle(1000, seed=1)
    dataset = dataset.decode("l8").to_tuple("jpg", "cls").map(shrink).batched(batch, partial=False)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=True, prefetch_factor=4
    )
    model = _model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    course, samples = Course([], [], []), 0
    start = then = time.monotonic()
    before, trained = dataset.statistics(), 0
    for epoch in range(1, epochs + 1):
        for images, labels in loader:
            loss: Any = torch.nn.functional.cross_entropy(model(_normal(torch, images)), torch.as_tensor(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
            course.losses.append((samples, loss.item()))
            now = time.monotonic()
            if (span := now - then) >= _TICK_S:
                stats = dataset.statistics()
                rates = (stats.bytes - before.bytes) / span, (samples - trained) * sample_bytes / span
                course.rates.append((now - start, *rates))
                then, before, trained = now, stats, samples
            show(_state(course, epoch, now - start))
        course.tests.append((samples, _test(torch, wds, model, test_urls)))
    return course, dataset.statistics()


def _state(course: Course, epoch: int, passed_s: float) -> State:
    """Return the rates of the last second, and the loss of the last 50 batches."""
    samples = course.losses[-1][0]
    losses, rates = [loss for _, loss in course.losses[-50:]], [read for _, read, _ in course.rates[-4:]]
    return State(epoch, samples, samples / passed_s, sum(rates) / max(1, len(rates)), sum(losses) / len(losses))


def shrink(sample: tuple[Any, int]) -> tuple[Any, int]:
    """Return a square image reduced to 32×32 by the mean of each block, in the worker: 25 times fewer bytes to hand
    over.
    """
    image, label = sample
    block = image.shape[0] // _PIXELS
    side = block * _PIXELS
    blocks = image[:side, :side].reshape(_PIXELS, block, _PIXELS, block)
    return blocks.mean(axis=(1, 3)).astype("uint8"), label


def _normal(torch: Any, images: Any) -> Any:
    """Convert uint8 images N×32×32 to float N×1×32×32, each with mean 0 and deviation 1."""
    x = torch.as_tensor(images).float().unsqueeze(1)
    return (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-3)


def _model(torch: Any) -> Any:
    nn = torch.nn

    def block(inputs: int, outputs: int) -> list[Any]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(1, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(64 * 16, 10))


def _test(torch: Any, wds: Any, model: Any, urls: list[str]) -> float:
    """Return the share of test images that are recognised."""
    right = count = 0
    model.eval()
    with torch.inference_mode(), wds.WebDataset(urls, shardshuffle=False) as dataset:
        for images, labels in dataset.decode("l8").to_tuple("jpg", "cls").map(shrink).batched(128):
            found = model(_normal(torch, images)).argmax(1)
            right += int((found == torch.as_tensor(labels)).sum())
            count += len(labels)
    model.train()
    return right / count
