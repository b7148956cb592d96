"""What AIStore's URLs and settings mean."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.clouds.ais import no_settings  # noqa: F401 - a fixture
from wds_async.errors import ConfigError, UrlError
from wds_async.logs import Once
from wds_async.storage.ais.urls import OPTIONS, AisObject, Cluster, has_own_store, read_token, routes

pytestmark = pytest.mark.usefixtures("no_settings")

PROXY = "http://p:51080"


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was logged once."""
    monkeypatch.setattr("wds_async.logs._process", Once())


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("ais://b/o", "b/o?provider=ais"),
        ("AIS://b/d/o", "b/d/o?provider=ais"),
        ("ais://b/a b#?&%+é", "b/a%20b%23%3F%26%25%2B%C3%A9?provider=ais"),
        ("ais://@u#n/b/o", "b/o?provider=ais&namespace=%40u%23n"),
        ("ais://@u/b/o", "b/o?provider=ais&namespace=%40u%23"),
        ("ais://#n/b/o", "b/o?provider=ais&namespace=%40%23n"),
        ("gs://b/o", "b/o?provider=gcp"),
        ("gcs://b/o", "b/o?provider=gcp"),
        ("s3a://b/o", "b/o?provider=aws"),
        ("az://c/o", "c/o?provider=azure"),
        ("abfs://c@x.dfs.core.windows.net/o", "c/o?provider=azure"),
        ("oci://b/o", "b/o?provider=oci"),
        ("ais://b/o.tar?archpath=d/x y.jpg", "b/o.tar?provider=ais&archpath=d%2Fx%20y.jpg"),
        ("ais://b/o.tar?archpath=d%2Fx%26.jpg", "b/o.tar?provider=ais&archpath=d%2Fx%26.jpg"),
        ("ais://b/o?etl_name=e&etl_args=%7B%7D", "b/o?provider=ais&etl_name=e&etl_args=%7B%7D"),
        ("gs://b/o?latest-ver=true", "b/o?provider=gcp&latest-ver=true"),
        ("ais://b/o?v=1", "b/o%3Fv%3D1?provider=ais"),
    ],
)
def test_what_the_proxy_is_asked_for(url: str, path: str) -> None:
    assert AisObject.of(url).object_url(PROXY) == f"{PROXY}/v1/objects/{path}"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ais://", "names no bucket"),
        ("ais:///o", "names no bucket"),
        ("ais://a%20b/o", "names no bucket"),
        ("ais://@/b/o", "no namespace"),
        ("ais://@u#n#m/b/o", "no namespace"),
        ("ais://@u#n", "names no bucket"),
        ("http://h/o", "take http out of USE_AIS_FOR"),
    ],
)
def test_urls_that_name_nothing(url: str, words: str) -> None:
    with pytest.raises(UrlError, match=words):
        AisObject.of(url)


def test_what_is_read_in_order_only() -> None:
    assert not AisObject.of("ais://b/o").in_order
    assert not AisObject.of("ais://b/o?latest-ver=true").in_order
    assert AisObject.of("ais://b/o?archpath=x").in_order
    assert AisObject.of("ais://b/o?latest-ver=true&etl_name=x").in_order


@pytest.mark.parametrize("text", ["host:51080", "http://", "ftp://h", "http://h:0", "http://h:x", "http://h/?a=b", "h"])
def test_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", text)
    with pytest.raises(ConfigError, match=r"AIS_ENDPOINT=.*write http://host:51080"):
        Cluster.of({})


@pytest.mark.parametrize(
    ("text", "path"),
    [("unix:/run/s.sock", "/run/s.sock"), (" unix:/a b ", "/a b"), ("unix:///run/s.sock", "/run/s.sock")],
)
def test_an_endpoint_that_is_a_socket(text: str, path: str) -> None:
    cluster = Cluster.of({"endpoint": text})
    assert (cluster.endpoint, cluster.socket, cluster.base) == (f"unix:{path}", path, "http://localhost")
    assert AisObject.of("gs://b/a b").object_url(cluster.base) == "http://localhost/v1/objects/b/a%20b?provider=gcp"
    plain = Cluster.of({"endpoint": PROXY})
    assert (plain.socket, plain.base) == ("", PROXY)


