"""How the values of a sample become bytes."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wds_async import tenbin
from wds_async.errors import ConfigError, MissingExtra

__all__ = [
    "add_handlers",
    "default_handlers",
    "imageencoder",
    "make_encoder",
    "numpy_dumps",
    "numpy_npz_dumps",
    "tenbin_dumps",
    "torch_dumps",
]

Sample = Mapping[str, Any]
Encoders = dict[str, Callable[[Any], Any]]


def imageencoder(image: Any, format: str = "PNG") -> bytes:
    """An image file of ``format`` (``jpg``, ``png``, ``ppm``, ``tiff``, …; JPEG in quality 100).

    ``image`` is a PIL image or an array of shape (H, W) or (H, W, 1, 3 or 4): uint8, or float in [0, 1]. Raises
    ValueError for other values, and MissingExtra where Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: PLC0415 - most shards are written from bytes
    except ImportError as error:
        raise MissingExtra('encoding images needs Pillow: pip install "wds-async[images]"') from error
    if isinstance(image, np.ndarray):
        if image.dtype.kind == "f":
            low, high = float(np.amin(image)), float(np.amax(image))
            if not (low > -0.001 and high < 1.001):
                raise ValueError(f"a float image has values in [0, 1], this one in [{low}, {high}]")
            image = (np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8)
        if image.ndim == 3 and image.shape[2] == 1:
            image = image[:, :, 0]
        if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))):
            raise ValueError(f"no image has the dtype {image.dtype} and the shape {image.shape}")
        image = PIL.Image.fromarray(image)
    elif not isinstance(image, PIL.Image.Image):
        raise ValueError(f"an image is a PIL image or a numpy array, not {type(image).__name__}")
    name = {"JPG": "JPEG", "IMG": "PPM", "IMAGE": "PPM"}.get(format.upper(), format.upper())
    mode = {"PBM": "1", "PGM": "L"}.get(name)  # Pillow writes all three as PPM and tells them by the mode
    if mode is not None:
        name, image = "PPM", image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, format=name, **({"quality": 100} if name in ("JPEG", "TIFF") else {}))
    return stream.getvalue()


def torch_dumps(data: Any) -> bytes:
    """``torch.save``, as bytes. torch is imported here and not before."""
    import torch  # noqa: PLC0415 - writing shards must not need it

    stream = io.BytesIO()
    torch.save(data, stream)
    return stream.getvalue()


def numpy_dumps(data: Any) -> bytes:
    """An ``.npy`` file. Raises ValueError for arrays of objects, which no decoder would read."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asanyarray(data), allow_pickle=False)
    return stream.getvalue()


def numpy_npz_dumps(data: dict[str, Any]) -> bytes:
    """A compressed ``.npz`` file of a dict of arrays. Raises ValueError for anything else."""
    if not isinstance(data, dict) or not all(isinstance(array, np.ndarray) for array in data.values()):
        raise ValueError("an npz field is a dict of numpy arrays")
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **data)
    return stream.getvalue()


def tenbin_dumps(x: Any) -> bytes:
    """A list of arrays, or one array, as tenbin."""
    return bytes(tenbin.encode_buffer(x if isinstance(x, list) else [x]))


def _packer(package: str, function: str) -> Callable[[Any], bytes]:
    def dumps(x: Any) -> bytes:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise MissingExtra(f'{package} is not installed: pip install "wds-async[formats]"') from error
        packed: bytes = getattr(module, function)(x)
        return packed

    return dumps


def add_handlers(d: Encoders, keys: str | list[str], value: Callable[[Any], Any]) -> None:
    """Set the encoder ``value`` for each of ``keys`` (extensions; a list, or a string with blanks) in ``d``."""
    for key in keys.split() if isinstance(keys, str) else keys:
        d[key] = value


def _make_handlers() -> Encoders:
    handlers: Encoders = {}
    for keys, value in (
        ("cls cls2 class count index inx id", lambda x: str(x).encode("ascii")),
        ("txt text transcript html htm", lambda x: x.encode("utf-8")),
        ("pyd pickle", pickle.dumps),
        ("pth", torch_dumps),
        ("npy", numpy_dumps),
        ("npz", numpy_npz_dumps),
        ("ten tenbin tb", tenbin_dumps),
        ("json jsn", lambda x: json.dumps(x).encode("utf-8")),
        ("mp msgpack msg", _packer("msgpack", "packb")),
        ("cbor", _packer("cbor2", "dumps")),
        ("jpg jpeg img image", lambda x: imageencoder(x, "JPEG")),
        ("png", lambda x: imageencoder(x, "PNG")),
        ("pbm", lambda x: imageencoder(x, "PBM")),
        ("pgm", lambda x: imageencoder(x, "PGM")),
        ("ppm", lambda x: imageencoder(x, "PPM")),
        ("tiff tif", lambda x: imageencoder(x, "TIFF")),
    ):
        add_handlers(handlers, keys, value)
    return handlers


default_handlers: Encoders = _make_handlers()
"""Encoders by extension, for ``encoder=True``. May be changed in place."""


def _encode(name: str, value: Any, handlers: Encoders) -> Any:
    if name.startswith("_"):
        return value
    packed = name.endswith(".gz")
    extension = name.removesuffix(".gz").rpartition(".")[2].lower()
    if isinstance(value, str):
        value = value.encode("utf-8")
    elif not isinstance(value, bytes):
        handler = handlers.get(extension)
        if handler is None:
            raise ValueError(
                f"field {name!r}: no encoder for {extension!r} and a {type(value).__name__}; give bytes or str, or"
                f" an encoder by TarWriter(encoder={{{extension!r}: f, …}}) or writer.add_handlers"
            )
        value = handler(value)
    return gzip.compress(value, mtime=0) if packed else value


def make_encoder(spec: Any) -> Callable[[Sample], Sample]:
    """From the ``encoder`` argument of `TarWriter` to a function from sample to sample of bytes.

    ``True`` encodes by the last extension with `default_handlers`, a dict with the encoders in it, ``False`` and
    ``None`` leave the sample as it is, and a callable is the encoder. bytes and str are stored as they are; fields
    named ``*.gz`` are compressed. Raises ConfigError for anything else.
    """
    if spec is False or spec is None:
        return lambda sample: sample
    if callable(spec):
        encoder: Callable[[Sample], Sample] = spec
        return encoder
    handlers = default_handlers if spec is True else spec
    if not isinstance(handlers, dict):
        raise ConfigError(f"encoder={spec!r}: it is True, False, a function or a dict of functions by extension")
    return lambda sample: {name: _encode_field(sample, name, value, handlers) for name, value in sample.items()}


def _encode_field(sample: Sample, name: str, value: Any, handlers: dict[str, Any]) -> Any:
    """As `_encode`; what an encoder raises keeps its type and says which sample and field it was about."""
    try:
        return _encode(name, value, handlers)
    except Exception as error:
        error.add_note(f"while encoding field {name!r} of sample {sample.get('__key__')!r}")
        raise
