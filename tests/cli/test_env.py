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


def test_only_what_was_changed_or_named(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in environment.VARIABLES:
        monkeypatch.delenv(known.name, raising=False)
    assert call("env", "--changed").output == ""
    monkeypatch.setenv("WDS_BUDGET", "64M")
    monkeypatch.setenv("WDS_TIMEOUT", "60")
    shown = [row["name"] for row in json.loads(call("env", "--changed", "--json").output)["variables"]]
    assert shown == ["WDS_BUDGET", "WDS_TIMEOUT"]
    named = json.loads(call("env", "wds_timeout", "AIS_CRT*", "--json").output)["variables"]
    assert [row["name"] for row in named] == ["WDS_TIMEOUT", "AIS_CRT", "AIS_CRT_KEY"]
    assert [row["name"] for row in json.loads(call("env", "--changed", "AIS_*", "--json").output)["variables"]] == []


def test_groups_and_sizes_are_for_people(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WDS_PART_SIZE", raising=False)
    table = rows(call)
    assert table["WDS_PART_SIZE"]["value"] == "2M"
    assert environment.parse_bytes(table["WDS_BUDGET"]["value"]) > 0
    assert table["AIS_CRT"]["group"] == "AIStore and the service"
    assert all(row["group"] for row in table.values())
    output = call("env", "WDS_CACHE", "RANK").output
    assert output.index("Shard cache:") < output.index("WDS_CACHE") < output.index("Ranks and workers:")
    assert [environment.shown_bytes(n) for n in (0, 1, 1 << 10, 3 << 19, 5 << 30)] == ["0", "1", "1K", "1536K", "5G"]
