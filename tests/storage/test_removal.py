"""Removal of files and folders here, and what is refused; of objects in stores see tests/clouds/test_conformance.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.servers.moto import clean_aws
from wds_async.errors import AccessDenied, StorageError, UrlError
from wds_async.storage.removal import remove
from wds_async.storage.sink import publish_new

__all__ = ["clean_aws"]


def files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def there(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() or path.is_symlink())


def test_files_and_folders(tmp_path: Path) -> None:
    files(tmp_path, "a/x", "a/deep/y", "b/x", "c", "d e#f")
    (tmp_path / "a/link").symlink_to(tmp_path / "b")
    remove([f"{tmp_path}/c", f"file:{tmp_path}/d e#f", f"{tmp_path}/none", f"{tmp_path}/a/", f"{tmp_path}/none/"])
    assert there(tmp_path) == ["b/x"], "of a link, the link alone"
    assert not (tmp_path / "a").exists()
    remove([])


def test_a_folder_that_another_process_removes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path, "a/x", "a/y")
    rmtree = shutil.rmtree

    def overtaken(path: str) -> None:
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        os.remove(tmp_path / "a/x")
        raise FileNotFoundError(2, "No such file or directory", "x")

    monkeypatch.setattr(shutil, "rmtree", overtaken)
    remove([f"{tmp_path}/a/"])
    assert there(tmp_path) == []


def test_the_others_are_removed_before_an_error(tmp_path: Path) -> None:
    files(tmp_path, *(f"x{n}" for n in range(100)), "folder/y")
    with pytest.raises((AccessDenied, StorageError), match=r"/folder"):
        remove([f"{tmp_path}/folder", *(f"{tmp_path}/x{n}" for n in range(100))])
    assert there(tmp_path) == ["folder/y"]


@pytest.mark.parametrize("url", ["pipe:cat", "-"])
def test_what_is_no_store(url: str) -> None:
    with pytest.raises(UrlError, match="cannot be removed"):
        remove([url])


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket", "az://container"])
def test_a_bucket_is_no_object(url: str, clean_aws: Any) -> None:
    account = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=aGk=;BlobEndpoint=http://127.0.0.1:9/a;"
    clean_aws.setenv("AZURE_STORAGE_CONNECTION_STRING", account)
    for change in (lambda: remove([url]), lambda: publish_new(url, b"x")):
        with pytest.raises(UrlError, match=r"names no object|names a container"):
            change()
