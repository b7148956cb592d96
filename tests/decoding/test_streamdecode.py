"""wds_async.decoding.streamdecode: xdecode, beside webdataset's."""

from __future__ import annotations

import fractions
import io
import pickle
from typing import Any

import numpy as np
import PIL.Image
import pytest
import webdataset.filters as reference

from wds_async.decoding import streamdecode
from wds_async.decoding.streamdecode import xdecode
from wds_async.errors import UnsafeContent

FRACTION = fractions.Fraction(1, 3)


def number(stream: Any) -> int:
    return int(stream.read())


def kind(stream: Any) -> str:
    return type(stream).__name__


CASES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {"cls": number}),
    ((("*.cls", number),), {}),
    ((("cls", number), ("*", kind)), {}),
    ((("*", kind),), {"cls": number}),
    ((("*.png", kind),), {"cls": number, "txt": number}),
    ((("seg.*", kind), ("*.cls", False)), {}),
    ((), {"must_decode": False}),
    ((("*.jpg", kind),), {"defaults": [], "must_decode": False}),
    ((("/x.*", kind),), {"must_decode": False}),
]
SAMPLE = {
    "__key__": "k",
    "__url__": "u.tar",
    "txt": "é".encode(),
    "bin": b"\1",
    "pyd": pickle.dumps({"a": 1}),
    "cls": b"3",
    "SEG.PNG": b"x",
    "a/b.png": b"y",
}


@pytest.mark.parametrize(("args", "kw"), CASES)
def test_same_as_webdataset(args: Any, kw: Any) -> None:
    def run(stage: Any) -> Any:
        try:
            return list(stage(*args, **kw)([dict(SAMPLE)]))
        except ValueError:
            return "ValueError"

    assert run(xdecode) == run(reference.xdecode)


def test_functions_take_streams() -> None:
    image, array = io.BytesIO(), io.BytesIO()
    PIL.Image.new("RGB", (4, 3), (1, 2, 3)).save(image, "PNG")
    np.save(array, np.arange(3))
    sample = {"__key__": "k", "png": image.getvalue(), "npy": array.getvalue(), "open": io.BytesIO(b"7")}
    (found,) = xdecode(png=PIL.Image.open, npy=np.load, open=number)([sample])
    assert found["png"].size == (4, 3)
    assert found["npy"].tolist() == [0, 1, 2]
    assert found["open"] == 7
    assert "png" in sample
    assert isinstance(sample["png"], bytes)


def test_a_field_that_nothing_fits() -> None:
    sample = {"__key__": "k", "__url__": "https://h/x.tar?sig=s", "xyz": b""}
    with pytest.raises(
        ValueError, match=r"no decoder fits the field 'xyz' of sample 'k' of https://h/x.tar\?sig=\*\*\*"
    ):
        list(xdecode()([sample]))
    assert list(xdecode(must_decode=False)([sample])) == [sample]


def test_errors_keep_their_class_and_name_the_sample() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(xdecode(cls=number)([{"__key__": "k", "__url__": "u.tar", "cls": b"x"}]))
    assert caught.value.__notes__ == ["while xdecode read the field 'cls' of sample 'k' of u.tar"]


def test_pickles_obey_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    from wds_async import utils

    plain, other = {"pyd": pickle.dumps({"a": np.arange(2)})}, {"a.pyd": pickle.dumps(FRACTION)}
    for name in ("WDS_SECURE", "WDS_ALLOW_PICKLE"):
        monkeypatch.delenv(name, raising=False)
    assert next(iter(xdecode()([plain])))["pyd"]["a"].tolist() == [0, 1]
    with pytest.raises(UnsafeContent, match=r"fractions\.Fraction"):
        list(xdecode()([other]))
    monkeypatch.setenv("WDS_ALLOW_PICKLE", "1")
    assert list(xdecode()([other])) == [{"a.pyd": FRACTION}]
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeContent, match="enforce_security"):
        list(xdecode()([plain]))
    monkeypatch.delenv("WDS_SECURE")
    monkeypatch.setattr(utils, "enforce_security", True, raising=False)
    with pytest.raises(UnsafeContent, match="enforce_security"):
        list(xdecode()([plain]))


def test_the_defaults_are_a_list_that_programs_extend() -> None:
    assert [pattern for pattern, _ in streamdecode.default_decoders] == ["*.bin", "*.txt", "*.pyd"]
    more = [*streamdecode.default_decoders, ("*.n", number)]
    assert list(xdecode(defaults=more)([{"n": b"5", "txt": b"t"}])) == [{"n": 5, "txt": "t"}]
