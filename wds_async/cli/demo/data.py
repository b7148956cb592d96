"""The demo's data: scikit-learn's handwritten digits, made into photograph-like JPEGs and written as shards.

1,797 digits of 8×8 pixels are upscaled, turned, shifted, coloured and laid on a noisy background until the
shards reach the given size. Training and test images come from different source digits, so nothing leaks.
The same settings give the same bytes; shards that are complete are used again.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import multiprocessing
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wds_async.writer import ShardWriter

__all__ = ["DemoPlan", "DemoShards", "prepare", "render"]

_QUALITY = 95
_NOISE = 96
_TEST_SHARE = 5  # every fifth source digit is for the test
_BATCH, _AHEAD = 32, 6

_Image = tuple[str, bytes, int]  # key, JPEG, label


@dataclass(frozen=True)
class DemoPlan:
    """``train_bytes`` of training shards of ``shard_bytes``, ``test_images``, of ``pixels`` squared, at least 32."""

    train_bytes: int
    shard_bytes: int
    test_images: int
    pixels: int = 160
    seed: int = 7
    version: int = 1


@dataclass(frozen=True)
class DemoShards:
    """The written shards: file names inside ``folder``, and counts."""

    folder: Path
    train: list[str]
    test: list[str]
    train_images: int
    test_images: int
    bytes: int


def prepare(folder: Path, plan: DemoPlan, progress: Callable[[int], None] = lambda written: None) -> DemoShards:
    """Write the shards of ``plan`` to ``folder``, unless they are there already.

    ``progress`` is called with the bytes of training images so far. What an interrupted run left is removed.
    """
    done = folder / "complete.json"
    if done.is_file():
        known = json.loads(done.read_text())
        if known["plan"] == asdict(plan):
            return DemoShards(folder, **known["shards"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Leaving it waits for the few batches that were begun for nothing; multiprocessing's Pool would kill its
    # workers, and now and then hang on the lock that one of them held.
    # Ctrl-C is the parent's alone.
    with ProcessPoolExecutor(
        2,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as pool:
        tests = itertools.islice(_images(pool, plan, "test"), plan.test_images)
        test_images = _write(folder / "test-%06d.tar", plan, tests)
        train_images = _write(folder / "train-%06d.tar", plan, _images(pool, plan, "train"), plan.train_bytes, progress)
    shards: dict[str, Any] = {
        "train": sorted(path.name for path in folder.glob("train-*.tar")),
        "test": sorted(path.name for path in folder.glob("test-*.tar")),
        "train_images": train_images,
        "test_images": test_images,
        "bytes": sum(path.stat().st_size for path in folder.glob("*.tar")),
    }
    done.write_text(json.dumps({"plan": asdict(plan), "shards": shards}))
    return DemoShards(folder, **shards)


def _write(
    pattern: Path,
    plan: DemoPlan,
    images: Iterable[_Image],
    size: float = math.inf,
    progress: Callable[[int], None] = lambda written: None,
) -> int:
    """Write ``images`` until there are ``size`` bytes of them; return how many were written."""
    count = written = 0
    with ShardWriter(str(pattern), maxsize=plan.shard_bytes, verbose=0, mtime=0) as sink:
        for key, jpeg, label in images:
            sink.write({"__key__": key, "jpg": jpeg, "cls": str(label).encode()})
            count, written = count + 1, written + len(jpeg)
            progress(written)
            if written >= size:
                break
    return count


def _images(pool: ProcessPoolExecutor, plan: DemoPlan, part: str) -> Iterator[_Image]:
    """Yield endless images in a fixed order, rendered a few batches ahead by ``pool``."""
    ahead = deque(pool.submit(_batch, plan, part, i) for i in range(_AHEAD))
    for next_batch in itertools.count(_AHEAD):
        yield from ahead.popleft().result()
        ahead.append(pool.submit(_batch, plan, part, next_batch))


def _batch(plan: DemoPlan, part: str, number: int) -> list[_Image]:
    pixels, labels = _digits(part)
    made = []
    for index in range(number * _BATCH, (number + 1) * _BATCH):
        random = np.random.default_rng([plan.seed, part == "test", index])
        source = index % len(labels)
        made.append((f"{part}-{index:06d}", render(pixels[source], plan.pixels, random), int(labels[source])))
    return made


@functools.cache
def _digits(part: str) -> tuple[Any, Any]:
    from sklearn.datasets import load_digits  # noqa: PLC0415 (in the extra "demo")

    digits = load_digits()
    # In a fixed random order: neighbours in the set were written by the same hand.
    order = np.random.default_rng(0).permutation(len(digits.target))
    test = np.arange(len(order)) % _TEST_SHARE == 0
    chosen = order[test if part == "test" else ~test]
    return digits.images[chosen], digits.target[chosen]


def render(digit: Any, pixels: int, random: np.random.Generator) -> bytes:
    """Return a JPEG of ``pixels`` squared of an 8×8 ``digit`` (0 to 16), turned up to 12°, shifted, coloured, noisy."""
    from PIL import Image  # noqa: PLC0415 (in the extra "images")

    ink = Image.fromarray((np.pad(digit, 1) * (255 / 16)).astype(np.uint8))
    size = pixels * 7 // 8
    canvas = Image.new("L", (pixels, pixels))
    left, top = (int(v) for v in random.integers(0, pixels - size + 1, 2))
    canvas.paste(ink.resize((size, size), Image.Resampling.BICUBIC), (left, top))
    canvas = canvas.rotate(random.uniform(-12, 12), Image.Resampling.BILINEAR)
    share = np.asarray(canvas, np.float32)[..., None] / 255
    front, back = random.uniform(150, 255, 3), random.uniform(0, 90, 3)
    noise = random.integers(-_NOISE // 2, _NOISE // 2, (pixels, pixels, 3), dtype=np.int8)
    image = np.clip(back + (front - back) * share + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
    return buffer.getvalue()
