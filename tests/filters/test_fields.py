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


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (fields.to_tuple("none"), "'none' is None"),
        (fields.rename_keys(image="*.npy"), "fit none of"),
        (fields.rename_keys(x="*"), "become 'x'"),
        (fields.extract_keys("*"), "fits"),
    ],
)
def test_what_does_not_fit_is_named(stage: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(stage, {**SAMPLE, "none": None})


def test_alternatives_have_no_spaces() -> None:
    with pytest.raises(ConfigError, match="without spaces"):
        fields.getfirst(SAMPLE, "jpg cls")
