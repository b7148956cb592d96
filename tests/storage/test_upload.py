"""Uploads arrive whole, are tried again, and keep their secrets."""

from __future__ import annotations

import base64
import glob
import http.server
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import moto as moto_server
from tests.servers.azurite import ACCOUNT, Azurite, azure_environment_fixture, azurite_fixture  # noqa: F401
from tests.storage.locations import location_of
from tests.writing import memory
from wds_async.errors import AccessDenied, MissingExtra, ShardNotFound, StorageError, TransferError
from wds_async.storage.sink import open_sink
from wds_async.storage.upload import MultipartSink, StoreSink
from wds_async.transfer.reader import open_shards

clean_aws, moto = moto_server.clean_aws, moto_server.moto


class Store(http.server.ThreadingHTTPServer):
    """Takes PUTs; ``script`` holds the statuses to answer first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[tuple[int, dict[str, str]]] = []
        self.objects: dict[str, bytes] = {}
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_PUT(self) -> None:
        self.server.headers.append(dict(self.headers))
        status, fields = self.server.script.pop(0) if self.server.script else (201, {})
        if status == 413:  # as servers do: answered and closed before the body was read
            self.close_connection = True
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if status < 300:
                self.server.objects[self.path] = body
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"so so\n")

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


@pytest.fixture(autouse=True)
def leaves_no_temporary_file(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("tmpdir")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert glob.glob(f"{folder}/wds-async*") == []


def put(url: str, data: bytes, **kw: Any) -> None:
    sink = open_sink(url, **kw)
    try:
        sink.write(data)
        sink.commit()
    finally:
        sink.abort()


def test_a_put_has_a_length_and_the_credentials_of_its_url(store: Store) -> None:
    put(store.url.replace("//", "//me:secret@") + "/a/x.tar?sig=1", b"x" * 3_000_000, options={"headers": {"X-A": "1"}})
    assert store.objects == {"/a/x.tar?sig=1": b"x" * 3_000_000}
    (headers,) = store.headers
    assert headers["Content-Length"] == "3000000"
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()
    assert headers["X-A"] == "1"


def test_what_can_heal_is_tried_again(store: Store) -> None:
    store.script = [(503, {"Retry-After": "0"}), (500, {}), (201, {})]
    put(store.url + "/x", b"data")
    assert store.objects == {"/x": b"data"}
    assert len(store.headers) == 3


@pytest.mark.parametrize(
    ("status", "error"), [(403, AccessDenied), (404, ShardNotFound), (413, TransferError), (400, TransferError)]
)
def test_what_cannot_heal_is_an_error_at_once(store: Store, status: int, error: type[Exception]) -> None:
    store.script = [(status, {})]
    with pytest.raises(error, match=f"/x.*answered {status}") as info:
        put(store.url + "/x?sig=hush", bytes(20_000_000))
    assert "hush" not in str(info.value)
    assert len(store.headers) == 1


def test_it_gives_up_after_the_attempts_of_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_RETRIES", "2")
    store.script = [(503, {})] * 9
    with pytest.raises(TransferError, match="after 2 attempts"):
        put(store.url + "/x", b"data")
    assert len(store.headers) == 2


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_RETRIES", "1")
    with pytest.raises(TransferError, match="refused"):
        put("http://127.0.0.1:9/x", b"data")


def test_a_redirect_is_followed_without_the_credentials(store: Store) -> None:
    with Store() as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        store.script = [(307, {"Location": f"{store.url}/y"}), (307, {"Location": f"{other.url}/z"})]
        put(store.url.replace("//", "//me:secret@") + "/x", b"data", options={"headers": {"X-Key": "hush"}})
        other.shutdown()
        thread.join()
    assert other.objects == {"/z": b"data"}
    assert ["Authorization" in headers for headers in (*store.headers, *other.headers)] == [True, True, False]
    assert "X-Key" not in other.headers[0]


def test_redirects_in_a_circle_end(store: Store) -> None:
    store.script = [(307, {"Location": "/x"})] * 20
    with pytest.raises(TransferError, match="redirects in a circle"):
        put(store.url + "/x", b"data")


def test_a_proxy_is_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", store.url.replace("//", "//me:secret@"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    put("http://example.invalid/x", b"data")
    assert store.objects == {"http://example.invalid/x": b"data"}
    assert store.headers[0]["Proxy-Authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()
    assert "Authorization" not in store.headers[0]


def test_an_aborted_put_sends_nothing(store: Store) -> None:
    sink = open_sink(store.url + "/x")
    sink.write(b"data")
    sink.abort()
    sink.commit()
    assert store.headers == []


def test_a_full_temporary_folder_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_sink(store.url + "/x")
    sink._file.close()  # type: ignore[attr-defined]
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sink, "_file", full)
        with pytest.raises(StorageError, match=r"gathered in .*No space left.*TMPDIR"):
            sink.write(b"data")
        sink.abort()


# -- fsspec ---------------------------------------------------------------------------------------------------------


def test_an_object_gets_its_name_when_it_is_complete() -> None:
    files = memory()
    sink = open_sink("memory://a/x.tar")
    sink.write(b"first")
    assert files.find("/") == []
    sink.commit()
    put("memory://a/x.tar", b"second")
    assert {name: files.cat(name) for name in files.find("/")} == {"/a/x.tar": b"second"}


def test_a_store_that_fails_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    files = memory()
    files.pipe("/x", b"before")
    sink = StoreSink(location_of("memory://x?token=hush"), files, "/x")
    sink.write(b"data")

    def broken(*args: Any) -> None:
        raise OSError("the network went away")

    monkeypatch.setattr(files, "mv", broken)
    with pytest.raises(TransferError, match="at byte 4: the network went away") as info:
        sink.commit()
    assert "hush" not in str(info.value)
    assert files.find("/") == ["/x"]
    assert files.cat("/x") == b"before"


def test_a_chain_of_filesystems(tmp_path: Path) -> None:
    put(f"simplecache::file://{tmp_path}/x.tar", b"data")
    assert (tmp_path / "x.tar").read_bytes() == b"data"


@pytest.mark.parametrize(("url", "extra"), [("s3://b/x", "s3"), ("gs://b/x", "gcs"), ("az://b/x", "azure")])
def test_an_extra_that_is_not_installed_is_named(url: str, extra: str) -> None:
    package = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}[extra]
    if __import__("importlib.util").util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingExtra, match=rf'pip install "wds-async\[{extra}\]"'):
        open_sink(url)


def parts_of(files: Any) -> type:
    """A file of fsspec's own upload machinery that keeps what it was asked to do, as s3fs's and gcsfs's files do."""
    from fsspec.spec import AbstractBufferedFile

    class File(AbstractBufferedFile):
        done: list[str]

        def _initiate_upload(self) -> None:
            self.done = ["begin"]

        def _upload_chunk(self, final: bool = False) -> bool:
            self.done.append(f"{len(self.buffer.getvalue())}{' last' if final else ''}")
            if final and self.autocommit:
                self.commit()
            return True

        def commit(self) -> None:
            self.done.append("complete")

        def discard(self) -> None:
            self.done.append("aborted")

    return File


