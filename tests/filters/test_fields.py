"""Choosing and naming fields."""

from __future__ import annotations

import re
from typing import Any

import pytest

from wds_async import filters
from wds_async.errors import ConfigError
from wds_async.filters import fields

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


CAUSES: list[tuple[str, dict[str, Any], str]] = [
    ("png", {"seg.png": 1, "jpg": 2}, r"begins after the first dot.*did you mean 'seg\.png'\?.*WebDataset\(keys="),
    ("JPG", {"jpg": 1}, r"case counts: did you mean 'jpg'\?"),
    ("jpg", {"JPG": 1}, r"case counts: did you mean 'JPG'\?"),
    (".jpg", {"jpg": 1}, r"no leading dot: did you mean 'jpg'\?"),
    ("jpg", {"jpeg": 1, "cls": 2}, r"; did you mean 'jpeg'\?"),
    ("npy", {"jpeg": 1}, r"of u\.tar\)$"),
    ("v2", {"x": 1, "__key__": "a.v2"}, r"part of __key__: WebDataset\(keys="),
    ("jpg", {}, "no fields at all: an earlier stage"),
]


@pytest.mark.parametrize(("name", "sample", "cause"), CAUSES)
def test_a_missing_field_shows_what_is_there_and_a_likely_cause(name: str, sample: Any, cause: str) -> None:
    whole = {"__key__": "k", "__url__": "u.tar", **sample}
    stages = [
        fields.to_tuple(name),
        fields.rename(x=name),
        fields.extract_keys(name),
        filters.map_dict(**{name: str}),
        lambda source: [fields.getfirst(next(iter(source)), name)],
    ]
    for stage in stages:
        if name == ".jpg" and stage is stages[2]:
            continue  # patterns may begin with a dot
        with pytest.raises((ValueError, KeyError)) as caught:
            run(stage, dict(whole))
        message = str(caught.value.args[0])
        assert re.search(rf"no field '{re.escape(name)}' among \['__key__'", message)
        assert re.search(cause, message)


def test_secrets_in_urls_are_not_shown() -> None:
    with pytest.raises(ValueError, match=r"https://h/x\.tar\?sig=\*\*\*\)"):
        run(fields.to_tuple("npy"), {"__key__": "k", "__url__": "https://h/x.tar?sig=secret", "a": 1})


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
    meta = {"__key__": "a/1"}
    assert run(fields.rename_keys(image="jp*")) == {**meta, "image": 1}
    assert run(fields.rename_keys(("image", "*.png"), keep_unselected=True))["image"] == 2
    with pytest.raises(ValueError, match="fit none"):
        run(fields.rename_keys(image="*.npy"))
    assert run(fields.rename_keys(image="*.npy", must_match=False)) == meta
    with pytest.raises(ValueError, match="become 'x'"):
        run(fields.rename_keys(x="*"))
    assert run(fields.rename_keys(x="[!_]*", duplicate_is_error=False)) == {**meta, "x": 1}
    assert run(fields.rename_keys(name="__key__"))["name"] == "a/1"


def test_extract_keys() -> None:
    assert run(fields.extract_keys("*.jpg", "cls")) == (1, 3)
    assert run(fields.extract_keys("npy;*.png")) == (2,)
    assert run(fields.extract_keys("npy", "cls", ignore_missing=True)) == (3,)
    with pytest.raises(ValueError, match="no field 'npy'"):
        run(fields.extract_keys("npy"))
    with pytest.raises(ValueError, match="fits"):
        run(fields.extract_keys("*"))
    assert run(fields.extract_keys("j*;c*", duplicate_is_error=False)) == (1,)
