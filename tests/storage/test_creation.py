"""An object is created only where there is none, and of many writers exactly one has created it."""

from __future__ import annotations

import base64
import errno
import hashlib
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import moto as moto_server
from tests.servers.aistore import AisDouble
from tests.servers.azurite import ACCOUNT, Azurite, azure_environment_fixture, azurite_fixture  # noqa: F401
from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs  # noqa: F401
from tests.servers.nginx import Nginx
from tests.servers.others import PACKAGES, Other
from tests.servers.radosgw import KEY, SECRET, radosgw  # noqa: F401
from tests.storage.racing import race
from tests.writing import memory
from wds_async.errors import AccessDenied, ShardNotFound, TransferError, UrlError
from wds_async.reading.url_files import gopen
from wds_async.storage import sink
from wds_async.storage.sink import publish_new

clean_aws, moto = moto_server.clean_aws, moto_server.moto
_PROCESSES = 20


@pytest.fixture(autouse=True)
def servers_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_honoured", set())


def content(url: str) -> bytes:
    with gopen(url) as stream:
        return bytes(stream.read())


def check(url: str) -> None:
    """Create, fail to create again, and read what the first one wrote."""
    assert publish_new(url, b"first")
    assert not publish_new(url, b"second and longer")
    assert content(url) == b"first"


def check_race(*urls: str) -> None:
    """Twenty processes create each object: one is told so, and its bytes are there."""
    for url, results in race(list(urls), _PROCESSES).items():
        assert sorted(map(str, results)) == ["False"] * (_PROCESSES - 1) + ["True"], (url, results)
        assert content(url) == b"%d" % results.index(True)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    check(f"{tmp_path}/deep/er/record.json")
    assert os.listdir(tmp_path / "deep" / "er") == ["record.json"]
    check_race(f"{tmp_path}/race.json", f"file:{tmp_path}/race2.json")
    assert sorted(os.listdir(tmp_path)) == ["deep", "race.json", "race2.json"]


