"""Crops of images to one size: which part of an image is taken, and how it is resized.

The part depends on the image's size and on a number drawn for the sample, and on nothing else: the fields of a sample
that are images of one size are cut alike, and threads or a resumed run cut as one process would.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wds_async.arguments import check_number, check_size
from wds_async.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Crop", "Cut", "drawn_number", "resizer"]

_TRIES = 10
_LOG_RATIOS = math.log(3 / 4), math.log(4 / 3)


class _View(NamedTuple):
    """The ``window`` of an image (left, top, right, bottom in pixels) resized to ``height`` x ``width``, of which the
    crop begins at ``(top, left)``."""

    window: tuple[int, int, int, int]
    height: int
    width: int
    top: int = 0
    left: int = 0


@dataclass(frozen=True)
class Crop:
    """Cut of images to ``height`` x ``width`` pixels: ``where`` is "random" or "center" (see `decode`)."""

    height: int
    width: int
    where: str
    resize: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    flip: bool = False

    @classmethod
    def of(
        cls,
        size: int | tuple[int, int],
        crop: str | None,
        resize: int | None = None,
        scale: tuple[float, float] | None = None,
        flip: bool = False,
    ) -> Crop:
        """Return the crop of these arguments of `decode`. ConfigError for values that do not go together."""
        height, width = (check_size("decode", "size", side, at_least=1) for side in _pair("size", size))
        if crop not in ("random", "center"):
            raise ConfigError(f'decode: size={size!r} with crop={crop!r}: crop must be "random" or "center"')
        if resize is not None:
            if crop != "center":
                raise ConfigError(f'decode: resize={resize!r} is for crop="center", not for crop={crop!r}')
            resize = check_size("decode", "resize", resize, at_least=max(height, width))
        if scale is None:
            return cls(height, width, crop, resize, flip=bool(flip))
        low, high = (check_number("decode", "scale", share) for share in _pair("scale", scale))
        if crop != "random" or not 0 < low <= high <= 1:
            raise ConfigError(
                f'decode: scale={scale!r} with crop={crop!r}: scale is for crop="random", the smallest and the largest '
                "share of an image's area, both above 0 and at most 1"
            )
        return cls(height, width, crop, resize, (low, high), bool(flip))

    @property
    def draws(self) -> bool:
        """True if the result depends on the number drawn for a sample."""
        return self.where == "random" or self.flip

    def view(self, height: int, width: int, rng: random.Random) -> _View:
        """Return what is taken of an image of this size."""
        if self.where == "random":
            return _View(_random_window(height, width, self.scale, rng), self.height, self.width)
        # As torchvision's Resize and CenterCrop round.
        if self.resize is not None:
            shorter = min(height, width)
            tall, wide = self.resize * height // shorter, self.resize * width // shorter
        elif self.height * width < self.width * height:
            tall, wide = self.width * height // width, self.width
        else:
            tall, wide = self.height, self.height * width // height
        return _View((0, 0, width, height), tall, wide, round((tall - self.height) / 2), round((wide - self.width) / 2))


def _pair(argument: str, value: Any) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ConfigError(f"decode: {argument}={value!r} must have two numbers")
        return value[0], value[1]
    if argument != "size":
        raise ConfigError(f"decode: {argument}={value!r} must be a pair of numbers")
    return value, value


def _random_window(
    height: int, width: int, scale: tuple[float, float], rng: random.Random
) -> tuple[int, int, int, int]:
    """Draw a window as torchvision's ``RandomResizedCrop.get_params`` does (torchvision 0.28): its area is uniform in
    ``scale``, its aspect ratio log-uniform in 3/4 … 4/3, its place uniform. After ten that do not fit, take the largest
    in the middle whose ratio is within these limits."""
    for _ in range(_TRIES):
        area = height * width * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(*_LOG_RATIOS))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top, left = rng.randrange(height - tall + 1), rng.randrange(width - wide + 1)
            return left, top, left + wide, top + tall
    wide, tall = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    top, left = (height - tall) // 2, (width - wide) // 2
    return left, top, left + wide, top + tall


def drawn_number(draw: Callable[[], float]) -> int:
    """Return a number for a `Cut`, of a generator's ``random``."""
    return int(draw() * (1 << 32))


