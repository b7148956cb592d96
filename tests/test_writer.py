"""Shards are whole, appear at once, and hold what webdataset would have put there."""

from __future__ import annotations

import gc
import io
import logging
import os
import stat
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from wds_async.errors import ConfigError, UrlError
from wds_async.tar.decompress import plain
from wds_async.tar.group import samples
from wds_async.tar.parse import members
from wds_async.writer import ShardWriter, TarWriter

SAMPLE: dict[str, Any] = {
    "__key__": "a/b",
    "__url__": "dropped",
    "txt": "grüße",
    "cls": 3,
    "input.npy": np.arange(4.0),
    "json": {"x": 1},
    "jpg": np.zeros((4, 4, 3), np.uint8),
    "bin": b"\0" * 511,
}


def entries(data: bytes | Path) -> list[tuple[Any, ...]]:
    raw = data.read_bytes() if isinstance(data, Path) else data
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return [
            (m.name, m.mode, m.uname, m.gname, m.uid, m.gid, m.mtime, m.type, tar.extractfile(m).read())  # type: ignore[union-attr]
            for m in tar
        ]


def read(data: bytes) -> list[dict[str, Any]]:
    pieces = iter([memoryview(data)])
    return list(samples(members(plain(lambda: next(pieces, None), "u"), "u"), "u"))


def in_memory(*todo: dict[str, Any], **kw: Any) -> bytes:
    out = io.BytesIO()
    with TarWriter(out, **kw) as sink:
        for sample in todo:
            sink.write(sample)
    return out.getvalue()


# -- TarWriter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"keep_meta": True}, {"user": "u", "group": "g", "mode": 0o600}])
def test_holds_what_webdataset_writes(more: dict[str, Any]) -> None:
    from webdataset.writer import TarWriter as Theirs

    out = io.BytesIO()
    sink = Theirs(out, mtime=1700000000, **more)
    size = sink.write(SAMPLE)
    sink.close()
    assert entries(in_memory(SAMPLE, mtime=1700000000, **more)) == entries(out.getvalue())
    with TarWriter(io.BytesIO(), **more) as ours:
        assert ours.write(SAMPLE) == size


def test_is_byte_for_byte_the_tar_that_tarfile_writes() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (("k.a", b"x" * 513), ("k.b", b"")):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uname, info.gname = len(data), 0o444, "bigdata", "bigdata"
            tar.addfile(info, io.BytesIO(data))
    assert in_memory({"__key__": "k", "b": b"", "a": b"x" * 513}, mtime=0) == out.getvalue()
    assert in_memory() == b"\0" * 10240


@pytest.mark.parametrize("compress", [None, True, "gz", "bz2", "xz", "zst"])
def test_with_mtime_the_same_samples_give_the_same_bytes(compress: Any) -> None:
    first = in_memory(SAMPLE, mtime=5.5, compress=compress)
    assert in_memory(SAMPLE, mtime=5.5, compress=compress) == first
    if compress in (True, "gz"):
        assert first[4:8] == (5).to_bytes(4, "little")


def test_a_samples_own_mtime_goes_first() -> None:
    out = io.BytesIO()
    with TarWriter(out, mtime=7) as sink:
        sink.write({"__key__": "a", "x": b""}, mtime=0.0)
        sink.write({"__key__": "b", "x": b""})
    assert [entry[6] for entry in entries(out.getvalue())] == [0, 7]


MAGIC = {
    "x.tar": b"a/b.bin",
    "x.tar.gz": b"\x1f\x8b",
    "x.tgz": b"\x1f\x8b",
    "x.tar.bz2": b"BZh",
    "x.tar.xz": b"\xfd7zXZ",
    "x.tar.zst": b"\x28\xb5\x2f\xfd",
}


@pytest.mark.parametrize("name", MAGIC)
def test_the_suffix_chooses_the_compression(tmp_path: Path, name: str) -> None:
    with TarWriter(str(tmp_path / name)) as sink:
        sink.write(SAMPLE)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(MAGIC[name])
    (sample,) = read(data)
    assert sample["txt"] == "grüße".encode()
    assert list(sample)[2:] == sorted(key for key in SAMPLE if not key.startswith("__"))


def test_compress_beats_the_suffix(tmp_path: Path) -> None:
    for name, compress, magic in (("a.tar", "zst", MAGIC["x.tar.zst"]), ("b.tgz", False, b"a/b.bin")):
        with TarWriter(tmp_path / name, compress=compress) as sink:
            sink.write(SAMPLE)
        assert (tmp_path / name).read_bytes().startswith(magic)
    with pytest.raises(ConfigError, match="compress='lz4'"):
        TarWriter(tmp_path / "c.tar", compress="lz4")
    assert not list(tmp_path.glob("*c.tar*"))


def test_meta_fields_are_kept_on_request_and_are_text() -> None:
    assert entries(in_memory(SAMPLE, keep_meta=True))[0][0] == "a/b.__url__"
    in_memory({"__key__": "k", "__json__": {"not": "text"}, "x": b""})
    with pytest.raises(ValueError, match="metadata is str"):
        in_memory({"__key__": "k", "__json__": {"not": "text"}}, keep_meta=True)


