"""fsspec's filesystems: which one, with which options, and what they list."""

from __future__ import annotations

import asyncio
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from wds_async.errors import MissingExtra
from wds_async.storage.base import Entry
from wds_async.storage.filesystems import Filesystems, filesystem_of, is_async, protocols
from wds_async.storage.options import NO_OPTIONS, Options


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_protocols_of_a_chain() -> None:
    assert protocols("zip://x.tar::s3://b/y.zip") == ["zip", "s3"]
    assert protocols("simplecache::/a/path") == ["simplecache", ""]


def test_gcs_is_the_client_that_asks_nothing_first() -> None:
    pytest.importorskip("gcsfs")
    filesystem, path = filesystem_of("gs://bucket/a/x.tar", {"token": "anon"})
    assert (type(filesystem).__module__, type(filesystem).__name__) == ("gcsfs.core", "GCSFileSystem")
    assert path == "bucket/a/x.tar"


def test_options_go_over_what_the_url_says() -> None:
    pytest.importorskip("s3fs")
    filesystem, path = filesystem_of("s3://bucket/x.tar", {"key": "k", "secret": "s", "endpoint_url": "http://h:1"})
    assert (filesystem.key, filesystem.endpoint_url, path) == ("k", "http://h:1", "bucket/x.tar")
    other, _ = filesystem_of("s3://bucket/x.tar", {"key": "k", "secret": "s", "endpoint_url": "http://h:1"})
    assert other is not filesystem


def test_fsspecs_own_configuration_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://configured:1", "key": "k"})
    filesystem, _ = filesystem_of("s3://bucket/x.tar", {"key": "mine", "secret": "s"})
    assert (filesystem.key, filesystem.endpoint_url) == ("mine", "http://configured:1")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "adlfs", None)
    from fsspec.registry import _registry

    monkeypatch.delitem(_registry, "az", raising=False)  # another test may have loaded it
    with pytest.raises(MissingExtra, match=r'pip install "wds-async\[azure\]"'):
        filesystem_of("az://container/x.tar", {})


def _listed(url: str, options: Options = NO_OPTIONS) -> list[Entry]:
    async def run() -> list[Entry]:
        filesystems = Filesystems(asyncio.to_thread, options)
        try:
            return [entry async for entry in filesystems.entries(url)]
        finally:
            await filesystems.close()

    return asyncio.run(run())


def test_a_folder_is_listed_one_level_deep(memory: MemoryFileSystem) -> None:
    for name in ("a.tar", "b.txt", "sub/c.tar", "sub/deeper/d.tar"):
        memory.pipe_file(f"/top/{name}", name.encode())
    found = sorted(_listed("memory://top/"), key=lambda entry: entry.url)
    assert [(entry.url, entry.size) for entry in found] == [
        ("memory://top/a.tar", 5),
        ("memory://top/b.txt", 5),
        ("memory://top/sub/", None),
    ]
    assert all(entry.modified for entry in found if entry.size)


def test_chains_are_kept_by_fsspec(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "y.zip", "w") as archive:
        archive.writestr("x.tar", b"inside")
    filesystem, path = filesystem_of(f"zip://x.tar::{tmp_path}/y.zip", {})
    assert filesystem.cat_file(path) == b"inside"
    assert not is_async(filesystem)