@pytest.mark.parametrize("transactional", [True, False])
def test_a_multipart_upload_is_completed_or_aborted(transactional: bool) -> None:
    files = memory()
    kind = parts_of(files)
    for end in ("commit", "abort"):
        stream = kind(files, "/x", "wb", block_size=100, autocommit=not transactional)
        sink = MultipartSink(location_of("s3://b/x"), stream, transactional=transactional)
        sink.write(b"x" * 120)
        sink.write(b"y" * 20)
        getattr(sink, end)()
        sink.abort()
        sink.commit()
        if end == "commit":
            assert stream.done == ["begin", "120", "20 last", "complete"]
        else:
            assert stream.done == ["begin", "120", *(["aborted"] if transactional else [])]
        stream.close()  # as garbage collection does
        assert stream.done.count("complete") == (end == "commit")


def test_an_upload_that_fails_is_aborted() -> None:
    files = memory()
    stream = parts_of(files)(files, "/x", "wb", block_size=100, autocommit=False)
    sink = MultipartSink(location_of("s3://b/x?sig=hush"), stream, transactional=True)
    sink.write(b"x" * 120)

    def broken() -> None:
        raise PermissionError("who are you")

    stream.commit = broken
    with pytest.raises(AccessDenied, match="at byte 120") as info:
        sink.commit()
    assert "hush" not in str(info.value)
    assert stream.done[-1] == "aborted"


# -- S3, where its packages are installed ---------------------------------------------------------------------------


@pytest.fixture
def bucket(moto: str, clean_aws: pytest.MonkeyPatch) -> Any:
    """A bucket of a server that speaks S3's protocol, and the client that looks into it."""
    pytest.importorskip("s3fs")
    settings = {**moto_server.CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": moto}
    for name, value in settings.items():
        clean_aws.setenv(name, value)
    moto_server.reset(moto)  # what it holds, all of its servers in this process hold
    client = pytest.importorskip("boto3").client("s3")
    client.create_bucket(Bucket="bucket")
    return client


@pytest.mark.parametrize("size", [0, 1000, 12 << 20])
def test_s3_objects_are_whole_or_not_there(bucket: Any, size: int) -> None:
    options = {"default_block_size": 5 << 20, "skip_instance_cache": True}
    for name in ("whole", "half"):
        sink = open_sink(f"s3://bucket/{name}", options=options)
        for at in range(0, size, 1 << 20):
            sink.write(b"x" * min(1 << 20, size - at))
        if size > 5 << 20:
            assert len(bucket.list_multipart_uploads(Bucket="bucket")["Uploads"]) == 1
        sink.commit() if name == "whole" else sink.abort()
    assert [(o["Key"], o["Size"]) for o in bucket.list_objects_v2(Bucket="bucket")["Contents"]] == [("whole", size)]
    assert "Uploads" not in bucket.list_multipart_uploads(Bucket="bucket")


def test_s3_without_credentials(bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDenied, match=r"s3://bucket/x.*AWS_ACCESS_KEY_ID"):
        put("s3://bucket/x", b"data")
    with pytest.raises(AccessDenied, match="AWS_PROFILE"):
        put("s3://bucket/x", b"data", options={"profile": "none"})


def test_s3_without_the_bucket(bucket: Any) -> None:
    with pytest.raises(ShardNotFound, match="s3://missing/x: there is no such bucket"):
        put("s3://missing/x", b"data", options={"skip_instance_cache": True})


@pytest.mark.servers
def test_a_blobs_own_address_is_written_with_its_accounts_credentials(
    azurite: Azurite, azure_environment: pytest.MonkeyPatch
) -> None:
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    azurite.put("addressed", {})
    url = f"https://{ACCOUNT}.blob.core.windows.net/addressed/a%20b.tar"
    sink = open_sink(url)
    sink.write(b"whole")
    sink.commit()
    with azurite.client() as client:
        assert client.get_blob_client("addressed", "a b.tar").download_blob().readall() == b"whole"
    with open_shards([url]) as opened:
        assert bytes(next(iter(opened)).read() or b"") == b"whole"
