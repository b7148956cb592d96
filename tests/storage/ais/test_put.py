"""Writing to AIStore."""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

from typing import Any

import pytest

from tests.clouds.ais import ais, no_settings  # noqa: F401 - fixtures
from tests.servers import Tls
from tests.servers.aistore import AisDouble
from tests.storage.locations import location_of
from tests.transfer.reading import data
from wds_async.errors import AccessDenied, ShardNotFound, TransferError, UrlError
from wds_async.storage.ais.put import AisSink


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_RETRIES", "3")


def write(url: str, body: bytes, options: dict[str, Any] | None = None) -> None:
    sink = AisSink(location_of(url, options))
    sink.write(body[:100])
    sink.write(body[100:])
    sink.commit()


@pytest.mark.parametrize(
    ("url", "place"),
    [("ais://b/d/a b#?.tar", "ais/b/d/a b#?.tar"), ("gs://new/x", "gcp/new/x"), ("s3://new/x", "aws/new/x")],
)
def test_written(ais: AisDouble, url: str, place: str) -> None:
    ais.put("ais/b/other", b"")
    body = data(2_000_000)
    write(url, body)
    assert ais.get(place) == body


def test_the_body_and_the_token_go_to_one_each(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    ais.token = "s3cret"
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "s3cret")
    ais.put("ais/b/other", b"")
    write("ais://b/x", b"0123")
    assert [seen.authorization for seen in ais.at("proxy", "PUT")] == ["Bearer s3cret"]
    assert [seen.authorization for seen in ais.at("t*", "PUT")] == [""]


@pytest.mark.parametrize("node", ["proxy", "t*"])
def test_tried_again(ais: AisDouble, node: str) -> None:
    ais.put("ais/b/other", b"")
    ais.script(node, method="PUT", status=503, message="busy")
    write("ais://b/x", data(500_000))
    assert ais.get("ais/b/x") == data(500_000)
    assert len(ais.at("proxy", "PUT")) == 2


def test_errors(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardNotFound, match="no such bucket in this cluster"):
        write("ais://nowhere/x", b"1")
    ais.put("ais/b/other", b"")
    ais.script("t*", method="PUT", status=507, message="out of space", times=9)
    with pytest.raises(TransferError, match=r"out of space.*no room left"):
        write("ais://b/x", b"1")
    ais.token = "right"
    with pytest.raises(AccessDenied, match=r"no token.*AIS_AUTHN_TOKEN"):
        write("ais://b/x", b"1")
    with AisDouble() as gone:
        monkeypatch.setenv("AIS_ENDPOINT", gone.endpoint)
    with pytest.raises(TransferError, match=r"refused.*AIS_ENDPOINT"):
        write("ais://b/x", b"1")


@pytest.mark.parametrize("url", ["ais://b", "ais://b/", "ais://b/d/", "ais://b/x?archpath=y"])
def test_what_names_no_object(ais: AisDouble, url: str) -> None:
    with pytest.raises(UrlError, match="names no object to write"):
        AisSink(location_of(url))


def test_tls_by_options(no_settings: None, tls: Tls) -> None:
    with AisDouble(tls=tls.server_context()) as double:
        double.put("ais/b/other", b"")
        write("ais://b/x", data(300_000), {"endpoint": double.endpoint, "ca_file": str(tls.ca)})
        assert double.get("ais/b/x") == data(300_000)


def test_our_own_service_only_reads(monkeypatch: pytest.MonkeyPatch, no_settings: None) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", "unix:/run/s.sock")
    with pytest.raises(UrlError, match=r"the service at unix:/run/s\.sock only reads"):
        AisSink(location_of("gs://b/x"))
