"""WebDataset's face of the cache."""

from __future__ import annotations

import bz2
import gzip
import lzma
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset.cache as theirs

from tests.servers import Origin, make_shards
from wds_async import cache as ours
from wds_async.cache import (
    FileCache,
    LRUCleanup,
    StreamingOpen,
    cached_tarfile_samples,
    cached_tarfile_to_samples,
    check_tar_format,
    create_cache_dir,
    get_filetype,
    islocal,
    pipe_cleaner,
    url_to_cache_name,
)
from wds_async.errors import NotATar, StorageError
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import SimpleShardList, split_by_worker
from wds_async.tariterators import tarfile_samples


@pytest.fixture
def served(origin: Origin, tmp_path: Path) -> list[str]:
    """Four small shards on the server."""
    return [origin.add(path.name, path.read_bytes()) for path in make_shards(tmp_path / "made", 4, 6, payload=20_000)]


def without_path(samples: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in sample.items() if k != "__local_path__"} for sample in samples]


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.tar") if path.is_file())


# -- samples ------------------------------------------------------------------------------------------------------


def test_samples_are_the_same_and_know_their_file(origin: Origin, served: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    expected = list(tarfile_samples(served))
    asked = 0
    for epoch in range(2):
        found = list(cached_tarfile_samples([{"url": url} for url in served], cache_dir=folder))
        assert without_path(found) == expected
        assert set(found[0]) == {"__key__", "__url__", "__local_path__", "png", "cls", "json", "bin"}
        assert {Path(sample["__local_path__"]) for sample in found} == set(kept(folder))
        if epoch == 0:
            asked = len(origin.requests)
    assert len(origin.requests) == asked


def test_the_stage_in_workers(origin: Origin, served: list[str], tmp_path: Path) -> None:
    import torch.utils.data

    stage = cached_tarfile_to_samples(cache_dir=tmp_path / "cache")
    pipeline: Any = DataPipeline(SimpleShardList(served), split_by_worker, pickle.loads(pickle.dumps(stage)))
    everyone: Any = DataPipeline(SimpleShardList(served[:2]), stage)
    expected = sorted(s["__key__"] for s in tarfile_samples(served))
    for method in ("fork", "spawn"):
        loader: Any = torch.utils.data.DataLoader(
            pipeline, num_workers=2, batch_size=None, multiprocessing_context=multiprocessing.get_context(method)
        )
        asked = len(origin.requests)
        assert sorted(sample["__key__"] for sample in loader) == expected
        assert (len(origin.requests) > asked) == (method == "fork")
    shared: Any = torch.utils.data.DataLoader(everyone, num_workers=2, batch_size=None)
    assert len(list(shared)) == 24  # both workers read both
    assert len(kept(tmp_path / "cache")) == 4
    counted = stage.statistics()
    assert (counted.cache_misses, counted.cache_hits) == (4, 8)


def test_bad_shards_do_not_stay(origin: Origin, served: list[str], tmp_path: Path) -> None:
    page, cut = (
        origin.add("page.tar", b"<html>no</html>"),
        origin.add("cut.tar", origin.files["/shard-000000.tar"][:9000]),
    )
    stage = cached_tarfile_to_samples(ignore_and_continue, cache_dir=tmp_path / "cache")
    list(stage([page, served[1], cut]))
    assert [path.name for path in kept(tmp_path / "cache")] == ["shard-000001.tar"]


def test_where_the_settings_come_from(
    served: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WDS_CACHE", "WDS_CACHE_SIZE", "WDS_VERBOSE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    list(cached_tarfile_samples(served[:1]))
    assert len(kept(tmp_path / "_cache")) == 1
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "env"))
    monkeypatch.setenv("WDS_CACHE_SIZE", "200K")
    assert not caplog.records
    list(cached_tarfile_samples(served, verbose=True))
    assert len(kept(tmp_path / "env")) == 1
    assert "kept" in caplog.text
    list(cached_tarfile_samples(served, cache_size=0, cache_dir=tmp_path / "off"))
    assert not (tmp_path / "off").exists()
    list(
        cached_tarfile_samples(served, cache_dir=tmp_path / "given", cache_size=400_000, url_to_name=url_to_cache_name)
    )
    assert [p.relative_to(tmp_path / "given").as_posix() for p in kept(tmp_path / "given")] == [
        "shard-000002.tar",
        "shard-000003.tar",
    ]


