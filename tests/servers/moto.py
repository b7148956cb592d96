"""moto's S3 on a free port, in a thread of this process."""

from __future__ import annotations

import functools
import importlib
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.process import ServerMissing, required

__all__ = ["CREDENTIALS", "clean_aws", "empty_bucket", "moto", "remember_models"]

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIAMOTOMOTOMOTOMOTO", "AWS_SECRET_ACCESS_KEY": "hush-secret"}

_NAMES = (
    "AWS_",
    "BOTO_",
    "FSSPEC_S3",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)


@functools.cache
def remember_models() -> None:
    """Have botocore read the files that describe its services once a process, and not for each client: they are
    megabytes."""
    loaders = importlib.import_module("botocore.loaders")
    read = functools.cache(loaders.JSONFileLoader().load_file)
    loaders.JSONFileLoader.load_file = lambda self, path: read(path)


@pytest.fixture
def clean_aws(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> pytest.MonkeyPatch:
    """An environment without a trace of S3: no variables, no files, no metadata service."""
    import os

    for name in list(os.environ):
        if name.startswith(_NAMES):
            monkeypatch.delenv(name)
    remember_models()
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of a moto server that lets everybody in; buckets are as good as its tests' names. Skips where it is
    not installed, fails instead with ``WDS_REQUIRE_SERVERS=1``."""
    with required():
        try:
            module = importlib.import_module("moto.server")
        except ImportError as exn:
            raise ServerMissing("moto is not here: pip install 'moto[server]'") from exn
    server: Any = module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def reset(base: str) -> None:
    """Forget all buckets."""
    urllib.request.urlopen(urllib.request.Request(f"{base}/moto-api/reset", method="POST")).close()


def empty_bucket(address: str, environment: pytest.MonkeyPatch) -> Any:
    """Point ``environment`` to the server at ``address``; return a client of it, with an empty bucket ``bucket``."""
    boto3 = pytest.importorskip("boto3")
    for name, value in {**CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}.items():
        environment.setenv(name, value)
    reset(address)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    return client
