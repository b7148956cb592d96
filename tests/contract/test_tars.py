"""Side by side with webdataset 1.0.2: the samples of odd, compressed and broken shards, and the parts of reading."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as ours
from tests.contract.common import agree, outcome, read, same, without_path
from tests.servers import make_shards, make_tar

theirs = pytest.importorskip("webdataset")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

BOTH = (theirs, ours)

ODD_NAMES = [
    "a/b.c/001.x.JPG", "a/b.c/001.cls", "./002.cls", "noext", ".hidden", "d/.hidden", "__meta__/a.json", "__k__.txt",
    "003.", "004..x", "005.TXT", "005.cls", "006.a.b.c", "dir/007.x", "007.x", "007.y", "__index__", "0 8.txt",
    "é.txt", "x__.a", "__x.b", "009/__meta__/y.txt", "/abs/010.txt", "../011.txt", "012.tar.gz", "a.b/.c",
    "013.\n", "014.x y",
]  # fmt: skip


def equal(tmp_path: Path, data: bytes, name: str = "x.tar", **kw: Any) -> list[Any]:
    """Read by both, equal in keys, fields, their order and the error at the end."""
    (tmp_path / name).write_bytes(data)

    def run(wds: Any) -> Any:
        handlers = {k: getattr(wds, v) if k == "handler" else v for k, v in kw.items()}
        return outcome(lambda: wds.WebDataset(str(tmp_path / name), shardshuffle=False, **handlers))

    expected, got = run(theirs), run(ours)
    agree(expected, got)
    assert [list(s) for s in without_path(expected[0])] == [list(s) for s in without_path(got[0])]
    return expected[0]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_odd_names(tmp_path: Path, form: int) -> None:
    assert len(equal(tmp_path, make_tar([(n, n.encode()) for n in ODD_NAMES], format=form))) > 10


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names(tmp_path: Path, form: int) -> None:
    names = [f"{'d' * 60}/{'e' * 90}/{'k' * 99}{i}.{'x' * 120}.txt" for i in range(4)]
    assert len(equal(tmp_path, make_tar([(n, b"data") for n in names], format=form))) == 4


@pytest.mark.parametrize("options", [["--format=gnu"], *[["--format=posix", f"--sparse-version={v}"] for v in "01"]])
def test_sparse_members(tmp_path: Path, options: list[str]) -> None:
    names = [f"{number}.bin" for number in range(4)]
    for number, name in enumerate(names):
        with open(tmp_path / name, "wb") as file:
            for piece in range(number * 4):  # more than three need several blocks for their map
                file.seek((piece + 1) * 65536)
                file.write(bytes([piece + 1]) * 5000)
            file.truncate(1 << 20)
    packed = tmp_path / "packed.tar"
    command = ["tar", *options, "--hole-detection=raw", "-Scf", str(packed), "-C", str(tmp_path), *names]
    subprocess.run(command, check=True)
    assert packed.stat().st_size < 1 << 20
    assert [len(sample["bin"]) for sample in equal(tmp_path, packed.read_bytes())] == [1 << 20] * 4


def test_a_large_pax_header(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size, info.pax_headers = 4, {"comment": "c" * (2 << 20)}
            archive.addfile(info, io.BytesIO(b"text"))
    assert len(equal(tmp_path, out.getvalue())) == 3


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"])
@pytest.mark.parametrize("name", ["x.tar", "x.tgz", "x"])
def test_compressed(tmp_path: Path, pack: Callable[[bytes], bytes], name: str) -> None:
    data = make_tar([(f"{i}.{field}", bytes([i]) * 5000) for i in range(20) for field in ("cls", "png")])
    assert len(equal(tmp_path, pack(data), name)) == 20


def test_links_folders_and_devices(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    kinds = [
        ("d", tarfile.DIRTYPE), ("d/a.txt", tarfile.REGTYPE), ("d/a.lnk", tarfile.SYMTYPE),
        ("d/a.hard", tarfile.LNKTYPE), ("d/a.fifo", tarfile.FIFOTYPE), ("d/a.old", tarfile.AREGTYPE),
        ("d/a.cont", tarfile.CONTTYPE), ("d/a.cls", tarfile.REGTYPE),
    ]  # fmt: skip
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in kinds:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "d/a.txt" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            data = b"abc" if kind in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE) else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert len(equal(tmp_path, buffer.getvalue())) == 1


@pytest.mark.parametrize(
    "members",
    [
        [("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3")],  # a key that returns is another sample
        [("a.x", b""), ("a.y", b"0")],
        [("a.X", b"1"), ("a.y.Z", b"2")],
        [("a.__bad__", b"1"), ("a.x", b"2"), ("b.x", b"3")],
        [("a.__key__", b"1")],
        [],
        [("a", b"1")],
    ],
)
@pytest.mark.parametrize("empty_check", [True, False])
def test_grouping(tmp_path: Path, members: list[tuple[str, bytes]], empty_check: bool) -> None:
    equal(tmp_path, make_tar(members), empty_check=empty_check)


@pytest.mark.parametrize("handler", ["reraise_exception", "ignore_and_continue", "ignore_and_stop"])
def test_a_field_that_comes_twice(tmp_path: Path, handler: str) -> None:
    members = [("a.x", b"1"), ("b.x", b"1"), ("b.X", b"2"), ("b.y", b"3"), ("c.x", b"4")]
    equal(tmp_path, make_tar(members), handler=handler)


CUTS = [100, 512, 700, 1024, 1500, 1536, 2000, 3 * 1536 + 10, 5 * 1536 + 600, 6 * 1536 + 100]


@pytest.mark.parametrize("handler", ["reraise_exception", "ignore_and_continue", "ignore_and_stop"])
@pytest.mark.parametrize("cut", CUTS)
def test_cut_short(tmp_path: Path, cut: int, handler: str) -> None:
    """What was read before the end is the same, but for the sample that is cut, which we never give out: a row of the
    table."""
    if handler == "reraise_exception" and cut % 1536 < 512:
        pytest.skip("a shard that ends inside a header: row of the table")
    data = make_tar([(f"{i}.{field}", bytes([i]) * 600) for i in range(3) for field in ("cls", "txt")])
    if handler == "reraise_exception":
        equal(tmp_path, data[:cut], handler=handler, empty_check=False)
        return
    path = tmp_path / "x.tar"
    path.write_bytes(data[:cut])
    options = {"shardshuffle": False, "empty_check": False}
    whole, given = (list(wds.WebDataset(str(path), handler=getattr(wds, handler), **options)) for wds in BOTH)
    assert same(given, whole[: len(given)])
    if cut % 1536:  # between two members a cut looks like the end of an archive without end blocks
        assert all({"cls", "txt"} <= set(sample) for sample in given)
    assert len(whole) - len(given) in (0, 1)


@pytest.mark.parametrize("handler", ["reraise_exception", "ignore_and_continue", "ignore_and_stop"])
@pytest.mark.parametrize(
    "data", [b"", b"<html>" * 300, bytes(1024), bytes(20480), gzip.compress(b"no tar" * 300), b"\x1f\x8b\x08bad"]
)
def test_what_is_no_tar(tmp_path: Path, data: bytes, handler: str) -> None:
    equal(tmp_path, data, handler=handler, empty_check=False)


@pytest.mark.parametrize("handler", ["ignore_and_continue", "ignore_and_stop"])
def test_a_missing_shard_among_others(tmp_path: Path, handler: str) -> None:
    make_shards(tmp_path, 3, 2)
    (tmp_path / "shard-000001.tar").unlink()
    urls = [str(tmp_path / f"shard-{i:06}.tar") for i in range(3)]
    runs = [outcome(lambda w=w: w.WebDataset(urls, shardshuffle=False, handler=getattr(w, handler))) for w in BOTH]
    agree(*runs)
    assert len(runs[0][0]) == (4 if handler == "ignore_and_continue" else 2)


def test_a_missing_shard(tmp_path: Path) -> None:
    agree(*[outcome(lambda w=w: w.WebDataset(str(tmp_path / "no.tar"), shardshuffle=False)) for w in BOTH])


@pytest.mark.parametrize("failing", ["select_files", "rename_files"])
@pytest.mark.parametrize("handler", ["reraise_exception", "ignore_and_continue", "ignore_and_stop"])
def test_predicates_that_fail(tmp_path: Path, failing: str, handler: str) -> None:
    def fail_at_three(name: str) -> str:
        if name.startswith("3"):
            raise ZeroDivisionError
        return name

    data = make_tar([(f"{i}.{field}", b"x") for i in range(6) for field in ("a", "b")])
    equal(tmp_path, data, handler=handler, **{failing: fail_at_three})


def test_selecting_and_renaming(tmp_path: Path) -> None:
    make_shards(tmp_path, 2, 4)
    arguments: dict[str, Any] = {
        "select_files": lambda name: name.endswith((".label", ".json")),
        "rename_files": lambda name: name.replace(".cls", ".label"),
    }
    url = str(tmp_path / "shard-{000000..000001}.tar")
    runs = [read(w, url, **arguments) for w in BOTH]
    assert list(without_path(runs[0])) == list(without_path(runs[1]))
    runs = [
        list(w.DataPipeline(w.SimpleShardList(url), w.tarfile_to_samples(**arguments)))
        for w in BOTH
    ]  # fmt: skip
    assert list(without_path(runs[0])) == list(without_path(runs[1]))
    assert set(runs[0][0]) == {"__key__", "__url__", "label", "json"}


def test_local_paths(tmp_path: Path) -> None:
    make_shards(tmp_path, 2, 4)
    url = str(tmp_path / "shard-{000000..000001}.tar")
    runs = [[s.get("__local_path__") for s in read(w, url)] for w in BOTH]
    assert runs[0] == runs[1]


def test_the_parts_of_reading(tmp_path: Path) -> None:
    """Opening, listing members and grouping, one after the other, as programs put them together."""
    data = make_tar([(f"{i}.{field}", b"%d" % i) for i in range(3) for field in ("cls", "TXT")] + [("__m__/x.y", b"m")])
    (tmp_path / "x.tar").write_bytes(data)
    for suffixes, lcase in ((None, True), ({"cls"}, True), (None, False)):
        runs = []
        for wds in BOTH:
            room = wds.tariterators
            opened = list(room.url_opener(iter([{"url": str(tmp_path / "x.tar"), "more": 1}])))
            assert opened[0]["more"] == 1
            members = [m for m in room.tar_file_expander(iter(opened)) if m]
            opened[0]["stream"].close()
            grouped = list(room.group_by_keys(iter(members), suffixes=suffixes, lcase=lcase))
            runs.append((members, grouped))
        assert runs[0] == runs[1]
    for skip in (r"__[^/]*__($|/)", None):
        listed = [list(w.tariterators.tar_file_iterator(io.BytesIO(data), skip_meta=skip)) for w in BOTH]
        assert listed[0] == listed[1]


def test_the_parts_and_errors(tmp_path: Path) -> None:
    """A handler is asked about a shard that is missing or broken, at the part where that shows."""
    make_shards(tmp_path, 3, 2)
    (tmp_path / "shard-000001.tar").write_bytes(b"no tar at all" * 100)
    urls = [{"url": str(tmp_path / f"shard-{i:06}.tar")} for i in (0, 1, 9, 2)]
    for handler in ("reraise_exception", "ignore_and_continue", "ignore_and_stop"):
        runs = []
        for wds in BOTH:
            room, handle = wds.tariterators, getattr(wds, handler)
            opened = room.url_opener([dict(u) for u in urls], handler=handle)
            members = room.tar_file_expander(opened, handler=handle)
            runs.append(outcome(lambda m=members: (item for item in m if item)))
        agree(*runs)


@pytest.mark.parametrize("name", ["a/b.c/d.e.f", "./a.b", "a", ".b", "a/.b", "a.", "/x/y.z", "a b.c d", "a/b"])
def test_names_and_extensions(name: str) -> None:
    assert ours.tariterators.base_plus_ext(name) == theirs.tariterators.base_plus_ext(name)


@pytest.mark.parametrize("sample", [None, {}, {"a": 1}, {"__bad__": True, "a": 1}, {"__bad__": False, "a": 1}, "x", []])
def test_valid_samples(sample: Any) -> None:
    assert bool(ours.tariterators.valid_sample(sample)) == bool(theirs.tariterators.valid_sample(sample))


def test_keys_of_their_own(tmp_path: Path) -> None:
    """Grouping by a function of the program's own."""
    members = [{"fname": f"{i}-{field}", "data": b"x", "__url__": "u"} for i in range(3) for field in "ab"]
    runs = [list(w.tariterators.group_by_keys(iter(members), keys=lambda name: name.split("-"))) for w in BOTH]
    assert runs[0] == runs[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(runs[0]) == 3