@pytest.mark.parametrize("text", ["unix:", "unix:s.sock", "unix:../s.sock", "unix://host/s.sock", "unix:/" + "a" * 107])
def test_a_socket_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="endpoint="):
        Cluster.of({"endpoint": text})


def test_an_endpoint_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.of({"endpoint": "http://user:MARKED@host:51080"})
    assert "MARKED" not in str(caught.value)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="AIS_ENDPOINT is not set"):
        Cluster.of({})
    for name, value in {
        "ENDPOINT": f"{PROXY}/",
        "SKIP_VERIFY_CRT": "1",
        "CLIENT_CA": "ca",
        "CRT": "c",
        "CRT_KEY": "k",
    }.items():
        monkeypatch.setenv(f"AIS_{name}", value)
    cluster = Cluster.of({})
    assert cluster.endpoint == PROXY
    assert (cluster.tls.verify, cluster.tls.ca_file, cluster.tls.certificate, cluster.tls.key) == (
        False,
        "ca",
        "c",
        "k",
    )
    given = Cluster.of({"endpoint": "https://q/v1", "verify": True, "ca_file": "other", "token": "MARKED"})
    assert given.endpoint == "https://q"
    assert (given.tls.verify, given.tls.ca_file) == (True, "other")
    assert "MARKED" not in repr(given)
    with pytest.raises(ConfigError, match=f"anon means nothing here; it takes {', '.join(list(OPTIONS)[:6])}"):
        Cluster.of({"anon": True})


def test_where_the_token_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_token() == ("", "", "anonymous (no token)")
    default = tmp_path / "config" / "ais" / "cli" / "auth.token"
    default.parent.mkdir(parents=True)
    default.write_text('{"token": "a"}')
    assert read_token() == ("a", str(default), f"token file {default}")
    named = tmp_path / "mine"
    named.write_text('{"token": "b"}')
    monkeypatch.setenv("AIS_AUTHN_TOKEN_FILE", str(named))
    assert read_token()[0] == "b"
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "c")
    assert read_token() == ("c", "", "token of AIS_AUTHN_TOKEN")
    assert read_token("d") == ("d", "", "token of storage_options")


@pytest.mark.parametrize("text", [None, "MARKED", "[]", '{"no": "MARKED"}'])
def test_a_token_file_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "mine"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("AIS_AUTHN_TOKEN_FILE", str(path))
    with pytest.raises(ConfigError, match="AIS_AUTHN_TOKEN_FILE") as caught:
        read_token()
    assert str(path) in str(caught.value)
    assert "MARKED" not in str(caught.value)


def test_routing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert not routes("gs://b/o", {})
    assert caplog.text == ""
    monkeypatch.setenv("AIS_ENDPOINT", PROXY)
    for url in ("gs://b/o", "s3://b/o", "gs://b/p"):
        assert not routes(url, {})
    assert [record.getMessage()[:44] for record in caplog.records] == ["AIS_ENDPOINT is set, but USE_AIS_FOR is not:"]
    assert not routes("http://h/o", {})
    monkeypatch.setenv("USE_AIS_FOR", "gs:s3:http")
    assert routes("gcs://b/o", {})
    assert routes("s3://b/o", {})
    assert not routes("az://b/o", {})
    assert len(caplog.records) == 1
    assert not routes("https://h/o", {})
    assert not routes("http://h/o", {})
    assert "names http, for which AIStore has no provider" in caplog.records[1].getMessage()
    assert len(caplog.records) == 2


def test_routing_without_an_endpoint(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("USE_AIS_FOR", "gs")
    assert routes("gs://b/o", {"endpoint": PROXY})
    caplog.set_level(logging.WARNING)
    assert not routes("gs://b/o", {})
    assert not routes("gs://b/o", {})
    (record,) = caplog.records
    assert record.getMessage().startswith("USE_AIS_FOR names gs, but AIS_ENDPOINT is not set: read from its own store")


def test_what_the_bucket_itself_has() -> None:
    assert has_own_store("gs://b/o")
    assert not has_own_store("gs://b/o?archpath=x")
    assert not has_own_store("ais://b/o")


def test_ais_itself_is_not_said_to_be_read_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("USE_AIS_FOR", raising=False)
    assert not routes("ais://b/x", {})
    assert not caplog.records
