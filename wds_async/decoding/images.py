"""Image decoders by specification: ``"rgb8"``, ``"torchrgb"``, ``"pil"``, …

A specification is a container (numpy, ``torch…``, ``pil…``), the channels (``l``, ``rgb``, ``rgba``), and ``8`` for
bytes where floats in [0, 1] are not wanted.
"""

from __future__ import annotations

import difflib
import functools
import io
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wds_async import world
from wds_async.arguments import check_size
from wds_async.decoding.crops import Crop, Cut, drawn_number, resizer
from wds_async.errors import MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["IMAGE_EXTENSIONS", "ImageHandler", "imagehandler", "imagespecs"]

# What Pillow has a reader for, by format. WebDataset has h5, hdf, mpg, mpeg, ps, eps, rgb and rgba too: fields of these
# names are seldom images, and Pillow cannot read the former four without a plug-in.
_FORMATS = {
    "Autodesk": "fli flc",
    "Blizzard": "blp",
    "DirectDraw": "dds",
    "GIF": "gif",
    "GIMP": "gbr",
    "IM": "im",
    "IPTC": "iim",
    "JPEG": "jpg jpeg jpe jfif",
    "JPEG 2000": "jp2 j2k j2c jpc jpf jpx",
    "Kodak": "pcd",
    "Macintosh": "icns",
    "PNG": "png apng",
    "Paintbrush": "pcx dcx",
    "Photoshop": "psd",
    "Pixar": "pxr",
    "Portable maps": "pbm pgm pnm ppm",
    "Sun": "ras",
    "Silicon Graphics": "sgi bw",
    "TIFF": "tif tiff",
    "Targa": "tga icb vda vst",
    "Unreal": "ftc ftu",
    "WebP": "webp",
    "Windows": "bmp dib cur ico emf msp wmf",
    "X11": "xbm xpm",
    "science": "bufr grib fit fits",
}
IMAGE_EXTENSIONS: list[str] = [extension for names in _FORMATS.values() for extension in names.split()]
"""Extensions, in lower case, of the fields that an image handler decodes by default."""

_NUMPY, _TORCH, _PIL = "numpy", "torch", "pil"
imagespecs: dict[str, tuple[str, str | None, str]] = {
    f"{prefix}{channels}{suffix}": (container, kind, channels)
    for prefix, suffix, container, kind in (
        ("", "8", _NUMPY, "uint8"),
        ("", "", _NUMPY, "float"),
        ("torch", "8", _TORCH, "uint8"),
        ("torch", "", _TORCH, "float"),
        ("pil", "", _PIL, None),
    )
    for channels in ("l", "rgb", "rgba")
}
imagespecs |= {"torch": imagespecs["torchrgb"], "pil": imagespecs["pilrgb"]}
"""What each specification gives: container, type of the values (None: PIL's own) and channels."""


