"""What is read and written through fsspec alone: FTP, SFTP and WebDAV by real servers, and filesystems over others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Nginx, Tls, make_shards
from tests.servers import moto as moto_server
from tests.servers.others import PASSWORD, USER, Other, OtherMissing
from tests.servers.process import free_port
from wds_async.errors import AccessDenied, ConfigError, FetchTimeout, ShardNotFound, TransferError, UrlError

clean_aws, moto = moto_server.clean_aws, moto_server.moto
KINDS = ("ftp", "sftp", "webdav")
TWO = "d/shard-{000000..000001}.tar"
WRONG = "wr0ng-Pa55word"


def samples(url: Any, options: dict[str, Any] | None = None, **given: Any) -> list[dict[str, Any]]:
    read = wds.WebDataset(url, shardshuffle=False, storage_options=options, **given)
    return [{name: value for name, value in one.items() if name not in ("__url__", "__local_path__")} for one in read]


@dataclass
class Store:
    """A server with two shards, and how it is named and what it is told."""

    server: Other
    want: list[dict[str, Any]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.server.root / "d"

    def url(self, path: str) -> str:
        return f"webdav://{path}" if self.server.kind == "webdav" else self.server.url(path, user="", password="")

    def options(self, password: str = PASSWORD, port: int = 0) -> dict[str, Any]:
        if self.server.kind == "webdav":
            return {"base_url": f"http://127.0.0.1:{port or self.server.port}", "auth": (USER, password)}
        return {"username": USER, "password": password}


def key_pair(folder: Path) -> Path:
    """A private key in a file, as ssh-keygen writes it."""
    paramiko = pytest.importorskip("paramiko")
    paramiko.ECDSAKey.generate().write_private_key_file(str(folder / "key"))
    return folder / "key"


def running(kind: str, folder: Path) -> Iterator[Store]:
    paths = make_shards(folder / "d", 2, 5, payload=200_000)
    want = samples([str(path) for path in paths])
    try:
        with Other(kind, folder, key_pair(folder) if kind == "sftp" else None) as server:
            yield Store(server, want)
    except OtherMissing as exn:
        if os.environ.get("WDS_REQUIRE_SERVERS") == "1":
            raise
        pytest.skip(str(exn))


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    yield from running(request.param, tmp_path_factory.mktemp(request.param))


def test_shards_by_braces_glob_and_folder(store: Store) -> None:
    assert len(store.want) == 10
    assert samples(store.url(TWO), store.options()) == store.want
    assert samples(store.url("d/shard-*.tar"), store.options()) == store.want
    assert samples(store.url("d/"), {store.server.kind: store.options()}) == store.want


def test_user_and_password_in_the_url(store: Store) -> None:
    if store.server.kind == "webdav":
        with pytest.raises(ConfigError, match="base_url"):
            samples(store.url(TWO))
        return
    assert samples(store.server.url(TWO)) == store.want
    assert samples(store.server.url(TWO, password=PASSWORD.replace("P", "%50"))) == store.want  # percent-encoded
    if store.server.kind == "sftp":
        assert samples(store.server.url(TWO).replace("sftp://", "scp://")) == store.want


def test_a_key_instead_of_a_password(store: Store) -> None:
    if store.server.kind != "sftp":
        pytest.skip("keys are SFTP's")
    given = {"username": USER, "key_filename": str(store.server.key), "allow_agent": False, "look_for_keys": False}
    assert samples(store.url(TWO), given) == store.want


def give_up(url: str, options: dict[str, Any] | None) -> None:
    with wds.TarWriter(url, storage_options=options) as writer:
        writer.write({"__key__": "a", "txt": "x"})
        raise KeyError


def test_a_shard_appears_whole_or_not_at_all(store: Store) -> None:
    before = sorted(os.listdir(store.folder))
    url = store.url("d/new.tar")
    with pytest.raises(KeyError):
        give_up(url, store.options())
    assert sorted(os.listdir(store.folder)) == before
    for text in ("one", "two"):  # the second replaces the first
        with wds.TarWriter(url, storage_options=store.options()) as writer:
            writer.write({"__key__": "a", "txt": text})
            assert sorted(os.listdir(store.folder)) == sorted({*before, *(["new.tar"] if text == "two" else [])})
        assert samples(url, store.options()) == [{"__key__": "a", "txt": text.encode()}]
    assert sorted(os.listdir(store.folder)) == sorted([*before, "new.tar"])
    (store.folder / "new.tar").unlink()


@pytest.mark.parametrize("name", ["d/none.tar", "e/none.tar", "d/none-*.tar"])
def test_a_missing_shard(store: Store, name: str) -> None:
    with pytest.raises(UrlError if "*" in name else ShardNotFound):
        samples(store.url(name), store.options())


def refuse(url: str, options: dict[str, Any] | None, write: bool) -> None:
    if write:
        with wds.TarWriter(url, storage_options=options) as writer:
            writer.write({"__key__": "a", "txt": "x"})
    else:
        samples(url, options)


@pytest.mark.parametrize("name", ["d/shard-000000.tar", "d/*.tar", "d/write.tar"])
def test_a_wrong_password_is_not_told(
    store: Store, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    ways: list[tuple[str, dict[str, Any] | None]] = [(store.url(name), store.options(WRONG))]
    if store.server.kind != "webdav":
        ways.append((store.server.url(name, password=WRONG), None))
    for url, options in ways:
        with pytest.raises(AccessDenied, match=USER) as info:
            refuse(url, options, write="write" in name)
        shown = "".join(traceback.format_exception(info.value)) + repr(info.value) + caplog.text
        assert WRONG not in shown + "".join(capfd.readouterr())


def test_no_server(store: Store) -> None:
    with socket.socket() as bound:  # nobody listens here, and nobody else will
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        url = store.url(TWO).replace(str(store.server.port), str(port))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WDS_RETRIES", "3")
            with pytest.raises(TransferError, match=r"(?i)refused|unable to connect.*3 attempts"):
                samples(url, store.options(port=port))


@pytest.mark.filterwarnings("ignore:.*_prefetch_thread:pytest.PytestUnhandledThreadExceptionWarning")  # paramiko's own
def test_a_connection_that_breaks(store: Store) -> None:
    with Relay(store.server.port) as relay:
        url = store.url(TWO).replace(str(store.server.port), str(relay.port))
        read = iter(wds.WebDataset([url] * 4, shardshuffle=False, storage_options=store.options(port=relay.port)))
        got = [next(read)]
        relay.cut()
        got += list(read)
    assert [one["__key__"] for one in got] == [one["__key__"] for one in store.want] * 4


class Relay:
    """Hands on what comes at its port to another, until it is cut."""

    def __init__(self, to: int) -> None:
        self._to, self._live = to, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections; new ones are taken."""
        for one in self._live:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # FTP's ABOR ends with an urgent byte
            theirs = socket.create_connection(("127.0.0.1", self._to))
            self._live += [ours, theirs]
            both = [
                threading.Thread(target=self._pump, args=way, daemon=True) for way in ((ours, theirs), (theirs, ours))
            ]
            for one in both:
                one.start()
            threading.Thread(target=self._end, args=(both, ours, theirs), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _end(self, both: list[threading.Thread], *sockets: socket.socket) -> None:
        for thread in both:
            thread.join()
        for one in sockets:
            one.close()


def test_forked_workers(store: Store) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    data = wds.WebDataset(store.url(TWO), shardshuffle=False, storage_options=store.options())
    loader = torch_data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(one["__key__"] for one in loader) == [one["__key__"] for one in store.want]


def test_the_shard_cache(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        assert samples(store.url(TWO), store.options(), cache_dir=str(tmp_path)) == store.want
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size > 1_000_000 for path in files) == 2
    assert not [path for path in files if PASSWORD in str(path) or PASSWORD.encode() in path.read_bytes()]


_READ = """\
import sys, json, threading
import wds_async as wds
url, options = json.load(sys.stdin)
assert len(list(wds.WebDataset(url, shardshuffle=False, storage_options=options))) == 10
from wds_async.transfer.engine import end_idle
import gc; end_idle(); gc.collect()
print([thread.name for thread in threading.enumerate() if not thread.daemon or thread.name.startswith("Thread")])
"""
_WRITE = """\
with wds.TarWriter(url.partition("shard")[0] + "script.tar", storage_options=options) as writer:
    writer.write({"__key__": "a", "txt": "x"})
"""


def script(text: str, given: Any, **more: str) -> subprocess.CompletedProcess[str]:
    """What it does in a process of its own, in which every warning is an error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
    command = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore::DeprecationWarning", "-c", text]
    return subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, timeout=30, check=False, env=environment
    )


def test_nothing_is_left_at_exit(store: Store) -> None:
    done = script(_READ.replace("import gc", _WRITE + "import gc"), [store.url(TWO), store.options()])
    told = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]  # on a busy machine
    assert (done.returncode, done.stdout.strip(), told) == (0, "['MainThread']", [])
    (store.folder / "script.tar").unlink()


def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paramiko")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for url in (
            f"ftp://{USER}:{PASSWORD}@127.0.0.1:{port}/a.tar",
            f"sftp://{USER}:{PASSWORD}@127.0.0.1:{port}/a.tar",
        ):
            given = {"timeout": 0.5} if url.startswith("ftp") else {"banner_timeout": 0.5}
            monkeypatch.setenv("WDS_RETRIES", "2")
            with pytest.raises((FetchTimeout, TransferError)) as info:
                samples(url, given)
            assert PASSWORD not in str(info.value)


# -- filesystems over others ----------------------------------------------------------------------------------------


def test_memory(shards: Any) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    paths = shards(2, 5)
    for number, path in enumerate(paths):
        memory.pipe_file(f"/others/d/shard-{number:06d}.tar", path.read_bytes())
    try:
        want = samples([str(path) for path in paths])
        assert samples("memory://others/" + TWO) == samples("memory://others/d/*.tar") == want
        with pytest.raises(KeyError):
            give_up("memory://others/d/new.tar", None)
        assert not memory.exists("/others/d/new.tar")
        with wds.TarWriter("memory://others/d/new.tar") as writer:
            writer.write({"__key__": "a", "txt": "x"})
        assert samples("memory://others/d/new.tar") == [{"__key__": "a", "txt": b"x"}]
        with pytest.raises(ShardNotFound):
            samples("memory://others/d/none.tar")
    finally:
        memory.rm("/others", recursive=True)


def test_inside_a_zip_and_a_folder(shards: Any, tmp_path: Path) -> None:
    paths = shards(2, 5)
    want = samples([str(path) for path in paths])
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in paths:
            archive.write(path, f"d/{path.name}")
    assert samples(f"zip://{TWO}::file://{tmp_path}/all.zip") == want
    assert samples(f"dir://shard-{{000000..000001}}.tar::file://{paths[0].parent}") == want
    with pytest.raises(ShardNotFound):
        samples(f"zip://d/none.tar::file://{tmp_path}/all.zip")


def test_kept_by_simplecache(
    shards: Any, tmp_path: Path, clean_aws: pytest.MonkeyPatch, request: pytest.FixtureRequest, tls: Tls, nginx: Any
) -> None:
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    paths = shards(2, 5)
    want = samples([str(path) for path in paths])
    kept = {"simplecache": {"cache_storage": str(tmp_path / "kept")}}

    base = request.getfixturevalue("moto")
    for name, value in {**moto_server.CREDENTIALS, "AWS_ENDPOINT_URL": base, "AWS_REGION": "us-east-1"}.items():
        clean_aws.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="others")
    for path in paths:
        client.upload_file(str(path), "others", f"d/{path.name}")
    client.close()
    assert samples("simplecache::s3://others/" + TWO, kept) == want
    server: Nginx = nginx(paths[0].parent, tls=(tls.cert, tls.key))
    url = f"simplecache::{server.base}/shard-{{000000..000001}}.tar"
    done = script(_READ, [url, kept], SSL_CERT_FILE=str(tls.ca))  # aiohttp reads it when it is imported
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "['MainThread']", "")
    assert len(list((tmp_path / "kept").iterdir())) == 4


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/x.tar", {"token": "anon"}),
        ("az://container/x.tar", {"account_name": "account", "anon": True}),
        ("s3://bucket/x.tar", {"key": "k", "secret": "s"}),
        ("hf://datasets/o/n/x.tar", {"token": False}),
        ("ais://bucket/x.tar", {"endpoint": "https://ais.example:51080"}),
    ],
)
def test_a_dead_proxy_is_named(
    url: str, options: dict[str, Any], clean_aws: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.setenv("WDS_RETRIES", "1")
    with pytest.raises(TransferError) as caught:
        samples(url, {url.partition(":")[0]: options})
    assert f"the proxy {proxy} (HTTPS_PROXY) cannot be reached: " in str(caught.value)
    assert "unset HTTPS_PROXY, or add " in str(caught.value)
