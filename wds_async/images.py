"""Image decoders by specification: ``"rgb8"``, ``"torchrgb"``, ``"pil"``, …

A specification is a container (numpy, ``torch…``, ``pil…``), the channels (``l``, ``rgb``, ``rgba``), and ``8`` for
bytes where floats in [0, 1] are not wanted.
"""

from __future__ import annotations

import difflib
import functools
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wds_async.errors import MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["IMAGE_EXTENSIONS", "ImageHandler", "imagehandler"]

# What Pillow has a reader for, by format. (A field called "rgb" or "mpg" is therefore taken for an image.)
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
    "MPEG": "mpg mpeg",
    "Macintosh": "icns",
    "PNG": "png apng",
    "Paintbrush": "pcx dcx",
    "Photoshop": "psd",
    "Pixar": "pxr",
    "Portable maps": "pbm pgm pnm ppm",
    "PostScript": "ps eps",
    "Sun": "ras",
    "Silicon Graphics": "sgi bw rgb rgba",
    "TIFF": "tif tiff",
    "Targa": "tga icb vda vst",
    "Unreal": "ftc ftu",
    "WebP": "webp",
    "Windows": "bmp dib cur ico emf msp wmf",
    "X11": "xbm xpm",
    "science": "bufr grib fit fits h5 hdf",
}
IMAGE_EXTENSIONS: list[str] = [extension for names in _FORMATS.values() for extension in names.split()]
"""Extensions, in lower case, of the fields that an image handler decodes unless told otherwise."""

_NUMPY, _TORCH, _PIL = "numpy", "torch", "pil"
_SPECS: dict[str, tuple[str, str, bool]] = {
    **{f"{channels.lower()}8": (_NUMPY, channels, False) for channels in ("L", "RGB", "RGBA")},
    **{channels.lower(): (_NUMPY, channels, True) for channels in ("L", "RGB", "RGBA")},
    **{f"torch{channels.lower()}8": (_TORCH, channels, False) for channels in ("L", "RGB", "RGBA")},
    **{f"torch{channels.lower()}": (_TORCH, channels, True) for channels in ("L", "RGB", "RGBA")},
    "torch": (_TORCH, "RGB", True),
    **{f"pil{channels.lower()}": (_PIL, channels, False) for channels in ("L", "RGB", "RGBA")},
    "pil": (_PIL, "RGB", False),
}


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

    Raises ValueError for an unknown ``imagespec``, `MissingExtra` where Pillow or torch is not installed, and
    Pillow's errors for data that is no image.
    """

    def __init__(self, imagespec: str, extensions: Iterable[str] = IMAGE_EXTENSIONS) -> None:
        if imagespec not in _SPECS:
            raise ValueError(f"Unknown imagespec: {imagespec}{_suggestion(imagespec)}")
        self.imagespec = imagespec
        self.extensions = frozenset(extensions)

    def __call__(self, key: str, data: bytes) -> Any:
        """The image in ``data``, or None where the extension of ``key`` (``".seg.png"``) is not one of ours."""
        if key.rpartition(".")[2].lower() not in self.extensions:
            return None
        container, channels, scaled = _SPECS[self.imagespec]
        if container == _NUMPY:
            pixels = _interleaved(data, channels)
            return _unit_range(pixels) if scaled else pixels
        if container == _TORCH:
            return _tensor(data, channels, scaled)
        return _open(data, channels, copy=True)


def imagehandler(imagespec: str, extensions: Iterable[str] = IMAGE_EXTENSIONS) -> ImageHandler:
    """`ImageHandler` under the name that pipelines use."""
    return ImageHandler(imagespec, extensions)


def _suggestion(imagespec: str) -> str:
    swapped = [name for name in _SPECS if sorted(name) == sorted(imagespec.lower())]  # rgbtorch, torchrgb
    near = swapped or difflib.get_close_matches(imagespec.lower(), _SPECS, 1)
    return f" ({f'did you mean {near[0]}? ' if near else ''}known are {', '.join(_SPECS)})"


def _open(data: bytes, channels: str, *, copy: bool = False) -> Image:
    """The decoded image; with ``copy`` a plain Image, which holds no file."""
    try:
        import PIL.Image  # noqa: PLC0415 (an extra)
    except ImportError as exn:
        raise MissingExtra('decoding images needs Pillow: pip install "wds-async[images]"') from exn
    image = PIL.Image.open(io.BytesIO(data))
    image.load()
    return image.convert(channels) if copy or image.mode != channels else image


def _interleaved(data: bytes, channels: str) -> NDArray[np.uint8]:
    """Height x width (x channels), as numpy users have it."""
    pixels = _fast(data, "RGB") if channels == "RGB" else None
    return np.asarray(_open(data, channels)) if pixels is None else pixels


def _planar(data: bytes, channels: str) -> NDArray[np.uint8]:
    """(Channels x) height x width, as torch users have it, writable.

    Taking the channels apart is half of the work that is not decoding. Four bytes a pixel are shifted out in half the
    time of transposing an array, and Pillow unpacks single channels as fast.
    """
    pixels = _fast(data, "RGBX") if channels == "RGB" else None
    if pixels is None:
        image = _open(data, channels)
        shape = (len(channels), image.height, image.width) if len(channels) > 1 else (image.height, image.width)
        packed = bytearray().join([image.tobytes("raw", channel) for channel in channels])
        return np.frombuffer(packed, np.uint8).reshape(shape)
    words = pixels.view("<u4")[..., 0]
    planes = np.empty((3, *words.shape), np.uint8)
    for number, plane in enumerate(planes):
        np.right_shift(words, 8 * number, out=plane, casting="unsafe")
    return planes


def _unit_range(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Bytes as floats in [0, 1], in one pass. A true division: a multiplication by 1/255 rounds differently."""
    return np.divide(pixels, np.float32(255), dtype=np.float32)


