"""`decode_batch`: the images of a batch, decoded together on a device.

Baseline JPEGs go to nvJPEG, through torchcodec or torchvision, whichever is installed. Other images take the way of
`decode`, on the CPU, and are copied to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from wds_async import packages
from wds_async.arguments import check_device, of_type
from wds_async.errors import ConfigError, MissingExtra
from wds_async.filters.basic import NumbersState, image_options
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.stages import Traits, pipelinefilter
from wds_async.tracebacks import located

__all__ = ["decode_batch"]

DecodeJpegs = Callable[..., list[Any]]
"""``decode_jpeg`` of torchcodec or torchvision: takes tensors of bytes, ``mode`` and ``device``; returns tensors, or
raises RuntimeError for all of them if one cannot be decoded."""

_START, _END = b"\xff\xd8", b"\xff\xd9"
_SCAN, _EXIF, _ADOBE, _BASELINE = 0xDA, 0xE1, 0xEE, 0xC0
_OTHER_FRAMES = {*range(0xC1, 0xD0)} - {0xC4, 0xCC}  # 0xC4 and 0xCC are tables


def _decode_batch(
    data: Iterable[dict[str, Any]],
    field: str = "jpg",
    device: Any = "cuda",
    *,
    size: int | tuple[int, int] | None = None,
    crop: str | None = None,
    resize: int | None = None,
    scale: tuple[float, float] | None = None,
    flip: bool = False,
    handler: Handler = reraise_exception,
    state: NumbersState | None = None,
) -> Iterator[dict[str, Any]]:
    """Decode the images of each batch on ``device``: ``WebLoader(dataset.batched(64), …).decode_batch("jpg")``.

    Batches are dicts of columns, of which ``field`` is a list of bytes. It becomes a list of uint8 tensors,
    3 x height x width; with ``size`` one tensor, n x 3 x height x width. ``size``, ``crop``, ``resize``, ``scale``
    and ``flip`` are those of `decode`, with the same draws.

    Baseline JPEGs are decoded on a CUDA device by torchcodec (0.16 or newer) or torchvision. Other images, and
    those that the device refuses, are decoded by the CPU and copied. A batch with an image that cannot be decoded
    is a `DecodingError`, which names the sample, for ``handler``: where it continues, the batch is dropped.

    Tensors on a device cannot leave a worker process: put this stage behind the loader. Raises ConfigError in a
    worker, and if there is no such device; `MissingExtra` if neither library is installed.
    """
    torch = packages.optional("torch", "decode_batch", "torch")
    device = check_device("decode_batch", device)
    if device.type != "cpu" and torch.utils.data.get_worker_info() is not None:
        raise ConfigError(
            f"decode_batch(device={str(device)!r}) in a DataLoader worker: tensors on a device cannot leave it; put "
            "the stage behind the loader, as in WebLoader(dataset.batched(64), …).decode_batch()"
        )
    decode_jpegs = jpeg_library() if device.type == "cuda" else None
    options = image_options(None, size, crop, resize, scale, flip)
    cut = _crop(options) if size is not None else None
    state = state or NumbersState()
    for batch in data:
        try:
            samples = _samples(batch, field)
            images = decoded(samples, field, device, decode_jpegs)
            if cut is not None:
                images = torch.stack([_cut(cut, image, state.number() if cut.draws else 0) for image in images])
        except Exception as exn:
            if passed(handler, located(exn, "decode_batch", None), None):
                continue
            return
        yield {**batch, field: images}


def _crop(options: dict[str, Any]) -> Any:
    from wds_async.decoding.crops import Crop  # noqa: PLC0415 (it loads numpy, which pipelines without images do not)

    return Crop.of(**options)


def _check(
    field: str = "jpg",
    device: Any = "cuda",
    *,
    size: Any = None,
    crop: Any = None,
    resize: Any = None,
    scale: Any = None,
    flip: Any = False,
    handler: Any = None,
) -> None:
    """Raise ConfigError for a device that is not there, and for a crop that cannot be."""
    check_device("decode_batch", device)
    options = image_options(None, size, crop, resize, scale, flip)
    if size is not None:
        _crop(options)


def _pure(*args: Any, crop: Any = None, flip: bool = False, **kw: Any) -> bool:
    return crop != "random" and not flip


decode_batch = pipelinefilter(
    _decode_batch,
    {"field": of_type("the name of a field", str)},
    Traits(one_to_one=True, handler="handler", state=NumbersState, pure=_pure),
    _check,
)


def _samples(batch: Any, field: str) -> list[dict[str, Any]]:
    """Return what is known of each image of a batch: its bytes, and the key and URL of its sample."""
    if not isinstance(batch, dict):
        raise TypeError(
            f"decode_batch takes batches that are dicts of columns, not a {type(batch).__name__}: leave out to_tuple "
            "before batched, and put it behind decode_batch"
        )
    if field not in batch:
        raise KeyError(f"decode_batch: no field {field!r} in a batch with {', '.join(map(str, batch))}")
    names = [name for name in ("__key__", "__url__") if name in batch]
    columns = [batch[field], *(batch[name] for name in names)]
    return [dict(zip((field, *names), values, strict=True)) for values in zip(*columns, strict=True)]


def decoded(samples: Sequence[dict[str, Any]], field: str, device: Any, decode_jpegs: DecodeJpegs | None) -> list[Any]:
    """Return the images of ``samples`` as uint8 tensors, 3 x height x width, on ``device``: those that ``decode_jpegs``
    decodes there, the others decoded by the CPU. `DecodingError` for one that is no image."""
    images: list[Any] = [None] * len(samples)
    if decode_jpegs is not None:
        files = [baseline_jpeg(sample[field]) for sample in samples]
        numbers = [number for number, file in enumerate(files) if file is not None]
        on_device = functools.partial(decode_jpegs, mode="RGB", device=device)
        results = _each_possible(on_device, [_tensor(files[number]) for number in numbers]) if numbers else []
        for number, image in zip(numbers, results, strict=True):
            images[number] = image
    decode = _on_cpu(field)
    return [
        decode(sample)[field].to(device) if image is None else image
        for image, sample in zip(images, samples, strict=True)
    ]


def _on_cpu(field: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the decoder of samples whose ``field`` is an image of any format, whatever its name."""
    from wds_async.autodecode import Decoder  # noqa: PLC0415 (as where `decode` runs)
    from wds_async.decoding.images import ImageHandler  # noqa: PLC0415

    extension = field.rpartition(".")[2].lower()
    return Decoder([ImageHandler("torchrgb8", [extension])], pre=[], only=[field]).decode