@pytest.mark.parametrize(
    ("bad", "kw"),
    [
        ({"txt": "no key"}, {}),
        ({"__key__": 7, "txt": "x"}, {}),
        ({"__key__": "k", "a": b"good", "z": 5}, {}),
        ({"__key__": "k", "a": b"good", "z": "text"}, {"encoder": False}),
        ({"__key__": "k", "a": b"good", "z" * 120: b""}, {}),
        ({"__key__": "k" * 300, "a": b"good"}, {}),
    ],
)
def test_a_sample_that_cannot_be_written_leaves_nothing_of_it(bad: dict[str, Any], kw: dict[str, Any]) -> None:
    out = io.BytesIO()
    with TarWriter(out, **kw) as sink:
        with pytest.raises(ValueError):
            sink.write(bad)
        sink.write({"__key__": "good", "x": b"1"})
    assert [entry[0] for entry in entries(out.getvalue())] == ["good.x"]


def test_a_long_key_names_itself_and_the_way_out() -> None:
    key = "k" * 120
    with pytest.raises(ConfigError, match=f"'{key}'.*'jpg'.*format=tarfile.PAX_FORMAT"):
        in_memory({"__key__": key, "jpg": b""})
    assert in_memory({"__key__": "d" * 100 + "/" + "k" * 90, "jpg": b""})
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, "PAX_FORMAT"):
        (sample,) = read(in_memory({"__key__": key, "jpg": b"x"}, format=format))
        assert (sample["__key__"], sample["jpg"]) == (key, b"x")
    with pytest.raises(ConfigError, match="format="):
        TarWriter(io.BytesIO(), format="ZIP")


def test_pax_keeps_fractions_of_seconds() -> None:
    data = in_memory({"__key__": "k", "x": b""}, mtime=1.25, format=tarfile.PAX_FORMAT)
    assert entries(data)[0][6] == 1.25


def test_buffers_of_every_kind() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    sample = {"__key__": "k", "a": bytearray(b"x"), "b": memoryview(array), "c": memoryview(array)[::2]}
    out = io.BytesIO()
    with TarWriter(out, encoder=False) as sink:
        assert sink.write(sample) == 1 + 12 + 6
    assert [entry[-1] for entry in entries(out.getvalue())] == [b"x", array.tobytes(), array[::2].tobytes()]


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with TarWriter(path) as sink:
        sink.write(SAMPLE)
        (only,) = tmp_path.iterdir()
        assert only.name.startswith(f".x.tar.{os.getpid()}-")
        assert only.name.endswith(".tmp")
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(SAMPLE)


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.bz2", "x.tar.xz", "x.tar.zst"])
def test_after_an_exception_nothing_appears_and_what_was_there_stays(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="__key__"), TarWriter(path) as sink:
        sink.write(SAMPLE) and sink.write({"no": b"key"})
    gc.collect()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"before"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "x.tar").symlink_to(tmp_path / "there" / "y.tar")
    with TarWriter(tmp_path / "x.tar") as sink:
        sink.write(SAMPLE)
    assert (tmp_path / "x.tar").is_symlink()
    assert len(entries(tmp_path / "there" / "y.tar")) == 6


def test_file_urls_and_their_percents(tmp_path: Path) -> None:
    with TarWriter(f"file:{tmp_path}/a%20b.tar") as sink:
        sink.write(SAMPLE)
    assert (tmp_path / "a b.tar").exists()


def test_a_fifo_is_written_and_not_replaced(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE) as cat:
        with TarWriter(str(fifo)) as sink:
            sink.write(SAMPLE)
        out, _ = cat.communicate(timeout=20)
    assert len(entries(out)) == 6
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_standard_output() -> None:
    code = "from wds_async.writer import TarWriter\nwith TarWriter('-') as s: s.write({'__key__': 'k', 'txt': 'x'})"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=Path(__file__).parent.parent
    )
    assert [entry[0] for entry in entries(out.stdout)] == ["k.txt"]


@pytest.mark.parametrize("url", ["pipe:cat > x.tar", "http://h/x.tar", "gs://b/x.tar", "s3://b/x.tar?sig=hush"])
def test_what_is_not_local_is_refused(url: str) -> None:
    with pytest.raises(UrlError, match="local files") as info:
        TarWriter(url)
    assert "hush" not in str(info.value)


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TarWriter(tmp_path / "missing" / "x.tar")


class FullDisk(io.BytesIO):
    room = 5000

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("compress", [None, "gz", "bz2", "xz", "zst"])
def test_the_error_of_a_full_disk_is_the_one_that_is_seen(compress: str | None) -> None:
    noise = np.random.default_rng(1).bytes(20_000)
    sink = TarWriter(FullDisk(), compress=compress)
    with pytest.raises(OSError, match="No space left"), sink:
        sink.write({"__key__": "k", "bin": noise})
    gc.collect()


def test_a_forgotten_writer_is_closed_with_a_warning(tmp_path: Path) -> None:
    sink = TarWriter(tmp_path / "x.tar")
    sink.write(SAMPLE)
    with pytest.warns(ResourceWarning, match="never closed"):
        del sink
    assert len(entries(tmp_path / "x.tar")) == 6


# -- ShardWriter ----------------------------------------------------------------------------------------------------


def small(number: int) -> dict[str, Any]:
    return {"__key__": f"{number:04d}", "cls": number % 10, "bin": b"x" * 99}


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


def test_rolls_by_size_before_a_sample(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s-%d.tar", maxsize=250) as sink:
        for number in range(7):
            sink.write(small(number))
    assert [len(keys(path)) for path in sorted(tmp_path.iterdir())] == [3, 3, 1]


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
    caplog.set_level(logging.INFO, "wds_async.writer")
    for verbose in (1, 0):
        with ShardWriter(str(tmp_path / f"{verbose}-%d.tar"), verbose=verbose) as sink:
            sink.write(small(0))
    assert [record.getMessage() for record in caplog.records] == [f"writing {tmp_path}/1-0.tar after 0 samples"]
    assert capfd.readouterr() == ("", "")
