"""wds_async.environment: every variable that is read, and what it may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from wds_async import environment
from wds_async.cli.env import markdown
from wds_async.config import settings, transfer_config
from wds_async.environment import (
    GIB,
    MIB,
    VARIABLES,
    parse_bytes,
    schemes,
    unknown_variables,
    variable,
    warn_of_unknown_variables,
)
from wds_async.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_environment")


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("134217728", 128 * MIB),
        ("128M", 128 * MIB),
        ("128m", 128 * MIB),
        ("64MiB", 64 * MIB),
        ("64 MB", 64 * MIB),
        (" 1g ", GIB),
        ("1.5k", 1536),
        ("2T", 2048 * GIB),
        ("10b", 10),
        ("1e12", 10**12),
        ("2.5e9", 2_500_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "12x", "1kk", "1 2", "one", "0x10", "nan", "inf", "1e400"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


_SETTINGS = frozenset(
    {"WDS_SECURE", "WDS_ALLOW_PICKLE", "WDS_SEED", "WDS_EPOCH", "WDS_ON_CORRUPT", "WDS_MAX_BAD_FRACTION"}
)
BAD = {
    "WDS_BUDGET": ["much", "-1", "-5M", "inf", "1e400", "9" * 400],
    "WDS_PART_SIZE": ["4X"],
    "WDS_CONNECTIONS": ["-1", "many", "1.5"],
    "WDS_RETRIES": ["-1", "x"],
    "WDS_TIMEOUT": ["0", "-1", "soon", "nan"],
    "WDS_DIRECT": ["maybe", "2"],
    "WDS_VERIFY": ["foo", "ALWAYS"],
    "WDS_SECURE": ["maybe"],
    "WDS_ALLOW_PICKLE": ["please"],
    "WDS_SEED": ["random", "1.0"],
    "WDS_EPOCH": ["first"],
    "WDS_ON_CORRUPT": ["skip"],
    "WDS_MAX_BAD_FRACTION": ["1%", "2"],
    "GOPEN_VERBOSE": ["-1"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_value_that_does_not_parse_names_its_variable(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    read = settings if name in _SETTINGS else transfer_config
    with pytest.raises(ConfigError, match=f"{name}='{text}'"):
        (settings if name.startswith("GOPEN") else read)()


def test_each_default_is_the_parsed_form_of_its_text() -> None:
    assert len({v.name for v in VARIABLES}) == len(VARIABLES)
    for v in VARIABLES:
        assert v.meaning
        assert v.group
        assert v.default is None or v.type.parse(v.shown_default) == v.default


def test_the_page_of_variables_is_generated_from_the_records() -> None:
    page = (Path(__file__).parents[1] / "docs" / "environment.md").read_text(encoding="utf-8")
    tables = page.partition("-->\n")[2].partition("\n<!-- /variables -->")[0]
    assert tables == markdown(), "run make generate"


def test_unknown_variables_come_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_read", set())  # what other tests' ${X} read
    assert unknown_variables() == []
    monkeypatch.setenv("WDS_BUGDET", "1")
    monkeypatch.setenv("WDS_ZQXJ", "x")
    monkeypatch.setenv("WDS_CACHE", "x")
    monkeypatch.setenv("OTHER", "x")
    assert unknown_variables(frozenset({"WDS_ZQXJ"})) == [("WDS_BUGDET", "WDS_BUDGET")]
    assert ("WDS_ZQXJ", None) in unknown_variables()


def test_a_misspelt_variable_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WDS_CONECTIONS", "3")
    # Other tools' and programs' own: webpack's development server, training scripts.
    for other in ("SOCKET_PORT", "SOCKET_HOST", "BUFFER_SIZE", "BATCH_SIZE", "TRAIN_DIR", "CURL_ARGS", "CACHE_DIR"):
        monkeypatch.setenv(f"WDS_{other}", "x")
    monkeypatch.setenv("WDS_SHARD_ROOT", "/data")
    assert variable("WDS_SHARD_ROOT") == "/data"  # as ${SHARD_ROOT} in a specification reads it
    warn_of_unknown_variables()
    warn_of_unknown_variables()
    assert [record.getMessage() for record in caplog.records] == [
        "WDS_CONECTIONS is set but has no meaning; did you mean WDS_CONNECTIONS? (`wds-async env` lists all variables)"
    ]


def test_schemes_are_named_as_their_aliases_follow() -> None:
    assert schemes("gcs:s3a,abfs") == {"gs", "s3", "az"}
    assert schemes("gs://:hf") == {"gs", "hf"}
    assert schemes("") == frozenset()