def _tensor(data: bytes, channels: str, scaled: bool) -> Any:
    try:
        import torch  # noqa: PLC0415 (an extra)
    except ImportError as exn:
        raise MissingExtra('torch images need torch: pip install "wds-async[torch]"') from exn
    pixels = _planar(data, channels)
    return torch.from_numpy(_unit_range(pixels) if scaled else pixels)


# ------------------------------------------------------------------ simplejpeg


def _fast(data: bytes, order: str) -> NDArray[np.uint8] | None:
    """The pixels of a colour JPEG, height x width x ``order`` ("RGB" or "RGBX"); None where Pillow has to read it."""
    return _simplejpeg(data, order) if data[:2] == b"\xff\xd8" and _agrees() else None


@functools.cache
def _agrees() -> bool:
    """Whether simplejpeg is there and gives what Pillow gives, bit for bit: they may be linked with different
    versions of libjpeg."""
    try:
        import simplejpeg  # noqa: F401, PLC0415 (optional)
        from PIL.Image import fromarray  # noqa: PLC0415 (an extra)
    except ImportError:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    for subsampling in (0, 1, 2):
        stream = io.BytesIO()
        fromarray(noise).save(stream, "JPEG", quality=85, subsampling=subsampling)
        expected = np.asarray(_open(stream.getvalue(), "RGB"))
        for order in ("RGB", "RGBX"):
            pixels = _simplejpeg(stream.getvalue(), order)
            if pixels is None or not np.array_equal(pixels[..., :3], expected):
                return False
    return True


def _simplejpeg(data: bytes, order: str) -> NDArray[np.uint8] | None:
    """None for an image that Pillow would treat in a way of its own, or that is damaged."""
    import PIL.Image  # noqa: PLC0415 (an extra)
    import simplejpeg  # noqa: PLC0415 (optional)

    try:
        height, width, colours, subsampling = simplejpeg.decode_jpeg_header(data)
        # Pillow warns of images above this size, and refuses those of twice as many pixels.
        small = PIL.Image.MAX_IMAGE_PIXELS is None or height * width <= PIL.Image.MAX_IMAGE_PIXELS
        if colours != "YCbCr" or subsampling not in ("444", "422", "420") or not small:
            return None
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, order)
    except ValueError:
        return None
    return pixels
