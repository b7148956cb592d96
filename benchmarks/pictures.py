"""Pictures of 400 x 400 to decode, and the transform that users of a loader without one write with Pillow."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import PIL.Image

__all__ = ["DISTINCT", "SIDE", "noisy_jpeg", "photo_jpeg", "random_resized_crop"]

SIDE = 400
NOISY_BYTES = 87_000
DISTINCT = 12
"""Different images of each kind: one alone would train the processor's branch prediction."""


def _encoded(pixels: Any, quality: int) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def photo_jpeg(seed: int) -> bytes:
    """A JPEG of 400 x 400, about 40 KB: smooth areas, edges and a little grain, as photographs have."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE]
    patches = PIL.Image.fromarray(rng.integers(0, 256, (25, 25, 3), dtype=np.uint8))
    pixels = np.asarray(patches.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)).astype(np.float32)
    for _ in range(12):
        inside = (x - rng.integers(SIDE)) ** 2 + (y - rng.integers(SIDE)) ** 2 < rng.integers(10, 80) ** 2
        pixels[inside] = 0.6 * pixels[inside] + 0.4 * rng.integers(0, 256, 3)
    return _encoded(pixels + rng.normal(0, 4, pixels.shape), 85)


def noisy_jpeg(seed: int) -> bytes:
    """A JPEG of 400 x 400, 87 KB: noise at the quality that gives this size. Most of its decoding is Huffman's code."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3))
    return next(data for quality in range(50, 96) if len(data := _encoded(pixels, quality)) >= NOISY_BYTES)


def random_resized_crop(image: PIL.Image.Image, size: int) -> Any:
    """Return a random part of 8 to 100 % of the picture, resized to ``size``, as float32 CHW between 0 and 1: what
    torchvision's ``RandomResizedCrop`` and ``ToTensor`` do."""
    width, height = image.size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if wide <= width and high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            break
    else:
        wide = high = min(width, height)
        left, top = (width - wide) // 2, (height - high) // 2
    box = (left, top, left + wide, top + high)
    pixels = np.asarray(image.resize((size, size), PIL.Image.Resampling.BILINEAR, box=box), np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) / np.float32(255)
