"""The demo's training: a small CNN on the digits, fed by a PyTorch DataLoader through `WebDataset`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wds_async.cli.bench.chart import Course
from wds_async.errors import MissingExtra

__all__ = ["State", "train"]

_TICK_S = 0.25
_PIXELS = 32


@dataclass(frozen=True)
class State:
    """Where the training stands, for the bar: samples seen, samples/s, bytes/s arriving, mean loss."""

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
    try:
        import torch  # noqa: PLC0415 (in the extra "demo")
    except ModuleNotFoundError as exn:
        raise MissingExtra('the demo needs torch and more: pip install "wds-async[demo]"') from exn
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
    meter = _Meter(dataset.statistics, sample_bytes)
    losses: list[tuple[int, float]] = []
    tests: list[tuple[int, float]] = []
    with meter:
        for epoch in range(1, epochs + 1):
            for images, labels in loader:
                loss: Any = torch.nn.functional.cross_entropy(model(_normal(torch, images)), torch.as_tensor(labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append((meter.count(len(labels)), loss.item()))
                show(meter.state(epoch, losses))
            tests.append((meter.samples, _test(torch, wds, model, test_urls)))
    return Course(meter.rates, losses, tests), dataset.statistics()


def shrink(sample: tuple[Any, int]) -> tuple[Any, int]:
    """A square image reduced to 32×32 by the mean of each block, in the worker: 25 times fewer bytes to hand over."""
    image, label = sample
    block = image.shape[0] // _PIXELS
    side = block * _PIXELS
    blocks = image[:side, :side].reshape(_PIXELS, block, _PIXELS, block)
    return blocks.mean(axis=(1, 3)).astype("uint8"), label


def _normal(torch: Any, images: Any) -> Any:
    """uint8 images N×32×32 to float N×1×32×32, each with mean 0 and deviation 1."""
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
    """The share of test images that are recognised."""
    right = count = 0
    model.eval()
    with torch.inference_mode(), wds.WebDataset(urls, shardshuffle=False) as dataset:
        for images, labels in dataset.decode("l8").to_tuple("jpg", "cls").map(shrink).batched(128):
            found = model(_normal(torch, images)).argmax(1)
            right += int((found == torch.as_tensor(labels)).sum())
            count += len(labels)
    model.train()
    return right / count


class _Meter:
    """Samples counted by the training, bytes by the readers of all workers, sampled by a thread."""

    def __init__(self, statistics: Callable[[], Any], sample_bytes: float) -> None:
        self.samples = 0
        self.rates: list[tuple[float, float, float]] = []
        self._statistics = statistics
        self._sample_bytes = sample_bytes
        self._done = threading.Event()
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Meter:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        then, before, trained = time.monotonic(), self._statistics(), self.samples
        while not self._done.wait(_TICK_S):
            now, stats, samples = time.monotonic(), self._statistics(), self.samples
            span = now - then
            read = (stats.bytes - before.bytes) / span
            self.rates.append((now - self._start, read, (samples - trained) * self._sample_bytes / span))
            then, before, trained = now, stats, samples

    def count(self, samples: int) -> int:
        """Count ``samples`` more; gives how many there are."""
        self.samples += samples
        return self.samples

    def state(self, epoch: int, losses: list[tuple[int, float]]) -> State:
        """For the bar: rates over the last second, the loss over the last 50 batches."""
        recent = [loss for _, loss in losses[-50:]]
        rates = [rate for _, rate, _ in self.rates[-4:]]
        return State(
            epoch,
            self.samples,
            self.samples / (time.monotonic() - self._start),
            sum(rates) / max(1, len(rates)),
            sum(recent) / len(recent),
        )
