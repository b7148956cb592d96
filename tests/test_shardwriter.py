"""Shards are numbered, whole, and none is empty."""

from __future__ import annotations

import io
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.writing import entries, memory, read, small
from wds_async.errors import ConfigError
from wds_async.tar.index import read_dali
from wds_async.writer import ShardWriter


def keys(path: Path) -> list[str]:
    return [str(sample["__key__"]) for sample in read(path.read_bytes())]


def test_rolls_by_count(tmp_path: Path) -> None:
    done: list[str] = []
    pattern = str(tmp_path / "s-%03d.tar")
    with ShardWriter(pattern, maxcount=4, start_shard=5, post=done.append) as sink:
        for number in range(10):
            sink.write(small(number))
        assert done == [pattern % 5, pattern % 6]
        assert (sink.count, sink.total, sink.size, sink.shard) == (2, 10, 200, 8)
    assert done == [pattern % 5, pattern % 6, pattern % 7]
    assert [keys(Path(name)) for name in done] == [
        ["0000", "0001", "0002", "0003"],
        ["0004", "0005", "0006", "0007"],
        ["0008", "0009"],
    ]
    with pytest.raises(ValueError, match="closed"):
        sink.write(small(0))


def test_no_samples_make_no_shard(tmp_path: Path) -> None:
    done: list[str] = []
    with ShardWriter(str(tmp_path / "s-%d.tar"), post=done.append):
        pass
    with ShardWriter(str(tmp_path / "s-%d.tar"), post=done.append) as sink, pytest.raises(ValueError):
        sink.write({"no": b"key"})
    with ShardWriter(str(tmp_path / "s-%d.tar"), post=done.append) as sink:
        sink.next_stream()
    assert list(tmp_path.iterdir()) == []
    assert done == []


def test_next_stream_and_finish_cut_where_the_user_says(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "s-%d.tar")) as sink:
        sink.write(small(0))
        sink.next_stream()
        sink.write(small(1))
        sink.finish()
        sink.finish()
        sink.write(small(2))
    assert [keys(path) for path in sorted(tmp_path.iterdir())] == [["0000"], ["0001"], ["0002"]]


def test_an_exception_discards_the_shard_that_is_open(tmp_path: Path) -> None:
    done: list[str] = []
    todo = [small(0), small(1), small(2), {"no": b"key"}]
    with pytest.raises(ValueError), ShardWriter(str(tmp_path / "s-%d.tar"), maxcount=2, post=done.append) as sink:
        any(map(sink.write, todo))
    assert [path.name for path in tmp_path.iterdir()] == ["s-0.tar"]
    assert len(done) == 1


def test_an_opener_gives_the_files_and_they_are_closed(tmp_path: Path) -> None:
    opened: list[tuple[str, io.BytesIO, list[bytes]]] = []

    class Kept(io.BytesIO):
        def close(self) -> None:
            opened[-1][2].append(self.getvalue())
            super().close()

    def opener(name: str) -> io.BytesIO:
        opened.append((name, Kept(), []))
        return opened[-1][1]

    with ShardWriter("gs://b/s-%d.tar.gz", maxcount=1, opener=opener, compress=True) as sink:
        sink.write(small(0))
        sink.write(small(1))
    assert [name for name, _, _ in opened] == ["gs://b/s-0.tar.gz", "gs://b/s-1.tar.gz"]
    assert all(file.closed for _, file, _ in opened)
    for _, _, (data,) in opened:
        assert len(read(zlib.decompress(data, 31))) == 1


def test_arguments_go_to_the_tar_writer(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "s-%d.tar"), user="me", mtime=9, encoder=False, compress="zst") as sink:
        sink.write({"__key__": "k", "x": b"1"})
    data = zstandard.ZstdDecompressor().decompressobj().decompress((tmp_path / "s-0.tar").read_bytes())
    assert [(entry[0], entry[2], entry[6]) for entry in entries(data)] == [("k.x", "me", 9)]


@pytest.mark.parametrize("pattern", ["x.tar", "x-%d-%d.tar", "x-%q.tar", "x-%%d.tar"])
def test_a_pattern_has_one_place_for_the_number(pattern: str) -> None:
    with pytest.raises(ConfigError, match="one place for the number"):
        ShardWriter(pattern)


def test_verbose_logs_and_prints_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "wds_async")
    for verbose in (1, 0):
        with ShardWriter(str(tmp_path / f"{verbose}-%d.tar"), verbose=verbose) as sink:
            sink.write(small(0))
    assert [record.getMessage() for record in caplog.records] == [f"writing {tmp_path}/1-0.tar after 0 samples"]
    assert capfd.readouterr() == ("", "")


# -- objects, indexes, counts ---------------------------------------------------------------------------------------


