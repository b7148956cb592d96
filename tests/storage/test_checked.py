"""The ways around the engine's own requests tell the truth: under every fault the bytes, or the error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.servers.azurite import KEY, azure_environment_fixture  # noqa: F401
from tests.servers.behaviour import Request
from tests.servers.origin import Origin
from tests.transfer.reading import KIB, data, quick
from wds_async.config import TransferConfig
from wds_async.errors import ObjectChanged, TransferError, WdsError
from wds_async.storage.options import StorageOptions
from wds_async.transfer.reader import open_shards

SHARD = data(700 * KIB)
Read = Callable[[], tuple[bytes, WdsError | None]]

WAYS: dict[str, tuple[str, str]] = {
    "http": ("/x.tar", ""),
    "s3": ("/bucket/x.tar", "s3://bucket/x.tar"),
    "gcs": ("/download/storage/v1/b/bucket/o/x.tar", "gs://bucket/x.tar"),
    "azure": ("/acc/c/x.tar", "az://c/x.tar"),
    "ais": ("/v1/objects/b/x.tar", "ais://b/x.tar"),
    "hf": ("/datasets/o/n/resolve/main/x.tar", "hf://datasets/o/n/x.tar"),
}
CUTS = ("s3", "gcs", "azure", "ais", "hf", "http")


def options(origin: Origin) -> StorageOptions:
    """Every store is ``origin``."""
    return StorageOptions({
        "s3": {"key": "AKIAEXAMPLE000000000", "secret": "s", "endpoint_url": origin.base},
        "gs": {"token": "anon", "endpoint_url": origin.base},
        "az": {"connection_string": f"BlobEndpoint={origin.base}/acc;AccountName=acc;AccountKey={KEY}"},
        "ais": {"endpoint": origin.base},
        "hf": {"endpoint": origin.base, "token": False},
    })  # fmt: skip


@pytest.fixture(params=CUTS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, azure_environment: Any) -> str:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST", "AIS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return str(request.param)


def shard_of(store: str, origin: Origin, content: bytes = SHARD) -> str:
    """Return the URL of a shard in ``store``, which is ``origin``."""
    path, url = WAYS[store]
    address = origin.add(path, content)
    if store == "azure":
        origin.behave(when=lambda request: "sig=" not in request.target, status=403)
    return url or address


def read_to_error(url: str, origin: Origin, config: TransferConfig) -> tuple[bytes, WdsError | None]:
    """Return the bytes of a shard up to the first error, and that."""
    got = bytearray()
    with open_shards([url], config=config, options=options(origin)) as reader:
        try:
            for shard in reader:
                while (piece := shard.read()) is not None:
                    got += piece
        except WdsError as exn:
            return bytes(got), exn
    return bytes(got), None


@pytest.fixture
def read(way: str, origin: Origin) -> Read:
    url = shard_of(way, origin)
    return lambda: read_to_error(url, origin, quick(direct=False, connections=4))


def later(request: Request) -> bool:
    """A part, and not the question for the size."""
    return request.range not in (None, "bytes=0-0")


ONCE: dict[str, dict[str, Any]] = {
    "ignored": {"ignore_range": True},
    "shifted": {"shift": 7},
    "too short": {"length_error": -100},
    "too long": {"length_error": 100},
    "reset": {"cut_after": 20_000},
    "closed": {"cut_after": 20_000, "cut": "fin"},
    "before": {"cut_after": -1},
    "busy": {"status": 503, "headers": {"Retry-After": "0"}},
    "throttled": {"status": 429},
    "conflict": {"status": 409},
    "mislabelled": {"headers": {"Content-Range": f"bytes 1-2/{len(SHARD)}"}},
    "encoded": {"headers": {"Content-Encoding": "zstd"}},
}


@pytest.mark.parametrize("fault", ONCE)
def test_healed(read: Read, origin: Origin, fault: str) -> None:
    origin.behave(when=later, times=1, skip=1, **ONCE[fault])
    got, error = read()
    assert error is None
    assert got == SHARD
    asked = [request.range for request in origin.requests if later(request)]
    assert 1 <= len(asked) - len(set(asked)) <= 2, (
        "one range was asked for again, and nobody repeated it behind our back"
    )


@pytest.mark.parametrize("fault", ["ignored", "shifted", "too short", "mislabelled", "encoded"])
def test_a_server_that_always_lies(read: Read, origin: Origin, fault: str) -> None:
    origin.behave(when=later, **ONCE[fault])
    got, error = read()
    assert isinstance(error, TransferError)
    assert got == b""
    assert "3 attempts" in str(error)


def test_replaced_between_parts(read: Read, origin: Origin, way: str) -> None:
    """The server takes no notice of If-Match, as some do not."""
    origin.behave(when=later, skip=1, etag='"another"', headers={"X-Goog-Generation": "2"})
    got, error = read()
    assert isinstance(error, ObjectChanged)
    assert SHARD.startswith(got)


def test_replaced_by_a_longer_one(read: Read, origin: Origin, way: str) -> None:
    origin.behave(when=later, skip=1, headers={"Content-Range": f"bytes 0-1/{len(SHARD) + 1}"})
    got, error = read()
    assert isinstance(error, ObjectChanged)
    assert SHARD.startswith(got)


def test_the_size_of_an_empty_object(read: Read, origin: Origin, way: str) -> None:
    origin.add(WAYS[way][0], b"")
    assert read() == (b"", None)
