"""wds_async.config: what the environment says, checked and named."""

from __future__ import annotations

import logging
import pickle
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from wds_async import config
from wds_async.config import (
    DEFAULT_BUDGET_BYTES,
    TransferConfig,
    configure_logging,
    place_from_env,
    proxy_for,
    settings,
    transfer_config,
)
from wds_async.environment import GIB, KIB, MIB
from wds_async.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_environment")


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("WDS_SEED", "17", "seed", 17),
        ("WDS_SEED", "-3", "seed", -3),
        ("WDS_EPOCH", "2", "epoch", 2),
        ("WDS_SHOW_SEED", "1", "show_seed", True),
        ("WDS_SECURE", "yes", "secure", True),
        ("WDS_SECURE", "0", "secure", False),
        ("WDS_ALLOW_PICKLE", "true", "allow_pickle", True),
        ("WDS_PYTORCH_WEIGHTS_ONLY", "0", "weights_only", False),
        ("WDS_PYTORCH_WEIGHTS_ONLY", "", "weights_only", True),
        ("WDS_NATIVE_PIPES", "ON", "native_pipes", True),
        ("WDS_PROGRESS", "1", "progress", True),
        ("WDS_LOG", "debug", "log", "debug"),
        ("GOPEN_VERBOSE", "2", "verbose", 2),
        ("WDS_REWRITE", "a=b", "rewrite", "a=b"),
        ("GOPEN_REWRITE", "a=b", "rewrite", "a=b"),
    ],
)
def test_settings_follow_the_environment(
    name: str, text: str, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings()
    monkeypatch.setenv(name, text)
    assert settings() == replace(before, **{field: value})


def test_defaults() -> None:
    now = settings()
    assert (now.seed, now.epoch, now.rewrite) == (None, None, "")
    assert now.weights_only
    assert not any((now.secure, now.allow_pickle, now.native_pipes, now.progress, now.show_seed))
    with pytest.raises(FrozenInstanceError):
        now.secure = True  # type: ignore[misc]


def test_wds_rewrite_beats_the_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPEN_REWRITE", "old=x")
    monkeypatch.setenv("WDS_REWRITE", "new=x")
    assert settings().rewrite == "new=x"


# ---------------------------------------------------------------- the transfer


def test_transfer_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "WDS_BUDGET": "256M",
        "WDS_PART_SIZE": "1M",
        "WDS_CONNECTIONS": "7",
        "WDS_DIRECT": "0",
        "WDS_RETRIES": "3",
        "WDS_TIMEOUT": "12.5",
    }.items():
        monkeypatch.setenv(name, text)
    found = transfer_config()
    assert (found.budget_bytes, found.part_bytes, found.connections, found.direct) == (256 * MIB, MIB, 7, False)
    assert (found.retry.max_attempts, found.retry.timeout_s) == (3, 12.5)
    assert found.stall_timeout_s == 12.5


def test_arguments_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_CONNECTIONS", "7")
    assert transfer_config(connections=9).connections == 9
    assert transfer_config(budget_bytes=64 * MIB).budget_bytes == 64 * MIB


def test_no_retries_means_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_RETRIES", "0")
    assert transfer_config().retry.max_attempts == 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"part_bytes": 3 * MIB}, "WDS_PART_SIZE"),
        ({"part_bytes": 32 * KIB}, "WDS_PART_SIZE"),
        ({"part_bytes": 0}, "WDS_PART_SIZE"),
        ({"part_bytes": 4 * MIB, "budget_bytes": 15 * MIB}, "WDS_BUDGET"),
        ({"connections": 0}, "WDS_CONNECTIONS"),
    ],
)
def test_values_that_cannot_work_are_named(values: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TransferConfig(**values)


def test_transfer_config_is_a_value() -> None:
    assert TransferConfig() == pickle.loads(pickle.dumps(TransferConfig()))
    with pytest.raises(FrozenInstanceError):
        TransferConfig().connections = 3  # type: ignore[misc]


def test_the_budget_is_shared_by_workers_and_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "memory_bytes", lambda: 16 * GIB)
    assert transfer_config(workers=1).budget_bytes == DEFAULT_BUDGET_BYTES
    assert transfer_config(workers=32).budget_bytes == 2 * GIB // 32
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert transfer_config(workers=16).budget_bytes == 2 * GIB // 32
    monkeypatch.setenv("WDS_BUDGET", "1G")
    assert transfer_config(workers=16).budget_bytes == GIB


def test_memory_is_what_the_machine_has_at_most() -> None:
    found = config.memory_bytes()
    assert 2**24 < found <= 64 * GIB
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        assert found <= int(meminfo.read_text().split()[1]) * KIB


# ---------------------------------------------------------------- ranks, proxies


@pytest.mark.parametrize(("index", "count"), [("RANK", "WORLD_SIZE"), ("WORKER", "NUM_WORKERS")])
def test_ranks_and_workers(index: str, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = partial(place_from_env, index, count)
    assert read() is None
    monkeypatch.setenv(index, "1")
    assert read() is None
    monkeypatch.setenv(count, "4")
    assert read() == (1, 4)
    monkeypatch.setenv(index, "4")
    with pytest.raises(ConfigError, match=f"{index}=4 with {count}=4"):
        read()
    monkeypatch.setenv(index, "0")
    monkeypatch.setenv(count, "0")
    with pytest.raises(ConfigError, match=count):
        read()
    monkeypatch.setenv(index, "one")
    with pytest.raises(ConfigError, match=f"{index}='one'"):
        read()


def test_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_for("https://store/x") is None
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,.internal,10.0.0.1:81")
    assert proxy_for("https://store/x") == "http://proxy:3128"
    assert proxy_for("http://store/x") is None
    assert proxy_for("https://localhost/x") is None
    assert proxy_for("https://a.internal:8443/x") is None
    assert proxy_for("https://10.0.0.1:81/x") is None
    assert proxy_for("https://10.0.0.1:82/x") == "http://proxy:3128"
    assert proxy_for("/local/x.tar") is None
    assert proxy_for("s3://bucket/x.tar") is None


def test_a_login_in_a_url_does_not_hide_its_host_from_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "store")
    assert proxy_for("https://me:pw@store/x") is None


def test_the_level_of_the_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("wds_async")
    before = logger.level
    configure_logging()
    assert logger.level == before
    monkeypatch.setenv("WDS_LOG", "debug")
    try:
        configure_logging()
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
    monkeypatch.setenv("WDS_LOG", "loud")
    with pytest.raises(ConfigError, match="WDS_LOG='loud' is not a level"):
        configure_logging()


def test_arguments_are_checked_by_name_type_and_range() -> None:
    assert transfer_config(budget_bytes="64M", stall_timeout_s=3).budget_bytes == 64 * MIB
    with pytest.raises(ConfigError, match="no 'budget'; its names are budget_bytes, connect_timeout_s"):
        transfer_config(budget="64M")
    with pytest.raises(ConfigError, match="connections='many'"):
        transfer_config(connections="many")
    with pytest.raises(ConfigError, match="budget_bytes='much'"):
        transfer_config(budget_bytes="much")