class ImageHandler:
    """Decodes fields whose last extension is one of ``extensions``; other fields are None, "not mine".

    ======================================  ====================================================
    ``l8 rgb8 rgba8``                       numpy uint8, height x width (x channels)
    ``l rgb rgba``                          numpy float32 in [0, 1], the same shapes
    ``torchl8 torchrgb8 torchrgba8``        torch uint8, (channels x) height x width
    ``torchl torchrgb torchrgba``           torch float32 in [0, 1]; ``torch`` is ``torchrgb``
    ``pill pilrgb pilrgba``                 PIL images; ``pil`` is ``pilrgb``
    ======================================  ====================================================

    uint8 numpy arrays may be read-only. Images are converted as Pillow's ``convert`` does. JPEGs go through
    simplejpeg for ``rgb`` in numpy and torch, where it is installed and gives the same bits as Pillow.

    ``min_size`` (pixels; None: full size) decodes to the smallest of 1, 1/2, 1/4 and 1/8 of the image, sides rounded
    up, that has no side below ``min_size``; an image that is smaller than ``min_size`` keeps its size. With 256, one
    of 1024 x 800 becomes 512 x 400, and one of 500 x 300 stays. JPEGs are decoded at that scale, in a fraction of the
    time, and other formats are averaged over squares of pixels after decoding (Pillow's ``reduce``). The two round and
    filter differently: they differ where there is detail too fine for the smaller image.

    ``crop`` gives all images one size; JPEGs are decoded at the smallest of these scales that still has as many pixels.

    Raises ValueError for an unknown ``imagespec`` and a ``min_size`` below 1, `MissingExtra` where Pillow or torch is
    not installed, and Pillow's errors for data that is no image.
    """

    def __init__(
        self,
        imagespec: str,
        extensions: Iterable[str] = IMAGE_EXTENSIONS,
        *,
        min_size: int | None = None,
        crop: Crop | None = None,
    ) -> None:
        if imagespec not in imagespecs:
            swapped = [name for name in imagespecs if sorted(name) == sorted(imagespec.lower())]  # rgbtorch, torchrgb
            near = swapped or difflib.get_close_matches(imagespec.lower(), imagespecs, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            if imagespec == "cuda":
                hint = 'a GPU decodes whole batches: WebLoader(…).decode_batch("jpg", device="cuda"); '
            raise ValueError(f"Unknown imagespec: {imagespec} ({hint}known are {', '.join(imagespecs)})")
        self.imagespec = imagespec
        self.extensions = frozenset(extensions)
        self.min_size = None if min_size is None else check_size("ImageHandler", "min_size", min_size, at_least=1)
        self.crop = crop
        if world.may_fork_workers():
            _agrees()
            if crop is not None:
                resizer()

    @property
    def draws(self) -> bool:
        """True if the result depends on a number that is drawn for each sample."""
        return self.crop is not None and self.crop.draws

    def __call__(self, key: str, data: bytes, number: int | None = None) -> Any:
        """Return the image in ``data``, or None for another extension of ``key`` (``".seg.png"``).

        A random crop follows from the image's size and ``number``; None draws one from the global ``random``.
        """
        if key.rpartition(".")[2].lower() not in self.extensions:
            return None
        container, kind, channels = imagespecs[self.imagespec]
        channels, scaled = channels.upper(), kind == "float"
        size: _Size = _Whole(self.min_size)
        if self.crop is not None:
            size = Cut(self.crop, drawn_number(world.global_draws()) if number is None else number)
        if container == _NUMPY:
            return _interleaved(data, channels, scaled, size)
        if container == _TORCH:
            return _tensor(data, channels, scaled, size)
        return _open(data, channels, size, copy=True)


def imagehandler(
    imagespec: str,
    extensions: Iterable[str] = IMAGE_EXTENSIONS,
    *,
    min_size: int | None = None,
    **crop: Any,
) -> ImageHandler:
    """Return an `ImageHandler`, under the name that pipelines use; ``size``, ``crop`` and so on as in `decode`."""
    return ImageHandler(imagespec, extensions, min_size=min_size, crop=Crop.of(**crop) if crop else None)


class _Size(Protocol):
    """At which scale an image is decoded, and what is made of that."""

    def divisor(self, height: int, width: int) -> int:
        """Return 1, 2, 4 or 8 for an image of this size."""

    def pixels(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return what is wanted of the pixels of the image, at full size or divided."""

    def image(self, image: Image) -> Image:
        """Return what is wanted of a Pillow image likewise."""


class _Whole:
    """The whole image, at 1/2, 1/4 or 1/8 where that leaves no side, rounded up, below ``min_size``."""

    def __init__(self, min_size: int | None) -> None:
        self._min_size = min_size
        self._full, self._divisor = (0, 0), 1

    def divisor(self, height: int, width: int) -> int:
        """Return the largest of 1, 2, 4 and 8 that it may be."""
        if self._min_size is not None:
            shorter, self._full = min(height, width), (height, width)
            self._divisor = next((n for n in (8, 4, 2) if -(-shorter // n) >= self._min_size), 1)
        return self._divisor

    def pixels(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the image: JPEGs are decoded at their scale."""
        return image

    def image(self, image: Image) -> Image:
        """Return the image, reduced if it was decoded at full size."""
        full = (image.height, image.width) == self._full
        return image.reduce(self._divisor) if full and self._divisor > 1 else image


def _open(data: bytes, channels: str, size: _Size | None = None, *, copy: bool = False) -> Image:
    """Decode an image; with ``copy`` to a plain Image, which holds no file."""
    try:
        import PIL.Image  # noqa: PLC0415 (an extra)
    except ImportError as exn:
        raise MissingExtra('decoding images needs Pillow: pip install "wds-async[images]"') from exn
    size = size or _Whole(None)
    image: Image = PIL.Image.open(io.BytesIO(data))
    width, height = image.size
    divisor = size.divisor(height, width)
    if 1 < divisor <= min(width, height):
        image.draft(None, (width // divisor, height // divisor))  # JPEG's; other formats do nothing
    image.load()
    image = image.convert(channels) if copy or image.mode != channels else image
    return size.image(image)


def _interleaved(data: bytes, channels: str, scaled: bool, size: _Size) -> NDArray[Any]:
    """Return height x width (x channels), as numpy users have it; floats in [0, 1] where ``scaled``."""
    pixels = _fast(data, "RGB", size, _scratch if scaled else None) if channels == "RGB" else None
    pixels = np.asarray(_open(data, channels, size)) if pixels is None else size.pixels(pixels)
    return _unit_range(pixels) if scaled else pixels


def _planar(data: bytes, channels: str, scaled: bool, size: _Size) -> NDArray[Any]:
    """Return (channels x) height x width, as torch users have it, writable; floats in [0, 1] where ``scaled``.

    Taking the channels apart is half of the work that is not decoding. Four bytes a pixel are shifted out in half the
    time of transposing an array, and Pillow unpacks single channels as fast.
    """
    pixels = _fast(data, "RGBX", size, _scratch) if channels == "RGB" else None
    if pixels is None:
        image = _open(data, channels, size)
        shape = (len(channels), image.height, image.width) if len(channels) > 1 else (image.height, image.width)
        packed = bytearray().join([image.tobytes("raw", channel) for channel in channels])
        planes = np.frombuffer(packed, np.uint8).reshape(shape)
        return _unit_range(planes) if scaled else planes
    words = size.pixels(pixels).view("<u4")[..., 0]
    result = np.empty((3, *words.shape), np.float32 if scaled else np.uint8)
    plane = np.empty(words.shape, np.uint8)
    for number, channel in enumerate(result):
        np.right_shift(words, 8 * number, out=plane if scaled else channel, casting="unsafe")
        if scaled:
            _unit_range(plane, channel)
    return result


def _unit_range(pixels: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Return bytes as floats in [0, 1], in one pass. This is a true division: a multiplication by 1/255 rounds
    differently.
    """
    return np.divide(pixels, np.float32(255), out=out, dtype=np.float32)


def _tensor(data: bytes, channels: str, scaled: bool, size: _Size) -> Any:
    try:
        import torch  # noqa: PLC0415 (an extra)
    except ImportError as exn:
        raise MissingExtra('torch images need torch: pip install "wds-async[torch]"') from exn
    return torch.from_numpy(_planar(data, channels, scaled, size))


# ------------------------------------------------------------------ simplejpeg

_SCRATCH_BYTES = 8 << 20


class _Scratch(threading.local):
    """Memory that each thread keeps for pixels on their way: touching fresh pages costs a tenth of the decoding."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def __call__(self, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return at least ``size_bytes``, valid until the next call; None for more than the limit of what is kept."""
        if size_bytes > _SCRATCH_BYTES:
            return None
        if len(self._memory) < size_bytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return self._memory


_scratch = _Scratch()


def _fast(
    data: bytes, order: str, size: _Size | None = None, memory: Callable[[int], Any] | None = None
) -> NDArray[np.uint8] | None:
    """Return the pixels of a colour JPEG, height x width x ``order`` ("RGB" or "RGBX"), in ``memory(size_bytes)`` or
    fresh memory. None where Pillow has to read it."""
    jpeg = data[:2] == b"\xff\xd8" and _agrees()
    return _simplejpeg(data, order, size or _Whole(None), memory) if jpeg else None


@functools.cache
def _agrees() -> bool:
    """Return True where simplejpeg is installed and equals Pillow bit for bit: their versions of libjpeg may differ."""
    try:
        import simplejpeg  # noqa: F401, PLC0415 (optional)
        from PIL.Image import fromarray  # noqa: PLC0415 (an extra)
    except ImportError:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    for subsampling in (0, 1, 2):
        stream = io.BytesIO()
        fromarray(noise).save(stream, "JPEG", quality=85, subsampling=subsampling)
        for min_size in (None, 18, 9, 4):
            expected = np.asarray(_open(stream.getvalue(), "RGB", _Whole(min_size)))
            for order in ("RGB", "RGBX"):
                pixels = _simplejpeg(stream.getvalue(), order, _Whole(min_size))
                if pixels is None or not np.array_equal(pixels[..., :3], expected):
                    return False
    return True


def _simplejpeg(
    data: bytes, order: str, size: _Size, memory: Callable[[int], Any] | None = None
) -> NDArray[np.uint8] | None:
    """Return the pixels; None for an image that Pillow would treat in a way of its own, or that is damaged."""
    import PIL.Image  # noqa: PLC0415 (an extra)
    import simplejpeg  # noqa: PLC0415 (optional)

    try:
        height, width, colours, subsampling = simplejpeg.decode_jpeg_header(data)
        # Pillow warns of images above this size, and refuses those of twice as many pixels.
        small = PIL.Image.MAX_IMAGE_PIXELS is None or height * width <= PIL.Image.MAX_IMAGE_PIXELS
        divisor = size.divisor(height, width)
        if colours != "YCbCr" or subsampling not in ("444", "422", "420") or not small or divisor > min(height, width):
            return None
        height, width = -(-height // divisor), -(-width // divisor)
        buffer = None if memory is None else memory(height * width * len(order))
        # The three limits leave no other scale than 1 / divisor: libjpeg has eighths of every number.
        scale = {"min_factor": divisor, "min_height": height, "min_width": width}
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, order, buffer=buffer, **scale)
    except ValueError:
        return None
    return pixels
