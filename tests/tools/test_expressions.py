"""Expressions over samples: what they give, and that nothing but plain values can be reached."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.servers.shards import png
from wds_async.errors import ConfigError, DecodingError, MissingField, WdsError
from wds_async.tools.expressions import Expression, fraction, value

SAMPLE = {
    "__key__": "a/b",
    "__url__": "s3://user:secret@bucket/x.tar",
    "json": json.dumps({"width": 300, "a": {"b": [1, 2]}, "items": 3}).encode(),
    "cls": b"3",
    "txt": "häl lo".encode(),
    "png": png(0, side=9),
    "seg.png": b"12",
    "bad.json": b"{",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("json.width > 256", True),
        ("cls == 3 and len(txt) > 5", True),
        ("size(seg.png) < 1e6", True),
        ('field("seg.png")', b"12"),
        ("key", "a/b"),
        ('json["a"].b[-1]', 2),
        ("json.items", 3),
        ('get("x", default=7) + get("cls")', 10),
        ('has("x") or "png" in fields', True),
        ('matches("^a/", key) and startswith(lower("ABC"), "ab")', True),
        ("(width(png), height('png'))", (9, 9)),
        ("txt[:3]", "häl"),
        ("-cls if 1 < cls < 5 else 0", -3),
        ("2 ** 10 % 1000", 24),
        ("0 <= fraction(key) < 1", True),
    ],
)
def test_what_an_expression_gives(text: str, expected: Any) -> None:
    assert Expression(text)(SAMPLE) == expected
    assert value(SAMPLE, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "().__class__", "json.__class__", "key.upper()", "txt.__len__", "__import__('os')", "open('x')", "eval('1')",
        "f'{key}'", "[x for x in fields]", "(lambda: 1)()", "cls := 3", "a = 1", "1; 2", "", "json.width >",
        "9 ** 9 ** 9", "'a' * 10 ** 9", "[1] * 10 ** 9", "'%1000000000d' % 5", "1 << 10 ** 9", "x" * 5000,
        "(" * 300 + ")" * 300, "-" * 3000 + "1", "txt > 3", "cls.x", "json.nope", "len(*fields)", "{**json}", "len",
        "width(txt)", "'\\ud800' + txt > 3", "txt['x']", "key.format",
    ],
)  # fmt: skip
def test_nothing_else_can_be_reached_and_every_failure_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(WdsError) as caught:
        Expression(text)(SAMPLE)
    assert isinstance(caught.value, ConfigError | MissingField)
    assert "secret" not in str(caught.value)


def test_errors_name_the_sample_and_what_to_do() -> None:
    with pytest.raises(MissingField, match=r"sample 'a/b' of s3://.*no field 'jpg'.*there are: .*txt.*has\(\"jpg\"\)"):
        Expression("size(jpg)")(SAMPLE)
    with pytest.raises(DecodingError, match=r"field 'bad.json'"):
        Expression("bad.json")(SAMPLE)
    with pytest.raises(ConfigError, match=r"'json.width >' is no expression"):
        Expression("json.width >")


def test_a_fraction_is_the_same_everywhere_and_evenly_spread() -> None:
    assert fraction("a/b") == 0.05437960232283434
    assert fraction("a/b", seed=1) != fraction("a/b")
    below = sum(fraction(f"{n:06d}") < 0.1 for n in range(20_000))
    assert 1850 < below < 2150
