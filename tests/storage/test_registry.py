"""Which backend reads a URL, and what the security rules forbid."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import Origin, make_tar
from tests.transfer.reading import bytes_of, outcomes
from wds_async import logs
from wds_async.errors import UnsafeContent, UrlError
from wds_async.storage import registry
from wds_async.storage.deadlines import BackendWithDeadlines
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.local import LocalBackend
from wds_async.storage.registry import Backends, check_allowed, locate
from wds_async.storage.stores import STORES


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("x.tar", "local"),
        ("/a/x.tar", "local"),
        ("file:///a/x.tar", "local"),
        ("C:/x.tar", "local"),
        ("-", "stdin"),
        ("pipe:cat x", "pipe"),
        ("http://h/x", "http"),
        ("HTTPS://h/x", "http"),
        ("s3://b/x", "s3"),
        ("S3A://b/x", "s3"),
        ("s3n://b/x", "s3"),
        ("gcs://b/x", "gcs"),
        ("abfs://c@a.dfs.core.windows.net/x", "azure"),
        ("https://a.blob.core.windows.net/c/x", "azure"),
        ("https://a.blob.core.windows.net/c/x?sig=s", "http"),
        ("hf://datasets/o/n/x", "hf"),
        ("ais://b/x", "ais"),
        ("memory://x", "generic"),
        ("simplecache::http://h/x", "generic"),
    ],
)
def test_kinds(url: str, kind: str) -> None:
    location = locate(url)
    assert (location.kind, location.url) == (kind, url)


def test_names_that_no_client_knows_become_those_that_it_does() -> None:
    found = [locate(url).target for url in ("s3n://b/x.tar", "htgs://b/x.tar", "SCP://h/x.tar", "s3a://b/x.tar")]
    assert found == ["s3://b/x.tar", "gs://b/x.tar", "sftp://h/x.tar", "s3a://b/x.tar"]


def test_an_unknown_scheme_is_named_without_secrets() -> None:
    with pytest.raises(UrlError, match="unknown scheme 'nosuch'") as caught:
        locate("nosuch://user:SECRET@h/x.tar")
    assert "SECRET" not in str(caught.value)
    (_, error), *_ = outcomes(["nosuch://x", "/nonexistent"])
    assert isinstance(error, UrlError)


@pytest.mark.parametrize(
    ("wrong", "right"), [("s4", "s3"), ("nosuch", None), ("htps", "https"), ("gss", "gs"), ("s33", "s3"), ("S3S", "s3")]
)
def test_a_misspelt_scheme(wrong: str, right: str | None) -> None:
    with pytest.raises(UrlError) as caught:
        locate(f"{wrong}://b/x.tar")
    assert (f"Did you mean {right}://?" in str(caught.value)) is (right is not None)


def test_a_store_of_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "thirdstore-1.0.dist-info").mkdir()
    (tmp_path / "thirdstore-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: thirdstore\nVersion: 1.0\n"
    )
    (tmp_path / "thirdstore-1.0.dist-info" / "entry_points.txt").write_text(
        "[wds_async.stores]\nthird = thirdstore:ThirdStore\nmemory = thirdstore:ThirdStore\n"
        "broken = thirdstore:missing\n"
    )
    (tmp_path / "thirdstore.py").write_text(
        "import dataclasses\n"
        "from wds_async.storage.local import LocalBackend\n"
        "class ThirdStore(LocalBackend):\n"
        "    def __init__(self, call, options):\n"
        "        super().__init__(call)\n"
        "        self.root = options['root']\n"
        "    async def access(self, location):\n"
        "        path = self.root + '/' + location.target.partition('://')[2]\n"
        "        return await super().access(dataclasses.replace(location, target=path, kind='local'))\n"
    )
    (tmp_path / "x.tar").write_bytes(make_tar([("a.txt", b"hello")]))
    program = (
        "import sys, wds_async as wds\n"
        "options = {'third': {'root': sys.argv[1]}, 'memory': {'root': sys.argv[1]}}\n"
        "for url in ('third://x.tar', 'memory://x.tar'):\n"
        "    (sample,) = wds.WebDataset(url, shardshuffle=False, storage_options=options)\n"
        "    assert sample['txt'] == b'hello' and sample['__url__'] == url\n"
        "try:\n"
        "    list(wds.WebDataset('broken://x.tar', shardshuffle=False))\n"
        "except wds.WdsError as exn:\n"
        "    print(exn)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(registry.__file__).parents[2]))),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "thirdstore:missing of the group wds_async.stores, cannot be made" in done.stdout


def test_rewriting_keeps_the_users_url(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    origin.add("x.tar", b"x")
    monkeypatch.setenv("WDS_REWRITE", f"made-up://b/={origin.base}/")
    location = locate("made-up://b/x.tar")
    assert (location.url, location.kind) == ("made-up://b/x.tar", "http")
    assert bytes_of(["made-up://b/x.tar"]) == [b"x"]
    ((_, error),) = outcomes(["made-up://b/none.tar"])
    assert "made-up://b/none.tar at byte 0" in str(error)


def test_a_malformed_rule_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", "([=x")
    ((_, error),) = outcomes(["x.tar"])
    assert error is not None
    assert "rewrite rule 1" in str(error)


@pytest.mark.parametrize(
    "url",
    ["pipe:echo", "x.tar", "file:///x", "local:///x", "simplecache::file:///x", "zip://a::/x.zip"],
)
def test_secure_mode_refuses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locate(url)
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeContent, match="WDS_SECURE"):
        locate(url)


def test_secure_mode_reads_http_and_does_not_rewrite(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    url = origin.add("x.tar", b"x")
    assert bytes_of([url]) == [b"x"]
    check_allowed("http")
    monkeypatch.setenv("WDS_REWRITE", "http=file")
    (outcome,) = outcomes([url])
    assert isinstance(outcome[1], UnsafeContent) or outcome == (b"x", None)


def test_pipes_may_be_read_natively(
    origin: Origin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = origin.add("x.tar", b"x")
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert locate(f"pipe:curl -s {url}").kind == "pipe"
        assert locate(f"pipe:curl -s {url}").kind == "pipe"
    assert len(caplog.records) <= 1  # once a run
    monkeypatch.setenv("WDS_NATIVE_PIPES", "1")
    assert locate(f"pipe:curl -s {url}").target == url
    assert bytes_of([f"pipe:curl -s {url}"]) == [b"x"]


def test_backends_are_made_once_and_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        backends = Backends(asyncio.to_thread)
        local = backends.of(locate("x.tar"))
        assert isinstance(local, LocalBackend)
        assert backends.of(locate("y.tar")) is local
        http = backends.of(locate("http://h/x"))
        assert isinstance(http, BackendWithDeadlines)
        assert isinstance(http.store, HttpBackend)
        session = await http.store.session()
        await backends.close()
        assert session.closed
        assert backends.of(locate("http://h/x")) is not http

    asyncio.run(scenario())


def test_the_notice_on_pipes_is_given_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logs, "_process", logs.Once())
    urls = ["pipe:cat /data/a.tar", "pipe:cat /data/b.tar", "pipe:mytool /data/c.tar"]
    registry.tell_of_native_pipes(urls)
    registry.locate(urls[0])
    (record,) = caplog.records
    assert "as /data/a.tar; set WDS_NATIVE_PIPES=1" in record.getMessage()
    caplog.clear()
    monkeypatch.setattr(logs, "_process", logs.Once())
    monkeypatch.setenv("WDS_SECURE", "1")
    registry.tell_of_native_pipes(urls)  # what it would recommend is forbidden too
    assert not caplog.records


_READS = """
import sys
import wds_async as wds
assert not [name for name in sys.modules if name.startswith("wds_async.storage")], "the door is open"
assert len(list(wds.WebDataset(sys.argv[1], shardshuffle=False))) == 5
print(*sorted(sys.modules))
"""


@pytest.mark.parametrize("by", ["file", "http"])
def test_no_store_is_imported_that_is_not_read(shards: Callable[..., list[Path]], origin: Origin, by: str) -> None:
    (path,) = shards(1)
    url = str(path) if by == "file" else origin.add("x.tar", path.read_bytes())
    done = subprocess.run([sys.executable, "-c", _READS, url], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert "wds_async.storage.registry" in loaded
    ours = [name for name in loaded if name.startswith("wds_async.storage.")]
    stores = [spec.backend.rpartition(".")[0] + "." for spec in STORES if not spec.guarded]
    assert not [name for name in ours if name.startswith((*stores, "wds_async.storage.upload"))]
    foreign = {"fsspec", "s3fs", "botocore", "aiobotocore", "gcsfs", "google", "adlfs", "azure", "huggingface_hub"}
    assert not foreign.intersection(name.partition(".")[0] for name in loaded)
    assert "aiohttp" not in loaded  # the engine's own client reads both


@pytest.mark.parametrize(
    ("url", "kind", "name"),
    [
        ("s3://b/x", "s3", "S3Backend"),
        ("gs://b/x", "gcs", "GcsBackend"),
        ("az://c/x", "azure", "AzureBackend"),
        ("https://a.blob.core.windows.net/c/x", "azure", "AzureBackend"),
        ("hf://datasets/o/n/x", "hf", "HuggingFaceBackend"),
        ("ais://b/x", "ais", "AisBackend"),
    ],
)
def test_each_store_has_its_backend(url: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("USE_AIS_FOR", raising=False)

    async def scenario() -> None:
        place = locate(url)
        backends = Backends(asyncio.to_thread)
        backend = backends.of(place)
        assert isinstance(backend, BackendWithDeadlines)
        assert (place.kind, type(backend.store).__name__) == (kind, name)
        await backends.close()

    asyncio.run(scenario())
