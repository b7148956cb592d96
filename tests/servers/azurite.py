"""Azurite, Microsoft's emulator of Blob Storage, as a child process that keeps everything in its memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.process import ServerMissing, accepts, free_port, launch, required, stop, until
from tests.servers.tls import Tls

__all__ = ["ACCOUNT", "KEY", "Azurite", "AzuriteMissing", "azure_environment_fixture", "azurite_fixture"]

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own, published by Microsoft: no secret, but tests treat it as one."""

_START_TIMEOUT_S = 30.0
_ROOT = Path(__file__).parent.parent.parent


class AzuriteMissing(ServerMissing):
    """Azurite is not installed on this machine."""


def _program() -> str:
    found = os.environ.get("WDS_AZURITE") or shutil.which("azurite-blob")
    found = found or shutil.which("azurite-blob", path=str(_ROOT / "node_modules" / ".bin"))
    if found is None:
        raise AzuriteMissing("Azurite is not installed: npm install azurite@3.37.0, or WDS_AZURITE=/path/azurite-blob")
    return found


class Azurite:
    """Use it as a context manager. With ``tls`` it speaks https and takes bearer tokens (it checks their times, issuer
    and audience, not their signature)."""

    def __init__(self, tls: Tls | None = None) -> None:
        self.tls = tls
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None

    @property
    def endpoint(self) -> str:
        """Of the account, without a final slash."""
        return f"{'https://localhost' if self.tls else 'http://127.0.0.1'}:{self.port}/{ACCOUNT}"

    @property
    def connection_string(self) -> str:
        protocol = "https" if self.tls else "http"
        return (
            f"DefaultEndpointsProtocol={protocol};AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.endpoint};"
        )

    def client(self) -> Any:
        """Azure's own client, to put things there and to look."""
        from azure.storage.blob import BlobServiceClient

        verify = {"connection_verify": str(self.tls.ca)} if self.tls else {}
        return BlobServiceClient.from_connection_string(self.connection_string, **verify)

    def put(self, container: str, blobs: dict[str, bytes], *, public: bool = False) -> None:
        """Make ``container`` where it is not there, and put ``blobs`` into it."""
        with self.client() as client:
            place = client.get_container_client(container)
            if not place.exists():
                place.create_container(public_access="blob" if public else None)
            for name, data in blobs.items():
                place.get_blob_client(name).upload_blob(data, overwrite=True)

    def names(self, container: str) -> list[str]:
        """The names of the blobs in ``container``, those that are not committed too."""
        with self.client() as client:
            return [blob.name for blob in client.get_container_client(container).list_blobs()]

    def start(self) -> Azurite:
        program = _program()
        message = ""
        for _ in range(3):
            self.port = free_port()
            if self._launch(program):
                return self
            message = Path(self._folder or "", "output").read_text(errors="replace")[-500:]
            self.stop()
        raise RuntimeError(f"Azurite did not start: {message}")

    def stop(self) -> None:
        """Stop it; harmless when it is not running."""
        process, self._process = self._process, None
        stop(process)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Azurite:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _launch(self, program: str) -> bool:
        self._folder = tempfile.mkdtemp(prefix="wds-azurite-")
        # The client speaks a newer version of the protocol than the emulator.
        options = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"]
        if self.tls:
            options += ["--oauth", "basic", "--cert", str(self.tls.cert), "--key", str(self.tls.key)]
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        self._process = launch([program, *place, *options], Path(self._folder, "output"), cwd=self._folder)
        return until(self._process, lambda: accepts(self.port), _START_TIMEOUT_S)


@contextlib.contextmanager
def _running(tls: Tls | None) -> Iterator[Azurite]:
    with required():
        server = Azurite(tls).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session", name="azurite")
def azurite_fixture() -> Iterator[Azurite]:
    """One without TLS for the whole run. Skips where there is none, fails instead with ``WDS_REQUIRE_SERVERS=1``."""
    with _running(None) as server:
        yield server


@pytest.fixture(scope="session", name="azurite_tls")
def azurite_tls_fixture(tls: Tls) -> Iterator[Azurite]:
    """One with TLS, which takes bearer tokens."""
    with _running(tls) as server:
        yield server


@pytest.fixture(name="azure_environment")
def azure_environment_fixture(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing in the environment says anything of Azure or of a proxy, and nothing is remembered of earlier tests."""
    from wds_async import logs
    from wds_async.storage.azure import account as azureauthority

    mine = ("AZURE_", "IDENTITY_", "MSI_", "IMDS_")
    for name in list(os.environ):
        if name.startswith(mine) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(azureauthority, "_nothing_found_until", {})
    monkeypatch.setattr(logs, "_process", logs.Once())
    return monkeypatch
