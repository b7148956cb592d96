"""Choosing and naming fields."""

from __future__ import annotations

from typing import Any

import pytest

from wds_async import fields
from wds_async.errors import ConfigError

SAMPLE = {"__key__": "a/1", "__url__": "x.tar", "jpg": 1, "seg.png": 2, "cls": 3}


def run(stage: Any, sample: Any = None) -> Any:
    (result,) = list(stage([dict(SAMPLE) if sample is None else sample]))
    return result


def test_getfirst() -> None:
    assert fields.getfirst(SAMPLE, "png;jpg") == 1
    assert fields.getfirst(SAMPLE, ["png", "cls"]) == 3
    assert fields.getfirst(SAMPLE, "png", default=7, missing_is_error=False) == 7
    assert fields.getfirst({"a": None}, "a") is None
    with pytest.raises(ValueError, match="no field 'npy' among"):
        fields.getfirst(SAMPLE, "npy")
    with pytest.raises(ConfigError, match="without spaces"):
        fields.getfirst(SAMPLE, "jpg cls")


def test_a_missing_field_names_the_sample_and_suggests_the_cause() -> None:
    with pytest.raises(ValueError, match=r"'a/1' of x\.tar.*did you mean 'seg\.png'"):
        run(fields.to_tuple("png"))


@pytest.mark.parametrize("spec", [("png;jpg", "cls"), ("png;jpg cls",), (["png", "jpg"], "cls")])
def test_to_tuple(spec: Any) -> None:
    assert run(fields.to_tuple(*spec)) == (1, 3)


def test_to_tuple_missing_and_none() -> None:
    assert run(fields.to_tuple("jpg", "npy", missing_is_error=False)) == (1, None)
    assert run(fields.to_tuple("jpg", none_is_error=False), {"jpg": None}) == (None,)
    with pytest.raises(ValueError, match="'jpg' is None"):
        run(fields.to_tuple("jpg"), {"jpg": None})
    with pytest.raises(ValueError, match="'npy' is None"):
        run(fields.to_tuple("npy", missing_is_error=False, none_is_error=True))


def test_rename() -> None:
    renamed = run(fields.rename(image="png;jpg", label="cls"))
    assert renamed == {"__key__": "a/1", "__url__": "x.tar", "seg.png": 2, "image": 1, "label": 3}
    assert run(fields.rename(image="jpg", keep=False)) == {"image": 1}
    assert run(fields.rename(jpg="cls", cls="jpg"))["jpg"] == 3
    with pytest.raises(ValueError, match="no field 'npy'"):
        run(fields.rename(image="npy"))


def test_rename_keys() -> None:
    assert run(fields.rename_keys(image="jp*")) == {"image": 1}
    assert run(fields.rename_keys(("image", "*.png"), keep_unselected=True))["image"] == 2
    with pytest.raises(ValueError, match="fit none"):
        run(fields.rename_keys(image="*.npy"))
    assert run(fields.rename_keys(image="*.npy", must_match=False)) == {}
    with pytest.raises(ValueError, match="become 'x'"):
        run(fields.rename_keys(x="*"))
    assert run(fields.rename_keys(x="[!_]*", duplicate_is_error=False)) == {"x": 1}


def test_extract_keys() -> None:
    assert run(fields.extract_keys("*.jpg", "cls")) == (1, 3)
    assert run(fields.extract_keys("npy;*.png")) == (2,)
    assert run(fields.extract_keys("npy", "cls", ignore_missing=True)) == (3,)
    with pytest.raises(ValueError, match="no field 'npy'"):
        run(fields.extract_keys("npy"))
    with pytest.raises(ValueError, match="fits"):
        run(fields.extract_keys("*"))
    assert run(fields.extract_keys("j*;c*", duplicate_is_error=False)) == (1,)
