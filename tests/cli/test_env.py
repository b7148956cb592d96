"""``wds-async env``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wds_async import environment


def rows(call: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(call("env", "--json").output)["variables"]}


def test_every_variable_is_there(call: Any) -> None:
    table = rows(call)
    assert set(table) == {known.name for known in environment.VARIABLES}
    output = call("env").output
    for known in environment.VARIABLES:
        assert known.name in output
        assert known.meaning in output


def test_value_and_origin(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_PART_SIZE", "8M")
    monkeypatch.delenv("WDS_DIRECT", raising=False)
    table = rows(call)
    assert (table["WDS_PART_SIZE"]["value"], table["WDS_PART_SIZE"]["origin"]) == ("8M", "environment")
    assert (table["WDS_DIRECT"]["value"], table["WDS_DIRECT"]["origin"]) == ("1", "default")
    assert table["WDS_BUDGET"]["value"] != ""


def test_secrets_are_redacted(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", "s3://b=https://me:hunter2@mirror/b?sig=hunter2")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter2@proxy:3128")
    result = call("env")
    assert "hunter2" not in result.output
    assert "mirror" in result.output
    assert "proxy:3128" in result.output


def test_a_stranger_is_warned_about(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_BUGDET", "1")
    result = call("env")
    assert result.exit_code == 0
    assert "WDS_BUGDET is set but no setting has this name (did you mean WDS_BUDGET?)" in result.stderr


@pytest.mark.parametrize(("name", "text"), [("WDS_TIMEOUT", "-5"), ("WDS_SEED", "abc"), ("WDS_VERIFY", "foo")])
def test_a_value_that_does_not_parse(name: str, text: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    result = call("env")
    assert result.exit_code == 2
    assert f"{name} does not parse" in result.stderr
    assert "WDS_RETRIES" in result.stdout