def test_a_file_system_without_links_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UrlError, match="no links"):
        publish_new(f"{tmp_path}/record.json", b"x")
    assert os.listdir(tmp_path) == []


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def linked_before(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", linked_before)
    assert publish_new(f"{tmp_path}/record.json", b"x")
    assert not publish_new(f"{tmp_path}/record.json", b"y")
    assert (tmp_path / "record.json").read_bytes() == b"x"


def test_a_device_is_there_already() -> None:
    assert not publish_new("/dev/null", b"x")


@pytest.mark.parametrize("url", ["-", "pipe:cat > /dev/null"])
def test_commands_create_nothing(url: str) -> None:
    with pytest.raises(UrlError, match="only where there is none"):
        publish_new(url, b"x")


# -- object stores -----------------------------------------------------------------------------------------------------


def test_s3(moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    moto_server.empty_bucket(moto, clean_aws)
    check("s3://bucket/_wds/job/0.json")
    with pytest.raises(ShardNotFound, match="s3://missing/x"):
        publish_new("s3://missing/x", b"x")


def test_s3_of_ceph(radosgw: Any, clean_aws: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name, value in {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "ENDPOINT_URL": radosgw.base}.items():
        clean_aws.setenv(f"AWS_{name}", value)
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3 = pytest.importorskip("boto3")
    boto3.session.Session().client("s3").create_bucket(Bucket="creation")
    check("s3://creation/_wds/job/0.json")
    check_race("s3://creation/race")
    clean_aws.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied, match="SignatureDoesNotMatch"):
        publish_new("s3://creation/other", b"x")


def test_s3_races(moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    moto_server.empty_bucket(moto, clean_aws)
    check_race("s3://bucket/race")


def test_google(fake_gcs: FakeGcs, clean_google: pytest.MonkeyPatch) -> None:  # noqa: F811
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    bucket = fake_gcs.bucket("creation")
    check(f"gs://{bucket}/_wds/job/a b#0.json")
    check_race(f"gs://{bucket}/race")
    with pytest.raises(ShardNotFound):
        publish_new("gs://no-such-bucket/x", b"x")


def test_azure(azurite: Azurite, azure_environment: pytest.MonkeyPatch) -> None:
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    azurite.put("creation", {})
    check("az://creation/_wds/job/a b 0.json")
    check_race("az://creation/race")
    with pytest.raises(ShardNotFound, match="ContainerNotFound"):
        publish_new("az://missing-one/x", b"x")


def test_sftp(tmp_path: Path) -> None:
    for name in PACKAGES["sftp"]:
        pytest.importorskip(name)
    with Other("sftp", tmp_path) as server:
        check(server.url("a/record.json"))
        assert os.listdir(tmp_path / "a") == ["record.json"]
        check_race(server.url("a/race.json"))
        assert sorted(os.listdir(tmp_path / "a")) == ["race.json", "record.json"]
        with pytest.raises(AccessDenied):
            publish_new(server.url("x", password="wrong"), b"x")


def test_a_server_that_cannot_is_an_error(tmp_path: Path) -> None:
    for name in PACKAGES["ftp"]:
        pytest.importorskip(name)
    cannot = pytest.raises(UrlError, match="cannot create an object only where there is none")
    with Other("ftp", tmp_path) as server, cannot:
        publish_new(server.url("record.json"), b"x")
    assert os.listdir(tmp_path) == []


def test_memory() -> None:
    memory()
    assert publish_new("memory://a/x", b"first")
    assert not publish_new("memory://a/x", b"second")
    assert content("memory://a/x") == b"first"


# -- web servers -------------------------------------------------------------------------------------------------------


class Store(http.server.ThreadingHTTPServer):
    """Takes PUTs, with or without their condition; ``script`` holds the statuses to answer first, 0 for none after the
    object was stored."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[int] = []
        self.honours = True
        self.objects: dict[str, bytes] = {}
        self.seen: list[str] = []
        self.deciding = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_PUT(self) -> None:
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        status = server.script.pop(0) if server.script else 201
        server.seen.append("PUT")
        with server.deciding:
            if status in (0, 201):
                taken = server.honours and self.headers["If-None-Match"] == "*" and self.path in server.objects
                if taken:
                    status = 412
                else:
                    server.objects[self.path] = body
        if status == 0:
            self.close_connection = True
            return
        self._answer(status)

    def do_HEAD(self) -> None:
        self.server.seen.append("HEAD")
        self._answer(200 if self.path in self.server.objects else 404)

    def do_GET(self) -> None:
        self._answer(200, self.server.objects[self.path])

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        if body or self.command == "HEAD":
            self.send_header("ETag", '"1"')
        if self.server.objects.get(self.path) is not None and self.command == "HEAD":
            digest = base64.b64encode(hashlib.sha256(self.server.objects[self.path]).digest()).decode()
            self.send_header("Repr-Digest", f"sha-256=:{digest}:")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_web_server_that_honours_the_condition(store: Store) -> None:
    check(f"{store.url}/a/x.json")
    assert store.seen == ["HEAD", "PUT", "PUT", "PUT"], "it is tried once"
    check_race(f"{store.url}/race")


def test_a_web_server_that_replaces_objects_is_an_error(store: Store) -> None:
    store.honours = False
    with pytest.raises(UrlError, match="its server replaces an object"):
        publish_new(f"{store.url}/x", b"first")
    store.objects["/y"] = b"before"
    assert not publish_new(f"{store.url}/y", b"first")
    assert store.objects["/y"] == b"before"


def test_nginx_replaces_objects(nginx: Callable[..., Nginx], tmp_path: Path) -> None:
    server = nginx(tmp_path, extra="dav_methods PUT DELETE; create_full_put_path on;")
    with pytest.raises(UrlError, match="its server replaces an object"):
        publish_new(server.url("a/record.json"), b"x")


def test_a_lost_answer_does_not_make_a_loser(store: Store) -> None:
    assert publish_new(f"{store.url}/0", b"x")
    store.script = [0]
    assert publish_new(f"{store.url}/1", b"ours"), "the second attempt finds the work of the first"
    store.objects["/2"] = b"theirs"
    store.script = [503]
    assert not publish_new(f"{store.url}/2", b"ours")
    assert store.objects["/2"] == b"theirs"


@pytest.mark.parametrize("script", [[201, 503], [0, 503], [503, 201, 503], [201, 429, 503]])
def test_a_fault_does_not_make_a_server_one_that_replaces(store: Store, script: list[int]) -> None:
    store.script = list(script)
    assert publish_new(f"{store.url}/x", b"ours"), "the attempt that is to be refused finds our own object"
    assert not publish_new(f"{store.url}/x", b"second")
    assert store.objects["/x"] == b"ours"


def test_it_gives_up_after_the_attempts_of_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_RETRIES", "2")
    store.script = [503] * 9
    with pytest.raises(TransferError, match=r"/x.*after 2 attempts"):
        publish_new(f"{store.url}/x?sig=hush", b"x")
    store.script = [403]
    with pytest.raises(AccessDenied) as info:
        publish_new(f"{store.url}/x?sig=hush", b"x")
    assert "hush" not in str(info.value)


def test_aistore_that_ignores_the_condition_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with AisDouble() as cluster:
        monkeypatch.setenv("AIS_ENDPOINT", cluster.endpoint)
        cluster.put("ais/bucket/other", b"x")
        with pytest.raises(UrlError, match="its server replaces an object"):
            publish_new("ais://bucket/record.json", b"x")
