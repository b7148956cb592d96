"""Faults of webdataset's disk cache that are not copied. Each test shows both sides."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as ours
from tests.servers import Origin, make_tar

theirs = pytest.importorskip("webdataset")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Two shards of the same base name in two folders of a server."""
    with Origin() as origin:
        for folder in ("train", "val"):
            origin.add(f"/{folder}/0.tar", make_tar([(f"{folder}.txt", folder.encode() * 1000)]))
        yield [origin.url(f"/{folder}/0.tar") for folder in ("train", "val")]


def keys(wds: Any, urls: Any, **kw: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [sample["__key__"] for sample in wds.WebDataset(urls, shardshuffle=False, **kw)]


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def test_names_do_not_collide(urls: list[str], tmp_path: Path) -> None:
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    assert keys(theirs, urls, cache_dir=str(tmp_path / "theirs")) == ["train", "train"]
    for _ in range(2):
        assert keys(ours, urls, cache_dir=str(tmp_path / "ours")) == ["train", "val"]


def name_of(url: str) -> str:
    return "my-" + "-".join(url.split("/")[-2:])


def test_names_of_the_users_making(urls: list[str], tmp_path: Path) -> None:
    found = []
    for wds in (theirs, ours):
        folder = tmp_path / wds.__name__
        folder.mkdir()
        keys(wds, urls[:1], cache_dir=str(folder), url_to_name=name_of)
        found.append([p.name for p in files(folder)])
    assert found[0] == ["0.tar"]
    assert "my-train-0.tar" in found[1]


def test_the_folder_of_the_environment(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_CACHE", str(tmp_path))
    keys(theirs, urls)
    assert not files(tmp_path)
    keys(ours, urls)
    assert files(tmp_path)


def test_the_size_of_the_environment(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 turns the cache off."""
    monkeypatch.setenv("WDS_CACHE_SIZE", "0")
    for wds in (theirs, ours):
        folder = tmp_path / wds.__name__
        folder.mkdir()
        keys(wds, urls[:1], cache_dir=str(folder))
    assert files(tmp_path / "webdataset")
    assert not files(tmp_path / "wds_async")


def test_the_talk_of_the_environment(
    urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("WDS_VERBOSE_CACHE", "1")
    said = []
    for wds in (theirs, ours):
        folder = tmp_path / wds.__name__
        folder.mkdir()
        capfd.readouterr()
        caplog.clear()
        keys(wds, urls[:1], cache_dir=str(folder))
        said.append(caplog.text + "".join(capfd.readouterr()))
    assert "0.tar" not in said[0]
    assert "0.tar" in said[1]
