"""wds_async.decoding.images: every specification gives what webdataset and Pillow give."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import PIL.features
import PIL.Image
import pytest
import torch
import webdataset.autodecode as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_async.decoding import images
from wds_async.decoding.images import IMAGE_EXTENSIONS, ImageHandler, imagehandler, imagespecs
from wds_async.errors import ConfigError
from wds_async.filters import decode

SPECS = "l8 rgb8 rgba8 l rgb rgba torchl8 torchrgb8 torchrgba8 torchl torch torchrgb torchrgba pill pil pilrgb pilrgba"


def _pixels(*shape: int, high: int = 256, dtype: Any = np.uint8) -> Any:
    return np.random.default_rng(0).integers(0, high, shape).astype(dtype)


def _encoded(image: PIL.Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def _samples() -> dict[str, bytes]:
    colour = PIL.Image.fromarray(_pixels(17, 23, 3))
    grey = PIL.Image.fromarray(_pixels(17, 23))
    return {
        "rgb.jpg": _encoded(colour, "JPEG", quality=90),
        "444.jpg": _encoded(colour, "JPEG", quality=70, subsampling=0),
        "422.jpg": _encoded(colour, "JPEG", quality=70, subsampling=1),
        "progressive.jpg": _encoded(colour, "JPEG", progressive=True),
        "grey.jpg": _encoded(grey, "JPEG"),
        "cmyk.jpg": _encoded(colour.convert("CMYK"), "JPEG"),
        "one.jpg": _encoded(PIL.Image.fromarray(_pixels(1, 1, 3)), "JPEG"),
        "rgb.png": _encoded(colour, "PNG"),
        "grey.png": _encoded(grey, "PNG"),
        "rgba.png": _encoded(PIL.Image.fromarray(_pixels(9, 8, 4)), "PNG"),
        "la.png": _encoded(PIL.Image.fromarray(_pixels(9, 8, 4)).convert("LA"), "PNG"),
        "palette.png": _encoded(colour.convert("P"), "PNG"),
        "palette.gif": _encoded(colour.convert("P"), "GIF", transparency=3),
        "bits.png": _encoded(grey.convert("1"), "PNG"),
        "deep.png": _encoded(PIL.Image.fromarray(_pixels(9, 8, high=65536, dtype=np.uint16)), "PNG"),
        "colour.ppm": _encoded(colour, "PPM"),
        "colour.bmp": _encoded(colour, "BMP"),
        "lossy.webp": _encoded(colour, "WEBP"),
        "exact.webp": _encoded(PIL.Image.fromarray(_pixels(9, 8, 4)), "WEBP", lossless=True),
    }


SAMPLES = _samples()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("spec", SPECS.split())
def test_same_as_webdataset(spec: str, name: str) -> None:
    ours, theirs = (
        imagehandler(spec)(f".{name}", SAMPLES[name]),
        reference.imagehandler(spec)(f".{name}", SAMPLES[name]),
    )
    if isinstance(theirs, PIL.Image.Image):
        assert type(ours) is type(theirs)
        assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())
    elif isinstance(theirs, torch.Tensor):
        assert type(ours) is torch.Tensor
        assert ours.is_contiguous()
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert type(ours) is np.ndarray
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, strict=True)


def test_every_byte_scales_as_webdataset_scales_it() -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    data = _encoded(PIL.Image.fromarray(ramp), "PNG")
    np.testing.assert_array_equal(imagehandler("l")(".png", data), ramp.astype(np.float32) / 255.0, strict=True)


def test_tensors_can_be_written_to() -> None:
    for spec in ("torchl8", "torchrgb8", "torchrgb"):
        for name in ("rgb.jpg", "rgb.png", "grey.png"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                imagehandler(spec)(f".{name}", SAMPLES[name]).add_(1)


def test_tensors_do_not_follow_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert imagehandler("torchrgb")(".png", SAMPLES["rgb.png"]).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_extensions_are_webdatasets_but_for_names_that_are_seldom_images() -> None:
    others = ["h5", "hdf", "mpg", "mpeg", "ps", "eps", "rgb", "rgba"]
    assert sorted([*IMAGE_EXTENSIONS, *others]) == sorted(reference.IMAGE_EXTENSIONS)
    assert len(IMAGE_EXTENSIONS) == len(set(IMAGE_EXTENSIONS)) == 55
    for field in others:
        assert imagehandler("rgb8")(f".{field}", SAMPLES["rgb.png"]) is None
        assert imagehandler("rgb8", [field])(f".{field}", SAMPLES["rgb.png"]).shape == (17, 23, 3)


def test_avif_where_pillow_has_it_and_it_is_asked_for() -> None:
    if not PIL.features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    data = _encoded(PIL.Image.fromarray(_pixels(17, 23, 3)), "AVIF")
    assert imagehandler("rgb8")(".avif", data) is None  # not one of WebDataset's extensions
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(imagehandler("rgb8", [*IMAGE_EXTENSIONS, "avif"])(".avif", data), expected)


def test_the_table_of_specifications_is_webdatasets() -> None:
    assert imagespecs == reference.imagespecs
    assert set(imagespecs) == set(SPECS.split())


def test_only_its_extensions() -> None:
    handler = imagehandler("rgb8")
    assert handler(".txt", SAMPLES["rgb.png"]) is None
    assert handler(".seg.PNG", SAMPLES["rgb.png"]).shape == (17, 23, 3)
    assert imagehandler("rgb8", ["x"])(".png", SAMPLES["rgb.png"]) is None
    assert imagehandler("rgb8", extensions=["x"])(".x", SAMPLES["rgb.png"]).shape == (17, 23, 3)


@pytest.mark.parametrize(
    ("spec", "suggestion"),
    [("rgbtorch", "torchrgb"), ("torchrbg", "torchrgb"), ("RGB8", "rgb8"), ("pilgrb", "pilrgb")],
)
def test_an_unknown_specification(spec: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match=rf"Unknown imagespec: {spec} \(did you mean {suggestion}\?"):
        ImageHandler(spec)
    with pytest.raises(ValueError, match=r"Unknown imagespec: zzz \(known are .*torchrgb"):
        ImageHandler("zzz")


@pytest.mark.parametrize("spec", ["rgb8", "torchrgb", "pil"])
def test_damaged_images_fail_as_with_pillow(spec: str) -> None:
    handler = imagehandler(spec)
    with pytest.raises(PIL.UnidentifiedImageError):
        handler(".jpg", b"\xff\xd8 not an image")
    with pytest.raises(OSError, match="truncated"):
        handler(".jpg", SAMPLES["rgb.jpg"][:-200])


def test_huge_jpegs_are_refused_as_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 17 * 23 - 1)
    with pytest.warns(PIL.Image.DecompressionBombWarning):
        imagehandler("rgb8")(".jpg", SAMPLES["rgb.jpg"])


def test_the_fast_way_is_taken_and_left() -> None:
    pytest.importorskip("simplejpeg")
    assert images._agrees()
    assert images._fast(SAMPLES["rgb.jpg"], "RGB") is not None
    for name in ("grey.jpg", "cmyk.jpg", "rgb.png"):
        assert images._fast(SAMPLES[name], "RGB") is None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 100), st.sampled_from([0, 1, 2]), st.booleans())
def test_jpegs_of_any_size_equal_pillows(height: int, width: int, quality: int, chroma: int, rising: bool) -> None:
    image = PIL.Image.fromarray(_pixels(height, width, 3))
    data = _encoded(image, "JPEG", quality=quality, subsampling=chroma, progressive=rising)
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(imagehandler("rgb8")(".jpg", data), expected, strict=True)
    planes = imagehandler("torchrgb8")(".jpg", data).numpy()
    np.testing.assert_array_equal(planes, expected.transpose(2, 0, 1))


# ---------------------------------------------------------------- reduced scale


def _shape(height: int, width: int, min_size: int) -> tuple[int, int]:
    """The rule of the docstring, written as a search."""
    shapes = [(-(-height // n), -(-width // n)) for n in (8, 4, 2, 1)]
    return next((shape for shape in shapes if min(shape) >= min_size), (height, width))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 60), st.sampled_from(["JPEG", "PNG", "WEBP"]))
def test_reduced_shapes_follow_the_rule_for_every_format(height: int, width: int, min_size: int, form: str) -> None:
    data = _encoded(PIL.Image.fromarray(_pixels(height, width, 3)), form)
    expected = _shape(height, width, min_size)
    field = f".{form.lower()}"
    assert imagehandler("rgb8", min_size=min_size)(field, data).shape == (*expected, 3)
    assert imagehandler("torchrgb", min_size=min_size)(field, data).shape == (3, *expected)
    assert imagehandler("l", min_size=min_size)(field, data).shape == expected
    assert imagehandler("pil", min_size=min_size)(field, data).size == expected[::-1]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_size_that_needs_no_reduction_changes_nothing(name: str) -> None:
    full = imagehandler("rgba8")(f".{name}", SAMPLES[name])
    np.testing.assert_array_equal(imagehandler("rgba8", min_size=20)(f".{name}", SAMPLES[name]), full)


@pytest.mark.parametrize("chroma", [0, 1, 2])
@pytest.mark.parametrize("size", [100, 50, 25])
def test_reduced_jpegs_are_the_same_with_and_without_simplejpeg(
    size: int, chroma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _encoded(PIL.Image.fromarray(_pixels(201, 203, 3)), "JPEG", subsampling=chroma)
    handlers = [imagehandler(spec, min_size=size) for spec in ("rgb8", "torchrgb8", "torchrgb", "l8", "rgba8", "pil")]
    fast = [np.asarray(handler(".jpg", data)) for handler in handlers]
    monkeypatch.setattr(images, "_fast", lambda *args: None)
    for handler, pixels in zip(handlers, fast, strict=True):
        np.testing.assert_array_equal(np.asarray(handler(".jpg", data)), pixels)


def test_reduced_images_look_like_the_full_ones() -> None:
    y, x = np.mgrid[:256, :256]
    smooth = np.stack([x, y, 255 - x], -1).astype(np.uint8)
    for form in ("JPEG", "PNG"):
        data = _encoded(PIL.Image.fromarray(smooth), form)
        small = imagehandler("rgb8", min_size=64)(f".{form.lower()}", data).astype(float)
        means = smooth.reshape(64, 4, 64, 4, 3).mean((1, 3))
        assert np.abs(small - means).max() < 12
        assert np.abs(small - means).mean() < 2


def test_min_size_is_a_number_of_pixels() -> None:
    with pytest.raises(ConfigError, match="min_size=0"):
        imagehandler("rgb8", min_size=0)
    (sample,) = decode("rgb8", min_size=8)([{"__key__": "k", "jpg": SAMPLES["rgb.jpg"], "cls": b"1"}])
    assert sample["jpg"].shape == (9, 12, 3)


def test_scratch_memory_is_each_threads_own_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [_encoded(PIL.Image.fromarray(np.full((64, 64, 3), n, np.uint8)), "JPEG") for n in range(0, 200, 5)]
    expected = [imagehandler("rgb8")(".jpg", d).transpose(2, 0, 1) for d in data]
    stage = decode("torchrgb8", threads=4)
    found = [sample["jpg"].numpy() for sample in stage([{"__key__": "k", "jpg": d} for d in data])]
    np.testing.assert_array_equal(found, expected)
    monkeypatch.setattr(images, "_SCRATCH_BYTES", 0)
    np.testing.assert_array_equal(imagehandler("torchrgb8")(".jpg", data[3]).numpy(), expected[3])


def test_handlers_pickle() -> None:
    handler = pickle.loads(pickle.dumps(imagehandler("l8")))
    assert handler(".png", SAMPLES["grey.png"]).shape == (17, 23)


@pytest.mark.parametrize(
    ("absent", "spec", "extra"), [("PIL", "rgb8", "wds-async[images]"), ("torch", "torchrgb", "wds-async[torch]")]
)
def test_a_missing_package_is_named_with_its_extra(absent: str, spec: str, extra: str) -> None:
    script = f"""
import sys
sys.modules[{absent!r}] = None
from wds_async.errors import MissingExtra
from wds_async.decoding.images import imagehandler
try:
    imagehandler({spec!r})(".jpg", bytes(8))
except MissingExtra as exn:
    print(exn)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert f'pip install "{extra}"' in done.stdout