def test_local_files_only_on_request(tmp_path: Path) -> None:
    paths = [str(path) for path in make_shards(tmp_path / "made", 2)]
    list(cached_tarfile_samples(paths, cache_dir=tmp_path / "cache"))
    assert kept(tmp_path / "cache") == []
    list(cached_tarfile_samples(paths, cache_dir=tmp_path / "cache", always=True))
    assert len(kept(tmp_path / "cache")) == 2


def test_a_copy_by_bare_name(tmp_path: Path) -> None:
    """The server is not there: what the user copied is used."""
    (path,) = make_shards(tmp_path / "cache", 1)
    url = f"http://127.0.0.1:9/elsewhere/{path.name}"
    found = list(cached_tarfile_samples([url], cache_dir=tmp_path / "cache"))
    assert {sample["__local_path__"] for sample in found} == {str(path)}
    assert {sample["__url__"] for sample in found} == {url}


# -- FileCache and StreamingOpen ----------------------------------------------------------------------------------


def test_files(origin: Origin, served: list[str], tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache")
    for epoch in range(2):
        for url, item in zip(served, cache({"url": url} for url in served), strict=True):
            with item["stream"] as stream:
                assert stream.read() == origin.files[f"/{Path(url).name}"]
            assert (item["url"], item["local_path"]) == (url, str(tmp_path / "cache" / Path(url).name))
        if epoch == 0:
            asked = len(origin.requests)
    assert len(origin.requests) == asked
    (local,) = make_shards(tmp_path / "local", 1)
    assert cache.get_file(str(local)) == str(local)
    assert cache.get_file(local.as_uri()) == str(local)


def test_files_of_two_buckets(origin: Origin, tmp_path: Path) -> None:
    shards = [path.read_bytes() for path in make_shards(tmp_path / "made", 2)]
    urls = [origin.add(f"{bucket}/x.tar", shard) for bucket, shard in zip("ab", shards, strict=True)]
    for order in (urls, urls[::-1]):
        paths = {url: FileCache(tmp_path / "cache").get_file(url) for url in order}
        assert [Path(paths[url]).read_bytes() for url in urls] == shards
    assert paths[urls[0]] == str(tmp_path / "cache/x.tar")


def test_files_with_names_of_the_user(served: list[str], tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", url_to_name=lambda url: "deep/down/" + url[-8:])
    assert cache.get_file(served[0]) == str(tmp_path / "cache/deep/down/0000.tar")


def test_files_that_are_no_shards(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("page.tar", b"<html>no</html>" * 100)
    with pytest.raises(NotATar, match="it begins with b'<html>no"):
        FileCache(tmp_path / "cache").get_file(url)
    assert kept(tmp_path / "cache") == []
    path = FileCache(tmp_path / "cache", validator=None).get_file(url)
    assert Path(path).read_bytes().startswith(b"<html>")


@pytest.mark.parametrize("kind", ["files", "streams"])
def test_handlers(kind: str, origin: Origin, served: list[str], tmp_path: Path) -> None:
    def opening(**how: Any) -> Any:
        return FileCache(tmp_path / "cache", **how) if kind == "files" else StreamingOpen(**how)

    urls = [origin.url("missing.tar") if kind == "files" else str(tmp_path / "missing.tar"), served[0]]
    with pytest.raises(FileNotFoundError):
        next(opening()(urls))
    for handler, count in ((ignore_and_continue, 1), (ignore_and_stop, 0)):
        for item in (found := list(opening(handler=handler)(urls))):
            item["stream"].close()
        assert len(found) == count


def test_files_that_cannot_be_kept(served: list[str], tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", url_to_name=lambda url: "blocked/x.tar")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/blocked").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be kept"):
        cache.get_file(served[0])


def test_streams(origin: Origin, served: list[str], tmp_path: Path) -> None:
    (local,) = make_shards(tmp_path / "local", 1)
    urls: list[Any] = [str(local), local.as_uri(), {"url": served[0]}]
    found = list(StreamingOpen()(urls))
    assert [item.get("local_path") for item in found] == [str(local), str(local), None]
    assert [item["url"] for item in found] == [str(local), local.as_uri(), served[0]]
    for item in found:
        with item["stream"] as stream:
            assert stream.read(6) == b"000000"


def test_secure_mode_opens_no_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (local,) = make_shards(tmp_path / "local", 1)
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(ValueError, match="gopen: unsafe_gopen is False, cannot open local files"):
        next(StreamingOpen()([str(local)]))
    for url in (str(local), local.as_uri()):
        with pytest.raises(ValueError, match="gopen: unsafe_gopen is False, cannot open local files"):
            FileCache(tmp_path / "cache").get_file(url)


def test_a_local_file_by_rewriting_is_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (local,) = make_shards(tmp_path / "local", 1)
    monkeypatch.setenv("WDS_REWRITE", f"gs://bucket/={local.parent}/")
    assert FileCache(tmp_path / "cache").get_file(f"gs://bucket/{local.name}") == str(local)


# -- the small ones -----------------------------------------------------------------------------------------------


_URLS = [
    "http://example.com/path/to/file.txt",
    "http://example.com/",
    "http://example.com",
    "file:///path/to/file.txt",
    "path/to/file.txt",
    "s3://bucket/path/to/file.txt?versionId=1",
    "unknown://example.com/path/to/file.txt",
]


@pytest.mark.parametrize("url", [*_URLS, "unknown://example.com/" + "path/" * 50, "pipe:curl -s http://h/file.txt"])
def test_names_as_webdataset_gives_them(url: str) -> None:
    for ndir in (0, 1, 5):
        assert url_to_cache_name(url, ndir) == theirs.url_to_cache_name(url, ndir)
    with pytest.raises(AssertionError):
        url_to_cache_name(123)  # type: ignore[arg-type]


_COMMANDS = ["curl -s http://h/x.tar", "gsutil cat gs://b/x.tar | gunzip", "cat x.tar", "aws s3 cp s3://b/x.tar -"]


@pytest.mark.parametrize("spec", [*(f"pipe:{command}" for command in _COMMANDS), "http://h/x.tar", "x.tar"])
def test_pipe_cleaner(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_OBSOLETE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs.pipe_cleaner(spec)
    with pytest.warns(DeprecationWarning, match="leave url_to_name out") as caught:
        assert pipe_cleaner(spec) == expected
    assert caught[0].filename == __file__


def test_pipe_cleaner_as_the_name_is_our_own_name(tmp_path: Path) -> None:
    (path,) = make_shards(tmp_path / "made", 1)
    url = f"pipe:cat {path}"
    list(cached_tarfile_samples([url], cache_dir=tmp_path / "cache", url_to_name=ours.pipe_cleaner))
    assert len(kept(tmp_path / "cache")) == 1
    assert kept(tmp_path / "cache")[0].parent.name == "pipe@"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda tar: tar, "POSIX tar archive"),
        (gzip.compress, "gzip compressed data"),
        (bz2.compress, "bzip2 compressed data"),
        (lzma.compress, "XZ compressed data"),
        (lambda tar: b"<html>" * 100, "data"),
        (lambda tar: b"", "empty"),
    ],
)
def test_file_types(tmp_path: Path, make: Callable[[bytes], bytes], kind: str) -> None:
    (path,) = make_shards(tmp_path, 1)
    path.write_bytes(make(path.read_bytes()))
    assert get_filetype(str(path)) == f"{path}: {kind}"
    assert check_tar_format(str(path)) == (kind not in ("data", "empty"))


def test_islocal() -> None:
    for url in ("x.tar", "/x.tar", "file:x.tar", "http://h/x.tar", "s3://b/x.tar"):
        assert islocal(url) == theirs.islocal(url)


def test_the_folder(tmp_path: Path) -> None:
    for _ in range(2):
        assert create_cache_dir(tmp_path / "a/b") == str(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize("module", [ours, theirs])
def test_clean_up(tmp_path: Path, module: Any) -> None:
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(bytes(100))
        os.utime(tmp_path / f"{number}", (number + 1, number + 1))
    cleaner = module.LRUCleanup(str(tmp_path), cache_size=10_000, keyfn=os.path.getmtime, interval=None)
    cleaner.cleanup()
    assert len(os.listdir(tmp_path)) == 10
    cleaner.cache_size = 450
    cleaner.cleanup()
    assert sorted(os.listdir(tmp_path)) == ["6", "7", "8", "9"]
    cleaner.interval, cleaner.cache_size = 30, 0
    cleaner.cleanup()
    assert len(os.listdir(tmp_path)) == 4  # not again so soon
    cleaner.set_cache_dir(str(tmp_path / "nowhere"))
    cleaner.interval = None
    cleaner.cleanup()


def test_clean_up_by_default(tmp_path: Path) -> None:
    cleaner = LRUCleanup()
    cleaner.cleanup()
    assert (cleaner.cache_dir, cleaner.cache_size, cleaner.interval) == (None, 10**12, 30)
    assert cleaner.keyfn is os.path.getctime