def test_urls_and_their_indexes() -> None:
    files = memory()
    done: list[str] = []
    with ShardWriter("memory://b/s-%02d.tar", maxcount=2, index=True, post=done.append) as sink:
        any(map(sink.write, map(small, range(5))))
    assert done == [f"memory://b/s-{n:02d}.tar" for n in range(3)]
    assert files.find("/") == ["/b/s-00.idx", "/b/s-00.tar", "/b/s-01.idx", "/b/s-01.tar", "/b/s-02.idx",
                                "/b/s-02.tar", "/b/s.json"]  # fmt: skip
    assert json.loads(files.cat("/b/s.json")) == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": "s",
        "shardlist": [{"url": f"s-{n:02d}.tar", "nsamples": k, "filesize": 10240} for n, k in enumerate((2, 2, 1))],
    }
    data = files.cat("/b/s-01.tar")
    (_, second) = read_dali(files.cat("/b/s-01.idx").decode())
    assert [(name, data[at : at + size]) for name, at, size in second] == [("0003.bin", b"x" * 99), ("0003.cls", b"3")]


def test_an_exception_leaves_no_half_object_and_no_list() -> None:
    files = memory()
    with pytest.raises(ValueError), ShardWriter("memory://s-%d.tar", maxcount=2, index=True) as sink:
        any(map(sink.write, [small(0), small(1), small(2), {"no": b"key"}]))
    assert files.find("/") == ["/s-0.idx", "/s-0.tar"]


def test_where_the_list_goes(tmp_path: Path) -> None:
    for pattern, index, expected in (
        ("a-%d.tar.zst", "json", "a.json"),
        ("%06d.tar", "json", "index.json"),
        ("b-%d.tar", str(tmp_path / "elsewhere" / "all.json"), "elsewhere/all.json"),
    ):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        with ShardWriter(tmp_path / pattern, index=index) as sink:
            sink.write(small(0))
        (shard,) = json.loads((tmp_path / expected).read_text())["shardlist"]
        shown = str(tmp_path / (pattern % 0)) if "/" in expected else pattern % 0
        assert (shard["url"], shard["nsamples"]) == (shown, 1)
        assert shard["filesize"] == (tmp_path / (pattern % 0)).stat().st_size


def test_an_opener_opens_the_indexes_too(tmp_path: Path) -> None:
    with ShardWriter("s-%d.tar", index=True, opener=lambda name: open(tmp_path / name, "wb")) as sink:
        sink.write(small(0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-0.idx", "s-0.tar", "s.json"]


@pytest.mark.parametrize(
    ("pattern", "index", "why"),
    [
        ("x-%d.tar.gz", "dali", "plain tars only"),
        ("x-%d.tar.zst", True, 'index="json"'),
        ("x-%d.tar", "xml", "index='xml'"),
        ("pipe:cat > x-%d.tar", "json", "needs a name"),
    ],
)
def test_an_index_that_cannot_be_is_refused_before_anything_is_written(pattern: str, index: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ShardWriter(pattern, index=index)


def test_many_headers_are_told_once_with_the_cure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ShardWriter(tmp_path / "s-%d.tar", maxcount=400, verbose=0) as sink:
        any(map(sink.write, map(small, range(1000))))
    (record,) = caplog.records
    assert "95 % of these shards are tar headers" in record.getMessage()
    assert ".tar.zst" in record.getMessage()
    assert sink.payload == 100 * 1000
    assert sink.container == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sink.overhead == 1 - sink.payload / sink.container


def test_large_fields_and_compressed_shards_are_fine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ShardWriter(tmp_path / "s-%d.tar", verbose=0) as sink:
        for number in range(20):
            sink.write({"__key__": str(number), "bin": bytes(100_000)})
    assert 0 < sink.overhead < 0.02
    with ShardWriter(tmp_path / "s-%d.tar.zst", verbose=0) as sink:
        any(map(sink.write, map(small, range(1000))))
    assert sink.overhead == 0.0
    assert caplog.records == []


def test_a_hook_that_fails_is_heard_and_its_shard_stays(tmp_path: Path) -> None:
    def post(name: str) -> None:
        raise RuntimeError("the hook")

    with pytest.raises(RuntimeError, match="the hook"), ShardWriter(tmp_path / "s-%d.tar", 2, post=post) as sink:
        any(map(sink.write, map(small, range(3))))
    assert [path.name for path in tmp_path.iterdir()] == ["s-0.tar"]


def test_a_full_disk_leaves_the_shards_before(tmp_path: Path) -> None:
    room = iter([None, None])

    def opener(name: str) -> Any:
        return open(tmp_path / name, "wb") if next(room, 0) is None else open("/dev/full", "wb")

    with pytest.raises(OSError, match="No space left"), ShardWriter("s-%d.tar", 1, opener=opener) as sink:
        any(map(sink.write, map(small, range(3))))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-0.tar", "s-1.tar"]


def test_warnings_about_names_are_said_once_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ShardWriter(tmp_path / "s-%d.tar", maxcount=1, verbose=0) as sink:
        for number in range(3):
            sink.write({"__key__": f"{number}.5", "x": b""})
    assert ["dot in its last component" in record.getMessage() for record in caplog.records] == [True]


def test_the_first_key_of_a_shard_may_be_the_last_of_the_one_before(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s-%d.tar", maxcount=1) as sink:
        sink.write(small(0))
        sink.write(small(0))
    assert sink.total == 2
