"""fsspec's own configuration, where the engine reads a store itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.servers.azurite import azure_environment_fixture  # noqa: F401
from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs
from wds_async.storage.fsspec_config import configured, fsspec_configuration
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.registry import Backends, locate

__all__ = ["clean_google", "fake_gcs"]


def test_the_program_wins_over_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "gcs", {"project": "file", "token": "anon"})
    monkeypatch.setitem(fsspec.config.conf, "gs", {"project": "environment"})
    assert fsspec_configuration("gcs", "gs") == {"project": "environment", "token": "anon"}
    assert configured(Options({"token": "mine"}), "gcs", "gs") == Options({"project": "environment", "token": "mine"})
    assert configured(NO_OPTIONS, "nothing-of-this-name") is NO_OPTIONS


def test_google_is_read_as_it_is_configured(
    fake_gcs: FakeGcs, clean_google: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import fsspec.config

    clean_google.setitem(fsspec.config.conf, "gs", {"endpoint_url": fake_gcs.base, "token": "anon"})
    assert fake_gcs.base in _endpoint("gs://bucket/x.tar")


def test_azure_is_read_as_it_is_configured(azure_environment: pytest.MonkeyPatch) -> None:
    import fsspec.config

    azure_environment.setitem(fsspec.config.conf, "az", {"account_name": "configured", "anon": True})
    assert "configured.blob.core.windows.net" in _endpoint("az://container/x.tar")


def _endpoint(url: str) -> str:
    async def describe() -> str:
        backends = Backends(asyncio.to_thread)
        place = locate(url)
        try:
            return (await backends.of(place).describe(place)).endpoint
        finally:
            await backends.close()

    return asyncio.run(describe())