def _tensor(data: Any) -> Any:
    return packages.loaded("torch").frombuffer(data, dtype=packages.loaded("torch").uint8)


def _each_possible(decode: Callable[[list[Any]], list[Any]], files: list[Any]) -> list[Any]:
    """Return the images of ``files``; None in the place of those that ``decode`` refuses: it gives no partial result,
    so they are tried one by one."""
    try:
        return list(decode(files))
    except packages.loaded("torch").OutOfMemoryError:
        raise
    except RuntimeError:
        if len(files) == 1:
            return [None]
    return [image for file in files for image in _each_possible(decode, [file])]


def baseline_jpeg(data: bytes) -> bytearray | None:
    """Return a JPEG that every nvJPEG decodes as Pillow does, without its EXIF data: torchcodec turns images as that
    tells, and `decode` does not. None for anything else: progressive, CMYK, RGB, broken, or too large for Pillow."""
    if data[:2] != _START or data[-2:] != _END:
        return None
    kept, start, is_baseline = bytearray(_START), 2, False
    while data[start : start + 1] == b"\xff":
        marker, end = data[start + 1], start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if marker == _SCAN:
            return kept + data[start:] if is_baseline else None
        if marker == _BASELINE:
            is_baseline = _is_supported(data[start + 4 : end])
        elif marker in _OTHER_FRAMES or (marker == _ADOBE and data[start + 15 : start + 16] != b"\1"):  # not YCbCr
            return None
        if marker != _EXIF:
            kept += data[start:end]
        start = end
    return None


def _is_supported(frame: bytes) -> bool:
    """Return whether a frame has 8 bits, one or three components (YCbCr), and no more pixels than Pillow reads."""
    import PIL.Image  # noqa: PLC0415 (an extra)

    if len(frame) < 6:
        return False
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    small = PIL.Image.MAX_IMAGE_PIXELS is None or height * width <= PIL.Image.MAX_IMAGE_PIXELS
    return frame[0] == 8 and frame[5] in (1, 3) and frame[6::3] != b"RGB" and height * width > 0 and small


@functools.cache
def jpeg_library() -> DecodeJpegs:
    """Return ``decode_jpeg`` of torchcodec, or else of torchvision, whose own is deprecated. `MissingExtra` if neither
    has it."""
    from wds_async.decoding.media import package  # noqa: PLC0415 (it loads numpy)

    for name in ("torchcodec.decoders", "torchvision.io"):
        decode: DecodeJpegs | None = getattr(package(name), "decode_jpeg", None)
        if decode is not None:
            return decode
    raise MissingExtra('decode_batch(device="cuda") needs torchcodec 0.16 or newer: pip install torchcodec')


def _cut(crop: Any, image: Any, number: int) -> Any:
    from wds_async.decoding.crops import Cut  # noqa: PLC0415 (loaded by then)

    return Cut(crop, number).tensor(image)
