"""Values become the bytes that webdataset makes of them, and that decoders read."""

from __future__ import annotations

import gzip
import io
import json
import sys
from typing import Any

import numpy as np
import PIL.Image
import pytest

from wds_async import writer
from wds_async.errors import ConfigError, MissingExtra
from wds_async.writer import imageencoder, make_encoder

GRAY = (np.arange(64).reshape(8, 8) * 4).astype(np.uint8)
COLOR = np.stack([GRAY, GRAY.T, 255 - GRAY], axis=2)


VALUES: list[tuple[str, Any]] = [
    ("html", "<p>"),
    ("JSON", {"b": 2}),
    ("tb", np.arange(3.0)),
    ("seg.JPG", COLOR),
    *((name, COLOR.astype(np.float32) / 255) for name in ("jpg", "png", "ppm", "tiff")),
    *((name, GRAY.astype(np.uint16) * 200) for name in ("png", "tiff", "ppm")),
    *((name, GRAY > 100) for name in ("png", "jpg", "tiff")),
    ("tiff", PIL.Image.fromarray(COLOR)),
    ("tiff", GRAY.astype(np.int32) * 70000),
    ("pth", {"a": [1, 2], "b": "text"}),
    ("npz", {}),
    ("png", GRAY),
]
"""Beside those of `tests.contract.test_writing`, which compares whole archives."""


@pytest.mark.parametrize(("name", "value"), VALUES, ids=lambda v: v if isinstance(v, str) else "")
def test_encodes_as_webdataset_does(name: str, value: Any) -> None:
    from webdataset.writer import make_encoder as theirs

    sample = {"__key__": "k", name: value}
    assert make_encoder(True)(sample)[name] == theirs(True)(sample)[name]


@pytest.mark.parametrize("format", ["PNG", "png", "jpg", "JPG", "JPEG", "jpeg", "tiff", "TIFF", "ppm", "img", "image"])
def test_the_spelling_of_a_format_means_what_it_means_to_webdataset(format: str) -> None:
    from webdataset.writer import imageencoder as theirs

    noise = np.random.default_rng(1).integers(0, 255, (16, 16, 3), np.uint8)
    assert imageencoder(noise, format) == theirs(noise, format)


def test_webp_and_quality() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (32, 32, 3), np.uint8)
    best = make_encoder(True)({"webp": noise, "jpg": noise, "png": noise})
    assert PIL.Image.open(io.BytesIO(best["webp"])).format == "WEBP"
    poor = make_encoder(True, quality=20)({"webp": noise, "jpg": noise, "png": noise, "npy": GRAY})
    assert len(poor["webp"]) < len(best["webp"]) / 2
    assert len(poor["jpg"]) < len(best["jpg"]) / 2
    assert poor["png"] == best["png"]
    for bad in (0, 101, True, "high"):
        with pytest.raises(ConfigError, match="quality="):
            make_encoder(True, quality=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="encoder=True"):
        make_encoder({"jpg": str}, quality=50)


def test_quality_leaves_the_programs_own_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(writer.default_handlers, "jpg", lambda x: b"mine")
    encoded = make_encoder(True, quality=20)({"jpg": GRAY, "jpeg": GRAY})
    assert encoded["jpg"] == b"mine"
    assert encoded["jpeg"] == imageencoder(GRAY, "jpg", 20)


@pytest.mark.parametrize(
    ("package", "field", "extra"),
    [("cbor2", "cbor", "formats"), ("msgpack", "mp", "formats"), ("PIL", "png", "images"), ("torch", "pth", "torch")],
)
def test_a_missing_package_names_its_extra(
    package: str, field: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.Image", None)
    with pytest.raises(MissingExtra, match=rf'pip install "wds-async\[{extra}\]"'):
        make_encoder(True)({field: {"a": 1} if field != "png" else GRAY})


def test_cbor() -> None:
    import cbor2

    assert cbor2.loads(make_encoder(True)({"cbor": {"a": 1}})["cbor"]) == {"a": 1}


def test_gz_fields_are_compressed_without_a_clock() -> None:
    encode = make_encoder(True)
    encoded = encode({"txt.gz": "text", "json.gz": {"a": 1}, "bin.gz": b"raw"})
    assert gzip.decompress(encoded["txt.gz"]) == b"text"
    assert json.loads(gzip.decompress(encoded["json.gz"])) == {"a": 1}
    assert gzip.decompress(encoded["bin.gz"]) == b"raw"
    assert encoded["txt.gz"][4:8] == b"\0" * 4  # the time field of RFC 1952


@pytest.mark.parametrize(
    ("format", "array", "mode"),
    [
        ("PBM", GRAY, "1"),
        ("PGM", COLOR, "L"),
        ("png", COLOR[:, :, :1], "L"),
        ("png", COLOR[:, :, [0, 1, 2, 0]], "RGBA"),
    ],
)
def test_image_formats_and_shapes(format: str, array: Any, mode: str) -> None:
    image = PIL.Image.open(io.BytesIO(imageencoder(array, format)))
    assert image.mode == mode
    assert image.size == (8, 8)
    if format == "png" and mode == "L":
        np.testing.assert_array_equal(np.asarray(image), GRAY)


@pytest.mark.parametrize(
    "bad",
    [
        COLOR * 1.0,
        np.full((2, 2), np.nan),
        GRAY.astype(np.int32),
        COLOR.astype(np.uint16),
        np.zeros((2, 2, 5), np.uint8),
        np.zeros((0, 2), np.uint8),
        GRAY[0],
        [1],
    ],
)
def test_what_is_no_image_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="image"):
        imageencoder(bad)


def test_objects_do_not_slip_into_npy() -> None:
    with pytest.raises(ValueError):
        writer.numpy_dumps(np.array([object()]))
    with pytest.raises(ValueError, match="npz"):
        writer.numpy_npz_dumps([1])  # type: ignore[arg-type]


def test_an_unknown_extension_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"'x\.weird'.*'weird' and a int"):
        make_encoder(True)({"__key__": "k", "x.weird": 1})


def test_the_users_own_encoders() -> None:
    assert make_encoder({"up": str.upper})({"__key__": "k", "up": ["x"][0]})["up"] == b"x"  # str stays as it is
    assert make_encoder({"n": lambda n: b"%d" % n})({"__key__": "k", "n": 5, "txt": b"t"}) == {
        "__key__": "k",
        "n": b"5",
        "txt": b"t",
    }
    assert make_encoder(lambda sample: {**sample, "x": b"1"})({"__key__": "k"}) == {"__key__": "k", "x": b"1"}
    for nothing in (False, None):
        assert make_encoder(nothing)({"n": 5}) == {"n": 5}
    with pytest.raises(ConfigError, match="encoder="):
        make_encoder("json")


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("txt", 5, "AttributeError"),
        ("json", {1, 2}, "TypeError"),
        ("jpg", COLOR * 2.0, "float image"),
        ("weird", 1, "no enc"),
    ],
)
def test_a_value_that_does_not_encode_names_the_sample_and_the_field(field: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"'{field}' of sample 'a/7'.*{why}"):
        make_encoder(True)({"__key__": "a/7", field: value})


def test_what_the_programs_encoder_raises_keeps_its_type() -> None:
    def broken(value: object) -> bytes:
        raise OSError("no scanner")

    encode = make_encoder({"jpg": broken})
    with pytest.raises(OSError, match="scanner") as caught:
        encode({"__key__": "a/7", "jpg": object()})
    assert caught.value.__notes__ == ["while encoding field 'jpg' of sample 'a/7'"]
