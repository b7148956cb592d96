"""wds_async.decoding.crops: which part of an image is taken, and what comes of it beside Pillow's own resizing."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL.Image import Resampling

from wds_async import filters
from wds_async.decoding import crops
from wds_async.decoding.crops import Crop, Cut
from wds_async.decoding.images import ImageHandler, imagehandler
from wds_async.errors import ConfigError, DecodingError

RANDOM, CENTER = Crop.of(32, "random"), Crop.of(32, "center", 40)


def photograph(height: int, width: int) -> PIL.Image.Image:
    """Return smooth areas with a little grain."""
    rng = np.random.default_rng(height)
    patches = PIL.Image.fromarray(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    smooth = np.asarray(patches.resize((width, height), Resampling.BICUBIC)).astype(float)
    return PIL.Image.fromarray(np.clip(smooth + rng.normal(0, 3, smooth.shape), 0, 255).astype(np.uint8))


def encoded(image: PIL.Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def difference(a: Any, b: Any) -> Any:
    return np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int))


def window_of(crop: Crop, height: int, width: int, number: int) -> tuple[int, int, int, int]:
    return crop.view(height, width, random.Random(number)).window


# ---------------------------------------------------------------- the window


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 1 << 32), st.sampled_from([0.08, 0.9]))
def test_a_window_lies_in_the_image(height: int, width: int, number: int, low: float) -> None:
    crop = Crop.of((3, 5), "random", scale=(low, 1))
    left, top, right, bottom = window_of(crop, height, width, number)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(height, width) > 200 and max(height, width) < 1.3 * min(height, width):  # else the middle may be taken
        assert 0.97 * low <= (right - left) * (bottom - top) / (height * width)
        assert 0.74 < (right - left) / (bottom - top) < 1.35


def test_windows_are_spread_evenly() -> None:
    windows = np.array([window_of(RANDOM, 1000, 1000, number) for number in range(3000)])
    left, top, right, bottom = windows.T
    shares = np.sort((right - left) * (bottom - top) / 1e6)
    # Of large areas fewer shapes fit into a square: those are drawn again, as torchvision does it.
    assert abs(np.median(shares) - 0.49) < 0.04
    assert abs(np.mean(left + right) - 1000) < 20
    assert abs(np.mean(top + bottom) - 1000) < 20
    assert abs(np.mean(np.log((right - left) / (bottom - top)))) < 0.02


def test_a_very_long_image_gives_its_middle() -> None:
    assert window_of(Crop.of(8, "random", scale=(1, 1)), 100, 3000, 0) == (1433, 0, 1566, 100)
    assert window_of(Crop.of(8, "random", scale=(1, 1)), 3000, 100, 0) == (0, 1433, 100, 1566)


# ---------------------------------------------------------------- the pixels


@pytest.mark.parametrize("number", range(8))
def test_a_random_crop_is_pillows_resized_window(number: int) -> None:
    image = photograph(60, 70)
    data = encoded(image, quality=95)
    full = PIL.Image.open(io.BytesIO(data))
    expected = full.crop(window_of(RANDOM, 60, 70, number)).resize((32, 32), Resampling.BILINEAR)
    assert difference(ImageHandler("rgb8", crop=RANDOM)(".jpg", data, number), expected).max() <= 1


def test_a_central_crop_is_pillows() -> None:
    data = encoded(photograph(60, 70), quality=95)
    resized = PIL.Image.open(io.BytesIO(data)).resize((46, 40), Resampling.BILINEAR)
    assert difference(ImageHandler("rgb8", crop=CENTER)(".jpg", data), resized.crop((7, 4, 39, 36))).max() <= 1
    wide = PIL.Image.open(io.BytesIO(data)).resize((64, 54), Resampling.BILINEAR).crop((0, 17, 64, 37))
    assert difference(imagehandler("rgb8", size=(20, 64), crop="center")(".jpg", data), wide).max() <= 1


@pytest.mark.parametrize(("side", "divisor"), [(70, 2), (150, 4), (310, 8)])
@pytest.mark.parametrize("progressive", [False, True])
def test_large_jpegs_are_decoded_at_a_smaller_scale(side: int, divisor: int, progressive: bool) -> None:
    data = encoded(photograph(side, side + 9), quality=90, progressive=progressive)
    crop = Crop.of(32, "random", scale=(1, 1))
    cut = Cut(crop, 5)
    assert cut.divisor(side, side + 9) == divisor
    window = window_of(crop, side, side + 9, 5)
    expected = PIL.Image.open(io.BytesIO(data)).crop(window).resize((32, 32), Resampling.BILINEAR)
    result = ImageHandler("rgb8", crop=crop)(".jpg", data, 5)
    assert difference(result, expected).mean() < 3
    assert difference(result, ImageHandler("pil", crop=crop)(".jpg", data, 5)).max() <= 1


@pytest.mark.parametrize("shape", [(50, 40), (20, 64), (200, 31), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_torchs_and_pillows_resizing_differ_by_1_at_most(shape: tuple[int, int], channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, channels), dtype=np.uint8)
    by_torch, by_pillow = crops._by_torch(pixels, 30, 33), crops._by_pillow(pixels, 30, 33)
    assert by_torch.shape == by_pillow.shape == (30, 33, channels)
    assert difference(by_torch, by_pillow).max() <= 1


ODD = {
    "grey.jpg": encoded(photograph(50, 40).convert("L")),
    "cmyk.jpg": encoded(photograph(50, 40).convert("CMYK")),
    "tiny.jpg": encoded(photograph(3, 2)),
    "one.png": encoded(photograph(1, 1), "PNG"),
    "long.jpg": encoded(photograph(4, 900)),
    "rgba.png": encoded(photograph(50, 40).convert("RGBA"), "PNG"),
    "palette.gif": encoded(photograph(50, 40).convert("P"), "GIF"),
    "large.webp": encoded(photograph(300, 200), "WEBP"),
}
SHAPES = {"rgb8": (32, 32, 3), "l": (32, 32), "torchrgb": (3, 32, 32), "torchrgba8": (4, 32, 32), "torchl": (32, 32)}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("crop", [RANDOM, CENTER, Crop.of(32, "random", flip=True)])
def test_any_image_gets_the_size(name: str, crop: Crop) -> None:
    for spec, shape in SHAPES.items():
        image = ImageHandler(spec, crop=crop)(f".{name}", ODD[name], 3)
        assert tuple(image.shape) == shape, spec
        assert tuple(ImageHandler("pil", crop=crop)(f".{name}", ODD[name], 3).size) == (32, 32)


def test_all_forms_have_the_same_pixels() -> None:
    data = encoded(photograph(60, 70))
    made = {spec: ImageHandler(spec, crop=RANDOM)(".jpg", data, 7) for spec in ("rgb8", "rgb", "torchrgb", "torchrgb8")}
    np.testing.assert_array_equal(made["rgb8"] / np.float32(255), made["rgb"])
    np.testing.assert_array_equal(made["rgb8"].transpose(2, 0, 1), made["torchrgb8"].numpy())
    np.testing.assert_array_equal(made["rgb"].transpose(2, 0, 1), made["torchrgb"].numpy())


def test_exif_does_not_turn_the_image() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    image = photograph(60, 70)
    turned = ImageHandler("rgb8", crop=CENTER)(".jpg", encoded(image, exif=exif.tobytes()))
    np.testing.assert_array_equal(turned, ImageHandler("rgb8", crop=CENTER)(".jpg", encoded(image)))


def test_half_of_the_images_are_mirrored() -> None:
    data = encoded(photograph(60, 70), "PNG")
    plain, mirrored = (
        ImageHandler("rgb8", crop=CENTER),
        ImageHandler("rgb8", crop=Crop.of(32, "center", 40, None, True)),
    )
    kept = [np.array_equal(plain(".png", data), mirrored(".png", data, number)) for number in range(200)]
    assert 70 < sum(kept) < 130
    jpeg = encoded(photograph(60, 70))
    turned = mirrored(".jpg", jpeg, kept.index(False))
    np.testing.assert_array_equal(turned, plain(".jpg", jpeg)[:, ::-1])


# ---------------------------------------------------------------- in a pipeline


def samples(count: int = 12) -> Iterator[dict[str, Any]]:
    data = encoded(photograph(64, 70))
    for number in range(count):
        yield {"__key__": str(number), "__url__": "u.tar", "jpg": data}


def crops_of(seed: int, **options: Any) -> list[Any]:
    random.seed(seed)
    options = {"size": 16, "crop": "random", "flip": True, **options}
    return [sample["jpg"] for sample in filters.decode("rgb8", **options)(samples())]


def test_draws_follow_from_the_global_seed_and_from_nothing_else() -> None:
    first = crops_of(1)
    assert len({image.tobytes() for image in first}) == 12
    for again in (crops_of(1), crops_of(1, threads=1), crops_of(1, threads=3)):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], crops_of(2)[0])


def test_a_mask_is_cut_like_its_photograph() -> None:
    image = photograph(512, 640)
    sample = {"__key__": "a", "jpg": encoded(image, quality=100, subsampling=0), "seg.png": encoded(image, "PNG")}
    for made in filters.decode("rgb8", size=64, crop="random", flip=True)([sample] * 10):
        assert difference(made["jpg"], made["seg.png"]).mean() < 2


@pytest.mark.parametrize("threads", [0, 2])
def test_a_truncated_jpeg_names_its_sample(threads: int) -> None:
    cut = [{"__key__": "000007", "__url__": "u.tar", "jpg": encoded(photograph(64, 70))[:-300]}]
    with pytest.raises(DecodingError, match=r"u\.tar: field 'jpg'.*000007.*truncated"):
        list(filters.decode("rgb8", size=16, crop="random", threads=threads)(cut))


def test_a_stage_with_a_crop_pickles() -> None:
    stage = filters.decode("rgb8", size=(16, 20), crop="center", resize=24)
    assert next(pickle.loads(pickle.dumps(stage))(samples()))["jpg"].shape == (16, 20, 3)
    handler = pickle.loads(pickle.dumps(imagehandler("torchrgb8", size=16, crop="random")))
    assert handler(".jpg", next(samples())["jpg"]).shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 224}, 'crop must be "random" or "center"'),
        ({"size": 224, "crop": "middle"}, 'crop must be "random" or "center"'),
        ({"size": 0, "crop": "center"}, "size=0"),
        ({"size": (1, 2, 3), "crop": "center"}, "two numbers"),
        ({"crop": "random"}, "crop='random' needs size="),
        ({"flip": True}, "flip=True needs size="),
        ({"size": 224, "crop": "center", "resize": 200}, "resize=200"),
        ({"size": 224, "crop": "random", "resize": 256}, "resize=256 is for"),
        ({"size": 224, "crop": "center", "scale": (0.5, 1)}, "scale is for"),
        ({"size": 224, "crop": "random", "scale": (0, 1)}, "above 0"),
        ({"size": 224, "crop": "random", "scale": 0.5}, "pair"),
        ({"size": 224, "crop": "random", "min_size": 256}, "give one of them"),
    ],
)
def test_arguments_that_cannot_be_are_errors_at_once(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filters.decode("rgb8", **options)


def test_a_crop_without_images_is_an_error() -> None:
    with pytest.raises(ConfigError, match="name what they become"):
        filters.decode(size=224, crop="random")
