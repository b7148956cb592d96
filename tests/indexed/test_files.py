"""Shards as plain tars on disk: where they are kept, fetched once, and opened."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import pickle
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.servers import make_shard, make_tar
from wds_async.errors import (
    DuplicateField,
    NotATar,
    ShardFormatError,
    ShardNotFound,
    StorageError,
    UnsafeContent,
    UrlError,
)
from wds_async.indexed.files import MappedShard, OpenShards, ShardFiles, default_folder
from wds_async.tar import group, parse

TAR = make_shard({f"{i}": {"cls": str(i).encode(), "bin": bytes(2000)} for i in range(5)})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def kept(folder: str) -> list[str]:
    """Whole shards in the cache; an empty file is none."""
    files = [*Path(folder).glob("*"), *Path(folder).glob("*@*/**/*")]
    return sorted(str(path.relative_to(folder)) for path in files if path.is_file() and path.stat().st_size)


def test_a_plain_file_is_opened_where_it_is(tmp_path: Path, folder: str) -> None:
    (tmp_path / "x.tar").write_bytes(TAR)
    with ShardFiles(folder).open(str(tmp_path / "x.tar")) as file:
        assert file.name == str(tmp_path / "x.tar")
        assert file.read() == TAR
    with ShardFiles(folder).open(f"file://{tmp_path}/x.tar") as file:
        assert file.read() == TAR
    assert not os.path.exists(folder)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_a_compressed_file_is_unpacked_once_for_each_writing(suffix: str, tmp_path: Path, folder: str) -> None:
    import bz2
    import lzma

    import zstandard

    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}[suffix]
    path = tmp_path / "x.tar"  # told by content, not by name
    path.write_bytes(pack(TAR))
    files = ShardFiles(folder)
    for _ in range(2):
        with files.open(str(path)) as file:
            assert file.read() == TAR
    assert len(kept(folder)) == 1
    path.write_bytes(pack(TAR * 2))
    with files.open(str(path)) as file:
        assert file.read() == TAR * 2


def test_what_is_elsewhere_is_fetched_once(origin: Any, folder: str) -> None:
    url = origin.add("d/x.tar", TAR)
    packed = origin.add("e/x.tar.gz", gzip.compress(TAR))
    files = ShardFiles(folder)
    for _ in range(2):
        for each in (url, packed):
            with files.open(each) as file:
                assert file.read() == TAR
    assert len({request.path for request in origin.requests}) == 2
    seen = len(origin.requests)
    with ShardFiles(folder).open(url) as file:
        assert file.read() == TAR
    assert len(origin.requests) == seen
    host = f"http@127.0.0.1+{origin.port}"
    assert kept(folder) == [f"{host}/d/x.tar", f"{host}/e/x.tar.gz", f"{host}/e/x.tar.gz.plain"]


def test_a_file_that_the_user_put_there_is_used(origin: Any, folder: str) -> None:
    url, other = f"{origin.base}/d/x.tar", f"{origin.base}/e/x.tar"
    os.makedirs(folder)
    Path(folder, "x.tar").write_bytes(TAR)
    with ShardFiles(folder, urls=[url]).open(url) as file:
        assert file.read() == TAR
    assert not origin.requests
    with pytest.raises(ShardNotFound):  # whose is it?
        ShardFiles(folder, urls=[url, other]).open(url)


def test_the_user_may_name_the_files(origin: Any, tmp_path: Path) -> None:
    url = origin.add("x.tar", TAR)
    files = ShardFiles("", localname=lambda url: str(tmp_path / "mine" / os.path.basename(url)), size_bytes=0)
    with files.open(url) as file:
        assert file.name == str(tmp_path / "mine" / "x.tar")
        assert file.read() == TAR


def test_the_cache_keeps_to_its_size(origin: Any, folder: str) -> None:
    urls = [origin.add(f"{name}.tar", TAR) for name in "abcd"]
    packed = origin.add("e.tar.gz", gzip.compress(TAR))
    os.makedirs(folder)
    Path(folder, "precious.tar").write_bytes(bytes(len(TAR)))
    files = ShardFiles(folder, size_bytes=2.5 * len(TAR))
    for url in urls:
        files.open(url).close()
    assert [os.path.basename(name) for name in kept(folder)] == ["c.tar", "d.tar", "precious.tar"]
    tiny = ShardFiles(folder, size_bytes=1)
    for url in (urls[0], packed):
        with tiny.open(url) as file:  # what is open can be read, kept or not
            assert file.read() == TAR
    assert kept(folder) == ["precious.tar"]


@pytest.mark.parametrize("packed", [gzip.compress(TAR)[:-20], b"<html>sorry</html>", b""])
def test_what_is_no_good_shard_does_not_stay(packed: bytes, origin: Any, folder: str) -> None:
    url = origin.add("x.tar", packed)
    opened = OpenShards(2, ShardFiles(folder))
    with pytest.raises(ShardFormatError, match=r"x\.tar"):
        opened.get_shard(url)
    assert kept(folder) == []
    origin.add("x.tar", TAR)
    assert len(opened.get_shard(url)) == 5


def test_a_folder_that_cannot_be_written(origin: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cache_dir"):
        ShardFiles(str(tmp_path / "file" / "below")).open(origin.add("x.tar", TAR))


def test_errors_of_opening(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ShardFiles(folder)
    with pytest.raises(ShardNotFound, match="no such file"):
        files.open(str(tmp_path / "missing.tar"))
    with pytest.raises(UrlError, match="standard input"):
        files.open("-")
    (tmp_path / "x.tar").write_bytes(TAR)
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeContent):
        files.open(str(tmp_path / "x.tar"))


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WDS_CACHE", raising=False)
    monkeypatch.delenv("WIDS_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert os.path.dirname(default_folder()) == str(tmp_path)
    monkeypatch.setenv("WIDS_CACHE", "/older")
    assert default_folder() == "/older"
    monkeypatch.setenv("WDS_CACHE", "/newer")
    assert default_folder() == "/newer"


def _read_all(folder: str, urls: list[str], ready: Any, results: Any) -> None:
    ready.wait(20)
    files = ShardFiles(folder)
    for url in urls:
        with files.open(url) as file:
            results.put(len(file.read()))


def test_two_processes_fetch_each_shard_once(origin: Any, folder: str) -> None:
    urls = [origin.add(f"{name}.tar", TAR) for name in "abc"]
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=_read_all, args=(folder, urls, ready, results)) for _ in range(2)]
    for process in both:
        process.start()
    assert [results.get(timeout=40) for _ in range(6)] == [len(TAR)] * 6
    for process in both:
        process.join(20)
        assert process.exitcode == 0
    results.close()
    results.join_thread()
    begun = [request.path for request in origin.requests if request.headers["range"].startswith("bytes=0-")]
    assert sorted(begun) == ["/a.tar", "/b.tar", "/c.tar"]


# ------------------------------------------------------------------ opened


def test_samples_by_number(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(TAR)
    shard = MappedShard("x.tar", (tmp_path / "x.tar").open("rb"))
    assert len(shard) == 5
    assert shard[3] == {".cls": b"3", ".bin": bytes(2000)}
    assert shard.keys[3] == "3"


def mapped(path: Path, *members: tuple[str, bytes], form: int = tarfile.GNU_FORMAT) -> MappedShard:
    path.write_bytes(make_tar(list(members), format=form))
    return MappedShard("x.tar", path.open("rb"))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_same_samples_as_read_in_order(tmp_path: Path, form: int) -> None:
    long = "a/" + "n" * (120 if form != tarfile.USTAR_FORMAT else 80)
    names = ["__meta__/x.json", "a/1.jpg", "a/1.seg.png", "a/2.jpg", "README", f"{long}.jpg", f"{long}.cls", "a/1.jpg"]
    shard = mapped(tmp_path / "x.tar", *((name, name.encode() * 100) for name in names), form=form)
    pieces = iter((memoryview((tmp_path / "x.tar").read_bytes()),))
    samples = list(group.samples(parse.members(lambda: next(pieces, None), "x.tar"), "x.tar"))
    assert shard.keys == [sample["__key__"] for sample in samples] == ["a/1", "a/2", long, "a/1"]
    for i, sample in enumerate(samples):
        assert shard[i] == {f".{name}": value for name, value in sample.items() if not name.startswith("__")}


def test_fields_keep_their_case_and_may_not_come_twice(tmp_path: Path) -> None:
    shard = mapped(tmp_path / "x.tar", ("a.JPG", b"1"), ("a.Cls", b"2"), ("b.x", b"2"), ("b.x", b"3"), ("c.x", b"4"))
    assert (list(shard[0]), shard.keys) == ([".JPG", ".Cls"], ["a", "b", "c"])
    with pytest.raises(DuplicateField, match=r"x\.tar.*'b'.*'\.x'"):
        shard[1]
    with pytest.raises(IndexError):
        shard[3]


def test_an_empty_file_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(NotATar, match="empty"):
        MappedShard("x.tar", (tmp_path / "x.tar").open("rb"))


def test_few_are_open_and_the_least_recent_closes(tmp_path: Path, folder: str) -> None:
    urls = []
    for name in "abc":
        (tmp_path / f"{name}.tar").write_bytes(TAR)
        urls.append(str(tmp_path / f"{name}.tar"))
    opened = OpenShards(2, ShardFiles(folder))
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for url in [*urls, urls[1], urls[2], urls[0], urls[2]]:
        assert len(opened.get_shard(url)) == 5
    assert (opened.accesses, opened.misses, len(opened)) == (7, 4, 2)
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors + 2
    used = opened.get_shard(urls[2])
    opened.clear()
    assert used[0][".cls"] == b"0"  # who still reads may go on
    del used
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    copy = pickle.loads(pickle.dumps(opened))
    assert (len(copy), copy.size, copy.accesses) == (0, 2, 0)


def test_threads_open_a_shard_once(origin: Any, folder: str) -> None:
    url = origin.add("x.tar", TAR)
    opened = OpenShards(2, ShardFiles(folder))
    found: list[MappedShard] = []
    threads = [threading.Thread(target=lambda: found.append(opened.get_shard(url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert (opened.accesses, opened.misses) == (8, 1)
