"""Fixtures of AIStore's tests: no setting of this machine's own, and one double."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.aistore import AisDouble

__all__ = ["ais", "no_settings"]


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing about AIStore or proxies is set, and there is no token file."""
    for name in list(os.environ):
        if name.startswith("AIS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("USE_AIS_FOR", "WDS_AIS_FALLBACK", "WDS_REWRITE", "GOPEN_REWRITE", "WDS_DIRECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def ais(no_settings: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[AisDouble]:
    """A proxy and two targets, to which ``AIS_ENDPOINT`` points."""
    with AisDouble() as double:
        monkeypatch.setenv("AIS_ENDPOINT", double.endpoint)
        yield double