class Cut:
    """The crop of one image. `divisor` has to be called first, with the image's size; `tensor` does it."""

    def __init__(self, crop: Crop, number: int) -> None:
        self._crop = crop
        self._number = number
        self._mirrored = False
        self._view = _View((0, 0, 0, 0), 0, 0)
        self._full, self._divisor = (0, 0), 1

    def divisor(self, height: int, width: int) -> int:
        """Return 1, 2, 4 or 8: the largest part of an image of this size that need not be enlarged for the crop."""
        rng = random.Random(self._number)  # anew: Pillow asks again where simplejpeg has failed
        self._mirrored = self._crop.flip and rng.random() < 0.5
        view = self._crop.view(height, width, rng)
        left, top, right, bottom = view.window
        fits = min((bottom - top) // view.height, (right - left) // view.width)
        n = self._divisor = next((n for n in (8, 4, 2) if n <= fits), 1)
        # Where pixels of the reduced image begin; for images at full size too, so that masks fit their photographs.
        left, top, right, bottom = (n * ((edge + n // 2) // n) for edge in view.window)
        self._full, self._view = (
            (height, width),
            view._replace(window=(left, top, min(right, width), min(bottom, height))),
        )
        return n

    def _window(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the window in an image of this size, which is the full one or that divided by `divisor`."""
        n = 1 if (height, width) == self._full else self._divisor
        left, top, right, bottom = self._view.window
        return left // n, top // n, -(-right // n), -(-bottom // n)

    def pixels(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the crop of an image, height x width x channels, at full size or divided by `divisor`."""
        left, top, right, bottom = self._window(*image.shape[:2])
        view, crop = self._view, self._crop
        result = resizer()(image[top:bottom, left:right], view.height, view.width)
        result = result[view.top : view.top + crop.height, view.left : view.left + crop.width]
        return np.ascontiguousarray(result[:, ::-1] if self._mirrored else result)

    def tensor(self, image: Any) -> Any:
        """Return the crop of a tensor, channels x height x width at full size, on its device."""
        import torch  # noqa: PLC0415 (an extra)

        self.divisor(*image.shape[1:])
        left, top, right, bottom = self._window(*image.shape[1:])
        view, crop = self._view, self._crop
        window = image[None, :, top:bottom, left:right].float()  # CUDA resizes no bytes
        resized = torch.nn.functional.interpolate(window, (view.height, view.width), mode="bilinear", antialias=True)
        result = resized[0, :, view.top : view.top + crop.height, view.left : view.left + crop.width].round().byte()
        return result.flip(2) if self._mirrored else result

    def image(self, image: Image) -> Image:
        """Return the crop of a Pillow image likewise."""
        from PIL.Image import Resampling, Transpose  # noqa: PLC0415 (an extra)

        view, crop = self._view, self._crop
        window = self._window(image.height, image.width)
        result = image.crop(window).resize((view.width, view.height), Resampling.BILINEAR)
        if (view.height, view.width) != (crop.height, crop.width):
            result = result.crop((view.left, view.top, view.left + crop.width, view.top + crop.height))
        return result.transpose(Transpose.FLIP_LEFT_RIGHT) if self._mirrored else result


# ------------------------------------------------------------------ resizing


@functools.cache
def resizer() -> Any:
    """Return the function that resizes an array (height x width x 1, 3 or 4 channels, uint8) with a triangle filter
    as wide as the reduction, which averages what it takes together.

    That of torch, where it is installed, takes a quarter of the time of Pillow's; they differ by 1 at most.
    """
    try:
        import torch  # noqa: F401, PLC0415 (an extra)
    except ImportError:
        return _by_pillow
    return _by_torch


def _by_torch(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    import torch  # noqa: PLC0415 (an extra)

    # In one piece: torch would copy a part of an image on several threads, which then spin for a while.
    images = torch.from_numpy(np.ascontiguousarray(pixels)).unsqueeze(0).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
    result: NDArray[np.uint8] = resized.permute(0, 2, 3, 1)[0].numpy()
    return result


_MODES = {1: "L", 3: "RGB", 4: "RGBX"}


def _by_pillow(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    from PIL.Image import Resampling, frombuffer  # noqa: PLC0415 (an extra)

    tall, wide, channels = pixels.shape
    mode = _MODES[channels]
    image = frombuffer(mode, (wide, tall), np.ascontiguousarray(pixels), "raw", mode, 0, 1)
    return np.asarray(image.resize((width, height), Resampling.BILINEAR)).reshape(height, width, channels)
