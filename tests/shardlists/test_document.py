"""Documents: where they come from, and where in them a value stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from wds_async.errors import ConfigError, UrlError
from wds_async.shardlists import document

TEXT = "a:\n  - b: 1\n    c: [x,\n        y]\n"


def test_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("\ufeff" + TEXT, encoding="utf-8")
    for name in (str(path), f"file:{path}"):
        found = document.read(name)
        assert found.data == {"a": [{"b": 1, "c": ["x", "y"]}]}
        assert (found.base, found.trusted) == (f"{tmp_path}{os.sep}", True)
    monkeypatch.chdir(tmp_path)
    assert document.read("d.yaml").base == ""


def test_a_remote_one(origin: Any) -> None:
    found = document.read(origin.add("x/d.yaml", TEXT.encode()) + "?password=secret")
    assert (found.base, found.trusted) == (f"{origin.base}/x/", False)
    assert "secret" not in found.name


@pytest.mark.parametrize(
    ("path", "line", "column"),
    [((), 1, 1), (("a",), 1, 1), (("a", 0), 2, 5), (("a", 0, "c"), 3, 5), (("a", 0, "c", 1), 4, 9)],
)
def test_where_a_value_stands(tmp_path: Path, path: tuple[str | int, ...], line: int, column: int) -> None:
    (tmp_path / "d.yaml").write_text(TEXT)
    found = document.read(str(tmp_path / "d.yaml"))
    error = found.error(path, "is wrong", UrlError)
    assert isinstance(error, UrlError)
    assert f"d.yaml, line {line}, column {column}" in str(error)
    assert str(error).endswith(": is wrong")


def test_in_a_dict() -> None:
    assert str(document.Document("it", {}).error(("a", 0, "b"), "no")) == "it (a[0].b): no"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", b'{"a": 1,\n "b": }', r"d\.json, line 2, column 7: not valid JSON"),
        ("d.json", b"a: 1", r"d\.json, line 1, column 1: not valid JSON"),
        ("d.json", b"[" * 100_000, "nested too deeply"),
        ("d.yaml", b"a: \xff", "not UTF-8 text"),
        ("d.yaml", b"a: *b", r"line 1, column 4: not valid YAML"),
        ("d.yaml", b"a: 1\n---\nb: 2", "not valid YAML"),
        ("d.yaml", b"a: \x00", "not valid YAML"),
        ("d.yaml", b"a: 2020-13-45", "not valid YAML"),
        ("d.yaml", b"{a: 1, a: 2}", r"line 1, column 8: a second 'a'"),
    ],
)
def test_what_cannot_be_parsed(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        document.read(str(tmp_path / name))


def test_yaml_that_begins_like_json_and_one_that_holds_itself(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("[a, b]")
    assert document.read(str(tmp_path / "d.yaml")).data == ["a", "b"]
    (tmp_path / "d.yaml").write_text("a: &a\n  b: *a\n")
    found = document.read(str(tmp_path / "d.yaml")).data
    assert found["a"]["b"] is found["a"]
    (tmp_path / "d.yaml").write_text("")
    assert document.read(str(tmp_path / "d.yaml")).data is None
