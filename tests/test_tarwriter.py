"""A tar is whole, appears at once, and holds what webdataset would have put there."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.writing import SAMPLE, entries, in_memory, memory, read
from wds_async.errors import ConfigError, PipeError, UrlError
from wds_async.tar.index import read_dali
from wds_async.tar.write import member_header
from wds_async.writer import TarWriter

# -- TarWriter ----------------------------------------------------------------------------------------------------


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
        ({"__key__": "k", "a": b"good", 5: b"its name is no str"}, {}),
        ({"__key__": "k", "a": b"good", "z": "text"}, {"encoder": False}),
        ({"__key__": "k", "a": b"good", "z" * 120: b""}, {"format": "USTAR_FORMAT"}),
        ({"__key__": "k" * 300, "a": b"good"}, {"format": tarfile.USTAR_FORMAT}),
        ({"__key__": "k\ud800", "a": b"good"}, {}),
        ({"__key__": "", "a": b"good"}, {}),
        ({"__key__": "k", "a": b"good", "A": b"the same"}, {}),
    ],
)
def test_a_sample_that_cannot_be_written_leaves_nothing_of_it(bad: dict[str, Any], kw: dict[str, Any]) -> None:
    out = io.BytesIO()
    with TarWriter(out, **kw) as sink:
        with pytest.raises(ValueError):
            sink.write(bad)
        sink.write({"__key__": "good", "x": b"1"})
    assert [entry[0] for entry in entries(out.getvalue())] == ["good.x"]


LONG = ["k" * 120, "d" * 100 + "/" + "k" * 90, "d" * 200 + "/" + "k" * 50, "é" * 60, "k" * 3000, "a/" * 200 + "b"]


@pytest.mark.parametrize("key", LONG, ids=len)
def test_long_keys_are_read_back_by_everyone(tmp_path: Path, key: str) -> None:
    data = in_memory({"__key__": "short", "x": b"0"}, {"__key__": key, "jpg": b"1"}, mtime=5)
    assert [entry[0] for entry in entries(data)] == ["short.x", f"{key}.jpg"]
    assert [sample["__key__"] for sample in read(data)] == ["short", key]
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    listed = subprocess.run(["tar", "--quoting-style=literal", "-tf", path], capture_output=True, check=True)
    assert listed.stdout.decode() == f"short.x\n{key}.jpg\n"
    from webdataset.tariterators import group_by_keys, tar_file_expander

    theirs = group_by_keys(tar_file_expander([{"url": "u", "stream": io.BytesIO(data)}]))
    assert [sample["__key__"] for sample in theirs] == ["short", key]


@pytest.mark.parametrize("key", ["k", "a/b", "d" * 60 + "/" + "k" * 60, "naïve/日本", "k\udcff", *LONG], ids=ascii)
def test_the_default_takes_every_key_that_webdatasets_takes(key: str) -> None:
    from webdataset.writer import TarWriter as Theirs

    sample = {"__key__": key, "jpg": b"1", "seg.png": b"2" * 600}
    out = io.BytesIO()
    theirs = Theirs(out, mtime=1700000000)
    theirs.write(sample)
    theirs.close()
    ours = in_memory(sample, mtime=1700000000)
    assert entries(ours) == entries(out.getvalue())
    assert len(ours) <= len(out.getvalue())
    if key in ("k", "a/b"):
        assert ours == out.getvalue()


def test_a_format_that_is_named_is_kept_to() -> None:
    key = "k" * 120
    with pytest.raises(ConfigError, match=f"'{key}'.*'jpg'.*leave format= away"):
        in_memory({"__key__": key, "jpg": b""}, format="USTAR_FORMAT")
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, "PAX_FORMAT"):
        (sample,) = read(in_memory({"__key__": key, "jpg": b"x"}, format=format))
        assert (sample["__key__"], sample["jpg"]) == (key, b"x")
    with pytest.raises(ConfigError, match="format="):
        TarWriter(io.BytesIO(), format="ZIP")


_NAMES = st.one_of(
    st.text("a/.ü\udc80ﬀ-%", min_size=1, max_size=300), st.integers(97, 103).map(lambda size: "n" * size)
)
_OWNERS = st.sampled_from(["", "bigdata", "50 %", "ü", "u" * 31, "u" * 32, "u" * 33])
_FORMATS = st.sampled_from([None, tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@given(
    _NAMES, st.one_of(st.integers(0, 5000), st.sampled_from([8**11 - 1, 8**11])), _OWNERS, _OWNERS,
    st.sampled_from([0, 1, 5.75, 1_700_000_000, 8**11, -3]), st.sampled_from([0o444, 0o7777, 0]), _FORMATS,
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_header_is_that_of_tarfile(
    name: str, size: int, user: str, group: str, mtime: float, mode: int, format: int | None
) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.uname, info.gname, info.mode = size, user, group, mode
    info.mtime = mtime if format == tarfile.PAX_FORMAT else int(mtime)
    try:
        expected = info.tobuf(tarfile.USTAR_FORMAT if format is None else format, "utf-8", "surrogateescape")
    except ValueError as exn:
        if format is not None:
            with pytest.raises(ValueError, match=re.escape(str(exn))):
                member_header(name, size, mtime, mode=mode, user=user, group=group, format=format)
            return
        expected = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    assert member_header(name, size, mtime, mode=mode, user=user, group=group, format=format) == expected


def test_buffers_of_every_kind() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    sample = {"__key__": "k", "a": bytearray(b"x"), "b": memoryview(array), "c": memoryview(array)[::2]}
    out = io.BytesIO()
    with TarWriter(out, encoder=False) as sink:
        assert sink.write(sample) == 1 + 12 + 6
    assert [entry[-1] for entry in entries(out.getvalue())] == [b"x", array.tobytes(), array[::2].tobytes()]


# -- files ----------------------------------------------------------------------------------------------------------


def test_parts_of_every_size_are_written_in_their_order() -> None:
    sizes = (70_000, 0, 4096, 4097, 5, 65_536, 511, 513)
    sample = {"__key__": "a", **{f"f{n}": bytes([n + 1]) * size for n, size in enumerate(sizes)}}
    data = in_memory(sample, mtime=0)
    assert [(entry[0], entry[-1]) for entry in entries(data)] == [
        (f"a.f{n}", sample[f"f{n}"]) for n in range(len(sizes))
    ]


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


def test_a_fifo_is_written_and_not_replaced(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE) as cat:
        with TarWriter(str(fifo)) as sink:
            sink.write(SAMPLE)
        out, _ = cat.communicate(timeout=20)
    assert len(entries(out)) == 6
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_an_object_appears_whole_or_not_at_all() -> None:
    files = memory()
    with TarWriter("memory://b/x.tar.gz") as sink:
        sink.write(SAMPLE)
        assert files.find("/") == []
    (sample,) = read(files.cat("/b/x.tar.gz"))
    assert sample["cls"] == b"3"
    before = files.cat("/b/x.tar.gz")
    with pytest.raises(ValueError, match="__key__"), TarWriter("memory://b/x.tar.gz") as sink:
        all(map(sink.write, [SAMPLE, {"no": b"key"}]))
    assert files.find("/") == ["/b/x.tar.gz"]
    assert files.cat("/b/x.tar.gz") == before


def test_a_command_takes_the_tar(tmp_path: Path) -> None:
    with TarWriter(f"pipe:tr a b > {tmp_path}/x.tar") as sink:
        sink.write(SAMPLE)
    assert (tmp_path / "x.tar").read_bytes()[:8] == b"b/b.bin\0"


def test_a_command_that_fails_is_named_without_its_secrets() -> None:
    with (
        pytest.raises(PipeError, match="status 7") as info,
        TarWriter("pipe:cat > /dev/null; exit 7 # --token=hush") as sink,
    ):
        sink.write(SAMPLE)
    assert "hush" not in str(info.value)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(UrlError, match="unknown scheme 'nowhere'") as info:
        TarWriter("nowhere://b/x.tar?sig=hush")
    assert "hush" not in str(info.value)


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


def test_after_a_full_disk_nothing_more_is_written() -> None:
    disk = FullDisk()
    disk.room = 20_000
    sink = TarWriter(disk)
    sink.write(SAMPLE)
    with pytest.raises(OSError, match="No space left"):
        sink.write({"__key__": "k", "bin": bytes(100_000)})
    disk.room = 1 << 20
    before = disk.getvalue()
    with pytest.raises(ValueError, match="closed"):
        sink.write({"__key__": "l", "bin": b""})
    sink.close()
    assert disk.getvalue() == before


def test_a_forgotten_writer_is_closed_with_a_warning(tmp_path: Path) -> None:
    sink = TarWriter(tmp_path / "x.tar")
    sink.write(SAMPLE)
    with pytest.warns(ResourceWarning, match="never closed"):
        del sink
    assert len(entries(tmp_path / "x.tar")) == 6


# -- leaving without close ------------------------------------------------------------------------------------------

OPEN = "import sys\nfrom wds_async.writer import TarWriter\nsink = TarWriter(sys.argv[1])\n"
WRITE = "sink.write({'__key__': 'k', 'bin': bytes(100000)})\n"


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)\n", "1 / 0\n"])
def test_an_exit_without_close_writes_nothing_and_says_so(tmp_path: Path, end: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(b"before")
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", OPEN + WRITE + end, path], cwd=root, capture_output=True, text=True, check=False
    )
    assert f"{path} was never closed" in done.stderr
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"before"


def test_a_killed_process_leaves_only_the_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    code = OPEN + WRITE + "print('written', flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code, path],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()
    (only,) = tmp_path.iterdir()
    assert only.name == f".x.tar.{process.pid}-{only.name[-12:-4]}.tmp"


# -- what is counted, and the index ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.zst"])
def test_payload_and_container_count_bytes(tmp_path: Path, name: str) -> None:
    with TarWriter(tmp_path / name) as sink:
        size = sink.write(SAMPLE) + sink.write({"__key__": "b", "bin": b"12345"})
    assert (sink.payload, sink.count) == (size, 2)
    assert sink.container == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("index", ["dali", True])
def test_dalis_index_says_where_the_fields_are(tmp_path: Path, index: Any) -> None:
    todo = [{"__key__": "a/1", "jpg": b"x" * 700, "cls": 3}, {"__key__": "k" * 150, "jpg": b"long"}]
    with TarWriter(tmp_path / "x.y.tar", index=index) as sink:
        assert [sink.write(sample) for sample in todo] == [701, 4]
        assert not (tmp_path / "x.idx").exists()
    samples = read_dali((tmp_path / "x.idx").read_text())
    data = (tmp_path / "x.y.tar").read_bytes()
    found = [{name: data[offset : offset + size] for name, offset, size in sample} for sample in samples]
    assert found == [{"a/1.cls": b"3", "a/1.jpg": b"x" * 700}, {f"{'k' * 150}.jpg": b"long"}]


def test_the_json_index_of_one_tar(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "x.tar.zst", index="json") as sink:
        sink.write(SAMPLE)
    size = (tmp_path / "x.tar.zst").stat().st_size
    listed = json.loads((tmp_path / "x.json").read_text())["shardlist"]
    assert listed == [{"url": "x.tar.zst", "nsamples": 1, "filesize": size}]


def test_an_index_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain tars only"):
        TarWriter(tmp_path / "x.tar.gz", index="dali")
    with pytest.raises(ConfigError, match="needs a name"):
        TarWriter(io.BytesIO(), index="dali")
    with pytest.raises(ConfigError, match="index='parquet'"):
        TarWriter(tmp_path / "x.tar", index="parquet")
    with pytest.raises(ValueError, match="blanks"), TarWriter(tmp_path / "x.tar", index="dali") as sink:
        sink.write({"__key__": "a b", "x": b""})
    assert list(tmp_path.iterdir()) == []


def test_quality_is_that_of_jpeg() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (32, 32, 3), np.uint8)
    sizes = [len(read(in_memory({"__key__": "k", "jpg": noise}, quality=q))[0]["jpg"]) for q in (10, 60, 100, None)]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]
