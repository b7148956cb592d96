"""Reading from AIStore as users do, against the double."""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.clouds.ais import ais, no_settings  # noqa: F401 - fixtures
from tests.servers import Tls
from tests.servers.aistore import AisDouble
from tests.servers.shards import make_tar
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, spans
from wds_async.errors import AccessDenied, ConfigError, ShardNotFound, TransferError
from wds_async.transfer.reader import open_shards

SIZE = 700_000  # three parts of `quick`


def samples(key: str) -> bytes:
    return make_tar([(f"{key}-{i}.txt", f"{key} {i}".encode()) for i in range(3)])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("url", "place"),
    [("ais://@u1#ns/b/x", "ais/@u1#ns/b/x"), ("ais://#ns/b/x", "ais/@#ns/b/x"), ("ais://@u1/b/x", "ais/@u1#/b/x")],
)
def test_namespaces_by_both_ways(ais: AisDouble, url: str, place: str, direct: bool) -> None:
    body = data(SIZE)
    ais.put(place, body)
    assert bytes_of([url], quick(direct=direct)) == [body]
    assert max(stop - start for start, stop in spans(ais.at("t*"))) <= 256 * KIB


@pytest.mark.parametrize("direct", [True, False])
def test_clouds_are_read_through_the_cluster(ais: AisDouble, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    monkeypatch.setenv("USE_AIS_FOR", "gs:s3:az")
    urls = {
        "gs://b/g": "gcp/b/g",
        "gcs://b/h": "gcp/b/h",
        "s3://b/s": "aws/b/s",
        "s3a://b/t": "aws/b/t",
        "az://c/a": "azure/c/a",
        "abfss://c@account.dfs.core.windows.net/d/b": "azure/c/d/b",
    }
    for i, place in enumerate(urls.values()):
        ais.put(place, data(1000, i))
    assert bytes_of(urls, quick(direct=direct)) == [data(1000, i) for i in range(len(urls))]


def test_samples_as_a_user_reads_them(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_AIS_FOR", "gs")
    for i in range(4):
        ais.put(f"gcp/b/x-{i}.tar", samples(str(i)))
    got = [sample["txt"].decode() for sample in wds.WebDataset("gs://b/x-{0..3}.tar", shardshuffle=False)]
    assert got == [f"{i} {j}" for i in range(4) for j in range(3)]


def test_each_part_asks_the_proxy_and_its_range_arrives(ais: AisDouble) -> None:
    ais.put("ais/b/x", data(SIZE))
    assert bytes_of(["ais://b/x"]) == [data(SIZE)]
    asked, served = (Counter(start for start, _ in spans(ais.at(node))) for node in ("proxy", "t*"))
    assert served <= asked  # what lay behind the end, or was cut to it, was left at the proxy
    assert len(ais.at("t*")) >= 3


def test_a_target_dies_after_the_head(ais: AisDouble) -> None:
    body = data(SIZE)
    ais.put("ais/b/x", body)
    cut = ais.script("t*", cut_at=10_000)
    assert bytes_of(["ais://b/x"]) == [body]
    assert cut.times == 0
    assert any(start % (64 * KIB) == 10_000 for start, _ in spans(ais.at("t*")))  # went on behind what had come


def test_a_target_dies_for_good_and_another_goes_on(ais: AisDouble) -> None:
    """The proxy goes on naming the dead one until it notices, which is after the client has seen it fail."""
    body = data(SIZE)
    ais.put("ais/b/x", body)
    ais.put("ais/b/other", body)
    assert bytes_of(["ais://b/x"]) == [body]
    home = ais.at("t*")[0].node
    ais.kill(home, noticed=False)
    seen = len(ais.at("proxy"))

    def notice() -> None:
        while len(ais.at("proxy")) < seen + 2:
            threading.Event().wait(0.005)
        ais.notice(home)

    watcher = threading.Thread(target=notice, daemon=True)
    watcher.start()
    from wds_async.config import RetryPolicy

    patient = quick(retry=RetryPolicy(max_attempts=50, base_s=0.001, cap_s=0.02))
    assert bytes_of(["ais://b/x"], patient) == [body]
    watcher.join(5)


@pytest.mark.parametrize("status", [409, 429, 503, 507])
@pytest.mark.parametrize("node", ["proxy", "t*"])
def test_a_busy_cluster_is_waited_for(ais: AisDouble, node: str, status: int) -> None:
    ais.put("ais/b/x", data(1000))
    scripted = ais.script(node, status=status, times=2, message="busy", headers={"Retry-After": "0"})
    assert bytes_of(["ais://b/x"]) == [data(1000)]
    assert scripted.times == 0


# -- tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_the_token_stays_at_the_proxy(ais: AisDouble, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    ais.token = "s3cret"
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "s3cret")
    ais.put("ais/b/x", data(SIZE))
    assert bytes_of(["ais://b/x"], quick(direct=direct)) == [data(SIZE)]
    assert {seen.authorization for seen in ais.at("proxy")} == {"Bearer s3cret"}
    assert {seen.authorization for seen in ais.at("t*")} == {""}


def test_a_token_file_that_is_renewed_while_reading(ais: AisDouble, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "token.json"
    path.write_text(json.dumps({"token": "old"}))
    monkeypatch.setenv("AIS_AUTHN_TOKEN_FILE", str(path))
    ais.token = "old"
    body = data(4 * SIZE)
    ais.put("ais/b/x", body)

    def renew() -> None:
        ais.token = "new"
        path.write_text(json.dumps({"token": "new"}))

    ais.script("t*", cut_at=50_000, then=renew)
    assert bytes_of(["ais://b/x"]) == [body]
    assert ais.at("proxy")[-1].authorization == "Bearer new"


def test_a_token_file_of_somebody_else(ais: AisDouble, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "ais" / "cli"
    folder.mkdir(parents=True)
    (folder / "auth.token").write_text('{"token": "stale"}')
    ais.token = "right"
    ((_, error),) = outcomes(["ais://b/x"])
    assert isinstance(error, AccessDenied)
    assert f"token file {folder / 'auth.token'}" in str(error)
    asked = Counter(seen.range for seen in ais.at("proxy"))
    assert 1 < max(asked.values()) <= 4  # asked again, for it may have been renewed, but not for ever


@pytest.mark.parametrize("lapses", [True, False])
def test_signatures_that_lapse_are_asked_for_anew(
    no_settings: None, monkeypatch: pytest.MonkeyPatch, lapses: bool
) -> None:
    """All signatures that are out lapse at once, or a target refuses one. Both together could refuse a part twice,
    which is final: a target that refuses a new signature refuses all."""
    with AisDouble(signs=True) as double:
        monkeypatch.setenv("AIS_ENDPOINT", double.endpoint)
        body = data(4 * SIZE)
        double.put("ais/b/x", body)
        if lapses:
            double.script("t*", cut_at=1000, then=double.lapse)
        else:
            double.script("t*", status=401, message="invalid or expired signature")
        # A busy machine asks twice for what is late, and both could be refused.
        assert bytes_of(["ais://b/x"], quick(hedge_share=0.0)) == [body]


# -- what has no ranges ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_members_and_transforms_are_streamed(ais: AisDouble, direct: bool) -> None:
    member = data(SIZE)
    ais.put("ais/b/x.tar", make_tar([("a b.jpg", member), ("k.txt", b"1"), ("k.cls", b"2")]))
    ais.etls["up"] = lambda body, args: args.encode() + body[::-1]
    ais.put("ais/b/y", b"abc")
    urls = [
        "ais://b/x.tar?archpath=a%20b.jpg",
        "ais://b/x.tar?archpath=a b.jpg",
        "ais://b/y?etl_name=up&etl_args=%7B1%26%7D",
        "ais://b/x.tar?archregx=k&archmode=wdskey",
    ]
    got = bytes_of(urls, quick(direct=direct))
    assert got[:3] == [member, member, b"{1&}cba"]
    assert got[3] == make_tar([("k.txt", b"1"), ("k.cls", b"2")])
    assert {seen.range for seen in ais.seen} == {""}


def test_a_streamed_member_is_begun_again(ais: AisDouble) -> None:
    member = data(SIZE)
    ais.put("ais/b/x.tar", make_tar([("a", member)]))
    ais.script("t*", cut_at=300_000)
    ais.script("proxy", status=503, message="busy")
    assert bytes_of(["ais://b/x.tar?archpath=a"]) == [member]


def test_a_missing_member_and_a_missing_transform(ais: AisDouble) -> None:
    ais.put("ais/b/x.tar", make_tar([("a", b"1")]))
    found = outcomes(["ais://b/x.tar?archpath=none", "ais://b/x.tar?etl_name=none"])
    assert [type(error) for _, error in found] == [ShardNotFound, ShardNotFound]
    assert "?archpath=" in str(found[0][1])
    assert "Start that ETL" in str(found[1][1])


# -- TLS and proxies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_tls(no_settings: None, tls: Tls, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    with AisDouble(tls=tls.server_context()) as double:
        double.put("ais/b/x", data(SIZE))
        monkeypatch.setenv("AIS_ENDPOINT", double.endpoint)
        ((_, error),) = outcomes(["ais://b/x"], quick(direct=direct))
        assert isinstance(error, TransferError)
        assert "AIS_CLIENT_CA" in str(error)
        monkeypatch.setenv("AIS_CLIENT_CA", str(tls.ca))
        assert bytes_of(["ais://b/x"], quick(direct=direct)) == [data(SIZE)]
        monkeypatch.setenv("AIS_CLIENT_CA", "")
        monkeypatch.setenv("AIS_SKIP_VERIFY_CRT", "1")
        assert bytes_of(["ais://b/x"], quick(direct=direct)) == [data(SIZE)]


@pytest.mark.parametrize("direct", [True, False])
def test_a_certificate_that_cannot_be_read(
    ais: AisDouble, monkeypatch: pytest.MonkeyPatch, tls: Tls, direct: bool
) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", ais.endpoint.replace("http", "https"))
    monkeypatch.setenv("AIS_CRT", "/nowhere/cert.pem")
    ((_, error),) = outcomes(["ais://b/x"], quick(direct=direct))
    assert isinstance(error, ConfigError)
    assert "/nowhere/cert.pem" in str(error)


# -- the bucket itself -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The endpoint of an S3 service."""
    moto = pytest.importorskip("moto.server", reason="pip install moto[server]")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def ask(endpoint: str, method: str, path: str, body: bytes = b"") -> None:
    with contextlib.closing(http.client.HTTPConnection(endpoint.removeprefix("http://"))) as connection:
        connection.request(method, path, body)
        assert connection.getresponse().status == 200


@pytest.fixture
def fallback(bucket: str, no_settings: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], str]:
    """``fallback(body)`` puts ``body`` into the bucket itself, and gives its URL."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    settings = {"ENDPOINT_URL": bucket, "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("USE_AIS_FOR", "s3")
    monkeypatch.setenv("WDS_AIS_FALLBACK", "1")

    def make(body: bytes) -> str:
        ask(bucket, "POST", "/moto-api/reset")
        ask(bucket, "PUT", "/bucket")
        ask(bucket, "PUT", "/bucket/x", body)
        return "s3://bucket/x"

    return make


def test_without_a_cluster_the_bucket_is_read(
    no_settings: None, fallback: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with AisDouble() as double:
        monkeypatch.setenv("AIS_ENDPOINT", double.endpoint)
    caplog.set_level(logging.WARNING)
    assert bytes_of([fallback(data(SIZE))] * 2) == [data(SIZE)] * 2
    assert sum("reading from its own store" in record.message for record in caplog.records) == 1


def test_with_dead_targets_the_bucket_is_read(ais: AisDouble, fallback: Callable[[bytes], str]) -> None:
    ais.put("aws/bucket/x", data(SIZE))
    ais.kill("t0", noticed=False)
    ais.kill("t1", noticed=False)
    assert bytes_of([fallback(data(SIZE))]) == [data(SIZE)]


def test_without_targets_the_bucket_is_read(ais: AisDouble, fallback: Callable[[bytes], str]) -> None:
    ais.put("aws/bucket/x", data(SIZE))
    ais.kill("t0")
    ais.kill("t1")
    assert bytes_of([fallback(data(SIZE))]) == [data(SIZE)]


def test_a_cluster_that_dies_in_the_middle_of_a_shard(ais: AisDouble, fallback: Callable[[bytes], str]) -> None:
    body = data(10 * SIZE)
    ais.put("aws/bucket/x", body)

    def die() -> None:
        ais.script("proxy", status=503, message="gone", times=10_000)

    ais.script("t*", cut_at=30_000, then=die)
    assert bytes_of([fallback(body)]) == [body]


def test_a_span_goes_on_in_the_bucket(ais: AisDouble, fallback: Callable[[bytes], str]) -> None:
    """A version that the cluster gave says nothing of the bucket's object but its size."""
    body = data(10 * SIZE)
    ais.put("aws/bucket/x", body)
    url = fallback(body)
    with open_shards([url], config=quick()) as reader:
        shard = next(reader)
        assert shard.read()
        version = shard.version

    def die() -> None:
        ais.script("proxy", status=503, message="gone", times=10_000)

    ais.script("t*", cut_at=30_000, then=die)
    assert bytes_of([{"url": url, "start": 1000, "stop": 9 * SIZE, "version": version}]) == [body[1000 : 9 * SIZE]]


def test_what_is_missing_is_not_looked_for_elsewhere(ais: AisDouble, fallback: Callable[[bytes], str]) -> None:
    ais.put("aws/bucket/other", b"x")
    ((_, error),) = outcomes([fallback(b"x")])
    assert isinstance(error, ShardNotFound)
