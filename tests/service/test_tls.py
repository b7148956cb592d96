"""Whole shards over TLS: as long as they are, cold and warm, and by our own loader."""

from __future__ import annotations

import http.client
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import wds_async as wds
from tests.servers import Origin, make_shard
from tests.service.serving import Inside
from tests.transfer.reading import MIB, data


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority's certificate, and one of localhost with its key."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    return folder


@pytest.fixture
def service(origin: Origin, pair: Path, tmp_path: Path) -> Iterator[Inside]:
    files = {"certificate": str(pair / "cert.pem"), "key": str(pair / "key.pem")}
    given: dict[str, Any] = {"buckets": {"b": f"{origin.base}/"}, "folder": tmp_path / "cache", "send_timeout_s": 5}
    with Inside(allow=(f"{origin.base}/",), **files, **given) as running:
        yield running


@pytest.mark.parametrize("size", [600_000, 9 * MIB + 77])
def test_a_whole_object_cold_and_warm(service: Inside, origin: Origin, pair: Path, size: int) -> None:
    body = data(size)
    origin.add("/x", body)
    context = ssl.create_default_context(cafile=str(pair / "ca.pem"))
    connection = http.client.HTTPSConnection("127.0.0.1", service.port, timeout=30, context=context)
    try:
        for _ in range(2):
            connection.request("GET", "/ais/b/x")
            assert connection.getresponse().read() == body
        connection.request("GET", "/ais/b/x", headers={"Range": f"bytes=1-{size - 2}"})
        assert connection.getresponse().read() == body[1:-1]
    finally:
        connection.close()


def test_our_loader(service: Inside, origin: Origin, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AIS_", "USE_AIS")) or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    samples = {f"{n:03}": {"bin": data(500_000, n)} for n in range(12)}
    origin.add("/0.tar", make_shard(samples))
    monkeypatch.setenv("AIS_ENDPOINT", service.base)
    monkeypatch.setenv("AIS_CLIENT_CA", str(pair / "ca.pem"))
    got = {sample["__key__"]: sample["bin"] for sample in wds.WebDataset("ais://b/0.tar", shardshuffle=False)}
    assert got == {key: sample["bin"] for key, sample in samples.items()}
