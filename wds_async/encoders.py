"""How the values of a sample become bytes."""

from __future__ import annotations

import functools
import gzip
import io
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wds_async import packages, tenbin
from wds_async.errors import ConfigError, MissingExtra, WdsError

__all__ = [
    "add_handlers",
    "bytestr",
    "cbor_dumps",
    "default_handlers",
    "encode_based_on_extension",
    "encode_based_on_extension1",
    "imageencoder",
    "make_encoder",
    "make_handlers",
    "mp_dumps",
    "numpy_dumps",
    "numpy_npz_dumps",
    "tenbin_dumps",
    "torch_dumps",
]

Sample = Mapping[str, Any]
Encoders = dict[str, Callable[[Any], Any]]


def imageencoder(image: Any, format: str = "PNG", quality: int | None = None) -> bytes:
    """An image file of ``format`` (``jpg``, ``png``, ``webp``, ``ppm``, ``tiff``, …).

    ``image`` is a PIL image or an array of shape (H, W) or (H, W, 1, 3 or 4): uint8, or float in [0, 1]; one of shape
    (H, W) may have any type that Pillow and the format know (uint16 in PNG and TIFF). ``quality`` is for JPEG, WebP
    and TIFF with JPEG inside: 1 to 100. Unless given it is 100 for ``jpg``, ``JPEG`` and ``webp``, and Pillow's own
    for other spellings. Raises ValueError for other values, and MissingExtra where Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: PLC0415 (most shards are written from bytes)
    except ImportError as exn:
        raise MissingExtra('encoding images needs Pillow: pip install "wds-async[images]"') from exn
    if isinstance(image, np.ndarray):
        image = _pil_image(image)
    elif not isinstance(image, PIL.Image.Image):
        raise ValueError(f"an image is a PIL image or a numpy array, not {type(image).__name__}")
    name = {"JPG": "JPEG", "IMG": "PPM", "IMAGE": "PPM"}.get(format.upper(), format.upper())
    mode = {"PBM": "1", "PGM": "L"}.get(name)  # Pillow writes all three as PPM and tells them by the mode
    if mode is not None:
        name, image = "PPM", image.convert(mode)
    if quality is None and (name == "WEBP" or format.upper() == "JPG" or format in ("JPEG", "tiff")):
        quality = 100  # for these spellings, as in WebDataset, so that the files are the same
    stream = io.BytesIO()
    try:
        image.save(stream, format=name, **({} if quality is None else {"quality": quality}))
    except KeyError:
        raise ValueError(f"Pillow writes no images of the format {format!r}") from None
    except OSError as exn:  # the format does not hold such an image
        raise ValueError(f"an image of mode {image.mode} is not written as {format}: {exn}") from exn
    return stream.getvalue()


def _pil_image(array: Any) -> Any:
    import PIL.Image  # noqa: PLC0415 (`imageencoder` has seen that it is there)

    if array.dtype.kind == "f":
        low, high = (float(np.amin(array)), float(np.amax(array))) if array.size else (0.0, 0.0)
        if not (low > -0.001 and high < 1.001):
            raise ValueError(f"a float image has values in [0, 1], this one in [{low}, {high}]")
        array = (np.clip(array, 0.0, 1.0) * 255.0).astype(np.uint8)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)):
        try:
            return PIL.Image.fromarray(array)
        except TypeError:
            pass
    raise ValueError(f"no image has the dtype {array.dtype} and the shape {array.shape}")


def bytestr(data: Any) -> bytes:
    """bytes as they are, anything else as the ASCII of its ``str``."""
    return data if isinstance(data, bytes) else str(data).encode("ascii")


def torch_dumps(data: Any) -> bytes:
    """``torch.save``, as bytes. Raises MissingExtra where torch, which is not imported before, is not installed."""
    stream = io.BytesIO()
    packages.optional("torch", "encoding this field", "torch").save(data, stream)
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


def tenbin_dumps(x: Any) -> memoryview:
    """A list of arrays, or one array, as tenbin."""
    return memoryview(tenbin.encode_buffer(x if isinstance(x, list) else [x]))


def mp_dumps(x: Any) -> bytes:
    """MessagePack. Raises MissingExtra where ``msgpack`` is not installed."""
    return bytes(packages.optional("msgpack", "encoding this field", "formats").packb(x))


def cbor_dumps(x: Any) -> bytes:
    """CBOR. Raises MissingExtra where ``cbor2`` is not installed."""
    return bytes(packages.optional("cbor2", "encoding this field", "formats").dumps(x))


def add_handlers(d: Encoders, keys: str | list[str], value: Callable[[Any], Any]) -> None:
    """Set the encoder ``value`` for each of ``keys`` (extensions; a list, or a string with blanks) in ``d``."""
    for key in keys.split() if isinstance(keys, str) else keys:
        d[key] = value


def make_handlers(quality: int | None = None) -> Encoders:
    """A new dict of the encoders by extension; ``quality`` is that of JPEG and WebP, see `imageencoder`."""
    handlers: Encoders = {}
    encoders: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("cls cls2 class count index inx id", lambda x: str(x).encode("ascii")),
        ("txt text transcript html htm", lambda x: x.encode("utf-8")),
        ("pyd pickle pkl", pickle.dumps),
        ("pth", torch_dumps),
        ("npy", numpy_dumps),
        ("npz", numpy_npz_dumps),
        ("ten tenbin tb", tenbin_dumps),
        ("json jsn", lambda x: json.dumps(x).encode("utf-8")),
        ("mp msgpack msg", mp_dumps),
        ("cbor", cbor_dumps),
        ("jpg jpeg img image", functools.partial(imageencoder, format="jpg", quality=quality)),
        ("webp", functools.partial(imageencoder, format="webp", quality=quality)),
        *((name, functools.partial(imageencoder, format=name)) for name in ("png", "pbm", "pgm", "ppm")),
        ("tiff tif", functools.partial(imageencoder, format="tiff")),
    )
    for keys, value in encoders:
        add_handlers(handlers, keys, value)
    return handlers


default_handlers: Encoders = make_handlers()
"""Encoders by extension, for ``encoder=True``. May be changed in place."""

_OURS = dict(default_handlers)


def encode_based_on_extension1(data: Any, tname: str, handlers: Encoders) -> Any:
    """One value, encoded by the last extension of the field's name ``tname`` with ``handlers``.

    bytes and str are stored as they are, a name that ends in ``.gz`` is compressed, and metadata (``_…``) is left to
    the writer. Raises ValueError where there is no encoder.
    """
    if tname.startswith("_"):
        return data
    extension = _extension(tname)
    if isinstance(data, str):
        data = data.encode("utf-8")
    elif not isinstance(data, bytes):
        handler = handlers.get(extension)
        if handler is None:
            raise ValueError(
                f"field {tname!r}: no encoder for {extension!r} and a {type(data).__name__}; give bytes or str, or"
                f" an encoder by TarWriter(encoder={{{extension!r}: f, …}}) or writer.add_handlers"
            )
        data = handler(data)
    return gzip.compress(data, mtime=0) if tname.endswith(".gz") else data


def encode_based_on_extension(sample: Sample, handlers: Encoders) -> dict[str, Any]:
    """A whole sample, each field by `encode_based_on_extension1`.

    What an encoder of ours raises becomes a ValueError that names the sample and the field; what an encoder of the
    program's raises keeps its type, and a note says the same.
    """
    return {name: _encode_field(sample, name, value, handlers) for name, value in sample.items()}


def make_encoder(spec: Any, quality: int | None = None) -> Callable[[Sample], Sample]:
    """Return the function from sample to sample of bytes of the ``encoder`` argument of `TarWriter`.

    ``True`` encodes by the last extension with `default_handlers`, a dict with the encoders in it, ``False`` and
    ``None`` leave the sample as it is, and a callable is the encoder. bytes and str are stored as they are; fields
    named ``*.gz`` are compressed. ``quality`` (1 to 100) is for ``True``: our encoders of JPEG and WebP then use it.
    Raises ConfigError for anything else.
    """
    if quality is not None and (spec is not True or isinstance(quality, bool) or quality not in range(1, 101)):
        raise ConfigError(f"quality={quality!r} is from 1 to 100, and for encoder=True, not {spec!r}")
    if spec is False or spec is None:
        return lambda sample: sample
    if callable(spec):
        return spec  # type: ignore[no-any-return]
    if spec is not True and not isinstance(spec, dict):
        raise ConfigError(f"encoder={spec!r}: it is True, False, a function or a dict of functions by extension")
    handlers: Encoders = default_handlers if spec is True else spec
    if quality is not None:
        kept = {name: f for name, f in default_handlers.items() if f is not _OURS.get(name)}
        handlers = make_handlers(quality) | kept
    return lambda sample: encode_based_on_extension(sample, handlers)


def _extension(name: str) -> str:
    return name.removesuffix(".gz").rpartition(".")[2].lower()


def _encode_field(sample: Sample, name: str, value: Any, handlers: Encoders) -> Any:
    if not isinstance(name, str):
        return value  # the writer refuses it
    try:
        return encode_based_on_extension1(value, name, handlers)
    except Exception as exn:
        where = f"field {name!r} of sample {sample.get('__key__')!r}"
        used = handlers.get(_extension(name))
        if isinstance(exn, WdsError) or (used is not None and used is not _OURS.get(_extension(name))):
            exn.add_note(f"while encoding {where}")
            raise
        kind = "" if isinstance(exn, ValueError) else f"{type(exn).__name__}: "
        raise ValueError(f"{where} (a {type(value).__name__}): {kind}{exn}") from exn
