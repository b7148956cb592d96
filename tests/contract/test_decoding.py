"""Side by side with webdataset 1.0.2: every extension, every image specification, handlers and the errors."""

from __future__ import annotations

import fractions
import gzip
import io
import json
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wds_async as ours
from tests.contract.common import agree, outcome, same

theirs = pytest.importorskip("webdataset")
torch = pytest.importorskip("torch")

BOTH = (theirs, ours)


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def pth(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def packed(name: str, value: Any) -> bytes:
    module = pytest.importorskip(name)
    data: bytes = (module.packb if name == "msgpack" else module.dumps)(value)
    return data


def each(fields: tuple[str, ...], data: list[bytes]) -> dict[str, list[bytes]]:
    return {field: list(data) for field in fields}


NESTED = {"a": [1, 2.5, None, True], "b": {"c": "ü"}}
ARRAY = np.arange(12, dtype="f4").reshape(3, 4)
FIELDS: dict[str, list[bytes]] = {
    **each(("txt", "text", "transcript"), [b"hello", "ü\n".encode(), b"", b"\xff"]),
    **each(("cls", "cls2", "index", "inx", "id"), [b"7", b" -3\n", b"x", b"", b"1_000"]),
    **each(("json", "jsn"), [json.dumps(NESTED).encode(), b"[]", b"{", b"NaN"]),
    **each(("pkl", "pickle", "pyd"), [pickle.dumps(NESTED), pickle.dumps(ARRAY), pickle.dumps((1, {2})), b"x"]),
    "pth": [pth(NESTED), pth(torch.arange(5)), b"x"],
    "npy": [npy(ARRAY), npy(np.array(7)), npy(np.array(["a", "b"])), npy(np.array([None], dtype=object)), b"x"],
    "npz": [npz(a=ARRAY, b=np.arange(3)), b"x"],
    "unknown": [b"x", b""],
    "count": [b"5"],
    "html": [b"<p>"],
    "TXT": [b"hello"],
    "seg.json": [b"{}"],
    "json.txt": [b"{}"],
    "txt.gz": [gzip.compress(b"hello"), b"x", gzip.compress(b"a") + gzip.compress(b"b")],
    "json.gz": [gzip.compress(b"[1]")],
    "gz": [gzip.compress(b"raw")],
    "seg.cls.gz": [gzip.compress(b"3")],
    "__meta": [b"text", b"\xff"],
}


def decoded(wds: Any, sample: Any, *arguments: Any, **kw: Any) -> Any:
    def make() -> Any:
        return wds.DataPipeline(
            lambda: iter([{"__key__": "k", "__url__": "u", **sample}]), wds.decode(*arguments, **kw)
        )

    return outcome(make)


@pytest.mark.parametrize("field", FIELDS)
def test_extensions(field: str) -> None:
    for data in FIELDS[field]:
        runs = [decoded(w, {field: data}) for w in BOTH]
        if runs[0][1] is None and "nan" in str(runs[0][0]):
            assert str(runs[0]) == str(runs[1])
            continue
        agree(*runs)


@pytest.mark.parametrize(("field", "package"), [("mp", "msgpack"), ("msg", "msgpack"), ("cbor", "cbor2")])
def test_packed(field: str, package: str) -> None:
    data = packed(package, {**NESTED, "raw": b"\0\1"})
    [sample], error = decoded(ours, {field: data})
    assert error is None
    assert sample[field] == {**NESTED, "raw": b"\0\1"}
    if package == "msgpack":
        agree(decoded(theirs, {field: data}), decoded(ours, {field: data}))


@pytest.mark.parametrize("field", ["ten", "tb"])
def test_tensors(field: str) -> None:
    data = theirs.tenbin.encode_buffer([ARRAY, np.arange(4), np.zeros((0, 3), "u1")])
    agree(*[decoded(w, {field: bytes(data)}) for w in BOTH])


def image(mode: str, form: str, size: tuple[int, int] = (21, 13)) -> bytes:
    rng = np.random.default_rng(3)
    depth = {"L": 1, "RGB": 3, "RGBA": 4, "P": 1, "1": 1, "LA": 2, "I;16": 1, "CMYK": 4}[mode]
    pixels = rng.integers(0, 255, (size[1], size[0], depth), dtype="u1")
    stream = io.BytesIO()
    if mode in ("P", "1"):
        made = Image.fromarray(pixels[:, :, 0], "L").convert(mode)
    elif mode == "I;16":
        made = Image.fromarray(pixels[:, :, 0].astype("u2") * 200)
    else:
        made = Image.fromarray(pixels[:, :, 0] if depth == 1 else pixels, mode)
    made.save(stream, form)
    return stream.getvalue()


IMAGES = {
    "png": [("L", "PNG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG"), ("LA", "PNG"), ("I;16", "PNG")],
    "bmp": [("RGB", "BMP"), ("L", "BMP")],
    "gif": [("P", "GIF")],
    "ppm": [("RGB", "PPM")],
    "tiff": [("RGB", "TIFF"), ("CMYK", "TIFF")],
    "webp": [("RGB", "WEBP")],
}
SPECS = sorted(theirs.autodecode.imagespecs)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated", "ignore:.*Palette images.*")
@pytest.mark.parametrize("spec", SPECS)
def test_images(spec: str) -> None:
    for extension, kinds in IMAGES.items():
        for mode, form in kinds:
            data = image(mode, form)
            sample = {extension: data, f"seg.{extension.upper()}": data}
            runs = [decoded(theirs, sample, theirs.imagehandler(spec)), decoded(ours, sample, spec)]
            if spec.startswith("pil"):
                for run in runs:
                    [sample] = run[0]
                    for field, value in sample.items():
                        if field[:2] != "__":
                            assert isinstance(value, Image.Image)
                            sample[field] = (value.mode, value.size, value.tobytes())
            agree(*runs)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
@pytest.mark.parametrize("spec", SPECS)
def test_jpegs(spec: str) -> None:
    """Equal but for rounding: another decoder may be used where it is faster."""
    for mode in ("L", "RGB"):
        runs = [decoded(w, {"jpg": image(mode, "JPEG")}, w.imagehandler(spec)) for w in BOTH]
        values = [
            np.asarray(run[0][0]["jpg"]).astype("f8") * (255 if "8" not in spec and "pil" not in spec else 1)
            for run in runs
        ]
        assert values[0].shape == values[1].shape
        assert np.abs(values[0] - values[1]).max() <= 4
        assert (
            type(runs[0][0][0]["jpg"]).__name__.replace("JpegImageFile", "Image") == type(runs[1][0][0]["jpg"]).__name__
        )
        assert getattr(runs[0][0][0]["jpg"], "dtype", None) == getattr(runs[1][0][0]["jpg"], "dtype", None)


def test_broken_images() -> None:
    for data in (b"", b"no image", image("RGB", "PNG")[:100], image("RGB", "PNG") + b"more"):
        agree(*[decoded(w, {"png": data}, w.imagehandler("rgb8")) for w in BOTH])


def test_unknown_specifications() -> None:
    for wds in BOTH:
        with pytest.raises(ValueError, match="Unknown imagespec: rgbtorch"):
            wds.imagehandler("rgbtorch")
        with pytest.raises(ValueError, match="Unknown imagespec"):
            wds.WebDataset("x.tar", shardshuffle=False).decode("rgbtorch")


def own(key: str, data: bytes) -> Any:
    return len(data) if key.endswith(".bin") else None


def passes_on(wds: Any) -> Any:
    return lambda key, data: wds.Continue(key[:-4], data[::-1]) if key.endswith(".rev") else None


def broken(key: str, data: bytes) -> Any:
    raise ZeroDivisionError(key)


MIXED = {"bin": b"abc", "txt": b"x", "cls.rev": b"12", "__note": b"n", "seg.png": image("RGB", "PNG"), "n.BIN": b"x"}
DECODERS: dict[str, Any] = {
    "a function": lambda w: ([own], {}),
    "two": lambda w: ([own, lambda k, d: k], {}),
    "Continue": lambda w: ([passes_on(w)], {}),
    "extensions": lambda w: ([w.handle_extension("seg.png txt", len), w.handle_extension("BIN", str)], {}),
    "only": lambda w: ([], {"only": "txt bin"}),
    "only, a list": lambda w: ([own], {"only": ["bin"]}),
    "pre": lambda w: ([], {"pre": [own]}),
    "post": lambda w: ([], {"post": [own]}),
    "nothing else": lambda w: ([], {"pre": [], "post": []}),
    "partial": lambda w: ([], {"partial": True}),
    "broken": lambda w: ([broken], {}),
    "broken, passed": lambda w: ([broken], {"handler": w.ignore_and_continue}),
    "basichandlers": lambda w: ([w.autodecode.basichandlers], {"post": []}),
}


@pytest.mark.parametrize("name", DECODERS)
def test_handlers(name: str) -> None:
    runs = []
    for wds in BOTH:
        arguments, kw = DECODERS[name](wds)
        runs.append(decoded(wds, MIXED, *arguments, **kw))
    agree(*runs)


@pytest.mark.parametrize("value", [None, 7, "text", [b"x"], np.zeros(2)])
@pytest.mark.parametrize("partial", [False, True])
def test_values_that_are_no_bytes(value: Any, partial: bool) -> None:
    agree(*[decoded(w, {"x": value}, partial=partial) for w in BOTH])


def test_decoders_by_themselves() -> None:
    for data in ({"__key__": "k", "cls": b"3"}, {"cls": b"3", "x.json": b"[1]"}):
        assert same(*[w.Decoder([])(dict(data)) for w in BOTH])
        assert same(*[w.autodecode.Decoder([own], only="cls").decode(dict(data)) for w in BOTH])
        assert same(*[w.autodecode.Decoder([own]).decode1("cls", b"3") for w in BOTH])
    assert same(*[w.gzfilter(".txt.gz", gzip.compress(b"x")).data for w in BOTH])
    assert ours.gzfilter(".txt", b"") is theirs.gzfilter(".txt", b"") is None


def test_the_table_of_decoders_is_the_users() -> None:
    """Programs add to it and take from it."""
    for wds in BOTH:
        table = wds.autodecode.decoders
        kept = dict(table)
        try:
            table["mine"] = lambda data: data.decode().upper()
            del table["cls"]
            [sample], error = decoded(wds, {"mine": b"abc", "cls": b"3"})
        finally:
            table.clear()
            table.update(kept)
        assert error is None
        assert (sample["mine"], sample["cls"]) == ("ABC", b"3")
    assert set(theirs.autodecode.decoders) <= set(ours.autodecode.decoders)
    assert set(ours.autodecode.IMAGE_EXTENSIONS) <= set(theirs.autodecode.IMAGE_EXTENSIONS)
    assert set(ours.autodecode.imagespecs) == set(theirs.autodecode.imagespecs)


def test_pickles_of_strangers() -> None:
    """Values and arrays decode alike; other classes only where they are trusted."""
    stranger = pickle.dumps(fractions.Fraction(1, 3))
    for field, data in (("pyd", stranger), ("pkl", stranger), ("pth", pth(fractions.Fraction(1, 3)))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            [sample], _ = decoded(theirs, {field: data})
        assert sample[field] == fractions.Fraction(1, 3)
        _, error = decoded(ours, {field: data})
        assert isinstance(error, ours.DecodingError)
        assert "Fraction" in str(error)
        [sample], _ = decoded(ours, {field: data}, allow_pickle=True)
        assert sample[field] == fractions.Fraction(1, 3)
